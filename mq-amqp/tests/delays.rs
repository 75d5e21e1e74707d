//! Delays of group members, on quorum and on classic queues: never early, little late, lost by nobody's death.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use control::eye::{Eye, between};
use control::{Rabbit, next, quiet, text};
use lapin::options::ConfirmSelectOptions;
use lapin::types::FieldTable;
use mq_api::{BrokerExt, Message, ProducerSpec, Provisioning, RetryPolicy, Subscription};
use mq_testbed::RabbitOptions;
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread")]
async fn delays_survive_the_holder_and_the_server() {
    for kind in ["quorum", "classic"] {
        let mut rabbit = Rabbit::start(RabbitOptions::default());
        let holder = rabbit.connect(&format!("queue_type={kind}")).await;
        let producer = holder.producer(ProducerSpec::new("t").group("g")).await.unwrap();
        let mut consumer = holder.subscribe(Subscription::group("t", "g")).await.unwrap();
        producer.send(Message::new("long")).await.unwrap();
        producer.send(Message::new("short")).await.unwrap();
        let began = Instant::now();
        for _ in 0..2 {
            let delivery = next(&mut consumer).await;
            let after = if text(&delivery) == "long" { 40_500 } else { 5_300 };
            assert!(delivery.nack_after(Duration::from_millis(after), "later").await.is_ok());
        }
        // A quorum queue that was just declared is lost by a kill.
        tokio::time::sleep(Duration::from_secs(3)).await;
        holder.close(Duration::from_secs(5)).await;
        tokio::task::block_in_place(|| rabbit.kill_and_restart());
        let broker = rabbit.connect(&format!("queue_type={kind}")).await;
        let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
        // A server that comes back late finds both due, in any order.
        let back = began.elapsed();
        let mut wanted = vec![("short", 5_300), ("long", 40_500)];
        while !wanted.is_empty() {
            let delivery = next(&mut consumer).await;
            let took = began.elapsed();
            let at = wanted.iter().position(|(name, _)| *name == text(&delivery)).expect("each once");
            let (name, least) = wanted.remove(at);
            println!("{kind}: {name} after {took:?}");
            assert_eq!(delivery.attempt(), 2);
            assert!(took >= Duration::from_millis(least), "early: {took:?}");
            let late = Duration::from_millis(least + least / 10).max(back + Duration::from_secs(5));
            assert!(took <= late, "late: {took:?}");
            delivery.ack().await;
        }
        quiet(&mut consumer, Duration::from_secs(1)).await;
        broker.close(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_delay_does_not_wait_behind_a_long_one_and_many_rounds_are_no_cycle() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    for kind in ["quorum", "classic"] {
        let broker = rabbit.connect(&format!("queue_type={kind}")).await;
        let producer = broker.producer(ProducerSpec::new(kind).group("g")).await.unwrap();
        let mut sub = Subscription::group(kind, "g");
        sub.retry = RetryPolicy::attempts(50);
        let mut consumer = broker.subscribe(sub).await.unwrap();
        producer.send(Message::new("long")).await.unwrap();
        let delivery = next(&mut consumer).await;
        delivery.nack_after(Duration::from_secs(60), "later").await;
        producer.send(Message::new("short")).await.unwrap();
        for round in 1..=8u32 {
            let delivery = next(&mut consumer).await;
            assert_eq!((text(&delivery).as_str(), delivery.attempt()), ("short", round));
            let began = Instant::now();
            delivery.nack_after(Duration::from_millis(1_100), "again").await;
            let next = next(&mut consumer).await;
            let took = began.elapsed();
            assert!((1_100..2_200).contains(&(took.as_millis() as u64)), "{kind} round {round}: {took:?}");
            next.release().await;
        }
        next(&mut consumer).await.ack().await;
        quiet(&mut consumer, Duration::from_secs(1)).await;
        broker.close(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_without_the_right_to_make_queues_delays_by_those_that_are_there() {
    const DELAY: Duration = Duration::from_millis(2_300);
    let rabbit = Rabbit::start(RabbitOptions::default());
    rabbit.control(&["add_user", "reader", "pw"]);
    rabbit.control(&["set_permissions", "reader", "^$", ".*", ".*"]);
    for kind in ["quorum", "classic"] {
        let url = format!("{}?queue_type={kind}", rabbit.url());
        for (url, how) in
            [(url.clone(), Provisioning::Create), (url.replace("guest:guest", "reader:pw"), Provisioning::None)]
        {
            let broker = mq_amqp::connect(&url).await.unwrap();
            let mut consumer = broker.subscribe(Subscription::group(kind, "g").provisioning(how)).await.unwrap();
            let producer = broker.producer(ProducerSpec::new(kind).provisioning(how)).await.unwrap();
            producer.send(Message::new("x")).await.unwrap();
            let began = Instant::now();
            assert!(next(&mut consumer).await.nack_after(DELAY, "later").await.is_ok());
            let delivery = next(&mut consumer).await;
            let took = began.elapsed();
            println!("{kind}, {how:?}: {took:?}");
            assert!(delivery.attempt() == 2 && took >= DELAY && took < DELAY * 3, "{kind}, {how:?}: {took:?}");
            delivery.ack().await;
            broker.close(Duration::from_secs(5)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_delayed_any_more_holds_up_no_others() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let (_raw, channel) = rabbit.raw().await;
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    for kind in ["quorum", "classic"] {
        let (steps, rung) = (format!("{kind}..g..steps"), format!("{kind}..g..step..5000"));
        // Somebody else's, with other arguments.
        channel.queue_declare(rung.as_str().into(), Default::default(), FieldTable::default()).await.unwrap();
        let broker = rabbit.connect(&format!("queue_type={kind}")).await;
        let mut member = broker.subscribe(Subscription::group(kind, "g")).await.unwrap();
        Eye::of(&rabbit).await.becomes(&steps, Some(0), Duration::from_secs(15)).await;
        for (body, after) in [("stuck", 29_000), ("due", 0), ("soon", 1_500), ("stuck too", 28_000), ("last", 0)] {
            between(&channel, &steps, body, Duration::from_millis(after)).await;
        }
        let began = Instant::now();
        let mut seen = Vec::new();
        for _ in 0..3 {
            let delivery = next(&mut member).await;
            seen.push(text(&delivery));
            delivery.ack().await;
        }
        seen.sort();
        assert_eq!(seen, ["due", "last", "soon"], "{kind}");
        assert!(began.elapsed() < Duration::from_secs(15), "{kind}: after {:?}", began.elapsed());
        // Nothing hides what is wrong.
        let health = || format!("{:?}", member.control().health().current());
        while !health().contains(&rung) {
            assert!(began.elapsed() < Duration::from_secs(20), "{kind}: {}", health());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        channel.queue_delete(rung.as_str().into(), Default::default()).await.unwrap();
        for _ in 0..2 {
            let delivery = next(&mut member).await;
            assert!(text(&delivery).starts_with("stuck"), "{kind}");
            delivery.ack().await;
        }
        quiet(&mut member, Duration::from_millis(500)).await;
        broker.close(Duration::from_secs(5)).await;
    }
}
