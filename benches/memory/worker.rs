//! A worker around handlers that do nothing, or nearly so. The producer sends batches of 64.

use crate::{JSON, Order, WARM, allocations::so_far, message};
use anymq::SendBatch;
use anymq::prelude::*;
use anymq::worker::{Request, Routes};
use bytes::Bytes;
use pin_project_lite::pin_project;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use tower_layer::Layer;
use tower_service::Service;

/// Messages handled; the only work of these handlers that stays in the books of a bench is one addition.
#[derive(Clone, Default)]
struct Handled(Arc<AtomicU64>);

async fn empty() {}

async fn with_state(State(handled): State<Handled>, Attempt(_attempt): Attempt) -> Result<(), std::io::Error> {
    handled.0.fetch_add(1, Relaxed);
    Ok(())
}

async fn yields() {
    tokio::task::yield_now().await;
}

async fn json(Json(order): Json<Order>) {
    std::hint::black_box(order.id);
}

/// An ordinary layer, as a user would write one: counts what passes.
#[derive(Clone, Default)]
struct Tap(Arc<AtomicU64>);

#[derive(Clone)]
struct Tapped<S>(S, Arc<AtomicU64>);

impl<S> Layer<S> for Tap {
    type Service = Tapped<S>;
    fn layer(&self, inner: S) -> Tapped<S> {
        Tapped(inner, self.0.clone())
    }
}

impl<S: Service<Request, Response = Outcome>> Service<Request> for Tapped<S> {
    type Response = Outcome;
    type Error = S::Error;
    type Future = TapFuture<S::Future>;
    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }
    #[inline]
    fn call(&mut self, request: Request) -> Self::Future {
        TapFuture { count: self.1.clone(), future: self.0.call(request) }
    }
}

pin_project! {
    struct TapFuture<F> {
        count: Arc<AtomicU64>,
        #[pin]
        future: F,
    }
}

impl<F: Future> Future for TapFuture<F> {
    type Output = F::Output;
    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let output = ready!(this.future.poll(cx));
        this.count.fetch_add(1, Relaxed);
        Poll::Ready(output)
    }
}

pub(crate) async fn run(scenario: &str, n: usize) -> u64 {
    let broker = anymq::connect("memory://").await.unwrap();
    let orders = Subscription::group("t", "bench").max_in_flight(256);
    let worker = Worker::new(broker.clone());
    let tap = Tap::default;
    match scenario {
        "worker-empty" => drive(worker.route(orders, empty), n, message).await,
        "worker-empty-16" => drive(worker.route(orders.concurrency(16), empty), n, message).await,
        "worker-state" => drive(worker.state(Handled::default()).route(orders, with_state), n, message).await,
        "worker-layers-1" => drive(worker.route(orders, empty).layer(tap()), n, message).await,
        "worker-layers-4" => {
            drive(worker.route(orders, empty).layer(tap()).layer(tap()).layer(tap()).layer(tap()), n, message).await
        }
        "worker-yields" => drive(worker.route(orders.concurrency(16), yields), n, message).await,
        "worker-json" => drive(worker.route(orders, json), n, || Message::new(Bytes::from_static(JSON))).await,
        other => panic!("no scenario is called {other}"),
    }
}

async fn drive<S, R>(worker: Worker<S, R>, n: usize, message: fn() -> Message) -> u64
where
    S: Send + 'static,
    R: Routes + Send + 'static,
{
    let total = n / 64 * 64 + WARM;
    let broker = worker.broker().clone();
    let handle = worker.handle();
    let producer = broker.producer("t").await.unwrap();
    let working = tokio::spawn(worker.run());
    assert!(handle.running().await);
    let mut batch = SendBatch::new();
    let mut before = 0;
    for round in 0..total / 64 {
        if round == WARM / 64 {
            before = so_far();
        }
        batch.messages.extend((0..64).map(|_| message()));
        batch = producer.send_batch(batch).await;
        tokio::task::yield_now().await;
    }
    let allocated = so_far() - before;
    let control = handle.consumers(&"t".into()).remove(0);
    while control.in_flight() > 0 {
        tokio::task::yield_now().await;
    }
    handle.shutdown();
    let report = working.await.unwrap().unwrap();
    assert_eq!(report.acked, total as u64);
    allocated
}

/// What serde_json alone needs for the same payload.
pub(crate) fn json_bare(n: usize) -> u64 {
    let before = so_far();
    for _ in 0..n + WARM {
        let order: Order = serde_json::from_slice(std::hint::black_box(JSON)).unwrap();
        std::hint::black_box(order.id);
    }
    so_far() - before
}
