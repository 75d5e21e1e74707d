//! Delays that take several steps: what is not due is never in the group's queue on the way, so nothing waits behind its
//! backlog and no look counts it as ready.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use control::eye::{Eye, between};
use control::{Rabbit, next, quiet, text};
use lapin::options::ConfirmSelectOptions;
use mq_api::{Broker, BrokerExt, Consumer, Count, Message, ProducerSpec, Provisioning, RetryPolicy, Subscription};
use mq_testbed::RabbitOptions;
use mq_testbed::proxy::{Direction, Trouble};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const KINDS: [&str; 2] = ["quorum", "classic"];
/// What its holder waits for, in the group's queue or in hand.
const LAST: Duration = Duration::from_secs(1);

const SLACK: Duration = Duration::from_secs(4);

/// Whether it came at its time.
fn judge(what: &str, took: Duration, delay: Duration) {
    println!("{what}: {took:?} for {delay:?}");
    assert!(took >= delay, "{what}: early, {took:?}");
    // What is promised, and what a machine that runs other servers' tests beside this may add.
    assert!(took <= delay + (delay / 10).max(Duration::from_secs(1)) + SLACK, "{what}: late, {took:?}");
}

/// Hands one message to the member, which wants it again after that time; the time counts from what is returned.
async fn delayed(broker: &Arc<dyn Broker>, member: &mut Box<dyn Consumer>, topic: &str, delay: Duration) -> Instant {
    let producer = broker.producer(ProducerSpec::new(topic).group("g")).await.unwrap();
    producer.send(Message::new("late").header("amqp.priority", "3").header("h", "v")).await.unwrap();
    let delivery = next(member).await;
    assert_eq!(text(&delivery), "late");
    let began = Instant::now();
    assert!(delivery.nack_after(delay, "later").await.is_ok());
    began
}

async fn comes(member: &mut Box<dyn Consumer>, what: &str, began: Instant, delay: Duration) {
    let delivery = next(member).await;
    judge(what, began.elapsed(), delay);
    assert_eq!((text(&delivery).as_str(), delivery.attempt()), ("late", 2), "{what}");
    let headers = &delivery.message().headers;
    assert_eq!((headers.get_str("amqp.priority"), headers.get_str("h")), (Some("3"), Some("v")), "{what}");
    assert!(delivery.ack().await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_due_is_never_ready_though_no_member_has_room() {
    const DELAY: Duration = Duration::from_secs(10);
    let rabbit = Rabbit::start(RabbitOptions::default());
    let one = async |kind: &str| {
        let broker = rabbit.connect(&format!("queue_type={kind}")).await;
        let mut member = broker.subscribe(Subscription::group(kind, "g").max_in_flight(1)).await.unwrap();
        let began = delayed(&broker, &mut member, kind, DELAY).await;
        let producer = broker.producer(kind).await.unwrap();
        producer.send(Message::new("plug")).await.unwrap();
        let plug = next(&mut member).await;
        let (topic, group) = (kind.into(), "g".into());
        let mut looks = 0;
        // A look costs channels of its client, which has not many in a few seconds.
        let other = rabbit.connect("").await;
        let mut tick = tokio::time::interval(Duration::from_millis(100));
        loop {
            tick.tick().await;
            let backlog = other.admin().backlog(&topic, &group).await.unwrap();
            let at = began.elapsed();
            looks += 1;
            if at < DELAY - LAST {
                assert!(backlog.ready.admits(0), "{kind}, look {looks} after {at:?}: {backlog:?}");
            }
            assert!(backlog.ready.admits(1) || at < DELAY, "{kind}, look {looks} after {at:?}: {backlog:?}");
            if backlog.ready == Count::AtLeast(1) && at >= DELAY {
                judge(&format!("{kind} counted, {looks} looks"), at, DELAY);
                break;
            }
            assert!(at < DELAY * 2, "{kind}: it is nowhere: {backlog:?}");
        }
        let free = Instant::now();
        plug.ack().await;
        let delivery = next(&mut member).await;
        assert!(free.elapsed() < Duration::from_secs(5), "{kind}: {:?}", free.elapsed());
        assert_eq!((text(&delivery).as_str(), delivery.attempt()), ("late", 2), "{kind}");
        assert!(delivery.ack().await.is_ok());
        Eye::of(&rabbit).await.nothing_left(&format!("{kind}..g")).await;
        other.close(Duration::from_secs(5)).await;
        broker.close(Duration::from_secs(5)).await;
    };
    tokio::join!(one(KINDS[0]), one(KINDS[1]));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_later_goes_on_with_what_another_one_delayed() {
    const DELAY: Duration = Duration::from_secs(8);
    let rabbit = Rabbit::start(RabbitOptions::default());
    let one = async |kind: &str| {
        let (eye, queue) = (Eye::of(&rabbit).await, format!("{kind}..g"));
        let first = rabbit.connect(&format!("queue_type={kind}")).await;
        let mut member = first.subscribe(Subscription::group(kind, "g")).await.unwrap();
        let began = delayed(&first, &mut member, kind, DELAY).await;
        eye.becomes(&format!("{queue}..step..5000"), Some(1), Duration::from_secs(15)).await;
        first.close(Duration::from_secs(5)).await;
        let second = rabbit.connect(&format!("queue_type={kind}")).await;
        let (topic, group) = (kind.into(), "g".into());
        let backlog = second.admin().backlog(&topic, &group).await.unwrap();
        assert!(backlog.ready.admits(0) && backlog.delayed == Count::AtLeast(1), "{kind}, delayed: {backlog:?}");
        eye.becomes(&format!("{queue}..steps"), Some(1), Duration::from_secs(8)).await;
        // Nobody passes it on: what is there may be due, or not.
        let backlog = second.admin().backlog(&topic, &group).await.unwrap();
        assert_eq!((backlog.ready, backlog.delayed), (Count::AtMost(1), Count::AtLeast(0)), "{kind}, between");
        tokio::time::sleep_until((began + Duration::from_secs(6)).into()).await;
        let mut member = second.subscribe(Subscription::group(kind, "g")).await.unwrap();
        comes(&mut member, &format!("{kind}, another member"), began, DELAY).await;
        // It is due when somebody comes.
        let began = delayed(&second, &mut member, kind, DELAY).await;
        eye.becomes(&format!("{queue}..step..5000"), Some(1), Duration::from_secs(15)).await;
        second.close(Duration::from_secs(5)).await;
        let third = rabbit.connect(&format!("queue_type={kind}")).await;
        tokio::time::sleep_until((began + DELAY).into()).await;
        let backlog = third.admin().backlog(&topic, &group).await.unwrap();
        assert!(backlog.ready.admits(1) && backlog.delayed.admits(0), "{kind}, due: {backlog:?}");
        let mut member = third.subscribe(Subscription::group(kind, "g")).await.unwrap();
        comes(&mut member, &format!("{kind}, nobody there"), began, DELAY).await;
        eye.nothing_left(&queue).await;
        third.close(Duration::from_secs(5)).await;
    };
    tokio::join!(one(KINDS[0]), one(KINDS[1]));
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_do_not_wait_behind_a_backlog_and_not_for_a_pause() {
    const DELAY: Duration = Duration::from_secs(12);
    const BACKLOG: u32 = 1_000;
    let rabbit = Rabbit::start(RabbitOptions::default());
    let one = async |kind: &str, pause: bool| {
        let (eye, topic) = (Eye::of(&rabbit).await, format!("{kind}-{pause}"));
        let (queue, what) = (format!("{topic}..g"), format!("{kind}, paused: {pause}"));
        let broker = rabbit.connect(&format!("queue_type={kind}")).await;
        let mut member = broker.subscribe(Subscription::group(&topic, "g").max_in_flight(1)).await.unwrap();
        let began = delayed(&broker, &mut member, &topic, DELAY).await;
        let producer = broker.producer(topic.as_str()).await.unwrap();
        let sends: Vec<_> = (0..=BACKLOG).map(|n| producer.send(Message::new(n.to_string()))).collect();
        for send in sends {
            send.await.unwrap();
        }
        let mut plug = Some(next(&mut member).await);
        if pause {
            // The broker sends one ahead then, which stays in the member's buffer.
            member.control().pause();
            plug.take().unwrap().ack().await;
        }
        let rest = BACKLOG - u32::from(pause);
        eye.becomes(&queue, Some(rest), Duration::from_secs(3)).await;
        let mut tick = tokio::time::interval(Duration::from_millis(50));
        loop {
            tick.tick().await;
            let waiting = eye.waiting(&queue).await;
            let at = began.elapsed();
            assert!(at > DELAY - LAST || waiting == Some(rest), "{what}: {waiting:?} after {at:?}");
            if waiting == Some(rest + 1) && at >= DELAY {
                judge(&format!("{what}, in the queue"), at, DELAY);
                break;
            }
            assert!(at < DELAY * 2, "{what}: it is nowhere");
        }
        drop(plug.map(|plug| plug.ack()));
        member.control().resume();
        let mut seen = BTreeMap::new();
        for _ in 0..=BACKLOG {
            let delivery = next(&mut member).await;
            let attempt = delivery.attempt();
            *seen.entry(text(&delivery)).or_insert(0) += 1;
            assert_eq!(attempt, if text(&delivery) == "late" { 2 } else { 1 }, "{what}: {}", text(&delivery));
            delivery.ack().await;
        }
        assert!(seen.contains_key("late") && seen.values().all(|n| *n == 1), "{what}: {seen:?}");
        quiet(&mut member, Duration::from_secs(1)).await;
        eye.nothing_left(&queue).await;
        broker.close(Duration::from_secs(5)).await;
    };
    tokio::join!(one(KINDS[0], false), one(KINDS[1], false), one(KINDS[0], true), one(KINDS[1], true));
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_of_steps_that_were_deleted_are_made_again() {
    const DELAY: Duration = Duration::from_secs(10);
    let rabbit = Rabbit::start(RabbitOptions::default());
    let one = async |kind: &str, how: Provisioning| {
        let (eye, topic) = (Eye::of(&rabbit).await, format!("{kind}-{how:?}"));
        let queue = format!("{topic}..g");
        let (steps, rung) = (format!("{queue}..steps"), format!("{queue}..step..5000"));
        let broker = rabbit.connect(&format!("queue_type={kind}")).await;
        broker.subscribe(Subscription::group(&topic, "g")).await.unwrap().control().close(DELAY).await;
        eye.delete(&steps).await;
        let sub = Subscription::group(&topic, "g").provisioning(how);
        let mut member = broker.subscribe(sub).await.unwrap();
        eye.becomes(&steps, Some(0), Duration::from_secs(2)).await;
        let began = delayed(&broker, &mut member, &topic, DELAY).await;
        eye.becomes(&rung, Some(1), Duration::from_secs(15)).await;
        eye.delete(&steps).await;
        eye.becomes(&steps, Some(0), Duration::from_secs(15)).await;
        comes(&mut member, &format!("{topic}, without the step queue"), began, DELAY).await;
        eye.nothing_left(&queue).await;
        for step in ["..step..5000", "..step..1000", "..retry..1000"] {
            eye.delete(&format!("{queue}{step}")).await;
        }
        let began = delayed(&broker, &mut member, &topic, DELAY).await;
        comes(&mut member, &format!("{topic}, without delay queues"), began, DELAY).await;
        eye.nothing_left(&queue).await;
        let admin = broker.admin();
        member.control().close(Duration::from_secs(5)).await;
        assert!(admin.delete_group(&topic.as_str().into(), &"g".into()).await.unwrap());
        for name in [&queue, &steps, &rung] {
            assert_eq!(eye.waiting(name).await, None, "{name}");
        }
        broker.close(Duration::from_secs(5)).await;
    };
    tokio::join!(
        one(KINDS[0], Provisioning::Create),
        one(KINDS[1], Provisioning::Create),
        one(KINDS[0], Provisioning::Verify),
        one(KINDS[1], Provisioning::None),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_is_closed_while_it_passes_one_on_neither_keeps_nor_doubles_it() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let (eye, (_raw, channel)) = (Eye::of(&rabbit).await, rabbit.raw().await);
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    // Closed before it has written the copy, and while the copy is not confirmed.
    for warm in [false, true] {
        let (mut proxy, far) = rabbit.far().await;
        let topic = format!("warm-{warm}");
        let [steps, rung] = [format!("{topic}..g..steps"), format!("{topic}..g..step..5000")];
        let member = far.subscribe(Subscription::group(&topic, "g")).await.unwrap();
        eye.becomes(&steps, Some(0), Duration::from_secs(15)).await;
        let mut all = 1;
        if warm {
            between(&channel, &steps, "x", Duration::from_secs(25)).await;
            eye.becomes(&rung, Some(1), Duration::from_secs(15)).await;
            all = 2;
        }
        proxy.begin(Trouble::Delay(Direction::ToClient, Duration::from_millis(300))).unwrap();
        between(&channel, &steps, "x", Duration::from_secs(25)).await;
        let began = Instant::now();
        while eye.waiting(&steps).await == Some(1) {
            assert!(began.elapsed() < Duration::from_secs(30), "warm {warm}: not taken");
        }
        let began = Instant::now();
        member.control().close(Duration::from_secs(5)).await;
        assert!(began.elapsed() < Duration::from_secs(4), "warm {warm}: closing took {:?}", began.elapsed());
        let [steps, rung] = [eye.waiting(&steps).await, eye.waiting(&rung).await];
        println!("warm {warm}: {steps:?} in the step queue, {rung:?} in the delay queue");
        assert_eq!(steps.unwrap_or(0) + rung.unwrap_or(0), all, "warm {warm}: {steps:?}, {rung:?}");
        proxy.end(Trouble::Delay(Direction::ToClient, Duration::from_millis(300))).unwrap();
        far.close(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_with_many_delays_come_once_each_and_leave_nothing() {
    const ALL: usize = 400;
    let rabbit = Rabbit::start(RabbitOptions::default());
    let one = async |kind: &str| {
        let eye = Eye::of(&rabbit).await;
        let (broker, other) =
            (rabbit.connect(&format!("queue_type={kind}")).await, rabbit.connect(&format!("queue_type={kind}")).await);
        let producer = broker.producer(ProducerSpec::new(kind).group("g")).await.unwrap();
        let mut sub = Subscription::group(kind, "g");
        sub.retry = RetryPolicy::attempts(4);
        let mut members = [broker.subscribe(sub.clone()).await.unwrap(), other.subscribe(sub).await.unwrap()];
        let sends: Vec<_> = (0..ALL).map(|n| producer.send(Message::new(n.to_string()))).collect();
        for send in sends {
            send.await.unwrap();
        }
        let [one, two] = &mut members;
        // Number, and when it is due; in whichever order they come.
        let mut due: BTreeMap<String, (Instant, u32)> = BTreeMap::new();
        let mut acked: BTreeMap<String, usize> = BTreeMap::new();
        let mut latest = Duration::ZERO;
        while acked.len() < ALL {
            let delivery = tokio::select! {
                got = next(one) => got,
                got = next(two) => got,
            };
            let name = text(&delivery);
            let delay = Duration::from_millis(2_200 + name.parse::<u64>().unwrap() * 20);
            match due.get(&name) {
                Some((at, 2)) => {
                    let early = at.saturating_duration_since(Instant::now());
                    assert!(early.is_zero(), "{kind}: {name} early by {early:?}");
                    latest = latest.max(at.elapsed());
                    assert_eq!(delivery.attempt(), 3, "{kind}: {name}");
                    *acked.entry(name).or_default() += 1;
                    delivery.ack().await;
                }
                round => {
                    let round = round.map_or(0, |(at, round)| {
                        let early = at.saturating_duration_since(Instant::now());
                        assert!(early.is_zero(), "{kind}: {name} early by {early:?}");
                        latest = latest.max(at.elapsed());
                        *round
                    });
                    assert_eq!(delivery.attempt(), round + 1, "{kind}: {name}");
                    due.insert(name, (Instant::now() + delay, round + 1));
                    assert!(delivery.nack_after(delay, "again").await.is_ok());
                }
            }
        }
        println!("{kind}: the latest by {latest:?}");
        assert!(latest < Duration::from_secs(2), "{kind}: late by {latest:?}");
        assert!(acked.values().all(|n| *n == 1), "{kind}: {acked:?}");
        for member in &mut members {
            quiet(member, Duration::from_secs(1)).await;
        }
        eye.nothing_left(&format!("{kind}..g")).await;
        broker.close(Duration::from_secs(5)).await;
        other.close(Duration::from_secs(5)).await;
    };
    tokio::join!(one(KINDS[0]), one(KINDS[1]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_between_two_steps_is_passed_on_in_time_by_all_members() {
    const ALL: usize = 4_000;
    const DELAY: Duration = Duration::from_secs(8);
    let rabbit = Rabbit::start(RabbitOptions::default());
    let (eye, (_raw, channel)) = (Eye::of(&rabbit).await, rabbit.raw().await);
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    for kind in KINDS {
        let (queue, url) = (format!("{kind}..g"), format!("queue_type={kind}"));
        let (steps, sub) = (format!("{queue}..steps"), Subscription::group(kind, "g"));
        let brokers = [rabbit.connect(&url).await, rabbit.connect(&url).await];
        let first = brokers[0].subscribe(sub.clone()).await.unwrap();
        eye.becomes(&steps, Some(0), Duration::from_secs(15)).await;
        first.control().close(Duration::from_secs(5)).await;
        let began = Instant::now();
        let bodies: Vec<_> = (0..ALL).map(|n| n.to_string()).collect();
        for some in bodies.chunks(500) {
            futures_util::future::join_all(some.iter().map(|body| between(&channel, &steps, body, DELAY))).await;
        }
        let put = began.elapsed();
        let mut one = brokers[0].subscribe(sub.clone()).await.unwrap();
        let mut two = brokers[1].subscribe(sub).await.unwrap();
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        for at in 0..ALL {
            let delivery = tokio::select! {
                got = next(&mut one) => got,
                got = next(&mut two) => got,
            };
            if at == 0 {
                assert!(began.elapsed() >= DELAY - Duration::from_millis(1), "{kind}: early, {:?}", began.elapsed());
            }
            *seen.entry(text(&delivery)).or_default() += 1;
            drop(delivery.ack());
        }
        println!("{kind}: put in {put:?}, all after {:?}", began.elapsed());
        assert!(began.elapsed() < DELAY + put + Duration::from_secs(10), "{kind}: late, {:?}", began.elapsed());
        assert!(seen.len() == ALL && seen.values().all(|n| *n == 1), "{kind}: {} of {ALL}", seen.len());
        quiet(&mut one, Duration::from_millis(500)).await;
        quiet(&mut two, Duration::from_millis(500)).await;
        for broker in brokers {
            broker.close(Duration::from_secs(5)).await;
        }
        eye.nothing_left(&queue).await;
    }
}
