//! Crash suspects where the program makes nothing, or may not.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use control::{Rabbit, next, text};
use lapin::options::{BasicPublishOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use mq_api::{BrokerExt, Message, ProducerSpec, Provisioning, RetryPolicy, Subscription};
use mq_testbed::RabbitOptions;
use mq_testbed::proxy::{Direction, Trouble};
use std::time::{Duration, Instant};

fn one_attempt(how: Provisioning) -> Subscription {
    let mut sub = Subscription::group("t", "g");
    sub.retry = RetryPolicy::attempts(2);
    sub.provisioning = how;
    sub
}

/// Makes what a program that makes nothing expects, all but what only the library knows of.
async fn made(rabbit: &Rabbit) {
    let broker = rabbit.connect("").await;
    broker.subscribe(Subscription::group("t", "g")).await.unwrap().control().close(Duration::from_secs(5)).await;
    broker.close(Duration::from_secs(5)).await;
    let (_raw, channel) = rabbit.raw().await;
    channel.queue_delete("t..g..alone".into(), lapin::options::QueueDeleteOptions::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspect_is_found_again_by_members_that_make_nothing() {
    for how in [Provisioning::None, Provisioning::Verify] {
        let rabbit = Rabbit::start(RabbitOptions::default());
        made(&rabbit).await;
        let (mut proxy, far) = rabbit.far().await;
        let near = rabbit.connect("").await;
        let producer = near.producer(ProducerSpec::new("t").provisioning(how)).await.unwrap();
        // One that was there before any suspect was, and is busy meanwhile.
        let mut other = near.subscribe(one_attempt(how).max_in_flight(1)).await.unwrap();
        producer.send(Message::new("plug")).await.unwrap();
        let plug = next(&mut other).await;
        let mut consumer = far.subscribe(one_attempt(how)).await.unwrap();
        producer.send(Message::new("x")).await.unwrap();
        // Twice until it is a suspect, then alone.
        for round in 0..4 {
            let delivery = next(&mut consumer).await;
            assert_eq!(text(&delivery), "x", "{how:?}, round {round}");
            proxy.begin(if round < 3 { Trouble::Cut } else { Trouble::Refuse }).unwrap();
            delivery.lost().await;
        }
        plug.ack().await;
        let delivery = tokio::time::timeout(Duration::from_secs(20), next(&mut other)).await;
        let delivery = delivery.unwrap_or_else(|_| panic!("{how:?}: it is gone with its consumer"));
        assert_eq!(text(&delivery), "x");
        delivery.ack().await;
        near.close(Duration::from_secs(5)).await;
        far.close(Duration::from_secs(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_without_the_right_to_make_queues_gets_what_came_back() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    made(&rabbit).await;
    rabbit.control(&["add_user", "reader", "pw"]);
    rabbit.control(&["set_permissions", "reader", "^$", ".*", ".*"]);
    let broker = mq_amqp::connect(&rabbit.url().replace("guest:guest", "reader:pw")).await.unwrap();
    let producer = broker.producer(ProducerSpec::new("t").provisioning(Provisioning::None)).await.unwrap();
    let mut consumer = broker.subscribe(one_attempt(Provisioning::None)).await.unwrap();
    producer.send(Message::new("x")).await.unwrap();
    for _ in 0..3 {
        let delivery = next(&mut consumer).await;
        rabbit.control(&["close_all_connections", "maintenance"]);
        delivery.lost().await;
    }
    next(&mut consumer).await.ack().await;
    producer.send(Message::new("next")).await.unwrap();
    let delivery = next(&mut consumer).await;
    assert_eq!(text(&delivery), "next");
    delivery.ack().await;
    broker.close(Duration::from_secs(5)).await;
}

/// Puts one there whose consumer died with it alone.
async fn suspect(channel: &lapin::Channel, queue: &str) {
    let mut headers = FieldTable::default();
    headers.insert("x-mq-trials".into(), AMQPValue::LongInt(1));
    let properties = lapin::BasicProperties::default().with_headers(headers);
    channel.basic_publish("".into(), queue.into(), BasicPublishOptions::default(), b"x", properties).await.unwrap();
}

async fn waiting(channel: &lapin::Channel, queue: &str) -> u32 {
    let look = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(queue.into(), look, FieldTable::default()).await.unwrap().message_count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_can_take_nothing_leaves_suspects_to_others() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let (_raw, channel) = rabbit.raw().await;
    for state in ["busy", "paused"] {
        let producer = broker.producer(ProducerSpec::new(state).group("g")).await.unwrap();
        let mut member = broker.subscribe(Subscription::group(state, "g").max_in_flight(1)).await.unwrap();
        producer.send(Message::new("plug")).await.unwrap();
        let mut plug = Some(next(&mut member).await);
        if state == "paused" {
            member.control().pause();
            plug.take().unwrap().ack().await;
        }
        let queue = format!("{state}..g..alone");
        suspect(&channel, &queue).await;
        // It looks every 2 s.
        let began = Instant::now();
        while waiting(&channel, &queue).await == 0 {
            assert!(began.elapsed() < Duration::from_secs(5), "{state}: taken");
        }
        let seen = Instant::now();
        while seen.elapsed() < Duration::from_secs(5) {
            assert_eq!(waiting(&channel, &queue).await, 1, "{state}: taken, and nobody else can have it");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let mut idle = broker.subscribe(Subscription::group(state, "g")).await.unwrap();
        let delivery = tokio::time::timeout(Duration::from_secs(10), next(&mut idle)).await.expect("in time");
        assert_eq!((text(&delivery).as_str(), delivery.attempt()), ("x", 2), "{state}");
        delivery.ack().await;
        drop(plug);
        member.control().close(Duration::from_secs(5)).await;
    }
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspect_whose_channel_ended_is_lost_at_once() {
    let rabbit = Rabbit::start(RabbitOptions::default().consumer_timeout(Duration::from_secs(2)));
    let broker = rabbit.connect("").await;
    let mut member = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    let (_raw, channel) = rabbit.raw().await;
    suspect(&channel, "t..g..alone").await;
    let held = next(&mut member).await;
    // The broker gives it back by its time-out, and another member may have it.
    let began = Instant::now();
    while waiting(&channel, "t..g..alone").await == 0 {
        assert!(began.elapsed() < Duration::from_secs(30), "no time-out");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    tokio::time::timeout(Duration::from_secs(10), held.lost()).await.expect("the token fires");
    assert_eq!(held.ack().await, mq_api::Settled::Stale);
    let again = next(&mut member).await;
    assert_eq!(text(&again), "x");
    again.ack().await;
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_awaited_ack_of_a_suspect_is_told_when_the_broker_has_read_it() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let (mut proxy, far) = rabbit.far().await;
    let mut member = far.subscribe(Subscription::group("t", "g")).await.unwrap();
    let (_raw, channel) = rabbit.raw().await;
    suspect(&channel, "t..g..alone").await;
    let delivery = next(&mut member).await;
    proxy.begin(Trouble::Stall(Direction::ToServer)).unwrap();
    let mut ack = std::pin::pin!(async { delivery.ack().await });
    let early = tokio::time::timeout(Duration::from_secs(1), &mut ack).await;
    assert!(early.is_err(), "{early:?}: nothing has reached the broker");
    proxy.end(Trouble::Stall(Direction::ToServer)).unwrap();
    assert!(ack.await.is_ok());
    assert_eq!(waiting(&channel, "t..g..alone").await, 0);
    far.close(Duration::from_secs(5)).await;
}

/// It is closed when the record of a trial is written, and before the suspect is handed over.
#[tokio::test(flavor = "multi_thread")]
async fn a_suspect_that_is_given_back_while_its_trial_is_recorded_was_not_tried() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let (mut proxy, far) = rabbit.far().await;
    let mut member = far.subscribe(Subscription::group("t", "g")).await.unwrap();
    let (_raw, channel) = rabbit.raw().await;
    let take = async || {
        let mut headers = FieldTable::default();
        headers.insert("x-mq-takes".into(), AMQPValue::LongInt(5));
        let properties = lapin::BasicProperties::default().with_headers(headers);
        channel
            .basic_publish("".into(), "t..g".into(), BasicPublishOptions::default(), b"x", properties)
            .await
            .unwrap();
    };
    // The first makes the channel of the copies.
    take().await;
    next(&mut member).await.ack().await;
    let delay = Trouble::Delay(Direction::ToClient, Duration::from_millis(300));
    proxy.begin(delay).unwrap();
    take().await;
    let control = member.control();
    let recorded = async { while waiting(&channel, "t..g..alone").await == 0 {} };
    tokio::select! { biased;
        () = recorded => {}
        got = next(&mut member) => panic!("{got:?} before its record was confirmed"),
    }
    control.close(Duration::from_secs(5)).await;
    let got = channel.basic_get("t..g..alone".into(), Default::default()).await.unwrap().expect("its record");
    assert!(!got.delivery.redelivered, "whoever finds it takes it for one that killed its consumer");
    assert_eq!(waiting(&channel, "t..g").await, 0, "it is there twice");
    far.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_other_programs_stop_nobody() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("queue_type=classic").await;
    let member = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    member.control().close(Duration::from_secs(5)).await;
    let (_raw, channel) = rabbit.raw().await;
    let mut headers = FieldTable::default();
    for name in ["x-mq-takes", "x-mq-attempt"] {
        headers.insert(name.into(), AMQPValue::LongLongInt(u32::MAX.into()));
    }
    let properties = lapin::BasicProperties::default().with_headers(headers);
    channel.basic_publish("".into(), "t..g".into(), BasicPublishOptions::default(), b"x", properties).await.unwrap();
    let (_other, taker) = rabbit.raw().await;
    let began = Instant::now();
    while taker.basic_get("t..g".into(), Default::default()).await.unwrap().is_none() {
        assert!(began.elapsed() < Duration::from_secs(5));
    }
    taker.close(200, "OK".into()).await.unwrap();
    let mut member = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    let delivery = tokio::time::timeout(Duration::from_secs(20), next(&mut member)).await.expect("it came back");
    assert_eq!((text(&delivery).as_str(), delivery.attempt()), ("x", u32::MAX));
    delivery.ack().await;
    broker.close(Duration::from_secs(5)).await;
}
