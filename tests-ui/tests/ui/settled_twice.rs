// Settling takes the delivery by value.
use anymq::prelude::*;

async fn receive(mut consumer: Box<dyn Consumer>) -> anymq::Result<()> {
    while let Some(delivery) = consumer.recv().await? {
        delivery.ack().await;
        delivery.nack("changed my mind").await;
    }
    Ok(())
}

fn main() {
    drop(receive);
}
