//! Closing in time, whoever else closes.

use crate::scene::{SECOND, broker_with, recv};
use mq_api::{BrokerExt, Consumer, ConsumerExt, Message, Result, Subscription};
use mq_memory::{FaultPlan, MemoryBroker, MemoryConfig, Profile, connect};
use std::time::Duration;
use tokio::time::{Instant, timeout};

// 6.4
#[tokio::test(start_paused = true)]
async fn a_close_is_bounded_by_its_own_deadline() -> Result<()> {
    let broker = connect("memory://b11").await?;
    let p = broker.producer("t").await?;
    let mut c = broker.subscribe(Subscription::group("t", "g")).await?;
    p.send(Message::new("x")).await?;
    let _held = recv(&mut c).await.expect("x");
    drop(c.control().close(3600 * SECOND));
    let start = Instant::now();
    broker.close(SECOND).await;
    assert!(start.elapsed() < 10 * SECOND, "close(1 s) took {:?}", start.elapsed());
    Ok(())
}

// 6.4
#[tokio::test(start_paused = true)]
async fn a_close_that_is_called_again_reports_the_same() -> Result<()> {
    for faults in [None, Some(FaultPlan::none())] {
        let broker = broker_with(faults)?.connect();
        broker.producer("t").await?.send(Message::new("x")).await?;
        let mut c = broker.subscribe(Subscription::group("t", "g")).await?;
        let _held = c.recv().await?.expect("x");
        assert!(timeout(SECOND, broker.close(10 * SECOND)).await.is_err());
        let report = broker.close(10 * SECOND).await;
        assert_eq!((report.given_back, report.abandoned), (1, 0), "{report:?} {faults:?}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn two_closes_at_once_report_the_same() -> Result<()> {
    for faults in [None, Some(FaultPlan::none())] {
        let broker = broker_with(faults)?.connect();
        broker.producer("t").await?.send(Message::new("x")).await?;
        let mut c = broker.subscribe(Subscription::group("t", "g")).await?;
        let _held = c.recv().await?.expect("x");
        let (a, b) = tokio::join!(broker.close(10 * SECOND), broker.close(10 * SECOND));
        assert_eq!(a, b, "{faults:?}");
    }
    Ok(())
}

// 6.4
#[tokio::test(start_paused = true)]
async fn a_close_is_bounded_with_several_producers_while_the_broker_is_away() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::default())?;
    let (broker, link) = memory.connect_linked();
    let mut sends = Vec::new();
    for t in ["a", "b", "c", "d"] {
        let p = broker.producer(t).await?;
        link.reachable(false);
        drop(p.send(Message::new("x")));
        link.reachable(true);
        sends.push(p);
    }
    link.reachable(false);
    for p in &sends {
        drop(p.send(Message::new("y")));
    }
    let start = Instant::now();
    let report = broker.close(10 * SECOND).await;
    assert!(start.elapsed() < 15 * SECOND, "close(10 s) took {:?}: {report:?}", start.elapsed());
    Ok(())
}

// 6.4: dropped consumer
#[tokio::test(start_paused = true)]
async fn a_close_of_the_broker_does_not_wait_for_what_a_dropped_consumer_left() -> Result<()> {
    let broker = connect("memory://c5").await?;
    broker.producer("t").await?.send(Message::new("x")).await?;
    let mut c = broker.subscribe(Subscription::group("t", "g")).await?;
    let _held = c.recv().await?.expect("x");
    drop(c);
    let start = Instant::now();
    broker.close(Duration::ZERO).await;
    assert!(start.elapsed() < 2 * SECOND, "close(0) took {:?}", start.elapsed());
    Ok(())
}

// 2.2, 6.6
#[tokio::test(start_paused = true)]
async fn a_broadcast_consumer_that_closed_while_away_is_gone() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::profile(Profile::RedisPubSub))?;
    let (broker, link) = memory.connect_linked();
    let c = broker.subscribe(Subscription::broadcast("t")).await?;
    let control = c.control();
    link.reachable(false);
    control.close(Duration::ZERO).await;
    drop(c);
    link.reachable(true);
    let receipt = memory.connect().producer("t").await?.send(Message::new("x")).await?;
    assert_eq!(receipt.receivers, Some(0));
    Ok(())
}
