//! The producer: as many messages at a time as it is told, each sent until the broker confirmed it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anymq::{Broker, BrokerExt, Count, Message, Producer, ProducerSpec, SendOutcome, Sending};
use mq_testbed::client::{Order, Stop, payload};
use mq_testbed::history::{Event, Historian, Sent};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::Failed;

pub(crate) async fn run(broker: &Arc<dyn Broker>, order: &Order) -> Result<(), Failed> {
    let history = Arc::new(order.historian()?);
    let stop = Stop::when_input_closes();
    let spec = ProducerSpec::new(order.topic.as_str()).group(order.group.as_str());
    let producer = broker.producer(spec).await?;
    history.write(Event::Ready);
    let window = Arc::new(Semaphore::new(order.window));
    let piled = Arc::new(AtomicBool::new(false));
    let looking = tokio::spawn(look(broker.clone(), order.clone(), piled.clone()));
    let mut flying = JoinSet::new();
    let mut due = Instant::now();
    for number in 0.. {
        let room = window.clone().acquire_owned().await?;
        tokio::time::sleep_until(due.into()).await;
        while piled.load(Ordering::Relaxed) && !stop.is_set() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if stop.is_set() {
            break;
        }
        due = order.next_due(due);
        let (id, key) = order.message(number);
        let letter = Letter { id, key, producer: producer.clone(), history: history.clone() };
        // The call itself queues it, so that the order of first tries is that of the numbers.
        let first = letter.send();
        flying.spawn(async move {
            letter.until_confirmed(first).await;
            drop(room);
        });
        while flying.try_join_next().is_some() {}
    }
    looking.abort();
    flying.join_all().await;
    Ok(())
}

/// Messages of the group in nobody's hands, from which on a producer waits: what members on a busy machine are behind would
/// else grow for as long as it sends, and a trial would measure how long that takes to be worked off.
const PILE: u64 = 2_000;

/// Says all the time whether so many are piled up. A broker that does not answer is no reason to wait.
async fn look(broker: Arc<dyn Broker>, order: Order, piled: Arc<AtomicBool>) {
    let (topic, group) = (crate::topic(&order), order.group.as_str().into());
    if order.window == 1 {
        return;
    }
    loop {
        let admin = broker.admin();
        let backlog = tokio::time::timeout(Duration::from_secs(2), admin.backlog(&topic, &group)).await;
        let ready = backlog.ok().and_then(Result::ok).map_or(0, |backlog| match backlog.ready {
            Count::Exact(n) | Count::AtMost(n) | Count::AtLeast(n) => n,
            _ => 0,
        });
        piled.store(ready >= PILE, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A message on its way.
struct Letter {
    id: String,
    key: String,
    producer: Arc<dyn Producer>,
    history: Arc<Historian>,
}

impl Letter {
    fn send(&self) -> Sending {
        self.history.write(Event::Sending { id: self.id.clone(), key: self.key.clone() });
        self.producer.send(Message::new(payload(&self.id)).id(self.id.as_str()).key(self.key.clone()))
    }

    async fn until_confirmed(&self, first: Sending) {
        let mut sending = first;
        loop {
            let outcome = match sending.await {
                Ok(_) => Sent::Confirmed,
                Err(error) => {
                    self.history.write(Event::Note { text: error.to_string() });
                    match error.outcome() {
                        Some(SendOutcome::NotSent) => Sent::NotSent,
                        Some(SendOutcome::Rejected) => Sent::Rejected,
                        _ => Sent::Unknown,
                    }
                }
            };
            self.history.write(Event::Sent { id: self.id.clone(), outcome });
            if outcome == Sent::Confirmed {
                return;
            }
            // The library has tried for its own limit; a pause keeps the history readable.
            tokio::time::sleep(Duration::from_millis(100)).await;
            sending = self.send();
        }
    }
}
