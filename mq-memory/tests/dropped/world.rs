//! What an operation finds, and what must hold after it was dropped.

use crate::operations::Operation;
use mq_api::{
    Broker, BrokerExt, Consumer, ConsumerExt, Count, Delivery, Group, Message, Producer, RetryPolicy, Subscription,
    Topic,
};
use mq_memory::{FaultPlan, MemoryBroker, MemoryConfig};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const TOPIC: &str = "orders";
pub(crate) const GROUP: &str = "billing";

/// A broker with one dead letter (`bad`), two deliveries in hand (`m0`, `m1`) and three waiting (`m2` to `m4`).
pub(crate) struct World {
    pub(crate) memory: MemoryBroker,
    pub(crate) broker: Arc<dyn Broker>,
    pub(crate) producer: Arc<dyn Producer>,
    pub(crate) consumer: Box<dyn Consumer>,
    pub(crate) held: Vec<Delivery>,
}

pub(crate) fn sub() -> Subscription {
    let retry = RetryPolicy::attempts(50).delays([Duration::from_millis(50)]).jitter(0.0);
    Subscription::group(TOPIC, GROUP).retry(retry)
}

pub(crate) fn topic() -> Topic {
    Topic::new(TOPIC)
}

pub(crate) fn group() -> Group {
    Group::new(GROUP)
}

/// Fails unless the whole of it takes a sane time; the clock is paused, so that this costs nothing.
async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(600), future).await.expect(what)
}

impl World {
    pub(crate) async fn new(behind_seam: bool) -> Self {
        let mut config = MemoryConfig::recording().seed(7);
        if behind_seam {
            let mut slow = FaultPlan::none();
            slow.delay = Duration::from_millis(4);
            config = config.faults(slow);
        }
        let memory = MemoryBroker::new(config).unwrap();
        let broker = memory.connect();
        let mut consumer = broker.subscribe(sub()).await.unwrap();
        let producer = broker.producer(TOPIC).await.unwrap();
        producer.send(Message::new("bad")).await.unwrap();
        consumer.recv().await.unwrap().unwrap().dead_letter("bad").await;
        for i in 0..5 {
            producer.send(Message::new(format!("m{i}"))).await.unwrap();
        }
        let mut held = Vec::new();
        for _ in 0..2 {
            held.push(consumer.recv().await.unwrap().unwrap());
        }
        Self { memory, broker, producer, consumer, held }
    }

    /// The next of those in hand.
    pub(crate) fn hand(&mut self) -> Delivery {
        self.held.remove(0)
    }

    /// Nothing is lost, leaked or stuck.
    pub(crate) async fn assert_whole(self, operation: &Operation, at: &str) {
        let Self { memory, broker: first, producer, consumer, held } = self;
        // What is in hand goes back; the member leaves; another program comes.
        drop(held);
        let report = soon("closing the consumer", consumer.close(Duration::from_secs(30))).await;
        assert_eq!((report.leaked, report.abandoned), (0, 0), "{at}: {report:?}");
        drop((consumer, producer));
        let report = soon("closing the first connection", first.close(Duration::from_secs(30))).await;
        assert_eq!((report.leaked, report.abandoned), (0, 0), "{at}: {report:?}");

        let second = memory.connect();
        let mut consumer = soon("subscribing again", second.subscribe(sub())).await.unwrap();
        let producer = soon("a producer again", second.producer(TOPIC)).await.unwrap();
        soon("sending again", producer.send(Message::new("after"))).await.unwrap();
        let mut seen = BTreeSet::new();
        loop {
            let next = tokio::time::timeout(Duration::from_secs(300), consumer.recv()).await;
            let Ok(next) = next else { break };
            let delivery = next.unwrap().unwrap();
            let label = String::from_utf8_lossy(delivery.payload_bytes()).trim_matches('"').to_owned();
            // What was dropped half-way may have stored its message; a redrive that was may have given back a letter and kept it.
            assert!(
                label.starts_with('x') || label == "bad" || seen.insert(label.clone()) || !operation.keeps,
                "{at}: {label} came twice"
            );
            let settled = soon("an ack", delivery.ack()).await;
            assert!(settled.is_ok(), "{at}: {settled:?}");
        }
        assert!(seen.contains("after"), "{at}: nothing flows: {seen:?}");
        if operation.keeps {
            for label in operation.must_see() {
                let events = memory.trace().map(|trace| trace.events()).unwrap_or_default();
                let timeline = || events.iter().map(|e| format!("{e}\n")).collect::<String>();
                assert!(seen.contains(label), "{at}: {label} is lost; seen {seen:?}\n{}", timeline());
            }
        }
        let backlog = soon("the backlog", second.admin().backlog(&topic(), &group())).await.unwrap();
        let none = Count::Exact(0);
        assert_eq!((backlog.ready, backlog.in_flight, backlog.delayed), (none, none, none), "{at}: {backlog:?}");
        let report = soon("closing", second.close(Duration::from_secs(30))).await;
        assert_eq!((report.leaked, report.abandoned, report.unknown), (0, 0, 0), "{at}: {report:?}");
        drop((consumer, producer, second, first));
        for _ in 0..100 {
            if memory.tasks() == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(memory.tasks(), 0, "{at}: tasks are left");
        assert_eq!(memory.members(), Vec::<String>::new(), "{at}: members are left");
    }
}
