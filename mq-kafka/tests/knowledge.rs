//! What a commit says, and what becomes of it in the rarer cases: written by somebody else, too large for the broker, or of
//! messages that retention took. On librdkafka's mock cluster; no server is needed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod world;

use mq_api::{BrokerExt, Consumer, ConsumerExt, ErrorKind, Event, GapCause, Message, ProducerSpec, Settled};
use rdkafka::consumer::{CommitMode, Consumer as _};
use rdkafka::types::{RDKafkaApiKey as Api, RDKafkaRespErr as E};
use rdkafka::{Offset, TopicPartitionList};
use std::collections::BTreeMap;
use std::time::Duration;
use world::bed::{Bed, TOPIC};
use world::within;

impl Bed {
    async fn send(&self, payloads: impl Iterator<Item = Vec<u8>>) {
        let producer = within(self.broker.producer(ProducerSpec::new(TOPIC))).await.unwrap();
        let sends: Vec<_> = payloads.map(|payload| producer.send(Message::new(payload))).collect();
        for sending in sends {
            within(sending).await.unwrap();
        }
    }

    /// Commits for the group, as some other program would.
    fn commit(&self, offset: i64, metadata: &str) {
        let mut list = TopicPartitionList::new();
        let mut entry = list.add_partition(TOPIC, 0);
        entry.set_offset(Offset::Offset(offset)).unwrap();
        entry.set_metadata(metadata);
        self.client().commit(&list, CommitMode::Sync).unwrap();
    }
}

fn numbers(range: std::ops::Range<u32>) -> impl Iterator<Item = Vec<u8>> {
    range.map(|n| n.to_string().into_bytes())
}

fn put(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Metadata that says that every second message from the commit on, `n` of them, was tried once.
fn tried(n: u64) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut bytes = vec![0, 0];
    put(&mut bytes, n);
    for i in 0..n {
        bytes.extend([u8::from(i > 0), 1, 2, 0]);
    }
    bytes.extend([0, 0]);
    let mut text = "mq1.".to_owned();
    for chunk in bytes.chunks(3) {
        let n = chunk.iter().fold(0u32, |n, b| n << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
        for i in 0..=chunk.len() {
            text.push(char::from(ALPHABET[(n >> (18 - 6 * i)) as usize & 63]));
        }
    }
    text
}

/// What a member left is as much as fits; one who comes after it has more to say, and delivers all the same.
#[tokio::test(flavor = "multi_thread")]
async fn attempts_that_just_fitted_do_not_stop_the_next_owner() {
    let bed = Bed::start().await;
    let runs = 763;
    bed.send(numbers(0..1_600)).await;
    let metadata = tried(runs);
    assert!(metadata.len() <= 4_096 && tried(runs + 4).len() > 4_090, "{}", metadata.len());
    tokio::task::block_in_place(|| bed.commit(0, &metadata));
    let mut consumer = bed.consumer(Bed::sub()).await;
    for n in 0..1_600u64 {
        let got = within(consumer.recv()).await.unwrap().unwrap();
        assert_eq!(got.payload_bytes(), n.to_string().as_bytes());
        if n < 200 {
            let attempt = if n % 2 == 0 { 2 } else { 1 };
            assert_eq!(got.attempt(), attempt, "message {n}");
        }
        drop(got.ack());
    }
    bed.close().await;
}

/// A broker that takes no metadata keeps only how far the group is: nothing beyond that may be called confirmed.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_commit_cannot_say_is_not_confirmed() {
    let bed = Bed::start().await;
    let mut consumer = bed.consumer(Bed::sub()).await;
    bed.cluster.request_errors(Api::OffsetCommit, &[E::RD_KAFKA_RESP_ERR_OFFSET_METADATA_TOO_LARGE]);
    bed.send(numbers(0..10)).await;
    let mut held = Vec::new();
    for _ in 0..10 {
        held.push(within(consumer.recv()).await.unwrap().unwrap());
    }
    let mut rest = held.split_off(1);
    let mut answers = BTreeMap::new();
    for delivery in rest.drain(..) {
        let number: u32 = std::str::from_utf8(delivery.payload_bytes()).unwrap().parse().unwrap();
        answers.insert(number, within(delivery.ack()).await);
    }
    // It dies with the first in hand.
    let report = within(consumer.control().close(Duration::from_millis(100))).await;
    assert_eq!(report.given_back, 1, "{report:?}");
    drop(held);
    let mut next = bed.consumer(Bed::sub()).await;
    let mut again = Vec::new();
    while let Ok(got) = tokio::time::timeout(Duration::from_secs(5), next.recv()).await {
        let got = got.unwrap().unwrap();
        again.push(std::str::from_utf8(got.payload_bytes()).unwrap().parse::<u32>().unwrap());
        let settled = within(got.ack()).await;
        assert!(matches!(settled, Settled::Confirmed(_)), "in order, so that the offset says it: {settled:?}");
    }
    let wrong: Vec<_> = again.iter().filter(|n| matches!(answers.get(n), Some(Settled::Confirmed(_)))).collect();
    assert!(wrong.is_empty(), "{wrong:?} were confirmed and came again: {answers:?}");
    assert!(again.contains(&0));
    bed.close().await;
}

/// Retention that overtakes a member while it runs is told, as one that met it while nobody read.
#[tokio::test(flavor = "multi_thread")]
async fn retention_that_overtakes_a_running_member_is_a_gap() {
    let bed = Bed::start().await;
    let sub = Bed::sub()
        .max_in_flight(1)
        .native("librdkafka.queued.min.messages", "1")
        .native("librdkafka.queued.max.messages.kbytes", "64");
    let mut consumer = bed.consumer(sub).await;
    let mut events = consumer.control().events();
    let mut state = 1u64;
    // Nothing that compresses.
    let mut noise = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    let mut numbered = |n: u32| {
        let mut payload = n.to_be_bytes().to_vec();
        payload.resize_with(16_000, &mut noise);
        payload
    };
    bed.send((0..2).map(&mut numbered)).await;
    let first = within(consumer.recv()).await.unwrap().unwrap();
    // The mock keeps 5 MiB of a partition: some 320 of these.
    bed.send((2..2_002).map(&mut numbered)).await;
    assert!(within(first.ack()).await.is_ok());
    let mut seen = vec![0];
    while seen.last() != Some(&2_001) {
        let got = within(consumer.recv()).await.unwrap().unwrap();
        seen.push(u32::from_be_bytes(got.payload_bytes()[..4].try_into().unwrap()));
        assert!(within(got.ack()).await.is_ok());
    }
    let jumps: Vec<(u32, u32)> = seen.windows(2).filter(|w| w[1] != w[0] + 1).map(|w| (w[0], w[1])).collect();
    assert_eq!(jumps.len(), 1, "the mock took messages from before it: {jumps:?}");
    let gap = within(async {
        loop {
            let found = events.drain().into_iter().find_map(|e| if let Event::Gap(gap) = e { Some(gap) } else { None });
            if let Some(gap) = found {
                return gap;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    assert_eq!(gap.cause, GapCause::Retention);
    assert_eq!(gap.count, Some(u64::from(jumps[0].1 - jumps[0].0 - 1)), "{gap:?}");
    bed.close().await;
}

/// Properties by which a send would never be answered, sends would overtake each other, or headers be lost.
#[tokio::test(flavor = "multi_thread")]
async fn properties_that_break_a_promise_are_refused_by_name() {
    let bed = Bed::start().await;
    for (name, value) in [
        ("delivery.report.only.error", "true"),
        ("queuing.strategy", "lifo"),
        ("api.version.request", "false"),
        ("retries", "5"),
    ] {
        let spec = ProducerSpec::new(TOPIC).native(format!("librdkafka.{name}"), value);
        let error = match within(bed.broker.producer(spec)).await {
            Err(error) => error,
            Ok(producer) => {
                let sent =
                    tokio::time::timeout(Duration::from_secs(5), producer.send(Message::new("x").header("h", "v")))
                        .await;
                panic!("'{name}' was taken, and a send said {sent:?}");
            }
        };
        assert!(error.kind() == ErrorKind::Config && error.to_string().contains(name), "{error}");
    }
    bed.close().await;
}
