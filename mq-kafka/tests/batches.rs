//! Records are taken from a partition's queue many at a time: what stands between them, and who owns them meanwhile. On
//! librdkafka's mock cluster; no server is needed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod world;

use mq_api::{BrokerExt, Consumer, ConsumerExt, Message, ProducerSpec, Settled, Subscription};
use rdkafka::types::{RDKafkaApiKey as Api, RDKafkaRespErr as E};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use world::bed::{Bed, TOPIC};
use world::within;

async fn send(bed: &Bed, topic: &str, numbers: std::ops::Range<u32>) {
    let producer = within(bed.broker.producer(ProducerSpec::new(topic))).await.unwrap();
    let sends: Vec<_> = numbers.map(|n| producer.send(Message::new(n.to_string()).key(n.to_string()))).collect();
    for sending in sends {
        within(sending).await.unwrap();
    }
}

fn number(payload: &[u8]) -> u32 {
    std::str::from_utf8(payload).unwrap().parse().unwrap()
}

/// An error stands in the queue among records: none of these is lost, or comes twice.
#[tokio::test(flavor = "multi_thread")]
async fn errors_among_records_lose_none() {
    let bed = Bed::start().await;
    let mut consumer = bed.consumer(Bed::sub().max_in_flight(16)).await;
    let mut sent = 0;
    for code in [
        E::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
        E::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART,
        E::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION,
        E::RD_KAFKA_RESP_ERR_KAFKA_STORAGE_ERROR,
        E::RD_KAFKA_RESP_ERR_UNKNOWN,
        E::RD_KAFKA_RESP_ERR__TRANSPORT,
    ] {
        // Some are read ahead, and the answers after them are errors.
        send(&bed, TOPIC, sent..sent + 100).await;
        let mut held = Vec::new();
        for _ in 0..16 {
            held.push(within(consumer.recv()).await.unwrap().unwrap());
        }
        bed.cluster.request_errors(Api::Fetch, &[code; 4]);
        send(&bed, TOPIC, sent + 100..sent + 200).await;
        let mut seen = Vec::new();
        let mut answers = Vec::new();
        while seen.len() < 200 {
            for got in held.drain(..) {
                seen.push(number(got.payload_bytes()));
                answers.push(got.ack());
            }
            if seen.len() < 200 {
                held.push(within(consumer.recv()).await.unwrap().unwrap());
            }
        }
        assert_eq!(seen, (sent..sent + 200).collect::<Vec<_>>(), "{code:?}");
        for answer in answers {
            assert!(matches!(within(answer).await, Settled::Confirmed(_)), "{code:?}");
        }
        bed.cluster.clear_request_errors(Api::Fetch);
        sent += 200;
    }
    bed.close().await;
}

/// Receives and acknowledges until it is closed; how many it had.
async fn work(mut consumer: Box<dyn Consumer>, seen: Arc<Mutex<BTreeMap<u32, u32>>>, n: watch::Sender<usize>) -> usize {
    let mut had = 0;
    while let Some(got) = consumer.recv().await.unwrap() {
        *seen.lock().unwrap().entry(number(got.payload_bytes())).or_default() += 1;
        n.send_replace(seen.lock().unwrap().len());
        had += 1;
        drop(got.ack());
    }
    had
}

/// A partition moves while records of it are read ahead: its new owner has them, the old one has not.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_read_ahead_of_a_partition_that_moves_is_for_its_new_owner() {
    const ALL: u32 = 12_000;
    let bed = Bed::start().await;
    for (topic, partitions) in [("moved", 4), ("moved..crew..dlq", 1), ("moved..crew..retry", 1)] {
        bed.cluster.create_topic(topic, partitions, 1).unwrap();
    }
    send(&bed, "moved", 0..ALL / 2).await;
    let sub = || {
        let sub = Subscription::group("moved", "crew").lease(Duration::from_secs(6)).max_in_flight(8);
        sub.native("librdkafka.fetch.wait.max.ms", "20")
    };
    let seen = Arc::new(Mutex::new(BTreeMap::new()));
    let (told, mut n) = watch::channel(0);
    let first = within(bed.broker.subscribe(sub())).await.unwrap();
    let one = (first.control(), tokio::spawn(work(first, seen.clone(), told.clone())));
    within(n.wait_for(|n| *n >= 100)).await.unwrap();
    let second = within(bed.broker.subscribe(sub())).await.unwrap();
    let two = (second.control(), tokio::spawn(work(second, seen.clone(), told.clone())));
    send(&bed, "moved", ALL / 2..ALL).await;
    within(n.wait_for(|n| *n as u32 == ALL)).await.unwrap();
    let mut had = Vec::new();
    for (control, working) in [one, two] {
        within(control.close(Duration::from_secs(5))).await;
        had.push(within(working).await.unwrap());
    }
    let twice: Vec<_> = seen.lock().unwrap().iter().filter(|(_, n)| **n > 1).map(|(m, _)| *m).collect();
    assert!(twice.is_empty(), "{} came twice: {twice:?}", twice.len());
    assert_eq!(had.iter().sum::<usize>() as u32, ALL, "{had:?}");
    bed.close().await;
}
