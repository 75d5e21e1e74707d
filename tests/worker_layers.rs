//! Layers around handlers: time-outs, idempotence, anybody's.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's panic is its report")]

mod scripted;

use anymq::prelude::*;
use anymq::worker::idempotent::{IdempotencyKey, IdempotencyStore, MemoryStore};
use anymq::worker::{IdempotentLayer, Request};
use anymq::{BoxError, Topic};
use futures_util::future::BoxFuture;
use scripted::{Script, ScriptedBroker};
use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tower_layer::Layer;
use tower_service::Service;

fn orders() -> Subscription {
    Subscription::group("orders", "billing").concurrency(4)
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_never_ends_is_ended() {
    let script = Script::new();
    script.send("x");
    let worker = Worker::new(ScriptedBroker::broker([Ok(script.clone())]))
        .route(orders(), async || pending::<()>().await)
        .layer(TimeoutLayer::new(Duration::from_secs(5)));
    let before = tokio::time::Instant::now();
    worker.run_until(async { drop(script.settle_count(1).await) }).await.unwrap();
    assert_eq!(before.elapsed().as_secs(), 5);
    assert_eq!(script.settled()[0].1, "nack Failed: the handler took longer than its limit of 5s");
}

#[tokio::test(start_paused = true)]
async fn a_batch_has_time_limits_too() {
    let script = Script::new();
    script.send("x");
    script.send("y");
    let worker = Worker::new(ScriptedBroker::broker([Ok(script.clone())]))
        .batch(orders(), 10, async |_: Batch<Payload>| pending::<()>().await)
        .layer(TimeoutLayer::new(Duration::from_secs(5)));
    worker.run_until(async { drop(script.settle_count(2).await) }).await.unwrap();
    assert!(script.settled().iter().all(|(_, word)| word.starts_with("nack Failed: the handler took longer")));
}

/// A layer as a user writes one.
#[derive(Clone)]
struct Named(&'static str, Arc<Mutex<Vec<String>>>);

#[derive(Clone)]
struct NamedService<S>(S, Named);

impl<S> Layer<S> for Named {
    type Service = NamedService<S>;
    fn layer(&self, inner: S) -> Self::Service {
        NamedService(inner, self.clone())
    }
}

impl<S: Service<Request, Response = Outcome>> Service<Request> for NamedService<S> {
    type Response = Outcome;
    type Error = S::Error;
    type Future = S::Future;
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }
    fn call(&mut self, request: Request) -> Self::Future {
        self.1.1.lock().unwrap().push(format!("{} {}", self.1.0, request.source().topic));
        self.0.call(request)
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_layer_is_the_outermost_and_wraps_only_routes_before_it() {
    let (first, second, log) = (Script::new(), Script::new(), Arc::new(Mutex::new(Vec::new())));
    let worker = Worker::new(ScriptedBroker::broker([Ok(first.clone()), Ok(second.clone())]))
        .route(orders(), async || {})
        .layer(Named("inner", log.clone()))
        .layer(Named("outer", log.clone()))
        .route(Subscription::group("orders", "analytics"), async || {});
    let driver = async {
        second.send("y");
        second.settle_count(1).await;
        assert!(log.lock().unwrap().is_empty());
        first.send("x");
        first.settle_count(1).await;
    };
    worker.run_until(driver).await.unwrap();
    assert_eq!(*log.lock().unwrap(), ["outer orders", "inner orders"]);
}

#[tokio::test(start_paused = true)]
async fn what_succeeded_once_is_not_handled_again() {
    let (script, calls) = (Script::new(), Arc::new(AtomicUsize::new(0)));
    let store = MemoryStore::new(1000);
    let handler = {
        let calls = calls.clone();
        move |Json(n): Json<u32>| {
            let calls = calls.clone();
            async move {
                tokio::time::sleep(Duration::from_millis(5)).await;
                // The first call fails: it must not count as handled.
                if calls.fetch_add(1, SeqCst) == 0 { Err(format!("{n} failed")) } else { Ok(()) }
            }
        }
    };
    // Known by their payload, so that the script's fresh ids do not matter.
    let layer =
        IdempotentLayer::new(store.clone()).key(|r| MessageId::text(String::from_utf8_lossy(r.payload_bytes())));
    let worker = Worker::new(ScriptedBroker::broker([Ok(script.clone())])).route(orders(), handler).layer(layer);
    let driver = async {
        // Two at a time: the second waits for the first, sees that it failed, and is handled itself.
        script.send(7);
        script.send(7);
        script.settle_count(2).await;
        script.send(7);
        script.settle_count(3).await;
    };
    worker.run_until(driver).await.unwrap();
    let words: Vec<_> = script.settled().into_iter().map(|(_, word)| word).collect();
    assert_eq!(words, ["nack Failed: 7 failed", "ack", "ack"]);
    assert_eq!(calls.load(SeqCst), 2);
    assert_eq!(format!("{store:?}"), "MemoryStore(1 of 1000 keys)");
}

#[derive(Clone)]
struct Broken {
    check: bool,
}

impl IdempotencyStore for Broken {
    type IsDone = BoxFuture<'static, Result<bool, BoxError>>;
    type MarkDone = BoxFuture<'static, Result<(), BoxError>>;
    fn is_done(&self, key: &IdempotencyKey) -> Self::IsDone {
        assert_eq!(key.topic, Topic::new("orders"));
        let ok = self.check;
        Box::pin(async move { if ok { Ok(false) } else { Err("store down".into()) } })
    }
    fn mark_done(&self, _: &IdempotencyKey) -> Self::MarkDone {
        Box::pin(async { Err("store down".into()) })
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_counts_against_no_message() {
    for (check, word) in [(false, "nack Transient: the idempotency store failed: store down"), (true, "ack")] {
        let script = Script::new();
        script.send("x");
        let worker = Worker::new(ScriptedBroker::broker([Ok(script.clone())]))
            .route(orders(), async || {})
            .layer(IdempotentLayer::new(Broken { check }));
        worker.run_until(async { drop(script.settle_count(1).await) }).await.unwrap();
        assert_eq!(script.settled()[0].1, word);
    }
}
