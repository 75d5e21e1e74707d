//! What a driver is asked to carry out: the settlements that piled up since it last took some.

use crate::policy::Settlement;
use mq_api::{Position, Stored};
use std::sync::Arc;

/// What a driver knows a delivery by: a stream id, a delivery tag, an offset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub u64, pub u64);

/// An acknowledgement to carry out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// Which lane, by [`Lane::id`](crate::Lane::id).
    pub lane: u32,
    /// Which delivery.
    pub token: Token,
    /// The operation it belongs to.
    pub op: u64,
}

/// Anything else to carry out.
#[derive(Debug)]
pub struct Other {
    /// Which lane.
    pub lane: u32,
    /// Which delivery.
    pub token: Token,
    /// The operation.
    pub op: u64,
    /// Where the message is, for envelopes.
    pub position: Position,
    /// The message, for drivers that move it by writing it again.
    pub message: Option<Arc<Stored>>,
    /// What to do.
    pub how: Carry,
}

/// What a driver is asked to carry out besides acks.
#[derive(Debug)]
pub enum Carry {
    /// By the retry and dead-letter policy.
    Settle(Settlement),
    /// Record durably that this crash suspect is about to be handed over alone for the n-th time, then tell
    /// [`SettleQueue::trial_recorded`](crate::SettleQueue::trial_recorded). A driver that cannot record it tells so at once.
    Trial(u32),
}

/// What piled up. Reused between flushes.
#[derive(Debug, Default)]
pub struct Plan {
    /// Acknowledgements, in order of the calls.
    pub acks: Vec<Ack>,
    /// Everything else, in order of the calls.
    pub others: Vec<Other>,
    /// Lanes in which something was parked: there is nothing to carry out, and a driver that records attempts durably does so
    /// before it confirms.
    pub noted: Vec<u32>,
    /// Confirm up to this operation.
    pub upto: u64,
    /// Somebody waits for an answer: flush now, do not gather more.
    pub urgent: bool,
}

impl Plan {
    /// Whether there is nothing to carry out.
    pub fn is_empty(&self) -> bool {
        self.acks.is_empty() && self.others.is_empty() && self.noted.is_empty()
    }
}
