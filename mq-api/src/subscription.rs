use crate::{
    DeadLetterPolicy, Durability, Error, ErrorKind, Group, OnDeadLetter, Position, Result, RetryPolicy, Topic,
};
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

/// The longest time that anything can be asked to take: ten years. Subscriptions that ask for more are refused, since no clock
/// could be set; delays and deadlines of single calls are cut to it.
pub const LONGEST: Duration = Duration::from_secs(3_650 * 24 * 3_600);

/// The most deliveries that any consumer has in hand or buffered, however many it asks for: they are counted in 24 bits, of which
/// one is kept free.
pub const MOST_IN_FLIGHT: usize = 1 << 23;

/// What to receive, and how.
///
/// ```
/// # use mq_api::{Ordering, RetryPolicy, Subscription};
/// # use std::time::Duration;
/// let billing = Subscription::group("orders", "billing")
///     .ordering(Ordering::PerKey)
///     .retry(RetryPolicy::attempts(3).delays([Duration::from_secs(1), Duration::from_secs(10)]));
/// assert_eq!(billing.retry.max_attempts, 3);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Subscription {
    /// From where.
    pub topic: Topic,
    /// As a member of a group, or broadcast.
    pub mode: Mode,
    /// Where a *new* group starts; an existing group goes on where it was.
    pub start: Start,
    /// Order of the messages of one key.
    pub ordering: Ordering,
    /// At least once (default) or at most once.
    pub guarantee: Guarantee,
    /// When failed messages come again.
    pub retry: RetryPolicy,
    /// What becomes of messages that failed for good.
    pub dead_letter: DeadLetterPolicy,
    /// Under `PerKey`: what becomes of a key whose message was dead-lettered.
    pub on_dead_letter: OnDeadLetter,
    /// Deliveries in the application's hands or buffered for it, at most. Default 256: enough to hide round trips, few
    /// enough to give back. `usize::MAX` asks for no bound of the program's own; there are never more than
    /// [`MOST_IN_FLIGHT`].
    pub max_in_flight: usize,
    /// Bytes of those, at most. Default 64 MiB. One message larger than this is delivered alone. There are never more than
    /// 512 GiB.
    pub max_in_flight_bytes: usize,
    /// Delayed messages held in memory, at most; past it they wait in the broker. Default 10,000.
    pub max_parked: usize,
    /// Under `PerKey`: messages that wait behind delayed keys, at most; past it the partition waits. Default 10,000.
    pub max_blocked: usize,
    /// Time of ownership, renewed while the process lives and the delivery is held. Default 60 s: longer than a garbage
    /// collection, a page-out or a failover of the broker, short enough for a takeover to be noticed.
    pub lease: Duration,
    /// Longest time a delivery may be held. Default 25 min: below RabbitMQ's consumer time-out of 30 min, so that one number
    /// holds everywhere. Past it the delivery is nacked with the reason `timeout`.
    pub max_processing: Duration,
    /// How often a message may take its consumer down while handed over alone, before it is dead-lettered. Default 2: once
    /// may be a coincidence.
    pub crash_trials: u32,
    /// Whether missing topics and groups are made.
    pub provisioning: Provisioning,
    /// Refuses to start below this level.
    pub require_durability: Option<Durability>,
    /// Partitions of a topic that has to be made; a topic that exists with another count is refused.
    pub partitions: Option<u32>,
    /// Retention of a topic that has to be made.
    pub retention: Option<Retention>,
    /// For the worker: handlers running at a time, at most `max_in_flight`. Default 1: safe for any handler.
    pub concurrency: usize,
    /// Name of this member in listings and dead letters. Default: made at random.
    ///
    /// A name is one member's at a time: a second one of the same name, group and topic on one connection is refused. Across
    /// processes nobody can check that; Redis knows members by their names, and one that starts under the name of another takes
    /// over at once what that one held. So name members that are to do that after a restart, each its own, and leave the rest.
    pub member: Option<String>,
    /// Options of one backend only, by the names its documentation gives; unknown ones are refused.
    pub native: BTreeMap<String, String>,
}

/// Group member or broadcast receiver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mode {
    /// Members of one group divide the topic among themselves; every group sees every message.
    Group(Group),
    /// This process gets what is sent from now on, at most once, and has nothing to acknowledge.
    Broadcast,
}

/// Where a new group starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// Everything the broker still has for the group; without history (RabbitMQ) everything since the group was made.
    #[default]
    Oldest,
    /// What is sent after `subscribe` returned.
    Latest,
    /// Demands history: refused where the broker keeps none.
    Replay(ReplayFrom),
}

/// Where a replay starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayFrom {
    /// The first message the broker has.
    Earliest,
    /// The first message stored at or after this time.
    Time(SystemTime),
    /// This position.
    Position(Position),
}

/// Order of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ordering {
    /// None promised.
    #[default]
    None,
    /// Messages of one key one at a time and in order; different keys run concurrently. Messages without key have no order.
    PerKey,
}

/// How often a message is delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Guarantee {
    /// Redelivered until settled.
    #[default]
    AtLeastOnce,
    /// Settled before it is handed over; never redelivered. A crash loses what was fetched by then, `max_in_flight` messages at
    /// most; a close loses nothing as long as somebody takes what is still handed out.
    AtMostOnce,
}

/// Whether missing topics and groups are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Provisioning {
    /// Missing ones are made, which is logged; different ones are an error.
    #[default]
    Create,
    /// Missing or different ones are an error.
    Verify,
    /// Nothing is made or checked.
    None,
}

/// How long a topic keeps messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retention {
    /// What all groups handled is removed; at most `max` messages wait, then sends are [`ErrorKind::Full`].
    Handled {
        /// Waiting messages, at most.
        max: u64,
    },
    /// A log: the last `max` messages or those younger than `age` are kept, handled or not.
    Log {
        /// Messages kept, at most.
        max: Option<u64>,
        /// Oldest message kept.
        age: Option<Duration>,
    },
}

impl Retention {
    /// A log of the last `max` messages.
    pub const fn log(max: u64) -> Self {
        Self::Log { max: Some(max), age: None }
    }

    /// A log of what is younger than `age`. What is older goes when the broker looks: Redis and the in-memory broker with the
    /// next message that is sent, Kafka and RabbitMQ's streams with the segment that holds it.
    pub const fn log_for(age: Duration) -> Self {
        Self::Log { max: None, age: Some(age) }
    }

    /// Only what some group has not handled yet, at most `max` messages.
    pub const fn handled(max: u64) -> Self {
        Self::Handled { max }
    }
}

/// Each handler at work has a place that is made at the start; more than a million of them is a slip.
const MOST_HANDLERS: usize = 1_000_000;

impl Subscription {
    /// As a member of a group.
    pub fn group(topic: impl Into<Topic>, group: impl Into<Group>) -> Self {
        Self::with_mode(topic.into(), Mode::Group(group.into()))
    }

    /// Without group: this process gets what is sent from now on, at most once.
    pub fn broadcast(topic: impl Into<Topic>) -> Self {
        Self::with_mode(topic.into(), Mode::Broadcast)
    }

    fn with_mode(topic: Topic, mode: Mode) -> Self {
        // Dead letters of dead letters would hide them: a dead-letter topic's own subscriptions retry for ever.
        let dead_letter = match topic.dead_letters_of() {
            Some(_) => DeadLetterPolicy::Forever,
            None => DeadLetterPolicy::On,
        };
        Self {
            topic,
            mode,
            start: Start::default(),
            ordering: Ordering::default(),
            guarantee: Guarantee::default(),
            retry: RetryPolicy::default(),
            dead_letter,
            on_dead_letter: OnDeadLetter::default(),
            max_in_flight: 256,
            max_in_flight_bytes: 64 << 20,
            max_parked: 10_000,
            max_blocked: 10_000,
            lease: Duration::from_secs(60),
            max_processing: Duration::from_secs(25 * 60),
            crash_trials: 2,
            provisioning: Provisioning::default(),
            require_durability: None,
            partitions: None,
            retention: None,
            concurrency: 1,
            member: None,
            native: BTreeMap::new(),
        }
    }

    /// Whether deliveries are settled before they are handed over: at most once, of a group. A broadcast has nothing to settle.
    pub fn settles_first(&self) -> bool {
        self.guarantee == Guarantee::AtMostOnce && self.mode != Mode::Broadcast
    }

    /// The group's name, unless broadcast.
    pub fn group_name(&self) -> Option<&Group> {
        match &self.mode {
            Mode::Group(group) => Some(group),
            Mode::Broadcast => None,
        }
    }

    /// The dead-letter topic that this subscription writes to, if any.
    pub fn dead_letter_topic(&self) -> Option<Topic> {
        match (&self.mode, self.dead_letter) {
            (Mode::Group(group), DeadLetterPolicy::On) => Some(Topic::dead_letters(&self.topic, group)),
            _ => None,
        }
    }

    /// Checks names and values that no broker is needed for.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] or [`ErrorKind::Config`], naming the value and the fix.
    pub fn validate(&self) -> Result<()> {
        self.topic.validate()?;
        if let Some(group) = self.group_name() {
            group.validate()?;
        }
        let bad = |what: &str| Err(Error::new(ErrorKind::Config, format!("subscription to '{}': {what}", self.topic)));
        let short = Duration::from_millis(1);
        if self.max_in_flight == 0 {
            return bad("max_in_flight is 0, so nothing could ever be delivered; use 1 or more");
        }
        if self.max_in_flight_bytes == 0 {
            return bad("max_in_flight_bytes is 0, so nothing could ever be delivered");
        }
        if self.concurrency == 0 {
            return bad("concurrency is 0, so no handler could ever run; use 1 or more");
        }
        if self.concurrency > MOST_HANDLERS {
            let wanted = self.concurrency;
            return bad(&format!(
                "concurrency is {wanted}, and at most {MOST_HANDLERS} handlers can be at work at a time"
            ));
        }
        if self.concurrency > self.max_in_flight {
            let (wanted, most) = (self.concurrency, self.max_in_flight);
            return bad(&format!(
                "concurrency is {wanted} and max_in_flight {most}: only {most} handlers could ever be at work; raise max_in_flight to {wanted} or more"
            ));
        }
        if self.retry.max_attempts == 0 {
            return bad("retry.max_attempts is 0; 1 means no retry");
        }
        if !(0.0..=10.0).contains(&self.retry.jitter) {
            return bad("retry.jitter must be between 0 and 10");
        }
        if self.retry.transient.0 < short || self.retry.transient.1 < self.retry.transient.0 {
            return bad("retry.transient must be at least 1 ms, and its second value at least its first");
        }
        if self.lease < short {
            return bad("lease must be at least 1 ms");
        }
        if self.max_processing < short {
            return bad("max_processing must be at least 1 ms");
        }
        let times = [self.lease, self.max_processing, self.retry.transient.1];
        if times.iter().chain(&self.retry.delays).any(|time| *time > LONGEST) {
            return bad("lease, max_processing, retry.delays and retry.transient are at most ten years (LONGEST)");
        }
        if self.crash_trials == 0 {
            return bad("crash_trials is 0; a message would be dead-lettered before it was handed over");
        }
        if self.partitions == Some(0) {
            return bad("partitions is 0");
        }
        if self.on_dead_letter == OnDeadLetter::ParkKey && self.ordering != Ordering::PerKey {
            return bad(
                "on_dead_letter is ParkKey, which needs ordering PerKey; without an order of keys none is parked",
            );
        }
        if self.topic.dead_letters_of().is_some() && self.dead_letter == DeadLetterPolicy::On {
            return bad("a dead-letter topic's own subscription cannot have dead letters; use Forever or Discard");
        }
        Ok(())
    }
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {
        impl Subscription {
            $( $(#[$doc])* pub fn $name(mut self, $name: $type) -> Self { self.$name = $name; self } )*
        }
    };
}
setters! {
    /// Sets where a new group starts.
    start: Start,
    /// Sets the order.
    ordering: Ordering,
    /// Sets how often a message is delivered.
    guarantee: Guarantee,
    /// Sets when failed messages come again.
    retry: RetryPolicy,
    /// Sets what becomes of messages that failed for good.
    dead_letter: DeadLetterPolicy,
    /// Sets what becomes of the key of a dead letter.
    on_dead_letter: OnDeadLetter,
    /// Sets the most deliveries in hand; see [`MOST_IN_FLIGHT`].
    max_in_flight: usize,
    /// Sets the most bytes in hand.
    max_in_flight_bytes: usize,
    /// Sets the most delayed messages held in memory.
    max_parked: usize,
    /// Sets the most messages waiting behind delayed keys.
    max_blocked: usize,
    /// Sets the time of ownership.
    lease: Duration,
    /// Sets the longest time in hand.
    max_processing: Duration,
    /// Sets how often a message may take its consumer down.
    crash_trials: u32,
    /// Sets whether missing topics and groups are made.
    provisioning: Provisioning,
    /// Sets how many handlers of a worker run at a time.
    concurrency: usize,
}

impl Subscription {
    /// Refuses to start below this level.
    pub fn require_durability(mut self, level: Durability) -> Self {
        self.require_durability = Some(level);
        self
    }

    /// Sets the partition count of a topic that has to be made.
    pub fn partitions(mut self, n: u32) -> Self {
        self.partitions = Some(n);
        self
    }

    /// Sets the retention of a topic that has to be made.
    pub fn retention(mut self, retention: Retention) -> Self {
        self.retention = Some(retention);
        self
    }

    /// Names this member.
    pub fn member(mut self, name: impl Into<String>) -> Self {
        self.member = Some(name.into());
        self
    }

    /// Sets an option of one backend.
    pub fn native(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.native.insert(name.into(), value.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::Subscription;
    use crate::{DeadLetterPolicy, OnDeadLetter, Ordering, Topic};

    #[test]
    fn senseless_values_are_named() {
        let sub = || Subscription::group("orders", "billing");
        assert!(sub().validate().is_ok());
        let parked = sub().on_dead_letter(OnDeadLetter::ParkKey);
        assert!(parked.clone().validate().is_err() && parked.ordering(Ordering::PerKey).validate().is_ok());
        assert!(sub().max_in_flight(0).validate().is_err_and(|e| e.to_string().contains("max_in_flight")));
        let dlq = Subscription::group(Topic::dead_letters("orders", "billing"), "ops");
        assert!(dlq.dead_letter == DeadLetterPolicy::Forever && dlq.validate().is_ok());
        assert!(dlq.dead_letter(DeadLetterPolicy::On).validate().is_err());
    }
}
