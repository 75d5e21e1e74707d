//! Topics and groups that are deleted and made again under those who use them.

use crate::scene::{SECOND, broker_with, label, recv};
use mq_api::{
    BrokerExt, Consumer, ConsumerExt, HealthState, Message, ProducerSpec, Provisioning, Result, Start, Subscription,
    TopicSpec,
};
use mq_memory::{FaultPlan, MemoryBroker, MemoryConfig, connect};
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
