// A topic alone does not say as whom to receive.
use anymq::prelude::*;

async fn handle(Payload(_bytes): Payload) {}

fn main() {
    let worker = |broker| Worker::new(broker).route("orders", handle);
    drop(worker);
}
