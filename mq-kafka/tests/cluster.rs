//! Three brokers with three copies of everything: the leader killed, and frozen, under load.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod world;

use mq_api::{Broker, BrokerExt, ConsumerExt, Durability, Message, ProducerSpec, Subscription};
use mq_testbed::{Cluster, Formation};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use world::within;

async fn connect(url: &str) -> Arc<dyn Broker> {
    within(mq_kafka::connect(&format!("{url}?min_session=1s"))).await.unwrap()
}

/// The broker (1, 2 or 3) that leads the only partition.
fn leader(url: &str, topic: &str) -> usize {
    let brokers = url.trim_start_matches("kafka://");
    let looker: BaseConsumer = ClientConfig::new().set("bootstrap.servers", brokers).create().unwrap();
    let found = looker.fetch_metadata(Some(topic), Duration::from_secs(10)).unwrap();
    found.topics()[0].partitions()[0].leader() as usize
}

/// Sends all the while, hurts the leader, and wants everything confirmed to be handled.
async fn under(hurt: impl FnOnce(&mut Cluster, usize) + Send + 'static) {
    let cluster = tokio::task::block_in_place(|| Cluster::start(Formation::Kafka)).unwrap();
    let url = cluster.url();
    let broker = connect(&url).await;
    assert_eq!(broker.capabilities().send_level, Durability::Replicated, "three copies, two of them in time");
    let producer = within(broker.producer(ProducerSpec::new("work").partitions(1).group("crew"))).await.unwrap();
    let sub = Subscription::group("work", "crew").partitions(1).lease(Duration::from_secs(6));
    let mut consumer = within(broker.subscribe(sub)).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let sending = tokio::spawn(async move {
        let mut confirmed = 0u64;
        while !stopped.load(Ordering::Acquire) {
            let round: Vec<_> =
                (confirmed..confirmed + 200).map(|n| producer.send(Message::new(n.to_string()))).collect();
            for sending in round {
                sending.await.expect("a send");
                confirmed += 1;
            }
        }
        confirmed
    });
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let handled = seen.clone();
    let receiving = tokio::spawn(async move {
        while let Some(delivery) = consumer.recv().await.unwrap() {
            let number: u64 = std::str::from_utf8(delivery.payload_bytes()).unwrap().parse().unwrap();
            drop(delivery.ack());
            handled.lock().unwrap().insert(number);
        }
    });
    let count = || seen.lock().unwrap().len();
    within(async {
        while count() < 5_000 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let looked = url.clone();
    let cluster = tokio::task::spawn_blocking(move || {
        let mut cluster = cluster;
        let number = leader(&looked, "work");
        hurt(&mut cluster, number - 1);
        cluster
    })
    .await
    .unwrap();
    let (began, before) = (Instant::now(), count());
    within(async {
        while count() < before + 5_000 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    eprintln!("5,000 more handled within {:?}", began.elapsed());
    stop.store(true, Ordering::Release);
    let confirmed = within(sending).await.unwrap();
    within(async {
        while count() as u64 != confirmed {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    eprintln!("{confirmed} confirmed, 0 lost");
    within(broker.close(Duration::from_secs(10))).await;
    within(receiving).await.unwrap();
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: three brokers; run with --ignored"]
async fn the_leader_is_killed() {
    under(|cluster, leader| {
        cluster.nodes()[leader].kill().unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: three brokers; run with --ignored"]
async fn the_leader_is_frozen_for_fifteen_seconds() {
    under(|cluster, leader| {
        let node = &mut cluster.nodes()[leader];
        node.freeze().unwrap();
        // The fault is its length.
        std::thread::sleep(Duration::from_secs(15));
        node.thaw().unwrap();
    })
    .await;
}
