//! What is remembered of consumers: the lanes that are theirs now, and where each was in what it read, should the group be lost or
//! the topic be another.

use super::{Cluster, REQUEST};
use crate::fault;
use crate::ffi::{self, TopicId};
use mq_api::{Group, Result, Topic};
use mq_core::Lane;
use rdkafka::consumer::Consumer;
use rdkafka::error::RDKafkaErrorCode as Code;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Who reads what: the number of a consumer (a name may be used again, for another), group and topic.
pub(super) type Reader = (u64, String, String);

/// The topic that a consumer reads, among those that have had its name.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reading {
    pub(crate) id: Option<TopicId>,
    /// It is not the first: positions that are remembered may be of one before.
    pub(crate) remade: bool,
}

/// What a consumer remembers of a topic, should the group be lost.
#[derive(Debug, Default)]
pub(super) struct Past {
    reading: Reading,
    /// By partition: everything below was settled, and confirmed.
    left: HashMap<i32, u64>,
}

/// A lane of a member of this connection, for those who ask what is in hand.
pub(crate) struct Watched {
    pub(crate) lane: Arc<Lane>,
    pub(crate) member: Arc<str>,
}

impl Cluster {
    /// Remembers a lane as long as its partition is owned.
    pub(crate) fn watch(&self, lane: &Arc<Lane>, member: &Arc<str>) -> Arc<Watched> {
        let watched = Arc::new(Watched { lane: lane.clone(), member: member.clone() });
        let mut all = self.watched.lock();
        all.retain(|w| w.strong_count() > 0);
        all.push(Arc::downgrade(&watched));
        watched
    }

    /// The lanes of a group in this connection.
    pub(crate) fn watched(&self, topic: &Topic, group: &Group) -> Vec<Arc<Watched>> {
        let all = self.watched.lock();
        let ours = |w: &Arc<Watched>| w.lane.source().topic == *topic && w.lane.source().group.as_ref() == Some(group);
        all.iter().filter_map(Weak::upgrade).filter(ours).collect()
    }

    /// Which topic of this name is there now, and whether it is another than this consumer read before. Blocks.
    pub(crate) fn reads(&self, consumer: u64, group: &str, topic: &str) -> Result<(Reading, bool)> {
        let id = self.topic_id(topic)?;
        let mut all = self.read.lock();
        let past = all.entry((consumer, group.to_owned(), topic.to_owned())).or_default();
        let other = past.reading.id.is_some() && id.is_some() && past.reading.id != id;
        if other {
            past.left.clear();
        }
        past.reading = Reading { id: id.or(past.reading.id), remade: past.reading.remade || other };
        Ok((past.reading, other))
    }

    /// A consumer gives a partition up; everything below `offset` was settled, and confirmed.
    pub(crate) fn leave_at(&self, consumer: u64, group: &str, topic: &str, partition: i32, offset: u64) {
        let mut all = self.read.lock();
        let past = all.entry((consumer, group.to_owned(), topic.to_owned())).or_default();
        past.left.insert(partition, offset);
    }

    /// Nobody asks any more where this consumer was.
    pub(crate) fn forget(&self, consumer: u64) {
        self.read.lock().retain(|(of, ..), _| *of != consumer);
    }

    /// Where this consumer left a partition.
    pub(crate) fn left_at(&self, consumer: u64, group: &str, topic: &str, partition: i32) -> Option<u64> {
        let all = self.read.lock();
        let past = all.get(&(consumer, group.to_owned(), topic.to_owned()))?;
        past.left.get(&partition).copied()
    }

    /// The id of a topic. Brokers before 2.8 have none, and there are some (librdkafka's mock) that leave the question
    /// unanswered: they are asked once. Offsets that went back tell as much, in most cases.
    fn topic_id(&self, topic: &str) -> Result<Option<TopicId>> {
        let answers = *self.tells_ids.lock();
        let limit = match answers {
            Some(true) => REQUEST,
            Some(false) => return Ok(None),
            None => Duration::from_secs(2),
        };
        match ffi::topic_id(self.looker()?.client(), topic, limit) {
            Ok(id) => {
                *self.tells_ids.lock() = Some(true);
                Ok(id)
            }
            Err(Code::UnsupportedFeature | Code::UnsupportedVersion) => Ok(None),
            Err(Code::OperationTimedOut) if answers.is_none() => {
                // It is no outage: other questions are answered.
                self.describe(topic)?;
                *self.tells_ids.lock() = Some(false);
                Ok(None)
            }
            Err(code) => Err(fault::coded(format_args!("looking up the id of topic '{topic}'"), code)),
        }
    }
}
