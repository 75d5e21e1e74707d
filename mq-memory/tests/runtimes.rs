//! A broker that is used in several runtimes, of which some end, or rest.

#![allow(clippy::expect_used)]

use mq_api::{Broker, BrokerExt, ConsumerExt, Message, Result, Subscription};
use mq_memory::{MemoryBroker, MemoryConfig, connect};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};

const SECOND: Duration = Duration::from_secs(1);
/// Long after anything here is due, and for machines that are slow.
const PATIENCE: Duration = Duration::from_secs(30);

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// A retry comes when it is due.
async fn a_delay_ends(broker: &Arc<dyn Broker>) -> Result<()> {
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await?;
    producer.send(Message::new("x")).await?;
    consumer.recv().await?.expect("open").nack_after(SECOND / 10, "later").await;
    let again = tokio::time::timeout(PATIENCE, consumer.recv()).await;
    let again = again.expect("the broker's clock stands still")?.expect("open");
    assert_eq!(again.attempt(), 2);
    again.ack().await;
    consumer.control().close(SECOND).await;
    Ok(())
}

#[test]
fn the_clock_outlives_the_runtime_of_the_first_client() -> Result<()> {
    let (first, second) = (runtime(), runtime());
    let a = first.block_on(connect("memory://outlives"))?;
    let b = second.block_on(connect("memory://outlives"))?;
    first.block_on(a.close(SECOND));
    drop(first);
    second.block_on(a_delay_ends(&b))
}

#[test]
fn the_clock_goes_on_while_the_runtime_of_the_first_client_rests() -> Result<()> {
    let (first, second) = (runtime(), runtime());
    let _a = first.block_on(connect("memory://rests"))?;
    let b = second.block_on(connect("memory://rests"))?;
    second.block_on(a_delay_ends(&b))
}

/// As a connection that tests share, each in a runtime of its own.
#[test]
fn a_client_goes_on_in_another_runtime_than_it_was_made_in() -> Result<()> {
    let first = runtime();
    let broker = first.block_on(connect("memory://moves"))?;
    drop(first);
    for _ in 0..2 {
        runtime().block_on(a_delay_ends(&broker))?;
    }
    let second = runtime();
    let report = second.block_on(broker.close(SECOND));
    assert!(report.is_clean(), "{report:?}");
    Ok(())
}

#[test]
fn what_a_consumer_held_goes_back_when_its_runtime_ends_first() -> Result<()> {
    let (first, second) = (runtime(), runtime());
    let broker = second.block_on(connect("memory://ends"))?;
    let producer = second.block_on(broker.producer("t"))?;
    let mut consumer = first.block_on(broker.subscribe(Subscription::group("t", "g")))?;
    second.block_on(async { producer.send(Message::new("x")).await })?;
    let held = first.block_on(consumer.recv())?.expect("open");
    // Its close waits for what is in hand, and then there is nothing that it could wait in.
    first.block_on(async { drop(consumer) });
    drop(first);
    second.block_on(async {
        let mut other = broker.subscribe(Subscription::group("t", "g")).await?;
        let again = tokio::time::timeout(PATIENCE, other.recv()).await;
        let again = again.expect("it went back")?.expect("open");
        assert_eq!((again.attempt(), held.is_owned()), (1, false));
        Ok(())
    })
}

#[test]
fn a_close_ends_though_the_runtime_of_the_client_rests() -> Result<()> {
    let (first, second) = (runtime(), runtime());
    let broker = first.block_on(connect("memory://idle"))?;
    let start = Instant::now();
    let report = second.block_on(async { tokio::time::timeout(PATIENCE, broker.close(SECOND)).await });
    let report = report.expect("close hangs past its deadline");
    assert!(start.elapsed() < PATIENCE / 2);
    assert_eq!(report.abandoned, 1, "the task that keeps the time there: {report:?}");
    Ok(())
}

struct Counted(Arc<AtomicUsize>);

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        b"x"
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn a_member_that_died_does_not_keep_a_broker_that_nobody_reaches() -> Result<()> {
    let dropped = Arc::new(AtomicUsize::new(0));
    {
        let memory = MemoryBroker::new(MemoryConfig::default())?;
        let broker = memory.connect();
        let producer = broker.producer("t").await?;
        let mut consumer = broker.subscribe(Subscription::group("t", "g").member("m")).await?;
        for _ in 0..5 {
            producer.send(Message::new(bytes::Bytes::from_owner(Counted(dropped.clone())))).await?;
        }
        let held = consumer.recv().await?.expect("open");
        memory.crash("m");
        drop(held);
        broker.close(SECOND).await;
    }
    assert_eq!(dropped.load(Ordering::SeqCst), 5, "messages that are let go of");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn what_a_member_that_died_held_comes_free_though_its_client_is_gone() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::default())?;
    {
        let broker = memory.connect();
        broker.producer("t").await?.send(Message::new("x")).await?;
        let mut consumer = broker.subscribe(Subscription::group("t", "g").member("m")).await?;
        let held = consumer.recv().await?.expect("open");
        memory.crash("m");
        drop(held);
        broker.close(SECOND).await;
    }
    let broker = memory.connect();
    let mut other = broker.subscribe(Subscription::group("t", "g")).await?;
    let again = tokio::time::timeout(10 * PATIENCE, other.recv()).await.expect("its lease ended")?.expect("open");
    assert_eq!(again.attempt(), 2);
    Ok(())
}
