//! Groups that somebody deletes under their members, which make them again.

#![allow(clippy::expect_used)]

use mq_api::{
    BrokerExt, Consumer, ConsumerExt, Event, Events, Message, ProducerSpec, RedriveOptions, Result, Retention,
    Subscription,
};
use mq_memory::connect;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

const SECOND: Duration = Duration::from_secs(1);

fn workers() -> Subscription {
    Subscription::group("t", "g")
}

async fn ack_all(consumer: &mut Box<dyn Consumer>) -> Result<usize> {
    let mut n = 0;
    while let Ok(next) = timeout(SECOND, consumer.recv()).await {
        next?.expect("open").ack().await;
        n += 1;
    }
    Ok(n)
}

fn gaps(events: &mut Events) -> Vec<Option<u64>> {
    let gap = |event| if let Event::Gap(gap) = event { Some(gap.count) } else { None };
    events.drain().into_iter().filter_map(gap).collect()
}

#[tokio::test(start_paused = true)]
async fn what_was_redriven_to_a_group_reaches_the_one_made_in_its_place() -> Result<()> {
    let broker = connect("memory://remade-redriven").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(workers()).await?;
    let mut other = broker.subscribe(Subscription::group("t", "other")).await?;
    producer.send(Message::new("x")).await?;
    consumer.recv().await?.expect("open").dead_letter("bad").await;
    let (topic, group) = ("t".into(), "g".into());
    let report = broker.admin().redrive(&topic, &group, RedriveOptions::default()).await?;
    assert_eq!(report.redriven, 1);
    broker.admin().delete_group(&topic, &group).await?;
    assert_eq!((ack_all(&mut consumer).await?, ack_all(&mut other).await?), (1, 1), "the other has the first only");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn the_gap_counts_what_was_gone_when_the_group_was_made_again() -> Result<()> {
    let broker = connect("memory://remade-gap").await?;
    let handled = Retention::handled(100);
    let producer = broker.open_producer(ProducerSpec::new("t").retention(handled)).await?;
    let mut consumer = broker.subscribe(workers().retention(handled)).await?;
    let mut second = broker.subscribe(workers().retention(handled)).await?;
    let mut other = broker.subscribe(Subscription::group("t", "other").retention(handled)).await?;
    let (mut events, mut seconds) = (consumer.control().events(), second.control().events());
    for n in 0..8 {
        producer.send(Message::new(n.to_string())).await?;
        other.recv().await?.expect("open").ack().await;
    }
    // Of eight one is handled, out of turn; those before it and after it are not.
    let held = [consumer.recv().await?.expect("open"), consumer.recv().await?.expect("open")];
    let [first, handled] = held;
    handled.ack().await;
    broker.admin().delete_group(&"t".into(), &"g".into()).await?;
    drop(first);
    assert_eq!((ack_all(&mut consumer).await?, ack_all(&mut second).await?), (0, 0));
    assert_eq!((gaps(&mut events), gaps(&mut seconds)), (vec![Some(7)], vec![Some(7)]), "one gap for each member");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn the_gap_counts_nothing_where_nothing_is_gone() -> Result<()> {
    let broker = connect("memory://remade-whole").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(workers()).await?;
    let mut events = consumer.control().events();
    for n in 0..5 {
        producer.send(Message::new(n.to_string())).await?;
    }
    broker.admin().delete_group(&"t".into(), &"g".into()).await?;
    assert_eq!(ack_all(&mut consumer).await?, 5);
    assert_eq!(gaps(&mut events), [Some(0)]);
    Ok(())
}

/// Also when it is deleted while a member makes it again, and before the member has joined it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_group_is_made_again_however_often_it_is_deleted() -> Result<()> {
    let broker = connect("memory://remade-often?partitions=2").await?;
    let producer = broker.producer("t").await?;
    let mut consumer = broker.subscribe(workers().max_in_flight(50)).await?;
    let all: BTreeSet<u32> = (0..20_000).collect();
    let wanted = Arc::new(parking_lot::Mutex::new(all.clone()));
    let missing = wanted.clone();
    let worker = tokio::spawn(async move {
        while !missing.lock().is_empty() {
            let Ok(next) = timeout(30 * SECOND, consumer.recv()).await else { break };
            let delivery = next?.expect("open");
            let label = String::from_utf8_lossy(delivery.payload_bytes()).into_owned();
            missing.lock().remove(&label.parse().expect("a number"));
            tokio::spawn(async move {
                tokio::task::yield_now().await;
                delivery.ack().await;
            });
        }
        Ok::<_, mq_api::Error>(())
    });
    for n in all {
        producer.send(Message::new(n.to_string())).await?;
        if n % 500 == 499 {
            broker.admin().delete_group(&"t".into(), &"g".into()).await?;
        }
    }
    worker.await.expect("no panic")?;
    assert_eq!(wanted.lock().len(), 0, "messages that never came");
    Ok(())
}
