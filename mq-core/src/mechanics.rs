//! How a backend does what the policy decides: data, so that the state machine exists once.

use std::time::Duration;

/// Who makes a message come again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryBy {
    /// The driver, by a [`Settlement::Retry`](crate::Settlement::Retry) (memory, Redis: parked at the broker).
    Driver,
    /// The engine publishes a copy to the group's delay place and acknowledges the original once that is confirmed (RabbitMQ).
    Publish,
    /// The engine holds it in memory up to this long, and publishes a copy beyond (Kafka).
    ParkThenPublish {
        /// Longest delay held in memory.
        park: Duration,
    },
}

/// Who writes a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveBy {
    /// The driver, atomically with the acknowledgement.
    Driver,
    /// The engine publishes it and acknowledges the original once that is confirmed.
    Publish,
}

/// Who takes back what was not tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleaseBy {
    /// The driver, by a [`Settlement::Release`](crate::Settlement::Release).
    Driver,
    /// It stays in the lane and is handed out again; at close it is left unacknowledged (Kafka).
    Engine,
}

/// The mechanics of one backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mechanics {
    /// Retries.
    pub retry: RetryBy,
    /// Dead letters.
    pub dead_letter: MoveBy,
    /// Releases.
    pub release: ReleaseBy,
}
