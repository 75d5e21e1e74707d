//! Dead letters: looked at, sent back, discarded.

use crate::scene::{SECOND, broker_with, label, recv, three_letters};
use mq_api::{
    BrokerExt, Consumer, ConsumerExt, Count, ErrorKind, HealthState, Message, OnDeadLetter, Ordering, RedriveOptions,
    Result, Start, Subscription, Topic, TopicSpec,
};
use mq_memory::{FaultPlan, MemoryBroker, MemoryConfig, connect};
use tokio::time::sleep;

// 5.3, 8.1
#[tokio::test(start_paused = true)]
async fn dead_letters_in_every_partition_are_listed_and_redriven() -> Result<()> {
    let broker = connect("memory://b5").await?;
    let dlq = Topic::dead_letters("t", "g");
    broker.admin().create_topic(TopicSpec::new(dlq.clone()).partitions(3)).await?;
    let p = broker.producer("t").await?;
    let mut c = broker.subscribe(Subscription::group("t", "g")).await?;
    for n in 0..9 {
        p.send(Message::new("x").key(format!("k{n}"))).await?;
        recv(&mut c).await.expect("comes").dead_letter("bad").await;
    }
    let (t, g) = ("t".into(), "g".into());
    assert_eq!(broker.admin().backlog(&t, &g).await?.dead, Count::Exact(9));
    assert_eq!(broker.admin().dead_letters(&t, &g, 99).await?.len(), 9);
    assert_eq!(broker.admin().redrive(&t, &g, RedriveOptions::default()).await?.redriven, 9);
    Ok(())
}

// 8.1
#[tokio::test(start_paused = true)]
async fn what_was_discarded_is_not_ready_for_a_group_of_the_dead_letters() -> Result<()> {
    let broker = connect("memory://b6").await?;
    let _c = three_letters(&broker).await?;
    let dlq = Topic::dead_letters("t", "g");
    broker.admin().create_group(&dlq, &"audit".into(), Start::Oldest).await?;
    let one = RedriveOptions::default().filter(|m, _| m.payload_bytes() == b"1");
    assert_eq!(broker.admin().discard_dead_letters(&"t".into(), &"g".into(), one).await?, 1);
    assert_eq!(broker.admin().topic(&dlq).await?.expect("there").messages, Some(2));
    assert_eq!(broker.admin().backlog(&dlq, &"audit".into()).await?.ready, Count::Exact(2));
    Ok(())
}

// 5.2
#[tokio::test(start_paused = true)]
async fn health_stays_degraded_while_dead_letters_cannot_be_written() -> Result<()> {
    for order in [Ordering::None, Ordering::PerKey] {
        let memory = MemoryBroker::new(MemoryConfig::default())?;
        let broker = memory.connect();
        let p = broker.producer("t").await?;
        let mut c = broker.subscribe(Subscription::group("t", "g").ordering(order)).await?;
        memory.refuse_writes(&Topic::dead_letters("t", "g"), true);
        p.send(Message::new("bad").key("a")).await?;
        recv(&mut c).await.expect("bad").dead_letter("bad").await;
        assert_eq!(c.control().health().current().state, HealthState::Degraded);
        p.send(Message::new("good").key("b")).await?;
        recv(&mut c).await.expect("good").ack().await;
        assert_eq!(c.control().health().current().state, HealthState::Degraded, "{order:?}");
    }
    Ok(())
}

// OnDeadLetter::ParkKey: "until this member restarts"
#[tokio::test(start_paused = true)]
async fn a_parked_key_goes_on_when_the_member_restarts() -> Result<()> {
    for faults in [None, Some(FaultPlan::none())] {
        let memory = broker_with(faults)?;
        let broker = memory.connect();
        let p = broker.producer("t").await?;
        let sub = || {
            Subscription::group("t", "g").ordering(Ordering::PerKey).on_dead_letter(OnDeadLetter::ParkKey).member("m")
        };
        let mut c = broker.subscribe(sub()).await?;
        p.send(Message::new("1").key("k")).await?;
        recv(&mut c).await.expect("1").dead_letter("bad").await;
        c.control().close(SECOND).await;
        let mut c = broker.subscribe(sub()).await?;
        p.send(Message::new("2").key("k")).await?;
        assert!(recv(&mut c).await.is_some(), "parked for ever; {faults:?}");
    }
    Ok(())
}

// "Under PerKey": what would mean nothing is refused, not ignored.
#[tokio::test(start_paused = true)]
async fn keys_are_parked_under_per_key_only() -> Result<()> {
    for faults in [Some(FaultPlan::none()), None] {
        let memory = broker_with(faults)?;
        let sub = Subscription::group("t", "g").on_dead_letter(OnDeadLetter::ParkKey);
        let refused = memory.connect().subscribe(sub).await.err().expect("no order of keys");
        assert_eq!(refused.kind(), ErrorKind::Config, "{refused}");
    }
    Ok(())
}

// 5.3
#[tokio::test(start_paused = true)]
async fn what_was_discarded_during_a_redrive_stays_discarded() -> Result<()> {
    let broker = connect("memory://b20").await?;
    let mut c = three_letters(&broker).await?;
    let b = broker.clone();
    let redrive =
        tokio::spawn(
            async move { b.admin().redrive(&"t".into(), &"g".into(), RedriveOptions::default().rate(1)).await },
        );
    sleep(SECOND / 2).await;
    assert_eq!(broker.admin().discard_dead_letters(&"t".into(), &"g".into(), RedriveOptions::default()).await?, 2);
    redrive.await.expect("no panic")?;
    let mut came = Vec::new();
    while let Some(d) = recv(&mut c).await {
        came.push(label(&d));
        d.ack().await;
    }
    assert_eq!(came, ["0"], "what was dropped for good came back");
    Ok(())
}

// 5.3: the loop guard
#[tokio::test(start_paused = true)]
async fn one_redrive_sends_each_letter_back_once() -> Result<()> {
    let broker = connect("memory://d1").await?;
    broker.producer("t").await?.send(Message::new("bad")).await?;
    let mut c = broker.subscribe(Subscription::group("t", "g")).await?;
    tokio::spawn(async move {
        while let Ok(Some(d)) = c.recv().await {
            d.dead_letter("still bad").await;
        }
    });
    sleep(SECOND).await;
    let report = broker.admin().redrive(&"t".into(), &"g".into(), RedriveOptions::default().rate(1)).await?;
    assert_eq!(report.redriven, 1, "{report:?}");
    Ok(())
}

// 5.3: "losing nothing when stopped midway"
#[tokio::test(start_paused = true)]
async fn a_redrive_loses_nothing_when_its_group_or_topic_is_made_again_midway() -> Result<()> {
    for topic in [false, true] {
        let broker = connect(&format!("memory://redrive-{topic}")).await?;
        let mut c = three_letters(&broker).await?;
        let (b, admin) = (broker.clone(), broker.admin());
        let options = || RedriveOptions::default().rate(1);
        let redrive = tokio::spawn(async move { b.admin().redrive(&"t".into(), &"g".into(), options()).await });
        let first = recv(&mut c).await.expect("the first comes back");
        let mut came = vec![label(&first)];
        first.ack().await;
        match topic {
            true => assert!(admin.delete_topic(&"t".into()).await?),
            false => assert!(admin.delete_group(&"t".into(), &"g".into()).await?),
        }
        while let Some(d) = recv(&mut c).await {
            came.push(label(&d));
            d.ack().await;
        }
        let report = redrive.await.expect("no panic");
        let left = admin.dead_letters(&"t".into(), &"g".into(), 10).await?;
        came.extend(left.iter().map(|letter| String::from_utf8_lossy(letter.message.payload_bytes()).into_owned()));
        came.sort();
        assert_eq!(came, ["0", "1", "2"], "came back, or still among the dead letters; {report:?}; a topic: {topic}");
    }
    Ok(())
}
