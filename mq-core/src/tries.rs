//! One send on its way: its state, its tries, and what may honestly be said of them.

use crate::keeper::Target;
use mq_api::{Error, ErrorKind, Message, Outcome, SendResult};
use std::task::Waker;
use std::time::Duration;
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
    /// What the deadline came from.
    pub(crate) limit: Duration,
    pub(crate) retry_until: Option<Instant>,
    pub(crate) due: Option<Instant>,
    pub(crate) tries: u32,
    /// Why its last try failed.
    pub(crate) last: Option<Error>,
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
        self.last = None;
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

    /// Its time limit passed; `trouble` is why there is no session now.
    pub(crate) fn too_late(&mut self, trouble: Option<&str>) -> Error {
        let outcome = outcome_now(self);
        let until = match (&self.state, outcome) {
            (State::Waiting, _) => "while it waited for room (see max_in_flight and max_in_flight_bytes)",
            (_, Outcome::NotSent) => "before the broker could be reached",
            _ => "before the broker confirmed",
        };
        let mut text = format!("the time limit of the send, {:?}, passed {until}", self.limit);
        if let Some(trouble) = trouble {
            text += "; there is no connection: ";
            text += trouble;
        }
        self.because(Error::new(ErrorKind::Timeout, text).with_outcome(outcome))
    }

    /// A try failed, and a later message of its key was confirmed meanwhile.
    pub(crate) fn overtaken(&mut self) -> Error {
        let text = "a try failed, and a later message of its key was confirmed meanwhile: another try would put it behind that one";
        self.because(Error::new(ErrorKind::Unavailable, text).with_outcome(outcome_now(self)))
    }

    /// With what its last try failed of.
    fn because(&mut self, error: Error) -> Error {
        match self.last.take() {
            Some(last) => error.with_source(last),
            None => error,
        }
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
