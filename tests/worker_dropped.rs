//! The worker's futures, dropped after each of their polls: what its handlers had goes back, another worker does all the
//! work, and nothing is left.

#![cfg(feature = "memory")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's panic is its report")]

use anymq::prelude::*;
use anymq::worker::Routes;
use anymq::{Broker, CloseReport, Count, Message, Topic};
use mq_memory::{MemoryBroker, MemoryConfig};
use std::collections::BTreeSet;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

const MESSAGES: usize = 10;

type Handled = Arc<Mutex<BTreeSet<Vec<u8>>>>;

/// Takes a moment, so that a worker can be dropped while it is at work.
async fn handle(State(handled): State<Handled>, Payload(payload): Payload) {
    tokio::time::sleep(Duration::from_millis(3)).await;
    handled.lock().unwrap().insert(payload.to_vec());
}

/// What is dropped: given a worker's broker and where handled messages are noted.
type Dropped = fn(Arc<dyn Broker>, Handled) -> Pin<Box<dyn Future<Output = ()>>>;

fn orders() -> Subscription {
    Subscription::group("orders", "billing").concurrency(2)
}

fn worker(broker: Arc<dyn Broker>, handled: Handled) -> Worker<Handled, impl Routes> {
    Worker::new(broker).state(handled).route(orders(), handle)
}

/// Stops the worker when it has handled some and has some in hand.
async fn shut_down_midway(handle: WorkerHandle) {
    tokio::time::sleep(Duration::from_millis(25)).await;
    handle.shutdown();
}

const DROPPED: [(&str, Dropped); 5] = [
    ("run", |broker, handled| {
        Box::pin(async move {
            let worker = worker(broker, handled);
            let handle = worker.handle();
            tokio::join!(worker.run(), shut_down_midway(handle)).0.unwrap();
        })
    }),
    ("run_until", |broker, handled| {
        Box::pin(async move {
            let midway = tokio::time::sleep(Duration::from_millis(25));
            worker(broker, handled).run_until(midway).await.unwrap();
        })
    }),
    ("run_until_signal", |broker, handled| {
        Box::pin(async move {
            let worker = worker(broker, handled);
            let handle = worker.handle();
            tokio::join!(worker.run_until_signal(), shut_down_midway(handle)).0.unwrap();
        })
    }),
    ("running", |broker, handled| {
        Box::pin(async move {
            let worker = worker(broker, handled);
            let handle = worker.handle();
            let look = async {
                assert!(handle.running().await);
                handle.shutdown();
            };
            tokio::join!(worker.run(), look).0.unwrap();
        })
    }),
    ("ended", |broker, handled| {
        Box::pin(async move {
            let worker = worker(broker, handled);
            let handle = worker.handle();
            handle.shutdown();
            tokio::join!(worker.run(), handle.ended()).0.unwrap();
        })
    }),
];

async fn whole_after(polls: u32, name: &str, make: Dropped) -> bool {
    let at = format!("{name} dropped after {polls} polls");
    let memory = MemoryBroker::new(MemoryConfig::recording()).unwrap();
    let first = memory.connect();
    let producer = first.producer("orders").await.unwrap();
    first.admin().create_group(&Topic::new("orders"), &"billing".into(), Default::default()).await.unwrap();
    for i in 0..MESSAGES {
        producer.send(Message::new(format!("m{i}"))).await.unwrap();
    }
    let handled = Handled::default();
    let mut completed = false;
    {
        let mut future = pin!(make(first.clone(), handled.clone()));
        for _ in 0..polls {
            completed = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await;
            if completed {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    // Nothing of the first worker is asked to end: dropping it was all.
    let second = memory.connect();
    let worker = worker(second.clone(), handled.clone());
    let done = async {
        while memory.open_work() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let report = worker.run_until(done);
    let report = tokio::time::timeout(Duration::from_secs(3600), report).await;
    report.unwrap_or_else(|_| panic!("{at}: stuck with {:?}", handled.lock().unwrap())).unwrap();
    assert_eq!(handled.lock().unwrap().len(), MESSAGES, "{at}: handled");
    let backlog = second.admin().backlog(&Topic::new("orders"), &"billing".into()).await.unwrap();
    let none = Count::Exact(0);
    assert_eq!((backlog.ready, backlog.in_flight, backlog.delayed), (none, none, none), "{at}");
    assert_eq!(backlog.dead, none, "{at}: a dropped worker's messages were not tried");
    for broker in [first, second] {
        let report: CloseReport = broker.close(Duration::from_secs(10)).await;
        assert_eq!((report.leaked, report.abandoned, report.unknown), (0, 0, 0), "{at}: {report:?}");
    }
    drop(producer);
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(memory.tasks(), 0, "{at}: tasks are left");
    assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), 0, "{at}: tasks are left");
    completed
}

#[test]
fn a_worker_is_dropped_at_each_await() {
    for (name, make) in DROPPED {
        let mut polls = 0;
        loop {
            assert!(polls < 200, "{name} never completes");
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
            if runtime.block_on(whole_after(polls, name, make)) {
                break;
            }
            polls += 1;
        }
        assert!(polls > 1, "{name} completed at once");
    }
}
