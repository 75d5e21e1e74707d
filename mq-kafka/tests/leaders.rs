//! A partition without a leader: an election is on, or its broker is away. Nothing may be made up of it, and nobody is told that
//! it does not exist. On librdkafka's mock cluster; no server is needed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod world;

use mq_api::{BrokerExt, ConsumerExt, Message, ProducerSpec, ReplayFrom, Result, Start, Subscription, Topic};
use rdkafka::consumer::Consumer as _;
use rdkafka::mocking::MockCoordinator;
use rdkafka::types::{RDKafkaApiKey as Api, RDKafkaRespErr as E};
use rdkafka::{Offset, TopicPartitionList};
use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};
use world::bed::Bed;
use world::within;

const TWO: &str = "two";
/// In which a single question is answered, and in which the mock forms a group.
const ONE: Duration = Duration::from_secs(2);
const GROUP: Duration = Duration::from_secs(8);

fn sub() -> Subscription {
    Subscription::group(TWO, "crew").lease(Duration::from_secs(6)).native("librdkafka.fetch.wait.max.ms", "20")
}

/// A topic of two partitions with messages in both, led by the first and the last broker. How many each has.
async fn bed_of(brokers: i32) -> (Bed, [u64; 2]) {
    let bed = Bed::of(brokers).await;
    for (topic, partitions) in [(TWO, 2), ("two..crew..dlq", 1), ("two..crew..retry", 1)] {
        bed.cluster.create_topic(topic, partitions, 1).unwrap();
        bed.cluster.partition_leader(topic, 0, Some(1)).unwrap();
    }
    bed.cluster.partition_leader(TWO, 1, Some(brokers)).unwrap();
    for group in ["two..crew", "two..crew..retry"] {
        bed.cluster.coordinator(MockCoordinator::Group(group.to_owned()), 1).unwrap();
    }
    let producer = within(bed.broker.producer(ProducerSpec::new(TWO))).await.unwrap();
    let mut counts = [0; 2];
    for n in 0..20 {
        let receipt = within(producer.send(Message::new(n.to_string()).key(n.to_string()))).await.unwrap();
        counts[receipt.partition.unwrap() as usize] += 1;
    }
    assert!(!counts.contains(&0), "{counts:?}");
    within(producer.close(Duration::from_secs(5))).await;
    (bed, counts)
}

/// The same, with one broker; the second partition has no leader now.
async fn bed() -> (Bed, [u64; 2]) {
    let (bed, counts) = bed_of(1).await;
    bed.cluster.partition_leader(TWO, 1, None).unwrap();
    (bed, counts)
}

/// What has to wait for the leader, which comes back while it does: after a time in which it would have ended otherwise.
async fn awaits_leader<T>(bed: &Bed, time: Duration, what: impl Future<Output = Result<T>>) -> T {
    tokio::pin!(what);
    if let Ok(early) = tokio::time::timeout(time, &mut what).await {
        panic!("without a leader: {:?}", early.map(drop));
    }
    bed.cluster.partition_leader(TWO, 1, Some(1)).unwrap();
    within(what).await.unwrap()
}

/// A new group is made by a member that comes during an election, and has everything.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_is_made_when_its_partitions_have_leaders() {
    let (bed, counts) = bed().await;
    let mut consumer = awaits_leader(&bed, GROUP, bed.broker.subscribe(sub())).await;
    let mut seen = BTreeSet::new();
    for _ in 0..counts.iter().sum() {
        let got = within(consumer.recv()).await.unwrap().unwrap();
        assert!(seen.insert(got.payload_bytes().to_vec()), "twice: {got:?}");
        drop(got.ack());
    }
    bed.close().await;
}

/// A start by time is looked up for each partition; what is not answered is not taken for an answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_by_time_is_not_made_up() {
    let (bed, counts) = bed().await;
    let start = Start::Replay(ReplayFrom::Time(SystemTime::now() - Duration::from_secs(3_600)));
    let consumer = awaits_leader(&bed, GROUP, bed.broker.subscribe(sub().start(start))).await;
    let committed = tokio::task::block_in_place(|| {
        let mut list = TopicPartitionList::new();
        list.add_partition_range(TWO, 0, 1);
        let found = bed.client_of("two..crew").committed_offsets(list, Duration::from_secs(10)).unwrap();
        found.elements().iter().map(|e| e.offset()).collect::<Vec<_>>()
    });
    // The mock says of each time that nothing is that young.
    assert_eq!(committed, counts.map(|n| Offset::Offset(n as i64)));
    drop(consumer);
    bed.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broadcast_begins_when_its_partitions_have_leaders() {
    let (bed, _) = bed().await;
    let consumer = awaits_leader(&bed, ONE, bed.broker.subscribe(Subscription::broadcast(TWO))).await;
    drop(consumer);
    bed.close().await;
}

/// A backlog that cannot be counted now is no topic that is not there.
#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_is_counted_when_its_partitions_have_leaders() {
    let (bed, counts) = bed_of(1).await;
    let consumer = within(bed.broker.subscribe(sub())).await.unwrap();
    within(consumer.control().close(Duration::from_secs(5))).await;
    bed.cluster.partition_leader(TWO, 1, None).unwrap();
    let admin = bed.broker.admin();
    let backlog = awaits_leader(&bed, ONE, admin.backlog(&Topic::from(TWO), &"crew".into())).await;
    assert!(backlog.ready.admits(counts.iter().sum()), "{backlog:?}");
    bed.close().await;
}

/// A member that gets its partitions back while one of them has no leader goes on with the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_without_a_leader_holds_up_no_other() {
    let (bed, counts) = bed_of(2).await;
    let mut consumer = within(bed.broker.subscribe(sub())).await.unwrap();
    let mut key = None;
    for _ in 0..counts.iter().sum() {
        let got = within(consumer.recv()).await.unwrap().unwrap();
        if got.partition() == Some(0) {
            key = got.key.clone();
        }
        assert!(within(got.ack()).await.is_ok());
    }
    // The mock falls over a fetch from a partition without leader: nobody can ask for one.
    bed.cluster.broker_down(2).unwrap();
    bed.cluster.partition_leader(TWO, 1, None).unwrap();
    // It is put out of its group, and comes back to it; the member that reads the retries asks too.
    bed.cluster.request_errors(Api::Heartbeat, &[E::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID; 3]);
    let health = consumer.control().health();
    let producer = within(bed.broker.producer(ProducerSpec::new(TWO))).await.unwrap();
    let until = tokio::time::Instant::now() + Duration::from_secs(60);
    let mut epochs = BTreeSet::new();
    // One that was sent while it was still a member may come first.
    while epochs.len() < 2 {
        within(producer.send(Message::new("x").key(key.clone().unwrap()))).await.unwrap();
        let got = tokio::time::timeout_at(until, consumer.recv()).await;
        let got = got.unwrap_or_else(|_| panic!("held up: {:?}", health.current())).unwrap().unwrap();
        epochs.insert(got.epoch());
        drop(got.ack());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    bed.close().await;
}
