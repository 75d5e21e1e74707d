//! The member: handles as many messages at a time as it is told, each for a while, then acks it and waits for the answer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anymq::{Broker, Capabilities, ConsumerExt, Delivery, Settled as Answer};
use mq_testbed::client::{Order, Stop, id_in};
use mq_testbed::history::{Event, Historian, How, Settled};
use tokio::task::JoinSet;

use crate::{CLOSE, Failed, subscription};

/// No message for this long, and the group has nothing left that it would give. Longer than it takes to notice that a
/// former member is dead.
const SILENCE: Duration = Duration::from_secs(20);

pub(crate) fn has_keys(capabilities: &Capabilities) -> bool {
    capabilities.has(anymq::Feature::PerKey)
}

pub(crate) async fn run(broker: &Arc<dyn Broker>, order: &Order) -> Result<(), Failed> {
    let history = Arc::new(order.historian()?);
    let stop = Stop::when_input_closes();
    let mut consumer = broker.open_consumer(subscription(broker, order)).await?;
    let control = consumer.control();
    let mut events = control.events();
    let told = Arc::clone(&history);
    tokio::spawn(async move {
        while let Some(event) = events.next().await {
            match event {
                anymq::Event::Gap(_) => told.write(Event::Gap),
                other => told.write(Event::Note { text: format!("{other:?}") }),
            }
        }
    });
    history.write(Event::Ready);
    let stopped = tokio::task::spawn_blocking(move || while !stop.wait(Duration::from_secs(3600)) {});
    tokio::pin!(stopped);
    let mut hands = JoinSet::new();
    loop {
        // Dropping `recv` loses nothing, which this relies on.
        let delivery = tokio::select! {
            biased;
            _ = &mut stopped => break,
            Some(handled) = hands.join_next() => {
                handled?;
                continue;
            }
            delivery = consumer.recv(), if hands.len() < order.hands => delivery?,
        };
        let Some(delivery) = delivery else { break };
        hands.spawn(handle(delivery, order.work, history.clone()));
    }
    hands.join_all().await;
    let report = control.close(CLOSE).await;
    history.write(Event::Note { text: format!("closed: {report:?}") });
    Ok(())
}

/// Where the broker says it; a number that only this member counts is no place.
fn place(delivery: &Delivery) -> Option<String> {
    let position = delivery.position();
    (position != anymq::Position::default())
        .then(|| format!("{}:{position}", delivery.partition().map_or_else(String::new, |number| number.to_string())))
}

async fn handle(delivery: Delivery, work: Duration, history: Arc<Historian>) {
    let (id, place) = (id_in(delivery.payload_bytes()), place(&delivery));
    history.write(Event::Delivered { id: id.clone(), place: place.clone() });
    // The work.
    if !work.is_zero() {
        tokio::select! {
            () = tokio::time::sleep(work) => {}
            () = delivery.lost() => history.write(Event::Disowned { id: id.clone() }),
        }
    }
    history.write(Event::Settling { id: id.clone(), how: How::Ack, place: place.clone() });
    let outcome = match delivery.ack().await {
        Answer::Confirmed(anymq::Durability::Sent) => Settled::Sent,
        Answer::Confirmed(_) => Settled::Confirmed,
        Answer::Stale => Settled::Stale,
        _ => Settled::Unknown,
    };
    history.write(Event::Settled { id, how: How::Ack, outcome, place });
}

/// Everything that a new member is given until there is silence; it goes back with the close.
pub(crate) async fn what_is_left(broker: &Arc<dyn Broker>, order: &Order) -> Result<BTreeSet<String>, Failed> {
    let mut consumer = broker.open_consumer(subscription(broker, order).max_in_flight(1_000_000)).await?;
    let mut held = Vec::new();
    let mut found = BTreeSet::new();
    while let Ok(delivery) = tokio::time::timeout(SILENCE, consumer.recv()).await {
        let Some(delivery) = delivery? else { break };
        found.insert(id_in(delivery.payload_bytes()));
        held.push(delivery);
    }
    for delivery in held {
        // Not tried: it goes back without a count.
        let _ = delivery.release().await;
    }
    ConsumerExt::close(&consumer, CLOSE).await;
    Ok(found)
}
