use crate::{
    Batch, CloseReport, Durability, Error, ErrorKind, Group, HealthWatch, Message, Provisioning, Result, Retention,
    Sending, SendingBatch, Topic,
};
use futures_core::future::BoxFuture;
use std::collections::BTreeMap;
use std::time::Duration;

/// Sends to one topic. Made by [`Broker::open_producer`](crate::Broker::open_producer); share it behind its `Arc`.
///
/// Object-safe and without a box per message: every call takes effect at once and returns a small concrete future.
/// Convenience is in [`ProducerExt`](crate::ProducerExt).
pub trait Producer: Send + Sync {
    /// Sends one. `Ok` means that the broker confirmed it at the receipt's level.
    ///
    /// # Errors (of the returned future)
    /// The [`Outcome`](crate::Outcome) of the error says what is known: not sent, rejected or unknown. Unknown outcomes were
    /// already retried within [`ProducerSpec::retry_for`].
    fn send(&self, message: Message) -> Sending {
        self.send_with(message, SendOptions::default())
    }

    /// Sends one, with options of this call.
    fn send_with(&self, message: Message, options: SendOptions) -> Sending;

    /// Sends many, pipelined; one outcome per message, in order. One bad message does not fail its neighbours.
    fn send_batch(&self, batch: Batch) -> SendingBatch;

    /// Waits until everything accepted so far has its outcome, at most `deadline`. True if all have.
    fn flush(&self, deadline: Duration) -> BoxFuture<'_, bool>;

    /// Refuses new sends, flushes within `deadline`, lets go of the connection. Idempotent.
    fn close(&self, deadline: Duration) -> BoxFuture<'_, CloseReport>;

    /// How it is doing.
    fn health(&self) -> HealthWatch;

    /// What it sends to.
    fn topic(&self) -> &Topic;
}

/// Options of one send.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct SendOptions {
    /// Total time for waiting for room, sending and retrying. Default: that of the producer.
    pub timeout: Option<Duration>,
}

impl SendOptions {
    /// With a time limit.
    pub fn timeout(timeout: Duration) -> Self {
        Self { timeout: Some(timeout) }
    }
}

/// What a producer is to be like. `"orders".into()` is enough.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProducerSpec {
    /// Where to send.
    pub topic: Topic,
    /// Groups that must exist before the first send; made or verified at each connect. For brokers that keep messages only
    /// for groups that exist (RabbitMQ), this is what makes a send before the first subscriber safe.
    pub groups: Vec<Group>,
    /// Partitions of a topic that has to be made; a topic that exists with another count is refused.
    pub partitions: Option<u32>,
    /// Retention of a topic that has to be made.
    pub retention: Option<Retention>,
    /// Largest message in bytes (payload, key and headers). Default 1,000,000 on every backend, so that it means one thing.
    pub max_message: usize,
    /// Messages accepted and not yet confirmed, at most. Default 10,000: keeps a pipeline full on every broker measured.
    pub max_in_flight: usize,
    /// Bytes accepted and not yet confirmed, at most. Default 64 MiB: 64 messages of the largest size.
    pub max_in_flight_bytes: usize,
    /// How long an unknown outcome is retried with the same id. Default 30 s: longer than a broker restart; 0 = never.
    pub retry_for: Duration,
    /// Time limit of a send, waiting for room included. Default 60 s: `retry_for` and as much again for waiting.
    pub send_timeout: Duration,
    /// Refuses to start below this level.
    pub require_durability: Option<Durability>,
    /// Whether missing topics and groups are made.
    pub provisioning: Provisioning,
    /// Options of one backend only, by the names its documentation gives; unknown ones are refused.
    pub native: BTreeMap<String, String>,
}

impl ProducerSpec {
    /// With the defaults.
    pub fn new(topic: impl Into<Topic>) -> Self {
        Self {
            topic: topic.into(),
            groups: Vec::new(),
            partitions: None,
            retention: None,
            max_message: 1_000_000,
            max_in_flight: 10_000,
            max_in_flight_bytes: 64 << 20,
            retry_for: Duration::from_secs(30),
            send_timeout: Duration::from_secs(60),
            require_durability: None,
            provisioning: Provisioning::Create,
            native: BTreeMap::new(),
        }
    }

    /// Adds a group that must exist before the first send.
    pub fn group(mut self, group: impl Into<Group>) -> Self {
        self.groups.push(group.into());
        self
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

    /// Sets the largest message.
    pub fn max_message(mut self, bytes: usize) -> Self {
        self.max_message = bytes;
        self
    }

    /// Sets the bounds of what is accepted and not yet confirmed.
    pub fn max_in_flight(mut self, messages: usize, bytes: usize) -> Self {
        (self.max_in_flight, self.max_in_flight_bytes) = (messages, bytes);
        self
    }

    /// Sets how long unknown outcomes are retried.
    pub fn retry_for(mut self, limit: Duration) -> Self {
        self.retry_for = limit;
        self
    }

    /// Sets the time limit of a send.
    pub fn send_timeout(mut self, limit: Duration) -> Self {
        self.send_timeout = limit;
        self
    }

    /// Refuses to start below this level.
    pub fn require_durability(mut self, level: Durability) -> Self {
        self.require_durability = Some(level);
        self
    }

    /// Sets whether missing topics and groups are made.
    pub fn provisioning(mut self, provisioning: Provisioning) -> Self {
        self.provisioning = provisioning;
        self
    }

    /// Sets an option of one backend.
    pub fn native(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.native.insert(name.into(), value.into());
        self
    }

    /// Checks names and values that no broker is needed for.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] or [`ErrorKind::Config`], naming the value.
    pub fn validate(&self) -> Result<()> {
        self.topic.validate()?;
        self.groups.iter().try_for_each(Group::validate)?;
        let zero = |what: &str| Err(Error::new(ErrorKind::Config, format!("{what} of producer '{}' is 0", self.topic)));
        match self {
            Self { partitions: Some(0), .. } => zero("partitions"),
            Self { max_message: 0, .. } => zero("max_message"),
            Self { max_in_flight: 0, .. } => zero("max_in_flight"),
            Self { max_in_flight_bytes: 0, .. } => zero("max_in_flight_bytes"),
            _ => Ok(()),
        }
    }
}

impl<T: Into<Topic>> From<T> for ProducerSpec {
    fn from(topic: T) -> Self {
        Self::new(topic)
    }
}
