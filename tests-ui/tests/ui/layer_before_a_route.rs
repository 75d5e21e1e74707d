// A layer wraps the routes before it; here there is none.
use anymq::prelude::*;
use std::time::Duration;

fn main() {
    let worker = |broker| Worker::new(broker).layer(TimeoutLayer::new(Duration::from_secs(1)));
    drop(worker);
}
