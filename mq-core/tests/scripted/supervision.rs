//! Starting, losing and re-making sessions: what is waited for, what fails at once, what panics.

use crate::handler::take;
use crate::rig::{Rig, millis, secs, sub, until};
use mq_api::{Consumer, ConsumerExt, ErrorKind, HealthState, Message, Producer};
use tokio::time::Instant;

#[tokio::test(start_paused = true)]
async fn a_broker_that_is_down_at_start_is_waited_for_up_to_a_limit() {
    let rig = Rig::new();
    rig.script.fail_attaches(ErrorKind::Unavailable, 5);
    rig.toy.publish("m", 1, 10);
    let began = Instant::now();
    let mut consumer = rig.reader(sub()).await;
    assert!(began.elapsed() > millis(500) && began.elapsed() < secs(10), "{:?}", began.elapsed());
    assert_eq!((take(&mut consumer, 1).await.len(), rig.script.attaches()), (1, 6));

    let rig = Rig::new();
    rig.script.fail_attaches(ErrorKind::Unavailable, 10_000);
    let began = Instant::now();
    let error = rig.try_reader(sub()).await.expect_err("gives up");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!((30..34).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    rig.assert_nothing_left().await;
}

/// What was missed since an earlier session is a gap: an attempt that failed was none.
#[tokio::test(start_paused = true)]
async fn only_a_session_that_ran_makes_the_next_one_another() {
    let rig = Rig::new();
    rig.script.fail_attaches(ErrorKind::Unavailable, 2);
    let consumer = rig.reader(sub()).await;
    let before = rig.script.again();
    assert!(!before.is_empty() && !before.contains(&true), "{before:?}");
    rig.script.cut();
    until(consumer.control().health(), HealthState::Reconnecting).await;
    until(consumer.control().health(), HealthState::Running).await;
    assert_eq!(rig.script.again()[before.len()..], [true]);
}

#[tokio::test(start_paused = true)]
async fn what_no_retry_can_mend_fails_at_once_until_the_first_success() {
    for kind in [ErrorKind::Auth, ErrorKind::Topology, ErrorKind::Tls, ErrorKind::NotFound, ErrorKind::Permission] {
        let rig = Rig::new();
        rig.script.fail_attach(kind);
        let began = Instant::now();
        let error = rig.try_reader(sub()).await.expect_err("refused");
        assert_eq!((error.kind(), began.elapsed().as_secs(), rig.script.attaches()), (kind, 0, 1));
        rig.assert_nothing_left().await;
    }
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    let mut consumer = rig.reader(sub()).await;
    rig.script.fail_attaches(ErrorKind::Auth, 3);
    rig.script.cut();
    until(consumer.control().health(), HealthState::Reconnecting).await;
    assert_eq!(take(&mut consumer, 1).await.len(), 1, "afterwards it is a state, with back-off");
    assert_eq!(consumer.control().health().current().state, HealthState::Running);
}

#[tokio::test(start_paused = true)]
async fn an_attach_that_hangs_is_given_up_and_tried_again() {
    let rig = Rig::new();
    rig.script.set_attach_delay(secs(3600));
    let script = rig.script.clone();
    tokio::spawn(async move {
        tokio::time::sleep(secs(5)).await;
        script.set_attach_delay(secs(0));
    });
    let began = Instant::now();
    let _consumer = rig.reader(sub()).await;
    assert!((10..12).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_start_that_is_cancelled_leaves_nothing() {
    for after in [0, 1, 50, 150, 5000] {
        let rig = Rig::new();
        rig.script.set_attach_delay(millis(100));
        rig.script.fail_attaches(ErrorKind::Unavailable, 3);
        drop(tokio::time::timeout(millis(after), rig.try_reader(sub())).await);
        rig.assert_nothing_left().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_panics_is_a_lost_session_and_one_that_ends_by_itself_is_the_end() {
    let rig = Rig::new();
    rig.toy.publish("m", 2, 10);
    let mut consumer = rig.reader(sub()).await;
    rig.script.end_by(crate::script::Way::Panic);
    rig.script.cut();
    until(consumer.control().health(), HealthState::Reconnecting).await;
    let next = tokio::time::timeout(secs(5), take(&mut consumer, 1)).await.expect("it comes back").remove(0);
    assert_eq!(rig.script.attaches(), 2);
    next.ack().await;
    rig.script.end_by(crate::script::Way::Closed);
    rig.script.cut();
    while let Some(delivery) = consumer.recv().await.unwrap() {
        drop(delivery);
    }
    assert!(consumer.close(secs(1)).await.is_clean());
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn a_fatal_end_is_an_error_once_and_then_the_end() {
    let rig = Rig::new();
    rig.toy.publish("m", 2, 10);
    let mut consumer = rig.reader(sub()).await;
    let held = take(&mut consumer, 1).await;
    rig.script.end_by(crate::script::Way::Fatal);
    rig.script.cut();
    until(consumer.control().health(), HealthState::Failed).await;
    assert_eq!(consumer.recv().await.expect_err("fatal").kind(), ErrorKind::Topology);
    assert!(consumer.recv().await.unwrap().is_none());
    assert_eq!(consumer.control().health().current().state, HealthState::Failed);
    drop(held);
    consumer.close(secs(1)).await;
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_cannot_be_opened_fails_the_start() {
    let rig = Rig::new();
    rig.script.fail_open_tx(ErrorKind::Permission, 1);
    let driver = crate::pusher::Pusher { toy: rig.toy.clone(), script: rig.script.clone(), prefetch: 1 };
    let hooks = std::sync::Arc::new(mq_core::NoHooks);
    let start =
        mq_core::EngineConsumer::start(std::sync::Arc::new(driver), sub(), rig.env.clone(), hooks, rig.policy).await;
    assert_eq!(start.expect_err("refused").kind(), ErrorKind::Permission);
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn a_producer_is_supervised_the_same_way() {
    let rig = Rig::new();
    rig.script.fail_open_tx(ErrorKind::Unavailable, 3);
    let producer = rig.producer("orders").await;
    assert!(producer.send(Message::new("x")).await.is_ok());
    rig.script.fail_open_tx(ErrorKind::Auth, 3);
    rig.script.cut_tx();
    until(producer.health(), HealthState::Reconnecting).await;
    assert!(producer.send(Message::new("y")).await.is_ok());
    assert_eq!(producer.health().current().state, HealthState::Running);
    let report = producer.close(secs(1)).await;
    assert!(report.is_clean());
    rig.assert_nothing_left().await;
}
