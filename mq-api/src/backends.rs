//! What each backend of this library can do: the one table that real drivers and the profiles of the in-memory broker are
//! made from, so that a unit test refuses what production refuses. A driver sets on top what its connection found: the
//! server's version, the levels its configuration reaches, bounds that derive from a setting.

use crate::{AttemptCounts, Capabilities, Durability, Feature, Support, Takeover};
use Support::{Emulated, Unsupported};
use std::time::Duration;

/// Why Pub/Sub lacks most things.
const STORES_NOTHING: &str = "Pub/Sub stores nothing and knows no groups; use redis:// (Streams)";

impl Capabilities {
    /// The in-memory broker: it refuses nothing.
    pub fn memory() -> Self {
        Self::new("memory")
    }

    /// Kafka, on a cluster that flushes what it confirms and allows sessions of 6 s, its default.
    pub fn kafka() -> Self {
        let parked = "parked in memory within bounds, then per-group retry topics";
        let mut all = Self::new("kafka")
            .with(Feature::Retry, Emulated(parked))
            .with(Feature::Delay, Emulated(parked))
            .with(Feature::DeadLetters, Emulated("produced and confirmed, then the offset may pass"));
        all.attempts = AttemptCounts::AtLeast;
        all.send_level = Durability::Disk;
        all.settle_level = Durability::Disk;
        all.takeover = Self::kafka_takeover(Duration::from_secs(6));
        all
    }

    /// The lease is the session, and never shorter than the cluster allows (`min_session`); then the group rebalances within
    /// a heartbeat, a sixth of it, and the new owner looks up where to start.
    pub fn kafka_takeover(min_session: Duration) -> Takeover {
        Takeover { lease_tenths: 12, fixed: Duration::from_secs(2) + min_session }
    }

    /// RabbitMQ with quorum queues, and the library's default heartbeat of 5 s.
    pub fn amqp() -> Self {
        let mut all = Self::rabbitmq("amqp").with(
            Feature::PerKey,
            Unsupported("a queue has no order per key among its consumers; use Kafka, or one member at a time"),
        );
        all.takeover = Self::amqp_takeover(Duration::from_secs(5), false);
        all
    }

    /// RabbitMQ with classic queues, and the library's default heartbeat of 5 s.
    pub fn amqp_classic() -> Self {
        let mut all = Self::rabbitmq("amqp-classic").with(
            Feature::PerKey,
            Unsupported("a classic queue has no order per key and counts no crashes; use Kafka"),
        );
        all.takeover = Self::amqp_takeover(Duration::from_secs(5), true);
        all
    }

    /// No leases: the broker notices a dead peer by its socket at once, or after two heartbeats without a sign of it. On a
    /// classic queue what was taken before comes back with its count by a delay of one second.
    pub fn amqp_takeover(heartbeat: Duration, classic: bool) -> Takeover {
        let counting = Duration::from_secs(u64::from(classic));
        Takeover { lease_tenths: 0, fixed: heartbeat * 2 + Duration::from_secs(1) + counting }
    }

    fn rabbitmq(name: &str) -> Self {
        let mut all = Self::new(name)
            .with(
                Feature::Retry,
                Emulated("a copy with the attempt number, confirmed before the original is acknowledged"),
            )
            .with(Feature::Delay, Emulated("queues of fixed time to live, per group, made when needed"))
            .with(
                Feature::DeadLetters,
                Emulated("published with the envelope, confirmed before the original is acknowledged"),
            )
            .with(Feature::Redrive, Emulated("taken from the dead letters and published to the group's queue"))
            .with(Feature::Peek, Emulated("taken and given back, so that others do not see them meanwhile"))
            .with(Feature::Partitions, Unsupported("a queue has no partitions; use several topics, or Kafka"))
            .with(Feature::Replay, Unsupported("a queue forgets what was handled; use the native option queue-type=stream, Kafka, or Redis in log mode"))
            .with(
                Feature::Inspect,
                Unsupported("AMQP does not list bindings or unacknowledged deliveries; use the management API"),
            )
            .with(
                Feature::Reset,
                Unsupported("a queue has no other position to go to; delete the group and make it again"),
            );
        // Confirmed when every queue wrote it to its disk: a classic one, or the Raft log of a quorum queue. That of a
        // cluster is on a majority, but AMQP does not say how many nodes there are.
        all.send_level = Durability::Disk;
        // An acknowledgement is never answered.
        all.settle_level = Durability::Sent;
        all.detects_unroutable = true;
        all.retains_without_group = false;
        all.receipt_positions = false;
        all.attempts = AttemptCounts::AtLeast;
        all.max_partitions = 1;
        all
    }

    /// Redis Streams, on a server that does not flush each write.
    pub fn redis() -> Self {
        let mut all = Self::new("redis")
            .with(Feature::Retry, Emulated("parked in the pending list, counted in a hash of the group"))
            .with(Feature::Delay, Emulated("parked in the pending list with an index of due times"))
            .with(Feature::DeadLetters, Emulated("one script writes the dead letter and acknowledges"))
            .with(Feature::Redrive, Emulated("through a side stream that only the group reads"))
            .with(
                Feature::Replay,
                Unsupported("topics remove what all groups handled; those in log mode (Retention::Log) are replayed"),
            )
            .with(Feature::Partitions, Unsupported("a stream has no partitions; use several topics, or Kafka"))
            .with(
                Feature::PerKey,
                Unsupported("members of a group read one stream side by side; use one member, or Kafka"),
            );
        // A take is counted by the server, a hand-over by the library when it is settled: a crash in between is not counted.
        all.attempts = AttemptCounts::AtLeast;
        // The lease runs out, and a member looks every third of a lease.
        all.takeover = Takeover { lease_tenths: 15, fixed: Duration::from_secs(1) };
        all.max_partitions = 1;
        all
    }

    /// Redis Pub/Sub.
    pub fn redis_pubsub() -> Self {
        let mut all = Self::new("redis-pubsub");
        for feature in Feature::ALL.iter().copied().filter(|f| *f != Feature::Broadcast) {
            all = all.with(feature, Unsupported(STORES_NOTHING));
        }
        all.send_level = Durability::Sent;
        all.settle_level = Durability::Sent;
        all.retains_without_group = false;
        all.counts_receivers = true;
        all.receipt_positions = false;
        // Nothing is taken over; a connection that is dead is noticed within this.
        all.takeover = Takeover { lease_tenths: 0, fixed: Duration::from_secs(20) };
        all.max_partitions = 1;
        all
    }
}
