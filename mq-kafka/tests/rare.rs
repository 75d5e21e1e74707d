//! What logs, groups and topics of a real broker do seldom: offsets that no message has, a group that is deleted and made
//! again.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod world;

use mq_api::{BrokerExt, Consumer, ConsumerExt, Message, Outcome, ProducerSpec, Settled, Subscription, Topic};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use std::time::{Duration, SystemTime};
use world::{World, within};

fn config(w: &World) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", w.url.trim_start_matches("kafka://"));
    config
}

/// Offsets that no reader sees: those of a transaction that was given up.
fn hole(w: &World, topic: &str, n: usize) {
    let mut config = config(w);
    config.set("transactional.id", topic).set("queue.buffering.max.messages", "1000000");
    let producer: BaseProducer = config.create().unwrap();
    let limit = Duration::from_secs(30);
    producer.init_transactions(limit).unwrap();
    producer.begin_transaction().unwrap();
    for _ in 0..n {
        producer.send(BaseRecord::<(), [u8]>::to(topic).payload(b"x")).map_err(|(e, _)| e).unwrap();
    }
    producer.flush(limit).unwrap();
    producer.abort_transaction(limit).unwrap();
}

async fn next(consumer: &mut Box<dyn Consumer>) -> mq_api::Delivery {
    within(consumer.recv()).await.unwrap().unwrap()
}

fn sub(topic: &str) -> Subscription {
    Subscription::group(topic, "crew").partitions(1).lease(Duration::from_secs(6))
}

/// A commit speaks of some offsets from its own on. What is acknowledged beyond them must not be called confirmed.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_hole_hides_no_acknowledgement() {
    let Some(w) = World::new("hole") else { return };
    let broker = w.connect().await;
    let topic = w.topic("orders");
    let producer = within(broker.producer(ProducerSpec::new(topic.as_str()).partitions(1))).await.unwrap();
    within(producer.send(Message::new("before"))).await.unwrap();
    tokio::task::block_in_place(|| hole(&w, &topic, 17_000));
    within(producer.send(Message::new("after"))).await.unwrap();
    let mut consumer = within(broker.subscribe(sub(&topic))).await.unwrap();
    let before = next(&mut consumer).await;
    assert_eq!(before.payload_bytes(), b"before");
    let early = match tokio::time::timeout(Duration::from_secs(3), consumer.recv()).await {
        Ok(after) => Some(within(after.unwrap().unwrap().ack()).await),
        Err(_) => None,
    };
    within(consumer.control().close(Duration::from_millis(100))).await;
    drop(before);
    let mut consumer = within(broker.subscribe(sub(&topic))).await.unwrap();
    let again = next(&mut consumer).await;
    assert_eq!(again.payload_bytes(), b"before");
    assert!(within(again.ack()).await.is_ok());
    let second = tokio::time::timeout(Duration::from_secs(5), consumer.recv()).await;
    match early {
        Some(Settled::Confirmed(_)) => assert!(second.is_err(), "confirmed, and it came again"),
        _ => {
            let second = second.expect("what was not settled comes").unwrap().unwrap();
            assert_eq!(second.payload_bytes(), b"after");
            assert!(within(second.ack()).await.is_ok());
        }
    }
    within(broker.close(Duration::from_secs(5))).await;
}

/// One that is delayed behind a hole does not hold up those after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_delay_behind_a_hole_holds_up_nothing() {
    let Some(w) = World::new("hole") else { return };
    let broker = w.connect().await;
    let topic = w.topic("delayed");
    let producer = within(broker.producer(ProducerSpec::new(topic.as_str()).partitions(1))).await.unwrap();
    let mut consumer = within(broker.subscribe(sub(&topic))).await.unwrap();
    within(producer.send(Message::new("before"))).await.unwrap();
    assert!(within(next(&mut consumer).await.ack()).await.is_ok());
    tokio::task::block_in_place(|| hole(&w, &topic, 17_000));
    within(producer.send(Message::new("delayed"))).await.unwrap();
    let delayed = next(&mut consumer).await;
    assert_eq!(delayed.payload_bytes(), b"delayed");
    assert!(within(delayed.nack_after(Duration::from_secs(20), "later")).await.is_ok());
    within(producer.send(Message::new("after"))).await.unwrap();
    let after = tokio::time::timeout(Duration::from_secs(10), consumer.recv()).await.expect("not held up").unwrap();
    assert_eq!(after.unwrap().payload_bytes(), b"after");
    within(broker.close(Duration::from_secs(5))).await;
}

/// A group that is made again starts where its subscription says, also for a consumer of a name that was there before.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_group_does_not_start_where_one_of_its_name_was_left() {
    let Some(w) = World::new("again") else { return };
    let broker = w.connect().await;
    let topic = w.topic("orders");
    let producer = within(broker.producer(ProducerSpec::new(topic.as_str()).partitions(1))).await.unwrap();
    for n in 0..5 {
        within(producer.send(Message::new(n.to_string()))).await.unwrap();
    }
    for round in 0..2 {
        let mut consumer = within(broker.subscribe(sub(&topic).member("one"))).await.unwrap();
        for n in 0..5 {
            let got = tokio::time::timeout(Duration::from_secs(10), consumer.recv()).await;
            let got = got.unwrap_or_else(|_| panic!("message {n} of a group made for the {round}. time")).unwrap();
            let got = got.unwrap();
            assert_eq!(got.payload_bytes(), n.to_string().as_bytes());
            assert!(within(got.ack()).await.is_ok());
        }
        within(consumer.control().close(Duration::from_secs(5))).await;
        let deleted = within(broker.admin().delete_group(&Topic::from(topic.as_str()), &"crew".into())).await;
        assert!(deleted.unwrap(), "round {round}");
    }
    within(broker.close(Duration::from_secs(5))).await;
}

/// Whatever its topic took can be dead-lettered, retried and redriven.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_message_can_be_dead_lettered_and_redriven() {
    let Some(w) = World::new("large") else { return };
    let broker = w.connect().await;
    let topic = w.topic("orders");
    let spec = ProducerSpec::new(topic.as_str()).partitions(1).max_message(3_000_000);
    let producer = within(broker.producer(spec)).await.unwrap();
    let mut consumer = within(broker.subscribe(sub(&topic))).await.unwrap();
    // Nothing that compresses.
    let mut state = 1u64;
    let payload: Vec<u8> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    })
    .take(2_500_000)
    .collect();
    within(producer.send(Message::new(payload.clone()))).await.unwrap();
    let delayed = next(&mut consumer).await;
    let settled =
        tokio::time::timeout(Duration::from_secs(20), delayed.nack_after(Duration::from_secs(31), "later")).await;
    let health = consumer.control().health().current();
    assert!(settled.is_ok(), "it cannot be delayed: {health:?}");
    let again =
        tokio::time::timeout(Duration::from_secs(50), consumer.recv()).await.expect("in time").unwrap().unwrap();
    let settled = tokio::time::timeout(Duration::from_secs(20), again.dead_letter("broken")).await;
    let health = consumer.control().health().current();
    assert!(settled.is_ok(), "it cannot be dead-lettered: {health:?}");
    let name = Topic::from(topic.as_str());
    let report = within(broker.admin().redrive(&name, &"crew".into(), Default::default())).await.unwrap();
    assert_eq!(report.redriven, 1);
    let back = next(&mut consumer).await;
    assert!(back.payload_bytes() == payload);
    assert!(within(back.ack()).await.is_ok());
    within(broker.close(Duration::from_secs(5))).await;
}

/// The name that the program gives its clients shows wherever the brokers list them.
#[tokio::test(flavor = "multi_thread")]
async fn members_bear_the_name_of_the_client() {
    let Some(w) = World::new("named") else { return };
    let broker = within(mq_kafka::connect(&format!("{}?min_session=1s&client_id=shop", w.url))).await.unwrap();
    let topic = w.topic("orders");
    let consumer = within(broker.subscribe(sub(&topic).member("one"))).await.unwrap();
    let groups = within(broker.admin().groups(&Topic::from(topic.as_str()))).await.unwrap();
    assert_eq!(groups.iter().flat_map(|g| &g.members).collect::<Vec<_>>(), ["shop-one"]);
    drop(consumer);
    within(broker.close(Duration::from_secs(5))).await;
}

/// The broker refuses a batch for one of its records; the others are sent all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_is_refused_does_not_fail_its_neighbours() {
    let Some(w) = World::new("refused") else { return };
    let broker = w.connect().await;
    let topic = w.topic("orders");
    let admin: AdminClient<DefaultClientContext> = config(&w).create().unwrap();
    // An hour, the default since 4.0.
    let new = NewTopic::new(&topic, 1, TopicReplication::Fixed(1)).set("message.timestamp.after.max.ms", "3600000");
    assert!(admin.create_topics([&new], &AdminOptions::new()).await.unwrap()[0].is_ok());
    let spec = ProducerSpec::new(topic.as_str()).native("librdkafka.linger.ms", "100");
    let producer = within(broker.producer(spec)).await.unwrap();
    let message = |n: usize| {
        let message = Message::new(n.to_string()).key("k");
        match n {
            4 => message.timestamp(SystemTime::now() + Duration::from_secs(7_200)),
            _ => message,
        }
    };
    let sends: Vec<_> = (0..10).map(|n| producer.send(message(n))).collect();
    for (n, sending) in sends.into_iter().enumerate() {
        let result = within(sending).await;
        match n {
            4 => assert_eq!(
                result.as_ref().err().and_then(mq_api::Error::outcome),
                Some(Outcome::Rejected),
                "{result:?}"
            ),
            _ => assert!(result.is_ok(), "message {n}: {result:?}"),
        }
    }
    let mut consumer = within(broker.subscribe(sub(&topic))).await.unwrap();
    for n in (0..10).filter(|n| *n != 4) {
        let got = next(&mut consumer).await;
        assert_eq!(got.payload_bytes(), n.to_string().as_bytes());
        assert!(within(got.ack()).await.is_ok());
    }
    within(broker.close(Duration::from_secs(5))).await;
}
