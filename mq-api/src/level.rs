use std::fmt;

/// How safely the broker holds what it confirmed. Ordered: each level includes the ones before it.
///
/// [`Capabilities`](crate::Capabilities) state the level of a connection (it depends on configuration, server and queue
/// type), receipts and settlements carry it, and `require_durability` of a
/// [`Subscription`](crate::Subscription::require_durability) or [`ProducerSpec`](crate::ProducerSpec) refuses less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Durability {
    /// Written to the broker; the broker never says that it holds it (an AMQP ack, a Redis Pub/Sub message).
    Sent,
    /// The broker holds it in memory: a kill of the broker may lose it.
    Memory,
    /// The broker wrote it to disk: a kill of the broker process does not lose it.
    Disk,
    /// More than one broker node holds it.
    Replicated,
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sent => "sent",
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Replicated => "replicated",
        })
    }
}
