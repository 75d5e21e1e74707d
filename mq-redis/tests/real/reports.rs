//! Public reports about other clients and the server, each as a test named after what was seen. `docs/reports/redis.toml` lists
//! them.

use crate::rig::{GROUP, LEASE, TOPIC, all, ask, close, label, next, open, pending, quiet, raw, server, sub};
use mq_api::{BrokerExt, ConsumerExt, Count, Event, GapCause, Message, Settled, Subscription};
use mq_testbed::Kind;
use mq_testbed::proxy::{Proxy, Trouble};
use std::time::{Duration, Instant};

#[tokio::test]
async fn an_idle_reader_outlives_the_default_response_timeout() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    quiet(&mut consumer, Duration::from_secs(3)).await;
    producer.send(Message::new("m")).await.unwrap();
    let delivery = next(&mut consumer).await;
    assert_eq!(delivery.attempt(), 1);
    assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    assert_eq!(pending(&mut raw(&server)), 0, "no entry was given to a read that nobody waits for");
    close(broker).await;
}

#[tokio::test]
async fn no_blocked_client_is_left_after_close() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, _producer, _consumer) = all(&server.url()).await;
    let mut admin = raw(&server);
    let blocked = |admin: &mut redis::Connection| {
        let info: String = ask(admin, &["INFO", "clients"]);
        info.lines().find_map(|l| l.strip_prefix("blocked_clients:")).unwrap_or("?").trim().to_owned()
    };
    assert!(mq_testbed::eventually(Duration::from_secs(5), || blocked(&mut admin) == "1"));
    let began = Instant::now();
    close(broker).await;
    assert!(began.elapsed() < Duration::from_millis(900), "the block was cut short: {:?}", began.elapsed());
    assert!(mq_testbed::eventually(Duration::from_secs(1), || blocked(&mut raw(&server)) == "0"));
}

#[tokio::test]
async fn thirty_subscriptions_do_not_delay_sends() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let mut consumers = Vec::new();
    for i in 0..30 {
        consumers.push(broker.subscribe(Subscription::group(format!("t{i}"), GROUP)).await.unwrap());
    }
    let producer = broker.producer("t0").await.unwrap();
    let began = Instant::now();
    for i in 0..100 {
        producer.send(Message::new(format!("m{i}"))).await.unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(2), "behind blocking reads it would be 100 s: {:?}", began.elapsed());
    for i in 0..100 {
        assert_eq!(label(&next(&mut consumers[0]).await), format!("m{i}"));
    }
    let _ = broker.close(Duration::from_millis(100)).await;
}

#[tokio::test]
async fn entries_trimmed_while_pending_are_counted_and_never_looped_on() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    let mut events = consumer.control().events();
    for i in 0..3 {
        producer.send(Message::new(format!("m{i}"))).await.unwrap();
    }
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(next(&mut consumer).await);
    }
    assert!(matches!(held.remove(0).nack_after(Duration::from_millis(300), "x").await, Settled::Confirmed(_)));
    let mut admin = raw(&server);
    let _: i64 = ask(&mut admin, &["XTRIM", TOPIC, "MAXLEN", "0"]);
    let mut lost = 0;
    let until = Instant::now() + Duration::from_secs(10);
    while lost < 3 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(50)).await;
        for event in events.drain() {
            if let Event::Gap(gap) = event {
                assert_eq!(gap.cause, GapCause::Retention);
                lost += gap.count.unwrap();
            }
        }
    }
    assert_eq!(lost, 3);
    assert!(held.iter().all(|d| !d.is_owned()), "what is gone is nobody's");
    assert_eq!(pending(&mut admin), 0);
    quiet(&mut consumer, LEASE).await;
    drop(held);
    close(broker).await;
}

#[tokio::test]
async fn removing_a_dead_name_loses_nothing_of_its_pending_list() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, consumer) = all(&server.url()).await;
    drop(consumer);
    for i in 0..10 {
        producer.send(Message::new(format!("m{i}"))).await.unwrap();
    }
    let mut admin = raw(&server);
    // A consumer of some other program, dead with ten in hand, and one that holds nothing.
    let _: redis::Value =
        ask(&mut admin, &["XREADGROUP", "GROUP", GROUP, "dead", "COUNT", "10", "STREAMS", TOPIC, ">"]);
    let _: i64 = ask(&mut admin, &["XGROUP", "CREATECONSUMER", TOPIC, GROUP, "empty"]);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let janitor = include_str!("../../src/scripts/leave.lua");
    let removed = crate::scripts::call(&mut admin, janitor, &[TOPIC, "{orders}..billing..tries"], &[GROUP, "", "10"]);
    assert_eq!(removed, redis::Value::Int(1), "the empty one only");
    assert_eq!(pending(&mut admin), 10);
    let mut heir = broker.subscribe(sub()).await.unwrap();
    for i in 0..10 {
        let delivery = next(&mut heir).await;
        assert_eq!(label(&delivery), format!("m{i}"));
        assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    }
    close(broker).await;
}

#[tokio::test]
async fn a_group_destroyed_while_a_read_is_blocked_comes_back_without_a_hot_loop() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    let mut admin = raw(&server);
    for (round, command) in
        [vec!["XGROUP", "DESTROY", TOPIC, GROUP], vec!["DEL", TOPIC], vec!["FLUSHALL"]].iter().enumerate()
    {
        let _: redis::Value = ask(&mut admin, command);
        let before: i64 = calls(&mut admin);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(calls(&mut admin) - before < 200, "a hot loop");
        producer.send(Message::new(format!("m{round}"))).await.unwrap();
        let delivery = next(&mut consumer).await;
        assert_eq!(label(&delivery), format!("m{round}"));
        assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    }
    close(broker).await;
}

fn calls(admin: &mut redis::Connection) -> i64 {
    let info: String = ask(admin, &["INFO", "stats"]);
    info.lines().find_map(|l| l.strip_prefix("total_commands_processed:")).unwrap().trim().parse().unwrap()
}

#[tokio::test]
async fn the_backlog_is_right_after_deletions_ahead_of_the_group() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, consumer) = all(&server.url()).await;
    drop(consumer);
    let mut ids = Vec::new();
    for i in 0..10 {
        ids.push(producer.send(Message::new(format!("m{i}"))).await.unwrap().position.unwrap().to_string());
    }
    let mut admin = raw(&server);
    let _: i64 = ask(&mut admin, &["XDEL", TOPIC, &ids[4], &ids[7]]);
    let backlog = broker.admin().backlog(&TOPIC.into(), &GROUP.into()).await.unwrap();
    assert_eq!(backlog.ready, Count::Exact(8), "{backlog:?}");
    close(broker).await;
}

#[tokio::test]
async fn a_handler_of_three_leases_runs_once() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    let mut second = broker.subscribe(sub()).await.unwrap();
    producer.send(Message::new("m")).await.unwrap();
    let delivery = tokio::select! {
        d = next(&mut consumer) => d,
        d = next(&mut second) => d,
    };
    tokio::time::sleep(LEASE * 3).await;
    assert!(delivery.is_owned());
    assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    quiet(&mut consumer, LEASE).await;
    quiet(&mut second, LEASE).await;
    close(broker).await;
}

#[tokio::test]
async fn what_was_read_and_never_acknowledged_comes_again() {
    let Ok((server, mut proxy)) = Proxy::with_server(Kind::Redis, 1) else { return };
    let broker = open(&server.url()).await;
    let producer = broker.producer(TOPIC).await.unwrap();
    let victim = open(&server.url_at(proxy.port())).await;
    let mut first = victim.subscribe(sub()).await.unwrap();
    producer.send(Message::new("m")).await.unwrap();
    let held = next(&mut first).await;
    proxy.begin(Trouble::Refuse).unwrap();
    let mut heir = broker.subscribe(sub()).await.unwrap();
    let delivery = next(&mut heir).await;
    assert_eq!(label(&delivery), "m");
    assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    close(broker).await;
    drop(held);
    let _ = victim.close(Duration::ZERO).await;
}

#[tokio::test]
async fn an_idle_group_costs_few_commands() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, _producer, mut consumer) = all(&server.url()).await;
    let mut admin = raw(&server);
    quiet(&mut consumer, Duration::from_millis(200)).await;
    let before = calls(&mut admin);
    quiet(&mut consumer, Duration::from_secs(2)).await;
    let n = calls(&mut admin) - before;
    assert!(n < 200, "{n} commands in 2 s of nothing; empty reads at full speed would be thousands");
    close(broker).await;
}

#[tokio::test]
async fn memory_does_not_grow_with_what_is_handled() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    for i in 0..500 {
        producer.send(Message::new(format!("m{i}"))).await.unwrap();
        assert!(matches!(next(&mut consumer).await.ack().await, Settled::Confirmed(_)));
    }
    let mut admin = raw(&server);
    assert!(mq_testbed::eventually(Duration::from_secs(5), || ask::<i64>(&mut admin, &["XLEN", TOPIC]) == 0));
    let _ = consumer.close(Duration::from_secs(1)).await;
    close(broker).await;
}

#[tokio::test]
async fn the_due_index_may_be_lost() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    producer.send(Message::new("m")).await.unwrap();
    assert!(matches!(next(&mut consumer).await.nack_after(Duration::from_secs(600), "x").await, Settled::Confirmed(_)));
    let _: i64 = ask(&mut raw(&server), &["DEL", "{orders}..billing..due"]);
    let delivery = next(&mut consumer).await;
    assert_eq!((label(&delivery), delivery.attempt()), ("m".to_owned(), 2), "after a lease, attempts kept");
    drop(delivery.ack());
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_overstays_its_block_is_no_error() {
    let Some(mut server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let mut consumer = broker.subscribe(sub().lease(Duration::from_secs(60))).await.unwrap();
    let producer = broker.producer(TOPIC).await.unwrap();
    let mut admin = raw(&server);
    let mut clients = || -> Vec<String> {
        let all: String = ask(&mut admin, &["CLIENT", "LIST", "TYPE", "normal"]);
        let id = |line: &str| line.split(' ').next().map(str::to_owned);
        all.lines().filter(|l| l.contains("name=anymq")).filter_map(id).collect()
    };
    let before = clients();
    assert_eq!(before.len(), 2);
    // Three times the longest block.
    server.freeze().unwrap();
    quiet(&mut consumer, Duration::from_secs(3)).await;
    server.thaw().unwrap();
    producer.send(Message::new("m")).await.unwrap();
    let delivery = next(&mut consumer).await;
    assert_eq!(delivery.attempt(), 1);
    assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    assert_eq!(clients(), before, "no connection was given up");
    close(broker).await;
}
