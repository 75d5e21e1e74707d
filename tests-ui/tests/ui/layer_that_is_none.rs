// A time limit is not a layer.
use anymq::prelude::*;
use std::time::Duration;

async fn handle(Payload(_bytes): Payload) {}

fn main() {
    let worker = |broker| {
        Worker::new(broker).route(Subscription::group("orders", "billing"), handle).layer(Duration::from_secs(1))
    };
    drop(worker);
}
