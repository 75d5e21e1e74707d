//! Members, names, groups that are made again, broadcasts, and what a subscription asks for.

use mq_api::{
    Broker, BrokerExt, Consumer, ConsumerExt, Delivery, Guarantee, HealthState, Message, Ordering, Provisioning,
    Result, Start, Subscription, TopicSpec,
};
use mq_memory::{FaultPlan, MemoryBroker, MemoryConfig};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

const SECOND: Duration = Duration::from_secs(1);

fn memory(faults: Option<FaultPlan>) -> Result<MemoryBroker> {
    let mut config = MemoryConfig::default();
    config.faults = faults;
    MemoryBroker::new(config)
}

async fn recv(c: &mut Box<dyn Consumer>) -> Option<Delivery> {
    timeout(1000 * SECOND, c.recv()).await.ok()?.expect("no error")
}

fn label(d: &Delivery) -> String {
    String::from_utf8_lossy(d.payload_bytes()).into_owned()
}

// 3.7, 6.2: the group is made again by an admin, as `Provisioning::Verify` and its health ask for; the order goes with it.
#[tokio::test(start_paused = true)]
async fn a_group_that_an_admin_made_again_keeps_the_order_that_its_members_asked_for() -> Result<()> {
    for provisioning in [Provisioning::Create, Provisioning::Verify] {
        for faults in [None, Some(FaultPlan::none())] {
            let broker = memory(faults)?.connect();
            let (t, g) = ("t".into(), "g".into());
            let setup = broker.subscribe(Subscription::group("t", "g").ordering(Ordering::PerKey)).await?;
            let sub = Subscription::group("t", "g").ordering(Ordering::PerKey).provisioning(provisioning);
            let mut c = broker.subscribe(sub).await?;
            setup.control().close(SECOND).await;
            drop(setup);
            broker.admin().delete_group(&t, &g).await?;
            broker.admin().create_group(&t, &g, Start::Oldest).await?;
            let p = broker.producer("t").await?;
            p.send(Message::new("1").key("k")).await?;
            p.send(Message::new("2").key("k")).await?;
            let first = recv(&mut c).await.expect("comes");
            assert_eq!(label(&first), "1");
            let second = timeout(5 * SECOND, c.recv()).await;
            assert!(
                second.is_err(),
                "two of one key in hand at once: {:?}; {provisioning:?}, {faults:?}",
                second.map(|d| d.map(|d| d.map(|d| label(&d))))
            );
            first.ack().await;
            assert_eq!(label(&recv(&mut c).await.expect("comes")), "2");
        }
    }
    Ok(())
}

// 3.7
#[tokio::test(start_paused = true)]
async fn a_group_that_another_made_again_without_order_is_no_silent_loss_of_order() -> Result<()> {
    let memory = memory(None)?;
    let (one, two) = (memory.connect(), memory.connect());
    let mut c = one.subscribe(Subscription::group("t", "g").ordering(Ordering::PerKey)).await?;
    one.admin().delete_group(&"t".into(), &"g".into()).await?;
    // Before the first one looked: the name is free, and nobody is there who has another order.
    let other = two.subscribe(Subscription::group("t", "g")).await;
    drop(other);
    sleep(10 * SECOND).await;
    let p = one.producer("t").await?;
    p.send(Message::new("1").key("k")).await?;
    p.send(Message::new("2").key("k")).await?;
    let first = recv(&mut c).await.expect("comes");
    let second = timeout(5 * SECOND, c.recv()).await;
    assert!(second.is_err(), "two of one key in hand at once");
    first.ack().await;
    Ok(())
}

// names: a second member of a name is refused on one connection, also when both come at once.
#[tokio::test(start_paused = true)]
async fn two_members_of_one_name_that_come_at_once_are_one() -> Result<()> {
    for (guarantee, faults) in [
        (Guarantee::AtLeastOnce, None),
        (Guarantee::AtMostOnce, None),
        (Guarantee::AtLeastOnce, Some(FaultPlan::none())),
    ] {
        let broker = memory(faults)?.connect();
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
        let memory = memory(faults)?;
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
    let broker = memory(None)?.connect();
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

// 6.2: the topic is made again with fewer partitions while the connection is away.
#[tokio::test(start_paused = true)]
async fn a_broadcast_consumer_survives_a_topic_made_again_while_it_was_away() -> Result<()> {
    let memory = memory(None)?;
    let (broker, link) = memory.connect_linked();
    let other = memory.connect();
    other.admin().create_topic(TopicSpec::new("t").partitions(4)).await?;
    let mut c = broker.subscribe(Subscription::broadcast("t")).await?;
    link.reachable(false);
    other.admin().delete_topic(&"t".into()).await?;
    other.admin().create_topic(TopicSpec::new("t").partitions(1)).await?;
    link.reachable(true);
    sleep(SECOND).await;
    other.producer("t").await?.send(Message::new("x")).await?;
    let d = timeout(100 * SECOND, c.recv()).await;
    assert!(matches!(d, Ok(Ok(Some(_)))), "deaf: {:?}", c.control().health().current());
    let again = timeout(SECOND, c.recv()).await;
    assert!(again.is_err(), "twice: broadcast is at most once");
    Ok(())
}

// 6.2, 6.1
#[tokio::test(start_paused = true)]
async fn verify_goes_on_when_what_was_deleted_is_there_again() -> Result<()> {
    for (n, (guarantee, faults)) in [
        (Guarantee::AtLeastOnce, None),
        (Guarantee::AtMostOnce, None),
        (Guarantee::AtLeastOnce, Some(FaultPlan::none())),
    ]
    .into_iter()
    .enumerate()
    {
        for topic_too in [false, true] {
            for batch in [false, true] {
                let memory = memory(faults)?;
                let broker = memory.connect();
                let (t, g) = ("t".into(), "g".into());
                let dlq = mq_api::Topic::dead_letters("t", "g");
                broker.admin().create_topic(TopicSpec::new("t").group("g")).await?;
                broker.admin().create_topic(TopicSpec::new(dlq)).await?;
                let sub = Subscription::group("t", "g").provisioning(Provisioning::Verify).guarantee(guarantee);
                let mut c = broker.subscribe(sub).await?;
                if topic_too {
                    broker.admin().delete_topic(&t).await?;
                } else {
                    broker.admin().delete_group(&t, &g).await?;
                }
                let before = timeout(60 * SECOND, c.recv()).await;
                assert!(before.is_err(), "waits: {n} {topic_too} {batch} {before:?}");
                let health = c.control().health().current();
                assert_ne!(health.state, HealthState::Running, "{n} {topic_too} {batch} {health:?}");
                if topic_too {
                    broker.admin().create_topic(TopicSpec::new("t").group("g")).await?;
                } else {
                    broker.admin().create_group(&t, &g, Start::Oldest).await?;
                }
                broker.producer("t").await?.send(Message::new("x")).await?;
                let mut out = mq_api::Deliveries::new();
                let d = if batch {
                    timeout(60 * SECOND, c.recv_batch(10, &mut out)).await.map(|b| b.map(|_| out.pop()))
                } else {
                    timeout(60 * SECOND, c.recv()).await
                };
                let Ok(Ok(Some(d))) = d else {
                    panic!("{n} {topic_too} {batch}: {d:?}, {:?}", c.control().health().current())
                };
                d.ack().await;
                sleep(60 * SECOND).await;
                let health = c.control().health().current();
                assert_eq!(health.state, HealthState::Running, "{n} {topic_too} {batch} {health:?}");
            }
        }
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn limits() -> Result<()> {
    let broker: Arc<dyn Broker> = memory(None)?.connect();
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
        let broker = memory(None)?.connect();
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
    let memory = memory(None)?;
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
    let broker = memory(None)?.connect();
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
        let broker = memory(faults)?.connect();
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

// 6.1: while what it needs is not there it looks again with back-off, however often its recv is begun anew.
#[tokio::test(start_paused = true)]
async fn a_missing_group_leaves_no_timer_behind_for_each_look() -> Result<()> {
    let memory = memory(None)?;
    let broker = memory.connect();
    let (t, g) = ("t".into(), "g".into());
    broker.admin().create_topic(TopicSpec::new("t").group("g")).await?;
    broker.admin().create_topic(TopicSpec::new(mq_api::Topic::dead_letters("t", "g"))).await?;
    let mut c = broker.subscribe(Subscription::group("t", "g").provisioning(Provisioning::Verify)).await?;
    broker.admin().delete_group(&t, &g).await?;
    for _ in 0..10_000 {
        let _ = timeout(Duration::from_millis(1), c.recv()).await;
    }
    broker.admin().create_group(&t, &g, Start::Oldest).await?;
    broker.producer("t").await?.send(Message::new("x")).await?;
    recv(&mut c).await.expect("x").ack().await;
    Ok(())
}

// 3.7: partitions whose members ask for another order than a living one are refused; a member that comes again keeps its order.
#[tokio::test(start_paused = true)]
async fn a_dropped_delivery_of_a_deleted_group_gives_its_room_once() -> Result<()> {
    for faults in [None, Some(FaultPlan::none())] {
        let broker = memory(faults)?.connect();
        let mut c = broker.subscribe(Subscription::group("t", "g").max_in_flight(2)).await?;
        let p = broker.producer("t").await?;
        for n in 0..10 {
            p.send(Message::new(format!("{n}"))).await?;
        }
        let a = recv(&mut c).await.unwrap();
        let b = recv(&mut c).await.unwrap();
        broker.admin().delete_group(&"t".into(), &"g".into()).await?;
        timeout(SECOND, a.lost()).await.expect("it is no longer owned");
        timeout(SECOND, b.lost()).await.expect("it is no longer owned");
        // The bound is on what the program holds; the direct way forgets what it lost at once.
        let a = if faults.is_some() {
            drop(a);
            None
        } else {
            Some(a)
        };
        let x = recv(&mut c).await;
        assert!(x.is_some(), "nothing comes of the group made again; {faults:?}");
        let x = x.unwrap();
        drop(a);
        b.ack().await;
        let y = recv(&mut c).await.unwrap();
        assert!(timeout(SECOND, c.recv()).await.is_err(), "three in hand, bound 2; {faults:?}");
        assert_eq!(c.control().in_flight(), 2);
        x.ack().await;
        y.ack().await;
        if faults.is_none() {
            // The engine has the next ones by now.
            assert_eq!(c.control().in_flight(), 0);
        }
    }
    Ok(())
}

// 6.3, 3.3: what a producer provisioned is made again with the topic.
#[tokio::test(start_paused = true)]
async fn a_producer_makes_its_groups_again_with_the_topic() -> Result<()> {
    for faults in [None, Some(FaultPlan::none())] {
        let mut config = MemoryConfig::from_url("memory://?profile=amqp")?;
        config.faults = faults;
        let broker = MemoryBroker::new(config)?.connect();
        let p = broker.producer(mq_api::ProducerSpec::new("t").group("g")).await?;
        p.send(Message::new("1")).await?;
        broker.admin().delete_topic(&"t".into()).await?;
        let sent = p.send(Message::new("2")).await;
        assert!(sent.is_ok(), "{sent:?}; {faults:?}");
    }
    Ok(())
}

// 7.4: under `None` nothing is made.
#[tokio::test(start_paused = true)]
async fn provisioning_none_makes_no_group() -> Result<()> {
    for faults in [None, Some(FaultPlan::none())] {
        let broker = memory(faults)?.connect();
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
    let broker = memory(None)?.connect();
    let most = broker.capabilities().max_partitions;
    assert!(broker.subscribe(Subscription::group("s", "g").partitions(most + 1)).await.is_err());
    let made = broker.admin().create_topic(TopicSpec::new("t").partitions(most + 1)).await;
    assert!(made.is_err(), "admin made a topic of {} partitions, at most {most} are supported", most + 1);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn no_url_asks_for_more_partitions_than_are_stated() -> Result<()> {
    let broker = memory(None)?.connect();
    let most = broker.capabilities().max_partitions;
    let asked = MemoryConfig::from_url(&format!("memory://?partitions={}", most + 1)).and_then(MemoryBroker::new);
    assert!(asked.is_err(), "a default of {} partitions, at most {most} are supported", most + 1);
    Ok(())
}
