//! How the throughput of a group grows with its members, each with a handler that waits 5 ms.

use crate::message;
use anymq::SendBatch;
use anymq::prelude::*;
use std::time::{Duration, Instant};

/// Prints `members N handled M` of this many seconds.
pub(crate) fn run(count: usize, seconds: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let broker = anymq::connect("memory://").await.unwrap();
        let mut running = Vec::new();
        for member in 0..count {
            let orders = Subscription::group("t", "bench").member(format!("m{member}")).max_in_flight(64);
            let worker = Worker::new(broker.clone())
                .route(orders, async || tokio::time::sleep(Duration::from_millis(5)).await)
                .shutdown_deadline(Duration::from_secs(1));
            let handle = worker.handle();
            running.push((tokio::spawn(worker.run()), handle));
        }
        for (_, handle) in &running {
            assert!(handle.running().await);
        }
        let producer = broker.producer("t").await.unwrap();
        let mut batch = SendBatch::new();
        let needed = count * seconds as usize * 200 + 1000;
        batch.messages.extend((0..needed).map(|_| message()));
        drop(producer.send_batch(batch).await);
        let start = Instant::now();
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let took = start.elapsed().as_secs_f64();
        let mut handled = 0;
        for (task, handle) in running {
            handle.shutdown();
            handled += task.await.unwrap().unwrap().acked;
        }
        println!("members {count} rate {:.1}", handled as f64 / took);
    });
}
