//! The fault workload on anymq: `testbed-client ROLE --url U ...`, over the backend that the URL names.
//!
//! It uses the library as a program would, with its defaults but for the times, which are made short so that a trial
//! is. What the raw clients do by hand (reconnecting, taking over, noticing what was destroyed) is the library's affair.

mod consume;
mod produce;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anymq::{Broker, Subscription, Topic};
use mq_testbed::client::{Order, Role};
use mq_testbed::history::Event;

/// Why a role could not be played.
type Failed = Box<dyn std::error::Error + Send + Sync>;

/// A close waits for what is in hand, and no longer than this for a broker that is away.
const CLOSE: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Failed> {
    let order = Order::read(std::env::args().skip(1))?;
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(play(order))
}

async fn play(order: Order) -> Result<(), Failed> {
    let broker = anymq::connect(order.url.as_str()).await?;
    match order.role {
        Role::Prepare => prepare(&broker, &order).await?,
        Role::Produce => produce::run(&broker, &order).await?,
        Role::Consume => consume::run(&broker, &order).await?,
        Role::Inspect => inspect(&broker, &order).await?,
        Role::Destroy => {
            broker.admin().delete_topic(&topic(&order)).await?;
        }
    }
    broker.close(CLOSE).await;
    Ok(())
}

fn topic(order: &Order) -> Topic {
    Topic::from(order.topic.as_str())
}

/// As a member subscribes: a lease that is short for a trial and long for a message; one message at a time per key
/// where the backend has keys.
fn subscription(broker: &Arc<dyn Broker>, order: &Order) -> Subscription {
    let plain = Subscription::group(order.topic.as_str(), order.group.as_str())
        .member(order.name.as_str())
        // Some more than it handles, so that there is always one to be handed over.
        .max_in_flight(order.hands.saturating_add(9))
        .lease(Duration::from_secs(5));
    let capabilities = broker.capabilities();
    if consume::has_keys(&capabilities) { plain.ordering(anymq::Ordering::PerKey) } else { plain }
}

async fn prepare(broker: &Arc<dyn Broker>, order: &Order) -> Result<(), Failed> {
    use anymq::ConsumerExt;
    // A subscription makes topic, group and dead letters, exactly as the members will ask for them.
    let consumer = broker.open_consumer(subscription(broker, order)).await?;
    ConsumerExt::close(&consumer, CLOSE).await;
    Ok(())
}

/// What the group has left is what a new member is given; it gives everything back.
async fn inspect(broker: &Arc<dyn Broker>, order: &Order) -> Result<(), Failed> {
    let history = order.historian()?;
    for id in consume::what_is_left(broker, order).await? {
        history.write(Event::Remaining { id });
    }
    let dead = broker.admin().dead_letters(&topic(order), &order.group.as_str().into(), 1_000_000).await;
    match dead {
        Ok(letters) => {
            for letter in letters {
                history.write(Event::Dead { id: letter.message.id.to_string() });
            }
        }
        // Nothing in this workload is dead-lettered on purpose; where the broker cannot look, a dead letter is a loss.
        Err(error) => history.write(Event::Note { text: format!("dead letters: {error}") }),
    }
    Ok(())
}
