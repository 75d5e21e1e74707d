// A batch handler takes a `Batch<..>`.
use anymq::prelude::*;

async fn handle(Json(_number): Json<u64>) {}

fn main() {
    let worker = |broker| Worker::new(broker).batch(Subscription::group("orders", "billing"), 100, handle);
    drop(worker);
}
