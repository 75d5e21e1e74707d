//! What happened, in order: the timeline that tests assert on and that a simulation hashes.

use mq_api::{Group, MessageId, Topic};
use parking_lot::Mutex;
use std::fmt;
use std::hash::Hasher;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// What happened to a message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum What {
    /// It was stored in the topic.
    Sent,
    /// A send was refused; the text says why.
    Refused(String),
    /// It was handed to a member, with this attempt number.
    Delivered {
        /// 1 for the first.
        attempt: u32,
    },
    /// It was acknowledged.
    Acked,
    /// It failed and comes again after this delay.
    Retried {
        /// The delay, with the pause of the subscription after a transient failure.
        after: Duration,
        /// The error, if one was given.
        error: Option<String>,
    },
    /// It went to the dead letters.
    DeadLettered {
        /// The reason.
        reason: String,
        /// The last error, if one was given.
        error: Option<String>,
    },
    /// It was discarded.
    Discarded {
        /// The reason.
        reason: String,
        /// The last error, if one was given.
        error: Option<String>,
    },
    /// It was given back untried.
    Released,
    /// A settlement came too late.
    Stale,
    /// Its member died or lost it.
    Lost,
    /// Retention removed it, unhandled.
    Trimmed,
}

/// One entry of the timeline.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Happened {
    /// Time since the broker was made.
    pub at: Duration,
    /// What.
    pub what: What,
    /// The topic.
    pub topic: Topic,
    /// The group, except for sends.
    pub group: Option<Group>,
    /// The partition; 0 for a refused send, which has none.
    pub partition: u32,
    /// The position; 0 for a refused send, which has none.
    pub position: u64,
    /// The message.
    pub id: MessageId,
    /// The member, where one is involved.
    pub member: Option<Arc<str>>,
}

impl fmt::Display for Happened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>12.3?} {}", self.at, self.topic)?;
        if let Some(group) = &self.group {
            write!(f, "/{group}")?;
        }
        if let What::Refused(why) = &self.what {
            return write!(f, " {} refused: {why}", self.id);
        }
        write!(f, " p{} #{} {}", self.partition, self.position, self.id)?;
        match &self.what {
            What::Sent => f.write_str(" sent"),
            What::Refused(_) => Ok(()),
            What::Delivered { attempt } => write!(f, " delivered, attempt {attempt}"),
            What::Acked => f.write_str(" acked"),
            What::Retried { after, error: Some(error) } => write!(f, " failed: {error}; again after {after:?}"),
            What::Retried { after, error: None } => write!(f, " failed; again after {after:?}"),
            What::DeadLettered { reason, error: None } => write!(f, " dead-lettered: {reason}"),
            What::DeadLettered { reason, error: Some(error) } => write!(f, " dead-lettered: {reason}; failed: {error}"),
            What::Discarded { reason, error: None } => write!(f, " discarded: {reason}"),
            What::Discarded { reason, error: Some(error) } => write!(f, " discarded: {reason}; failed: {error}"),
            What::Released => f.write_str(" released"),
            What::Stale => f.write_str(" settled too late"),
            What::Lost => f.write_str(" lost by its member"),
            What::Trimmed => f.write_str(" trimmed unhandled"),
        }?;
        match &self.member {
            Some(member) => write!(f, " [{member}]"),
            None => Ok(()),
        }
    }
}

/// The timeline of one broker.
pub struct Trace {
    start: Instant,
    events: Mutex<Vec<Happened>>,
    pub(crate) changed: Notify,
}

impl Trace {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { start: Instant::now(), events: Mutex::default(), changed: Notify::new() })
    }

    pub(crate) fn push(&self, what: What, source: Place<'_>, id: &MessageId) {
        let happened = Happened {
            at: self.start.elapsed(),
            what,
            topic: source.topic.clone(),
            group: source.group.cloned(),
            partition: source.partition,
            position: source.position,
            id: id.clone(),
            member: source.member.cloned(),
        };
        self.events.lock().push(happened);
        self.changed.notify_waiters();
    }

    /// The message that stood at a position, which may be gone from its topic.
    pub(crate) fn id_of(&self, topic: &Topic, partition: u32, position: u64) -> MessageId {
        let events = self.events.lock();
        // What was refused never stood anywhere.
        let there = |e: &&Happened| {
            e.partition == partition
                && e.position == position
                && e.topic == *topic
                && !matches!(e.what, What::Refused(_))
        };
        let known = events.iter().rev().filter(there).find(|e| e.id != MessageId::NIL);
        known.map(|e| e.id.clone()).unwrap_or_default()
    }

    /// Everything so far.
    pub fn events(&self) -> Vec<Happened> {
        self.events.lock().clone()
    }

    /// A hash of everything so far: equal for two runs of one seed.
    pub fn hash(&self) -> u64 {
        let mut fnv = mq_core::Fnv::default();
        for event in self.events.lock().iter() {
            fnv.write(format!("{event}\n").as_bytes());
        }
        fnv.finish()
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trace({} events)", self.events.lock().len())
    }
}

/// Where something happened.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) topic: &'a Topic,
    pub(crate) group: Option<&'a Group>,
    pub(crate) partition: u32,
    pub(crate) position: u64,
    pub(crate) member: Option<&'a Arc<str>>,
}
