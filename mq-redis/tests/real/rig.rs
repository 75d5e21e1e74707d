//! What the tests share: servers, connections, a load and a count of what arrived.

use futures_util::future::join_all;
use mq_api::{Broker, BrokerExt, Consumer, ConsumerExt, Message, Producer, RetryPolicy, Subscription};
use mq_testbed::{RedisOptions, Server};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

pub(crate) const TOPIC: &str = "orders";
pub(crate) const GROUP: &str = "billing";
/// Long enough for a busy machine, short enough to wait for.
pub(crate) const LEASE: Duration = Duration::from_secs(1);

/// A server of this test's own; `None` is noted as skipped.
pub(crate) fn server(durable: bool, lines: &[&str]) -> Option<Server> {
    let lines = lines.iter().map(|l| (*l).to_owned()).collect();
    mq_testbed::private(RedisOptions { durable, lines, ..RedisOptions::default() }.start())
}

pub(crate) async fn open(url: &str) -> Arc<dyn Broker> {
    mq_redis::connect(url).await.expect("a connection")
}

/// A connection that goes round the library.
pub(crate) fn raw(server: &Server) -> redis::Connection {
    redis::Client::open(server.url()).expect("a URL").get_connection().expect("a connection")
}

pub(crate) fn ask<T: redis::FromRedisValue>(raw: &mut redis::Connection, words: &[&str]) -> T {
    let mut cmd = redis::cmd(words[0]);
    words[1..].iter().for_each(|w| {
        cmd.arg(*w);
    });
    cmd.query(raw).unwrap_or_else(|e| panic!("{words:?}: {e}"))
}

pub(crate) fn sub() -> Subscription {
    Subscription::group(TOPIC, GROUP)
        .lease(LEASE)
        .retry(RetryPolicy::attempts(5).delays([Duration::from_millis(200)]).jitter(0.0))
}

pub(crate) fn label(delivery: &mq_api::Delivery) -> String {
    String::from_utf8_lossy(delivery.payload_bytes()).into_owned()
}

/// Sends `n` messages, a hundred at a time, and says which were confirmed.
pub(crate) fn load(producer: Arc<dyn Producer>, name: &'static str, n: usize) -> JoinHandle<Vec<String>> {
    tokio::spawn(async move {
        let mut confirmed = Vec::with_capacity(n);
        for first in (0..n).step_by(100) {
            let labels: Vec<String> = (first..(first + 100).min(n)).map(|i| format!("{name}{i}")).collect();
            let sent = join_all(labels.iter().map(|l| producer.send(Message::new(l.clone())))).await;
            confirmed.extend(labels.into_iter().zip(sent).filter(|(_, r)| r.is_ok()).map(|(l, _)| l));
        }
        confirmed
    })
}

/// Receives, acknowledges and counts until it is stopped.
pub(crate) struct Counting {
    seen: Arc<Mutex<BTreeMap<String, u32>>>,
    stop: Arc<AtomicBool>,
    task: Option<JoinHandle<Box<dyn Consumer>>>,
}

impl Counting {
    pub(crate) fn start(mut consumer: Box<dyn Consumer>) -> Self {
        let seen = Arc::new(Mutex::new(BTreeMap::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (all, end) = (seen.clone(), stop.clone());
        let task = tokio::spawn(async move {
            while !end.load(Ordering::Relaxed) {
                match tokio::time::timeout(Duration::from_millis(50), consumer.recv()).await {
                    Err(_) => {}
                    Ok(Ok(Some(delivery))) => {
                        *all.lock().unwrap().entry(label(&delivery)).or_default() += 1;
                        drop(delivery.ack());
                    }
                    // The connection was closed by the test.
                    Ok(Ok(None)) => break,
                    Ok(other) => panic!("the consumer ended: {other:?}"),
                }
            }
            consumer
        });
        Self { seen, stop, task: Some(task) }
    }

    pub(crate) fn counts(&self) -> BTreeMap<String, u32> {
        self.seen.lock().unwrap().clone()
    }

    /// Waits until all of `labels` were seen.
    pub(crate) async fn has_all(&self, labels: &[String], limit: Duration) {
        let until = Instant::now() + limit;
        loop {
            let missing: Vec<_> = {
                let seen = self.seen.lock().unwrap();
                labels.iter().filter(|l| !seen.contains_key(*l)).cloned().collect()
            };
            if missing.is_empty() {
                return;
            }
            let some: Vec<_> = missing.iter().take(5).collect();
            assert!(Instant::now() < until, "{} of {} are missing: {some:?}", missing.len(), labels.len());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn stop(mut self) -> (BTreeMap<String, u32>, Box<dyn Consumer>) {
        self.stop.store(true, Ordering::Relaxed);
        let consumer = self.task.take().expect("runs").await.expect("no panic");
        (self.counts(), consumer)
    }
}

/// The next delivery, within a limit.
pub(crate) async fn next(consumer: &mut Box<dyn Consumer>) -> mq_api::Delivery {
    let next = tokio::time::timeout(Duration::from_secs(20), consumer.recv()).await;
    next.expect("in time").expect("no error").expect("not closed")
}

/// Nothing comes for a while.
pub(crate) async fn quiet(consumer: &mut Box<dyn Consumer>, limit: Duration) {
    if let Ok(more) = tokio::time::timeout(limit, consumer.recv()).await {
        panic!("more came: {more:?}");
    }
}

/// Pending entries of the group, as the server counts them.
pub(crate) fn pending(raw: &mut redis::Connection) -> i64 {
    let summary: Vec<redis::Value> = ask(raw, &["XPENDING", TOPIC, GROUP]);
    match summary.first() {
        Some(redis::Value::Int(n)) => *n,
        other => panic!("XPENDING gave {other:?}"),
    }
}

pub(crate) async fn close(broker: Arc<dyn Broker>) {
    let report = broker.close(Duration::from_secs(5)).await;
    assert!(report.is_clean(), "{report:?}");
}

/// A broker with a producer and a member.
pub(crate) async fn all(url: &str) -> (Arc<dyn Broker>, Arc<dyn Producer>, Box<dyn Consumer>) {
    let broker = open(url).await;
    let consumer = broker.subscribe(sub()).await.expect("a member");
    let producer = broker.producer(TOPIC).await.expect("a producer");
    (broker, producer, consumer)
}
