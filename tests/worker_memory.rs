//! The worker on a real broker: the in-memory one.

#![cfg(feature = "memory")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's panic is its report")]

use anymq::prelude::*;
use anymq::testing::start;
use anymq::worker::IdempotentLayer;
use anymq::worker::idempotent::MemoryStore;
use anymq::{Class, DeadLetterPolicy, Guarantee, HealthState};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::{Instant, sleep};

fn billing() -> Subscription {
    Subscription::group("orders", "billing")
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_retried_and_the_worker_goes_on() {
    let handler = async |Json(n): Json<u32>| assert_ne!(n, 13, "unlucky");
    let test = start(|broker| Worker::new(broker).route(billing().concurrency(2), handler)).await;
    for n in [12, 13, 14] {
        test.send("orders", &n).await;
    }
    test.all_done().await;
    test.on("orders", "billing").handled(2).attempts(7).dead_lettered(1);
    test.nothing_else();
    let report = test.shut_down().await.unwrap();
    assert_eq!((report.acked, report.failed, report.panicked), (2, 5, 5));
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_never_ends_is_timed_out_and_neighbours_go_on() {
    let handler = async |Json(n): Json<u32>| {
        if n == 13 {
            std::future::pending::<()>().await;
        }
    };
    let test = start(|broker| {
        Worker::new(broker)
            .route(billing().concurrency(2).retry(RetryPolicy::attempts(2)), handler)
            .layer(TimeoutLayer::new(Duration::from_secs(5)))
    })
    .await;
    for n in [13, 1, 2, 3] {
        test.send("orders", &n).await;
    }
    test.all_done().await;
    test.on("orders", "billing").handled(3).attempts(5).dead_lettered(1);
    test.nothing_else();
}

#[tokio::test(start_paused = true)]
async fn past_max_processing_the_handler_is_dropped_and_the_message_nacked() {
    let subscription = billing().max_processing(Duration::from_secs(60)).retry(RetryPolicy::attempts(2));
    let test =
        start(|broker| Worker::new(broker).route(subscription, async || std::future::pending::<()>().await)).await;
    test.send("orders", &1).await;
    test.all_done().await;
    test.on("orders", "billing").handled(0).attempts(2).dead_lettered(1).because("timeout", 1);
    test.nothing_else();
    assert_eq!(test.shut_down().await.unwrap().lost, 2);
}

#[tokio::test(start_paused = true)]
async fn keys_keep_their_order_and_run_side_by_side() {
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<HashMap<Vec<u8>, Vec<u32>>>>, Arc<AtomicUsize>, Arc<AtomicUsize>);
    async fn handle(
        Json(n): Json<u32>,
        Key(key): Key,
        Attempt(attempt): Attempt,
        State(log): State<Log>,
    ) -> Result<(), String> {
        let now = log.1.fetch_add(1, SeqCst) + 1;
        log.2.fetch_max(now, SeqCst);
        sleep(Duration::from_millis(u64::from(n * 7 % 5))).await;
        log.1.fetch_sub(1, SeqCst);
        if n % 10 == 3 && attempt == 1 {
            return Err("once".to_owned());
        }
        log.0.lock().unwrap().entry(key.unwrap().to_vec()).or_default().push(n);
        Ok(())
    }
    let log = Log::default();
    let test = start(|broker| {
        Worker::new(broker).state(log.clone()).route(billing().ordering(Ordering::PerKey).concurrency(8), handle)
    })
    .await;
    for n in 0..60u32 {
        test.send_message("orders", Message::json(&n).unwrap().key(format!("k{}", n % 4))).await;
    }
    test.all_done().await;
    test.on("orders", "billing").handled(60).attempts(66);
    test.nothing_else();
    for (key, seen) in log.0.lock().unwrap().iter() {
        assert!(seen.is_sorted() && seen.len() == 15, "{key:?}: {seen:?}");
    }
    assert_eq!(log.2.load(SeqCst), 4, "one handler for each key at a time");
}

#[tokio::test(start_paused = true)]
async fn an_outage_downstream_pauses_and_dead_letters_nothing() {
    let (calls, up_at) = (Arc::new(AtomicU32::new(0)), Instant::now() + Duration::from_secs(600));
    let handler = {
        let calls = calls.clone();
        move || {
            let calls = calls.clone();
            async move {
                calls.fetch_add(1, SeqCst);
                if Instant::now() < up_at { Err(Failure::transient("the database is down")) } else { Ok(()) }
            }
        }
    };
    let test = start(|broker| Worker::new(broker).route(billing().concurrency(4), handler)).await;
    for n in 0..20 {
        test.send("orders", &n).await;
    }
    let mut health = test.worker().consumers(&"orders".into())[0].health();
    health.wait_for(|h| h.state == HealthState::Paused).await;
    test.all_done().await;
    test.on("orders", "billing").handled(20).dead_lettered(0);
    assert!(calls.load(SeqCst) < 20 + 200, "the pause grows: {} calls in ten minutes", calls.load(SeqCst));
    assert_eq!(Failure::transient("x").class(), Class::Transient);
}

#[tokio::test(start_paused = true)]
async fn several_topics_and_groups_in_one_worker() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let seen = seen.clone();
        move |source: Source, Json(n): Json<u32>| {
            let seen = seen.clone();
            async move {
                let group = source.group.unwrap();
                seen.lock().unwrap().push(format!("{}/{group} {n}", source.topic));
            }
        }
    };
    let routes = [billing(), Subscription::group("orders", "analytics"), Subscription::group("returns", "billing")];
    let test = start(|broker| Worker::new(broker).route(routes, handler)).await;
    test.send("orders", &1).await;
    test.send("returns", &2).await;
    test.all_done().await;
    let mut seen = seen.lock().unwrap().clone();
    seen.sort();
    assert_eq!(seen, ["orders/analytics 1", "orders/billing 1", "returns/billing 2"]);
}

#[tokio::test(start_paused = true)]
async fn a_repeated_message_is_handled_once() {
    let calls = Arc::new(AtomicU32::new(0));
    let handler = {
        let calls = calls.clone();
        move || {
            calls.fetch_add(1, SeqCst);
            std::future::ready(())
        }
    };
    let layer = IdempotentLayer::new(MemoryStore::new(100));
    let test = start(|broker| Worker::new(broker).route(billing(), handler).layer(layer)).await;
    let message = Message::new("x");
    for _ in 0..3 {
        test.send_message("orders", message.clone()).await;
    }
    test.all_done().await;
    test.on("orders", "billing").handled(3).attempts(3);
    test.nothing_else();
    assert_eq!(calls.load(SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn batches_settle_each_message() {
    async fn handle(numbers: Batch<(Json<u32>, Attempt)>) -> Vec<Result<(), String>> {
        numbers
            .into_iter()
            .map(|(Json(n), Attempt(a))| if n % 5 == 0 && a == 1 { Err("once".into()) } else { Ok(()) })
            .collect()
    }
    let test = start(|broker| Worker::new(broker).batch(billing(), 8, handle)).await;
    for n in 0..20 {
        test.send("orders", &n).await;
    }
    test.send("orders", "no number").await;
    test.all_done().await;
    test.on("orders", "billing").handled(20).attempts(25).dead_lettered(1).because("undecodable", 1);
    test.nothing_else();
}

#[tokio::test(start_paused = true)]
async fn at_most_once_is_never_handled_twice_and_broadcast_reaches_everyone() {
    let calls = Arc::new(AtomicU32::new(0));
    let handler = {
        let calls = calls.clone();
        move || {
            let n = calls.fetch_add(1, SeqCst);
            async move { if n.is_multiple_of(2) { Err("lost for good") } else { Ok(()) } }
        }
    };
    let once = billing().guarantee(Guarantee::AtMostOnce);
    let all = Subscription::broadcast("orders");
    let test = start(|broker| Worker::new(broker).route([once, all.clone(), all], handler)).await;
    for n in 0..10 {
        test.send("orders", &n).await;
    }
    test.all_done().await;
    let wanted = 30;
    while calls.load(SeqCst) < wanted {
        sleep(Duration::from_secs(1)).await;
    }
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(calls.load(SeqCst), wanted);
}

#[tokio::test(start_paused = true)]
async fn discards_are_counted() {
    let subscription = billing().dead_letter(DeadLetterPolicy::Discard).retry(RetryPolicy::attempts(2));
    let test = start(|broker| Worker::new(broker).route(subscription, async || Err::<(), _>("no"))).await;
    test.send("orders", &1).await;
    test.all_done().await;
    test.on("orders", "billing").handled(0).attempts(2).discarded(1).dead_lettered(0);
    test.nothing_else();
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_gives_back_what_was_not_begun() {
    let test = start(|broker| {
        Worker::new(broker)
            .route(billing().concurrency(2), async || sleep(Duration::from_secs(3)).await)
            .shutdown_deadline(Duration::from_secs(10))
    })
    .await;
    for n in 0..10 {
        test.send("orders", &n).await;
    }
    sleep(Duration::from_secs(1)).await;
    let broker = test.broker();
    let before = Instant::now();
    let report = test.shut_down().await.unwrap();
    assert_eq!((before.elapsed().as_secs(), report.acked, report.close.is_clean()), (2, 2, true));
    let backlog = broker.admin().backlog(&"orders".into(), &"billing".into()).await.unwrap();
    assert_eq!((backlog.ready.exact(), backlog.in_flight.exact()), (Some(8), Some(0)));
}

#[tokio::test(start_paused = true)]
async fn closing_the_broker_ends_the_worker() {
    let test = start(|broker| Worker::new(broker).route(billing(), async || {})).await;
    let handle = test.worker().clone();
    test.broker().close(Duration::from_secs(1)).await;
    tokio::time::timeout(Duration::from_secs(5), handle.ended()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_is_dropped_gives_everything_back() {
    let broker = connect("memory://").await.unwrap();
    let orders = broker.producer("orders").await.unwrap();
    for n in 0..20 {
        orders.send(Message::json(&n).unwrap()).await.unwrap();
    }
    // Dropped at every point of its first forty polls, and nothing is ever stuck.
    for polls in 0..40 {
        let handler = async || sleep(Duration::from_secs(60)).await;
        let worker = Worker::new(broker.clone()).route(billing().concurrency(3), handler);
        let mut running = std::pin::pin!(worker.run());
        for _ in 0..polls {
            tokio::select! {
                biased;
                _ = &mut running => panic!("it ended"),
                () = tokio::task::yield_now() => {}
            }
        }
    }
    let done = Arc::new(AtomicU32::new(0));
    let handler = {
        let done = done.clone();
        move || {
            let done = done.clone();
            async move {
                done.fetch_add(1, SeqCst);
            }
        }
    };
    let worker =
        Worker::new(broker.clone()).route(billing().concurrency(3).retry(RetryPolicy::attempts(1000)), handler);
    let all = async {
        while done.load(SeqCst) < 20 {
            sleep(Duration::from_secs(1)).await;
        }
    };
    let report = worker.run_until(all).await.unwrap();
    assert_eq!((report.acked, report.dead_lettered), (20, 0));
}

// 4.2: what was fetched ahead of a transient failure is not begun; it comes after the pause, uncounted.
#[tokio::test(start_paused = true)]
async fn no_handler_begins_after_a_transient_failure() {
    for concurrency in [1, 16] {
        let begun = Arc::new(AtomicU32::new(0));
        let handler = {
            let begun = begun.clone();
            move || {
                let failed = begun.fetch_add(1, SeqCst) == 100;
                async move { if failed { Err(anymq::Failure::transient("down")) } else { Ok(()) } }
            }
        };
        let sub = billing().concurrency(concurrency);
        let test = start(move |broker| Worker::new(broker).route(sub, handler)).await;
        test.worker().pause();
        for n in 0..1000 {
            test.send("orders", &n).await;
        }
        test.worker().resume();
        // The first pause lasts a second.
        sleep(Duration::from_millis(500)).await;
        assert_eq!(begun.load(SeqCst), 101, "{concurrency} at a time");
        test.all_done().await;
        test.on("orders", "billing").handled(1000).attempts(1001).retried(1);
        test.nothing_else();
    }
}
