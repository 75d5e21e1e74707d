//! Works on tasks until Ctrl-C: `worker --name N --group G`. Start several: members of one group share the tasks.
//!
//!     MQ_URL=redis://localhost cargo run --example worker --features redis -- --name anna --group workers
//!
//! Prints one line for each task, `NAME handled ID attempt N`, before it acknowledges.

use anymq::prelude::*;
use std::time::Duration;

async fn work(id: MessageId, Attempt(attempt): Attempt, State(name): State<String>) {
    tokio::time::sleep(Duration::from_millis(2)).await;
    println!("{name} handled {id} attempt {attempt}");
}

#[tokio::main]
async fn main() -> Result<(), anymq::BoxError> {
    let (mut name, mut group) = ("worker".to_owned(), "workers".to_owned());
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--name" => name = value,
            "--group" => group = value,
            _ => return Err(format!("{flag} is unknown; worker --name NAME --group GROUP").into()),
        }
    }
    let url = std::env::var("MQ_URL")
        .map_err(|_| "set MQ_URL to a broker that other programs can reach, like redis://localhost")?;
    let broker = anymq::connect(&url).await?;
    // Few in flight, so that a second worker finds something to do; a short lease, so that it soon takes over what a killed
    // one held.
    let tasks = Subscription::group("tasks", group)
        .member(&name)
        .concurrency(4)
        .max_in_flight(16)
        .lease(Duration::from_secs(5));
    let worker = Worker::new(broker.clone()).state(name.clone()).route(tasks, work);
    let handle = worker.handle();
    let hello = async {
        if handle.running().await {
            println!("{name} is ready");
        }
        std::future::pending::<()>().await
    };
    let report = tokio::select! {
        biased;
        report = worker.run_until_signal() => report?,
        () = hello => return Ok(()),
    };
    println!("{name} ended: {} handled", report.acked);
    broker.close(Duration::from_secs(5)).await;
    Ok(())
}
