//! Other libraries doing what anymq's in-memory benchmark does: 256 bytes, publish, receive, acknowledge, on one thread.
//! `cargo xtask bench memory` runs these under callgrind beside ours.
//!
//! Each at the best that its documentation offers for the case. What they leave out of the work: the channels acknowledge
//! nothing; omniqueue's memory queue and ruststream's bus keep no pending list, leases, groups' positions or message ids.

use futures_util::StreamExt;
use omniqueue::backends::InMemoryBackend;
use ruststream::memory::MemoryBroker;
use ruststream::{Broker, IncomingMessage, OutgoingMessage, Publisher, Subscribe, Subscriber};
use std::hint::black_box;
use std::pin::pin;
use std::time::Duration;

/// The names that [`run`] takes.
pub const SCENARIOS: &[&str] = &[
    "tokio-mpsc",
    "kanal",
    "omniqueue-single",
    "omniqueue-batch64",
    "omniqueue-json",
    "ruststream-single",
    "ruststream-batch64",
    "ruststream-json",
];

static PAYLOAD: [u8; 256] = [7; 256];

#[derive(serde::Serialize, serde::Deserialize)]
struct Order {
    id: u64,
    qty: u32,
    price: f64,
}

const ORDER: Order = Order { id: 12345, qty: 3, price: 19.5 };

/// Runs a scenario over `n` messages.
pub async fn run(scenario: &str, n: usize) {
    match scenario {
        "tokio-mpsc" => tokio_mpsc(n).await,
        "kanal" => with_kanal(n).await,
        "omniqueue-single" => omniqueue(n, 1, false).await,
        "omniqueue-batch64" => omniqueue(n, 64, false).await,
        "omniqueue-json" => omniqueue(n, 64, true).await,
        "ruststream-single" => ruststream(n, 1, false).await,
        "ruststream-batch64" => ruststream(n, 64, false).await,
        "ruststream-json" => ruststream(n, 64, true).await,
        other => panic!("no scenario is called {other}"),
    }
}

/// A channel of tokio's.
pub async fn tokio_mpsc(n: usize) {
    let (tx, mut rx) = tokio::sync::mpsc::channel(256);
    for _ in 0..n / 64 {
        for _ in 0..64 {
            tx.send(bytes::Bytes::from_static(&PAYLOAD)).await.expect("open");
        }
        for _ in 0..64 {
            black_box(rx.recv().await.expect("open"));
        }
    }
}

/// A channel of kanal's.
pub async fn with_kanal(n: usize) {
    let (tx, rx) = kanal::bounded_async(256);
    for _ in 0..n / 64 {
        for _ in 0..64 {
            tx.send(bytes::Bytes::from_static(&PAYLOAD)).await.expect("open");
        }
        for _ in 0..64 {
            black_box(rx.recv().await.expect("open"));
        }
    }
}

/// omniqueue's memory queue.
pub async fn omniqueue(n: usize, batch: usize, json: bool) {
    let (tx, mut rx) = InMemoryBackend::builder().build_pair().await.expect("a queue");
    for _ in 0..n / batch {
        for _ in 0..batch {
            if json {
                tx.send_serde_json(&ORDER).await.expect("sent");
            } else {
                tx.send_raw(&PAYLOAD).await.expect("sent");
            }
        }
        if batch == 1 {
            let delivery = rx.receive().await.expect("received");
            black_box(delivery.borrow_payload());
            delivery.ack().await.map_err(|(e, _)| e).expect("acked");
            continue;
        }
        let mut left = batch;
        while left > 0 {
            for delivery in rx.receive_all(left, Duration::from_secs(1)).await.expect("received") {
                if json {
                    let order: Order = delivery.payload_serde_json().expect("json").expect("a payload");
                    black_box(order.id);
                }
                delivery.ack().await.map_err(|(e, _)| e).expect("acked");
                left -= 1;
            }
        }
    }
}

/// ruststream's memory broker.
pub async fn ruststream(n: usize, batch: usize, json: bool) {
    let connected = MemoryBroker::new().connect().await.expect("connected");
    let mut subscriber = connected.subscribe("t").await.expect("subscribed");
    let publisher = connected.publisher();
    let mut stream = pin!(subscriber.stream());
    for _ in 0..n / batch {
        for _ in 0..batch {
            let json = if json { serde_json::to_vec(&ORDER).expect("json") } else { Vec::new() };
            let payload: &[u8] = if json.is_empty() { &PAYLOAD } else { &json };
            publisher.publish(OutgoingMessage::new("t", payload), None).await.expect("sent");
        }
        for _ in 0..batch {
            let message = stream.next().await.expect("open").expect("received");
            if json {
                let order: Order = serde_json::from_slice(message.payload()).expect("json");
                black_box(order.id);
            }
            message.ack().await.expect("acked");
        }
    }
}
