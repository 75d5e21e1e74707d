use crate::{Admin, Capabilities, Consumer, HealthWatch, Producer, ProducerSpec, Result, Subscription};
use async_trait::async_trait;
use std::sync::Arc;
use std::time::Duration;

/// A connection to a broker. Object-safe; `anymq::connect` returns one behind an `Arc`.
///
/// `producer("orders")` and `subscribe(..)` are in [`BrokerExt`](crate::BrokerExt).
///
/// Producers and consumers outlive the handle that made them: dropping it ends nothing, [`close`](Self::close) ends all it made.
#[async_trait]
pub trait Broker: Send + Sync {
    /// What this broker can do, as it is configured and as far as it is known now. Checked again at reconnect.
    fn capabilities(&self) -> Arc<Capabilities>;

    /// Makes a producer for one topic: checks the request against the capabilities, makes or verifies topic and groups.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) names what is missing,
    /// [`ErrorKind::Topology`](crate::ErrorKind::Topology) spells out a difference. A broker that is away is waited for, up
    /// to the connection's limit.
    async fn open_producer(&self, spec: ProducerSpec) -> Result<Arc<dyn Producer>>;

    /// Makes a consumer: checks the request against the capabilities, makes or verifies topic, group and dead-letter topic.
    /// Messages sent after this returned are seen.
    ///
    /// # Errors
    /// As [`open_producer`](Self::open_producer).
    async fn open_consumer(&self, subscription: Subscription) -> Result<Box<dyn Consumer>>;

    /// Looking and tidying, where the broker can.
    fn admin(&self) -> Arc<dyn Admin>;

    /// How the connection is doing.
    fn health(&self) -> HealthWatch;

    /// Closes every consumer and producer made here, each within `deadline`, then the connections. Idempotent. Nothing of the
    /// library is left afterwards: no task, thread, connection, temporary queue or consumer name.
    async fn close(&self, deadline: Duration) -> CloseReport;
}

/// What a close left.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CloseReport {
    /// Deliveries that were still in hand at the deadline, or buffered, and were given back.
    pub given_back: u64,
    /// Sends and settlements whose fate is unknown.
    pub unknown: u64,
    /// Deliveries that could not be given back (the broker was away): another member gets them by takeover.
    pub leaked: u64,
    /// Client threads that blocked past the deadline and were abandoned.
    pub abandoned: u64,
}

impl CloseReport {
    /// Whether everything was settled, sent and given back.
    pub fn is_clean(&self) -> bool {
        self.unknown == 0 && self.leaked == 0 && self.abandoned == 0
    }
}

impl std::ops::AddAssign for CloseReport {
    fn add_assign(&mut self, other: Self) {
        self.given_back += other.given_back;
        self.unknown += other.unknown;
        self.leaked += other.leaked;
        self.abandoned += other.abandoned;
    }
}
