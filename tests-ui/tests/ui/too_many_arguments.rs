// Nine arguments; take several at once as a tuple.
use anymq::prelude::*;

#[allow(clippy::too_many_arguments)]
async fn handle(_: Key, _: Key, _: Key, _: Key, _: Key, _: Key, _: Key, _: Key, _: Key) {}

fn main() {
    let worker = |broker| Worker::new(broker).route(Subscription::group("orders", "billing"), handle);
    drop(worker);
}
