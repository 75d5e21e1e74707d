//! Producer and consumer without a worker.

use crate::{Order, WARM, allocations::so_far, message};
use anymq::prelude::*;
use anymq::{Deliveries, SendBatch};
use std::sync::Arc;

async fn broker() -> Arc<dyn Broker> {
    anymq::connect("memory://").await.unwrap()
}

fn bench(topic: &str) -> Subscription {
    Subscription::group(topic, "bench").max_in_flight(256)
}

/// Batches of 64, with `queued` messages ahead.
pub(crate) async fn batches(n: usize, queued: usize) -> u64 {
    rounds(n, 1, queued, WARM, "memory://").await
}

/// Batches of 64 through `count` topics in turn. They keep few handled messages, or a thousand topics would never be warm.
pub(crate) async fn topics(n: usize, count: usize) -> u64 {
    rounds(n, count, 0, 64 * 4 * count, "memory://?history=128").await
}

async fn rounds(n: usize, topics: usize, queued: usize, warm: usize, url: &str) -> u64 {
    let broker = anymq::connect(url).await.unwrap();
    let mut handles = Vec::new();
    for topic in 0..topics {
        let topic = format!("t{topic}");
        let consumer = broker.subscribe(bench(&topic)).await.unwrap();
        handles.push((broker.producer(topic.as_str()).await.unwrap(), consumer));
    }
    let mut batch = SendBatch::new();
    for _ in 0..queued.div_ceil(1000) {
        batch.messages.extend((0..1000.min(queued)).map(|_| message()));
        batch = handles[0].0.send_batch(batch).await;
    }
    let (mut deliveries, mut before) = (Deliveries::new(), 0);
    for round in 0..(n + warm) / 64 {
        if round == warm / 64 {
            before = so_far();
        }
        let (producer, consumer) = &mut handles[round % topics];
        batch.messages.extend((0..64).map(|_| message()));
        batch = producer.send_batch(batch).await;
        assert!(batch.all_ok());
        let mut got = 0;
        while got < 64 {
            got += consumer.recv_batch(64 - got, &mut deliveries).await.unwrap();
            deliveries.ack_all().await;
        }
    }
    so_far() - before
}

/// One by one, each step awaited.
pub(crate) async fn single(n: usize) -> u64 {
    let broker = broker().await;
    let mut consumer = broker.subscribe(bench("t")).await.unwrap();
    let producer = broker.producer("t").await.unwrap();
    let mut before = 0;
    for round in 0..n + WARM {
        if round == WARM {
            before = so_far();
        }
        producer.send(message()).await.unwrap();
        consumer.recv().await.unwrap().unwrap().ack().await;
    }
    so_far() - before
}

/// Producer and consumer in two tasks.
pub(crate) async fn two_tasks(n: usize, in_batches: bool) -> u64 {
    let broker = broker().await;
    let mut consumer = broker.subscribe(bench("t")).await.unwrap();
    let producer = broker.producer("t").await.unwrap();
    let total = n / 64 * 64 + WARM;
    let sending = tokio::spawn(async move {
        let mut batch = SendBatch::new();
        for _ in 0..total / 64 {
            if in_batches {
                batch.messages.extend((0..64).map(|_| message()));
                batch = producer.send_batch(batch).await;
                tokio::task::yield_now().await;
            } else {
                for _ in 0..64 {
                    producer.send(message()).await.unwrap();
                }
            }
        }
    });
    let receiving = tokio::spawn(async move {
        let (mut got, mut before) = (0, 0);
        let mut deliveries = Deliveries::new();
        while got < total {
            if got >= WARM && before == 0 {
                before = so_far();
            }
            if in_batches {
                got += consumer.recv_batch(64, &mut deliveries).await.unwrap();
                deliveries.ack_all().await;
            } else {
                consumer.recv().await.unwrap().unwrap().ack().await;
                got += 1;
            }
        }
        before
    });
    let before = receiving.await.unwrap();
    sending.await.unwrap();
    so_far() - before
}

/// Batches of 64 that are written as JSON before and read after.
pub(crate) async fn json_batches(n: usize) -> u64 {
    let broker = broker().await;
    let mut consumer = broker.subscribe(bench("t")).await.unwrap();
    let producer = broker.producer("t").await.unwrap();
    let (mut batch, mut deliveries, mut before) = (SendBatch::new(), Deliveries::new(), 0);
    for round in 0..(n + WARM) / 64 {
        if round == WARM / 64 {
            before = so_far();
        }
        batch.messages.extend((0..64).map(|_| Message::json(&Order::EXAMPLE).unwrap()));
        batch = producer.send_batch(batch).await;
        let mut got = 0;
        while got < 64 {
            got += consumer.recv_batch(64 - got, &mut deliveries).await.unwrap();
            for message in deliveries.messages() {
                let order: Order = serde_json::from_slice(message.payload_bytes()).unwrap();
                std::hint::black_box(order.id);
            }
            deliveries.ack_all().await;
        }
    }
    so_far() - before
}
