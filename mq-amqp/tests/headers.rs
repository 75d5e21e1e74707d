//! Headers that RabbitMQ reads itself, and those of other programs that only look like ours: no message costs its neighbours, and
//! each can be tried again and dead-lettered.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use control::{Rabbit, next, text};
use lapin::BasicProperties;
use lapin::options::BasicPublishOptions;
use lapin::types::{AMQPValue, FieldArray, FieldTable};
use mq_api::{
    Broker, BrokerExt, ErrorKind, Failure, Message, Outcome, ProducerSpec, RedriveOptions, RetryPolicy, Subscription,
};
use mq_testbed::RabbitOptions;
use std::sync::Arc;
use std::time::Duration;

/// Far below the time limit of a send, and enough for a channel that is made again.
const SOON: Duration = Duration::from_secs(10);

fn retried_once(topic: &str) -> Subscription {
    let mut sub = Subscription::group(topic, "g");
    sub.retry = RetryPolicy::attempts(2).delays([Duration::from_millis(100)]);
    sub
}

async fn letters(broker: &Arc<dyn Broker>, topic: &str) -> Vec<Message> {
    let letters = broker.admin().dead_letters(&topic.into(), &"g".into(), 100).await.unwrap();
    letters.into_iter().map(|letter| letter.message).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_that_rabbitmq_reads_itself_is_a_header_like_others() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    let mut consumer = broker.subscribe(retried_once("t")).await.unwrap();
    for (name, value) in [("CC", "someone@example.org"), ("BCC", "t..g"), ("cc", "x"), ("x-delay", "5")] {
        let sent = Message::new(name).header(name, value);
        let receipt = tokio::time::timeout(SOON, producer.send(sent)).await;
        receipt.unwrap_or_else(|_| panic!("{name} is not confirmed")).unwrap();
        let delivery = next(&mut consumer).await;
        assert_eq!((text(&delivery).as_str(), delivery.headers.get_str(name)), (name, Some(value)));
        delivery.nack("once more").await;
        let delivery = next(&mut consumer).await;
        assert_eq!((text(&delivery).as_str(), delivery.headers.get_str(name)), (name, Some(value)));
        assert_eq!(delivery.attempt(), 2);
        let dead = tokio::time::timeout(SOON, delivery.nack("and dead")).await;
        assert!(dead.unwrap_or_else(|_| panic!("{name} is not dead-lettered")).is_ok());
    }
    let dead: Vec<_> = letters(&broker, "t").await.iter().map(|m| m.payload_bytes().to_vec()).collect();
    assert_eq!(dead, [&b"CC"[..], b"BCC", b"cc", b"x-delay"]);
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_server_would_close_the_channel_for_is_refused_here() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    for (name, value) in [
        ("amqp.expiration", "soon"),
        ("amqp.expiration", "-1"),
        ("amqp.expiration", "99999999999999"),
        ("amqp.reply-to", "amq.rabbitmq.reply-to"),
    ] {
        let bad = producer.send(Message::new("bad").header(name, value));
        let good = producer.send(Message::new("good"));
        let error =
            tokio::time::timeout(SOON, bad).await.unwrap_or_else(|_| panic!("{name}={value} waits")).unwrap_err();
        assert_eq!((error.kind(), error.outcome()), (ErrorKind::InvalidName, Some(Outcome::NotSent)), "{error}");
        assert!(error.to_string().contains(name), "{error}");
        tokio::time::timeout(SOON, good).await.expect("the neighbour").unwrap();
    }
    producer.send(Message::new("good").header("amqp.expiration", "4294967295")).await.unwrap();
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_other_programs_write_can_be_tried_again_and_dead_lettered() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    for kind in ["quorum", "classic"] {
        let broker = rabbit.connect(&format!("queue_type={kind}")).await;
        let mut consumer = broker.subscribe(retried_once(kind)).await.unwrap();
        let (_raw, channel) = rabbit.raw().await;
        let cc = AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::LongString("nobody".into())]));
        let headers = [
            ("CC", cc, None),
            ("amqp.priority", AMQPValue::LongString("high".into()), Some("high")),
            ("amqp.type", AMQPValue::LongString("x".repeat(300).into()), None),
            ("amqp.app-id", AMQPValue::ByteArray(vec![0xff, 0xfe].into()), None),
            ("amqp.reply-to", AMQPValue::LongString("amq.rabbitmq.reply-to".into()), None),
        ];
        for (name, value, shown) in headers {
            let mut table = FieldTable::default();
            table.insert(name.into(), value);
            let properties = BasicProperties::default().with_headers(table);
            let options = BasicPublishOptions::default();
            channel.basic_publish(kind.into(), "".into(), options, name.as_bytes(), properties).await.unwrap();
            for attempt in 1..=2 {
                let delivery = next(&mut consumer).await;
                assert_eq!((text(&delivery).as_str(), delivery.attempt()), (name, attempt), "{kind}");
                if let Some(shown) = shown {
                    assert_eq!(delivery.headers.get_str(name), Some(shown));
                }
                let settled = tokio::time::timeout(SOON, delivery.nack("no")).await;
                assert!(settled.unwrap_or_else(|_| panic!("{kind}: {name} cannot be copied")).is_ok());
            }
        }
        assert_eq!(letters(&broker, kind).await.len(), 5, "{kind}");
        let (admin, topic, group) = (broker.admin(), kind.into(), "g".into());
        let back = admin.redrive(&topic, &group, RedriveOptions::default());
        let back = tokio::time::timeout(SOON, back).await.expect("in time").unwrap();
        assert_eq!(back.redriven, 5, "{kind}");
        broker.close(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_could_be_sent_can_be_dead_lettered() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    // As large as it may be; behind it in the alphabet, before it, and out of order.
    let mut sent = 0;
    for names in [&["a"][..], &["z"], &["z", "a"]] {
        for size in (20_000..=131_000).rev().step_by(500) {
            let mut message = Message::new("x");
            for name in names {
                message = message.header(*name, vec![b'v'; size / names.len()]);
            }
            match producer.send(message).await {
                Ok(_) => break,
                Err(error) => {
                    assert_eq!((error.kind(), error.outcome()), (ErrorKind::TooLarge, Some(Outcome::NotSent)))
                }
            }
        }
        sent += 1;
        let delivery = next(&mut consumer).await;
        let size: usize = delivery.headers.iter().map(|(_, value)| value.len()).sum();
        assert!(size > 50_000, "{size}");
        let error = Failure::permanent("e".repeat(5_000));
        let settled = tokio::time::timeout(SOON, delivery.nack(error)).await;
        assert!(settled.unwrap_or_else(|_| panic!("{names:?} with {size} bytes cannot be dead-lettered")).is_ok());
        assert_eq!(letters(&broker, "t").await.len(), sent);
    }
    // A reason of any length.
    producer.send(Message::new("x")).await.unwrap();
    let delivery = next(&mut consumer).await;
    let settled = tokio::time::timeout(SOON, delivery.dead_letter("r".repeat(200_000))).await;
    assert!(settled.expect("a long reason cannot be written").is_ok());
    broker.close(Duration::from_secs(5)).await;
}
