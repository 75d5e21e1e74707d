//! The producer: one message at a time, each until the broker confirmed it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anymq::{Broker, BrokerExt, Message, ProducerSpec, SendOutcome};
use mq_testbed::client::{Order, Stop, payload};
use mq_testbed::history::{Event, Sent};

use crate::Failed;

pub(crate) async fn run(broker: &Arc<dyn Broker>, order: &Order) -> Result<(), Failed> {
    let history = order.historian()?;
    let stop = Stop::when_input_closes();
    let spec = ProducerSpec::new(order.topic.as_str()).group(order.group.as_str());
    let producer = broker.producer(spec).await?;
    history.write(Event::Ready);
    let mut due = Instant::now();
    for number in 0.. {
        tokio::time::sleep_until(due.into()).await;
        if stop.is_set() {
            break;
        }
        due = order.next_due(due);
        let (id, key) = order.message(number);
        loop {
            history.write(Event::Sending { id: id.clone(), key: key.clone() });
            let message = Message::new(payload(&id)).id(id.as_str()).key(key.clone());
            let outcome = match producer.send(message).await {
                Ok(_) => Sent::Confirmed,
                Err(error) => {
                    history.write(Event::Note { text: error.to_string() });
                    match error.outcome() {
                        Some(SendOutcome::NotSent) => Sent::NotSent,
                        Some(SendOutcome::Rejected) => Sent::Rejected,
                        _ => Sent::Unknown,
                    }
                }
            };
            history.write(Event::Sent { id: id.clone(), outcome });
            if outcome == Sent::Confirmed {
                break;
            }
            // The library has tried for its own limit; a pause keeps the history readable.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    Ok(())
}
