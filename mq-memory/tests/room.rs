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

/// A message that will be refused costs nothing of what is kept.
#[tokio::test]
async fn a_refused_message_leaves_history_alone() -> Result<()> {
    let broker = connect("memory://refused?capacity_bytes=5000").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await?;
    for _ in 0..10 {
        producer.send(Message::new(vec![0u8; 100])).await?;
        drop(consumer.recv().await?.expect("open").ack());
    }
    assert_eq!(producer.send(Message::new(vec![0u8; 6000])).await.expect_err("too large").kind(), ErrorKind::Full);
    let again = Subscription::group("t", "again").start(Start::Replay(mq_api::ReplayFrom::Earliest));
    let mut again = broker.subscribe(again).await?;
    for _ in 0..10 {
        drop(again.recv().await?.expect("open").ack());
    }
    Ok(())
}

/// "Keep all" is a number like any other.
#[tokio::test]
async fn the_largest_numbers_are_taken() -> Result<()> {
    let broker = connect(&format!("memory://largest?history={}", u64::MAX)).await?;
    let producer = broker.producer("t").await?;
    producer.send(Message::new("x")).await?;
    let log = Retention::Log { max: None, age: Some(std::time::Duration::MAX) };
    let producer = broker.producer(mq_api::ProducerSpec::new("log").retention(log)).await?;
    for _ in 0..2 {
        producer.send(Message::new("x")).await?;
    }
    Ok(())
}

/// Room is bytes too: who waits for it is woken when it is there, without a new message.
#[tokio::test(start_paused = true)]
async fn who_waits_for_bytes_is_woken_by_an_ack() -> Result<()> {
    let broker = connect("memory://bytes").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(Subscription::group("t", "g").max_in_flight_bytes(1000)).await?;
    for _ in 0..2 {
        producer.send(Message::new(vec![0u8; 600])).await?;
    }
    let first = consumer.recv().await?.expect("open");
    let waiting = tokio::spawn(async move { consumer.recv().await });
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished(), "two of 600 bytes are more than 1,000");
    drop(first.ack());
    let second = tokio::time::timeout(std::time::Duration::from_secs(1), waiting).await.expect("woken");
    assert!(second.expect("no panic")?.is_some());
    Ok(())
}

/// What is in hand when its group is deleted takes no room for ever.
#[tokio::test(start_paused = true)]
async fn a_deleted_group_gives_the_room_back() -> Result<()> {
    let broker = connect("memory://deleted").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(Subscription::group("t", "g").max_in_flight(2)).await?;
    for _ in 0..4 {
        producer.send(Message::new("x")).await?;
    }
    let held = [consumer.recv().await?.expect("open"), consumer.recv().await?.expect("open")];
    broker.admin().delete_group(&"t".into(), &"g".into()).await?;
    for delivery in held {
        assert_eq!(delivery.ack().await, mq_api::Settled::Stale);
    }
    assert_eq!(consumer.control().in_flight(), 0);
    for _ in 0..4 {
        // The group is made again at the lowest position that was not settled.
        let next = tokio::time::timeout(std::time::Duration::from_secs(60), consumer.recv()).await.expect("in time");
        drop(next?.expect("open").ack());
    }
    Ok(())
}

/// A dead letter is written to where it can be read: if somebody deleted that topic, it is made again first.
#[tokio::test(start_paused = true)]
async fn a_deleted_topic_of_dead_letters_loses_none() -> Result<()> {
    let broker = connect("memory://letters").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await?;
    producer.send(Message::new("bad")).await?;
    let letters = mq_api::Topic::dead_letters("t", "g");
    broker.admin().delete_topic(&letters).await?;
    assert!(consumer.recv().await?.expect("open").dead_letter("bad").await.is_ok());
    let mut reader = broker.subscribe(Subscription::group(letters, "reader")).await?;
    let letter = tokio::time::timeout(std::time::Duration::from_secs(60), reader.recv()).await.expect("in time");
    assert_eq!(letter?.expect("open").payload_bytes(), b"bad");
    Ok(())
}
