//! Sends numbered tasks: `publisher [COUNT]`, 1000 by default, to the topic `tasks`.
//!
//!     MQ_URL=redis://localhost cargo run --example publisher --features redis -- 1000

use anymq::prelude::*;
use serde_json::json;

#[tokio::main]
async fn main() -> Result<(), anymq::BoxError> {
    let url = std::env::var("MQ_URL")
        .map_err(|_| "set MQ_URL to a broker that other programs can reach, like redis://localhost")?;
    let count: u32 = std::env::args().nth(1).map_or(Ok(1000), |n| n.parse())?;
    let broker = anymq::connect(&url).await?;
    // The workers' group exists before the first send, so nothing is missed on brokers that keep messages for groups only.
    let producer = broker.producer(ProducerSpec::new("tasks").group("workers")).await?;

    let messages =
        (1..=count).map(|n| Message::json(&json!({ "task": n })).map(|m| m.id(format!("task-{n}").as_str())));
    let results = producer.send_all(messages.collect::<Result<_, _>>()?).await;
    let confirmed = results.iter().filter(|r| r.is_ok()).count();
    for error in results.into_iter().filter_map(Result::err) {
        eprintln!("not confirmed: {error}");
    }
    println!("{confirmed} of {count} tasks are with the broker");
    broker.close(std::time::Duration::from_secs(5)).await;
    if confirmed == count as usize { Ok(()) } else { Err("some tasks were not confirmed".into()) }
}
