//! SIGTERM drains, a second one ends the drain. In a process of its own, because signals are for all of it.

#![cfg(all(feature = "memory", unix))]
#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use anymq::prelude::*;
use anymq::worker::Phase;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

fn signal_us(name: &str) {
    let us = std::process::id().to_string();
    assert!(Command::new("kill").args(["-s", name, &us]).status().unwrap().success());
}

async fn reached(handle: &WorkerHandle, phase: Phase) {
    while handle.phase() < phase {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn sigterm_drains_and_a_second_one_ends_the_drain() {
    for (first, second) in [("TERM", None), ("INT", Some("TERM"))] {
        let broker = connect("memory://").await.unwrap();
        let gate = Arc::new(Semaphore::new(0));
        let handler = async |State(gate): State<Arc<Semaphore>>| gate.acquire().await.unwrap().forget();
        let orders = Subscription::group("orders", "billing").concurrency(2);
        let worker = Worker::new(broker.clone()).state(gate.clone()).route(orders, handler);
        let handle = worker.handle();
        let running = tokio::spawn(worker.run_until_signal());
        assert!(handle.running().await);
        let orders = broker.producer("orders").await.unwrap();
        for n in 0..3 {
            orders.send(Message::json(&n).unwrap()).await.unwrap();
        }
        let control = handle.consumers(&"orders".into()).remove(0);
        while control.in_flight() < 2 {
            tokio::task::yield_now().await;
        }
        signal_us(first);
        reached(&handle, Phase::Draining).await;
        let begun = Instant::now();
        match second {
            None => gate.add_permits(2),
            Some(second) => signal_us(second),
        }
        let report = running.await.unwrap().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(20), "the deadline of 25 s was waited for");
        assert_eq!(report.acked, if second.is_none() { 2 } else { 0 });
        let backlog = broker.admin().backlog(&"orders".into(), &"billing".into()).await.unwrap();
        assert_eq!((backlog.in_flight.exact(), backlog.ready.exact()), (Some(0), Some(3 - report.acked)));
    }
}
