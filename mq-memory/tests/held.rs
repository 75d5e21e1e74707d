//! How long something is in hand, and whose hands it is in.

#![allow(clippy::expect_used)]

use mq_api::{BrokerExt, ConsumerExt, Message, Result, Settled, Subscription};
use mq_memory::{MemoryBroker, MemoryConfig, connect};
use std::time::Duration;
use tokio::time::{Instant, sleep};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// Never early, and late by one in a hundred or ten milliseconds, whichever is more: from a clock that rests, and from one
/// that ticks for another delivery.
#[tokio::test(start_paused = true)]
async fn max_processing_ends_when_it_says() -> Result<()> {
    for limit in [50 * MS, 300 * MS, 2 * SECOND, 60 * SECOND, 1500 * SECOND] {
        let broker = connect(&format!("memory://limit-{}", limit.as_millis())).await?;
        let producer = broker.producer("t").await?;
        let mut consumer = broker.subscribe(Subscription::group("t", "g").max_processing(limit)).await?;
        sleep(7 * limit / 3).await;
        let mut ends = Vec::new();
        for part in 0..5u32 {
            producer.send(Message::new("x")).await?;
            let delivery = consumer.recv().await?.expect("open");
            let start = Instant::now();
            ends.push(tokio::spawn(async move {
                delivery.lost().await;
                let held = start.elapsed();
                assert!(!delivery.is_owned());
                (held, delivery.ack().await)
            }));
            sleep(limit * part / 7).await;
        }
        for end in ends {
            let (held, late) = end.await.expect("no panic");
            assert!(held >= limit, "{held:?} is before {limit:?}");
            assert!(held <= limit + (limit / 100).max(10 * MS), "{held:?} is long after {limit:?}");
            assert_eq!(late, Settled::Stale);
        }
    }
    Ok(())
}

/// The runtime stands still, and with it the broker's clock.
#[tokio::test]
async fn a_blocked_runtime_takes_nothing_from_the_next_delivery() -> Result<()> {
    let limit = SECOND;
    let broker = connect("memory://stall").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(Subscription::group("t", "g").max_processing(limit)).await?;
    for _ in 0..2 {
        producer.send(Message::new("x")).await?;
    }
    let first = consumer.recv().await?.expect("open");
    std::thread::sleep(limit * 2);
    drop(first.ack());
    let second = consumer.recv().await?.expect("open");
    let start = Instant::now();
    second.lost().await;
    assert!(start.elapsed() >= limit, "timed out after {:?} in hand", start.elapsed());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn idle_is_the_time_in_hand() -> Result<()> {
    let broker = connect("memory://idle").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await?;
    producer.send(Message::new("x")).await?;
    sleep(59 * SECOND).await;
    let held = consumer.recv().await?.expect("open");
    let idle = async || -> Result<Duration> { Ok(broker.admin().pending(&"t".into(), &"g".into(), 1).await?[0].idle) };
    assert_eq!(idle().await?, Duration::ZERO);
    sleep(5 * SECOND).await;
    assert_eq!(idle().await?, 5 * SECOND);
    held.nack_after(60 * SECOND, "later").await;
    sleep(2 * SECOND).await;
    assert_eq!(idle().await?, 2 * SECOND, "since it was put aside");
    Ok(())
}

/// However often it was handed over since.
#[tokio::test(start_paused = true)]
async fn a_stale_handle_does_not_touch_a_later_hand_over() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::default())?;
    let broker = memory.connect();
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(Subscription::group("t", "g").member("m")).await?;
    producer.send(Message::new("x")).await?;
    let mut stale = vec![consumer.recv().await?.expect("open")];
    memory.lose_leases("m");
    for n in 1..5000 {
        let held = consumer.recv().await?.expect("open");
        match n {
            1 => {
                memory.lose_leases("m");
                stale.push(held);
            }
            _ => drop(held.release().await),
        }
    }
    let held = consumer.recv().await?.expect("open");
    let mut each = stale.into_iter();
    let mut next = || each.next().expect("two");
    assert_eq!(next().dead_letter("stale").await, Settled::Stale);
    assert_eq!(next().ack().await, Settled::Stale);
    assert!(held.is_owned());
    assert!(held.ack().await.is_ok());
    Ok(())
}
