//! Consumers that die, and what is blamed for it.

use crate::scene::{SECOND, broker_with, label, recv, trialled};
use mq_api::{BrokerExt, Consumer, ConsumerExt, Message, Result, RetryPolicy, Subscription, Topic};
use mq_memory::{FaultPlan, MemoryBroker, MemoryConfig};
use std::time::Duration;
use tokio::time::{sleep, timeout};

// 4.8
#[tokio::test(start_paused = true)]
async fn a_close_with_a_suspect_in_hand_is_no_death() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::default())?;
    let broker = memory.connect();
    broker.producer("t").await?.send(Message::new("x")).await?;
    for (name, dies) in [("m0", true), ("m1", false), ("m2", false), ("m3", true)] {
        let mut c = broker.subscribe(trialled(name)).await?;
        let held = recv(&mut c).await.expect("comes");
        if dies {
            memory.crash(name);
        } else {
            assert_eq!(c.control().close(Duration::ZERO).await.given_back, 1);
        }
        drop(held);
        sleep(30 * SECOND).await;
    }
    // Once as a neighbour of nobody, once alone: two trials are allowed.
    assert_eq!(broker.admin().dead_letters(&"t".into(), &"g".into(), 9).await?.len(), 0);
    Ok(())
}

// 4.1.5, 4.9
#[tokio::test(start_paused = true)]
async fn what_was_only_buffered_when_its_member_died_was_not_attempted() -> Result<()> {
    for faults in [None, Some(FaultPlan::none())] {
        let memory = broker_with(faults)?;
        let broker = memory.connect();
        let p = broker.producer("t").await?;
        for n in 0..3 {
            p.send(Message::new(format!("m{n}"))).await?;
        }
        let mut c = broker.subscribe(trialled("m")).await?;
        let held = recv(&mut c).await.expect("m0");
        memory.crash("m");
        drop(held);
        let mut other = broker.subscribe(trialled("other")).await?;
        for _ in 0..3 {
            let d = recv(&mut other).await.expect("comes");
            let wanted = if label(&d) == "m0" { 2 } else { 1 };
            assert_eq!((label(&d), d.attempt()), (label(&d), wanted), "{faults:?}");
            d.ack().await;
        }
    }
    Ok(())
}

// 10.1
#[tokio::test(start_paused = true)]
async fn the_same_seed_crashes_the_same_member() -> Result<()> {
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..20 {
        let memory = MemoryBroker::new(MemoryConfig::default().seed(1))?;
        let broker = memory.connect();
        let mut owned = Vec::new();
        let mut keep = Vec::new();
        for t in ["a", "b", "c"] {
            broker.producer(t).await?.send(Message::new("x")).await?;
            let mut c = broker.subscribe(Subscription::group(t, "g").member("m")).await?;
            keep.push((recv(&mut c).await.expect("x"), c));
        }
        memory.crash("m");
        for (d, _) in &keep {
            owned.push(d.is_owned());
        }
        seen.insert(owned);
    }
    assert_eq!(seen.len(), 1, "which of them died, over runs of one seed: {seen:?}");
    Ok(())
}

// 4.8, 5.2
#[tokio::test(start_paused = true)]
async fn a_poison_whose_dead_letter_cannot_be_written_kills_nobody_else() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::default())?;
    let broker = memory.connect();
    broker.producer("t").await?.send(Message::new("poison")).await?;
    let sub = |m: &str| Subscription::group("t", "g").member(m).lease(5 * SECOND).retry(RetryPolicy::attempts(1));
    let mut deaths = 0;
    for life in 0..8 {
        let name = format!("m{life}");
        let mut c = broker.subscribe(sub(&name)).await?;
        memory.refuse_writes(&Topic::dead_letters("t", "g"), true);
        if let Ok(held) = timeout(20 * SECOND, c.recv()).await {
            deaths += 1;
            memory.crash(&name);
            drop(held);
            sleep(30 * SECOND).await;
        }
    }
    assert!(deaths <= 3, "{deaths} consumers died; one before the suspicion and two trials are allowed");
    Ok(())
}
