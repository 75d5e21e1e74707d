// A worker does nothing until it is run.
#![deny(unused_must_use)]
use anymq::prelude::*;
use std::sync::Arc;

async fn handle(Payload(_bytes): Payload) {}

fn start(broker: Arc<dyn Broker>) {
    Worker::new(broker).route(Subscription::group("orders", "billing"), handle);
}

fn main() {
    let _ = start;
}
