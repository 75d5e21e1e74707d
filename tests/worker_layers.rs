//! Layers around handlers: time-outs, idempotence, anybody's.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's panic is its report")]

mod scripted;

use anymq::prelude::*;
use anymq::worker::idempotent::{IdempotencyKey, IdempotencyStore, MemoryStore};
use anymq::worker::{BatchRequest, IdempotentLayer, Outcomes, Request};
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

// Each receiver of a broadcast has a copy of its own, and no other process makes up for it.
#[cfg(feature = "memory")]
#[tokio::test(start_paused = true)]
async fn what_one_receiver_of_a_broadcast_handled_the_others_handle_too() {
    let (calls, store) = (Arc::new(AtomicUsize::new(0)), MemoryStore::new(1000));
    let counted = || {
        let calls = calls.clone();
        move || {
            calls.fetch_add(1, SeqCst);
            async {}
        }
    };
    let test = anymq::testing::start(|broker| {
        Worker::new(broker)
            .route(Subscription::broadcast("prices"), counted())
            .route(Subscription::broadcast("prices"), counted())
            .route(Subscription::group("prices", "a"), counted())
            .route(Subscription::group("prices", "b"), counted())
            .layer(IdempotentLayer::new(store.clone()))
    })
    .await;
    let message = Message::new("1");
    test.send_message("prices", message.clone()).await;
    test.all_done().await;
    assert_eq!(calls.load(SeqCst), 4, "each of two receivers and two groups");
    test.send_message("prices", message).await;
    test.all_done().await;
    assert_eq!(calls.load(SeqCst), 6, "a repeat is handled by the receivers, and not by the groups");
}

/// A layer that gives a batch's outcomes in another number than it has messages.
#[derive(Clone, Copy)]
struct Miscounts<S>(S, usize);

impl<S: Service<BatchRequest, Response = Outcomes>> Service<BatchRequest> for Miscounts<S> {
    type Response = Outcomes;
    type Error = S::Error;
    type Future = std::future::Ready<Result<Outcomes, S::Error>>;
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }
    fn call(&mut self, _: BatchRequest) -> Self::Future {
        std::future::ready(Ok(Outcomes::Each(vec![Outcome::Ack; self.1])))
    }
}

#[tokio::test(start_paused = true)]
async fn outcomes_of_another_number_than_messages_ack_nothing() {
    for n in [0, 1, 3] {
        let script = Script::new();
        script.send("x");
        script.send("y");
        let worker = Worker::new(ScriptedBroker::broker([Ok(script.clone())]))
            .batch(orders(), 10, async |_: Batch<Payload>| {})
            .layer(tower_layer::layer_fn(|inner| Miscounts(inner, n)));
        worker.run_until(async { drop(script.settle_count(2).await) }).await.unwrap();
        let word = format!("nack Failed: a layer of a batch route returned {n} outcomes for 2 messages");
        assert_eq!(script.settled().into_iter().map(|(_, word)| word).collect::<Vec<_>>(), [word.clone(), word]);
    }
}

/// A layer that lets one through and no more.
#[derive(Clone)]
struct OneOnly<S>(S, Arc<AtomicUsize>);

impl<S: Service<Request>> Service<Request> for OneOnly<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        if self.1.load(SeqCst) > 0 { Poll::Pending } else { self.0.poll_ready(cx) }
    }
    fn call(&mut self, request: Request) -> Self::Future {
        self.1.fetch_add(1, SeqCst);
        self.0.call(request)
    }
}

// 3.1: what was settled before its hand-over and is never handled is told.
#[cfg(feature = "memory")]
#[tokio::test(start_paused = true)]
async fn what_was_fetched_at_most_once_behind_a_busy_layer_is_counted_as_lost() {
    for abandon in [false, true] {
        let broker = anymq::connect(format!("memory://layers-amo-{abandon}")).await.unwrap();
        let producer = broker.producer(ProducerSpec::new("orders").group("billing")).await.unwrap();
        let sub = orders().guarantee(anymq::Guarantee::AtMostOnce).concurrency(8);
        let worker = Worker::new(broker)
            .shutdown_deadline(Duration::from_secs(1))
            .route(sub, async || pending::<()>().await)
            .layer(tower_layer::layer_fn(|inner| OneOnly(inner, Arc::default())));
        let handle = worker.handle();
        handle.pause();
        let task = tokio::spawn(worker.run());
        assert!(handle.running().await);
        for n in 0..8 {
            producer.send(Message::new(n.to_string())).await.unwrap();
        }
        handle.resume();
        tokio::time::sleep(Duration::from_secs(1)).await;
        if abandon {
            handle.abandon()
        } else {
            handle.shutdown()
        }
        let report = task.await.unwrap().unwrap();
        assert_eq!((report.lost, report.acked), (8, 0), "one handler dropped, seven never begun; {report:?}");
    }
}
