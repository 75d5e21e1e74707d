//! Tells everyone who listens how it is: a message every 3 s to the topic `status`, until Ctrl-C.
//!
//!     MQ_URL=redis+pubsub://localhost cargo run --example status_publisher --features redis
//!
//! `--every MS` and `--count N` change the pace and end it.

use anymq::prelude::*;
use anymq::{ErrorKind, worker::shutdown_signal};
use serde_json::json;
use std::time::Duration;

#[tokio::main]
async fn main() -> Result<(), anymq::BoxError> {
    let (mut every, mut count) = (3000, u64::MAX);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(|| format!("{flag} needs a value"))?.parse()?;
        match flag.as_str() {
            "--every" => every = value,
            "--count" => count = value,
            _ => return Err(format!("{flag} is unknown; status_publisher --every MS --count N").into()),
        }
    }
    let url = std::env::var("MQ_URL")
        .map_err(|_| "set MQ_URL to a broker that other programs can reach, like redis://localhost")?;
    let broker = anymq::connect(&url).await?;
    let status = broker.producer("status").await?;
    let mut clock = tokio::time::interval(Duration::from_millis(every));
    for n in 1..=count {
        tokio::select! {
            biased;
            _ = shutdown_signal() => break,
            _ = clock.tick() => {}
        }
        let message = Message::json(&json!({ "status": "fine", "number": n }))?.id(format!("status-{n}").as_str());
        match status.send(message).await {
            Ok(receipt) => println!(
                "sent status-{n} to {} subscribers",
                receipt.receivers.map_or("?".to_owned(), |n| n.to_string())
            ),
            // RabbitMQ says when nobody listens. That is no reason to stop.
            Err(error) if error.kind() == ErrorKind::Unroutable => println!("sent status-{n}, nobody listens"),
            Err(error) => eprintln!("status-{n}: {error}"),
        }
    }
    broker.close(Duration::from_secs(5)).await;
    Ok(())
}
