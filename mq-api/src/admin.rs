use crate::{Backlog, Envelope, Group, Message, Position, Result, Retention, Start, Topic};
use async_trait::async_trait;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Looking and tidying, where the broker can. What it cannot do is
/// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported), never ignored. Every call is bounded in time.
#[async_trait]
pub trait Admin: Send + Sync {
    /// What a group still has to do.
    async fn backlog(&self, topic: &Topic, group: &Group) -> Result<Backlog>;

    /// Makes a topic; there already with the same arguments is fine.
    async fn create_topic(&self, spec: TopicSpec) -> Result<()>;

    /// What is known of a topic; `None` if there is none.
    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>>;

    /// Deletes a topic with its groups; says whether it was there. Its dead letters stay.
    async fn delete_topic(&self, topic: &Topic) -> Result<bool>;

    /// Makes a group; there already is fine, and its position stays.
    async fn create_group(&self, topic: &Topic, group: &Group, start: Start) -> Result<()>;

    /// Deletes a group; says whether it was there.
    async fn delete_group(&self, topic: &Topic, group: &Group) -> Result<bool>;

    /// Moves a group without members to another position. Deliveries in hand become stale.
    async fn reset_group(&self, topic: &Topic, group: &Group, to: Start) -> Result<()>;

    /// The groups of a topic, with members and backlog.
    async fn groups(&self, topic: &Topic) -> Result<Vec<GroupInfo>>;

    /// Deliveries handed out and unsettled, oldest first, at most `limit`.
    async fn pending(&self, topic: &Topic, group: &Group, limit: usize) -> Result<Vec<PendingDelivery>>;

    /// The dead letters of a group, oldest first, at most `limit`, without taking them.
    ///
    /// # Errors
    /// `NotFound` when there is neither such a group nor a place with its dead letters, as [`redrive`](Self::redrive) and
    /// [`discard_dead_letters`](Self::discard_dead_letters); those of a group that was deleted can be looked at.
    async fn dead_letters(&self, topic: &Topic, group: &Group, limit: usize) -> Result<Vec<DeadLetter>>;

    /// Sends dead letters back to the group they came from. Each is confirmed there before it leaves the dead letters, so a
    /// stop midway loses nothing and the next call goes on. Two at once on one group lose nothing either, but may each send a
    /// letter back and count it: run one at a time.
    async fn redrive(&self, topic: &Topic, group: &Group, options: RedriveOptions) -> Result<RedriveReport>;

    /// Drops dead letters for good; says how many.
    async fn discard_dead_letters(&self, topic: &Topic, group: &Group, filter: RedriveOptions) -> Result<u64>;
}

/// A topic to make.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TopicSpec {
    /// Its name.
    pub topic: Topic,
    /// Partitions; `None` = the backend's default.
    pub partitions: Option<u32>,
    /// Retention; `None` = the backend's default.
    pub retention: Option<Retention>,
    /// Groups to make with it.
    pub groups: Vec<Group>,
}

impl TopicSpec {
    /// With the backend's defaults.
    pub fn new(topic: impl Into<Topic>) -> Self {
        Self { topic: topic.into(), partitions: None, retention: None, groups: Vec::new() }
    }

    /// Sets the partition count.
    pub fn partitions(mut self, n: u32) -> Self {
        self.partitions = Some(n);
        self
    }

    /// Sets the retention.
    pub fn retention(mut self, retention: Retention) -> Self {
        self.retention = Some(retention);
        self
    }

    /// Adds a group.
    pub fn group(mut self, group: impl Into<Group>) -> Self {
        self.groups.push(group.into());
        self
    }
}

/// What is known of a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicInfo {
    /// Its name.
    pub topic: Topic,
    /// Partitions.
    pub partitions: u32,
    /// Messages stored, where known.
    pub messages: Option<u64>,
}

impl TopicInfo {
    /// For backends.
    pub fn new(topic: Topic, partitions: u32, messages: Option<u64>) -> Self {
        Self { topic, partitions, messages }
    }
}

/// What is known of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupInfo {
    /// Its name.
    pub group: Group,
    /// Names of its members, where known.
    pub members: Vec<String>,
    /// What it still has to do.
    pub backlog: Backlog,
    /// How long no member has fetched, where known: an idle group pins what it has not handled.
    pub idle: Option<Duration>,
}

impl GroupInfo {
    /// For backends.
    pub fn new(group: Group, members: Vec<String>, backlog: Backlog, idle: Option<Duration>) -> Self {
        Self { group, members, backlog, idle }
    }
}

/// A delivery handed out and unsettled.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PendingDelivery {
    /// Its partition.
    pub partition: Option<u32>,
    /// Its position.
    pub position: Position,
    /// The member that owns it; `None` while it is delayed.
    pub owner: Option<String>,
    /// Time since it was handed out or renewed.
    pub idle: Duration,
    /// How often it was taken.
    pub takes: u32,
}

impl PendingDelivery {
    /// For backends.
    pub fn new(partition: Option<u32>, position: Position, owner: Option<String>, idle: Duration, takes: u32) -> Self {
        Self { partition, position, owner, idle, takes }
    }
}

/// A dead letter, looked at.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeadLetter {
    /// The message, with its envelope among the headers.
    pub message: Message,
    /// What it says of itself; `None` for a message that was put there by something else.
    pub envelope: Option<Envelope>,
    /// Its position in the dead-letter topic, where known.
    pub position: Option<Position>,
}

impl DeadLetter {
    /// For backends.
    pub fn new(message: Message, position: Option<Position>) -> Self {
        Self { envelope: Envelope::read(&message.headers), message, position }
    }
}

type Filter = Arc<dyn Fn(&Message, Option<&Envelope>) -> bool + Send + Sync>;

/// Which dead letters to redrive or discard, and how.
#[derive(Clone)]
#[non_exhaustive]
pub struct RedriveOptions {
    /// At most this many.
    pub limit: Option<u64>,
    /// At most this many a second.
    pub rate: Option<u32>,
    /// Only those; the others stay. `Unsupported` where the broker cannot browse.
    pub filter: Option<Filter>,
    /// Only count what would be done. `Unsupported` where the broker cannot browse.
    pub dry_run: bool,
    /// Those redriven this often before stay (the loop guard). Default 3.
    pub max_redrives: u32,
}

impl Default for RedriveOptions {
    fn default() -> Self {
        Self { limit: None, rate: None, filter: None, dry_run: false, max_redrives: 3 }
    }
}

impl RedriveOptions {
    /// At most this many.
    pub fn limit(mut self, n: u64) -> Self {
        self.limit = Some(n);
        self
    }

    /// At most this many a second.
    pub fn rate(mut self, per_second: u32) -> Self {
        self.rate = Some(per_second);
        self
    }

    /// Only those for which `filter` is true.
    pub fn filter(mut self, filter: impl Fn(&Message, Option<&Envelope>) -> bool + Send + Sync + 'static) -> Self {
        self.filter = Some(Arc::new(filter));
        self
    }

    /// Only counts.
    pub fn dry_run(mut self) -> Self {
        self.dry_run = true;
        self
    }

    /// Sets the loop guard.
    pub fn max_redrives(mut self, n: u32) -> Self {
        self.max_redrives = n;
        self
    }

    /// Whether a letter is meant: filter and loop guard.
    pub fn admits(&self, message: &Message, envelope: Option<&Envelope>) -> bool {
        envelope.is_none_or(|e| e.redrives < self.max_redrives)
            && self.filter.as_ref().is_none_or(|f| f(message, envelope))
    }
}

impl fmt::Debug for RedriveOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedriveOptions")
            .field("limit", &self.limit)
            .field("rate", &self.rate)
            .field("filter", &self.filter.is_some())
            .field("dry_run", &self.dry_run)
            .field("max_redrives", &self.max_redrives)
            .finish()
    }
}

/// What a redrive did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedriveReport {
    /// Sent back to their group, or, in a dry run, would have been.
    pub redriven: u64,
    /// Left because of the filter.
    pub filtered: u64,
    /// Left because of the loop guard.
    pub guarded: u64,
    /// Left because they have no envelope, or came from another topic or group.
    pub foreign: u64,
}
