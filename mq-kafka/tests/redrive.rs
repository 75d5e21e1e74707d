//! What is redriven to a group that keeps the order of keys.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod world;

use mq_api::{BrokerExt, ConsumerExt, Message, Ordering, ProducerSpec, RedriveOptions, Start, Subscription, Topic};
use std::time::Duration;
use world::{World, within};

/// A redriven message waits its turn behind what its key has in hand, and no other group or broadcast sees it.
#[tokio::test(flavor = "multi_thread")]
async fn a_redriven_message_joins_the_line_of_its_key() {
    let Some(w) = World::new("redrive") else { return };
    let broker = w.connect().await;
    let topic = w.topic("orders");
    let sub = |group: &str| Subscription::group(topic.as_str(), group).partitions(4).lease(Duration::from_secs(6));
    let spec = ProducerSpec::new(topic.as_str()).partitions(4).group("billing").group("audit");
    let producer = within(broker.producer(spec)).await.unwrap();
    let mut keyed =
        within(broker.subscribe(sub("billing").ordering(Ordering::PerKey).max_in_flight(16))).await.unwrap();
    let mut other = within(broker.subscribe(sub("audit"))).await.unwrap();
    let mut heard = within(broker.subscribe(Subscription::broadcast(topic.as_str()))).await.unwrap();
    let send = async |text: &'static str| within(producer.send(Message::new(text).key("k"))).await.unwrap();
    send("bad").await;
    let bad = within(keyed.recv()).await.unwrap().unwrap();
    assert!(within(bad.dead_letter("broken")).await.is_ok());
    send("first").await;
    let first = within(keyed.recv()).await.unwrap().unwrap();
    let name = Topic::from(topic.as_str());
    let group = "billing".into();
    let report = within(broker.admin().redrive(&name, &group, RedriveOptions::default())).await.unwrap();
    assert_eq!(report.redriven, 1);
    send("last").await;
    // While one of its key is in hand nothing of that key comes, by whatever way.
    let early = tokio::time::timeout(Duration::from_secs(2), keyed.recv()).await;
    assert!(early.is_err(), "a second message of a key that is in hand: {:?}", early.map(|e| e.map(|d| d.map(drop))));
    assert!(within(first.ack()).await.is_ok());
    for (text, attempt) in [("bad", 1), ("last", 1)] {
        let got = within(keyed.recv()).await.unwrap().unwrap();
        assert_eq!((got.payload_bytes(), got.attempt()), (text.as_bytes(), attempt));
        assert!(got.headers.get("mq-redriven-to").is_none(), "our own header shows");
        assert!(within(got.ack()).await.is_ok());
    }
    for text in ["bad", "first", "last"] {
        let got = within(other.recv()).await.unwrap().unwrap();
        assert_eq!(got.payload_bytes(), text.as_bytes(), "what another group sees");
        assert!(within(got.ack()).await.is_ok());
        let got = within(heard.recv()).await.unwrap().unwrap();
        assert_eq!(got.payload_bytes(), text.as_bytes(), "what a broadcast hears");
    }
    let more = tokio::time::timeout(Duration::from_secs(1), other.recv()).await;
    assert!(more.is_err(), "another group saw the redriven message");
    // Nor does a group that begins later and reads everything.
    let mut late = within(broker.subscribe(sub("late").start(Start::Oldest))).await.unwrap();
    for _ in 0..3 {
        assert!(within(within(late.recv()).await.unwrap().unwrap().ack()).await.is_ok());
    }
    assert!(tokio::time::timeout(Duration::from_secs(1), late.recv()).await.is_err(), "a late group saw it");
    let backlog = within(broker.admin().backlog(&name, &"audit".into())).await.unwrap();
    assert_eq!(backlog.ready, mq_api::Count::Exact(0), "what is passed by is no backlog");
    let report = within(broker.close(Duration::from_secs(5))).await;
    assert!(report.is_clean(), "{report:?}");
}

/// A message that wanders between the dead letters and the group is in one of them at each moment, and a backlog is of one.
#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_loses_sight_of_nothing_that_moves() {
    let Some(w) = World::new("moving") else { return };
    let broker = w.connect().await;
    let topic = w.topic("orders");
    let (name, group) = (Topic::from(topic.as_str()), mq_api::Group::from("crew"));
    let producer = within(broker.producer(ProducerSpec::new(topic.as_str()).partitions(1))).await.unwrap();
    let sub = Subscription::group(topic.as_str(), "crew").partitions(1).lease(Duration::from_secs(6));
    let mut consumer = within(broker.subscribe(sub)).await.unwrap();
    within(producer.send(Message::new("wanders"))).await.unwrap();
    let ends = tokio_util::sync::CancellationToken::new();
    let (ended, admin, moved) = (ends.clone(), broker.admin(), (name.clone(), group.clone()));
    let wandering = tokio::spawn(async move {
        let mut rounds = 0;
        while !ended.is_cancelled() {
            let got = within(consumer.recv()).await.unwrap().unwrap();
            assert!(within(got.dead_letter("broken")).await.is_ok());
            let options = RedriveOptions::default().max_redrives(u32::MAX);
            assert_eq!(within(admin.redrive(&moved.0, &moved.1, options)).await.unwrap().redriven, 1);
            rounds += 1;
        }
        rounds
    });
    let none = mq_api::Count::Exact(0);
    for look in 0..50 {
        let backlog = within(broker.admin().backlog(&name, &group)).await.unwrap();
        assert!(backlog.ready != none || backlog.dead != none, "look {look}: nothing is nowhere, {backlog:?}");
    }
    ends.cancel();
    assert!(within(wandering).await.unwrap() > 3);
    within(broker.close(Duration::from_secs(5))).await;
}
