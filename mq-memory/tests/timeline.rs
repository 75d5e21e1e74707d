//! What the timeline says of trouble: enough to see the cause without a debugger.

#![allow(clippy::expect_used)]

use mq_api::{
    Broker, BrokerExt, Consumer, ConsumerExt, DeadLetterPolicy, Failure, Message, MessageId, Result, RetryPolicy,
    Settled, Subscription,
};
use mq_memory::{MemoryBroker, MemoryConfig, What};
use std::sync::Arc;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

fn workers() -> Subscription {
    let retry = RetryPolicy::attempts(2).delays([SECOND]).jitter(0.0).transient(SECOND, 60 * SECOND);
    Subscription::group("t", "g").member("m").retry(retry)
}

/// What the timeline has of a message, beside that it was sent and handed over.
fn of(memory: &MemoryBroker, id: &MessageId) -> Vec<What> {
    let events = memory.trace().expect("it records").events();
    let plain = |what: &What| matches!(what, What::Sent | What::Delivered { .. });
    events.into_iter().filter(|e| e.id == *id && !plain(&e.what)).map(|e| e.what).collect()
}

fn text(memory: &MemoryBroker) -> String {
    memory.trace().expect("it records").events().iter().map(|e| format!("{e}\n")).collect()
}

/// A member that subscribes so, and one message that was sent to it.
struct Scene {
    memory: MemoryBroker,
    broker: Arc<dyn Broker>,
    consumer: Box<dyn Consumer>,
    id: MessageId,
}

impl Scene {
    async fn new(config: MemoryConfig, subscription: Subscription) -> Result<Self> {
        let memory = MemoryBroker::new(config)?;
        let broker = memory.connect();
        let producer = broker.producer("t").await?;
        let consumer = broker.subscribe(subscription).await?;
        let message = Message::new("x").id(MessageId::from("order-1"));
        let id = message.id.clone();
        producer.send(message).await?;
        Ok(Self { memory, broker, consumer, id })
    }

    async fn usual() -> Result<Self> {
        Self::new(MemoryConfig::recording(), workers()).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_shows_the_last_error() -> Result<()> {
    let Scene { memory, mut consumer, id, .. } = Scene::usual().await?;
    for error in ["no stock", "still no stock"] {
        consumer.recv().await?.expect("open").nack(error).await;
    }
    let error = Some("still no stock".to_owned());
    let wanted = [
        What::Retried { after: SECOND, error: Some("no stock".to_owned()) },
        What::DeadLettered { reason: "max-attempts".to_owned(), error },
    ];
    assert_eq!(of(&memory, &id), wanted);
    assert!(text(&memory).contains("dead-lettered: max-attempts; failed: still no stock"), "{}", text(&memory));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_discard_shows_the_last_error() -> Result<()> {
    let discarding = workers().dead_letter(DeadLetterPolicy::Discard);
    let Scene { memory, mut consumer, id, .. } = Scene::new(MemoryConfig::recording(), discarding).await?;
    consumer.recv().await?.expect("open").nack(Failure::permanent("no such customer")).await;
    let error = Some("no such customer".to_owned());
    assert_eq!(of(&memory, &id), [What::Discarded { reason: "permanent".to_owned(), error }]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn what_is_given_back_at_shutdown_is_shown() -> Result<()> {
    let Scene { memory, broker, mut consumer, id } = Scene::usual().await?;
    let held = consumer.recv().await?.expect("open");
    assert_eq!(broker.close(SECOND).await.given_back, 1);
    assert_eq!(of(&memory, &id), [What::Released]);
    assert_eq!(held.ack().await, Settled::Stale);
    assert_eq!(of(&memory, &id), [What::Released, What::Stale]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_settlement_that_came_too_late_shows_its_message() -> Result<()> {
    // Also when the message has left the topic meanwhile.
    for history in [100, 0] {
        let mut config = MemoryConfig::recording();
        config.history = history;
        let Scene { memory, mut consumer, id, .. } = Scene::new(config, workers()).await?;
        let late = consumer.recv().await?.expect("open");
        memory.lose_leases("m");
        consumer.recv().await?.expect("open").ack().await;
        late.nack("too slow").await;
        assert_eq!(of(&memory, &id), [What::Lost, What::Acked, What::Stale], "history {history}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_transient_failure_shows_the_delay_that_was_used() -> Result<()> {
    let Scene { memory, mut consumer, id, .. } = Scene::usual().await?;
    let mut used = Vec::new();
    let mut held = consumer.recv().await?.expect("open");
    for _ in 0..4 {
        held.nack(Failure::transient("the database is down")).await;
        let start = tokio::time::Instant::now();
        held = consumer.recv().await?.expect("open");
        used.push(Duration::from_millis(start.elapsed().as_millis() as u64));
    }
    held.ack().await;
    let shown: Vec<Duration> = of(&memory, &id)
        .into_iter()
        .filter_map(|what| if let What::Retried { after, .. } = what { Some(after) } else { None })
        .collect();
    assert_eq!(shown, [SECOND, 2 * SECOND, 4 * SECOND, 8 * SECOND]);
    for (used, shown) in used.iter().zip(&shown) {
        assert!(*used >= *shown && *used <= *shown + Duration::from_millis(2), "{used:?} was used, {shown:?} shown");
    }
    Ok(())
}

/// Another member, which is not paused, may take it as soon as it is due.
#[tokio::test(start_paused = true)]
async fn a_transient_failure_beside_another_member_shows_when_that_may_take_it() -> Result<()> {
    let Scene { memory, broker, mut consumer, id } = Scene::usual().await?;
    consumer.recv().await?.expect("open").nack(Failure::transient("down")).await;
    let held = consumer.recv().await?.expect("open");
    let mut other = broker.subscribe(workers().member("other")).await?;
    held.nack(Failure::transient("down")).await;
    let start = tokio::time::Instant::now();
    other.recv().await?.expect("open").ack().await;
    assert!(start.elapsed() < SECOND + Duration::from_millis(2), "{:?}", start.elapsed());
    let shown = of(&memory, &id);
    assert!(matches!(shown[1], What::Retried { after, .. } if after == SECOND), "{shown:?}");
    Ok(())
}
