//! What a partition keeps, and who gets the next message: handled messages give way to what comes, a log drops its oldest, and
//! partitions take turns.

#![allow(clippy::expect_used)]

use mq_api::{BrokerExt, ConsumerExt, ErrorKind, Message, Result, Retention, Start, Subscription};
use mq_memory::connect;

/// 100 messages of 1,000 bytes through room for 10: what was handled is history, and history is no reason to refuse.
#[tokio::test]
async fn history_gives_way_to_what_comes() -> Result<()> {
    let broker = connect("memory://gives-way?capacity_bytes=10500").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await?;
    for _ in 0..100 {
        producer.send(Message::new(vec![0u8; 1000])).await?;
        drop(consumer.recv().await?.expect("open").ack());
    }
    for _ in 0..10 {
        producer.send(Message::new(vec![0u8; 1000])).await?;
    }
    let refused = producer.send(Message::new(vec![0u8; 1000])).await.expect_err("ten wait unhandled");
    assert_eq!(refused.kind(), ErrorKind::Full);
    drop(consumer.recv().await?.expect("open").ack());
    producer.send(Message::new(vec![0u8; 1000])).await?;
    Ok(())
}

/// The same by count, in one batch.
#[tokio::test]
async fn a_batch_fills_a_partition_to_the_last_place() -> Result<()> {
    let broker = connect("memory://fills?capacity=10").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await?;
    for _ in 0..3 {
        let mut batch = mq_api::Batch::new();
        batch.messages.extend((0..11).map(|_| Message::new("x")));
        let batch = producer.send_batch(batch).await;
        assert_eq!(batch.confirmed(), 10, "ten have room, one has not");
        for _ in 0..10 {
            drop(consumer.recv().await?.expect("open").ack());
        }
    }
    Ok(())
}

/// Handled messages are there for a replay, at least as many as `history` says, and not without end.
#[tokio::test]
async fn history_keeps_what_it_says_and_little_more() -> Result<()> {
    let broker = connect("memory://history?history=10").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await?;
    for i in 0..100 {
        producer.send(Message::new(i.to_string())).await?;
        drop(consumer.recv().await?.expect("open").ack());
    }
    let again = Subscription::group("t", "again").start(Start::Replay(mq_api::ReplayFrom::Earliest));
    let mut again = broker.subscribe(again).await?;
    let first = again.recv().await?.expect("open");
    let first: u32 = String::from_utf8_lossy(first.payload_bytes()).parse().expect("a number");
    assert!((80..=90).contains(&first), "10 to 20 of 100 are left, the first is {first}");
    Ok(())
}

/// A log takes any number and keeps the newest.
#[tokio::test]
async fn a_log_drops_its_oldest() -> Result<()> {
    let broker = connect("memory://log").await?;
    let log = Retention::log(10);
    let producer = broker.open_producer(mq_api::ProducerSpec::new("t").retention(log)).await?;
    for i in 0..100 {
        producer.send(Message::new(i.to_string())).await?;
    }
    let mut consumer = broker.subscribe(Subscription::group("t", "g").retention(log)).await?;
    for i in 90..100 {
        let delivery = consumer.recv().await?.expect("open");
        assert_eq!(delivery.payload_bytes(), i.to_string().as_bytes());
        drop(delivery.ack());
    }
    Ok(())
}

/// One by one, no partition waits until another is empty.
#[tokio::test]
async fn partitions_take_turns() -> Result<()> {
    let broker = connect("memory://turns?partitions=4").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await?;
    for _ in 0..4 * 1000 {
        producer.send(Message::new("x")).await?;
    }
    let mut seen = [0u32; 4];
    for _ in 0..1000 {
        let delivery = consumer.recv().await?.expect("open");
        seen[delivery.partition().expect("memory has partitions") as usize] += 1;
        drop(delivery.ack());
    }
    assert!(seen.iter().all(|n| *n >= 100), "1,000 of 4,000 came from {seen:?}");
    Ok(())
}
