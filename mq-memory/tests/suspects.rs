//! A message that is suspected of killing its consumers goes out alone, and still goes out.

#![allow(clippy::expect_used)]

use mq_api::{BrokerExt, Consumer, ConsumerExt, Delivery, Message, Producer, Result, RetryPolicy, Subscription};
use mq_memory::{MemoryBroker, MemoryConfig};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

/// After one death a message is a suspect.
fn workers(member: &str) -> Subscription {
    let retry = RetryPolicy::attempts(1).delays([SECOND]);
    Subscription::group("t", "g").member(member).lease(5 * SECOND).retry(retry)
}

fn label(delivery: &Delivery) -> String {
    String::from_utf8_lossy(delivery.payload_bytes()).into_owned()
}

async fn send(producer: &Arc<dyn Producer>, key: &str, label: &str) -> Result<()> {
    producer.send(Message::new(label.to_owned()).key(key.to_owned())).await.map(drop)
}

/// A key of each of two partitions, found by sending.
async fn keys(producer: &Arc<dyn Producer>, consumers: &mut [&mut Box<dyn Consumer>]) -> Result<[String; 2]> {
    let mut keys: [Option<String>; 2] = [None, None];
    for n in 0.. {
        if let [Some(first), Some(second)] = &keys {
            return Ok([first.clone(), second.clone()]);
        }
        let key = format!("k{n}");
        let partition = producer.send(Message::new("find").key(key.clone())).await?.partition.expect("stated");
        for consumer in consumers.iter_mut() {
            if let Ok(found) = tokio::time::timeout(Duration::from_millis(1), consumer.recv()).await {
                found?.expect("open").ack().await;
            }
        }
        keys[partition as usize] = Some(key);
    }
    unreachable!("keys are spread")
}

/// With two of another partition in hand at any time.
#[tokio::test(start_paused = true)]
async fn one_beside_a_busy_partition_is_handed_over_alone() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::default().partitions(2))?;
    let broker = memory.connect();
    let producer = broker.producer("t").await?;
    let mut first = broker.subscribe(workers("m1")).await?;
    let mut second = broker.subscribe(workers("m2")).await?;
    let keys = keys(&producer, &mut [&mut first, &mut second]).await?;
    for key in &keys {
        send(&producer, key, "suspect").await?;
    }
    let (mine, its) = (first.recv().await?.expect("open"), second.recv().await?.expect("open"));
    let busy = &keys[mine.partition().expect("stated") as usize];
    mine.ack().await;
    memory.crash("m2");
    drop(its);
    send(&producer, busy, "busy").await?;
    let mut held: VecDeque<Delivery> = VecDeque::new();
    let start = tokio::time::Instant::now();
    loop {
        assert!(start.elapsed() < 600 * SECOND, "starved for ten minutes");
        send(&producer, busy, "busy").await?;
        let Ok(next) = tokio::time::timeout(SECOND, first.recv()).await else {
            // It waits until nothing is in hand.
            for delivery in held.drain(..) {
                delivery.ack().await;
            }
            continue;
        };
        let next = next?.expect("open");
        if label(&next) == "suspect" {
            assert!(held.is_empty(), "{} beside it", held.len());
            next.ack().await;
            break;
        }
        held.push_back(next);
        if held.len() > 2 {
            held.pop_front().expect("there").ack().await;
        }
        tokio::time::sleep(SECOND / 20).await;
    }
    let next = first.recv().await?.expect("open");
    assert_eq!(label(&next), "busy", "and then the others");
    Ok(())
}

/// Two members of one partition: the one that drains for a suspect goes on when the other has taken it.
#[tokio::test(start_paused = true)]
async fn a_member_does_not_wait_for_a_suspect_that_another_took() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::default())?;
    let broker = memory.connect();
    let producer = broker.producer("t").await?;
    let mut first = broker.subscribe(workers("m1")).await?;
    send(&producer, "k", "slow").await?;
    let slow = first.recv().await?.expect("open");
    let mut second = broker.subscribe(workers("m2")).await?;
    send(&producer, "k", "suspect").await?;
    let old = second.recv().await?.expect("open");
    memory.lose_leases("m2");
    drop(old);
    send(&producer, "k", "next").await?;
    let waiting = tokio::spawn(async move { first.recv().await.map(|next| next.map(|d| label(&d))) });
    tokio::time::sleep(SECOND).await;
    assert!(!waiting.is_finished(), "the suspect goes first, and this one has something in hand");
    let suspect = second.recv().await?.expect("open");
    assert_eq!(label(&suspect), "suspect");
    assert_eq!(waiting.await.expect("no panic")?.as_deref(), Some("next"));
    slow.ack().await;
    suspect.ack().await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_suspect_whose_group_was_deleted_holds_nothing_up() -> Result<()> {
    for nacked in [false, true] {
        let memory = MemoryBroker::new(MemoryConfig::default())?;
        let broker = memory.connect();
        let producer = broker.producer("t").await?;
        let mut consumer = broker.subscribe(workers("m")).await?;
        send(&producer, "k", "suspect").await?;
        let old = consumer.recv().await?.expect("open");
        memory.lose_leases("m");
        drop(old);
        let suspect = consumer.recv().await?.expect("open");
        broker.admin().delete_group(&"t".into(), &"g".into()).await?;
        match nacked {
            true => suspect.nack("x").await,
            false => suspect.ack().await,
        };
        send(&producer, "k", "next").await?;
        let next = tokio::time::timeout(1000 * SECOND, consumer.recv()).await;
        assert!(next.is_ok(), "nothing goes out after the suspect; nacked: {nacked}");
    }
    Ok(())
}
