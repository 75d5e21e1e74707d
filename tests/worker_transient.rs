//! 4.2: what is downstream is down: the subscription pauses, and nothing begins before the pause is over.

#![cfg(feature = "memory")]
#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use anymq::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering as O};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;

const SECOND: Duration = Duration::from_secs(1);

/// Without and with the engine between worker and broker.
const DIRECT: &str = "memory://";
const ENGINE: &str = "memory://?faults=full:0";

/// When the handler of each began.
type Begun = Arc<Mutex<Vec<(Instant, u64)>>>;

/// Sends `n` numbers, and gives what counts the failures.
async fn queued(broker: &Arc<dyn Broker>, n: u64) -> anymq::Result<Arc<AtomicU64>> {
    let p = broker.producer(ProducerSpec::new("t").group("g")).await?;
    for n in 0..n {
        p.send(Message::json(&n)?).await?;
    }
    Ok(Arc::default())
}

/// What began after the first failure, of number 100, and before the end of the pause that follows it.
fn begun_in_the_pause(begun: &Begun) -> Vec<u64> {
    let begun = begun.lock().unwrap();
    let at = begun.iter().position(|(_, n)| *n == 100).unwrap();
    let end = begun[at].0 + SECOND * 9 / 10;
    begun[at + 1..].iter().filter(|(began, _)| *began < end).map(|(_, n)| *n).collect()
}

// 4.2: nothing begins between a transient failure and the end of its pause.
#[tokio::test(start_paused = true)]
async fn nothing_begins_after_a_transient_failure() {
    for (url, concurrency) in [(DIRECT, 1), (DIRECT, 4), (ENGINE, 1), (ENGINE, 4)] {
        let begun = Begun::default();
        let log = begun.clone();
        let test = anymq::testing::Start::default()
            .url(url)
            .worker(async |broker| {
                let down = queued(&broker, 200).await?;
                let sub = Subscription::group("t", "g").concurrency(concurrency);
                Ok(Worker::new(broker).route(sub, move |Json(n): Json<u64>| {
                    log.lock().unwrap().push((Instant::now(), n));
                    let fails = n == 100 && down.fetch_add(1, O::SeqCst) == 0;
                    async move { if fails { Err(Failure::transient("down")) } else { Ok(()) } }
                }))
            })
            .await;
        test.all_done().await;
        let early = begun_in_the_pause(&begun);
        assert!(early.is_empty(), "began while it pauses: {early:?}; {url}, concurrency {concurrency}");
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_begins_after_a_transient_failure_of_a_batch() {
    for (url, concurrency) in [(DIRECT, 1), (DIRECT, 4), (ENGINE, 1), (ENGINE, 4)] {
        let begun = Begun::default();
        let log = begun.clone();
        let test = anymq::testing::Start::default()
            .url(url)
            .worker(async |broker| {
                let down = queued(&broker, 200).await?;
                let sub = Subscription::group("t", "g").concurrency(concurrency);
                Ok(Worker::new(broker).batch(sub, 10, move |batch: Batch<Json<u64>>| {
                    let results: Vec<Result<(), Failure>> = batch
                        .iter()
                        .map(|Json(n)| {
                            log.lock().unwrap().push((Instant::now(), *n));
                            if *n == 100 && down.fetch_add(1, O::SeqCst) == 0 {
                                Err(Failure::transient("down"))
                            } else {
                                Ok(())
                            }
                        })
                        .collect();
                    async move { results }
                }))
            })
            .await;
        test.all_done().await;
        let mut early = begun_in_the_pause(&begun);
        // Those of its own batch began with it.
        early.retain(|n| *n >= 110);
        assert!(early.is_empty(), "began while it pauses: {early:?}; {url}, concurrency {concurrency}");
    }
}

#[tokio::test(start_paused = true)]
async fn per_key_order_through_a_transient_failure() {
    for (url, concurrency) in [(DIRECT, 1), (DIRECT, 8), (ENGINE, 1), (ENGINE, 8)] {
        let begun = Arc::new(Mutex::new(Vec::new()));
        let log = begun.clone();
        let url = format!("{url}{}partitions=2", if url == DIRECT { '?' } else { '&' });
        let test = anymq::testing::Start::default()
            .url(url.as_str())
            .worker(async |broker| {
                let p = broker.producer(ProducerSpec::new("t").group("g")).await?;
                for n in 0..300u64 {
                    p.send(Message::json(&n)?.key(format!("k{}", n % 5))).await?;
                }
                let down = Arc::new(AtomicU64::new(0));
                let sub = Subscription::group("t", "g").ordering(Ordering::PerKey).concurrency(concurrency);
                Ok(Worker::new(broker).route(sub, move |Json(n): Json<u64>| {
                    let log = log.clone();
                    let fails = n % 50 == 7 && down.fetch_add(1, O::SeqCst) < 5;
                    async move {
                        if n % 3 == 0 {
                            tokio::task::yield_now().await
                        }
                        if fails {
                            Err(Failure::transient("down"))
                        } else {
                            log.lock().unwrap().push(n);
                            Ok(())
                        }
                    }
                }))
            })
            .await;
        test.all_done().await;
        let begun = begun.lock().unwrap().clone();
        for k in 0..5 {
            let of: Vec<u64> = begun.iter().copied().filter(|n| n % 5 == k).collect();
            let mut sorted = of.clone();
            sorted.sort();
            sorted.dedup();
            assert_eq!(of, sorted, "{url}, concurrency {concurrency}");
            assert_eq!(of.len(), 60);
        }
    }
}
