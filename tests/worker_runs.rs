//! How a worker runs, waits and ends.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's panic is its report")]

mod scripted;

use anymq::prelude::*;
use anymq::worker::Phase;
use anymq::{Error, ErrorKind};
use scripted::{Script, ScriptedBroker};
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use tokio::sync::Semaphore;

fn orders() -> Subscription {
    Subscription::group("orders", "billing")
}

/// Handlers at work, and a gate that lets them go.
#[derive(Clone)]
struct Gate {
    open: Arc<Semaphore>,
    now: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

impl Gate {
    fn new() -> Self {
        Self { open: Arc::new(Semaphore::new(0)), now: Arc::default(), most: Arc::default() }
    }
}

async fn wait_at(State(gate): State<Gate>) {
    let now = gate.now.fetch_add(1, SeqCst) + 1;
    gate.most.fetch_max(now, SeqCst);
    gate.open.acquire().await.unwrap().forget();
    gate.now.fetch_sub(1, SeqCst);
}

#[tokio::test(start_paused = true)]
async fn concurrency_is_bounded_also_beyond_64() {
    for concurrency in [1, 3, 100] {
        let (script, gate) = (Script::new(), Gate::new());
        (0..250).for_each(|n| script.send(n));
        let worker = Worker::new(ScriptedBroker::broker([Ok(script.clone())]))
            .state(gate.clone())
            .route(orders().concurrency(concurrency), wait_at);
        let driver = async {
            // A handler that waits hoards nothing: what is held is what is at work.
            script.held(concurrency).await;
            assert_eq!(script.most_held(), concurrency);
            gate.open.add_permits(250);
            script.settle_count(250).await;
        };
        let report = worker.run_until(driver).await.unwrap();
        assert_eq!((report.acked, gate.most.load(SeqCst)), (250, concurrency));
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_fetched_ahead_goes_back_when_a_handler_starts_to_wait() {
    async fn sometimes(Json(n): Json<u32>) {
        if n == 200 {
            pending::<()>().await;
        }
    }
    let script = Script::new();
    (0..400).for_each(|n| script.send(n));
    let worker = Worker::new(ScriptedBroker::broker([Ok(script.clone())]))
        .route(orders(), sometimes)
        .shutdown_deadline(Duration::ZERO);
    let report = worker.run_until(script.held(1)).await.unwrap();
    assert_eq!(report.acked, 200);
    assert!((1..64).contains(&report.released), "{report:?}");
    let released = script.settled().iter().filter(|(_, word)| word == "release").count();
    assert_eq!(released as u64, report.released);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_handlers_and_then_gives_up() {
    let (script, gate) = (Script::new(), Gate::new());
    (0..4).for_each(|n| script.send(n));
    let worker = Worker::new(ScriptedBroker::broker([Ok(script.clone())]))
        .state(gate.clone())
        .route(orders().concurrency(2), wait_at)
        .shutdown_deadline(Duration::from_secs(10));
    let handle = worker.handle();
    let running = tokio::spawn(worker.run());
    assert!(handle.running().await);
    script.held(2).await;
    handle.shutdown();
    gate.open.add_permits(1);
    script.settle_count(1).await;
    assert_eq!(handle.phase(), Phase::Draining);
    let before = tokio::time::Instant::now();
    let report = running.await.unwrap().unwrap();
    assert_eq!((before.elapsed().as_secs(), report.acked, report.close.given_back), (10, 1, 1));
    assert_eq!(script.settled().last().unwrap().1, "dropped", "after the close began that goes back at once");
    assert_eq!(handle.phase(), Phase::Ended);
}

#[tokio::test(start_paused = true)]
async fn abandon_does_not_wait() {
    let (script, gate) = (Script::new(), Gate::new());
    script.send("x");
    let worker = Worker::new(ScriptedBroker::broker([Ok(script.clone())])).state(gate).route(orders(), wait_at);
    let handle = worker.handle();
    let running = tokio::spawn(worker.run());
    script.held(1).await;
    handle.shutdown();
    handle.abandon();
    let before = tokio::time::Instant::now();
    running.await.unwrap().unwrap();
    assert!(before.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_lost_delivery_stops_its_handler() {
    let (script, gate) = (Script::new(), Gate::new());
    script.send("lost");
    script.send("kept");
    let worker = Worker::new(ScriptedBroker::broker([Ok(script.clone())]))
        .state(gate.clone())
        .route(orders().concurrency(2), wait_at);
    let driver = async {
        script.held(2).await;
        script.lose(0);
        script.settle_count(1).await;
        gate.open.add_permits(2);
        script.settle_count(2).await;
    };
    let report = worker.run_until(driver).await.unwrap();
    assert_eq!((report.lost, report.acked), (1, 1));
    assert_eq!(script.settled(), [(0, "stale dropped".to_owned()), (1, "ack".to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn an_error_of_a_consumer_ends_the_worker_after_draining_the_others() {
    let (bad, good, gate) = (Script::new(), Script::new(), Gate::new());
    good.send("x");
    let worker = Worker::new(ScriptedBroker::broker([Ok(bad.clone()), Ok(good.clone())]))
        .state(gate.clone())
        .route([orders(), Subscription::group("orders", "analytics")], wait_at);
    let running = tokio::spawn(worker.run());
    good.held(1).await;
    bad.fail(Error::new(ErrorKind::Topology, "the queue has other arguments"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!running.is_finished(), "a handler is still at work");
    gate.open.add_permits(1);
    let error = running.await.unwrap().unwrap_err();
    assert_eq!((error.kind(), good.settled()), (ErrorKind::Topology, vec![(0, "ack".to_owned())]));
}

#[tokio::test(start_paused = true)]
async fn a_route_that_cannot_be_opened_is_an_error_and_nothing_runs() {
    let (first, error) = (Script::new(), Error::new(ErrorKind::Unsupported, "no per-key order"));
    let worker =
        Worker::new(ScriptedBroker::broker([Ok(first.clone()), Err(error)])).route([orders(), orders()], async || {});
    let handle = worker.handle();
    assert_eq!(worker.run().await.unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(handle.phase(), Phase::Ended);
    assert!(!handle.running().await);
}

#[tokio::test(start_paused = true)]
async fn pause_and_resume() {
    let script = Script::new();
    let worker = Worker::new(ScriptedBroker::broker([Ok(script.clone())])).route(orders(), async || {});
    let handle = worker.handle();
    handle.pause();
    let running = tokio::spawn(worker.run());
    assert!(handle.running().await && script.paused());
    script.send("x");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(script.settled().is_empty());
    assert_eq!(handle.consumers(&"orders".into()).len(), 1);
    handle.resume();
    script.settle_count(1).await;
    handle.shutdown();
    running.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_worker_without_routes_says_so() {
    let error = Worker::new(ScriptedBroker::broker([])).run().await.unwrap_err();
    assert!(error.to_string().contains(".route("), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_before_the_start_ends_at_once() {
    let script = Script::new();
    let worker = Worker::new(ScriptedBroker::broker([Ok(script)])).route(orders(), async || {});
    worker.handle().shutdown();
    assert_eq!(worker.run().await.unwrap().acked, 0);
}
