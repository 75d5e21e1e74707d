//! Prints what `status_publisher` says, from now on, until Ctrl-C. Start several: each sees every message.
//!
//!     MQ_URL=redis+pubsub://localhost cargo run --example status_subscriber --features redis

use anymq::Event;
use anymq::prelude::*;
use anymq::worker::shutdown_signal;
use std::time::Duration;

#[tokio::main]
async fn main() -> Result<(), anymq::BoxError> {
    let url = std::env::var("MQ_URL")
        .map_err(|_| "set MQ_URL to a broker that other programs can reach, like redis://localhost")?;
    let broker = anymq::connect(&url).await?;
    let mut status = broker.subscribe(Subscription::broadcast("status")).await?;
    let mut events = status.control().events();
    println!("listening");
    loop {
        tokio::select! {
            biased;
            _ = shutdown_signal() => break,
            // A broadcast is at most once: what was missed is told, not repeated.
            Some(event) = events.next() => match event {
                Event::Lagged(n) => println!("fell behind: {n} dropped"),
                other => println!("{other:?}"),
            },
            message = status.recv() => match message? {
                None => break,
                Some(message) => {
                    println!("received {} {}", message.id, String::from_utf8_lossy(message.payload_bytes()));
                    message.ack().await;
                }
            },
        }
    }
    broker.close(Duration::from_secs(5)).await;
    Ok(())
}
