// A settlement is no `Result`: a stale ack is normal and must not end the loop.
use anymq::prelude::*;

async fn receive(mut consumer: Box<dyn Consumer>) -> anymq::Result<()> {
    while let Some(delivery) = consumer.recv().await? {
        delivery.ack().await?;
    }
    Ok(())
}

fn main() {
    drop(receive);
}
