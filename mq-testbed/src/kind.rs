//! The four servers, and what they are called everywhere.

use std::fmt;

/// One of the servers that the tests use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Redis, for Streams and Pub/Sub.
    Redis,
    /// RabbitMQ.
    RabbitMq,
    /// Apache Kafka, one broker in KRaft mode.
    Kafka,
    /// PostgreSQL: not a broker, but what outbox examples and tests need.
    Postgres,
}

impl Kind {
    /// All of them, in the order of the tables.
    pub const ALL: [Self; 4] = [Self::Redis, Self::RabbitMq, Self::Kafka, Self::Postgres];

    /// The name on the command line and of the folder.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::RabbitMq => "rabbitmq",
            Self::Kafka => "kafka",
            Self::Postgres => "postgres",
        }
    }

    /// The variable that names a server to use, and under which ours is made known.
    #[must_use]
    pub const fn variable(self) -> &'static str {
        match self {
            Self::Redis => "MQ_TEST_REDIS_URL",
            Self::RabbitMq => "MQ_TEST_AMQP_URL",
            Self::Kafka => "MQ_TEST_KAFKA_URL",
            Self::Postgres => "MQ_TEST_POSTGRES_URL",
        }
    }

    /// The kind of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
