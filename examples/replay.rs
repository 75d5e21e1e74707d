//! Rebuilds account balances from the log: from its beginning, and from a point in time.
//!
//!     cargo run --example replay
//!
//! A replay is a new group that starts where it is told. Brokers without history refuse, by name.

use anymq::prelude::*;
use anymq::{BoxError, Retention};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

#[derive(Serialize, Deserialize)]
struct Movement {
    account: String,
    cents: i64,
}

type Balances = BTreeMap<String, i64>;

/// The balances that `count` movements from `start` on come to.
async fn rebuild(broker: &Arc<dyn Broker>, group: &str, start: ReplayFrom, count: usize) -> Result<Balances, BoxError> {
    let subscription = Subscription::group("movements", group).start(Start::Replay(start)).retention(log());
    let mut movements = broker.subscribe(subscription).await?.json::<Movement>();
    let mut balances = Balances::new();
    for _ in 0..count {
        let Some(movement) = movements.recv().await? else { break };
        *balances.entry(movement.value().account.clone()).or_default() += movement.value().cents;
        movement.ack().await;
    }
    movements.control().close(Duration::from_secs(5)).await;
    Ok(balances)
}

/// A log keeps what was handled, which is what a replay needs.
fn log() -> Retention {
    Retention::log(100_000)
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let broker = anymq::connect(std::env::var("MQ_URL").unwrap_or_else(|_| "memory://".to_owned())).await?;
    let movements = broker.producer(ProducerSpec::new("movements").retention(log())).await?.json::<Movement>();
    let (mut all, mut late) = (Balances::new(), Balances::new());
    let mut noon = SystemTime::now();
    for n in 0..200i64 {
        if n == 120 {
            // Brokers keep times to the millisecond: the next movement is stored clearly after noon.
            tokio::time::sleep(Duration::from_millis(20)).await;
            noon = SystemTime::now();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let movement = Movement { account: format!("account-{}", n % 5), cents: n * 7 % 100 - 40 };
        movements.send(&movement).await?;
        *all.entry(movement.account.clone()).or_default() += movement.cents;
        if n >= 120 {
            *late.entry(movement.account).or_default() += movement.cents;
        }
    }

    let run = std::process::id();
    let from_earliest = rebuild(&broker, &format!("earliest-{run}"), ReplayFrom::Earliest, 200).await?;
    println!("from the beginning: {from_earliest:?}");
    let from_noon = rebuild(&broker, &format!("noon-{run}"), ReplayFrom::Time(noon), 80).await?;
    println!("since noon:         {from_noon:?}");
    broker.close(Duration::from_secs(5)).await;
    if (from_earliest, from_noon) == (all, late) {
        println!("both agree with what was sent");
        Ok(())
    } else {
        Err("the balances differ from what was sent".into())
    }
}
