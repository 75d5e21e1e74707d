//! Sending, receiving and settling on a real RabbitMQ, on quorum and on classic queues.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

use mq_api::{
    Broker, BrokerExt, Consumer, ConsumerExt, Count, Durability, Failure, Message, Outcome, ProducerSpec, Settled,
    Subscription, Topic,
};
use mq_testbed::Kind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

static NUMBER: AtomicU64 = AtomicU64::new(0);

fn topic(name: &str) -> String {
    format!("{name}-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

async fn each_type(test: impl AsyncFn(Arc<dyn Broker>)) {
    let Some(url) = mq_testbed::need(Kind::RabbitMq) else { return };
    for kind in ["quorum", "classic"] {
        let broker = mq_amqp::connect(&format!("{url}?queue_type={kind}")).await.unwrap();
        test(broker.clone()).await;
        let report = broker.close(Duration::from_secs(5)).await;
        assert_eq!((report.leaked, report.abandoned), (0, 0), "{kind}: {report:?}");
    }
}

async fn next(consumer: &mut Box<dyn Consumer>) -> mq_api::Delivery {
    tokio::time::timeout(Duration::from_secs(20), consumer.recv()).await.expect("in time").unwrap().expect("a delivery")
}

async fn nothing(consumer: &mut Box<dyn Consumer>, time: Duration) {
    let got = tokio::time::timeout(time, consumer.recv()).await;
    assert!(got.is_err(), "{got:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn send_receive_ack() {
    each_type(async |broker| {
        let topic = topic("plain");
        let mut consumer = broker.subscribe(Subscription::group(&topic, "g")).await.unwrap();
        let producer = broker.producer(topic.as_str()).await.unwrap();
        for n in 0..1000 {
            let receipt = producer.send(Message::new(n.to_string()).key("k")).await.unwrap();
            assert_eq!(receipt.level, Durability::Disk);
        }
        for n in 0..1000 {
            let delivery = next(&mut consumer).await;
            assert_eq!(delivery.payload.as_deref(), Some(n.to_string().as_bytes()));
            assert_eq!((delivery.attempt(), delivery.key.as_deref()), (1, Some(&b"k"[..])));
            assert_eq!(delivery.ack().await, Settled::Confirmed(Durability::Sent));
        }
        nothing(&mut consumer, Duration::from_millis(300)).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_count_and_end_in_the_dead_letters() {
    each_type(async |broker| {
        let topic = topic("retry");
        let mut sub = Subscription::group(&topic, "g");
        sub.retry = mq_api::RetryPolicy::attempts(3).delays([Duration::from_millis(100), Duration::from_millis(1500)]);
        let mut consumer = broker.subscribe(sub).await.unwrap();
        let producer = broker.producer(topic.as_str()).await.unwrap();
        let sent = Message::new("x").header("user", "kept");
        let id = sent.id.clone();
        producer.send(sent).await.unwrap();
        let mut at = std::time::Instant::now();
        for attempt in 1..=3u32 {
            let delivery = next(&mut consumer).await;
            assert_eq!(delivery.attempt(), attempt);
            let least = [0, 100, 1500][attempt as usize - 1];
            assert!(at.elapsed() >= Duration::from_millis(least), "early: {:?}", at.elapsed());
            assert!(at.elapsed() <= Duration::from_millis(least + 1200), "late: {:?}", at.elapsed());
            at = std::time::Instant::now();
            assert_eq!(delivery.nack("no").await, Settled::Confirmed(Durability::Sent));
        }
        let mut letters = broker.subscribe(Subscription::group(Topic::dead_letters(&topic, "g"), "ops")).await.unwrap();
        let letter = next(&mut letters).await;
        let envelope = letter.envelope().unwrap();
        assert_eq!((envelope.attempts, envelope.reason.as_str()), (3, "max-attempts"));
        assert_eq!((letter.id.clone(), letter.headers.get_str("user")), (id, Some("kept")));
        assert_eq!(envelope.error.as_deref(), Some("no"));
        letter.ack().await;
        nothing(&mut consumer, Duration::from_millis(300)).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn permanent_release_and_drain() {
    each_type(async |broker| {
        let topic = topic("release");
        let mut consumer = broker.subscribe(Subscription::group(&topic, "g")).await.unwrap();
        let producer = broker.producer(topic.as_str()).await.unwrap();
        producer.send(Message::new("bad")).await.unwrap();
        next(&mut consumer).await.nack(Failure::permanent("never")).await;
        for n in 0..20 {
            producer.send(Message::new(n.to_string())).await.unwrap();
        }
        let delivery = next(&mut consumer).await;
        delivery.release().await;
        let again = next(&mut consumer).await;
        let report = tokio::join!(consumer.control().close(Duration::from_secs(5)), async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            again.ack().await
        });
        assert_eq!(report.0.leaked, 0);
        let mut second = broker.subscribe(Subscription::group(&topic, "g")).await.unwrap();
        for _ in 0..19 {
            let delivery = next(&mut second).await;
            assert_eq!(delivery.attempt(), 1, "never counted");
            delivery.ack().await;
        }
        nothing(&mut second, Duration::from_millis(300)).await;
        second.control().close(Duration::from_secs(5)).await;
        let backlog = broker.admin().backlog(&topic.as_str().into(), &"g".into()).await.unwrap();
        assert_eq!((backlog.ready.exact(), backlog.dead), (Some(0), Count::AtLeast(1)), "{backlog:?}");
        assert_eq!(broker.admin().dead_letters(&topic.as_str().into(), &"g".into(), 10).await.unwrap().len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn returns_reach_the_right_send() {
    each_type(async |broker| {
        let topic = topic("returns");
        let producer = broker.producer(ProducerSpec::new(&topic).max_in_flight(20_000, 1 << 30)).await.unwrap();
        let mut sub = Subscription::group(&topic, "g");
        sub = sub.native("routing-key", "yes");
        let _consumer = broker.subscribe(sub).await.unwrap();
        let mut sends = Vec::new();
        for n in 0..20_000 {
            // The same id for all.
            let key = if n % 3 == 0 { "no" } else { "yes" };
            sends.push((n % 3 == 0, producer.send(Message::new("x").id("same").header("amqp.routing-key", key))));
        }
        let (mut wrong, mut unroutable) = (0, 0);
        for (expected, send) in sends {
            match send.await {
                Ok(_) => wrong += usize::from(expected),
                Err(e) => {
                    assert_eq!(
                        (e.kind(), e.outcome()),
                        (mq_api::ErrorKind::Unroutable, Some(Outcome::Rejected)),
                        "{e}"
                    );
                    unroutable += 1;
                    wrong += usize::from(!expected);
                }
            }
        }
        assert_eq!((wrong, unroutable), (0, 6667));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn broadcast_sees_what_comes() {
    each_type(async |broker| {
        let topic = topic("cast");
        let mut one = broker.subscribe(Subscription::broadcast(&topic)).await.unwrap();
        let mut two = broker.subscribe(Subscription::broadcast(&topic)).await.unwrap();
        let producer = broker.producer(topic.as_str()).await.unwrap();
        for n in 0..50 {
            producer.send(Message::new(n.to_string())).await.unwrap();
        }
        for n in 0..50 {
            for consumer in [&mut one, &mut two] {
                let delivery = next(consumer).await;
                assert_eq!(delivery.payload.as_deref(), Some(n.to_string().as_bytes()));
                assert_eq!(delivery.ack().await, Settled::Untracked);
            }
        }
    })
    .await;
}
