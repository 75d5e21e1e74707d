//! What only RabbitMQ has: queues and exchanges of other programs, and the native options.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use control::{Rabbit, next, quiet, text};
use lapin::options::{BasicPublishOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use mq_api::{
    Broker, BrokerExt, ErrorKind, Message, Outcome, ProducerSpec, Provisioning, RetryPolicy, Subscription, Topic,
};
use mq_testbed::RabbitOptions;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of two consumers of a group with a single active one, the second gets nothing until the first is closed.
async fn only_one_reads(broker: &Arc<dyn Broker>, topic: &str) {
    let single = Subscription::group(topic, "one").native("single-active", "true");
    let mut first = broker.subscribe(single.clone()).await.unwrap();
    let mut second = broker.subscribe(single).await.unwrap();
    let producer = broker.producer(topic).await.unwrap();
    for n in 0..10 {
        producer.send(Message::new(n.to_string())).await.unwrap();
    }
    for n in 0..10 {
        let delivery = next(&mut first).await;
        assert_eq!(text(&delivery), n.to_string());
        delivery.ack().await;
    }
    quiet(&mut second, Duration::from_millis(300)).await;
    first.control().close(Duration::from_secs(5)).await;
    producer.send(Message::new("10")).await.unwrap();
    assert_eq!(text(&next(&mut second).await), "10");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_queue_type_is_explained_and_final() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let quorum = rabbit.connect("").await;
    quorum.subscribe(Subscription::group("t", "g")).await.unwrap().control().close(Duration::from_secs(5)).await;
    let classic = rabbit.connect("queue_type=classic").await;
    let began = Instant::now();
    let error = classic.subscribe(Subscription::group("t", "g")).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Topology, "{error}");
    let words = error.to_string();
    assert!(words.contains("classic") && words.contains("quorum") && words.contains("t..g"), "{words}");
    assert!(began.elapsed() < Duration::from_secs(3));
    // What users tune is in no argument: other attempts, delays and prefetch start, and no second queue appears.
    let mut sub = Subscription::group("t", "g").max_in_flight(7);
    sub.retry = RetryPolicy::attempts(9).delays([Duration::from_secs(3)]);
    quorum.subscribe(sub).await.unwrap();
    quorum.close(Duration::from_secs(5)).await;
    classic.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn native_queues_and_exchanges_and_other_programs() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let (_raw, channel) = rabbit.raw().await;
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare("jobs".into(), durable, FieldTable::default()).await.unwrap();
    let broker = rabbit.connect("").await;
    // Sent to the queue by us, and by somebody else with headers of every type.
    let producer = broker.producer(Topic::native("jobs")).await.unwrap();
    producer.send(Message::new("ours")).await.unwrap();
    let mut headers = FieldTable::default();
    headers.insert("n".into(), AMQPValue::LongInt(7));
    headers.insert("ok".into(), AMQPValue::Boolean(true));
    let properties = lapin::BasicProperties::default().with_headers(headers).with_reply_to("back".into());
    channel
        .basic_publish("".into(), "jobs".into(), BasicPublishOptions::default(), b"theirs", properties)
        .await
        .unwrap();
    let mut consumer = broker.subscribe(Subscription::group(Topic::native("queue://jobs"), "g")).await.unwrap();
    let delivery = next(&mut consumer).await;
    assert_eq!(text(&delivery), "ours");
    delivery.ack().await;
    let delivery = next(&mut consumer).await;
    assert_eq!(text(&delivery), "theirs");
    assert_eq!(delivery.headers.get_str("n"), Some("7"));
    assert_eq!(delivery.headers.get_str("amqp.reply-to"), Some("back"));
    // Its retry keeps what it came with, and its dead letter goes to the queue of the library.
    delivery.nack_after(Duration::from_millis(300), "again").await;
    let again = next(&mut consumer).await;
    assert_eq!((again.attempt(), again.headers.get_str("amqp.reply-to")), (2, Some("back")));
    again.dead_letter("bad").await;
    let letters = broker.admin().dead_letters(&Topic::native("queue://jobs"), &"g".into(), 10).await.unwrap();
    assert_eq!(letters.len(), 1);
    // A topic exchange of somebody else, by routing pattern; a headers exchange, by matching.
    let kind = lapin::ExchangeKind::Topic;
    channel.exchange_declare("logs".into(), kind, Default::default(), FieldTable::default()).await.unwrap();
    let kind = lapin::ExchangeKind::Headers;
    channel.exchange_declare("match".into(), kind, Default::default(), FieldTable::default()).await.unwrap();
    let logs = Topic::native("exchange://logs");
    let sub = Subscription::group(&logs, "errors").native("routing-key", "*.error");
    let mut errors = broker.subscribe(sub).await.unwrap();
    let to_logs = broker.producer(logs).await.unwrap();
    to_logs.send(Message::new("1").header("amqp.routing-key", "shop.error")).await.unwrap();
    let unroutable = to_logs.send(Message::new("2").header("amqp.routing-key", "shop.info")).await.unwrap_err();
    assert_eq!(unroutable.kind(), ErrorKind::Unroutable);
    let delivery = next(&mut errors).await;
    assert_eq!((text(&delivery).as_str(), delivery.headers.get_str("amqp.routing-key")), ("1", Some("shop.error")));
    delivery.ack().await;
    let matching = Topic::native("exchange://match");
    let sub = Subscription::group(&matching, "paper").native("headers", "format=pdf,size=a4");
    let mut paper = broker.subscribe(sub).await.unwrap();
    let to_match = broker.producer(matching).await.unwrap();
    to_match.send(Message::new("a4").header("format", "pdf").header("size", "a4")).await.unwrap();
    assert!(to_match.send(Message::new("a3").header("format", "pdf").header("size", "a3")).await.is_err());
    next(&mut paper).await.ack().await;
    // A queue that is not there is nobody's to make.
    let missing = broker.subscribe(Subscription::group(Topic::native("nothing"), "g")).await.err().unwrap();
    assert_eq!(missing.kind(), ErrorKind::Topology, "{missing}");
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn priorities_limits_and_single_active_consumers() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("queue_type=classic").await;
    let sub = Subscription::group("t", "urgent").native("max-priority", "5").max_in_flight(1);
    let consumer = broker.subscribe(sub.clone()).await.unwrap();
    consumer.control().close(Duration::from_secs(5)).await;
    let producer = broker.producer("t").await.unwrap();
    for n in 0..5 {
        producer.send(Message::new(n.to_string()).header("amqp.priority", n.to_string())).await.unwrap();
    }
    let mut consumer = broker.subscribe(sub).await.unwrap();
    for n in (0..5).rev() {
        let delivery = next(&mut consumer).await;
        assert_eq!(text(&delivery), n.to_string());
        delivery.ack().await;
    }
    let error = broker.subscribe(Subscription::group("t", "x").native("max-priority", "many")).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Config);
    only_one_reads(&broker, "s").await;
    // At most so many wait: more are refused, by all that is known.
    let spec = ProducerSpec::new("full").group("g").retention(mq_api::Retention::Handled { max: 5 });
    let producer = broker.producer(spec.retry_for(Duration::ZERO)).await.unwrap();
    let mut refused = 0;
    for n in 0..20 {
        if let Err(e) = producer.send(Message::new(n.to_string())).await {
            assert_eq!(e.outcome(), Some(Outcome::Unknown), "a nack of a fan-out: {e}");
            refused += 1;
        }
    }
    assert!((14..=15).contains(&refused), "{refused}");
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_a_queue_with_a_time_to_live_end_in_the_dead_letters() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    for kind in ["quorum", "classic"] {
        let broker = rabbit.connect(&format!("queue_type={kind}")).await;
        let sub = Subscription::group(kind, "g").native("message-ttl", "300");
        let consumer = broker.subscribe(sub.clone()).await.unwrap();
        consumer.control().close(Duration::from_secs(5)).await;
        let producer = broker.producer(kind).await.unwrap();
        for n in 0..5 {
            producer.send(Message::new(n.to_string())).await.unwrap();
        }
        let mut letters = broker.subscribe(Subscription::group(Topic::dead_letters(kind, "g"), "ops")).await.unwrap();
        for n in 0..5 {
            let letter = next(&mut letters).await;
            assert_eq!(text(&letter), n.to_string(), "{kind}");
            letter.ack().await;
        }
        let mut consumer = broker.subscribe(sub).await.unwrap();
        quiet(&mut consumer, Duration::from_millis(300)).await;
        broker.close(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_active_consumer_of_a_quorum_queue() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    only_one_reads(&broker, "t").await;
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_says_its_version() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let server = broker.capabilities().server.clone().expect("it says so in its first frame");
    let version = server.strip_prefix("RabbitMQ ").expect("its name");
    assert!(version.split('.').count() >= 3 && version.starts_with(|c: char| c.is_ascii_digit()), "{server}");
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn options_that_would_mean_nothing_are_refused() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let (_raw, channel) = rabbit.raw().await;
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare("jobs".into(), durable, FieldTable::default()).await.unwrap();
    let broker = rabbit.connect("").await;
    let jobs = || Topic::native("jobs");
    for (sub, name, value) in [
        // A topic exchange gives them everything.
        (Subscription::group("t", "g"), "headers", "format=pdf"),
        (Subscription::broadcast("t"), "headers", "format=pdf"),
        (Subscription::group("t", "g"), "headers-match", "any"),
        (Subscription::broadcast("t"), "queue-type", "quorum"),
        (Subscription::group(jobs(), "g"), "routing-key", "a.*"),
        (Subscription::group(jobs(), "g"), "max-length", "5"),
        (Subscription::group(jobs(), "g"), "single-active", "true"),
        (Subscription::group(Topic::dead_letters("t", "g"), "ops"), "routing-key", "a.*"),
    ] {
        let refused =
            broker.subscribe(sub.native(name, value)).await.err().unwrap_or_else(|| panic!("{name} is ignored"));
        assert!(refused.kind() == ErrorKind::Config && refused.to_string().contains(name), "{refused}");
    }
    let refused = broker.producer(ProducerSpec::new(jobs()).native("routing-key", "a")).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Config, "{refused}");
    // What bounds a queue bounds that of a broadcast.
    let sub = Subscription::broadcast("b").native("max-length", "10");
    let mut few = broker.subscribe(sub.max_in_flight(1)).await.unwrap();
    broker.producer("b").await.unwrap().send(Message::new("x")).await.unwrap();
    assert_eq!(text(&next(&mut few).await), "x");
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broadcast_that_cannot_begin_leaves_no_queue() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let mut running = broker.subscribe(Subscription::broadcast("there")).await.unwrap();
    for _ in 0..5 {
        let sub = Subscription::broadcast(Topic::native("exchange://nothing")).provisioning(Provisioning::None);
        let error = broker.subscribe(sub).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
    let began = Instant::now();
    loop {
        let queues = rabbit.control(&["list_queues", "name", "consumers"]);
        let mut idle = queues.lines().filter(|line| line.starts_with("amq.gen") && line.ends_with("\t0"));
        if idle.next().is_none() && queues.contains("amq.gen") {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(90), "{queues}");
    }
    // Who reads keeps its queue.
    broker.producer("there").await.unwrap().send(Message::new("x")).await.unwrap();
    assert_eq!(text(&next(&mut running).await), "x");
    broker.close(Duration::from_secs(5)).await;
}
