// What is needed afterwards is taken before the ack.
use anymq::prelude::*;

async fn receive(mut consumer: Box<dyn Consumer>) -> anymq::Result<()> {
    while let Some(delivery) = consumer.recv().await? {
        delivery.ack().await;
        println!("{:?}", delivery.key);
    }
    Ok(())
}

fn main() {
    drop(receive);
}
