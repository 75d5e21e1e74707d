//! One send on its way: its state, its tries, and what may honestly be said of them.

use crate::keeper::Target;
use mq_api::{Error, Message, Outcome, SendResult};
use std::task::Waker;
use tokio::time::Instant;

/// A message for a driver to write.
#[derive(Debug)]
pub struct Outgoing {
    /// To complete it by.
    pub ticket: u64,
    /// The message. Its contents are shared with the outbox, which keeps it for a retry.
    pub message: Message,
    /// Where to.
    pub target: Target,
    /// Its size, as [`Message::size`].
    pub size: u32,
}

#[derive(Debug, Default)]
pub(crate) enum State {
    #[default]
    Free,
    /// Waits for room.
    Waiting,
    /// May be written.
    Queued,
    /// Is being written or waits for its confirmation.
    Flying,
    Done(SendResult),
}

#[derive(Debug, Default)]
pub(crate) struct Slot {
    pub(crate) state: State,
    pub(crate) generation: u32,
    /// Order of the calls; unique.
    pub(crate) seq: u64,
    pub(crate) forgotten: bool,
    /// An earlier try may have been stored.
    pub(crate) doubtful: bool,
    /// A later send of its key was confirmed: a retry would put this one behind it.
    pub(crate) passed: bool,
    pub(crate) message: Message,
    pub(crate) target: Option<Target>,
    pub(crate) size: u32,
    pub(crate) key: Option<u64>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) retry_until: Option<Instant>,
    pub(crate) due: Option<Instant>,
    pub(crate) tries: u32,
    pub(crate) waker: Option<Waker>,
}

impl Slot {
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.state, State::Waiting | State::Queued | State::Flying)
    }

    pub(crate) fn release(&mut self) {
        self.state = State::Free;
        self.generation = self.generation.wrapping_add(1);
        self.waker = None;
        self.message.clear();
        self.target = None;
    }

    /// What the caller may be told: nothing more certain than what is known of every try.
    pub(crate) fn honest(&self, result: SendResult) -> SendResult {
        result.map_err(|error| match error.outcome() {
            Some(Outcome::Unknown) => error,
            Some(_) if !self.doubtful => error,
            _ => error.with_outcome(Outcome::Unknown),
        })
    }
}

/// What is known of an open send that ends now.
pub(crate) fn outcome_now(slot: &Slot) -> Outcome {
    match slot.state {
        State::Flying => Outcome::Unknown,
        _ if slot.doubtful => Outcome::Unknown,
        _ => Outcome::NotSent,
    }
}

/// Whether a failed try may have been stored.
pub(crate) fn may_be_stored(error: &Error) -> bool {
    !matches!(error.outcome(), Some(Outcome::NotSent | Outcome::Rejected))
}
