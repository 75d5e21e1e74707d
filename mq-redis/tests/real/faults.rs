//! Faults with messages in flight.

use crate::rig::{Counting, LEASE, TOPIC, all, ask, close, label, load, next, open, pending, quiet, raw, server, sub};
use futures_util::future::join_all;
use mq_api::{BrokerExt, ConsumerExt, ErrorKind, Event, Message, Outcome, ProducerSpec, Settled};
use mq_testbed::Kind;
use mq_testbed::proxy::{Direction, Proxy, Trouble};
use std::time::{Duration, Instant};

/// Messages under a fault: `MQ_FAULT_MESSAGES=100000` for a run that takes its time.
fn n() -> usize {
    std::env::var("MQ_FAULT_MESSAGES").ok().and_then(|n| n.parse().ok()).unwrap_or(5_000)
}
const SOON: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_with_aof_always_loses_nothing() {
    let Some(mut server) = server(true, &[]) else { return };
    let (broker, producer, consumer) = all(&server.url()).await;
    let counting = Counting::start(consumer);
    let sending = load(producer.clone(), "m", n());
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.kill().unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    server.restart().unwrap();
    let back = Instant::now();
    let confirmed = sending.await.unwrap();
    producer.send(Message::new("after")).await.unwrap();
    counting
        .has_all(
            &["after".to_owned()],
            Duration::from_secs(5).saturating_sub(back.elapsed()).max(Duration::from_secs(1)),
        )
        .await;
    counting.has_all(&confirmed, SOON).await;
    assert_eq!(confirmed.len(), n(), "unknown outcomes were sent again");
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_connections_lose_nothing() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, consumer) = all(&server.url()).await;
    let counting = Counting::start(consumer);
    let mut admin = raw(&server);
    // Idle and in a blocked read.
    let killed: i64 = ask(&mut admin, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    assert!(killed >= 2, "{killed}");
    // In pipelines and acks.
    let sending = load(producer, "m", n());
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let _: i64 = ask(&mut admin, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    }
    let confirmed = sending.await.unwrap();
    assert_eq!(confirmed.len(), n());
    counting.has_all(&confirmed, SOON).await;
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_server_is_waited_for() {
    let Some(mut server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let consumer = broker.subscribe(sub().lease(Duration::from_secs(60))).await.unwrap();
    let producer = broker.producer(TOPIC).await.unwrap();
    let counting = Counting::start(consumer);
    let sending = load(producer, "m", n());
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.freeze().unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    server.thaw().unwrap();
    let confirmed = sending.await.unwrap();
    assert_eq!(confirmed.len(), n());
    counting.has_all(&confirmed, SOON).await;
    let (counts, consumer) = counting.stop().await;
    assert!(counts.values().all(|n| *n == 1), "the same connections went on, so nothing came twice");
    drop(consumer);
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_half_open_socket_is_noticed_within_20_s() {
    let Ok((server, mut proxy)) = Proxy::with_server(Kind::Redis, 7) else { return };
    let (broker, producer, consumer) = all(&server.url_at(proxy.port())).await;
    let counting = Counting::start(consumer);
    producer.send(Message::new("before")).await.unwrap();
    counting.has_all(&["before".to_owned()], SOON).await;
    proxy.begin(Trouble::Swallow(Direction::Both)).unwrap();
    let sending = tokio::spawn({
        let producer = producer.clone();
        async move { producer.send(Message::new("into the void")).await }
    });
    tokio::time::sleep(Duration::from_secs(2)).await;
    proxy.end(Trouble::Swallow(Direction::Both)).unwrap();
    let healed = Instant::now();
    sending.await.unwrap().unwrap();
    producer.send(Message::new("after")).await.unwrap();
    counting.has_all(&["into the void".to_owned(), "after".to_owned()], Duration::from_secs(20)).await;
    assert!(healed.elapsed() < Duration::from_secs(20), "{:?}", healed.elapsed());
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_misbehaves_under_load_loses_nothing() {
    use Direction::{Both, ToClient, ToServer};
    let troubles = [
        Trouble::Cut,
        Trouble::Refuse,
        Trouble::Swallow(Both),
        Trouble::Swallow(ToServer),
        Trouble::Swallow(ToClient),
        Trouble::Stall(Both),
        Trouble::Stall(ToClient),
        Trouble::Delay(Both, Duration::from_millis(100)),
        Trouble::Slow(Both, 20_000),
        Trouble::CutAfter(ToServer, 3_000),
        Trouble::CutAfter(ToClient, 3_000),
    ];
    for (at, trouble) in troubles.into_iter().enumerate() {
        let Ok((server, mut proxy)) = Proxy::with_server(Kind::Redis, at as u64) else { return };
        let url = format!("{}?response_timeout=2s", server.url_at(proxy.port()));
        let (broker, producer, consumer) = all(&url).await;
        let counting = Counting::start(consumer);
        let sending = load(producer, "m", n());
        // In the middle of it.
        while counting.counts().len() < n() / 10 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        proxy.begin(trouble).unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        proxy.end(trouble).unwrap();
        let confirmed = sending.await.unwrap();
        assert_eq!(confirmed.len(), n(), "{trouble}: unknown outcomes were sent again");
        counting.has_all(&confirmed, SOON).await;
        close(broker).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn flushall_under_load_is_one_gap_and_the_consumer_goes_on() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, consumer) = all(&server.url()).await;
    let mut events = consumer.control().events();
    let counting = Counting::start(consumer);
    let sending = load(producer.clone(), "m", n());
    tokio::time::sleep(Duration::from_millis(100)).await;
    let _: () = ask(&mut raw(&server), &["FLUSHALL"]);
    sending.await.unwrap();
    let after = load(producer, "after", 200).await.unwrap();
    assert_eq!(after.len(), 200);
    counting.has_all(&after, SOON).await;
    let gaps = events.drain().into_iter().filter(|e| matches!(e, Event::Gap(_))).count();
    assert_eq!(gaps, 1);
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn out_of_memory_is_full_and_settling_goes_on() {
    let Some(server) = server(false, &["maxmemory-policy noeviction"]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    for i in 0..3 {
        producer.send(Message::new(format!("m{i}"))).await.unwrap();
    }
    let mut admin = raw(&server);
    let _: () = ask(&mut admin, &["CONFIG", "SET", "maxmemory", "1"]);
    let refused = producer.send(Message::new("x")).await.unwrap_err();
    assert_eq!((refused.kind(), refused.outcome()), (ErrorKind::Full, Some(Outcome::Rejected)), "{refused}");
    assert!(matches!(next(&mut consumer).await.ack().await, Settled::Confirmed(_)));
    assert!(matches!(next(&mut consumer).await.dead_letter("bad").await, Settled::Confirmed(_)));
    assert!(matches!(next(&mut consumer).await.nack("again").await, Settled::Confirmed(_)));
    let _: () = ask(&mut admin, &["CONFIG", "SET", "maxmemory", "0"]);
    producer.send(Message::new("y")).await.unwrap();
    let mut rest = [label(&next(&mut consumer).await), label(&next(&mut consumer).await)];
    rest.sort();
    assert_eq!(rest, ["m2", "y"]);
    let _ = broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_replica_is_waited_out() {
    let (Some(server), Some(other)) = (server(false, &[]), server(false, &[])) else { return };
    let (broker, producer, consumer) = all(&server.url()).await;
    let counting = Counting::start(consumer);
    producer.send(Message::new("before")).await.unwrap();
    let mut admin = raw(&server);
    let _: () = ask(&mut admin, &["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
    let sending = load(producer, "m", 100);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!sending.is_finished(), "a replica takes no sends");
    let _: () = ask(&mut admin, &["REPLICAOF", "NO", "ONE"]);
    let confirmed = sending.await.unwrap();
    assert_eq!(confirmed.len(), 100, "sent when it was a master again");
    counting.has_all(&confirmed, SOON).await;
    close(broker).await;
    let started = Instant::now();
    let _: () = ask(&mut admin, &["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
    let only = open(&format!("{}?connect_timeout=1s", server.url())).await;
    let error = only.producer(ProducerSpec::new("t").group("g")).await.err().expect("a replica makes no group");
    assert!(error.to_string().contains("replica"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(10));
    close(only).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forgotten_scripts_are_sent_again() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    let mut admin = raw(&server);
    for i in 0..20 {
        producer.send(Message::new(format!("m{i}"))).await.unwrap();
        let _: () = ask(&mut admin, &["SCRIPT", "FLUSH"]);
        let delivery = next(&mut consumer).await;
        assert!(matches!(delivery.nack_after(Duration::ZERO, "x").await, Settled::Confirmed(_)));
        let _: () = ask(&mut admin, &["SCRIPT", "FLUSH"]);
        let again = next(&mut consumer).await;
        assert_eq!((label(&again), again.attempt()), (format!("m{i}"), 2));
        assert!(matches!(again.ack().await, Settled::Confirmed(_)));
    }
    assert_eq!(pending(&mut admin), 0);
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_rights_and_wrong_types_are_told_at_start() {
    let Some(server) = server(false, &[]) else { return };
    let mut admin = raw(&server);
    let _: () =
        ask(&mut admin, &["ACL", "SETUSER", "app", "on", ">pw", "~orders*", "~{orders}*", "&*", "+@all", "-xadd"]);
    let broker = open(&format!("redis://app:pw@127.0.0.1:{}", server.port())).await;
    let producer = broker.producer(TOPIC).await.unwrap();
    let refused = producer.send(Message::new("x")).await.unwrap_err();
    assert_eq!((refused.kind(), refused.outcome()), (ErrorKind::Permission, Some(Outcome::Rejected)), "{refused}");
    let denied = broker.producer("others").await.err().expect("another key");
    assert_eq!(denied.kind(), ErrorKind::Permission, "{denied}");
    let _: () = ask(&mut admin, &["SET", "{orders}..audit..dlq", "x"]);
    let denied = broker.subscribe(mq_api::Subscription::group(TOPIC, "audit")).await.err().expect("no stream");
    assert_eq!(denied.kind(), ErrorKind::Topology, "{denied}");
    close(broker).await;
    let wrong =
        mq_redis::connect(&format!("redis://app:wrong@127.0.0.1:{}", server.port())).await.err().expect("refused");
    assert_eq!(wrong.kind(), ErrorKind::Auth, "{wrong}");
    assert!(!format!("{wrong:?}").contains("wrong@"));
    let _: () = ask(&mut admin, &["SET", "texts", "x"]);
    let broker = open(&server.url()).await;
    let denied = broker.producer("texts").await.err().expect("no stream");
    assert_eq!(denied.kind(), ErrorKind::Topology, "{denied}");
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_killed_with_1000_in_hand_is_taken_over() {
    let Ok((server, mut proxy)) = Proxy::with_server(Kind::Redis, 3) else { return };
    let broker = open(&server.url()).await;
    let producer = broker.producer(TOPIC).await.unwrap();
    let victim = open(&server.url_at(proxy.port())).await;
    let mut holding = victim.subscribe(sub().max_in_flight(1000)).await.unwrap();
    let sent = load(producer, "m", 1000).await.unwrap();
    let mut held = Vec::new();
    while held.len() < 1000 {
        held.push(next(&mut holding).await);
    }
    let heir = Counting::start(broker.subscribe(sub()).await.unwrap());
    proxy.begin(Trouble::Refuse).unwrap();
    let bound = broker.capabilities().takeover_bound(LEASE);
    heir.has_all(&sent, bound + Duration::from_secs(2)).await;
    let (counts, consumer) = heir.stop().await;
    assert_eq!((counts.len(), counts.values().max()), (1000, Some(&1)));
    drop(consumer);
    close(broker).await;
    drop(held);
    let _ = victim.close(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_members_reclaim_at_once_and_nothing_is_taken_twice() {
    let Ok((server, mut proxy)) = Proxy::with_server(Kind::Redis, 3) else { return };
    let broker = open(&server.url()).await;
    let producer = broker.producer(TOPIC).await.unwrap();
    let victim = open(&server.url_at(proxy.port())).await;
    let mut holding = victim.subscribe(sub()).await.unwrap();
    let sent = load(producer, "m", 200).await.unwrap();
    let mut held = Vec::new();
    while held.len() < 200 {
        held.push(next(&mut holding).await);
    }
    let heirs = [
        Counting::start(broker.subscribe(sub()).await.unwrap()),
        Counting::start(broker.subscribe(sub()).await.unwrap()),
    ];
    proxy.begin(Trouble::Refuse).unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let n: usize = heirs.iter().map(|h| h.counts().len()).sum();
        if n >= sent.len() {
            break;
        }
        assert!(Instant::now() < until, "{n} taken over");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let total: u32 = heirs.iter().map(|h| h.counts().values().sum::<u32>()).sum();
    assert_eq!(total, 200);
    close(broker).await;
    drop(held);
    let _ = victim.close(Duration::ZERO).await;
}

#[test]
fn a_runtime_blocked_for_three_leases_loses_nothing() {
    let Some(server) = server(false, &[]) else { return };
    let url = server.url();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let broker = open(&url).await;
        let mut consumer = broker.subscribe(sub().member("slow")).await.unwrap();
        let producer = broker.producer(TOPIC).await.unwrap();
        producer.send(Message::new("m")).await.unwrap();
        let delivery = next(&mut consumer).await;
        // A second member, on a thread of its own, that would take over whatever it could.
        let thief = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let broker = open(&url).await;
                let mut thief = broker.subscribe(sub()).await.unwrap();
                quiet(&mut thief, LEASE * 4).await;
                close(broker).await;
            });
        });
        std::thread::sleep(LEASE * 3);
        assert!(delivery.is_owned());
        assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
        quiet(&mut consumer, LEASE).await;
        close(broker).await;
        thief.join().expect("nothing was taken over");
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_cancelled_polls_lose_nothing() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    let sending = load(producer, "m", 1000);
    let mut seen = std::collections::BTreeSet::new();
    let mut cancelled = 0;
    while seen.len() < 1000 || cancelled < 1000 {
        let polled = tokio::select! { biased;
            got = consumer.recv() => Some(got),
            () = tokio::task::yield_now() => None,
        };
        match polled {
            None => cancelled += 1,
            Some(got) => {
                let delivery = got.unwrap().unwrap();
                assert!(seen.insert(label(&delivery)), "twice: {delivery:?}");
                assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
            }
        }
    }
    assert_eq!(sending.await.unwrap().len(), 1000);
    quiet(&mut consumer, LEASE * 2).await;
    assert_eq!(pending(&mut raw(&server)), 0);
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_megabytes_go_both_ways() {
    let Some(server) = server(false, &[]) else { return };
    let (broker, producer, mut consumer) = all(&server.url()).await;
    let body = vec![7u8; 999_000];
    let sending = tokio::spawn(async move {
        let sent = join_all((0..64).map(|_| producer.send(Message::new(body.clone())))).await;
        sent.into_iter().filter(Result::is_ok).count()
    });
    for _ in 0..64 {
        let delivery = next(&mut consumer).await;
        assert_eq!(delivery.payload_bytes().len(), 999_000);
        assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    }
    assert_eq!(sending.await.unwrap(), 64);
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_loads_is_waited_for() {
    // Each key takes two milliseconds to load, and clients are answered meanwhile.
    let slow = ["key-load-delay 2000", "loading-process-events-interval-bytes 1024"];
    let Some(mut server) = server(false, &slow) else { return };
    let (broker, producer, consumer) = all(&server.url()).await;
    let counting = Counting::start(consumer);
    producer.send(Message::new("before")).await.unwrap();
    counting.has_all(&["before".to_owned()], SOON).await;
    let mut admin = raw(&server);
    let mut filler = redis::pipe();
    for i in 0..1000 {
        filler.cmd("SET").arg(format!("filler{i}")).arg("x");
    }
    filler.exec(&mut admin).unwrap();
    let _: () = ask(&mut admin, &["SAVE"]);
    let port = server.port();
    server.kill().unwrap();
    let loading = std::thread::spawn(move || {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap();
        let says = |e: redis::RedisError| e.code() == Some("LOADING");
        let ask = || client.get_connection().and_then(|mut c| redis::cmd("XLEN").arg(TOPIC).query::<i64>(&mut c));
        mq_testbed::eventually(Duration::from_secs(20), || ask().err().is_some_and(says))
    });
    let sending = load(producer, "m", 100);
    server.restart().unwrap();
    let back = Instant::now();
    assert!(loading.join().unwrap(), "the server loaded too fast to prove anything");
    let confirmed = sending.await.unwrap();
    assert_eq!(confirmed.len(), 100);
    counting.has_all(&confirmed, Duration::from_secs(5).saturating_sub(back.elapsed())).await;
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_held_while_the_server_stands_still_stays_owned() {
    let Some(mut server) = server(false, &[]) else { return };
    let (holder, other) = (open(&server.url()).await, open(&server.url()).await);
    let producer = holder.producer(TOPIC).await.unwrap();
    let mut first = holder.subscribe(sub().member("holder")).await.unwrap();
    producer.send(Message::new("held")).await.unwrap();
    let held = next(&mut first).await;
    let mut second = other.subscribe(sub().member("other")).await.unwrap();
    // Whose command the server finds first when it goes on is chance: several times.
    for round in 0..8 {
        server.freeze().unwrap();
        tokio::time::sleep(LEASE.mul_f64(1.5)).await;
        server.thaw().unwrap();
        quiet(&mut second, LEASE.mul_f64(0.5)).await;
        assert!(held.is_owned(), "round {round}: its holder lived all the time");
    }
    assert!(matches!(held.ack().await, Settled::Confirmed(_)));
    close(holder).await;
    close(other).await;
}
