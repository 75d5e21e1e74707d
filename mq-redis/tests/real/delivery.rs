//! Sending, receiving and settling, from end to end.

use crate::rig::{GROUP, TOPIC, all, ask, close, label, next, open, pending, quiet, raw, server, sub};
use mq_api::{
    BrokerExt, ErrorKind, Group, Message, Outcome, ProducerSpec, ReplayFrom, Retention, Settled, Start, Subscription,
    TopicSpec,
};
use std::time::Duration;

#[tokio::test]
async fn send_receive_ack_nack_and_dead_letter() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    assert!(broker.capabilities().server.as_deref().is_some_and(|v| v.contains('.')));
    for i in 0..10 {
        producer.send(Message::new(format!("m{i}")).key("k").header("a", "b")).await.unwrap();
    }
    for i in 0..8 {
        let delivery = next(&mut consumer).await;
        assert_eq!(label(&delivery), format!("m{i}"));
        assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    }
    let delivery = next(&mut consumer).await;
    assert!(matches!(delivery.nack_after(Duration::from_millis(200), "no").await, Settled::Confirmed(_)));
    assert!(matches!(next(&mut consumer).await.dead_letter("bad").await, Settled::Confirmed(_)));
    let again = next(&mut consumer).await;
    assert_eq!((label(&again), again.attempt()), ("m8".to_owned(), 2));
    assert!(matches!(again.ack().await, Settled::Confirmed(_)));
    let letters = broker.admin().dead_letters(&TOPIC.into(), &GROUP.into(), 5).await.unwrap();
    assert_eq!(letters.len(), 1);
    let envelope = letters[0].envelope.as_ref().unwrap();
    assert_eq!((&*envelope.topic, &*envelope.group, envelope.attempts), (TOPIC, GROUP, 1));
    close(broker).await;
    assert_eq!(pending(&mut raw(&server)), 0);
}

#[tokio::test]
async fn entries_of_other_programs_are_their_fields_as_json() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, _producer, mut consumer) = all(&server.url()).await;
    let mut other = raw(&server);
    let id: String = ask(&mut other, &["XADD", TOPIC, "*", "total", "12", "currency", "EUR"]);
    let delivery = next(&mut consumer).await;
    assert_eq!(label(&delivery), r#"{"currency":"EUR","total":"12"}"#);
    assert_eq!((delivery.id.to_string(), delivery.position().to_string()), (id.clone(), id));
    assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    // A native topic: as it is, with the options of its owner; nothing of ours is put beside it or removed.
    let _: String = ask(&mut other, &["XADD", "theirs", "*", "payload", "raw"]);
    let theirs = Subscription::group(mq_api::Topic::native("theirs"), "g");
    let mut consumer = broker.subscribe(theirs).await.unwrap();
    let delivery = next(&mut consumer).await;
    assert_eq!(label(&delivery), "raw");
    assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(ask::<i64>(&mut other, &["XLEN", "theirs"]), 1);
    assert_eq!(ask::<i64>(&mut other, &["EXISTS", "{theirs}..meta"]), 0);
    close(broker).await;
}

#[tokio::test]
async fn plain_fields_are_written_for_other_programs() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, _, mut consumer) = all(&server.url()).await;
    let producer = broker.producer(ProducerSpec::new(TOPIC).native("fields", "plain")).await.unwrap();
    producer.send(Message::new("hello").key("k").id("order-7").header("color", "red")).await.unwrap();
    let found: Vec<(String, Vec<String>)> = ask(&mut raw(&server), &["XRANGE", TOPIC, "-", "+"]);
    let fields = &found[0].1;
    for pair in [["id", "order-7"], ["key", "k"], ["h:color", "red"], ["payload", "hello"]] {
        assert!(fields.chunks(2).any(|p| p == pair), "{fields:?}");
    }
    let delivery = next(&mut consumer).await;
    assert_eq!((label(&delivery), delivery.id.to_string()), ("hello".to_owned(), "order-7".to_owned()));
    assert_eq!(delivery.headers.get_str("color"), Some("red"));
    drop(delivery.ack());
    let error = broker.producer(ProducerSpec::new(TOPIC).native("feilds", "plain")).await.err().unwrap();
    assert!(error.kind() == ErrorKind::Config && error.to_string().contains("feilds"), "{error}");
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_all_groups_handled_is_removed_and_a_full_topic_refuses() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let keep = Retention::Handled { max: 10 };
    let spec = ProducerSpec::new(TOPIC).retention(keep).group(GROUP).group("audit");
    let producer = broker.producer(spec).await.unwrap();
    for i in 0..10 {
        producer.send(Message::new(format!("m{i}"))).await.unwrap();
    }
    let full = producer.send(Message::new("x")).await.unwrap_err();
    assert_eq!((full.kind(), full.outcome()), (ErrorKind::Full, Some(Outcome::Rejected)), "{full}");
    let mut admin = raw(&server);
    let mut consumers = Vec::new();
    for group in [GROUP, "audit"] {
        let mut consumer = broker.subscribe(Subscription::group(TOPIC, group)).await.unwrap();
        assert_eq!(ask::<i64>(&mut admin, &["XLEN", TOPIC]), 10, "one group has not handled them");
        for _ in 0..10 {
            assert!(matches!(next(&mut consumer).await.ack().await, Settled::Confirmed(_)));
        }
        consumers.push(consumer);
    }
    producer.send(Message::new("y")).await.unwrap();
    // Removed at the members' next look, not at the acknowledgement.
    assert!(mq_testbed::eventually(Duration::from_secs(5), || ask::<i64>(&mut admin, &["XLEN", TOPIC]) == 1));
    let other = broker.producer(ProducerSpec::new(TOPIC).retention(Retention::Handled { max: 11 })).await;
    let error = other.err().expect("another retention");
    assert!(error.kind() == ErrorKind::Topology && error.to_string().contains("handled:10"), "{error}");
    close(broker).await;
}

#[tokio::test]
async fn a_topic_in_log_mode_is_replayed() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let log = Retention::Log { max: Some(100), age: None };
    broker.admin().create_topic(TopicSpec::new(TOPIC).retention(log)).await.unwrap();
    let producer = broker.producer(TOPIC).await.unwrap();
    let mut first = broker.subscribe(sub()).await.unwrap();
    let mut positions = Vec::new();
    for i in 0..150 {
        positions.push(producer.send(Message::new(format!("m{i}"))).await.unwrap().position.unwrap());
        assert!(matches!(next(&mut first).await.ack().await, Settled::Confirmed(_)));
    }
    assert_eq!(ask::<i64>(&mut raw(&server), &["XLEN", TOPIC]), 100, "by count");
    let from = |name: &str, from| Subscription::group(TOPIC, name).start(Start::Replay(from));
    let mut replay = broker.subscribe(from("earliest", ReplayFrom::Earliest)).await.unwrap();
    assert_eq!(label(&next(&mut replay).await), "m50");
    let mut replay = broker.subscribe(from("position", ReplayFrom::Position(positions[120]))).await.unwrap();
    assert_eq!(label(&next(&mut replay).await), "m120", "the position itself is included");
    // Where what was handled is removed, replay is refused, and the way out is named.
    broker.producer("trimmed").await.unwrap();
    let trimmed = Subscription::group("trimmed", "g").start(Start::Replay(ReplayFrom::Earliest));
    let error = broker.subscribe(trimmed).await.err().unwrap();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("log mode"), "{error}");
    let _ = broker.close(Duration::from_secs(1)).await;
}

#[tokio::test]
async fn nothing_made_is_left_behind_by_delete() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    producer.send(Message::new("m")).await.unwrap();
    assert!(matches!(next(&mut consumer).await.nack("x").await, Settled::Confirmed(_)));
    drop(consumer);
    assert!(broker.admin().delete_group(&TOPIC.into(), &Group::new(GROUP)).await.unwrap());
    assert!(broker.admin().delete_topic(&TOPIC.into()).await.unwrap());
    let keys: Vec<String> = ask(&mut raw(&server), &["KEYS", "*"]);
    assert!(keys.iter().all(|k| k.contains("..dlq")), "{keys:?}");
    let _ = broker.close(Duration::from_secs(1)).await;
}

#[tokio::test]
async fn a_delayed_message_outlives_its_holder() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    producer.send(Message::new("m")).await.unwrap();
    let delay = Duration::from_secs(2);
    let delivery = next(&mut consumer).await;
    let asked = tokio::time::Instant::now();
    assert!(matches!(delivery.nack_after(delay, "x").await, Settled::Confirmed(_)));
    let parked = tokio::time::Instant::now();
    close(broker).await;
    let broker = open(&server.url()).await;
    let mut heir = broker.subscribe(sub()).await.unwrap();
    let delivery = next(&mut heir).await;
    let (early, late) = (asked.elapsed(), parked.elapsed());
    assert!(early >= delay && late <= delay + Duration::from_secs(1), "{early:?} {late:?}");
    assert_eq!(delivery.attempt(), 2);
    drop(delivery.ack());
    quiet(&mut heir, Duration::from_millis(300)).await;
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_member_is_woken_by_what_comes_back() {
    let Some(server) = server(false, &[]) else { return };
    const N: usize = 20;
    let broker = open(&server.url()).await;
    // The lease is long: renewing also looks for what is due.
    let sub = || sub().lease(Duration::from_secs(60));
    let mut holder = broker.subscribe(sub()).await.unwrap();
    let producer = broker.producer(TOPIC).await.unwrap();
    let mut held = Vec::new();
    for i in 0..N {
        producer.send(Message::new(format!("m{i}"))).await.unwrap();
        held.push(next(&mut holder).await);
    }
    // It takes nothing itself.
    holder.control().pause();
    let mut idle = broker.subscribe(sub()).await.unwrap();
    quiet(&mut idle, Duration::from_millis(300)).await;
    let began = std::time::Instant::now();
    for (i, delivery) in held.into_iter().enumerate() {
        let settled = match i % 3 {
            0 => delivery.release().await,
            1 => delivery.nack_after(Duration::ZERO, "now").await,
            _ => delivery.nack_after(Duration::from_millis(20), "soon").await,
        };
        assert!(matches!(settled, Settled::Confirmed(_)));
        let got = next(&mut idle).await;
        assert_eq!((label(&got), got.attempt()), (format!("m{i}"), if i % 3 == 0 { 1 } else { 2 }));
        assert!(matches!(got.ack().await, Settled::Confirmed(_)));
    }
    let took = began.elapsed();
    assert!(
        took < Duration::from_millis(125) * N as u32,
        "members that look by the clock take twice as long: {took:?}"
    );
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_track_members_look_by_the_clock() {
    let Some(server) = server(false, &[]) else { return };
    let mut admin = raw(&server);
    let _: () =
        ask(&mut admin, &["ACL", "SETUSER", "app", "on", ">pw", "~orders*", "~{orders}*", "+@all", "-client|tracking"]);
    let (broker, producer, mut consumer) = all(&format!("redis://app:pw@127.0.0.1:{}", server.port())).await;
    producer.send(Message::new("m")).await.unwrap();
    assert!(matches!(next(&mut consumer).await.release().await, Settled::Confirmed(_)));
    let again = next(&mut consumer).await;
    assert_eq!(again.attempt(), 1);
    assert!(matches!(again.ack().await, Settled::Confirmed(_)));
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_message_does_not_fill_the_topic() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let spec = ProducerSpec::new(TOPIC).retention(Retention::Handled { max: 10 }).group(GROUP).group("audit");
    let producer = broker.producer(spec).await.unwrap();
    let mut billing = broker.subscribe(sub()).await.unwrap();
    let mut audit = broker.subscribe(Subscription::group(TOPIC, "audit")).await.unwrap();
    producer.send(Message::new("late")).await.unwrap();
    let delivery = next(&mut billing).await;
    assert!(matches!(delivery.nack_after(Duration::from_secs(600), "x").await, Settled::Confirmed(_)));
    assert!(matches!(next(&mut audit).await.ack().await, Settled::Confirmed(_)));
    for i in 0..100 {
        producer.send(Message::new(format!("m{i}"))).await.unwrap();
        for consumer in [&mut billing, &mut audit] {
            let delivery = next(consumer).await;
            assert_eq!(label(&delivery), format!("m{i}"));
            assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
        }
    }
    // What one group has not handled is never removed.
    for i in 0..9 {
        producer.send(Message::new(format!("n{i}"))).await.unwrap();
        assert!(matches!(next(&mut billing).await.ack().await, Settled::Confirmed(_)));
    }
    let full = producer.send(Message::new("x")).await.unwrap_err();
    assert_eq!((full.kind(), full.outcome()), (ErrorKind::Full, Some(Outcome::Rejected)), "{full}");
    for i in 0..9 {
        let delivery = next(&mut audit).await;
        assert_eq!(label(&delivery), format!("n{i}"));
        assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    }
    let backlog = broker.admin().backlog(&TOPIC.into(), &GROUP.into()).await.unwrap();
    assert_eq!(backlog.delayed, mq_api::Count::Exact(1), "{backlog:?}");
    assert_eq!(backlog.ready, mq_api::Count::Exact(0), "{backlog:?}");
    close(broker).await;
}
