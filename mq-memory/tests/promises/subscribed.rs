//! Members, names, broadcasts, and what a subscription asks for.

use crate::scene::{SECOND, broker_with, recv};
use mq_api::{
    Broker, BrokerExt, Consumer, ConsumerExt, Guarantee, Message, Provisioning, Result, Subscription, TopicSpec,
};
use mq_memory::{FaultPlan, MemoryBroker, MemoryConfig};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

// names: a second member of a name is refused on one connection, also when both come at once.
#[tokio::test(start_paused = true)]
async fn two_members_of_one_name_that_come_at_once_are_one() -> Result<()> {
    for (guarantee, faults) in [
        (Guarantee::AtLeastOnce, None),
        (Guarantee::AtMostOnce, None),
        (Guarantee::AtLeastOnce, Some(FaultPlan::none())),
    ] {
        let broker = broker_with(faults)?.connect();
        let sub = || Subscription::group("t", "g").member("anna").guarantee(guarantee);
        let (a, b) = tokio::join!(broker.subscribe(sub()), broker.subscribe(sub()));
        let taken = [a.is_ok(), b.is_ok()].iter().filter(|ok| **ok).count();
        assert_eq!(taken, 1, "{guarantee:?}, {faults:?}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_name_is_free_after_close_crash_and_drop() -> Result<()> {
    for (guarantee, faults) in [
        (Guarantee::AtLeastOnce, None),
        (Guarantee::AtMostOnce, None),
        (Guarantee::AtLeastOnce, Some(FaultPlan::none())),
    ] {
        let memory = broker_with(faults)?;
        let broker = memory.connect();
        let sub = || Subscription::group("t", "g").member("anna").guarantee(guarantee);
        let c = broker.subscribe(sub()).await?;
        c.control().close(SECOND).await;
        drop(c);
        let c = broker.subscribe(sub()).await;
        assert!(c.is_ok(), "after close: {guarantee:?}, {faults:?} {:?}", c.err());
        drop(c);
        sleep(10 * SECOND).await;
        let c = broker.subscribe(sub()).await;
        assert!(c.is_ok(), "after drop: {guarantee:?}, {faults:?} {:?}", c.err());
        let c = c?;
        assert!(memory.crash("anna"));
        sleep(SECOND).await;
        let again = broker.subscribe(sub()).await;
        assert!(again.is_ok(), "after crash: {guarantee:?}, {faults:?} {:?}", again.err());
        drop(c);
    }
    Ok(())
}

// 3.2
#[tokio::test(start_paused = true)]
async fn broadcast_deliveries_in_hand_are_bounded_in_bytes() -> Result<()> {
    let broker = broker_with(None)?.connect();
    let p = broker.producer("t").await?;
    let mut c = broker.subscribe(Subscription::broadcast("t").max_in_flight_bytes(10_000)).await?;
    let mut hand = Vec::new();
    for _ in 0..50 {
        p.send(Message::new(vec![0u8; 4_000])).await?;
        if let Ok(d) = timeout(SECOND, c.recv()).await {
            hand.push(d?.expect("open"));
        }
    }
    let bytes: usize = hand.iter().map(|d| d.payload_bytes().len()).sum();
    assert!(bytes <= 10_000, "{bytes} bytes in hand, bound 10,000");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn limits() -> Result<()> {
    let broker: Arc<dyn Broker> = broker_with(None)?.connect();
    let p = broker.producer("t").await?;
    let mut c = broker
        .subscribe(
            Subscription::group("t", "g")
                .max_in_flight(usize::MAX)
                .max_in_flight_bytes(usize::MAX)
                .max_parked(usize::MAX)
                .max_blocked(usize::MAX),
        )
        .await?;
    p.send(Message::new("x")).await?;
    let d = recv(&mut c).await.expect("x");
    d.nack_after(Duration::MAX, "later").await;
    let h = broker
        .subscribe(Subscription::broadcast("t").max_in_flight(usize::MAX).max_in_flight_bytes(usize::MAX))
        .await?;
    p.send(Message::new("y")).await?;
    recv(&mut c).await.expect("y").ack().await;
    drop(h);
    let mut out = mq_api::Deliveries::new();
    let b = c.recv_batch(usize::MAX, &mut out);
    let _ = timeout(SECOND, b).await;
    c.control().close(Duration::MAX).await;
    let report = broker.close(Duration::MAX).await;
    assert_eq!(report.abandoned, 0, "{report:?}");
    Ok(())
}

// 3.6
#[tokio::test(start_paused = true)]
async fn lag_is_counted_exactly() -> Result<()> {
    for partitions in [1, 8] {
        let broker = broker_with(None)?.connect();
        broker.admin().create_topic(TopicSpec::new("t").partitions(partitions)).await?;
        let mut c = broker.subscribe(Subscription::broadcast("t").max_in_flight(4)).await?;
        let p = broker.producer("t").await?;
        for n in 0..1000 {
            p.send(Message::new(format!("{n}"))).await?;
        }
        let mut events = c.control().events();
        let mut got = 0;
        while let Ok(Ok(Some(d))) = timeout(SECOND, c.recv()).await {
            got += 1;
            d.ack().await;
        }
        let mut lagged = 0;
        while let Ok(Some(e)) = timeout(SECOND, events.next()).await {
            if let mq_api::Event::Lagged(n) = e {
                lagged += n;
            }
        }
        assert_eq!(got + lagged, 1000);
        assert!(got <= 4 * 8, "{got} were held, max_in_flight 4, {partitions} partitions");
    }
    Ok(())
}

// The operator's hand: of two of one name it is the one that lives that dies, not one that was dropped before.
#[tokio::test(start_paused = true)]
async fn a_crash_kills_the_member_that_lives_and_not_one_that_left() -> Result<()> {
    let memory = broker_with(None)?;
    let broker = memory.connect();
    let sub = || Subscription::group("t", "g").member("anna").lease(5 * SECOND);
    drop(broker.subscribe(sub()).await?);
    let mut c = broker.subscribe(sub()).await?;
    broker.producer("t").await?.send(Message::new("x")).await?;
    let held = recv(&mut c).await.expect("x");
    assert!(memory.crash("anna"));
    assert_eq!(held.ack().await, mq_api::Settled::Stale, "its process is dead");
    Ok(())
}

// 3.2, 6.4: a broadcast delivery that is dropped, or outlives its consumer, makes room all the same, and close says so.
#[tokio::test(start_paused = true)]
async fn broadcast_room() -> Result<()> {
    let broker = broker_with(None)?.connect();
    let p = broker.producer("t").await?;
    let mut c = broker.subscribe(Subscription::broadcast("t").max_in_flight(2)).await?;
    for n in 0..2 {
        p.send(Message::new(format!("{n}"))).await?;
    }
    let a = recv(&mut c).await.unwrap();
    let b = recv(&mut c).await.unwrap();
    p.send(Message::new("2")).await?;
    assert!(timeout(SECOND, c.recv()).await.is_err());
    drop(a);
    let d = recv(&mut c).await.unwrap();
    broker.admin().delete_topic(&"t".into()).await?;
    p.send(Message::new("3")).await.ok();
    broker.producer("t").await?.send(Message::new("4")).await?;
    assert!(timeout(SECOND, c.recv()).await.is_err());
    b.nack("no").await;
    d.release().await;
    let e = recv(&mut c).await.unwrap();
    let control = c.control();
    let begun = tokio::time::Instant::now();
    let report = control.close(3 * SECOND).await;
    assert_eq!(begun.elapsed(), 3 * SECOND, "{report:?}");
    e.ack().await;
    assert!(c.recv().await?.is_none());
    Ok(())
}

// 4.1/3.4: nothing is lost by a recv that is dropped at any await, at most once included.
#[tokio::test(start_paused = true)]
async fn a_recv_dropped_after_each_poll_loses_nothing() -> Result<()> {
    for (guarantee, faults) in [
        (Guarantee::AtLeastOnce, None),
        (Guarantee::AtMostOnce, None),
        (Guarantee::AtLeastOnce, Some(FaultPlan::none())),
    ] {
        let broker = broker_with(faults)?.connect();
        let mut c = broker.subscribe(Subscription::group("t", "g").guarantee(guarantee).max_in_flight(3)).await?;
        let p = broker.producer("t").await?;
        let mut got = 0;
        for n in 0..500 {
            p.send(Message::new(format!("{n}"))).await?;
            for _ in 0..4 {
                let mut f = Box::pin(c.recv());
                if let std::task::Poll::Ready(d) = futures_util::poll!(f.as_mut()) {
                    got += 1;
                    d?.unwrap().ack().await;
                }
                drop(f);
                tokio::task::yield_now().await;
            }
        }
        while let Ok(Ok(Some(d))) = timeout(SECOND, c.recv()).await {
            got += 1;
            d.ack().await;
        }
        assert_eq!(got, 500, "{guarantee:?} {faults:?}");
    }
    Ok(())
}

// 7.4: under `None` nothing is made.
#[tokio::test(start_paused = true)]
async fn provisioning_none_makes_no_group() -> Result<()> {
    for faults in [None, Some(FaultPlan::none())] {
        let broker = broker_with(faults)?.connect();
        broker.admin().create_topic(TopicSpec::new("t")).await?;
        let c = broker.subscribe(Subscription::group("t", "slip").provisioning(Provisioning::None)).await;
        let there = broker.admin().groups(&"t".into()).await?.len();
        assert_eq!(there, 0, "a group was made; subscribe said {:?}", c.map(|_| ()));
    }
    Ok(())
}

// 7.3: the bound of partitions holds however a topic is made (u32::MAX here would take all memory).
#[tokio::test(start_paused = true)]
async fn no_topic_has_more_partitions_than_are_stated() -> Result<()> {
    let broker = broker_with(None)?.connect();
    let most = broker.capabilities().max_partitions;
    assert!(broker.subscribe(Subscription::group("s", "g").partitions(most + 1)).await.is_err());
    let made = broker.admin().create_topic(TopicSpec::new("t").partitions(most + 1)).await;
    assert!(made.is_err(), "admin made a topic of {} partitions, at most {most} are supported", most + 1);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn no_url_asks_for_more_partitions_than_are_stated() -> Result<()> {
    let broker = broker_with(None)?.connect();
    let most = broker.capabilities().max_partitions;
    let asked = MemoryConfig::from_url(&format!("memory://?partitions={}", most + 1)).and_then(MemoryBroker::new);
    assert!(asked.is_err(), "a default of {} partitions, at most {most} are supported", most + 1);
    Ok(())
}
