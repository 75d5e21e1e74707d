//! Delays that take several steps: what is not due is never in the group's queue on the way, so nothing waits behind its
//! backlog and no look counts it as ready.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use control::{Rabbit, next, quiet, text};
use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use mq_api::{Broker, BrokerExt, Consumer, Count, Message, ProducerSpec, Provisioning, RetryPolicy, Subscription};
use mq_testbed::RabbitOptions;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const KINDS: [&str; 2] = ["quorum", "classic"];
/// What its holder waits for, in the group's queue or in hand.
const LAST: Duration = Duration::from_secs(1);

/// Another program, which sees the queues.
struct Eye {
    raw: lapin::Connection,
}

impl Eye {
    async fn of(rabbit: &Rabbit) -> Self {
        Self { raw: rabbit.raw().await.0 }
    }

    /// What is ready in a queue; `None` if there is none.
    async fn waiting(&self, queue: &str) -> Option<u32> {
        let channel = self.raw.create_channel().await.unwrap();
        let look = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let found = channel.queue_declare(queue.into(), look, FieldTable::default()).await.ok()?;
        channel.close(200, "OK".into()).await.unwrap();
        Some(found.message_count())
    }

    async fn becomes(&self, queue: &str, wanted: Option<u32>, limit: Duration) {
        let began = Instant::now();
        while self.waiting(queue).await != wanted {
            assert!(began.elapsed() < limit, "'{queue}' has {:?}, not {wanted:?}", self.waiting(queue).await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn delete(&self, queue: &str) {
        let channel = self.raw.create_channel().await.unwrap();
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();
        channel.close(200, "OK".into()).await.unwrap();
    }

    /// No queue of the group holds anything.
    async fn nothing_left(&self, queue: &str) {
        let lengths = [1_000, 5_000, 30_000].map(|ms| [format!("..retry..{ms}"), format!("..step..{ms}")]);
        let others = ["", "..alone", "..steps", "..dlq"].map(str::to_owned);
        for suffix in lengths.into_iter().flatten().chain(others) {
            let waiting = self.waiting(&format!("{queue}{suffix}")).await;
            assert!(matches!(waiting, None | Some(0)), "'{queue}{suffix}' has {waiting:?}");
        }
    }
}

/// Whether it came at its time.
fn judge(what: &str, took: Duration, delay: Duration) {
    println!("{what}: {took:?} for {delay:?}");
    assert!(took >= delay, "{what}: early, {took:?}");
    assert!(took <= delay + (delay / 10).max(Duration::from_secs(1)), "{what}: late, {took:?}");
}

/// Hands one message to the member, which wants it again after that time; the time counts from what is returned.
async fn delayed(broker: &Arc<dyn Broker>, member: &mut Box<dyn Consumer>, topic: &str, delay: Duration) -> Instant {
    let producer = broker.producer(ProducerSpec::new(topic).group("g")).await.unwrap();
    producer.send(Message::new("late").header("amqp.priority", "3").header("h", "v")).await.unwrap();
    let delivery = next(member).await;
    assert_eq!(text(&delivery), "late");
    let began = Instant::now();
    assert!(delivery.nack_after(delay, "later").await.is_ok());
    began
}

async fn comes(member: &mut Box<dyn Consumer>, what: &str, began: Instant, delay: Duration) {
    let delivery = next(member).await;
    judge(what, began.elapsed(), delay);
    assert_eq!((text(&delivery).as_str(), delivery.attempt()), ("late", 2), "{what}");
    let headers = &delivery.message().headers;
    assert_eq!((headers.get_str("amqp.priority"), headers.get_str("h")), (Some("3"), Some("v")), "{what}");
    assert!(delivery.ack().await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_due_is_never_ready_though_no_member_has_room() {
    const DELAY: Duration = Duration::from_secs(10);
    let rabbit = Rabbit::start(RabbitOptions::default());
    let one = async |kind: &str| {
        let broker = rabbit.connect(&format!("queue_type={kind}")).await;
        let mut member = broker.subscribe(Subscription::group(kind, "g").max_in_flight(1)).await.unwrap();
        let began = delayed(&broker, &mut member, kind, DELAY).await;
        let producer = broker.producer(kind).await.unwrap();
        producer.send(Message::new("plug")).await.unwrap();
        let plug = next(&mut member).await;
        let (topic, group) = (kind.into(), "g".into());
        let mut looks = 0;
        loop {
            let backlog = broker.admin().backlog(&topic, &group).await.unwrap();
            let at = began.elapsed();
            looks += 1;
            if at < DELAY - LAST {
                assert!(backlog.ready.admits(0), "{kind}, look {looks} after {at:?}: {backlog:?}");
            }
            assert!(backlog.ready.admits(1) || at < DELAY, "{kind}, look {looks} after {at:?}: {backlog:?}");
            if backlog.ready == Count::AtLeast(1) && at >= DELAY {
                judge(&format!("{kind} counted, {looks} looks"), at, DELAY);
                break;
            }
            assert!(at < DELAY * 2, "{kind}: it is nowhere: {backlog:?}");
        }
        let free = Instant::now();
        plug.ack().await;
        let delivery = next(&mut member).await;
        assert!(free.elapsed() < Duration::from_secs(1), "{kind}: {:?}", free.elapsed());
        assert_eq!((text(&delivery).as_str(), delivery.attempt()), ("late", 2), "{kind}");
        assert!(delivery.ack().await.is_ok());
        Eye::of(&rabbit).await.nothing_left(&format!("{kind}..g")).await;
        broker.close(Duration::from_secs(5)).await;
    };
    tokio::join!(one(KINDS[0]), one(KINDS[1]));
}
