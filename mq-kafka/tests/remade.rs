//! Topics that are deleted, or get partitions, under a living program.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod world;

use mq_api::{
    Broker, BrokerExt, Consumer, ConsumerExt, Delivery, Message, ProducerSpec, Provisioning, Settled, Subscription,
    Topic,
};
use rdkafka::admin::{AdminOptions, NewPartitions, NewTopic, ResourceSpecifier, TopicReplication};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use world::{World, within};

fn sub(topic: &str) -> Subscription {
    Subscription::group(topic, "crew").lease(Duration::from_secs(6))
}

async fn make(w: &World, topics: &[(String, i32)]) {
    let new: Vec<_> = topics.iter().map(|(name, n)| NewTopic::new(name, *n, TopicReplication::Fixed(1))).collect();
    let made = w.admin().create_topics(&new, &AdminOptions::new()).await.unwrap();
    assert!(made.iter().all(Result::is_ok), "{made:?}");
}

async fn delete(w: &World, topic: &str) {
    let gone = w.admin().delete_topics(&[topic], &AdminOptions::new()).await.unwrap();
    assert!(gone[0].is_ok(), "{gone:?}");
}

async fn next(consumer: &mut Box<dyn Consumer>) -> Delivery {
    within(consumer.recv()).await.unwrap().unwrap()
}

/// What a program made it makes again, also when nobody of it consumes.
#[tokio::test(flavor = "multi_thread")]
async fn a_producer_makes_its_topic_again() {
    let Some(w) = World::new("remade") else { return };
    let broker = w.connect().await;
    let topic = w.topic("orders");
    let spec = ProducerSpec::new(topic.as_str()).partitions(2).group("crew");
    let producer = within(broker.producer(spec)).await.unwrap();
    within(producer.send(Message::new("before"))).await.unwrap();
    delete(&w, &topic).await;
    // Until the client has noticed, messages may go where nobody finds them.
    let again = async {
        let name = Topic::from(topic.as_str());
        loop {
            let sent = producer.send(Message::new("noticed")).await;
            let there = broker.admin().topic(&name).await.unwrap();
            if let (Ok(_), Some(there)) = (&sent, there) {
                return there.partitions;
            }
        }
    };
    let partitions = tokio::time::timeout(Duration::from_secs(60), again).await.expect("made again");
    assert_eq!(partitions, 2);
    within(producer.send(Message::new("after"))).await.unwrap();
    let mut consumer = within(broker.subscribe(sub(&topic))).await.unwrap();
    while next(&mut consumer).await.payload_bytes() != b"after" {}
    within(broker.close(Duration::from_secs(5))).await;
}

/// The same of what takes its dead letters: without it a poison message would be in hand for good.
#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_find_their_topic_made_again() {
    let Some(w) = World::new("remade") else { return };
    let broker = w.connect().await;
    let topic = w.topic("letters");
    let producer = within(broker.producer(ProducerSpec::new(topic.as_str()).partitions(1))).await.unwrap();
    let mut consumer = within(broker.subscribe(sub(&topic).partitions(1))).await.unwrap();
    for round in 0..2 {
        within(producer.send(Message::new("poison"))).await.unwrap();
        let poison = next(&mut consumer).await;
        let settled = tokio::time::timeout(Duration::from_secs(60), poison.dead_letter("broken")).await;
        let health = consumer.control().health().current();
        assert!(settled.is_ok_and(|s| s.is_ok()), "round {round}: {health:?}");
        let letters = within(broker.admin().dead_letters(&topic.as_str().into(), &"crew".into(), 9)).await.unwrap();
        assert_eq!(letters.len(), 1, "round {round}");
        delete(&w, &format!("{topic}..crew..dlq")).await;
    }
    within(broker.close(Duration::from_secs(5))).await;
}

/// And of what takes its long delays.
#[tokio::test(flavor = "multi_thread")]
async fn long_delays_find_their_topic_made_again() {
    let Some(w) = World::new("remade") else { return };
    let broker = w.connect().await;
    let topic = w.topic("delays");
    let producer = within(broker.producer(ProducerSpec::new(topic.as_str()).partitions(1))).await.unwrap();
    let mut consumer = within(broker.subscribe(sub(&topic).partitions(1))).await.unwrap();
    for round in 0..2 {
        within(producer.send(Message::new("later"))).await.unwrap();
        let later = next(&mut consumer).await;
        let delayed = later.nack_after(Duration::from_secs(100), "later");
        let settled = tokio::time::timeout(Duration::from_secs(60), delayed).await;
        let health = consumer.control().health().current();
        assert!(settled.is_ok_and(|s| s.is_ok()), "round {round}: {health:?}");
        delete(&w, &format!("{topic}..crew..retry-5m")).await;
    }
    within(broker.close(Duration::from_secs(5))).await;
}

/// A program that makes nothing has the topics that it is told of at subscribe; its default delays have to be enough with them.
#[tokio::test(flavor = "multi_thread")]
async fn who_makes_nothing_delays_by_the_topics_it_was_asked_for() {
    let Some(w) = World::new("verified") else { return };
    let broker = w.connect().await;
    for how in [Provisioning::Verify, Provisioning::None] {
        let topic = w.topic(if how == Provisioning::Verify { "verify" } else { "none" });
        let names = ["", "..crew..dlq", "..crew..retry"].map(|end| (format!("{topic}{end}"), 1));
        make(&w, &names).await;
        within(broker.admin().create_group(&topic.as_str().into(), &"crew".into(), Default::default())).await.unwrap();
        let spec = ProducerSpec::new(topic.as_str()).provisioning(how);
        let producer = within(broker.producer(spec)).await.unwrap();
        let mut consumer = within(broker.subscribe(sub(&topic).provisioning(how))).await.unwrap();
        within(producer.send(Message::new("later"))).await.unwrap();
        let later = next(&mut consumer).await;
        let delayed = later.nack_after(Duration::from_secs(130), "the fourth of the default delays");
        let settled = tokio::time::timeout(Duration::from_secs(20), delayed).await;
        let health = consumer.control().health().current();
        assert!(settled.is_ok_and(|s| s.is_ok()), "{how:?}: {health:?}");
    }
    within(broker.close(Duration::from_secs(5))).await;
}

/// A delay may be longer than dead letters are kept.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_delayed_is_kept_until_it_is_due() {
    let Some(w) = World::new("kept") else { return };
    let broker = w.connect().await;
    let topic = w.topic("orders");
    let producer = within(broker.producer(ProducerSpec::new(topic.as_str()).partitions(1))).await.unwrap();
    let mut consumer = within(broker.subscribe(sub(&topic).partitions(1))).await.unwrap();
    const DAY: u64 = 24 * 3600;
    for days in [1, 11, 13, 30] {
        within(producer.send(Message::new("later"))).await.unwrap();
        let later = next(&mut consumer).await;
        assert!(within(later.nack_after(Duration::from_secs(days * DAY), "later")).await.is_ok());
        let mut kept = Vec::new();
        let looker: rdkafka::consumer::BaseConsumer = rdkafka::ClientConfig::new()
            .set("bootstrap.servers", w.url.trim_start_matches("kafka://"))
            .create()
            .unwrap();
        for end in ["retry", "retry-5m", "retry-30m", "retry-6h", "retry-long", "retry-longest"] {
            let name = format!("{topic}..crew..{end}");
            let n = tokio::task::block_in_place(|| messages(&looker, &name));
            if n == 0 {
                continue;
            }
            let asked = [ResourceSpecifier::Topic(&name)];
            let told = w.admin().describe_configs(&asked, &AdminOptions::new()).await.unwrap();
            let config = told[0].as_ref().unwrap().get("retention.ms").unwrap().value.clone().unwrap();
            kept.push((name, config.parse::<i64>().unwrap()));
        }
        let long = (days * DAY * 1000) as i64;
        assert!(kept.iter().any(|(_, ms)| *ms < 0 || *ms > long), "{days} days: {kept:?}");
    }
    within(broker.close(Duration::from_secs(5))).await;
}

fn messages(looker: &rdkafka::consumer::BaseConsumer, topic: &str) -> i64 {
    use rdkafka::consumer::Consumer as _;
    let found = looker.fetch_metadata(Some(topic), Duration::from_secs(10)).unwrap();
    let partitions = found.topics()[0].partitions().len() as i32;
    let size = |p| looker.fetch_watermarks(topic, p, Duration::from_secs(10)).map_or(0, |(low, high)| high - low);
    (0..partitions).map(size).sum()
}

/// A partition that is new has no commit. That is no sign that the group was lost, also for a member that has none but this.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_partition_is_no_lost_group() {
    let Some(w) = World::new("grown") else { return };
    let (one, two) = (w.connect().await, w.connect().await);
    let topic = w.topic("orders");
    let names = [("", 1), ("..crew..dlq", 1), ("..crew..retry", 1)].map(|(end, n)| (format!("{topic}{end}"), n));
    make(&w, &names).await;
    within(one.admin().create_group(&topic.as_str().into(), &"crew".into(), Default::default())).await.unwrap();
    let sub = sub(&topic).provisioning(Provisioning::Verify);
    let subscribe = async |broker: &Arc<dyn Broker>| within(broker.subscribe(sub.clone())).await.unwrap();
    let (mut first, mut second) = (subscribe(&one).await, subscribe(&two).await);
    let spec = ProducerSpec::new(topic.as_str()).provisioning(Provisioning::Verify);
    let producer = within(one.producer(spec.clone())).await.unwrap();
    within(producer.send(Message::new("held"))).await.unwrap();
    let mut either = async || {
        let got = tokio::select! {
            got = first.recv() => got,
            got = second.recv() => got,
        };
        got.unwrap().unwrap()
    };
    let held = within(either()).await;
    let grown = [NewPartitions::new(&topic, 2)];
    assert!(w.admin().create_partitions(&grown, &AdminOptions::new()).await.unwrap()[0].is_ok());
    let producer = within(one.producer(spec)).await.unwrap();
    // Both partitions have some of these.
    let keys: Vec<String> = (0..20).map(|n| format!("key {n}")).collect();
    let mut partitions = BTreeSet::new();
    for key in &keys {
        partitions.insert(within(producer.send(Message::new(key.clone()).key(key.clone()))).await.unwrap().partition);
    }
    assert_eq!(partitions.len(), 2);
    let mut seen = BTreeSet::new();
    let all = async {
        while seen.len() < keys.len() {
            let got = either().await;
            seen.insert(String::from_utf8(got.payload_bytes().to_vec()).unwrap());
            assert!(matches!(got.ack().await, Settled::Confirmed(_)));
        }
    };
    let all = tokio::time::timeout(Duration::from_secs(40), all).await;
    let health = (first.control().health().current(), second.control().health().current());
    assert!(all.is_ok(), "{} of {} came: {health:?}", seen.len(), keys.len());
    let settled = within(held.ack()).await;
    assert!(matches!(settled, Settled::Confirmed(_)), "its session was given up meanwhile: {settled:?}");
    for broker in [one, two] {
        within(broker.close(Duration::from_secs(5))).await;
    }
}
