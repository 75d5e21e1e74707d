//! Streams: a log beside the queues, read by anybody from any place, as often as they like.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use control::{Rabbit, next, quiet, text};
use lapin::options::QueueDeleteOptions;
use mq_api::{
    Broker, BrokerExt, Consumer, ErrorKind, Event, GapCause, Message, Producer, ProducerSpec, Settled, Subscription,
    Topic,
};
use mq_testbed::RabbitOptions;
use mq_testbed::proxy::Trouble;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

async fn producer(broker: &Arc<dyn Broker>, topic: &str) -> Arc<dyn Producer> {
    broker.producer(ProducerSpec::new(topic).native("queue-type", "stream")).await.unwrap()
}

async fn reader(broker: &Arc<dyn Broker>, topic: &str, offset: &str) -> Box<dyn Consumer> {
    let sub = Subscription::broadcast(topic).native("queue-type", "stream").native("stream-offset", offset);
    broker.subscribe(sub).await.unwrap()
}

async fn send(producer: &Arc<dyn Producer>, numbers: std::ops::Range<u64>) {
    for n in numbers {
        producer.send(Message::new(n.to_string())).await.unwrap();
    }
}

/// Reads these, in order, each at its place.
async fn expect(reader: &mut Box<dyn Consumer>, numbers: std::ops::Range<u64>) {
    for n in numbers {
        let delivery = next(reader).await;
        assert_eq!((text(&delivery), delivery.position().major), (n.to_string(), n));
        assert_eq!(delivery.ack().await, Settled::Untracked, "there is nothing to acknowledge");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_start_where_they_are_told() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = producer(&broker, "t").await;
    send(&producer, 0..100).await;
    // Times are by the second: the next chunk is clearly later.
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    let noon = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    send(&producer, 100..150).await;
    for (offset, first) in [("first", 0), ("17", 17), (&format!("@{noon}"), 100), ("1h", 0)] {
        let mut reader = reader(&broker, "t", offset).await;
        expect(&mut reader, first..150).await;
        quiet(&mut reader, Duration::from_millis(200)).await;
    }
    let mut from_now = reader(&broker, "t", "next").await;
    send(&producer, 150..160).await;
    expect(&mut from_now, 150..160).await;
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_loses_nothing_and_goes_on_after_a_restart() {
    let mut rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = producer(&broker, "t").await;
    Rabbit::lasting().await;
    let sends: Vec<_> = (0..5_000u64).map(|n| producer.send(Message::new(n.to_string()))).collect();
    for send in sends {
        send.await.unwrap();
    }
    let sub = Subscription::broadcast("t").native("queue-type", "stream").native("stream-offset", "first");
    let mut reader = broker.subscribe(sub.max_in_flight(50)).await.unwrap();
    let mut events = reader.control().events();
    expect(&mut reader, 0..2_000).await;
    tokio::task::block_in_place(|| rabbit.kill_and_restart());
    expect(&mut reader, 2_000..5_000).await;
    send(&producer, 5_000..5_010).await;
    expect(&mut reader, 5_000..5_010).await;
    assert_eq!(events.drain().len(), 0, "no lag, no gap");
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_stream_is_made_again_and_read_from_its_beginning() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = producer(&broker, "t").await;
    send(&producer, 0..20).await;
    let mut reader = reader(&broker, "t", "first").await;
    let mut events = reader.control().events();
    expect(&mut reader, 0..20).await;
    let (_raw, channel) = rabbit.raw().await;
    channel.queue_delete("t..stream".into(), QueueDeleteOptions::default()).await.unwrap();
    let event = tokio::time::timeout(Duration::from_secs(20), events.next()).await.expect("a gap").unwrap();
    assert!(matches!(event, Event::Gap(ref gap) if gap.cause == GapCause::Deleted), "{event:?}");
    // Fewer than before: the places of the old one mean nothing in the new one, not even after one more reconnect.
    send(&producer, 0..5).await;
    expect(&mut reader, 0..5).await;
    rabbit.control(&["close_all_connections", "maintenance"]);
    send(&producer, 5..10).await;
    expect(&mut reader, 5..10).await;
    assert_eq!(events.drain().len(), 0, "one gap");
    broker.close(Duration::from_secs(5)).await;
}

// One of them makes the stream again, and each has to notice that its places mean nothing any more.
#[tokio::test(flavor = "multi_thread")]
async fn every_reader_of_a_stream_that_is_made_again_reads_it_from_its_beginning() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = producer(&broker, "t").await;
    send(&producer, 0..20).await;
    let mut readers = Vec::new();
    // Two of one name, as a program calls both by the name of its host.
    for name in ["host", "host", "other"] {
        let sub = Subscription::broadcast("t").native("queue-type", "stream").native("stream-offset", "first");
        readers.push(broker.subscribe(sub.member(name)).await.unwrap());
    }
    for reader in &mut readers {
        expect(reader, 0..20).await;
    }
    let mut events: Vec<_> = readers.iter().map(|reader| reader.control().events()).collect();
    let (_raw, channel) = rabbit.raw().await;
    for round in 0..3 {
        channel.queue_delete("t..stream".into(), QueueDeleteOptions::default()).await.unwrap();
        for (number, events) in events.iter_mut().enumerate() {
            let event = tokio::time::timeout(Duration::from_secs(20), events.next()).await;
            let health = readers[number].control().health().current();
            let event = event.unwrap_or_else(|_| panic!("round {round}, reader {number}: no gap; {health:?}")).unwrap();
            assert!(matches!(event, Event::Gap(ref gap) if gap.cause == GapCause::Deleted), "{round}: {event:?}");
        }
        send(&producer, 0..5).await;
        for reader in &mut readers {
            expect(reader, 0..5).await;
        }
    }
    for events in &mut events {
        assert_eq!(events.drain().len(), 0, "one gap each time");
    }
    broker.close(Duration::from_secs(5)).await;
}

/// The reader was away when its stream was deleted and made again, so that nobody told it.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_made_again_while_the_reader_was_away_is_read_from_its_beginning() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let (mut proxy, far) = rabbit.far().await;
    let near = rabbit.connect("").await;
    let (_raw, channel) = rabbit.raw().await;
    let first = producer(&near, "t").await;
    send(&first, 0..20).await;
    let mut reader = reader(&far, "t", "first").await;
    let mut events = reader.control().events();
    expect(&mut reader, 0..20).await;
    // Shorter than what was read, as long, and longer.
    for (round, n) in [5, 5, 40].into_iter().enumerate() {
        proxy.begin(Trouble::Refuse).unwrap();
        channel.queue_delete("t..stream".into(), QueueDeleteOptions::default()).await.unwrap();
        let again = producer(&near, "t").await;
        send(&again, 0..n).await;
        proxy.end(Trouble::Refuse).unwrap();
        let event = tokio::time::timeout(Duration::from_secs(30), events.next()).await;
        let event = event.unwrap_or_else(|_| panic!("round {round}: it waits for what will never come")).unwrap();
        assert!(matches!(event, Event::Gap(ref gap) if gap.cause == GapCause::Deleted), "{event:?}");
        expect(&mut reader, 0..n).await;
    }
    // The same stream goes on where it was, without a gap.
    proxy.begin(Trouble::Cut).unwrap();
    let again = producer(&near, "t").await;
    send(&again, 40..60).await;
    expect(&mut reader, 40..60).await;
    quiet(&mut reader, Duration::from_millis(200)).await;
    assert_eq!(events.drain().len(), 0, "one gap each time");
    for broker in [near, far] {
        broker.close(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_topic_takes_its_stream_along() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    send(&producer(&broker, "t").await, 0..3).await;
    assert!(broker.admin().delete_topic(&"t".into()).await.unwrap());
    send(&producer(&broker, "t").await, 0..1).await;
    let mut reader = reader(&broker, "t", "first").await;
    expect(&mut reader, 0..1).await;
    quiet(&mut reader, Duration::from_millis(500)).await;
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_stream_cannot_do_is_refused_at_once() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let group = Subscription::group("t", "g").native("queue-type", "stream");
    let error = broker.subscribe(group).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("broadcast"), "{error}");
    let spec = ProducerSpec::new("t").native("queue-type", "stream").group("g");
    assert_eq!(broker.producer(spec).await.err().unwrap().kind(), ErrorKind::Unsupported);
    let missing = Subscription::broadcast(Topic::native("nothing")).native("queue-type", "stream");
    let error = broker.subscribe(missing).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Topology, "{error}");
    broker.close(Duration::from_secs(5)).await;
}

/// Nothing that came is taken while it is paused, which is no sign of another stream.
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_reader_that_comes_back_goes_on_where_it_was() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = producer(&broker, "t").await;
    send(&producer, 0..10).await;
    let mut reader = reader(&broker, "t", "first").await;
    let mut events = reader.control().events();
    expect(&mut reader, 0..10).await;
    reader.control().pause();
    rabbit.control(&["close_all_connections", "maintenance"]);
    send(&producer, 10..20).await;
    quiet(&mut reader, Duration::from_secs(8)).await;
    reader.control().resume();
    expect(&mut reader, 10..20).await;
    assert_eq!(events.drain(), [], "no gap");
    broker.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_retention_removed_while_the_reader_was_away_is_told() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let (_raw, channel) = rabbit.raw().await;
    let mut arguments = lapin::types::FieldTable::default();
    arguments.insert("x-queue-type".into(), lapin::types::AMQPValue::LongString("stream".into()));
    for (name, n) in [("x-max-length-bytes", 20_000), ("x-stream-max-segment-size-bytes", 5_000)] {
        arguments.insert(name.into(), lapin::types::AMQPValue::LongLongInt(n));
    }
    let durable = lapin::options::QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare("s".into(), durable, arguments).await.unwrap();
    let (mut proxy, far) = rabbit.far().await;
    let near = rabbit.connect("").await;
    let producer = near.producer(Topic::native("s")).await.unwrap();
    send(&producer, 0..10).await;
    let sub = Subscription::broadcast(Topic::native("s")).native("queue-type", "stream");
    let mut reader = far.subscribe(sub.native("stream-offset", "first")).await.unwrap();
    let mut events = reader.control().events();
    expect(&mut reader, 0..10).await;
    proxy.begin(Trouble::Refuse).unwrap();
    for n in 10..200u64 {
        producer.send(Message::new(format!("{n}{}", " ".repeat(1_000)))).await.unwrap();
    }
    proxy.end(Trouble::Refuse).unwrap();
    let first = next(&mut reader).await.position().major;
    assert!(first > 10, "the stream kept everything");
    let event = tokio::time::timeout(Duration::from_secs(5), events.next()).await.expect("a gap").unwrap();
    let Event::Gap(gap) = event else { panic!("{event:?}") };
    assert_eq!((gap.cause, gap.count), (GapCause::Retention, Some(first - 10)));
    for n in first + 1..200 {
        assert_eq!(next(&mut reader).await.position().major, n);
    }
    assert_eq!(events.drain(), [], "one gap");
    near.close(Duration::from_secs(5)).await;
    far.close(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_on_the_stream_of_another_program_is_refused_when_it_shows() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let broker = rabbit.connect("").await;
    let producer = producer(&broker, "t").await;
    let mut member = broker.subscribe(Subscription::group(Topic::native("t..stream"), "g")).await.unwrap();
    send(&producer, 0..3).await;
    let got = tokio::time::timeout(Duration::from_secs(10), mq_api::ConsumerExt::recv(&mut member)).await;
    let error = got.expect("in time").expect_err("a stream takes nothing back");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    broker.close(Duration::from_secs(5)).await;
}
