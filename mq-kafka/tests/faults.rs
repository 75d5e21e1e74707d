//! Faults on a real Kafka of the test's own, with messages in flight: nothing confirmed is lost, and consumers are back soon.
//! Needs the programs that `cargo xtask brokers up` installs; `MQ_FAULT_MESSAGES` sets how many are sent (default 20,000).
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod world;

use mq_api::{Broker, BrokerExt, ConsumerExt, HealthState, Message, Outcome, Settled, Subscription};
use mq_testbed::proxy::{Direction, Proxy, Trouble};
use mq_testbed::{Kind, Server, private};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use world::within;

fn messages() -> u64 {
    std::env::var("MQ_FAULT_MESSAGES").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000)
}

/// A private server, or nothing, loudly.
fn server() -> Option<Server> {
    private(Server::start(Kind::Kafka))
}

async fn connect(url: &str) -> Arc<dyn Broker> {
    tokio::time::timeout(Duration::from_secs(60), mq_kafka::connect(&format!("{url}?min_session=1s")))
        .await
        .unwrap()
        .unwrap()
}

fn sub() -> Subscription {
    Subscription::group("work", "crew").lease(Duration::from_secs(3)).partitions(8)
}

#[derive(Default)]
struct Seen {
    counts: Mutex<HashMap<u64, u32>>,
    handled: AtomicU64,
    stop: AtomicBool,
}

/// Receives and acknowledges until told to stop.
async fn work(broker: Arc<dyn Broker>, seen: Arc<Seen>) {
    let mut consumer = broker.subscribe(sub()).await.unwrap();
    while !seen.stop.load(Ordering::Acquire) {
        let Ok(got) = tokio::time::timeout(Duration::from_millis(100), consumer.recv()).await else { continue };
        let Some(delivery) = got.unwrap() else { return };
        let number: u64 = std::str::from_utf8(delivery.payload_bytes()).unwrap().parse().unwrap();
        drop(delivery.ack());
        *seen.counts.lock().unwrap().entry(number).or_default() += 1;
        seen.handled.fetch_add(1, Ordering::Release);
    }
}

/// Sends, with `fault` a third of the way; then everything confirmed has to be handled. The time from the end of the fault to
/// the next message, and how many came more than once.
async fn under<T: Send + 'static>(url: String, fault: impl FnOnce() -> T + Send + 'static) -> (Duration, usize) {
    let n = messages();
    let seen = Arc::new(Seen::default());
    let sender = connect(&url).await;
    let producer = sender.producer(mq_api::ProducerSpec::new("work").partitions(8).group("crew")).await.unwrap();
    let (one, two) = (connect(&url).await, connect(&url).await);
    let crew = [tokio::spawn(work(one.clone(), seen.clone())), tokio::spawn(work(two.clone(), seen.clone()))];
    let mut fault = Some(fault);
    let (mut back, mut kept) = (None, None);
    let mut sent = 0;
    while sent < n {
        let window: Vec<_> = (sent..(sent + 1_000).min(n))
            .map(|i| producer.send(Message::new(i.to_string()).key(format!("k{}", i % 97))))
            .collect();
        let running = if sent >= n / 3 { fault.take().map(tokio::task::spawn_blocking) } else { None };
        for (i, sending) in window.into_iter().enumerate() {
            let result = sending.await;
            assert!(result.is_ok(), "message {}: {result:?}", sent + i as u64);
        }
        if let Some(running) = running {
            // The server lives as long as the test.
            kept = Some(running.await.unwrap());
            back = Some((Instant::now(), seen.handled.load(Ordering::Acquire)));
        }
        sent = (sent + 1_000).min(n);
        if let Some((at, before)) = back
            && seen.handled.load(Ordering::Acquire) > before
        {
            back = None;
            eprintln!("handling again after {:?}", at.elapsed());
        }
    }
    let began = Instant::now();
    let all = || seen.counts.lock().unwrap().len() as u64 == n;
    while !all() {
        assert!(began.elapsed() < Duration::from_secs(60), "{} of {n} handled", seen.counts.lock().unwrap().len());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let took = began.elapsed();
    seen.stop.store(true, Ordering::Release);
    for member in crew {
        member.await.unwrap();
    }
    let twice = seen.counts.lock().unwrap().values().filter(|c| **c > 1).count();
    for broker in [one, two, sender] {
        let report = within(broker.close(Duration::from_secs(5))).await;
        assert!(report.unknown == 0 && report.abandoned == 0, "{report:?}");
    }
    drop(kept);
    eprintln!("{n} confirmed, 0 lost, {twice} more than once; all handled {took:?} after the last send");
    (took, twice)
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_and_restarted() {
    let Some(mut server) = server() else { return };
    let url = server.url();
    under(url, move || {
        server.kill().unwrap();
        server.restart().unwrap();
        server
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn frozen_beyond_the_session() {
    let Some(mut server) = server() else { return };
    let url = server.url();
    under(url, move || {
        server.freeze().unwrap();
        std::thread::sleep(Duration::from_secs(5));
        server.thaw().unwrap();
        server
    })
    .await;
}

async fn through_a_proxy(trouble: Trouble, lasts: Duration) {
    let Some((server, mut proxy)) = private(Proxy::with_server(Kind::Kafka, 7)) else { return };
    let url = server.url_at(proxy.port());
    under(url, move || {
        proxy.begin(trouble).unwrap();
        std::thread::sleep(lasts);
        if trouble != Trouble::Cut {
            proxy.end(trouble).unwrap();
        }
        (server, proxy)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_cut() {
    through_a_proxy(Trouble::Cut, Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_refused_for_a_while() {
    through_a_proxy(Trouble::Refuse, Duration::from_secs(2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_stalled_beyond_the_session() {
    through_a_proxy(Trouble::Stall(Direction::ToClient), Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn down_at_start_and_away_at_close() {
    let Some(mut server) = server() else { return };
    let url = server.url();
    server.kill().unwrap();
    let waiting = tokio::spawn({
        let url = url.clone();
        async move { connect(&url).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!waiting.is_finished(), "connected to a server that is down");
    server.restart().unwrap();
    let broker = waiting.await.unwrap();
    let producer = broker.producer("work").await.unwrap();
    let mut consumer = broker.subscribe(sub().partitions(12)).await.unwrap();
    producer.send(Message::new("1")).await.unwrap();
    let held = within(consumer.recv()).await.unwrap().unwrap();
    server.kill().unwrap();
    within(consumer.control().health().wait_for(|h| h.state == HealthState::Reconnecting)).await;
    let send = producer.send_with(Message::new("2"), mq_api::SendOptions::timeout(Duration::from_millis(500)));
    let error = within(send).await.unwrap_err();
    assert_eq!(error.outcome(), Some(Outcome::NotSent), "{error}");
    let ack = tokio::spawn(held.ack());
    let began = Instant::now();
    let report = within(broker.close(Duration::from_secs(1))).await;
    assert!(began.elapsed() < Duration::from_secs(6), "close took {:?}: {report:?}", began.elapsed());
    let settled = within(ack).await.unwrap();
    assert!(matches!(settled, Settled::Unknown | Settled::Stale), "{settled:?}");
    // Wrong from the start: nothing listens there, and the limit is short.
    let began = Instant::now();
    let error = mq_kafka::connect(&format!("{url}?connect_timeout=1s")).await.err().unwrap();
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    assert_eq!(error.kind(), mq_api::ErrorKind::Unavailable, "{error}");
}
