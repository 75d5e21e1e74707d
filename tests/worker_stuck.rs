//! Handlers that never end, layers that fail, programs that leave: what is held comes back, and is counted.

#![cfg(feature = "memory")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test's panic is its report")]

use anymq::prelude::*;
use anymq::worker::Routes;
use anymq::{Count, Guarantee};
use std::sync::atomic::{AtomicU64, Ordering as O};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, sleep};

const SECOND: Duration = Duration::from_secs(1);

type Seen = Arc<Mutex<Vec<u64>>>;

fn group() -> Subscription {
    Subscription::group("t", "g").max_processing(60 * SECOND).retry(RetryPolicy::attempts(1))
}

/// Handles number 0 for ever, and notes the others.
fn stuck_at_0(
    seen: &Seen,
) -> impl Fn(Vec<u64>) -> futures_util::future::BoxFuture<'static, ()> + Clone + Send + 'static {
    let seen = seen.clone();
    move |numbers| {
        let seen = seen.clone();
        Box::pin(async move {
            if numbers.contains(&0) {
                std::future::pending::<()>().await;
            }
            seen.lock().unwrap().extend(numbers);
        })
    }
}

/// Sends 0 and, once that is at work, 1; what was handled within five minutes.
async fn second_after_stuck_first<R: Routes + Send + 'static>(
    broker: &Arc<dyn Broker>,
    worker: Worker<(), R>,
    seen: &Seen,
) -> Vec<u64> {
    let handle = worker.handle();
    let task = tokio::spawn(worker.run());
    assert!(handle.running().await);
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    for n in [0u64, 1] {
        producer.send(Message::json(&n).unwrap()).await.unwrap();
        sleep(SECOND).await;
    }
    sleep(300 * SECOND).await;
    handle.abandon();
    task.await.unwrap().unwrap();
    let seen = seen.lock().unwrap();
    seen.clone()
}

// 4.6: past `max_processing` the delivery goes on without the handler, and so does the route.
#[tokio::test(start_paused = true)]
async fn a_batch_handler_that_never_ends_holds_its_place_for_max_processing_only() {
    for url in ["memory://stuck-batch", "memory://stuck-batch-seam?faults=full:0"] {
        let broker = anymq::connect(url).await.unwrap();
        let seen = Seen::default();
        let handler = stuck_at_0(&seen);
        let worker = Worker::new(broker.clone())
            .batch(group(), 10, move |batch: Batch<Json<u64>>| handler(batch.into_iter().map(|Json(n)| n).collect()));
        assert_eq!(second_after_stuck_first(&broker, worker, &seen).await, [1], "{url}");
        let left = broker.admin().backlog(&"t".into(), &"g".into()).await.unwrap();
        assert_eq!((left.ready, left.dead), (Count::Exact(0), Count::Exact(1)), "{url}: {left:?}");
    }
}

// The same of a broadcast, which has nothing to settle.
#[tokio::test(start_paused = true)]
async fn a_handler_of_a_broadcast_that_never_ends_holds_its_place_for_max_processing_only() {
    let sub = Subscription::broadcast("t").max_processing(60 * SECOND);
    let broker = anymq::connect("memory://stuck-broadcast").await.unwrap();
    let seen = Seen::default();
    let handler = stuck_at_0(&seen);
    let worker = Worker::new(broker.clone()).route(sub.clone(), move |Json(n): Json<u64>| handler(vec![n]));
    assert_eq!(second_after_stuck_first(&broker, worker, &seen).await, [1]);

    let broker = anymq::connect("memory://stuck-broadcast-batch").await.unwrap();
    let seen = Seen::default();
    let handler = stuck_at_0(&seen);
    let worker = Worker::new(broker.clone())
        .batch(sub, 10, move |batch: Batch<Json<u64>>| handler(batch.into_iter().map(|Json(n)| n).collect()));
    assert_eq!(second_after_stuck_first(&broker, worker, &seen).await, [1]);
}

/// Ready once, and an error ever after.
#[derive(Clone, Default)]
struct Breaks(Arc<AtomicU64>);

impl<S> tower_layer::Layer<S> for Breaks {
    type Service = BreaksService<S>;
    fn layer(&self, inner: S) -> Self::Service {
        BreaksService { inner, calls: self.0.clone() }
    }
}

#[derive(Clone)]
struct BreaksService<S> {
    inner: S,
    calls: Arc<AtomicU64>,
}

impl<S: tower_service::Service<R, Error: Into<anymq::BoxError>>, R> tower_service::Service<R> for BreaksService<S> {
    type Response = S::Response;
    type Error = anymq::BoxError;
    type Future = futures_util::future::ErrInto<S::Future, anymq::BoxError>;
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        match self.calls.load(O::SeqCst) {
            0 => self.inner.poll_ready(cx).map_err(Into::into),
            _ => Poll::Ready(Err("the layer broke".into())),
        }
    }
    fn call(&mut self, request: R) -> Self::Future {
        self.calls.fetch_add(1, O::SeqCst);
        futures_util::TryFutureExt::err_into(self.inner.call(request))
    }
}

// 6.4: nobody waits for what can never be begun.
#[tokio::test(start_paused = true)]
async fn a_route_whose_layer_broke_ends_at_once() {
    for (kind, sub) in [
        ("group", group()),
        ("once", group().guarantee(Guarantee::AtMostOnce)),
        ("broadcast", Subscription::broadcast("t")),
    ] {
        let broker = anymq::connect(format!("memory://breaks-{kind}")).await.unwrap();
        let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
        let worker = Worker::new(broker.clone()).route(sub.concurrency(8), async || {}).layer(Breaks::default());
        let handle = worker.handle();
        handle.pause();
        let task = tokio::spawn(worker.run());
        assert!(handle.running().await);
        for n in 0..8u64 {
            producer.send(Message::json(&n).unwrap()).await.unwrap();
        }
        let begun = Instant::now();
        handle.resume();
        let error = task.await.unwrap().unwrap_err();
        assert!(error.to_string().contains("the layer broke"), "{kind}: {error}");
        assert!(begun.elapsed() < 5 * SECOND, "{kind}: {:?}", begun.elapsed());
    }
}

// What was dropped with its handler is in the report, however it came to that.
#[tokio::test(start_paused = true)]
async fn a_report_counts_the_handlers_that_were_dropped() {
    for abandon in [false, true] {
        for batch in [false, true] {
            let broker = anymq::connect(format!("memory://dropped-{abandon}-{batch}")).await.unwrap();
            let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
            let worker = Worker::new(broker.clone()).shutdown_deadline(5 * SECOND);
            let sub = group().concurrency(3);
            let (handle, task) = if batch {
                let never = async |batch: Batch<Json<u64>>| {
                    std::future::pending::<()>().await;
                    drop(batch);
                };
                let worker = worker.batch(sub, 1, never);
                (worker.handle(), tokio::spawn(worker.run()))
            } else {
                let worker = worker.route(sub, async || std::future::pending::<()>().await);
                (worker.handle(), tokio::spawn(worker.run()))
            };
            assert!(handle.running().await);
            for n in 0..3u64 {
                producer.send(Message::json(&n).unwrap()).await.unwrap();
            }
            sleep(SECOND).await;
            if abandon {
                handle.abandon()
            } else {
                handle.shutdown()
            }
            let report = task.await.unwrap().unwrap();
            // Those that were abandoned went back before the close looked.
            let given_back = if abandon { 0 } else { 3 };
            let counts = (report.lost, report.close.given_back);
            assert_eq!(counts, (3, given_back), "abandon {abandon}, batch {batch}: {report:?}");
            let left = broker.admin().backlog(&"t".into(), &"g".into()).await.unwrap();
            assert_eq!(left.ready, Count::Exact(3));
        }
    }
}
