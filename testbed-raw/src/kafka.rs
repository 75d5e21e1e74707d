//! Kafka through rdkafka: four partitions, acks=all, one commit per message.
//!
//! A topic that was deleted is made again by the members, and only once none of them is left in the group: one that
//! still held messages of the old topic would commit its old offsets to the new one, which then skips that far.

use std::time::{Duration, Instant};

use mq_testbed::client::{Order, id_in};
use mq_testbed::history::{Sent, Settled};
use mq_testbed::until;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::{Client, ClientContext};
use rdkafka::config::{ClientConfig, FromClientConfig};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::message::Message;
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::types::RDKafkaErrorCode;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::roles::{Failed, Got, Raw, Receiver, Sender};

const PARTITIONS: i32 = 4;

/// An answer that takes longer than this does not come.
const ANSWER: Duration = Duration::from_secs(5);

/// Longest wait for a group's coordinator.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Kafka {
    order: Order,
    runtime: Runtime,
}

impl Kafka {
    pub(crate) fn new(order: &Order) -> Result<Self, String> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Ok(Self { order: order.clone(), runtime: runtime.map_err(|error| error.to_string())? })
    }

    fn client<C: FromClientConfig>(&self, settings: &[(&str, &str)]) -> Result<C, String> {
        let mut config = ClientConfig::new();
        let servers = self.order.url.trim_start_matches("kafka://");
        config.set("bootstrap.servers", servers);
        // A request that is not answered in this time takes the connection with it: what finds a half-open line.
        config.set("socket.timeout.ms", "2000");
        config.set("reconnect.backoff.ms", "50");
        config.set("reconnect.backoff.max.ms", "500");
        for (name, value) in settings {
            config.set(*name, *value);
        }
        config.create().map_err(|error| error.to_string())
    }

    fn consumer(&self) -> Result<BaseConsumer, String> {
        self.client(&[
            ("group.id", &self.order.group),
            ("client.id", &self.order.name),
            ("enable.auto.commit", "false"),
            ("auto.offset.reset", "earliest"),
            // A dead member's partitions move after this.
            ("session.timeout.ms", "3000"),
            ("heartbeat.interval.ms", "500"),
            ("fetch.wait.max.ms", "100"),
        ])
    }
}

impl Raw for Kafka {
    fn prepare(&self) -> Result<(), String> {
        let admin: AdminClient<_> = self.client(&[])?;
        let topic = NewTopic::new(&self.order.topic, PARTITIONS, TopicReplication::Fixed(1));
        let made = self.runtime.block_on(admin.create_topics([&topic], &AdminOptions::new()));
        match made.map_err(|error| error.to_string())?.into_iter().next() {
            // Another member was faster.
            Some(Err((_, RDKafkaErrorCode::TopicAlreadyExists))) => Ok(()),
            Some(Err((name, code))) => Err(format!("create {name}: {code}")),
            _ => Ok(()),
        }
    }

    fn sender(&self) -> Result<Box<dyn Sender>, String> {
        let producer = self.client(&[
            ("acks", "all"),
            ("message.timeout.ms", "4000"),
            ("request.timeout.ms", "2000"),
            ("linger.ms", "0"),
            // With one request on the way, a repeated one cannot overtake or be overtaken.
            ("max.in.flight.requests.per.connection", "1"),
        ])?;
        let handle = self.runtime.handle().clone();
        Ok(Box::new(Producer { handle, producer, topic: self.order.topic.clone() }))
    }

    fn receiver(&self) -> Result<Box<dyn Receiver>, String> {
        let consumer = self.consumer()?;
        let was_gone = !is_there(consumer.client(), &self.order.topic)?;
        if was_gone {
            self.make_again(&consumer)?;
        }
        consumer.subscribe(&[&self.order.topic]).map_err(|error| error.to_string())?;
        Ok(Box::new(Member { consumer, topic: self.order.topic.clone(), looked: Instant::now(), was_gone }))
    }

    fn remaining(&self) -> Result<Vec<String>, String> {
        let consumer = self.consumer()?;
        let words = |error: rdkafka::error::KafkaError| error.to_string();
        let topic = self.order.topic.as_str();
        let mut asked = TopicPartitionList::new();
        for partition in 0..PARTITIONS {
            asked.add_partition(topic, partition);
        }
        // A broker that is loading the group again, after a restart or with little time to run, says that it is not the one yet.
        let asking = || match consumer.committed_offsets(asked.clone(), ANSWER) {
            Err(error) if is_moving(error.rdkafka_error_code()) => None,
            answer => Some(answer),
        };
        let committed = until("the group's coordinator", PATIENCE, asking).map_err(|problem| problem.to_string())?;
        let committed = committed.map_err(words)?;
        let mut start = TopicPartitionList::new();
        let mut left = 0;
        for place in committed.elements() {
            let (low, high) = consumer.fetch_watermarks(topic, place.partition(), ANSWER).map_err(words)?;
            let from = if let Offset::Offset(offset) = place.offset() { offset } else { low };
            left += usize::try_from(high - from).unwrap_or(0);
            start.add_partition_offset(topic, place.partition(), Offset::Offset(from)).map_err(words)?;
        }
        consumer.assign(&start).map_err(words)?;
        let mut found = Vec::new();
        let end = Instant::now() + Duration::from_secs(30);
        while found.len() < left && Instant::now() < end {
            if let Some(message) = consumer.poll(Duration::from_millis(100)) {
                found.push(id_in(message.map_err(words)?.payload().unwrap_or_default()));
            }
        }
        Ok(found)
    }

    fn destroy(&self) -> Result<(), String> {
        let admin: AdminClient<_> = self.client(&[])?;
        let deleted = self.runtime.block_on(admin.delete_topics(&[&self.order.topic], &AdminOptions::new()));
        if let Some(Err((name, code))) = deleted.map_err(|error| error.to_string())?.into_iter().next() {
            return Err(format!("delete {name}: {code}"));
        }
        // The answer is the controller's. Until the broker has heard of it, it would still take messages.
        let heard = until("the broker to have deleted the topic", ANSWER, || {
            is_there(admin.inner(), &self.order.topic).is_ok_and(|there| !there).then_some(())
        });
        heard.map_err(|problem| problem.to_string())
    }
}

/// Whether the broker has the topic.
fn is_there<C: ClientContext>(client: &Client<C>, topic: &str) -> Result<bool, String> {
    let metadata = client.fetch_metadata(Some(topic), ANSWER).map_err(|error| error.to_string())?;
    let found = metadata.topics().iter().find(|found| found.name() == topic).and_then(|found| found.error());
    // Other errors, as a partition without a leader, belong to a topic that is there.
    Ok(found.map(RDKafkaErrorCode::from) != Some(RDKafkaErrorCode::UnknownTopicOrPartition))
}

impl Kafka {
    /// Makes a topic again that was deleted, when no member can commit to it any more what it had of the old one.
    fn make_again(&self, consumer: &BaseConsumer) -> Result<(), String> {
        let groups = consumer.fetch_group_list(Some(&self.order.group), ANSWER).map_err(|error| error.to_string())?;
        if groups.groups().iter().any(|group| !group.members().is_empty()) {
            return Err("the topic was deleted, and not all members have noticed".into());
        }
        let admin: AdminClient<_> = self.client(&[])?;
        // With what it had committed: an offset of the old topic says nothing about the new one.
        let deleted = self.runtime.block_on(admin.delete_groups(&[&self.order.group], &AdminOptions::new()));
        match deleted.map_err(|error| error.to_string())?.into_iter().next() {
            None | Some(Ok(_) | Err((_, RDKafkaErrorCode::GroupIdNotFound))) => self.prepare(),
            Some(Err((name, code))) => Err(format!("delete group {name}: {code}")),
        }
    }
}

struct Producer {
    handle: tokio::runtime::Handle,
    producer: FutureProducer,
    topic: String,
}

impl Sender for Producer {
    fn send(&mut self, key: &str, payload: &[u8]) -> Result<(), Failed> {
        let unknown = |words: String| Failed { outcome: Sent::Unknown, words };
        let record = FutureRecord::to(&self.topic).key(key).payload(payload);
        let delivery = self.producer.send_result(record).map_err(|(error, _)| unknown(error.to_string()))?;
        match self.handle.block_on(async { timeout(Duration::from_secs(10), delivery).await }) {
            Ok(Ok(Ok(_))) => Ok(()),
            Ok(Ok(Err((error, _)))) => Err(unknown(error.to_string())),
            Ok(Err(_)) => Err(unknown("the producer dropped it".into())),
            Err(_) => Err(unknown("no report within 10 s".into())),
        }
    }
}

/// A member asks this often whether the topic is still there: librdkafka by itself waits for it to come back.
const LOOK: Duration = Duration::from_millis(500);

struct Member {
    consumer: BaseConsumer,
    topic: String,
    /// When it last looked for the topic.
    looked: Instant,
    was_gone: bool,
}

impl Receiver for Member {
    fn receive(&mut self) -> Result<Vec<Got>, String> {
        if self.looked.elapsed() > LOOK {
            self.looked = Instant::now();
            // A broker that does not answer says nothing about the topic.
            if is_there(self.consumer.client(), &self.topic) == Ok(false) {
                return Err("the topic was deleted".into());
            }
        }
        match self.consumer.poll(Duration::from_millis(200)) {
            None => Ok(Vec::new()),
            Some(Ok(message)) => {
                let place = Some(format!("{}:{}", message.partition(), message.offset()));
                Ok(vec![Got { id: id_in(message.payload().unwrap_or_default()), place, ours_until: None }])
            }
            // Told in passing: librdkafka goes on by itself.
            Some(Err(error)) if is_passing(error.rdkafka_error_code()) => Ok(Vec::new()),
            Some(Err(error)) => Err(error.to_string()),
        }
    }

    fn ack(&mut self, got: &Got) -> Result<Settled, String> {
        let place = got.place.as_deref().and_then(|place| place.split_once(':'));
        let Some((partition, offset)) = place.and_then(|(p, o)| Some((p.parse().ok()?, o.parse::<i64>().ok()?))) else {
            return Err("a place that is no partition and offset".into());
        };
        let mut next = TopicPartitionList::new();
        next.add_partition_offset(&self.topic, partition, Offset::Offset(offset + 1)).map_err(|e| e.to_string())?;
        // An error is never a sure "not yours any more": a commit that was applied just before the line was cut is
        // repeated by librdkafka, and the repetition is then refused because of the rebalance that followed.
        Ok(self.consumer.commit(&next, CommitMode::Sync).map_or(Settled::Unknown, |()| Settled::Confirmed))
    }

    fn found_destroyed(&mut self) -> bool {
        std::mem::take(&mut self.was_gone)
    }
}

fn is_moving(code: Option<RDKafkaErrorCode>) -> bool {
    use RDKafkaErrorCode::{CoordinatorLoadInProgress, CoordinatorNotAvailable, NotCoordinator};
    matches!(code, Some(CoordinatorLoadInProgress | CoordinatorNotAvailable | NotCoordinator))
}

fn is_passing(code: Option<RDKafkaErrorCode>) -> bool {
    use RDKafkaErrorCode::{AllBrokersDown, BrokerTransportFailure, OperationTimedOut, Resolve};
    matches!(code, Some(AllBrokersDown | BrokerTransportFailure | OperationTimedOut | Resolve))
}
