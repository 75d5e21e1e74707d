//! What this broker can do, as data.

use crate::url::QueueType;
use mq_api::{AttemptCounts, Capabilities, Durability, Feature, Support, Takeover};
use std::time::Duration;

/// The capabilities for a queue type.
pub(crate) fn capabilities(kind: QueueType, heartbeat: Duration, server: Option<String>) -> Capabilities {
    let name = match kind {
        QueueType::Quorum => "amqp",
        QueueType::Classic => "amqp-classic",
    };
    let per_key = match kind {
        QueueType::Quorum => {
            "a queue has no order per key among its consumers; use memory, Kafka, or one member at a time"
        }
        QueueType::Classic => "a classic queue has no order per key and counts no crashes; use memory or Kafka",
    };
    let mut caps = Capabilities::new(name)
        .with(Feature::Partitions, Support::Unsupported("a queue is one; use several topics"))
        .with(Feature::Replay, Support::Unsupported(
                "a queue forgets what was handled; use the native option queue-type=stream, Kafka, or Redis in log mode",
            ))
        .with(Feature::PerKey, Support::Unsupported(per_key))
        .with(
            Feature::Retry,
            Support::Emulated("a copy with the attempt number, confirmed before the original is acknowledged"),
        )
        .with(Feature::Delay, Support::Emulated("queues of fixed time to live, per group, made when needed"))
        .with(
            Feature::DeadLetters,
            Support::Emulated("published with the envelope, confirmed before the acknowledgement"),
        )
        .with(Feature::Redrive, Support::Emulated("taken from the dead letters and published to the group's queue"))
        .with(Feature::Peek, Support::Emulated("taken and given back, so that others do not see them meanwhile"))
        .with(
            Feature::Inspect,
            Support::Unsupported("AMQP does not list bindings or unacknowledged deliveries; use the management API"),
        )
        .with(Feature::Reset, Support::Unsupported("a queue has no other position to go to; delete and make the group"))
        .with(
            Feature::Patterns,
            Support::Unsupported("a subscription is to one exchange; use the native option routing-key"),
        );
    caps.server = server;
    // Confirmed when every queue wrote it to its disk: a classic one, or the Raft log of a quorum queue. That of a
    // cluster is on a majority, but AMQP does not say how many nodes there are.
    caps.send_level = Durability::Disk;
    // An acknowledgement is never answered.
    caps.settle_level = Durability::Sent;
    caps.detects_unroutable = true;
    caps.retains_without_group = false;
    caps.receipt_positions = false;
    caps.attempts = AttemptCounts::AtLeast;
    // No leases: the broker notices a dead peer by its socket at once, or after two heartbeats without a sign of it.
    // On a classic queue what was taken before comes back with its count by a delay of one second.
    let counting = Duration::from_secs(if kind == QueueType::Classic { 1 } else { 0 });
    caps.takeover = Takeover { lease_tenths: 0, fixed: heartbeat * 2 + Duration::from_secs(1) + counting };
    caps.max_partitions = 1;
    caps
}
