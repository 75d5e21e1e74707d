//! Rarer paths: cancelled, deleted and made again, paused, closed and opened again, answers that never came.

use crate::rig::{GROUP, TOPIC, ask, close, label, next, open, quiet, raw, server, sub};
use mq_api::{
    BrokerExt, Consumer, ConsumerExt, Count, ErrorKind, Message, RedriveOptions, Settled, Start, Subscription, Topic,
    TopicSpec,
};
use mq_testbed::Kind;
use mq_testbed::proxy::{Direction, Proxy, Trouble};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(10);

/// The next delivery, if one comes in time.
async fn maybe(consumer: &mut Box<dyn Consumer>, limit: Duration) -> Option<mq_api::Delivery> {
    tokio::time::timeout(limit, consumer.recv()).await.ok().map(|got| got.unwrap().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_only_looks_finds_its_server_again() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let admin = broker.admin();
    admin.create_topic(TopicSpec::new("before")).await.unwrap();
    let _: i64 = ask(&mut raw(&server), &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    let until = Instant::now() + SOON;
    while let Err(error) = admin.create_topic(TopicSpec::new("after")).await {
        assert!(Instant::now() < until, "for ever: {error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_only_looks_gives_up_a_connection_that_does_not_answer() {
    let Ok((server, mut proxy)) = Proxy::with_server(Kind::Redis, 3) else { return };
    let broker = open(&format!("{}?response_timeout=500ms", server.url_at(proxy.port()))).await;
    let admin = broker.admin();
    admin.create_topic(TopicSpec::new("before")).await.unwrap();
    proxy.begin(Trouble::Swallow(Direction::Both)).unwrap();
    admin.create_topic(TopicSpec::new("lost")).await.unwrap_err();
    proxy.end(Trouble::Swallow(Direction::Both)).unwrap();
    let until = Instant::now() + SOON;
    while let Err(error) = admin.create_topic(TopicSpec::new("after")).await {
        assert!(Instant::now() < until, "for ever: {error}");
    }
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_whose_first_listener_was_cancelled_is_asked_for_again() {
    let Ok((server, mut proxy)) = Proxy::with_server(Kind::Redis, 5) else { return };
    let _: () =
        ask(&mut raw(&server), &["ACL", "SETUSER", "app", "on", ">pw", "~*", "+@all", "resetchannels", "&allowed"]);
    let broker = open(&format!("redis+pubsub://app:pw@127.0.0.1:{}", proxy.port())).await;
    let allowed = broker.subscribe(Subscription::broadcast("allowed")).await.unwrap();
    proxy.begin(Trouble::Stall(Direction::ToClient)).unwrap();
    let cancelled =
        tokio::time::timeout(Duration::from_millis(300), broker.subscribe(Subscription::broadcast("denied"))).await;
    assert!(cancelled.is_err());
    proxy.end(Trouble::Stall(Direction::ToClient)).unwrap();
    let denied =
        broker.subscribe(Subscription::broadcast("denied")).await.err().expect("hears nothing, and nobody says so");
    assert_eq!(denied.kind(), ErrorKind::Permission, "{denied}");
    drop(allowed);
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_with_a_member_is_not_moved_however_quiet_that_is() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let admin = broker.admin();
    let (topic, group) = (Topic::from(TOPIC), GROUP.into());
    let mut consumer = broker.subscribe(sub().max_in_flight(1).lease(Duration::from_secs(60))).await.unwrap();
    let producer = broker.producer(TOPIC).await.unwrap();
    producer.send(Message::new("a")).await.unwrap();
    producer.send(Message::new("b")).await.unwrap();
    let held = next(&mut consumer).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let moved = admin.reset_group(&topic, &group, Start::Oldest).await;
    assert_eq!(moved.map_err(|e| e.kind()), Err(ErrorKind::Topology), "hands full");
    assert_eq!(held.ack().await, Settled::Confirmed(mq_api::Durability::Memory));
    next(&mut consumer).await.ack().await;
    consumer.control().pause();
    tokio::time::sleep(Duration::from_secs(4)).await;
    let moved = admin.reset_group(&topic, &group, Start::Oldest).await;
    assert_eq!(moved.map_err(|e| e.kind()), Err(ErrorKind::Topology), "paused");
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_used_again_remembers_nothing_of_a_group_that_was_deleted() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let producer = broker.producer(TOPIC).await.unwrap();
    let mut consumer = broker.subscribe(sub().member("one")).await.unwrap();
    producer.send(Message::new("a")).await.unwrap();
    next(&mut consumer).await.ack().await;
    assert!(consumer.control().close(SOON).await.is_clean());
    drop(consumer);
    assert!(broker.admin().delete_group(&Topic::from(TOPIC), &GROUP.into()).await.unwrap());
    producer.send(Message::new("before")).await.unwrap();
    let mut consumer = broker.subscribe(sub().member("one").start(Start::Latest)).await.unwrap();
    let mut events = consumer.control().events();
    producer.send(Message::new("after")).await.unwrap();
    let first = next(&mut consumer).await;
    assert_eq!(label(&first), "after", "it starts where it was told to");
    first.ack().await;
    assert_eq!(format!("{:?}", events.drain()), "[]");
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_hand_over_after_an_unknown_settlement_is_the_second() {
    let Ok((server, mut proxy)) = Proxy::with_server(Kind::Redis, 7) else { return };
    let broker = open(&server.url_at(proxy.port())).await;
    let mut consumer = broker.subscribe(sub().lease(Duration::from_secs(60))).await.unwrap();
    let producer = broker.producer(TOPIC).await.unwrap();
    for (nack, words) in [(false, "acknowledged"), (true, "failed")] {
        producer.send(Message::new(words)).await.unwrap();
        let first = next(&mut consumer).await;
        assert_eq!((label(&first).as_str(), first.attempt()), (words, 1));
        proxy.begin(Trouble::Swallow(Direction::ToServer)).unwrap();
        let settling = if nack { first.nack("no") } else { first.ack() };
        tokio::time::sleep(Duration::from_millis(100)).await;
        proxy.end(Trouble::Swallow(Direction::ToServer)).unwrap();
        proxy.begin(Trouble::Cut).unwrap();
        proxy.end(Trouble::Cut).unwrap();
        assert_eq!(settling.await, Settled::Unknown, "{words}");
        let second = next(&mut consumer).await;
        assert_eq!((label(&second).as_str(), second.attempt()), (words, 2));
        second.ack().await;
    }
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_made_again_with_lower_ids_is_read_from_its_beginning() {
    let Some(server) = server(false, &[]) else { return };
    let mut raw = raw(&server);
    let _: String = ask(&mut raw, &["XADD", TOPIC, "500-1", "payload", "first"]);
    let broker = open(&server.url()).await;
    let native = || Topic::native(TOPIC);
    let mut member = broker.subscribe(Subscription::group(native(), "g")).await.unwrap();
    let mut all = broker.subscribe(Subscription::broadcast(native())).await.unwrap();
    next(&mut member).await.ack().await;
    let _: String = ask(&mut raw, &["XADD", TOPIC, "600-1", "payload", "second"]);
    assert_eq!(label(&next(&mut all).await), "second");
    next(&mut member).await.ack().await;
    // Long enough for the member to note that it has handled all.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let _: () = redis::pipe()
        .atomic()
        .cmd("DEL")
        .arg(TOPIC)
        .ignore()
        .cmd("XADD")
        .arg(TOPIC)
        .arg("7-1")
        .arg("payload")
        .arg("third")
        .ignore()
        .query(&mut raw)
        .unwrap();
    let got = maybe(&mut member, SOON).await.expect("the group missed what came after");
    assert_eq!(label(&got), "third");
    got.ack().await;
    // A broadcast reader is told that the stream was deleted, and hears what comes from then on.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let _: String = ask(&mut raw, &["XADD", TOPIC, "8-1", "payload", "fourth"]);
    let until = Instant::now() + SOON;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let got = maybe(&mut all, left).await.expect("broadcast missed what came after");
        if label(&got) == "fourth" {
            break;
        }
    }
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_read_keeps_to_the_bytes_that_may_be_in_hand() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let producer = broker.producer(TOPIC).await.unwrap();
    for _ in 0..200 {
        producer.send(Message::new(vec![7u8; 100_000])).await.unwrap();
    }
    let consumer = broker.subscribe(sub().max_in_flight_bytes(1 << 20)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let held = crate::rig::pending(&mut raw(&server));
    assert!(held <= 30, "{held} of 100 kB each are held, 1 MB was allowed");
    drop(consumer);
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_backlog_is_of_one_moment() {
    const N: u64 = 3000;
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let topic = Topic::from(TOPIC);
    broker.admin().create_topic(TopicSpec::new(TOPIC).group(GROUP)).await.unwrap();
    let producer = broker.producer(TOPIC).await.unwrap();
    futures_util::future::join_all((0..N).map(|_| producer.send(Message::new("x")))).await;
    let mut raw = raw(&server);
    let reading = std::thread::spawn(move || {
        for _ in 0..N {
            let _: redis::Value =
                ask(&mut raw, &["XREADGROUP", "GROUP", GROUP, "another", "COUNT", "1", "STREAMS", TOPIC, ">"]);
        }
    });
    while !reading.is_finished() {
        let backlog = broker.admin().backlog(&topic, &GROUP.into()).await.unwrap();
        let (Count::Exact(ready), Count::Exact(held)) = (backlog.ready, backlog.in_flight) else {
            panic!("{backlog:?}");
        };
        assert_eq!(ready + held, N, "{backlog:?}");
    }
    reading.join().unwrap();
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_stream_of_redrive_the_group_goes_on_where_it_was() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let long = || sub().lease(Duration::from_secs(60));
    let mut one = broker.subscribe(long()).await.unwrap();
    let producer = broker.producer(TOPIC).await.unwrap();
    producer.send(Message::new("dead")).await.unwrap();
    next(&mut one).await.dead_letter("test").await;
    let topic = Topic::from(TOPIC);
    broker.admin().redrive(&topic, &GROUP.into(), RedriveOptions::default()).await.unwrap();
    next(&mut one).await.ack().await;
    producer.send(Message::new("held")).await.unwrap();
    let held = next(&mut one).await;
    let mut two = broker.subscribe(long()).await.unwrap();
    one.control().pause();
    let removed: i64 = ask(&mut raw(&server), &["DEL", "{orders}..billing..again"]);
    assert_eq!(removed, 1);
    quiet(&mut two, Duration::from_secs(4)).await;
    one.control().resume();
    drop(held);
    assert_eq!(label(&next(&mut one).await), "held");
    close(broker).await;
}

/// Of two entries of huge ids one is handled; the other must not be removed with it.
#[tokio::test(flavor = "multi_thread")]
async fn ids_of_any_size_are_told_apart() {
    let Some(server) = server(false, &[]) else { return };
    let mut raw = raw(&server);
    let broker = open(&server.url()).await;
    let mut consumer = broker.subscribe(sub().max_in_flight(1).lease(Duration::from_secs(60))).await.unwrap();
    let _: String = ask(&mut raw, &["XADD", TOPIC, "5-18446744073709551000", "payload", "a"]);
    next(&mut consumer).await.ack().await;
    consumer.control().pause();
    tokio::time::sleep(Duration::from_millis(200)).await;
    for seq in ["18446744073709551001", "18446744073709551002"] {
        let _: String = ask(&mut raw, &["XADD", TOPIC, &format!("5-{seq}"), "payload", seq]);
    }
    // Long enough for a look at what can be removed.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let left: i64 = ask(&mut raw, &["XLEN", TOPIC]);
    consumer.control().resume();
    for seq in ["18446744073709551001", "18446744073709551002"] {
        let got = maybe(&mut consumer, SOON).await.unwrap_or_else(|| panic!("{seq} is gone, {left} left"));
        assert_eq!(label(&got), seq);
        got.ack().await;
    }
    close(broker).await;
}
