//! Pub/Sub.

use crate::rig::{ask, close, label, next, open, quiet, raw, server};
use mq_api::{
    BrokerExt, ConsumerExt, Durability, ErrorKind, Event, GapCause, Message, ProducerSpec, Subscription, Topic,
};
use mq_testbed::Kind;
use mq_testbed::proxy::{Direction, Proxy, Trouble};
use std::time::{Duration, Instant};

fn url(server: &mq_testbed::Server) -> String {
    server.url().replace("redis://", "redis+pubsub://")
}

#[tokio::test(flavor = "multi_thread")]
async fn channels_and_patterns_come_and_go_live() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&url(&server)).await;
    let producer = broker.producer("news.a").await.unwrap();
    let none = producer.send(Message::new("nobody")).await.unwrap();
    assert_eq!((none.receivers, none.level), (Some(0), Durability::Sent));
    let mut one = broker.subscribe(Subscription::broadcast("news.a")).await.unwrap();
    let mut two = broker.subscribe(Subscription::broadcast("news.a")).await.unwrap();
    let pattern = Subscription::broadcast(Topic::native("news.*")).native("pattern", "true");
    let mut all = broker.subscribe(pattern).await.unwrap();
    let sent = producer.send(Message::new("m").key("k").header("h", "v")).await.unwrap();
    assert_eq!(sent.receivers, Some(2), "the server counts the channel and the pattern of one connection");
    for consumer in [&mut one, &mut two, &mut all] {
        let delivery = next(consumer).await;
        assert_eq!((label(&delivery), delivery.headers.get_str("h")), ("m".to_owned(), Some("v")));
    }
    let _ = one.close(Duration::from_secs(1)).await;
    let _ = two.close(Duration::from_secs(1)).await;
    let left: Vec<redis::Value> = ask(&mut raw(&server), &["PUBSUB", "NUMSUB", "news.a"]);
    assert!(matches!(left[1], redis::Value::Int(0)), "{left:?}");
    let _: i64 = ask(&mut raw(&server), &["PUBLISH", "news.b", "plain text"]);
    let delivery = next(&mut all).await;
    assert_eq!((label(&delivery), delivery.headers.get_str("mq-channel")), ("plain text".to_owned(), Some("news.b")));
    quiet(&mut all, Duration::from_millis(100)).await;
    let error = broker.subscribe(Subscription::broadcast("x").native("patern", "true")).await.err().unwrap();
    assert!(error.kind() == ErrorKind::Config && error.to_string().contains("patern"), "{error}");
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_channels_join_while_publishing() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&url(&server)).await;
    let producer = broker.producer("c0").await.unwrap();
    let publishing = tokio::spawn(async move {
        for i in 0..2000 {
            producer.send(Message::new(format!("m{i}"))).await.unwrap();
        }
        producer
    });
    let mut consumers = Vec::new();
    for i in 0..50 {
        consumers.push(broker.subscribe(Subscription::broadcast(format!("c{i}"))).await.unwrap());
    }
    for i in 0..50 {
        let producer = broker.producer(format!("c{i}")).await.unwrap();
        assert_eq!(producer.send(Message::new("direct")).await.unwrap().receivers, Some(1), "channel {i}");
    }
    publishing.await.unwrap();
    for consumer in &mut consumers[1..] {
        assert_eq!(label(&next(consumer).await), "direct");
    }
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_subscriber_lags_and_is_not_cut_for_its_output_buffer() {
    let Some(server) = server(false, &["client-output-buffer-limit pubsub 1mb 1mb 1"]) else { return };
    let broker = open(&url(&server)).await;
    let mut slow = broker.subscribe(Subscription::broadcast("c").max_in_flight(10)).await.unwrap();
    let mut events = slow.control().events();
    let producer = broker.producer("c").await.unwrap();
    for i in 0..1000 {
        let sent = producer.send(Message::new(vec![0u8; 10_000]).id(format!("id{i}"))).await.unwrap();
        assert_eq!(sent.receivers, Some(1), "cut after {i}");
    }
    // A publish is answered before its message arrives here: reading begins when all have, or one more would find room.
    let mut lagged = 0;
    while lagged < 990 {
        let event = tokio::time::timeout(Duration::from_secs(20), events.next()).await.expect("in time").unwrap();
        lagged += if let Event::Lagged(n) = event { n } else { 0 };
    }
    let mut seen = 0;
    while let Ok(got) = tokio::time::timeout(Duration::from_millis(500), slow.recv()).await {
        drop(got.unwrap().unwrap());
        seen += 1;
    }
    assert_eq!((seen, lagged, events.drain().len()), (10, 990, 0));
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_is_made_again_with_all_channels_and_a_gap() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&url(&server)).await;
    let mut consumers = Vec::new();
    for i in 0..5 {
        consumers.push(broker.subscribe(Subscription::broadcast(format!("c{i}"))).await.unwrap());
    }
    let mut events: Vec<_> = consumers.iter().map(|c| c.control().events()).collect();
    let mut admin = raw(&server);
    let killed: i64 = ask(&mut admin, &["CLIENT", "KILL", "TYPE", "pubsub"]);
    assert_eq!(killed, 1, "one connection for all");
    for (i, consumer) in consumers.iter_mut().enumerate() {
        let gap = tokio::time::timeout(Duration::from_secs(10), events[i].next()).await.unwrap();
        assert!(matches!(gap, Some(Event::Gap(g)) if g.cause == GapCause::Disconnected));
        let mut health = consumer.control().health();
        health.wait_for(|h| h.state == mq_api::HealthState::Running).await;
        let producer = broker.producer(format!("c{i}")).await.unwrap();
        assert_eq!(producer.send(Message::new("after")).await.unwrap().receivers, Some(1));
        assert_eq!(label(&next(consumer).await), "after");
    }
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_half_open_subscriber_is_noticed_within_20_s() {
    let Ok((server, mut proxy)) = Proxy::with_server(Kind::Redis, 5) else { return };
    let url = server.url_at(proxy.port()).replace("redis://", "redis+pubsub://");
    let broker = open(&url).await;
    let mut consumer = broker.subscribe(Subscription::broadcast("c")).await.unwrap();
    let mut events = consumer.control().events();
    proxy.begin(Trouble::Swallow(Direction::Both)).unwrap();
    let began = Instant::now();
    tokio::time::sleep(Duration::from_secs(11)).await;
    proxy.end(Trouble::Swallow(Direction::Both)).unwrap();
    let gap = tokio::time::timeout(Duration::from_secs(20).saturating_sub(began.elapsed()), events.next()).await;
    assert!(matches!(gap, Ok(Some(Event::Gap(_)))), "after {:?}", began.elapsed());
    let producer = broker.producer(ProducerSpec::new("c")).await.unwrap();
    let mut sent = producer.send(Message::new("after")).await.unwrap();
    while sent.receivers != Some(1) {
        assert!(began.elapsed() < Duration::from_secs(25));
        tokio::time::sleep(Duration::from_millis(100)).await;
        sent = producer.send(Message::new("after")).await.unwrap();
    }
    assert_eq!(label(&next(&mut consumer).await), "after");
    close(broker).await;
}
