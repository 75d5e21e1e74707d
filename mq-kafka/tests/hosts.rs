//! Hosts of the URL that say nothing, or are none. On librdkafka's mock cluster; no server is needed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod world;

use mq_api::{BrokerExt, ConsumerExt, HealthState, Message, ProducerSpec};
use std::time::{Duration, Instant};
use world::bed::{Bed, TOPIC};
use world::within;

/// Sends, receives and closes by a URL of these hosts and the cluster, and says how long it took. Health never says that the
/// cluster is away.
async fn through(bed: &Bed, hosts: &str) -> Duration {
    let began = Instant::now();
    let url = format!("kafka://{hosts},{}?min_session=1s", bed.cluster.bootstrap_servers());
    let broker = within(mq_kafka::connect(&url)).await.unwrap();
    let mut health = broker.health();
    let producer = within(broker.producer(ProducerSpec::new(TOPIC))).await.unwrap();
    let mut consumer = within(broker.subscribe(Bed::sub())).await.unwrap();
    within(producer.send(Message::new("x"))).await.unwrap();
    let got = within(consumer.recv()).await.unwrap().unwrap();
    assert!(within(got.ack()).await.is_ok());
    let took = began.elapsed();
    // Long enough for several looks at the hosts.
    let away = health.wait_for(|h| h.state != HealthState::Running);
    let away = tokio::time::timeout(Duration::from_secs(3), away).await;
    assert!(away.is_err(), "the cluster answers all the while: {away:?}");
    let report = within(broker.close(Duration::from_secs(5))).await;
    assert!(report.is_clean(), "{report:?}");
    took
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_that_say_nothing_hold_up_nobody() {
    let bed = Bed::start().await;
    let silent = mq_testbed::SilentHosts::new(3).unwrap();
    let took = through(&bed, &silent.to_string()).await;
    assert!(took < Duration::from_secs(12), "{took:?}");
    bed.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_none_is_no_outage() {
    let bed = Bed::start().await;
    let took = through(&bed, "no-such-host.invalid:9092").await;
    assert!(took < Duration::from_secs(12), "{took:?}");
    bed.close().await;
}

/// A producer tells of an outage as a consumer does, also one that has nothing to send.
#[tokio::test(flavor = "multi_thread")]
async fn a_producer_whose_broker_is_away_says_so() {
    let bed = Bed::start().await;
    let producer = within(bed.broker.producer(ProducerSpec::new(TOPIC))).await.unwrap();
    let mut health = producer.health();
    assert_eq!(health.current().state, HealthState::Running);
    bed.cluster.broker_down(1).unwrap();
    let away = within(health.wait_for(|h| h.state == HealthState::Reconnecting)).await;
    assert!(!away.reason.is_empty());
    let sending = producer.send(Message::new("x"));
    bed.cluster.broker_up(1).unwrap();
    within(sending).await.unwrap();
    within(health.wait_for(|h| h.state == HealthState::Running)).await;
    bed.close().await;
}
