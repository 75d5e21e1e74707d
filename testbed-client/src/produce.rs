//! The producer: as many messages at a time as it is told, each sent until the broker confirmed it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anymq::{Broker, BrokerExt, Message, Producer, ProducerSpec, SendOutcome, Sending};
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
    let mut flying = JoinSet::new();
    let mut due = Instant::now();
    for number in 0.. {
        let room = window.clone().acquire_owned().await?;
        tokio::time::sleep_until(due.into()).await;
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
    flying.join_all().await;
    Ok(())
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
