//! What left a stream before it was read is counted exactly: sent = handed over + reported.

use crate::rig::{TOPIC, ask, close, next, open, raw, server, sub};
use mq_api::{BrokerExt, Consumer, ConsumerExt, Event, Events, GapCause, Message, Retention, Subscription, TopicSpec};
use std::time::{Duration, Instant};

const BURST: u64 = 50;
const KEPT: u64 = 10;

/// Adds more than the stream keeps, in one step, so that the first of them are gone before anybody could read them.
fn burst(raw: &mut redis::Connection) {
    let mut all = redis::pipe();
    all.atomic();
    for _ in 0..BURST {
        all.cmd("XADD").arg(TOPIC).arg("MAXLEN").arg("=").arg(KEPT).arg("*").arg("payload").arg("x");
    }
    all.exec(raw).unwrap();
}

/// Receives until as many were handed over or reported as were sent.
async fn account(consumers: &mut [(Box<dyn Consumer>, Events)], sent: u64) -> (u64, u64) {
    let (mut seen, mut lost) = (0, 0);
    let until = Instant::now() + Duration::from_secs(20);
    while seen + lost < sent && Instant::now() < until {
        for (consumer, events) in consumers.iter_mut() {
            if let Ok(got) = tokio::time::timeout(Duration::from_millis(20), consumer.recv()).await {
                let delivery = got.unwrap().unwrap();
                seen += 1;
                drop(delivery.ack());
            }
            for event in events.drain() {
                let Event::Gap(gap) = event else { continue };
                assert_eq!(gap.cause, GapCause::Retention, "{gap:?}");
                lost += gap.count.expect("a count");
            }
        }
    }
    (seen, lost)
}

async fn subscribe(broker: &dyn mq_api::Broker, subscription: Subscription) -> (Box<dyn Consumer>, Events) {
    let consumer = broker.subscribe(subscription).await.unwrap();
    let events = consumer.control().events();
    (consumer, events)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_is_told_how_much_it_missed() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let log = Retention::Log { max: Some(KEPT), age: None };
    broker.admin().create_topic(TopicSpec::new(TOPIC).retention(log)).await.unwrap();
    let mut raw = raw(&server);
    // What was gone before the group was made is not missed.
    burst(&mut raw);
    let mut members = [subscribe(&*broker, sub()).await, subscribe(&*broker, sub()).await];
    assert_eq!(account(&mut members, KEPT).await, (KEPT, 0));
    for _ in 0..20 {
        burst(&mut raw);
    }
    let (seen, lost) = account(&mut members, 20 * BURST).await;
    assert_eq!(seen + lost, 20 * BURST, "{seen} seen, {lost} lost");
    assert!(lost >= 20 * (BURST - KEPT), "{lost}");
    // One by one nothing is missed, and nothing is said.
    let producer = broker.producer(TOPIC).await.unwrap();
    for _ in 0..50 {
        producer.send(Message::new("y")).await.unwrap();
        let got = account(&mut members, 1).await;
        assert_eq!(got, (1, 0));
    }
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_others_that_they_trim_is_counted_too() {
    let Some(server) = server(false, &[]) else { return };
    let mut raw = raw(&server);
    burst(&mut raw);
    let broker = open(&server.url()).await;
    let theirs = Subscription::group(mq_api::Topic::native(TOPIC), "g");
    let mut member = [subscribe(&*broker, theirs).await];
    assert_eq!(account(&mut member, KEPT).await, (KEPT, 0));
    burst(&mut raw);
    assert_eq!(account(&mut member, BURST).await, (KEPT, BURST - KEPT));
    // Everything unread is gone, and nothing is left to read.
    let control = member[0].0.control();
    control.pause();
    let mut all = redis::pipe();
    all.atomic();
    for _ in 0..7 {
        all.cmd("XADD").arg(TOPIC).arg("*").arg("payload").arg("x");
    }
    all.cmd("XTRIM").arg(TOPIC).arg("MAXLEN").arg(0);
    all.exec(&mut raw).unwrap();
    control.resume();
    assert_eq!(account(&mut member, 7).await, (0, 7));
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deletions_ahead_of_a_group_are_a_gap_without_a_number() {
    let Some(server) = server(false, &[]) else { return };
    let mut raw = raw(&server);
    let ids: Vec<String> = (0..5).map(|_| ask(&mut raw, &["XADD", TOPIC, "*", "payload", "x"])).collect();
    let broker = open(&server.url()).await;
    let theirs = || Subscription::group(mq_api::Topic::native(TOPIC), "g");
    // The group is made, and reads from the beginning only after two entries are deleted.
    broker.admin().create_group(&mq_api::Topic::native(TOPIC), &"g".into(), mq_api::Start::Oldest).await.unwrap();
    let _: i64 = ask(&mut raw, &["XDEL", TOPIC, &ids[1], &ids[4]]);
    let (mut member, mut events) = subscribe(&*broker, theirs()).await;
    for _ in 0..3 {
        drop(next(&mut member).await.ack());
    }
    let until = Instant::now() + Duration::from_secs(10);
    let mut gaps = Vec::new();
    while gaps.is_empty() && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(20)).await;
        gaps.extend(events.drain());
    }
    let [Event::Gap(gap)] = &gaps[..] else { panic!("{gaps:?}") };
    assert_eq!((gap.cause, gap.count), (GapCause::Retention, None));
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broadcast_reader_is_told_how_much_it_missed() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let log = Retention::Log { max: Some(KEPT), age: None };
    broker.admin().create_topic(TopicSpec::new(TOPIC).retention(log)).await.unwrap();
    let mut raw = raw(&server);
    burst(&mut raw);
    let mut reader = [subscribe(&*broker, Subscription::broadcast(TOPIC)).await];
    for _ in 0..20 {
        burst(&mut raw);
    }
    let (seen, lost) = account(&mut reader, 20 * BURST).await;
    assert_eq!(seen + lost, 20 * BURST, "{seen} seen, {lost} lost");
    assert!(lost >= 20 * (BURST - KEPT), "{lost}");
    close(broker).await;
}
