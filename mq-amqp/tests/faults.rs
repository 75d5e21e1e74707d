//! What RabbitMQ does to its clients: queues deleted, channels closed, time-outs, alarms, rights. Each test has a server of its
//! own, and counts exactly.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use control::Rabbit;
use lapin::options::{
    BasicPublishOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use mq_api::{
    BrokerExt, Consumer, ConsumerExt, Delivery, ErrorKind, Event, GapCause, HealthState, Message, Outcome,
    ProducerSpec, Provisioning, RetryPolicy, SendOptions, Settled, Subscription, Topic,
};
use mq_testbed::RabbitOptions;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

async fn next(consumer: &mut Box<dyn Consumer>) -> Delivery {
    tokio::time::timeout(Duration::from_secs(60), consumer.recv()).await.expect("in time").unwrap().expect("a delivery")
}

async fn quiet(consumer: &mut Box<dyn Consumer>, time: Duration) {
    let got = tokio::time::timeout(time, consumer.recv()).await;
    assert!(got.is_err(), "{got:?}");
}

fn text(delivery: &Delivery) -> String {
    String::from_utf8_lossy(delivery.payload_bytes()).into_owned()
}

/// Sends `n` while `fault` happens, receives and acks all: none confirmed is lost.
async fn through(kind: &str, n: usize, fault: impl FnOnce(&mut Rabbit)) {
    let mut rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect(&format!("queue_type={kind}")).await;
    let producer = broker.producer(ProducerSpec::new("t").group("g")).await.unwrap();
    let mut consumer = broker.subscribe(Subscription::group("t", "g")).await.unwrap();
    // A quorum queue that was just declared is lost by a kill: known of the server, not ours to mend.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let sending = tokio::spawn(async move {
        let mut flying = Vec::new();
        let (mut confirmed, mut failed) = (Vec::new(), 0);
        for at in 0..n {
            flying.push((at, producer.send(Message::new(at.to_string()))));
            if flying.len() == 500 {
                for (at, send) in flying.drain(..) {
                    match send.await {
                        Ok(_) => confirmed.push(at),
                        Err(e) => {
                            assert_eq!(e.outcome(), Some(Outcome::Unknown), "{e}");
                            failed += 1;
                        }
                    }
                }
            }
        }
        for (at, send) in flying {
            if send.await.is_ok() {
                confirmed.push(at);
            }
        }
        (confirmed, failed)
    });
    let mut seen: BTreeMap<usize, usize> = BTreeMap::new();
    let mut count = 0;
    while count < n / 3 {
        let delivery = next(&mut consumer).await;
        *seen.entry(text(&delivery).parse().unwrap()).or_default() += 1;
        drop(delivery.ack());
        count += 1;
    }
    let began = Instant::now();
    tokio::task::block_in_place(|| fault(&mut rabbit));
    let back = Instant::now();
    let mut first = None;
    while let Ok(got) = tokio::time::timeout(Duration::from_secs(15), consumer.recv()).await {
        let delivery = got.unwrap().expect("not closed");
        first.get_or_insert_with(|| back.elapsed());
        *seen.entry(text(&delivery).parse().unwrap()).or_default() += 1;
        drop(delivery.ack());
    }
    let (confirmed, failed) = sending.await.unwrap();
    let lost: Vec<_> = confirmed.iter().filter(|at| !seen.contains_key(at)).collect();
    let twice = seen.values().filter(|n| **n > 1).count();
    println!(
        "{kind}: {} confirmed, {failed} unknown, {} lost, {twice} more than once, down {:?}, first {:?} after it was back",
        confirmed.len(),
        lost.len(),
        back - began,
        first
    );
    assert!(lost.is_empty(), "lost {lost:?}");
    assert!(first.is_some_and(|f| f < Duration::from_secs(5)), "fetching again after {first:?}");
    assert_eq!(confirmed.len() + failed, n);
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_under_load_quorum() {
    through("quorum", 20_000, |r| r.kill_and_restart()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_under_load_classic() {
    through("classic", 20_000, |r| r.kill_and_restart()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_under_load() {
    through("quorum", 20_000, |r| r.stop_and_restart()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn frozen_for_ten_seconds() {
    through("quorum", 20_000, |r| r.freeze(Duration::from_secs(10))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_closed_by_an_operator() {
    through("quorum", 20_000, |r| {
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
    tokio::time::sleep(Duration::from_secs(1)).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn another_queue_type_is_explained_and_final() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let quorum = rabbit.connect("").await;
    quorum.subscribe(Subscription::group("t", "g")).await.unwrap().control().close(Duration::from_secs(5)).await;
    let classic = rabbit.connect("queue_type=classic").await;
    let began = Instant::now();
    let error = classic.subscribe(Subscription::group("t", "g")).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Topology, "{error}");
    let words = error.to_string();
    assert!(words.contains("classic") && words.contains("quorum") && words.contains("t..g"), "{words}");
    assert!(began.elapsed() < Duration::from_secs(3));
    // What users tune is in no argument: other attempts, delays and prefetch start, and no second queue appears.
    let mut sub = Subscription::group("t", "g").max_in_flight(7);
    sub.retry = RetryPolicy::attempts(9).delays([Duration::from_secs(3)]);
    quorum.subscribe(sub).await.unwrap();
    quorum.close(Duration::from_secs(5)).await;
    classic.close(Duration::from_secs(5)).await;
}

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
        for (wanted, least) in [("short", 5_300), ("long", 40_500)] {
            let delivery = next(&mut consumer).await;
            let took = began.elapsed();
            println!("{kind}: {wanted} after {took:?}");
            assert_eq!((text(&delivery).as_str(), delivery.attempt()), (wanted, 2));
            assert!(took >= Duration::from_millis(least), "early: {took:?}");
            if wanted == "long" {
                assert!(took <= Duration::from_millis(least + least / 10), "late: {took:?}");
            }
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
async fn native_queues_and_exchanges_and_other_programs() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let (_raw, channel) = rabbit.raw().await;
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare("jobs".into(), durable, FieldTable::default()).await.unwrap();
    let broker = rabbit.connect("").await;
    // Sent to the queue by us, and by somebody else with headers of every type.
    let producer = broker.producer(Topic::native("jobs")).await.unwrap();
    producer.send(Message::new("ours")).await.unwrap();
    let mut headers = FieldTable::default();
    headers.insert("n".into(), AMQPValue::LongInt(7));
    headers.insert("ok".into(), AMQPValue::Boolean(true));
    let properties = lapin::BasicProperties::default().with_headers(headers).with_reply_to("back".into());
    channel
        .basic_publish("".into(), "jobs".into(), BasicPublishOptions::default(), b"theirs", properties)
        .await
        .unwrap();
    let mut consumer = broker.subscribe(Subscription::group(Topic::native("queue://jobs"), "g")).await.unwrap();
    let delivery = next(&mut consumer).await;
    assert_eq!(text(&delivery), "ours");
    delivery.ack().await;
    let delivery = next(&mut consumer).await;
    assert_eq!(text(&delivery), "theirs");
    assert_eq!(delivery.headers.get_str("n"), Some("7"));
    assert_eq!(delivery.headers.get_str("amqp.reply-to"), Some("back"));
    // Its retry keeps what it came with, and its dead letter goes to the queue of the library.
    delivery.nack_after(Duration::from_millis(300), "again").await;
    let again = next(&mut consumer).await;
    assert_eq!((again.attempt(), again.headers.get_str("amqp.reply-to")), (2, Some("back")));
    again.dead_letter("bad").await;
    let letters = broker.admin().dead_letters(&Topic::native("queue://jobs"), &"g".into(), 10).await.unwrap();
    assert_eq!(letters.len(), 1);
    // A topic exchange of somebody else, by routing pattern; a headers exchange, by matching.
    let kind = lapin::ExchangeKind::Topic;
    channel.exchange_declare("logs".into(), kind, Default::default(), FieldTable::default()).await.unwrap();
    let kind = lapin::ExchangeKind::Headers;
    channel.exchange_declare("match".into(), kind, Default::default(), FieldTable::default()).await.unwrap();
    let logs = Topic::native("exchange://logs");
    let sub = Subscription::group(&logs, "errors").native("routing-key", "*.error");
    let mut errors = broker.subscribe(sub).await.unwrap();
    let to_logs = broker.producer(logs).await.unwrap();
    to_logs.send(Message::new("1").header("amqp.routing-key", "shop.error")).await.unwrap();
    let unroutable = to_logs.send(Message::new("2").header("amqp.routing-key", "shop.info")).await.unwrap_err();
    assert_eq!(unroutable.kind(), ErrorKind::Unroutable);
    let delivery = next(&mut errors).await;
    assert_eq!((text(&delivery).as_str(), delivery.headers.get_str("amqp.routing-key")), ("1", Some("shop.error")));
    delivery.ack().await;
    let matching = Topic::native("exchange://match");
    let sub = Subscription::group(&matching, "paper").native("headers", "format=pdf,size=a4");
    let mut paper = broker.subscribe(sub).await.unwrap();
    let to_match = broker.producer(matching).await.unwrap();
    to_match.send(Message::new("a4").header("format", "pdf").header("size", "a4")).await.unwrap();
    assert!(to_match.send(Message::new("a3").header("format", "pdf").header("size", "a3")).await.is_err());
    next(&mut paper).await.ack().await;
    // A queue that is not there is nobody's to make.
    let missing = broker.subscribe(Subscription::group(Topic::native("nothing"), "g")).await.err().unwrap();
    assert_eq!(missing.kind(), ErrorKind::Topology, "{missing}");
    let _ = QueueBindOptions::default();
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn priorities_limits_and_single_active_consumers() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("queue_type=classic").await;
    let sub = Subscription::group("t", "urgent").native("max-priority", "5").max_in_flight(1);
    let consumer = broker.subscribe(sub.clone()).await.unwrap();
    consumer.control().close(Duration::from_secs(5)).await;
    let producer = broker.producer("t").await.unwrap();
    for n in 0..5 {
        producer.send(Message::new(n.to_string()).header("amqp.priority", n.to_string())).await.unwrap();
    }
    let mut consumer = broker.subscribe(sub).await.unwrap();
    for n in (0..5).rev() {
        let delivery = next(&mut consumer).await;
        assert_eq!(text(&delivery), n.to_string());
        delivery.ack().await;
    }
    let error = broker.subscribe(Subscription::group("t", "x").native("max-priority", "many")).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Config);
    let single = Subscription::group("s", "one").native("single-active", "true");
    let mut first = broker.subscribe(single.clone()).await.unwrap();
    let mut second = broker.subscribe(single).await.unwrap();
    let producer = broker.producer("s").await.unwrap();
    for n in 0..10 {
        producer.send(Message::new(n.to_string())).await.unwrap();
    }
    for n in 0..10 {
        let delivery = next(&mut first).await;
        assert_eq!(text(&delivery), n.to_string());
        delivery.ack().await;
    }
    quiet(&mut second, Duration::from_millis(300)).await;
    first.control().close(Duration::from_secs(5)).await;
    producer.send(Message::new("10")).await.unwrap();
    assert_eq!(text(&next(&mut second).await), "10");
    // At most so many wait: more are refused, by all that is known.
    let spec = ProducerSpec::new("full").group("g").retention(mq_api::Retention::Handled { max: 5 });
    let producer = broker.producer(spec.retry_for(Duration::ZERO)).await.unwrap();
    let mut refused = 0;
    for n in 0..20 {
        if let Err(e) = producer.send(Message::new(n.to_string())).await {
            assert_eq!(e.outcome(), Some(Outcome::Unknown), "a nack of a fan-out: {e}");
            refused += 1;
        }
    }
    assert!((14..=15).contains(&refused), "{refused}");
    broker.close(Duration::from_secs(5)).await;
}
