//! What RabbitMQ does to its clients: queues deleted, channels closed, time-outs, alarms, rights. Each test has a server of its
//! own, and counts exactly.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use control::{Rabbit, load, next, quiet, text};
use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use mq_api::{
    BrokerExt, ConsumerExt, ErrorKind, Event, GapCause, HealthState, Message, Outcome, ProducerSpec, Provisioning,
    SendOptions, Settled, Subscription,
};
use mq_testbed::RabbitOptions;
use std::time::{Duration, Instant};

/// A fault of the server itself, or done to it.
async fn server(kind: &str, fault: impl FnOnce(&mut Rabbit)) {
    let mut rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect(&format!("queue_type={kind}")).await;
    let through = load::through(&broker, load::size(), || fault(&mut rabbit)).await;
    through.judge(Duration::from_secs(5));
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_under_load_quorum() {
    server("quorum", |r| r.kill_and_restart()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_under_load_classic() {
    server("classic", |r| r.kill_and_restart()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_under_load() {
    server("quorum", |r| r.stop_and_restart()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn frozen_for_ten_seconds() {
    server("quorum", |r| r.freeze(Duration::from_secs(10))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_closed_by_an_operator() {
    server("quorum", |r| {
        r.control(&["close_all_connections", "maintenance"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_queue_is_made_again_and_reported() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = broker.producer("t").await.unwrap();
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    let mut events = consumer.control().events();
    producer.send(Message::new("held")).await.unwrap();
    let held = next(&mut consumer).await;
    let (_raw, channel) = rabbit.raw().await;
    channel.queue_delete("t..g".into(), QueueDeleteOptions::default()).await.unwrap();
    let event = tokio::time::timeout(Duration::from_secs(5), events.next()).await.expect("a gap").unwrap();
    assert!(matches!(event, Event::Gap(ref gap) if gap.cause == GapCause::Deleted), "{event:?}");
    assert_eq!(held.ack().await, Settled::Stale);
    let began = Instant::now();
    while producer.send(Message::new("after")).await.is_err() {
        assert!(began.elapsed() < Duration::from_secs(5));
    }
    assert_eq!(text(&next(&mut consumer).await), "after");
    assert_eq!(events.drain().len(), 0, "one gap");
    broker.close(Duration::from_secs(5)).await;
}

/// The queue is made again by the first who misses it, and is there when the second looks: both lost what was in it.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_queue_is_reported_to_members_who_find_it_made_again() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    for kind in ["quorum", "classic"] {
        let brokers =
            [rabbit.connect(&format!("queue_type={kind}")).await, rabbit.connect(&format!("queue_type={kind}")).await];
        let mut members = Vec::new();
        for broker in &brokers {
            members.push(broker.subscribe(Subscription::group(kind, "g")).await.unwrap());
        }
        let events: Vec<_> = members.iter().map(|member| member.control().events()).collect();
        let (_raw, channel) = rabbit.raw().await;
        channel.queue_delete(format!("{kind}..g").into(), QueueDeleteOptions::default()).await.unwrap();
        for mut events in events {
            let event = tokio::time::timeout(Duration::from_secs(20), events.next()).await.expect("a gap").unwrap();
            assert!(matches!(event, Event::Gap(ref gap) if gap.cause == GapCause::Deleted), "{kind}: {event:?}");
            assert_eq!(events.drain().len(), 0, "{kind}: one gap");
        }
        for member in &members {
            // It runs again, and so reads what is sent now.
            let running = || member.control().health().current().state == HealthState::Running;
            assert!(tokio::task::block_in_place(|| mq_testbed::eventually(Duration::from_secs(20), running)), "{kind}");
        }
        brokers[0].producer(kind).await.unwrap().send(Message::new("after")).await.unwrap();
        let [one, two] = &mut members[..] else { unreachable!("two") };
        let got = tokio::time::timeout(Duration::from_secs(20), async {
            tokio::select! { got = one.recv() => got, got = two.recv() => got }
        });
        assert_eq!(text(&got.await.expect("in time").unwrap().unwrap()), "after");
        for broker in brokers {
            broker.close(Duration::from_secs(5)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_whose_queue_is_gone_are_not_lost() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    let (_raw, channel) = rabbit.raw().await;
    channel.queue_delete("t..g..dlq".into(), QueueDeleteOptions::default()).await.unwrap();
    producer.send(Message::new("bad")).await.unwrap();
    // Returned to us, made again, written again; the original stays until then.
    assert!(next(&mut consumer).await.dead_letter("bad").await.is_ok());
    let letters = broker.admin().dead_letters(&"t".into(), &"g".into(), 10).await.unwrap();
    assert_eq!(letters.iter().map(|l| l.message.payload_bytes()).collect::<Vec<_>>(), [b"bad"]);
    let backlog = broker.admin().backlog(&"t".into(), &"g".into()).await.unwrap();
    assert!(backlog.ready.admits(0), "{backlog:?}");
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_exchange_closes_the_channel_and_is_made_again() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    let (_raw, channel) = rabbit.raw().await;
    channel.exchange_delete("t".into(), ExchangeDeleteOptions::default()).await.unwrap();
    // 404 on its channel, neighbours included; the next session makes exchange and binding again.
    let sends: Vec<_> = (0..50).map(|n| producer.send(Message::new(n.to_string()))).collect();
    for send in sends {
        send.await.unwrap();
    }
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < 50 {
        let delivery = next(&mut consumer).await;
        seen.insert(text(&delivery));
        delivery.ack().await;
    }
    broker.close(Duration::from_secs(5)).await;
}

/// The exchange goes and comes back by the hand of one who knows nothing of the others: their queues stand, bound to nothing.
#[tokio::test(flavor = "multi_thread")]
async fn members_are_bound_again_when_their_exchange_was_made_again_by_another() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let mut member = broker.subscribe(Subscription::group("t", "deaf")).await.unwrap();
    let mut everyone = broker.subscribe(Subscription::broadcast("t")).await.unwrap();
    let other = rabbit.connect("").await;
    let (_raw, channel) = rabbit.raw().await;
    channel.exchange_delete("t".into(), ExchangeDeleteOptions::default()).await.unwrap();
    let producer = other.producer(ProducerSpec::new("t").group("other")).await.unwrap();
    let health = member.control().health();
    let bound = tokio::time::timeout(Duration::from_secs(30), async {
        let (mut one, mut two) = (false, false);
        while !(one && two) {
            producer.send(Message::new("x")).await.unwrap();
            let pause = Duration::from_millis(200);
            if let Ok(got) = tokio::time::timeout(pause, member.recv()).await {
                got.unwrap().unwrap().ack().await;
                one = true;
            }
            two |= tokio::time::timeout(pause, everyone.recv()).await.is_ok();
        }
    });
    bound.await.unwrap_or_else(|_| panic!("sends are confirmed and a member hears nothing: {:?}", health.current()));
    broker.close(Duration::from_secs(5)).await;
    other.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_timeout_ends_in_a_running_consumer() {
    let rabbit = Rabbit::start(RabbitOptions::default().consumer_timeout(Duration::from_secs(2)));
    for kind in ["quorum", "classic"] {
        let broker = rabbit.connect(&format!("queue_type={kind}")).await;
        let producer = broker.producer(kind).await.unwrap();
        let mut consumer = broker.subscribe(Subscription::group(kind, "g")).await.unwrap();
        producer.send(Message::new("slow")).await.unwrap();
        let held = next(&mut consumer).await;
        tokio::time::timeout(Duration::from_secs(20), held.lost()).await.expect("the token fires");
        assert_eq!(held.ack().await, Settled::Stale, "{kind}");
        let again = next(&mut consumer).await;
        assert_eq!(text(&again), "slow");
        assert_eq!(again.ack().await, Settled::Confirmed(mq_api::Durability::Sent));
        producer.send(Message::new("next")).await.unwrap();
        let delivery = next(&mut consumer).await;
        assert_eq!(text(&delivery), "next");
        delivery.ack().await;
        quiet(&mut consumer, Duration::from_secs(1)).await;
        broker.close(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn under_an_alarm_sends_wait_and_acks_go_out() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    for n in 0..10 {
        producer.send(Message::new(n.to_string())).await.unwrap();
    }
    rabbit.control(&["set_vm_memory_high_watermark", "absolute", "1MB"]);
    // Who publishes is told of the alarm: one that is not ours, for ours has not published yet.
    let (watching, channel) = rabbit.raw().await;
    let (options, properties) = Default::default();
    channel.basic_publish("".into(), "nowhere".into(), options, b"", properties).await.unwrap();
    assert!(mq_testbed::eventually(Duration::from_secs(20), || watching.status().blocked()), "no alarm");
    let late = producer.send_with(Message::new("late"), SendOptions::timeout(Duration::from_secs(1)));
    let waiting = producer.send(Message::new("waiting"));
    let began = Instant::now();
    let error = late.await.unwrap_err();
    assert_eq!((error.kind(), error.outcome()), (ErrorKind::Timeout, Some(Outcome::Unknown)), "{error}");
    assert!(began.elapsed() < Duration::from_secs(2));
    // A consumer that starts now, and one's acknowledgements, are on the connection that never publishes.
    let mut sub = Subscription::group("t", "g");
    sub.provisioning = Provisioning::None;
    sub.dead_letter = mq_api::DeadLetterPolicy::Discard;
    let other = rabbit.connect("").await;
    let consumer = tokio::time::timeout(Duration::from_secs(5), other.subscribe(sub)).await;
    if let Ok(Ok(mut consumer)) = consumer {
        for _ in 0..10 {
            assert!(next(&mut consumer).await.ack().await.is_ok());
        }
    } else {
        panic!("no consumer under an alarm: {:?}", consumer.map(|c| c.map(|_| ())));
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    rabbit.control(&["set_vm_memory_high_watermark", "0.6"]);
    waiting.await.unwrap();
    broker.close(Duration::from_secs(5)).await;
    other.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_password_and_missing_rights_fail_at_once() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let began = Instant::now();
    let wrong = mq_amqp::connect(&rabbit.url().replace("guest:guest", "guest:secretword")).await.err().unwrap();
    assert_eq!(wrong.kind(), ErrorKind::Auth, "{wrong}");
    assert!(!format!("{wrong:?}").contains("secretword"), "{wrong:?}");
    let nowhere = mq_amqp::connect(&rabbit.url().replace("%2f", "nowhere")).await.err().unwrap();
    assert_eq!(nowhere.kind(), ErrorKind::Permission, "{nowhere}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    rabbit.control(&["add_user", "reader", "pw"]);
    rabbit.control(&["set_permissions", "reader", "", "", ".*"]);
    let reader = mq_amqp::connect(&rabbit.url().replace("guest:guest", "reader:pw")).await.unwrap();
    let refused = reader.subscribe(Subscription::group("t", "g")).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Permission, "{refused}");
    let broker = rabbit.connect("").await;
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    producer.send(Message::new("x")).await.unwrap();
    let mut sub = Subscription::group("t", "g");
    sub.provisioning = Provisioning::None;
    let mut consumer = reader.subscribe(sub).await.unwrap();
    next(&mut consumer).await.ack().await;
    reader.close(Duration::from_secs(5)).await;
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_down_at_start_is_waited_for() {
    let mut rabbit = Rabbit::start(RabbitOptions::default());
    rabbit.stop();
    let url = rabbit.url();
    let error = mq_amqp::connect(&format!("{url}?connect_timeout=1s")).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let connecting = tokio::spawn(async move { mq_amqp::connect(&url).await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    tokio::task::block_in_place(|| rabbit.restart());
    let broker = connecting.await.unwrap().unwrap();
    assert_eq!(broker.health().current().state, HealthState::Running);
    broker.close(Duration::from_secs(5)).await;
}

/// Acknowledgements of a connection that is gone reach nobody: not the message itself, not one that has its tag now.
#[tokio::test(flavor = "multi_thread")]
async fn an_ack_across_a_reconnect_is_stale_and_settles_nothing() {
    for kind in ["quorum", "classic"] {
        let rabbit = Rabbit::start(RabbitOptions::default());
        let broker = rabbit.connect(&format!("queue_type={kind}")).await;
        let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
        let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
        for n in 0..10 {
            producer.send(Message::new(n.to_string())).await.unwrap();
        }
        let mut old = Vec::new();
        for _ in 0..10 {
            old.push(next(&mut consumer).await);
        }
        rabbit.control(&["close_all_connections", "maintenance"]);
        tokio::time::timeout(Duration::from_secs(20), old[0].lost()).await.expect("the token fires");
        // The new ones are in hand when the old handles are used.
        let mut new = Vec::new();
        for _ in 0..10 {
            new.push(next(&mut consumer).await);
        }
        for delivery in old {
            assert_eq!(delivery.ack().await, Settled::Stale, "{kind}");
        }
        assert_eq!(new.iter().map(text).collect::<std::collections::BTreeSet<_>>().len(), 10);
        for delivery in new {
            assert_eq!(delivery.ack().await, Settled::Confirmed(mq_api::Durability::Sent), "{kind}");
        }
        quiet(&mut consumer, Duration::from_secs(1)).await;
        consumer.control().close(Duration::from_secs(5)).await;
        let backlog = broker.admin().backlog(&"t".into(), &"g".into()).await.unwrap();
        // On a classic queue what came back came by a delay queue, and all that is known since is a bound.
        assert!(backlog.ready.admits(0) && !backlog.ready.admits(1), "{kind}: {backlog:?}");
        assert!(backlog.dead.admits(0), "{kind}: {backlog:?}");
        assert!(broker.admin().dead_letters(&"t".into(), &"g".into(), 10).await.unwrap().is_empty(), "{kind}");
        broker.close(Duration::from_secs(5)).await;
    }
}

/// `kill -9` while messages are being dead-lettered and delayed: each is handled or among the dead letters, none is neither.
#[tokio::test(flavor = "multi_thread")]
async fn killed_while_delaying_and_dead_lettering() {
    const ALL: u32 = 600;
    for kind in ["quorum", "classic"] {
        let mut rabbit = Rabbit::start(RabbitOptions::default());
        let broker = rabbit.connect(&format!("queue_type={kind}")).await;
        let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
        let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
        producer.send(Message::new("first")).await.unwrap();
        next(&mut consumer).await.nack_after(Duration::from_millis(1_100), "to make the delay queue").await;
        next(&mut consumer).await.ack().await;
        Rabbit::lasting().await;
        let sends: Vec<_> = (0..ALL).map(|n| producer.send(Message::new(n.to_string()))).collect();
        for send in sends {
            send.await.unwrap();
        }
        let (mut handled, mut taken, mut killed) = (std::collections::BTreeSet::new(), 0, None);
        while let Ok(got) = tokio::time::timeout(Duration::from_secs(15), consumer.recv()).await {
            let delivery = got.unwrap().expect("not closed");
            let n: u32 = text(&delivery).parse().unwrap();
            match (n % 2, delivery.attempt()) {
                (0, _) => drop(delivery.dead_letter("even")),
                (_, 1) => drop(delivery.nack_after(Duration::from_millis(1_100), "odd")),
                _ => {
                    handled.insert(n);
                    drop(delivery.ack());
                }
            }
            taken += 1;
            if taken == ALL / 3 {
                tokio::task::block_in_place(|| rabbit.kill_and_restart());
                killed = Some(Instant::now());
            }
        }
        assert!(killed.is_some());
        let letters = broker.admin().dead_letters(&"t".into(), &"g".into(), 10_000).await.unwrap();
        let dead: std::collections::BTreeSet<u32> = letters
            .iter()
            .map(|letter| String::from_utf8_lossy(letter.message.payload_bytes()).parse().unwrap())
            .collect();
        println!("{kind}: {} taken, {} handled, {} dead letters", taken, handled.len(), letters.len());
        let missing: Vec<u32> =
            (0..ALL).filter(|n| if n % 2 == 0 { !dead.contains(n) } else { !handled.contains(n) }).collect();
        assert!(missing.is_empty(), "{kind}: lost {missing:?}");
        assert!(dead.iter().all(|n| n % 2 == 0), "{kind}: only those are dead letters");
        broker.close(Duration::from_secs(5)).await;
    }
}

/// The server closes the channel (406) over a message that it finds too large: that one is refused for good, and its neighbours
/// are sent again.
#[tokio::test(flavor = "multi_thread")]
async fn a_channel_closed_by_406_costs_no_neighbour() {
    let options = RabbitOptions { lines: vec!["max_message_size = 65536".into()], ..RabbitOptions::default() };
    let rabbit = Rabbit::start(options);
    let broker = rabbit.connect("").await;
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    let began = Instant::now();
    let sends: Vec<_> = (0..100u32)
        .map(|n| {
            let size = if n == 50 { 70_000 } else { 10 };
            (n, producer.send(Message::new(format!("{n}{}", " ".repeat(size)))))
        })
        .collect();
    for (n, send) in sends {
        match (n, send.await) {
            (50, Err(error)) => {
                assert_eq!((error.kind(), error.outcome()), (ErrorKind::TooLarge, Some(Outcome::Rejected)), "{error}");
            }
            (50, Ok(_)) => panic!("the server took it"),
            (n, result) => drop(result.unwrap_or_else(|e| panic!("{n}: {e}"))),
        }
    }
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < 99 {
        let delivery = next(&mut consumer).await;
        seen.insert(text(&delivery).trim().parse::<u32>().unwrap());
        delivery.ack().await;
    }
    assert!(!seen.contains(&50));
    broker.close(Duration::from_secs(5)).await;
}
