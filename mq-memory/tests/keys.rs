//! Order per key where messages leave the log otherwise than by being handled, and where a group takes another order.

#![allow(clippy::expect_used)]

use mq_api::{
    Backlog, Broker, BrokerExt, Consumer, ConsumerExt, Count, DeadLetterPolicy, Event, GapCause, Message, Ordering,
    Producer, ProducerSpec, RedriveOptions, Result, Retention, Settled, Subscription, Topic,
};
use mq_memory::connect;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

const SECOND: Duration = Duration::from_secs(1);

fn label(delivery: &mq_api::Delivery) -> String {
    String::from_utf8_lossy(delivery.payload_bytes()).into_owned()
}

fn billing() -> Subscription {
    Subscription::group("orders", "billing")
}

async fn send(producer: &Arc<dyn Producer>, labels: std::ops::Range<u32>) -> Result<()> {
    for n in labels {
        producer.send(Message::new(n.to_string()).key("k")).await?;
    }
    Ok(())
}

/// A topic that keeps three messages, handled or not, and a member that wants order.
async fn log_of_three(name: &str) -> Result<(Arc<dyn Broker>, Arc<dyn Producer>, Box<dyn Consumer>)> {
    let broker = connect(name).await?;
    let log = Retention::log(3);
    let producer = broker.open_producer(ProducerSpec::new("orders").retention(log)).await?;
    let consumer = broker.subscribe(billing().retention(log).ordering(Ordering::PerKey)).await?;
    Ok((broker, producer, consumer))
}

/// Acks what comes until nothing does for longer than any delay here.
async fn ack_all(consumer: &mut Box<dyn Consumer>) -> Result<Vec<String>> {
    let mut got = Vec::new();
    while let Ok(next) = timeout(100 * SECOND, consumer.recv()).await {
        let delivery = next?.expect("open");
        got.push(label(&delivery));
        delivery.ack().await;
    }
    Ok(got)
}

async fn is_quiet(consumer: &mut Box<dyn Consumer>) -> bool {
    timeout(SECOND, consumer.recv()).await.is_err()
}

async fn left(broker: &Arc<dyn Broker>, topic: &str, group: &str) -> Result<Backlog> {
    broker.admin().backlog(&topic.into(), &group.into()).await
}

fn nothing(dead: u64) -> Backlog {
    let n = Count::Exact;
    Backlog { ready: n(0), in_flight: n(0), delayed: n(0), dead: n(dead) }
}

#[tokio::test(start_paused = true)]
async fn a_key_goes_on_after_its_message_was_trimmed_in_hand() -> Result<()> {
    let (broker, producer, mut consumer) = log_of_three("memory://keys-held").await?;
    send(&producer, 0..1).await?;
    let held = consumer.recv().await?.expect("open");
    send(&producer, 1..6).await?;
    assert!(is_quiet(&mut consumer).await);
    assert!(held.ack().await.is_ok());
    assert_eq!(ack_all(&mut consumer).await?, ["3", "4", "5"]);
    assert_eq!(left(&broker, "orders", "billing").await?, nothing(0));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_key_goes_on_after_a_message_was_trimmed_in_its_line() -> Result<()> {
    let (broker, producer, mut consumer) = log_of_three("memory://keys-line").await?;
    send(&producer, 0..3).await?;
    let held = consumer.recv().await?.expect("open");
    assert!(is_quiet(&mut consumer).await);
    held.ack().await;
    let held = consumer.recv().await?.expect("open");
    assert_eq!(label(&held), "1");
    send(&producer, 3..5).await?;
    assert!(is_quiet(&mut consumer).await);
    // Drops 2, which waits in line.
    send(&producer, 5..6).await?;
    held.ack().await;
    assert_eq!(ack_all(&mut consumer).await?, ["3", "4", "5"]);
    assert_eq!(left(&broker, "orders", "billing").await?, nothing(0));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_key_goes_on_after_its_delayed_message_was_trimmed() -> Result<()> {
    let (broker, producer, mut consumer) = log_of_three("memory://keys-delayed").await?;
    send(&producer, 0..1).await?;
    consumer.recv().await?.expect("open").nack_after(10 * SECOND, "later").await;
    send(&producer, 1..6).await?;
    assert_eq!(ack_all(&mut consumer).await?, ["3", "4", "5"]);
    assert_eq!(left(&broker, "orders", "billing").await?, nothing(0));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_key_goes_on_after_dead_letters_were_discarded_from_its_line() -> Result<()> {
    let broker = connect("memory://keys-discarded").await?;
    let producer = broker.producer("orders").await?;
    let mut consumer = broker.subscribe(billing()).await?;
    for n in 0..4 {
        send(&producer, n..n + 1).await?;
        consumer.recv().await?.expect("open").dead_letter("bad").await;
    }
    let letters = Topic::dead_letters("orders", "billing");
    let reader = Subscription::group(letters.clone(), "r").ordering(Ordering::PerKey);
    let mut reader = broker.subscribe(reader.dead_letter(DeadLetterPolicy::Forever)).await?;
    let held = reader.recv().await?.expect("open");
    assert!(is_quiet(&mut reader).await);
    // The one in hand, and the first that waits behind it.
    let two = RedriveOptions::default().limit(2);
    assert_eq!(broker.admin().discard_dead_letters(&"orders".into(), &"billing".into(), two).await?, 2);
    assert!(held.ack().await.is_ok());
    assert_eq!(ack_all(&mut reader).await?, ["2", "3"]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn what_was_trimmed_in_hand_and_not_handled_is_a_gap() -> Result<()> {
    type Gives = fn(mq_api::Delivery) -> mq_api::Settling;
    let ways: [(&str, Gives); 5] = [
        ("nack", |d| d.nack("x")),
        ("nack-after", |d| d.nack_after(SECOND, "x")),
        ("release", |d| d.release()),
        ("dead-letter", |d| d.dead_letter("x")),
        ("drop", |d| d.nack(mq_api::Failure::transient("x"))),
    ];
    for (name, give) in ways {
        let (broker, producer, mut consumer) = log_of_three(&format!("memory://keys-gap-{name}")).await?;
        let mut events = consumer.control().events();
        send(&producer, 0..1).await?;
        let held = consumer.recv().await?.expect("open");
        send(&producer, 1..4).await?;
        assert!(matches!(give(held).await, Settled::Confirmed(_)), "{name}");
        assert_eq!(ack_all(&mut consumer).await?, ["1", "2", "3"], "{name}");
        let gaps: Vec<_> =
            events.drain().into_iter().filter_map(|e| if let Event::Gap(g) = e { Some(g) } else { None }).collect();
        assert_eq!(gaps.len(), 1, "{name}: {gaps:?}");
        assert_eq!((gaps[0].count, gaps[0].cause), (Some(1), GapCause::Retention), "{name}");
        assert_eq!(left(&broker, "orders", "billing").await?, nothing(0), "{name}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_group_that_gives_order_up_hands_out_what_waited_for_it() -> Result<()> {
    let broker = connect("memory://keys-off").await?;
    let producer = broker.producer("orders").await?;
    send(&producer, 0..4).await?;
    let mut ordered = broker.subscribe(billing().ordering(Ordering::PerKey)).await?;
    let held = ordered.recv().await?.expect("open");
    assert!(is_quiet(&mut ordered).await);
    held.ack().await;
    ordered.control().close(SECOND).await;
    let mut plain = broker.subscribe(billing()).await?;
    assert_eq!(ack_all(&mut plain).await?, ["1", "2", "3"]);
    assert_eq!(left(&broker, "orders", "billing").await?, nothing(0));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn order_that_was_given_up_can_be_asked_for_again() -> Result<()> {
    let broker = connect("memory://keys-off-and-on").await?;
    let producer = broker.producer("orders").await?;
    send(&producer, 0..4).await?;
    let mut ordered = broker.subscribe(billing().ordering(Ordering::PerKey)).await?;
    let held = ordered.recv().await?.expect("open");
    assert!(is_quiet(&mut ordered).await);
    ordered.control().close(Duration::ZERO).await;
    drop(held);
    let mut plain = broker.subscribe(billing()).await?;
    plain.recv().await?.expect("open").ack().await;
    plain.control().close(SECOND).await;
    let mut ordered = broker.subscribe(billing().ordering(Ordering::PerKey)).await?;
    let first = ordered.recv().await?.expect("open");
    assert_eq!(label(&first), "1");
    assert!(is_quiet(&mut ordered).await, "one at a time again");
    first.ack().await;
    assert_eq!(ack_all(&mut ordered).await?, ["2", "3"]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_delay_outlasts_a_change_of_order() -> Result<()> {
    let broker = connect("memory://keys-delay").await?;
    let producer = broker.producer("orders").await?;
    send(&producer, 0..3).await?;
    let mut plain = broker.subscribe(billing()).await?;
    let (first, second) = (plain.recv().await?.expect("open"), plain.recv().await?.expect("open"));
    let start = tokio::time::Instant::now();
    second.nack_after(10 * SECOND, "later").await;
    first.release().await;
    plain.control().close(SECOND).await;
    let mut ordered = broker.subscribe(billing().ordering(Ordering::PerKey)).await?;
    let first = ordered.recv().await?.expect("open");
    assert_eq!(label(&first), "0");
    first.ack().await;
    let second = ordered.recv().await?.expect("open");
    assert_eq!((label(&second), second.attempt()), ("1".into(), 2));
    assert!(start.elapsed() >= 10 * SECOND, "due after {:?}", start.elapsed());
    second.ack().await;
    assert_eq!(ack_all(&mut ordered).await?, ["2"]);
    Ok(())
}

// 3.7: "then that partition waits, and health names it", whatever the others do.
#[tokio::test(start_paused = true)]
async fn health_names_the_partition_that_waits_while_others_go_on() -> Result<()> {
    let broker = connect("memory://keys-two?partitions=2").await?;
    let producer = broker.producer("orders").await?;
    let sub = billing().ordering(Ordering::PerKey).max_blocked(3);
    let mut consumer = broker.subscribe(sub).await?;
    // A key of each partition.
    let mut keys = [None, None];
    for n in 0..20 {
        let key = format!("k{n}");
        let receipt = producer.send(Message::new("first").key(key.clone())).await?;
        keys[receipt.partition.expect("has one") as usize] = Some(key);
    }
    ack_all(&mut consumer).await?;
    let keys = keys.map(|key| key.expect("twenty keys meet both"));
    for full in [0, 1] {
        let (slow, quick) = (keys[full].clone(), keys[1 - full].clone());
        producer.send(Message::new("delayed").key(slow.clone())).await?;
        consumer.recv().await?.expect("open").nack_after(30 * SECOND, "later").await;
        for _ in 0..5 {
            producer.send(Message::new("waits").key(slow.clone())).await?;
        }
        let named = format!("partition {full} waits");
        for other_goes_on in [false, true] {
            if other_goes_on {
                producer.send(Message::new("goes on").key(quick.clone())).await?;
                let other = consumer.recv().await?.expect("open");
                assert_eq!(label(&other), "goes on");
                other.ack().await;
            }
            assert!(is_quiet(&mut consumer).await);
            let health = consumer.control().health().current();
            assert!(health.reason.contains(&named), "{health:?}, the other goes on: {other_goes_on}");
        }
        assert_eq!(ack_all(&mut consumer).await?.len(), 6);
        let health = consumer.control().health().current();
        assert!(health.reason.is_empty(), "{health:?}");
    }
    Ok(())
}
