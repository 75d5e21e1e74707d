//! Profiles: memory with the capabilities and the visible habits of another broker, so that a unit test refuses what
//! production refuses.

use mq_api::{Capabilities, Retention};

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

    /// What it can do: what that backend can.
    pub fn capabilities(self) -> Capabilities {
        match self {
            Self::Memory => Capabilities::memory(),
            Self::Kafka => Capabilities::kafka(),
            Self::Amqp => Capabilities::amqp(),
            Self::AmqpClassic => Capabilities::amqp_classic(),
            Self::Redis => Capabilities::redis(),
            Self::RedisPubSub => Capabilities::redis_pubsub(),
        }
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
