//! The whole path, in the order a newcomer meets it.

#![allow(clippy::expect_used)]

use mq_api::{
    Backlog, BrokerExt, ConsumerExt, Count, Deliveries, Durability, Failure, Group, Message, Ordering, ProducerExt,
    Result, RetryPolicy, Settled, Subscription, Topic,
};
use mq_memory::{MemoryBroker, MemoryConfig};
use std::time::Duration;

fn broker() -> MemoryBroker {
    MemoryBroker::new(MemoryConfig::recording()).expect("runtime")
}

fn exact(ready: u64, in_flight: u64, delayed: u64, dead: u64) -> Backlog {
    let n = Count::Exact;
    Backlog { ready: n(ready), in_flight: n(in_flight), delayed: n(delayed), dead: n(dead) }
}

#[tokio::test(start_paused = true)]
async fn send_receive_ack() -> Result<()> {
    let memory = broker();
    let client = memory.connect();
    let orders = client.producer("orders").await?;
    let mut billing = client.subscribe(Subscription::group("orders", "billing")).await?;
    let receipt = orders.send(Message::new("one").key("k").header("h", "v")).await?;
    assert_eq!(receipt.level, Durability::Memory);
    let delivery = billing.recv().await?.expect("open");
    assert_eq!((delivery.payload_bytes(), delivery.attempt()), (&b"one"[..], 1));
    assert_eq!(delivery.ack().await, Settled::Confirmed(Durability::Memory));
    let (topic, group) = (Topic::new("orders"), Group::new("billing"));
    assert_eq!(client.admin().backlog(&topic, &group).await?, exact(0, 0, 0, 0));
    client.close(Duration::from_secs(1)).await;
    assert_eq!(memory.tasks(), 0);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn failures_are_retried_and_then_dead_lettered() -> Result<()> {
    let memory = broker();
    let client = memory.connect();
    let orders = client.producer("orders").await?;
    let mut billing = client.subscribe(Subscription::group("orders", "billing")).await?;
    orders.send(Message::new("bad")).await?;
    for attempt in 1..=5 {
        let delivery = billing.recv().await?.expect("open");
        assert_eq!(delivery.attempt(), attempt);
        assert!(delivery.nack("card refused").await.is_ok());
    }
    let letters = Topic::dead_letters("orders", "billing");
    let mut ops = client.subscribe(Subscription::group(letters, "ops")).await?;
    let letter = ops.recv().await?.expect("open");
    let envelope = letter.envelope().expect("enveloped");
    assert_eq!((envelope.attempts, envelope.reason.as_str()), (5, "max-attempts"));
    assert_eq!(envelope.error.as_deref(), Some("card refused"));
    letter.ack().await;
    memory.all_done().await
}

#[tokio::test(start_paused = true)]
async fn order_per_key_survives_retries() -> Result<()> {
    let memory = broker();
    let client = memory.connect();
    let orders = client.producer("orders").await?;
    let sub = Subscription::group("orders", "billing").ordering(Ordering::PerKey);
    let mut billing = client.subscribe(sub).await?;
    for i in 0..4 {
        orders.send(Message::new(format!("a{i}")).key("a")).await?;
        orders.send(Message::new(format!("b{i}")).key("b")).await?;
    }
    let mut seen = Vec::new();
    while seen.len() < 8 {
        let delivery = billing.recv().await?.expect("open");
        let text = String::from_utf8_lossy(delivery.payload_bytes()).into_owned();
        if text == "a1" && delivery.attempt() < 3 {
            delivery.nack("not yet").await;
            continue;
        }
        seen.push(text);
        delivery.ack().await;
    }
    let of = |key: char| seen.iter().filter(|t| t.starts_with(key)).cloned().collect::<Vec<_>>();
    assert_eq!(of('a'), ["a0", "a1", "a2", "a3"]);
    assert_eq!(of('b'), ["b0", "b1", "b2", "b3"]);
    assert!(seen.iter().position(|t| t == "b3") < seen.iter().position(|t| t == "a1"), "other keys flow: {seen:?}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_poison_message_dies_alone() -> Result<()> {
    let memory = broker();
    let client = memory.connect();
    let orders = client.producer("orders").await?;
    for i in 0..20 {
        orders.send(Message::new(i.to_string())).await?;
    }
    let mut acked = Vec::new();
    let mut takes = 0;
    for life in 0..20 {
        let name = format!("m{life}");
        let sub = Subscription::group("orders", "billing").member(name.clone()).max_in_flight(8);
        let mut member = client.subscribe(sub).await?;
        let crashed = loop {
            let next = tokio::time::timeout(Duration::from_secs(300), member.recv()).await;
            let Ok(next) = next else { break false };
            let delivery = next?.expect("open");
            if delivery.payload_bytes() == b"7" {
                takes += 1;
                assert!(memory.crash(&name));
                assert_eq!(delivery.ack().await, Settled::Stale, "a dead process settles nothing");
                break true;
            }
            acked.push(String::from_utf8_lossy(delivery.payload_bytes()).into_owned());
            delivery.ack().await;
        };
        if !crashed {
            break;
        }
    }
    let backlog = client.admin().backlog(&"orders".into(), &"billing".into()).await?;
    assert_eq!(backlog, exact(0, 0, 0, 1));
    assert_eq!(acked.len(), 19, "{acked:?}");
    assert_eq!(takes, 6, "five takes make a suspect; alone at the fifth and sixth");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn close_gives_back_and_another_goes_on() -> Result<()> {
    let memory = broker();
    let client = memory.connect();
    let orders = client.producer("orders").await?;
    for i in 0..10 {
        orders.send(Message::new(i.to_string())).await?;
    }
    let mut first = client.subscribe(Subscription::group("orders", "billing")).await?;
    let mut batch = Deliveries::new();
    assert_eq!(first.recv_batch(10, &mut batch).await?, 10);
    let report = first.close(Duration::from_secs(3)).await;
    assert_eq!(report.given_back, 10);
    assert!(first.recv().await?.is_none());
    assert_eq!(batch.ack_all().await, Settled::Stale);
    let mut second = client.subscribe(Subscription::group("orders", "billing")).await?;
    assert_eq!(second.recv_batch(100, &mut batch).await?, 10);
    assert!(batch.ack_all().await.is_ok());
    memory.all_done().await
}

#[tokio::test(start_paused = true)]
async fn a_transient_failure_pauses_and_counts_nothing() -> Result<()> {
    let memory = broker();
    let client = memory.connect();
    let orders = client.producer("orders").await?;
    let mut billing = client.subscribe(Subscription::group("orders", "billing")).await?;
    orders.send(Message::new("x")).await?;
    let start = tokio::time::Instant::now();
    for _ in 0..10 {
        let delivery = billing.recv().await?.expect("open");
        assert_eq!(delivery.attempt(), 1);
        delivery.nack(Failure::transient("database down")).await;
    }
    assert!(start.elapsed() > Duration::from_secs(60), "pauses grow: {:?}", start.elapsed());
    billing.recv().await?.expect("open").ack().await;
    memory.all_done().await
}

#[tokio::test(start_paused = true)]
async fn partitions_are_spread_and_move_when_handled() -> Result<()> {
    let memory = broker();
    let client = memory.connect();
    let spec = mq_api::ProducerSpec::new("orders").partitions(8);
    let orders = client.producer(spec).await?;
    let sub = || Subscription::group("orders", "billing").ordering(Ordering::PerKey);
    let mut a = client.subscribe(sub()).await?;
    let messages = (0..64).map(|i| Message::new(i.to_string()).key(format!("k{i}"))).collect();
    assert!(orders.send_all(messages).await.iter().all(Result::is_ok));
    let held = a.recv().await?.expect("open");
    let mut b = client.subscribe(sub()).await?;
    let kept = held.partition();
    let mut partitions = [std::collections::BTreeSet::new(), std::collections::BTreeSet::new()];
    held.ack().await;
    for _ in 0..63 {
        let (who, next) = tokio::select! { biased;
            d = a.recv() => (0, d?),
            d = b.recv() => (1, d?),
        };
        let delivery = next.expect("open");
        partitions[who].insert(delivery.partition());
        delivery.ack().await;
    }
    assert!(partitions[0].is_disjoint(&partitions[1]), "{partitions:?}, first {kept:?}");
    memory.all_done().await
}

#[tokio::test(start_paused = true)]
async fn a_program_that_comes_back_finds_its_delays_and_leases() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::default())?;
    let sub = || Subscription::group("orders", "billing").lease(Duration::from_secs(10)).member("m");
    let first = memory.connect();
    let mut consumer = first.subscribe(sub()).await?;
    let orders = first.producer("orders").await?;
    orders.send(Message::new("delayed")).await?;
    orders.send(Message::new("crashed")).await?;
    consumer.recv().await?.expect("open").nack_after(Duration::from_secs(60), "later").await;
    let held = consumer.recv().await?.expect("open");
    assert!(memory.crash("m"));
    drop((held, consumer, orders));
    // The only client goes: nothing of the broker is done until one comes, and then nothing is forgotten.
    first.close(Duration::from_secs(1)).await;
    assert_eq!(memory.tasks(), 0);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let second = memory.connect();
    let mut consumer = second.subscribe(sub()).await?;
    for expected in ["crashed", "delayed"] {
        let delivery = tokio::time::timeout(Duration::from_secs(120), consumer.recv()).await.expect("it comes again");
        let delivery = delivery?.expect("open");
        assert_eq!(delivery.payload_bytes(), expected.as_bytes());
        delivery.ack().await;
    }
    second.close(Duration::from_secs(1)).await;
    assert_eq!(memory.tasks(), 0);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn the_longest_times_are_times_or_refused() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::default())?;
    let client = memory.connect();
    let sub = || Subscription::group("orders", "billing");
    for bad in [
        sub().lease(Duration::MAX),
        sub().max_processing(Duration::MAX),
        sub().retry(RetryPolicy::attempts(3).delays([Duration::MAX])),
        sub().retry(RetryPolicy::attempts(3).transient(Duration::from_secs(1), Duration::MAX)),
    ] {
        let error = client.subscribe(bad).await.err().expect("no clock can be set to that");
        assert!(error.kind() == mq_api::ErrorKind::Config && error.to_string().contains("ten years"), "{error}");
    }
    let mut consumer = client.subscribe(sub().max_processing(mq_api::LONGEST).lease(mq_api::LONGEST)).await?;
    let orders = client.producer("orders").await?;
    orders.send(Message::new("m")).await?;
    let delivery = consumer.recv().await?.expect("open");
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(delivery.is_owned(), "ten years are not over after an hour");
    assert!(delivery.nack_after(Duration::MAX, "never").await.is_ok());
    assert!(orders.send_timeout(Message::new("n"), Duration::MAX).await.is_ok());
    client.close(Duration::MAX).await;
    Ok(())
}
