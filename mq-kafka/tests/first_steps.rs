//! The everyday path on a real Kafka: send, receive, ack, nack, dead letter. Needs MQ_TEST_KAFKA_URL.

mod world;

use mq_api::{BrokerExt, ConsumerExt, Failure, Feature, Message, RetryPolicy, Settled, Subscription, Topic};
use std::time::Duration;
use world::{World, within};

#[tokio::test(flavor = "multi_thread")]
async fn send_receive_ack_nack_dead_letter() {
    let Some(w) = World::new("steps") else { return };
    let broker = w.connect().await;
    assert!(broker.capabilities().has(Feature::PerKey));
    let topic = w.topic("orders");
    let producer = broker.producer(topic.as_str()).await.unwrap();
    for n in 0..10 {
        let receipt = producer.send(Message::new(format!("m{n}")).key("k")).await.unwrap();
        assert!(receipt.position.is_some());
    }
    let retry = RetryPolicy::attempts(2).delays([Duration::from_millis(100)]);
    let sub = Subscription::group(topic.as_str(), "g").retry(retry).lease(Duration::from_secs(6));
    let mut consumer = broker.subscribe(sub).await.unwrap();
    let mut attempts = Vec::new();
    for _ in 0..11 {
        let delivery = within(consumer.recv()).await.unwrap().unwrap();
        let text = String::from_utf8_lossy(delivery.payload_bytes()).into_owned();
        attempts.push((text.clone(), delivery.attempt()));
        if text == "m3" {
            delivery.nack(Failure::failed("no")).await;
        } else {
            let settled = within(delivery.ack()).await;
            assert!(matches!(settled, Settled::Confirmed(_)), "{settled:?}");
        }
    }
    assert_eq!(attempts.iter().filter(|(m, _)| m == "m3").map(|(_, a)| *a).collect::<Vec<_>>(), [1, 2]);
    let letters = Subscription::group(Topic::dead_letters(topic.as_str(), "g"), "ops").lease(Duration::from_secs(6));
    let mut dead = broker.subscribe(letters).await.unwrap();
    let letter = within(dead.recv()).await.unwrap().unwrap();
    assert_eq!(letter.payload_bytes(), b"m3");
    assert_eq!(letter.headers.get_str("mq-reason"), Some("max-attempts"));
    assert!(within(letter.ack()).await.is_ok());
    let report = within(broker.close(Duration::from_secs(5))).await;
    assert!(report.is_clean(), "{report:?}");
}
