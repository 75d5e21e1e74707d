// A plain function is no handler.
use anymq::prelude::*;

fn handle(Payload(bytes): Payload) {
    drop(bytes);
}

fn main() {
    let worker = |broker| Worker::new(broker).route(Subscription::group("orders", "billing"), handle);
    drop(worker);
}
