use super::Outcome;
use super::slots::Polled;
use mq_api::{AckRun, BoxError, Class, CloseReport, Disposition, Ticket};
use std::ops::AddAssign;

/// What a worker did, in messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Acknowledged.
    pub acked: u64,
    /// Failed: an error, a time-out or a panic. Retried or dead-lettered by the retry policy.
    pub failed: u64,
    /// Of those, panics.
    pub panicked: u64,
    /// Dead-lettered because the handler's [`Outcome`] said so, or because it could not be decoded. What the retry policy
    /// dead-letters (a permanent failure, the last attempt) is in [`failed`](Self::failed); `Admin::backlog` counts all.
    pub dead_lettered: u64,
    /// Given back untried: by the handler, or fetched ahead and not begun.
    pub released: u64,
    /// No longer ours before the handler was done (lease lost, partition revoked, `max_processing`, the deadline of a
    /// shutdown, [`abandon`](super::WorkerHandle::abandon)): the handler was dropped. Those of a deadline are in
    /// [`close`](Self::close) as given back, too.
    pub lost: u64,
    /// What closing the consumers left.
    pub close: CloseReport,
}

impl AddAssign for Report {
    fn add_assign(&mut self, other: Self) {
        self.acked += other.acked;
        self.failed += other.failed;
        self.panicked += other.panicked;
        self.dead_lettered += other.dead_lettered;
        self.released += other.released;
        self.lost += other.lost;
        self.close += other.close;
    }
}

/// Settles what handlers decided, and counts. Acknowledgements of neighbours are gathered until `flush`.
#[derive(Default)]
pub(super) struct Books {
    acks: AckRun,
    /// A handler said that what it depends on is down, since [`take_transient`](Self::take_transient) was asked last.
    transient: bool,
    pub(super) report: Report,
}

impl Books {
    /// Sends out the acknowledgements gathered so far. Called before the task yields.
    #[inline]
    pub(super) fn flush(&mut self) {
        self.acks.flush();
    }

    /// Whether a handler failed for a transient reason: the subscription pauses, and what was fetched ahead is not to be begun.
    #[inline]
    pub(super) fn take_transient(&mut self) -> bool {
        std::mem::take(&mut self.transient)
    }

    /// A handler succeeded: the case that must be cheap.
    #[inline(always)]
    pub(super) fn ack(&mut self, ticket: Ticket) {
        self.report.acked += 1;
        self.acks.push(ticket);
    }

    /// Settles by what became of a handler.
    pub(super) fn enter<E: Into<BoxError>>(&mut self, polled: Polled<Result<Outcome, E>, Ticket>) {
        match polled {
            Polled::Done(Ok(outcome), ticket) => self.settle_or_ack(outcome, ticket),
            Polled::Done(Err(error), ticket) => self.settle(Outcome::failed(error), ticket),
            Polled::Panicked(text, ticket) => self.panicked(text, ticket),
            Polled::Lost(ticket) => self.lost(ticket),
            Polled::Pending => {}
        }
    }

    /// Settles one message; an acknowledgement is gathered with its neighbours.
    #[inline]
    pub(super) fn settle_or_ack(&mut self, outcome: Outcome, ticket: Ticket) {
        match outcome {
            Outcome::Ack => self.ack(ticket),
            outcome => self.settle(outcome, ticket),
        }
    }

    #[cold]
    fn settle(&mut self, outcome: Outcome, ticket: Ticket) {
        // Acknowledgements gathered before are of earlier messages: they go first.
        self.acks.flush();
        let source = ticket.source();
        let topic = source.map(|s| s.topic.as_str());
        let group = source.and_then(|s| s.group.as_ref()).map(|g| g.as_str());
        match &outcome {
            Outcome::Ack => self.report.acked += 1,
            Outcome::Nack { failure, .. } => {
                self.report.failed += 1;
                self.transient |= failure.class() == Class::Transient;
                tracing::warn!(topic, group, class = ?failure.class(), error = %failure, "a handler failed");
            }
            Outcome::DeadLetter { reason, error } => {
                self.report.dead_lettered += 1;
                let error = error.as_ref().map(|e| e.chain());
                tracing::warn!(topic, group, %reason, error, "a message goes to the dead letters");
            }
            Outcome::Release => self.report.released += 1,
        }
        drop(ticket.settle(Disposition::from(outcome)));
    }

    /// The handler panicked.
    #[cold]
    pub(super) fn panicked(&mut self, text: String, ticket: Ticket) {
        self.report.panicked += 1;
        self.settle(Outcome::failed(text), ticket);
    }

    /// The message is no longer ours.
    #[cold]
    pub(super) fn lost(&mut self, ticket: Ticket) {
        self.report.lost += 1;
        // Whatever is said now is stale and writes nothing; the message has, or gets, another owner.
        drop(ticket);
    }
}
