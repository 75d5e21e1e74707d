// One result for each message, or one for all.
use anymq::prelude::*;

async fn handle(numbers: Batch<Json<u64>>) -> usize {
    numbers.len()
}

fn main() {
    let worker = |broker| Worker::new(broker).batch(Subscription::group("orders", "billing"), 100, handle);
    drop(worker);
}
