//! Answers that nobody expects, or that never come.

use crate::meddler::{Fate, has, meddle};
use crate::rig::{GROUP, TOPIC, ask, close, label, next, open, raw, server, sub};
use mq_api::{BrokerExt, ErrorKind, Message, Outcome, ProducerSpec, Retention, Subscription, TopicSpec};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_not_one_confirms_nothing() {
    let Some(server) = server(false, &[]) else { return };
    for (scheme, command) in [("redis", "XADD"), ("redis+pubsub", "PUBLISH")] {
        let fate = move |sent: &[u8]| if has(sent, command) { Fate::Answer("+OK\r\n".into()) } else { Fate::Pass };
        let port = meddle(server.port(), fate).await;
        let broker = open(&format!("{scheme}://127.0.0.1:{port}")).await;
        let spec = ProducerSpec::new(TOPIC).retry_for(Duration::ZERO);
        let producer = broker.producer(spec).await.unwrap();
        let sent = producer.send(Message::new("m")).await.map_err(|e| e.outcome());
        assert_eq!(sent.map(|receipt| format!("{receipt:?}")), Err(Some(Outcome::Unknown)), "{scheme}");
        let _ = broker.close(Duration::from_secs(2)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_close_does_not_wait_for_a_connection_that_is_being_made() {
    let Some(server) = server(false, &[]) else { return };
    let silent = Arc::new(AtomicBool::new(false));
    let now = silent.clone();
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    let fate = move |sent: &[u8]| {
        if now.load(Ordering::Relaxed) && has(sent, "\r\nINFO\r\n") {
            count.fetch_add(1, Ordering::Relaxed);
            return Fate::Keep;
        }
        Fate::Pass
    };
    let port = meddle(server.port(), fate).await;
    let broker = open(&format!("redis://127.0.0.1:{port}")).await;
    let consumer = broker.subscribe(sub()).await.unwrap();
    silent.store(true, Ordering::Relaxed);
    let _: i64 = ask(&mut raw(&server), &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    while asked.load(Ordering::Relaxed) == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let began = Instant::now();
    let _ = broker.close(Duration::from_secs(1)).await;
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
    drop(consumer);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_attempt_to_listen_that_failed_is_no_gap() {
    let Some(server) = server(false, &[]) else { return };
    let once = AtomicBool::new(true);
    let fate = move |sent: &[u8]| match has(sent, "\r\nSUBSCRIBE\r\n") && once.swap(false, Ordering::Relaxed) {
        true => Fate::Answer("-LOADING not yet\r\n".into()),
        false => Fate::Pass,
    };
    let port = meddle(server.port(), fate).await;
    let broker = open(&format!("redis+pubsub://127.0.0.1:{port}")).await;
    let mut consumer = broker.subscribe(Subscription::broadcast("c")).await.unwrap();
    let mut events = consumer.control().events();
    broker.producer("c").await.unwrap().send(Message::new("m")).await.unwrap();
    assert_eq!(label(&next(&mut consumer).await), "m");
    assert_eq!(format!("{:?}", events.drain()), "[]", "it had never listened before");
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_predecessor_died_with_counts_as_taken_also_after_a_first_attempt_that_failed() {
    let Some(server) = server(false, &[]) else { return };
    let mut raw = raw(&server);
    let once = AtomicBool::new(true);
    let fate = move |sent: &[u8]| match has(sent, "\r\nCREATECONSUMER\r\n") && once.swap(false, Ordering::Relaxed) {
        true => Fate::Answer("-LOADING not yet\r\n".into()),
        false => Fate::Pass,
    };
    let port = meddle(server.port(), fate).await;
    let broker = open(&format!("redis://127.0.0.1:{port}")).await;
    broker.admin().create_topic(TopicSpec::new(TOPIC).group(GROUP)).await.unwrap();
    broker.producer(TOPIC).await.unwrap().send(Message::new("m")).await.unwrap();
    let _: redis::Value = ask(&mut raw, &["XREADGROUP", "GROUP", GROUP, "one", "STREAMS", TOPIC, ">"]);
    let mut consumer = broker.subscribe(sub().member("one").lease(Duration::from_secs(60))).await.unwrap();
    let got = next(&mut consumer).await;
    let held: Vec<(String, String, u64, u64)> = ask(&mut raw, &["XPENDING", TOPIC, GROUP, "-", "+", "9"]);
    assert_eq!(held.iter().map(|h| h.3).collect::<Vec<_>>(), [2], "taken by the one that died, and by this one");
    got.ack().await;
    close(broker).await;
}

/// The age of entries is by the server's clock, which gave them their ids: by that of a client that is ahead, new ones are old.
#[tokio::test(flavor = "multi_thread")]
async fn entries_are_as_old_as_the_server_says() {
    let Some(server) = server(false, &[]) else { return };
    let told = 1_600_000_000_000u64;
    let oldest = Arc::new(Mutex::new(Vec::new()));
    let seen = oldest.clone();
    let fate = move |sent: &[u8]| {
        if has(sent, "*1\r\n$4\r\nTIME\r\n") {
            return Fate::Answer("*2\r\n$10\r\n1600000000\r\n$1\r\n0\r\n".into());
        }
        let text = String::from_utf8_lossy(sent);
        let mut words = text.split("\r\n").skip_while(|word| *word != "MINID");
        if let Some(id) = words.nth(4) {
            seen.lock().unwrap().push(id.parse::<u64>().unwrap());
        }
        Fate::Pass
    };
    let port = meddle(server.port(), fate).await;
    let broker = open(&format!("redis://127.0.0.1:{port}")).await;
    let spec = ProducerSpec::new(TOPIC).retention(Retention::log_for(Duration::from_secs(60)));
    let producer = broker.producer(spec).await.unwrap();
    producer.send(Message::new("m")).await.unwrap();
    let oldest = oldest.lock().unwrap().clone();
    assert!(oldest.len() == 1 && oldest[0].abs_diff(told - 60_000) < 30_000, "{oldest:?} for a server at {told}");
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sentinel_that_names_a_replica_is_not_believed() {
    let (Some(master), Some(replica)) = (server(false, &[]), server(false, &[])) else { return };
    let _: () = ask(&mut raw(&replica), &["REPLICAOF", "127.0.0.1", &master.port().to_string()]);
    let says = |port: u16| {
        move |sent: &[u8]| match has(sent, "get-master-addr-by-name") {
            true => Fate::Answer(format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n", port.to_string().len())),
            false => Fate::Pass,
        }
    };
    let old = meddle(master.port(), says(replica.port())).await;
    let new = meddle(master.port(), says(master.port())).await;
    let hosts = format!("127.0.0.1:{old},127.0.0.1:{new}");
    let opened = mq_redis::connect(&format!("redis://{hosts}?sentinel=main&wait=0&connect_timeout=3s")).await;
    let broker = opened.expect("the other one knows better");
    let mut consumer =
        tokio::time::timeout(Duration::from_secs(5), broker.subscribe(sub())).await.expect("in time").unwrap();
    broker.producer(TOPIC).await.unwrap().send(Message::new("m")).await.unwrap();
    next(&mut consumer).await.ack().await;
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_could_not_be_written_was_handed_over_all_the_same() {
    let Some(server) = server(false, &[]) else { return };
    let mut raw = raw(&server);
    let broker = open(&server.url()).await;
    let mut consumer = broker.subscribe(sub().lease(Duration::from_secs(60))).await.unwrap();
    broker.producer(TOPIC).await.unwrap().send(Message::new("m")).await.unwrap();
    let _: () = ask(&mut raw, &["SET", "{orders}..billing..dlq", "in the way"]);
    let first = next(&mut consumer).await;
    assert_eq!(first.attempt(), 1);
    let _ = first.dead_letter("bad").await;
    let _: i64 = ask(&mut raw, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    // The target is checked at each connect.
    let _: i64 = ask(&mut raw, &["DEL", "{orders}..billing..dlq"]);
    let second = next(&mut consumer).await;
    assert_eq!(second.attempt(), 2);
    second.ack().await;
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_not_flushed_while_it_is_rewritten_is_no_disk() {
    let Some(server) = server(true, &["no-appendfsync-on-rewrite yes"]) else { return };
    let broker = open(&server.url()).await;
    let all = broker.capabilities();
    let level = mq_api::Durability::Memory;
    assert_eq!((all.send_level, all.settle_level), (level, level));
    let receipt = broker.producer(TOPIC).await.unwrap().send(Message::new("m")).await.unwrap();
    assert_eq!(receipt.level, level);
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_by_count_and_age_keeps_to_both() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let mut raw = raw(&server);
    let both = |max, age| Retention::Log { max: Some(max), age: Some(age) };
    let young = ProducerSpec::new("young").retention(both(100_000, Duration::from_millis(300)));
    let producer = broker.producer(young).await.unwrap();
    for _ in 0..300 {
        producer.send(Message::new("m")).await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    producer.send(Message::new("m")).await.unwrap();
    // Whole blocks of 100 go.
    let left: i64 = ask(&mut raw, &["XLEN", "young"]);
    assert!(left <= 100, "{left}");
    let few = ProducerSpec::new("few").retention(both(5, Duration::from_secs(3600)));
    let producer = broker.producer(few).await.unwrap();
    for _ in 0..30 {
        producer.send(Message::new("m")).await.unwrap();
    }
    assert_eq!(ask::<i64>(&mut raw, &["XLEN", "few"]), 5);
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_with_an_age_of_less_than_a_millisecond_more_is_found_again() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    for (topic, age) in [("a", Duration::from_micros(1_000_001_500)), ("b", Duration::MAX)] {
        let spec = || TopicSpec::new(topic).retention(Retention::log_for(age));
        broker.admin().create_topic(spec()).await.unwrap_or_else(|e| panic!("{age:?}: {e}"));
        let again = broker.admin().create_topic(spec()).await;
        assert_eq!(again.map_err(|e| (e.kind() == ErrorKind::Topology, e.to_string())), Ok(()), "{age:?}");
        let producer = broker.producer(ProducerSpec::new(topic).retention(Retention::log_for(age))).await.unwrap();
        producer.send(Message::new("m")).await.unwrap();
    }
    close(broker).await;
}
