//! Where metrics and traces attach. The engine calls; what listens is somebody else's. All methods do nothing by default. They
//! must not block, and must not call back into the consumer or producer: some are called with its locks held.

use mq_api::{Error, HealthState, Reason, Source, Topic};
use std::time::Duration;

/// Listens to what the engine does.
pub trait Hooks: Send + Sync {
    /// `n` messages were confirmed.
    fn sent(&self, _topic: &Topic, _n: usize) {}
    /// A send failed.
    fn send_failed(&self, _topic: &Topic, _error: &Error) {}
    /// `n` deliveries were handed to the application.
    fn delivered(&self, _source: &Source, _n: usize) {}
    /// `n` deliveries were acknowledged.
    fn acked(&self, _source: &Source, _n: usize) {}
    /// A delivery will come again.
    fn retried(&self, _source: &Source, _attempt: u32, _after: Duration) {}
    /// A delivery goes to the dead letters.
    fn dead_lettered(&self, _source: &Source, _reason: &Reason) {}
    /// A delivery was discarded for good.
    fn discarded(&self, _source: &Source, _reason: &Reason) {}
    /// A consumer, producer or connection changed state.
    fn health(&self, _what: &Topic, _state: HealthState, _reason: &str) {}
}

/// Listens to nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoHooks;

impl Hooks for NoHooks {}
