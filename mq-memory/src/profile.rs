//! Profiles: memory with the capabilities and the visible habits of another broker, so that a unit test refuses what
//! production refuses.

use mq_api::{AttemptCounts, Capabilities, Durability, Feature, Retention, Support, Takeover};
use std::time::Duration;

/// Whose capabilities memory has. The names are those that `cargo xtask conformance` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Profile {
    /// Its own: it refuses nothing.
    #[default]
    Memory,
    /// `kafka`
    Kafka,
    /// `amqp`: RabbitMQ with quorum queues.
    Amqp,
    /// `amqp-classic`: RabbitMQ with classic queues.
    AmqpClassic,
    /// `redis`: Redis Streams.
    Redis,
    /// `redis-pubsub`
    RedisPubSub,
}

use Support::{Emulated, Unsupported};

impl Profile {
    /// All of them.
    pub const ALL: [Profile; 6] =
        [Self::Memory, Self::Kafka, Self::Amqp, Self::AmqpClassic, Self::Redis, Self::RedisPubSub];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Kafka => "kafka",
            Self::Amqp => "amqp",
            Self::AmqpClassic => "amqp-classic",
            Self::Redis => "redis",
            Self::RedisPubSub => "redis-pubsub",
        }
    }

    /// By its name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.as_str() == name)
    }

    /// What it can do.
    pub fn capabilities(self) -> Capabilities {
        let mut c = Capabilities::new(self.as_str());
        match self {
            Self::Memory => {}
            Self::Kafka => {
                c = c
                    .with(Feature::Retry, Emulated("parked in memory within bounds, then per-group retry topics"))
                    .with(Feature::Delay, Emulated("parked in memory within bounds, then per-group retry topics"))
                    .with(Feature::DeadLetters, Emulated("produced and confirmed, then the offset may pass"));
                c.attempts = AttemptCounts::AtLeast;
                c.send_level = Durability::Disk;
                c.settle_level = Durability::Disk;
                c.takeover = Takeover { lease_tenths: 0, fixed: Duration::from_secs(60) };
            }
            Self::Amqp | Self::AmqpClassic => {
                c = c
                    .with(Feature::Retry, Emulated("a copy with an attempt header through delay queues of the group"))
                    .with(Feature::Delay, Emulated("queues of fixed time to live, per group, made lazily"))
                    .with(Feature::DeadLetters, Emulated("published and confirmed, then acknowledged"))
                    .with(Feature::Partitions, Unsupported("a queue has no partitions; use one partition, or Kafka"))
                    .with(
                        Feature::Replay,
                        Unsupported("a queue keeps no history; use a log: Kafka, or Redis in log mode"),
                    )
                    .with(
                        Feature::PerKey,
                        Unsupported("AMQP knows no owner of a key; use Kafka, or max_in_flight 1 and a single member"),
                    )
                    .with(Feature::Redrive, Emulated("taken from the dead letters and published to the group's queue"))
                    .with(Feature::Peek, Emulated("taken and given back, so that others do not see them meanwhile"))
                    .with(Feature::Reset, Unsupported("a queue has no position to move"));
                c.detects_unroutable = true;
                c.retains_without_group = false;
                c.receipt_positions = false;
                c.settle_level = Durability::Sent;
                c.send_level = Durability::Disk;
                c.attempts = AttemptCounts::AtLeast;
                c.max_partitions = 1;
                c.takeover = Takeover { lease_tenths: 0, fixed: Duration::from_secs(30) };
            }
            Self::Redis => {
                c = c
                    .with(Feature::Delay, Emulated("parked in the pending list with a due index, by script"))
                    .with(Feature::DeadLetters, Emulated("one script"))
                    .with(Feature::Partitions, Unsupported("a stream is one partition; use several topics, or Kafka"))
                    .with(Feature::PerKey, Unsupported("a stream has no owner of a key; use Kafka, or max_in_flight 1"))
                    .with(
                        Feature::Replay,
                        Unsupported("this topic trims what all groups handled; make it in log mode (Retention::Log)"),
                    );
                c.max_partitions = 1;
            }
            Self::RedisPubSub => {
                let no = "Pub/Sub keeps nothing and knows no groups; use redis:// (Streams)";
                for feature in [
                    Feature::Groups,
                    Feature::Settlement,
                    Feature::Retry,
                    Feature::Delay,
                    Feature::DeadLetters,
                    Feature::Redrive,
                    Feature::Peek,
                    Feature::Replay,
                    Feature::Partitions,
                    Feature::PerKey,
                    Feature::Backlog,
                    Feature::Inspect,
                    Feature::Provision,
                    Feature::Reset,
                ] {
                    c = c.with(feature, Unsupported(no));
                }
                c.send_level = Durability::Sent;
                c.settle_level = Durability::Sent;
                c.retains_without_group = false;
                c.counts_receivers = true;
                c.receipt_positions = false;
                c.max_partitions = 1;
            }
        }
        c
    }

    /// How topics keep messages unless they say.
    pub(crate) fn retention(self) -> Option<Retention> {
        match self {
            // What all groups handled is trimmed; unbounded streams end in out-of-memory for every tenant.
            Self::Redis => Some(Retention::Handled { max: 1_000_000 }),
            Self::Amqp | Self::AmqpClassic => Some(Retention::Handled { max: 10_000_000 }),
            Self::RedisPubSub => Some(Retention::Log { max: Some(0), age: None }),
            Self::Memory | Self::Kafka => None,
        }
    }

    /// Partitions of a topic that is made without a count.
    pub(crate) fn partitions(self) -> u32 {
        match self {
            // Adding some later breaks the order of keys, so a topic starts with enough.
            Self::Kafka => 12,
            _ => 1,
        }
    }

    /// Whether also a single partition belongs to one member at a time.
    pub(crate) fn always_exclusive(self) -> bool {
        self == Self::Kafka
    }
}
