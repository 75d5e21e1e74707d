// The same mistake at the route: the note says how to find the culprit.
use anymq::prelude::*;

async fn handle(text: String) {
    drop(text);
}

fn main() {
    let worker = |broker| Worker::new(broker).route(Subscription::group("orders", "billing"), handle);
    drop(worker);
}
