//! A rough broker: nothing that was confirmed is lost, and the same seed gives the same run.

#![allow(clippy::expect_used)]

use mq_api::{BrokerExt, ConsumerExt, Message, Result, RetryPolicy, Subscription};
use mq_memory::{FaultPlan, MemoryBroker, MemoryConfig};
use std::collections::BTreeSet;
use std::time::Duration;

async fn run(seed: u64) -> Result<(u64, BTreeSet<String>, BTreeSet<String>)> {
    let config = MemoryConfig::recording().seed(seed).faults(FaultPlan::rough());
    let memory = MemoryBroker::new(config)?;
    let client = memory.connect();
    let orders = client.producer("orders").await?;
    let retry = RetryPolicy::attempts(100).delays([Duration::from_millis(50)]);
    let sub = || Subscription::group("orders", "billing").retry(retry.clone()).max_in_flight(16);
    let mut a = client.subscribe(sub()).await?;
    let mut b = client.subscribe(sub()).await?;
    let mut confirmed = BTreeSet::new();
    for i in 0..100 {
        if orders.send(Message::new(i.to_string())).await.is_ok() {
            confirmed.insert(i.to_string());
        }
    }
    let mut handled = BTreeSet::new();
    let mut n = 0u32;
    loop {
        let next = tokio::select! { biased;
            d = a.recv() => d?,
            d = b.recv() => d?,
            () = tokio::time::sleep(Duration::from_secs(300)) => break,
        };
        let delivery = next.expect("open");
        let text = String::from_utf8_lossy(delivery.payload_bytes()).into_owned();
        n += 1;
        match n % 7 {
            0 => drop(delivery.nack("now and then")),
            1 => drop(delivery),
            _ => {
                handled.insert(text);
                delivery.ack().await;
            }
        }
    }
    assert_eq!(memory.open_work(), 0, "seed {seed}");
    client.close(Duration::from_secs(5)).await;
    assert_eq!(memory.tasks(), 0, "seed {seed}");
    Ok((memory.trace().expect("records").hash(), confirmed, handled))
}

#[tokio::test(start_paused = true)]
async fn confirmed_messages_survive_a_rough_broker() -> Result<()> {
    for seed in 1..=50 {
        let (_, confirmed, handled) = run(seed).await?;
        let lost: Vec<_> = confirmed.difference(&handled).collect();
        assert!(lost.is_empty(), "seed {seed} lost {lost:?}");
    }
    Ok(())
}

#[test]
fn the_same_seed_gives_the_same_run() -> Result<()> {
    let once = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("runtime").block_on(run(7))
    };
    let (a, b) = (once()?, once()?);
    assert_eq!(a, b);
    Ok(())
}
