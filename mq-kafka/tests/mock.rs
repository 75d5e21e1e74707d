//! Answers that a real broker gives too seldom to wait for, given by librdkafka's own mock cluster: commits and sends that fail
//! in each way, with exact counts. No server is needed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod world;

use mq_api::{
    BrokerExt, Consumer, ConsumerExt, ErrorKind, Message, Outcome, Producer, ProducerSpec, Settled, Subscription,
};
use rdkafka::consumer::Consumer as _;
use rdkafka::mocking::MockCluster;
use rdkafka::types::{RDKafkaApiKey as Api, RDKafkaRespErr as E};
use rdkafka::{Offset, TopicPartitionList};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use world::bed::{Bed, TOPIC};
use world::within;

impl Bed {
    async fn producer(&self) -> Arc<dyn Producer> {
        within(self.broker.producer(ProducerSpec::new(TOPIC))).await.unwrap()
    }

    /// What the group's commit says.
    fn committed(&self) -> Option<i64> {
        let mut list = TopicPartitionList::new();
        list.add_partition(TOPIC, 0);
        let found = self.client().committed_offsets(list, Duration::from_secs(10)).unwrap();
        match found.find_partition(TOPIC, 0)?.offset() {
            Offset::Offset(at) => Some(at),
            _ => None,
        }
    }
}

async fn send(producer: &Arc<dyn Producer>, numbers: std::ops::Range<u32>) {
    for n in numbers {
        within(producer.send(Message::new(n.to_string()))).await.unwrap();
    }
}

/// Takes `n` deliveries and acknowledges each; how often each came, and the answers.
async fn take(consumer: &mut Box<dyn Consumer>, n: usize) -> (BTreeMap<u32, u32>, Vec<Settled>) {
    let (mut counts, mut answers) = (BTreeMap::new(), Vec::new());
    for _ in 0..n {
        let delivery = within(consumer.recv()).await.unwrap().unwrap();
        let number = std::str::from_utf8(delivery.payload_bytes()).unwrap().parse().unwrap();
        *counts.entry(number).or_default() += 1;
        answers.push(delivery.ack());
    }
    let mut settled = Vec::new();
    for answer in answers {
        settled.push(within(answer).await);
    }
    (counts, settled)
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_that_fail_for_a_while_are_made_again() {
    let bed = Bed::start().await;
    let (producer, mut consumer) = (bed.producer().await, bed.consumer(Bed::sub()).await);
    let mut sent = 0;
    for code in [
        E::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
        E::RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE,
        E::RD_KAFKA_RESP_ERR_NOT_COORDINATOR,
        E::RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT,
        E::RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS,
        E::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED,
        E::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART,
        E::RD_KAFKA_RESP_ERR_INVALID_COMMIT_OFFSET_SIZE,
        E::RD_KAFKA_RESP_ERR__TRANSPORT,
    ] {
        bed.cluster.request_errors(Api::OffsetCommit, &[code, code]);
        send(&producer, sent..sent + 10).await;
        let (counts, settled) = take(&mut consumer, 10).await;
        assert_eq!(counts, (sent..sent + 10).map(|n| (n, 1)).collect(), "{code:?}");
        assert!(settled.iter().all(|s| matches!(s, Settled::Confirmed(_))), "{code:?}: {settled:?}");
        bed.cluster.clear_request_errors(Api::OffsetCommit);
        sent += 10;
        let committed = tokio::task::block_in_place(|| bed.committed());
        assert_eq!(committed, Some(i64::from(sent)), "{code:?}");
    }
    bed.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_that_is_too_large_is_left_out() {
    let bed = Bed::start().await;
    let (producer, mut consumer) = (bed.producer().await, bed.consumer(Bed::sub()).await);
    bed.cluster.request_errors(Api::OffsetCommit, &[E::RD_KAFKA_RESP_ERR_OFFSET_METADATA_TOO_LARGE]);
    send(&producer, 0..10).await;
    let (counts, settled) = take(&mut consumer, 10).await;
    assert_eq!(counts.len(), 10);
    assert!(settled.iter().all(|s| matches!(s, Settled::Confirmed(_))), "{settled:?}");
    assert_eq!(tokio::task::block_in_place(|| bed.committed()), Some(10));
    bed.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_of_a_member_that_was_put_out_confirms_nothing() {
    for code in [E::RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION, E::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID] {
        let bed = Bed::start().await;
        let (producer, mut consumer) = (bed.producer().await, bed.consumer(Bed::sub()).await);
        send(&producer, 0..5).await;
        let (_, settled) = take(&mut consumer, 5).await;
        assert!(settled.iter().all(|s| matches!(s, Settled::Confirmed(_))), "{code:?}: {settled:?}");
        bed.cluster.request_errors(Api::OffsetCommit, &[code; 20]);
        send(&producer, 5..10).await;
        let (counts, settled) = take(&mut consumer, 5).await;
        assert_eq!(counts, (5..10).map(|n| (n, 1)).collect(), "{code:?}");
        // Written and refused, so that nobody knows; never confirmed.
        assert!(settled.iter().all(|s| matches!(s, Settled::Unknown | Settled::Stale)), "{code:?}: {settled:?}");
        bed.cluster.clear_request_errors(Api::OffsetCommit);
        // They come again, once each, and what was confirmed does not.
        let (counts, settled) = take(&mut consumer, 5).await;
        assert_eq!(counts, (5..10).map(|n| (n, 1)).collect(), "{code:?}");
        assert!(settled.iter().all(|s| matches!(s, Settled::Confirmed(_))), "{code:?}: {settled:?}");
        assert_eq!(tokio::task::block_in_place(|| bed.committed()), Some(10), "{code:?}");
        bed.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sends_that_fail_for_a_while_are_stored_once() {
    let bed = Bed::start().await;
    let (producer, mut consumer) = (bed.producer().await, bed.consumer(Bed::sub()).await);
    let mut sent = 0;
    for code in [
        E::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION,
        E::RD_KAFKA_RESP_ERR_LEADER_NOT_AVAILABLE,
        E::RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT,
        E::RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS,
        E::RD_KAFKA_RESP_ERR__TRANSPORT,
    ] {
        bed.cluster.request_errors(Api::Produce, &[code, code]);
        send(&producer, sent..sent + 10).await;
        let (counts, _) = take(&mut consumer, 10).await;
        assert_eq!(counts, (sent..sent + 10).map(|n| (n, 1)).collect(), "{code:?}");
        bed.cluster.clear_request_errors(Api::Produce);
        sent += 10;
    }
    bed.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_send_says_so_and_the_producer_goes_on() {
    let bed = Bed::start().await;
    let producer = bed.producer().await;
    for (code, kind) in [
        (E::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED, ErrorKind::Permission),
        (E::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE, ErrorKind::TooLarge),
        (E::RD_KAFKA_RESP_ERR_INVALID_RECORD, ErrorKind::Rejected),
    ] {
        bed.cluster.request_errors(Api::Produce, &[code]);
        let error = within(producer.send(Message::new("refused"))).await.unwrap_err();
        assert_eq!((error.kind(), error.outcome()), (kind, Some(Outcome::Rejected)), "{code:?}: {error}");
        bed.cluster.clear_request_errors(Api::Produce);
        let next = async {
            // What the client keeps of the refusal lasts until it asks for the topic again.
            while within(producer.send(Message::new("next"))).await.is_err() {}
        };
        within(next).await;
    }
    bed.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_is_waited_for() {
    let bed = Bed::start().await;
    let spec = ProducerSpec::new(TOPIC).native("librdkafka.queue.buffering.max.messages", "10");
    let producer = within(bed.broker.producer(spec)).await.unwrap();
    let sends: Vec<_> = (0..1_000).map(|n: u32| producer.send(Message::new(n.to_string()))).collect();
    let mut confirmed = 0;
    for sending in sends {
        within(sending).await.unwrap();
        confirmed += 1;
    }
    assert_eq!(confirmed, 1_000);
    let mut consumer = bed.consumer(Bed::sub()).await;
    let (counts, _) = take(&mut consumer, 1_000).await;
    assert_eq!(counts, (0..1_000).map(|n| (n, 1)).collect());
    bed.close().await;
}

/// The vectors of Apache Kafka's own test of its partitioner, so that a key is where every other client looks for it.
#[tokio::test(flavor = "multi_thread")]
async fn keys_go_where_the_java_client_puts_them() {
    let bed = Bed::start().await;
    bed.cluster.create_topic("keyed", 12, 1).unwrap();
    let producer = within(bed.broker.producer(ProducerSpec::new("keyed").partitions(12))).await.unwrap();
    for (key, hash) in [
        ("21", -973_932_308i32),
        ("foobar", -790_332_482),
        ("a-little-bit-long-string", -985_981_536),
        ("a-little-bit-longer-string", -1_486_304_829),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
        ("abc", 479_470_107),
    ] {
        let receipt = within(producer.send(Message::new("x").key(key))).await.unwrap();
        assert_eq!(receipt.partition, Some((hash & 0x7fff_ffff) as u32 % 12), "{key}");
    }
    // An empty key is a key: always the same partition.
    let mut empty = std::collections::BTreeSet::new();
    for _ in 0..20 {
        empty.insert(within(producer.send(Message::new("x").key(""))).await.unwrap().partition);
    }
    assert_eq!(empty.len(), 1, "{empty:?}");
    bed.close().await;
}

/// A queue that holds little is filled again at once, not once a second.
#[tokio::test(flavor = "multi_thread")]
async fn a_small_queue_does_not_stall() {
    let bed = Bed::start().await;
    let producer = bed.producer().await;
    let sub = Subscription::group(TOPIC, "crew")
        .lease(Duration::from_secs(6))
        .native("librdkafka.fetch.wait.max.ms", "20")
        .native("librdkafka.queued.min.messages", "1");
    // One record batch for each, so that a fetch brings one.
    send(&producer, 0..200).await;
    let mut consumer = within(bed.broker.subscribe(sub)).await.unwrap();
    let (counts, _) = take(&mut consumer, 200).await;
    assert_eq!(counts, (0..200).map(|n| (n, 1)).collect());
    bed.close().await;
}

/// A close may meet any moment of joining: the assignment may be on its way, told and not yet taken, or just begun. The mock's
/// group is complete three seconds after its first member came.
#[tokio::test(flavor = "multi_thread")]
async fn closing_while_the_group_forms_ends() {
    let cluster = MockCluster::new(1).unwrap();
    let moments = 24u64;
    cluster.create_topic(TOPIC, 1, 1).unwrap();
    for n in 0..moments {
        for end in ["dlq", "retry"] {
            cluster.create_topic(&format!("work..crew{n}..{end}"), 1, 1).unwrap();
        }
    }
    let url = format!("kafka://{}?min_session=1s", cluster.bootstrap_servers());
    let closing = (0..moments).map(|n| {
        let url = url.clone();
        tokio::spawn(async move {
            let broker = within(mq_kafka::connect(&url)).await.unwrap();
            let sub = Subscription::group(TOPIC, format!("crew{n}")).lease(Duration::from_secs(6));
            let consumer = within(broker.subscribe(sub)).await.unwrap();
            // It is the moment that differs.
            tokio::time::sleep(Duration::from_millis(50 * n)).await;
            let began = std::time::Instant::now();
            within(consumer.control().close(Duration::from_secs(2))).await;
            let report = within(broker.close(Duration::from_secs(2))).await;
            (n, began.elapsed(), report)
        })
    });
    for closed in closing.collect::<Vec<_>>() {
        let (n, took, report) = closed.await.unwrap();
        assert!(took < Duration::from_secs(10), "closing {} ms after the subscription took {took:?}", 50 * n);
        assert!(report.is_clean(), "{n}: {report:?}");
    }
}

/// What librdkafka calls fatal ends its producer. Another one is made, and whatever was handed to the first is sent by it.
#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_is_made_anew_fails_no_send() {
    let bed = Bed::start().await;
    // One message to a request, so that most are not written yet when it strikes.
    let spec = ProducerSpec::new(TOPIC).native("librdkafka.batch.num.messages", "1");
    let producer = within(bed.broker.producer(spec)).await.unwrap();
    send(&producer, 0..1).await;
    // As a broker answers that lost what it knew of the producer: nothing that is under way is stored.
    bed.cluster.request_errors(Api::Produce, &[E::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER; 5]);
    let sends: Vec<_> = (1..501).map(|n: u32| producer.send(Message::new(n.to_string()).key("k"))).collect();
    let mut failed = Vec::new();
    for (n, sending) in (1u32..).zip(sends) {
        if let Err(error) = within(sending).await {
            failed.push((n, error));
        }
    }
    assert!(failed.is_empty(), "{} of 500 failed, first {:?}", failed.len(), failed.first());
    let mut consumer = bed.consumer(Bed::sub()).await;
    let mut order = Vec::new();
    while order.last() != Some(&500) {
        let got = within(consumer.recv()).await.unwrap().unwrap();
        let number: u32 = std::str::from_utf8(got.payload_bytes()).unwrap().parse().unwrap();
        if !order.contains(&number) {
            order.push(number);
        }
        drop(got.ack());
    }
    assert_eq!(order, (0..=500).collect::<Vec<_>>());
    bed.close().await;
}
