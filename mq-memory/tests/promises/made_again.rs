//! Topics and groups that are deleted and made again under those who use them.

use crate::scene::{SECOND, broker_with, label, recv};
use mq_api::{
    BrokerExt, Consumer, ConsumerExt, Guarantee, HealthState, Message, Ordering, ProducerSpec, Provisioning, Result,
    Start, Subscription, TopicSpec,
};
use mq_memory::{FaultPlan, MemoryBroker, MemoryConfig, connect};
use std::time::Duration;
use tokio::time::{sleep, timeout};

// 6.2
#[tokio::test(start_paused = true)]
async fn a_broadcast_consumer_hears_a_topic_that_was_made_again() -> Result<()> {
    let broker = connect("memory://b2").await?;
    let p = broker.producer("t").await?;
    let mut c = broker.subscribe(Subscription::broadcast("t")).await?;
    p.send(Message::new("a")).await?;
    assert_eq!(label(&recv(&mut c).await.expect("a")), "a");
    broker.admin().delete_topic(&"t".into()).await?;
    sleep(SECOND).await;
    p.send(Message::new("b")).await?;
    sleep(SECOND).await;
    p.send(Message::new("c")).await?;
    assert!(recv(&mut c).await.is_some(), "deaf for ever; health {:?}", c.control().health().current());
    Ok(())
}

// 4.5, behind the engine's seam
#[tokio::test(start_paused = true)]
async fn a_stale_handle_of_a_deleted_topic_settles_nothing_of_the_new_one() -> Result<()> {
    for faults in [None, Some(FaultPlan::none())] {
        let memory = broker_with(faults)?;
        let broker = memory.connect();
        let p = broker.producer("t").await?;
        let mut c = broker.subscribe(Subscription::group("t", "g")).await?;
        p.send(Message::new("old")).await?;
        let old = recv(&mut c).await.expect("old");
        broker.admin().delete_topic(&"t".into()).await?;
        p.send(Message::new("new")).await?;
        let new = recv(&mut c).await.expect("new");
        assert_eq!(label(&new), "new");
        let settled = old.ack().await;
        assert!(new.is_owned());
        new.release().await;
        let again = timeout(1000 * SECOND, c.recv()).await;
        assert!(
            again.is_ok(),
            "the message of the new topic is lost: the old one's ack ({settled:?}) took it; {faults:?}"
        );
    }
    Ok(())
}

// 6.2
#[tokio::test(start_paused = true)]
async fn health_is_well_again_when_the_group_is_there_again() -> Result<()> {
    let broker = connect("memory://b8").await?;
    let (t, g) = ("t".into(), "g".into());
    broker.admin().create_topic(TopicSpec::new("t").group("g").group("x")).await?;
    let p = broker.producer("t").await?;
    let sub = Subscription::group("t", "g").provisioning(Provisioning::None);
    let mut c = broker.subscribe(sub).await?;
    broker.admin().delete_group(&t, &g).await?;
    // After the first success it is a state of health.
    assert!(timeout(SECOND, c.recv()).await.is_err());
    assert_eq!(c.control().health().current().state, HealthState::Degraded);
    broker.admin().create_group(&t, &g, Start::Oldest).await?;
    p.send(Message::new("x")).await?;
    recv(&mut c).await.expect("comes").ack().await;
    sleep(60 * SECOND).await;
    let health = c.control().health().current();
    assert_eq!(health.state, HealthState::Running, "{health:?}");
    Ok(())
}

// 10.3
#[tokio::test(start_paused = true)]
async fn all_done_notices_that_the_work_was_deleted() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::recording())?;
    let broker = memory.connect();
    let (t, g) = ("t".into(), "g".into());
    broker.admin().create_topic(TopicSpec::new("t").group("g")).await?;
    broker.producer("t").await?.send(Message::new("x")).await?;
    let m = memory.clone();
    let waits = tokio::spawn(async move { m.all_done().await });
    sleep(SECOND).await;
    broker.admin().delete_group(&t, &g).await?;
    assert_eq!(memory.open_work(), 0);
    assert!(timeout(1000 * SECOND, waits).await.is_ok(), "waits for ever for nothing");
    Ok(())
}

// 2.3
#[tokio::test(start_paused = true)]
async fn a_send_to_a_topic_that_is_gone_says_that_it_was_not_sent() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::default())?;
    let broker = memory.connect();
    broker.admin().create_topic(TopicSpec::new("t")).await?;
    let p = broker.open_producer(ProducerSpec::new("t").provisioning(Provisioning::Verify)).await?;
    broker.admin().delete_topic(&"t".into()).await?;
    let error = p.send(Message::new("x")).await.expect_err("gone");
    assert!(error.outcome().is_some(), "{error:?}");
    Ok(())
}

// 3.7, 6.2: the group is made again by an admin, as `Provisioning::Verify` and its health ask for; the order goes with it.
#[tokio::test(start_paused = true)]
async fn a_group_that_an_admin_made_again_keeps_the_order_that_its_members_asked_for() -> Result<()> {
    for provisioning in [Provisioning::Create, Provisioning::Verify] {
        for faults in [None, Some(FaultPlan::none())] {
            let broker = broker_with(faults)?.connect();
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
    let memory = broker_with(None)?;
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

// 6.2: the topic is made again with fewer partitions while the connection is away.
#[tokio::test(start_paused = true)]
async fn a_broadcast_consumer_survives_a_topic_made_again_while_it_was_away() -> Result<()> {
    let memory = broker_with(None)?;
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
                let memory = broker_with(faults)?;
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

// 6.1: while what it needs is not there it looks again with back-off, however often its recv is begun anew.
#[tokio::test(start_paused = true)]
async fn a_missing_group_leaves_no_timer_behind_for_each_look() -> Result<()> {
    let memory = broker_with(None)?;
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
        let broker = broker_with(faults)?.connect();
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
