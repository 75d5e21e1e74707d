use crate::{
    BoxError, Disposition, Envelope, Failure, Lost, Message, Position, Reason, Settle, SettleStart, Settled, Settling,
    Source,
};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

/// A message as the library holds it: shared, its size known.
#[derive(Debug, Default)]
pub struct Stored {
    /// The message.
    pub message: Message,
    /// [`Message::size`], computed once.
    pub size: u32,
}

impl Stored {
    /// With its size.
    pub fn new(message: Message) -> Self {
        Self { size: u32::try_from(message.size()).unwrap_or(u32::MAX), message }
    }
}

/// The right to settle one delivery, once. Dropping it unsettled is a nack.
pub struct Ticket {
    lane: Option<Arc<dyn Settle>>,
    slot: u64,
}

impl Ticket {
    /// For backends.
    #[inline]
    pub fn new(lane: Arc<dyn Settle>, slot: u64) -> Self {
        Self { lane: Some(lane), slot }
    }

    /// Acknowledges.
    #[inline(always)]
    pub fn ack(self) -> Settling {
        match self.take() {
            Some((lane, slot)) => match lane.ack(slot) {
                SettleStart::Done(settled) => Settling::ready(settled),
                queued => Settling::start(lane, queued),
            },
            None => Settling::ready(Settled::Untracked),
        }
    }

    /// Settles in any way.
    #[inline]
    pub fn settle(self, how: Disposition) -> Settling {
        match self.take() {
            Some((lane, slot)) => {
                let start = lane.settle(slot, how);
                Settling::start(lane, start)
            }
            None => Settling::ready(Settled::Untracked),
        }
    }

    /// Resolves when the delivery is no longer owned.
    pub fn lost(&self) -> Option<Lost> {
        self.lane.as_ref().map(|lane| Lost::new(lane.clone(), self.slot))
    }

    /// Whether the delivery is still owned.
    pub fn is_owned(&self) -> bool {
        self.lane.as_ref().is_some_and(|lane| lane.is_owned(self.slot))
    }

    /// Where the delivery came from.
    pub fn source(&self) -> Option<&Source> {
        self.lane.as_ref().map(|lane| lane.source())
    }

    /// Lane and slot, without settling.
    #[inline(always)]
    pub(crate) fn take(mut self) -> Option<(Arc<dyn Settle>, u64)> {
        let (lane, slot) = (self.lane.take(), self.slot);
        // Emptied: its drop would look for a lane to tell, and find none.
        std::mem::forget(self);
        lane.map(|lane| (lane, slot))
    }
}

impl Drop for Ticket {
    #[inline]
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            lane.settle(self.slot, Disposition::Dropped);
        }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket(slot {})", self.slot)
    }
}

/// One message in the hands of the program, which owes it a settlement.
///
/// Reads as its [`Message`] (`delivery.payload`, `delivery.key`). Settling takes it by value, so twice does not compile.
/// Every settlement takes effect at the call, before the returned [`Settling`] is polled. Dropping a delivery unsettled
/// is a nack, never an ack; after close began or ownership was lost it goes back at once.
#[must_use = "dropping a delivery is a nack: it will come again"]
pub struct Delivery {
    message: Arc<Stored>,
    position: Position,
    attempt: u32,
    ticket: Ticket,
}

impl Delivery {
    /// For backends.
    #[inline]
    pub fn new(message: Arc<Stored>, position: Position, attempt: u32, ticket: Ticket) -> Self {
        Self { message, position, attempt, ticket }
    }

    /// Which hand-over to the application this is, 1 for the first. Exact or at least, as
    /// [`Capabilities::attempts`](crate::Capabilities::attempts) says. Prefetched, buffered, released or re-parked messages
    /// were not attempted.
    #[inline]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Where the message is in its partition or topic.
    #[inline]
    pub fn position(&self) -> Position {
        self.position
    }

    /// Topic, group, partition and ownership epoch.
    pub fn source(&self) -> &Source {
        static NOWHERE: std::sync::OnceLock<Source> = std::sync::OnceLock::new();
        match self.ticket.source() {
            Some(source) => source,
            None => NOWHERE.get_or_init(|| Source::new("".into(), None)),
        }
    }

    /// The topic's name.
    pub fn topic(&self) -> &str {
        self.source().topic.as_str()
    }

    /// The partition, where topics have them.
    pub fn partition(&self) -> Option<u32> {
        self.source().partition
    }

    /// The ownership epoch: a fencing token where the broker has one.
    pub fn epoch(&self) -> u64 {
        self.source().epoch
    }

    /// For a dead letter: what it says of itself.
    pub fn envelope(&self) -> Option<Envelope> {
        Envelope::read(&self.message.message.headers)
    }

    /// The message, shared.
    pub fn stored(&self) -> &Arc<Stored> {
        &self.message
    }

    /// A copy of the message (its contents are shared, not copied).
    pub fn message(&self) -> Message {
        self.message.message.clone()
    }

    /// Done: the group does not see the message again, unless the broker loses state of the confirmed level.
    #[inline(always)]
    pub fn ack(self) -> Settling {
        let Self { message, ticket, .. } = self;
        // The message goes first, so that the engine's own handle is unique and can be used again.
        drop(message);
        ticket.ack()
    }

    /// It failed. What happens next is decided by the class of the error (see [`Failure`]): redelivered after the back-off
    /// of the retry policy and dead-lettered after the last attempt (default), dead-lettered now (permanent), or
    /// redelivered uncounted with the subscription pausing (transient).
    pub fn nack(self, error: impl Into<BoxError>) -> Settling {
        let failure = Some(Box::new(Failure::from_error(error.into())));
        self.settle(Disposition::Nack { failure, after: None })
    }

    /// Like [`nack`](Self::nack), with a delay of the caller's: never early while this consumer lives, late by at most
    /// max(1 s, 10 %) while a member runs.
    pub fn nack_after(self, after: Duration, error: impl Into<BoxError>) -> Settling {
        let failure = Some(Box::new(Failure::from_error(error.into())));
        self.settle(Disposition::Nack { failure, after: Some(after) })
    }

    /// To the dead letters now. The original is acknowledged only after the dead letter is confirmed.
    pub fn dead_letter(self, reason: impl Into<Reason>) -> Settling {
        self.settle(Disposition::DeadLetter { reason: reason.into(), error: None })
    }

    /// Not tried: back at once, not counted.
    pub fn release(self) -> Settling {
        self.settle(Disposition::Release)
    }

    /// Settles in any way.
    #[inline]
    pub fn settle(self, how: Disposition) -> Settling {
        let Self { message, ticket, .. } = self;
        drop(message);
        ticket.settle(how)
    }

    /// Resolves when the delivery is no longer owned: its lease was lost, its partition revoked, `max_processing` passed.
    /// Work on it should stop; a settlement would be [`Settled::Stale`].
    pub fn lost(&self) -> Lost {
        match self.ticket.lost() {
            Some(lost) => lost,
            // A ticket without lane is made by nobody; the type only allows it while it is being taken apart.
            None => Lost::new(Arc::new(Nobody(Source::new("".into(), None))), 0),
        }
    }

    /// Whether the delivery is still owned, as far as this process knows.
    pub fn is_owned(&self) -> bool {
        self.ticket.is_owned()
    }

    /// Message, position, attempt and ticket: for a runner that keeps the ticket.
    #[inline]
    pub fn into_parts(self) -> (Arc<Stored>, Position, u32, Ticket) {
        (self.message, self.position, self.attempt, self.ticket)
    }
}

struct Nobody(Source);

impl Settle for Nobody {
    fn ack(&self, _: u64) -> SettleStart {
        SettleStart::Done(Settled::Untracked)
    }
    fn ack_run(&self, _: u64, _: u32) -> SettleStart {
        SettleStart::Done(Settled::Untracked)
    }
    fn settle(&self, _: u64, _: Disposition) -> SettleStart {
        SettleStart::Done(Settled::Untracked)
    }
    fn poll_settled(&self, _: u64, _: &mut std::task::Context<'_>) -> std::task::Poll<Settled> {
        std::task::Poll::Ready(Settled::Untracked)
    }
    fn poll_lost(&self, _: u64, _: &mut std::task::Context<'_>) -> std::task::Poll<()> {
        std::task::Poll::Ready(())
    }
    fn is_owned(&self, _: u64) -> bool {
        false
    }
    fn source(&self) -> &Source {
        &self.0
    }
}

impl Deref for Delivery {
    type Target = Message;

    #[inline]
    fn deref(&self) -> &Message {
        &self.message.message
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("topic", &self.topic())
            .field("partition", &self.partition())
            .field("position", &format_args!("{}", self.position))
            .field("attempt", &self.attempt)
            .field("message", &self.message.message)
            .finish()
    }
}
