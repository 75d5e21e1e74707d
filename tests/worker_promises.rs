//! What a review broke in the worker and the test kit, each with the promise it is about.

#![cfg(feature = "memory")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test's panic is its report")]

use anymq::Guarantee;
use anymq::prelude::*;
use anymq::worker::WorkerHandle;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering as O};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

const SECOND: Duration = Duration::from_secs(1);

async fn tick(n: &Arc<AtomicU64>) {
    n.fetch_add(1, O::SeqCst);
}

// 6.4: when the handler has ended, nothing is in hand that anything waits for.
#[tokio::test(start_paused = true)]
async fn a_drain_does_not_wait_for_broadcasts_that_were_fetched_ahead() {
    let slow = async |Json(n): Json<u64>| {
        if n == 200 {
            sleep(SECOND).await
        }
    };
    let broker = anymq::connect("memory://b5-drain").await.unwrap();
    let p = broker.producer("bells").await.unwrap();
    let worker = Worker::new(broker).route(Subscription::broadcast("bells").max_in_flight(1000), slow);
    let handle = worker.handle();
    handle.pause();
    let task = tokio::spawn(worker.run());
    handle.running().await;
    for n in 0..500u64 {
        p.send(Message::json(&n).unwrap()).await.unwrap();
    }
    handle.resume();
    sleep(SECOND / 2).await; // number 200 is at work
    let begun = Instant::now();
    handle.shutdown();
    let report = task.await.unwrap().unwrap();
    let took = begun.elapsed();
    assert!(took < 5 * SECOND, "the handler ended after half a second, and the drain took {took:?}: {report:?}");
}

/// Something to wait for that is not tokio's.
#[derive(Clone, Default)]
struct Bell(Arc<Mutex<(bool, Option<Waker>)>>);
impl Bell {
    fn ring(&self) {
        let mut bell = self.0.lock().unwrap();
        bell.0 = true;
        if let Some(waker) = bell.1.take() {
            waker.wake()
        }
    }
    async fn rung(&self) {
        poll_fn(|cx| {
            let mut bell = self.0.lock().unwrap();
            bell.1 = Some(cx.waker().clone());
            if bell.0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await
    }
}

// A handler that took all of tokio's budget and then waits for something that is not tokio's must not hold back the others
// of its route: here the second message is what the first waits for.
#[tokio::test(start_paused = true)]
async fn a_handler_without_budget_that_waits_holds_back_nobody() {
    let bell = Bell::default();
    let ring = bell.clone();
    let handler = move |Json(n): Json<u64>| {
        let bell = ring.clone();
        async move {
            if n == 2 {
                return bell.ring();
            }
            while tokio::task::coop::has_budget_remaining() {
                tokio::task::coop::consume_budget().await;
            }
            bell.rung().await;
        }
    };
    let broker = anymq::connect("memory://b5-budget").await.unwrap();
    let p = broker.producer("t").await.unwrap();
    let worker = Worker::new(broker).route(Subscription::group("t", "g").concurrency(2), handler);
    let handle = worker.handle();
    let task = tokio::spawn(worker.run());
    handle.running().await;
    p.send(Message::json(&1u64).unwrap()).await.unwrap();
    sleep(SECOND).await;
    p.send(Message::json(&2u64).unwrap()).await.unwrap();
    let rung = timeout(100 * SECOND, bell.rung()).await;
    task.abort();
    assert!(rung.is_ok(), "the second message never reached its handler, with a slot free");
}

// The test kit: `all_done` waits for handlers at work, also while the worker drains.
#[tokio::test(start_paused = true)]
async fn all_done_waits_for_a_broadcast_handler_while_the_worker_drains() {
    for at_most_once in [false, true] {
        let done = Arc::new(AtomicU64::new(0));
        let count = done.clone();
        let test = anymq::testing::start(move |broker| {
            let sub = match at_most_once {
                false => Subscription::broadcast("t"),
                true => Subscription::group("t", "g").guarantee(Guarantee::AtMostOnce),
            };
            Worker::new(broker).route(sub, move || {
                let count = count.clone();
                async move {
                    sleep(5 * SECOND).await;
                    tick(&count).await;
                }
            })
        })
        .await;
        test.send("t", "x").await;
        sleep(SECOND).await;
        test.worker().shutdown();
        tokio::task::yield_now().await;
        test.all_done().await;
        assert_eq!(done.load(O::SeqCst), 1, "all done, and a handler is at work; at most once: {at_most_once}");
    }
}

// The test kit: a member that died handles nothing any more, so nobody waits for it (it waits for `max_processing`, 25 min).
#[tokio::test(start_paused = true)]
async fn all_done_after_the_crash_of_a_member_with_nothing_to_settle() {
    for at_most_once in [false, true] {
        let test = anymq::testing::start(move |broker| {
            let sub = match at_most_once {
                false => Subscription::broadcast("t").member("anna"),
                true => Subscription::group("t", "g").guarantee(Guarantee::AtMostOnce).member("anna"),
            };
            Worker::new(broker).route(sub, async || std::future::pending::<()>().await)
        })
        .await;
        test.send("t", "x").await;
        sleep(SECOND).await;
        assert!(test.crash("anna"));
        test.another(|broker| Worker::new(broker).route(Subscription::group("u", "g"), async || {})).await;
        test.send("u", "y").await;
        let begun = Instant::now();
        test.all_done().await;
        assert!(begun.elapsed() < 1000 * SECOND, "{:?}, at most once: {at_most_once}", begun.elapsed());
    }
}

// The real clock: what is done is done at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_done_is_told_when_the_last_handler_ends_in_real_time() {
    for (kind, sub) in [
        ("group", Subscription::group("t", "g").concurrency(8)),
        ("at most once", Subscription::group("t", "g").guarantee(Guarantee::AtMostOnce).concurrency(8)),
        ("broadcast", Subscription::broadcast("t").concurrency(8)),
    ] {
        let worst = Arc::new(Mutex::new(Duration::ZERO));
        for _ in 0..20 {
            let done = Arc::new(AtomicU64::new(0));
            let count = done.clone();
            let sub = sub.clone();
            let test = anymq::testing::start(move |broker| {
                Worker::new(broker).route(sub, move || {
                    let count = count.clone();
                    async move {
                        sleep(Duration::from_millis(3)).await;
                        tick(&count).await;
                    }
                })
            })
            .await;
            for _ in 0..20 {
                test.send("t", "x").await;
            }
            let begun = std::time::Instant::now();
            test.all_done().await;
            let took = begun.elapsed();
            assert_eq!(done.load(O::SeqCst), 20, "{kind}");
            let mut worst = worst.lock().unwrap();
            *worst = worst.max(took);
        }
        let worst = *worst.lock().unwrap();
        println!("{kind}: {worst:?}");
        assert!(worst < 9 * SECOND, "{kind}: told after {worst:?}, by the clock and not by the handler");
    }
}

// 6.4: a layer that is not ready makes a route fetch and hold; what was settled before the hand-over is then lost or waited for.
#[derive(Clone)]
struct Closed(Arc<AtomicU64>);
impl<S: Clone> tower_layer::Layer<S> for Closed {
    type Service = ClosedService<S>;
    fn layer(&self, inner: S) -> Self::Service {
        ClosedService { inner, gate: self.0.clone() }
    }
}
#[derive(Clone)]
struct ClosedService<S> {
    inner: S,
    gate: Arc<AtomicU64>,
}
impl<S, R> tower_service::Service<R> for ClosedService<S>
where
    S: tower_service::Service<R>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;
    fn poll_ready(&mut self, cx: &mut std::task::Context<'_>) -> Poll<Result<(), S::Error>> {
        // Ready for the first, then never again.
        if self.gate.load(O::SeqCst) > 0 { Poll::Pending } else { self.inner.poll_ready(cx) }
    }
    fn call(&mut self, r: R) -> S::Future {
        self.gate.fetch_add(1, O::SeqCst);
        self.inner.call(r)
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_does_not_wait_for_what_a_busy_layer_left_fetched() {
    for (kind, sub) in [
        ("group", Subscription::group("t", "g").concurrency(8)),
        ("at most once", Subscription::group("t", "g").guarantee(Guarantee::AtMostOnce).concurrency(8)),
        ("broadcast", Subscription::broadcast("t").concurrency(8)),
    ] {
        let memory = anymq::connect(&format!("memory://b5-layer-{}", kind.replace(' ', "-"))).await.unwrap();
        let p = memory.producer(ProducerSpec::new("t").group("g")).await.unwrap();
        let worker = Worker::new(memory.clone()).route(sub, async || {}).layer(Closed(Arc::default()));
        let handle = worker.handle();
        handle.pause();
        let task = tokio::spawn(worker.run());
        handle.running().await;
        for n in 0..8u64 {
            p.send(Message::json(&n).unwrap()).await.unwrap();
        }
        handle.resume();
        sleep(SECOND).await;
        let begun = Instant::now();
        handle.shutdown();
        let report = task.await.unwrap().unwrap();
        println!("{kind}: {:?} {report:?}", begun.elapsed());
        assert!(
            begun.elapsed() < 5 * SECOND,
            "{kind}: no handler was at work, and the drain took {:?}",
            begun.elapsed()
        );
    }
}

// Values at their limits are refused or work.
#[tokio::test(start_paused = true)]
async fn a_worker_with_values_at_their_limits() {
    use anymq::worker::IdempotentLayer;
    use anymq::worker::idempotent::MemoryStore;
    let test = anymq::testing::start(|broker| {
        Worker::new(broker)
            .shutdown_deadline(Duration::MAX)
            .route(Subscription::group("t", "g").max_in_flight(usize::MAX), async || {})
            .layer(TimeoutLayer::new(Duration::MAX))
            .layer(IdempotentLayer::new(MemoryStore::new(usize::MAX)))
            .batch(Subscription::group("t", "h"), usize::MAX, async |b: Batch<Json<u64>>| {
                let _ = b;
            })
            .batch(Subscription::group("t", "i"), 1, async |b: Batch<Json<u64>>| {
                let _ = b;
            })
    })
    .await;
    test.send("t", &1u64).await;
    test.all_done().await;
    test.on("t", "g").handled(1);
    test.on("t", "h").handled(1);
    test.on("t", "i").handled(1);
    test.nothing_else();
    test.shut_down().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_concurrency_beyond_all_memory_is_refused_and_named() {
    let broker = anymq::connect("memory://b5-conc").await.unwrap();
    let worker = Worker::new(broker)
        .route(Subscription::group("t", "g").max_in_flight(usize::MAX).concurrency(usize::MAX), async || {});
    let ended = tokio::spawn(worker.run()).await;
    assert!(matches!(ended, Ok(Err(_))), "{ended:?}");
}

// The test kit: "kills a member as `kill -9` would": with all that this process does under that name.
#[tokio::test(start_paused = true)]
async fn a_crash_kills_every_route_of_the_member() {
    let test = anymq::testing::start(|broker| {
        let slow = async || sleep(SECOND).await;
        Worker::new(broker)
            .route(Subscription::group("t", "g").member("anna"), slow)
            .route(Subscription::group("t", "h").member("anna"), slow)
    })
    .await;
    test.send("t", "x").await;
    sleep(SECOND / 2).await;
    assert!(test.crash("anna"));
    sleep(10 * SECOND).await;
    test.on("t", "g").handled(0);
    test.on("t", "h").handled(0);
}

// 4.2, behind the engine's seam: what it prefetched does not begin after a transient failure either, with a handler that waits.
#[tokio::test(start_paused = true)]
async fn nothing_begins_after_a_transient_failure_of_a_handler_that_waits() {
    for url in ["memory://", "memory://?faults=full:0"] {
        let begun = Arc::new(Mutex::new(Vec::new()));
        let log = begun.clone();
        let test = anymq::testing::Start::default()
            .url(url)
            .worker(async |broker| {
                let p = broker.producer(ProducerSpec::new("t").group("g")).await?;
                for n in 0..40u64 {
                    p.send(Message::json(&n)?).await?;
                }
                let down = Arc::new(AtomicU64::new(0));
                let sub = Subscription::group("t", "g").concurrency(4);
                Ok(Worker::new(broker).route(sub, move |Json(n): Json<u64>| {
                    log.lock().unwrap().push((Instant::now(), n));
                    let fails = n == 8 && down.fetch_add(1, O::SeqCst) == 0;
                    async move {
                        sleep(Duration::from_millis(if n == 8 { 5 } else { 10 })).await;
                        if fails { Err(Failure::transient("down")) } else { Ok(()) }
                    }
                }))
            })
            .await;
        test.all_done().await;
        let begun = begun.lock().unwrap().clone();
        let failed = begun.iter().find(|(_, n)| *n == 8).unwrap().0 + Duration::from_millis(5);
        let early: Vec<_> =
            begun.iter().filter(|(t, _)| *t > failed && *t < failed + SECOND * 9 / 10).map(|(_, n)| *n).collect();
        assert!(early.is_empty(), "began while it pauses: {early:?}; {url}");
    }
}

/// Counts what begins, and stops the worker at number 250.
#[derive(Clone, Default)]
struct Stops(Arc<AtomicU64>, Arc<Mutex<Option<WorkerHandle>>>);

impl Stops {
    fn begin(&self, n: u64) {
        self.0.fetch_add(1, O::SeqCst);
        if n == 250 {
            self.1.lock().unwrap().as_ref().unwrap().shutdown();
        }
    }

    /// Runs a worker whose handlers count with this: what it took is begun, and nothing else is waited for.
    async fn hold<R: anymq::worker::Routes>(self, broker: Arc<dyn Broker>, worker: Worker<(), R>) {
        let p = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
        for n in 0..1000u64 {
            p.send(Message::json(&n).unwrap()).await.unwrap();
        }
        *self.1.lock().unwrap() = Some(worker.handle());
        let clock = Instant::now();
        let report = worker.run().await.unwrap();
        let took = clock.elapsed();
        let left = broker.admin().backlog(&"t".into(), &"g".into()).await.unwrap();
        let begun = self.0.load(O::SeqCst);
        assert!(
            took < 5 * SECOND,
            "no handler was at work, and the drain took {took:?}: {begun} begun, {left:?}, {report:?}"
        );
        assert_eq!(left.ready, anymq::Count::Exact(1000 - begun), "{left:?}, {begun} begun, {report:?}");
    }
}

fn at_most_once() -> Subscription {
    Subscription::group("t", "g").guarantee(Guarantee::AtMostOnce).concurrency(7)
}

// 3.1, 6.4: at most once, no layer: what was fetched when the worker is told to stop is begun, or at least not waited for.
#[tokio::test(start_paused = true)]
async fn a_drain_loses_nothing_that_was_fetched_at_most_once_and_waits_for_nothing() {
    let (broker, stops) = (anymq::connect("memory://b5-amo").await.unwrap(), Stops::default());
    let counted = stops.clone();
    let worker = Worker::new(broker.clone()).route(at_most_once(), move |Json(n): Json<u64>| {
        let counted = counted.clone();
        async move { counted.begin(n) }
    });
    stops.hold(broker, worker).await;
}

// The same of a batch route.
#[tokio::test(start_paused = true)]
async fn a_drain_loses_nothing_that_a_batch_route_fetched_at_most_once() {
    let (broker, stops) = (anymq::connect("memory://b5-amo-batch").await.unwrap(), Stops::default());
    let counted = stops.clone();
    let worker = Worker::new(broker.clone()).batch(at_most_once(), 10, move |batch: Batch<Json<u64>>| {
        batch.iter().for_each(|Json(n)| counted.begin(*n));
        async {}
    });
    stops.hold(broker, worker).await;
}
