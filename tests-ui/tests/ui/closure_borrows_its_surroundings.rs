// A handler outlives the function that made it: `move`, and share by `Arc` or `State`.
use anymq::prelude::*;
use std::sync::Arc;

async fn start(broker: Arc<dyn Broker>) -> anymq::Result<()> {
    let prefix = String::from("order");
    let handle = |Payload(bytes): Payload| async {
        println!("{prefix} {}", bytes.len());
    };
    Worker::new(broker).route(Subscription::group("orders", "billing"), handle).run().await?;
    Ok(())
}

fn main() {
    let _ = start;
}
