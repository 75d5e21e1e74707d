//! A worker whose broker is gone for good ends all the same.

#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use anymq::prelude::*;
use mq_testbed::{RedisOptions, private};
use std::time::{Duration, Instant};

/// A second signal is an `abandon`: what was fetched ahead cannot be given back, and is not waited for.
#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_drain_does_not_wait_for_a_broker_that_is_away() {
    let Some(mut server) = private(RedisOptions::default().start()) else { return };
    let broker = connect(server.url()).await.unwrap();
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    for n in 0..100u64 {
        producer.send(Message::json(&n).unwrap()).await.unwrap();
    }
    let handler = async |Json(_): Json<u64>| tokio::time::sleep(Duration::from_millis(20)).await;
    let worker = Worker::new(broker.clone())
        .shutdown_deadline(Duration::from_secs(60))
        .route(Subscription::group("t", "g").concurrency(1), handler);
    let handle = worker.handle();
    let running = tokio::spawn(worker.run());
    assert!(handle.running().await);
    let control = handle.consumers(&"t".into()).remove(0);
    while control.in_flight() < 50 {
        tokio::task::yield_now().await;
    }
    server.kill().unwrap();
    handle.shutdown();
    let begun = Instant::now();
    handle.abandon();
    let ended = tokio::time::timeout(Duration::from_secs(40), running).await;
    assert!(ended.is_ok(), "the deadline was waited for: {:?}", begun.elapsed());
    broker.close(Duration::from_secs(1)).await;
}
