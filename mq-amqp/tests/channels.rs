//! A connection's channels are numbered, and numbers are few.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use control::{Rabbit, next, text};
use mq_api::{BrokerExt, Message, ProducerSpec, Subscription};
use mq_testbed::RabbitOptions;
use std::time::Duration;

/// Each topic that is made ends some channels, because the server is asked for what is not there; with numbers for some hundred
/// channels these go round several times.
#[tokio::test(flavor = "multi_thread")]
async fn channels_that_the_server_closed_leave_numbers_for_others() {
    let lines = vec!["channel_max = 200".to_owned()];
    let rabbit = Rabbit::start(RabbitOptions { lines, ..RabbitOptions::default() });
    let broker = rabbit.connect("queue_type=classic").await;
    let mut kept = Vec::new();
    for number in 0..120 {
        let topic = format!("t{number}");
        let sub = Subscription::group(topic.as_str(), "g");
        let mut consumer = broker.subscribe(sub).await.unwrap_or_else(|e| panic!("topic {number}: {e}"));
        let spec = ProducerSpec::new(topic.as_str()).group("g");
        let producer = broker.producer(spec).await.unwrap_or_else(|e| panic!("topic {number}: {e}"));
        // Those that stay use their numbers all the time.
        if number % 12 == 0 {
            kept.push((producer, consumer));
            continue;
        }
        producer.send(Message::new(topic.clone())).await.unwrap();
        let delivery = next(&mut consumer).await;
        assert_eq!(text(&delivery), topic);
        delivery.ack().await;
        consumer.control().close(Duration::from_secs(5)).await;
        producer.close(Duration::from_secs(5)).await;
    }
    for (number, (producer, consumer)) in kept.iter_mut().enumerate() {
        producer.send(Message::new(number.to_string())).await.unwrap();
        let delivery = next(consumer).await;
        assert_eq!(text(&delivery), number.to_string());
        delivery.ack().await;
    }
    broker.close(Duration::from_secs(5)).await;
}
