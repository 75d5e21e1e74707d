use crate::{Durability, Failure, Group, Reason, Topic};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// What became of a settlement.
///
/// Not a `Result` on purpose: a stale acknowledgement is normal under at-least-once delivery, and `?` on it would end a
/// healthy consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// The broker has it, at this level. Where a broker never answers (an AMQP ack) the level is [`Durability::Sent`].
    Confirmed(Durability),
    /// The delivery was no longer owned; nothing was written. The message comes, or came, to another owner.
    Stale,
    /// It was written, and the connection was lost before the answer. The message may come again.
    Unknown,
    /// There was nothing to settle: a broadcast or at-most-once delivery.
    Untracked,
}

impl Settled {
    /// Whether the settlement counts: confirmed, or nothing to settle.
    pub fn is_ok(self) -> bool {
        matches!(self, Self::Confirmed(_) | Self::Untracked)
    }
}

/// What the program decided about a delivery.
#[derive(Debug, Clone)]
pub enum Disposition {
    /// Done.
    Ack,
    /// It failed; the class of the failure decides. `after` overrides the back-off of the retry policy.
    Nack {
        /// Why.
        failure: Option<Box<Failure>>,
        /// When to deliver again at the earliest.
        after: Option<Duration>,
    },
    /// Dead-letter it now.
    DeadLetter {
        /// Why.
        reason: Reason,
        /// The error, for the envelope.
        error: Option<Box<Failure>>,
    },
    /// It was not tried: back at once, not counted.
    Release,
    /// The delivery was dropped unsettled: a nack.
    Dropped,
}

/// How a settlement starts: done at once, or queued under a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettleStart {
    /// Known already.
    Done(Settled),
    /// Ask with [`Settle::poll_settled`].
    Queued(u64),
}

/// Where deliveries come from: one ownership period of one topic or partition.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Source {
    /// The topic.
    pub topic: Topic,
    /// The group; `None` for a broadcast subscription.
    pub group: Option<Group>,
    /// The partition, where topics have them.
    pub partition: Option<u32>,
    /// Rises with every change of ownership: a fencing token where the broker has one.
    pub epoch: u64,
}

impl Source {
    /// A source without partition, epoch 0.
    pub fn new(topic: Topic, group: Option<Group>) -> Self {
        Self { topic, group, partition: None, epoch: 0 }
    }

    /// Sets partition and epoch.
    pub fn at(mut self, partition: Option<u32>, epoch: u64) -> Self {
        (self.partition, self.epoch) = (partition, epoch);
        self
    }
}

/// What a delivery points to. Implemented by the engine and by backends; programs use [`Delivery`](crate::Delivery).
///
/// Every call takes effect at once: it is queued or done when it returns, in call order.
pub trait Settle: Send + Sync {
    /// Acknowledges one.
    fn ack(&self, slot: u64) -> SettleStart;
    /// Acknowledges `n` neighbours from `first` on. `Stale` if any of them was.
    fn ack_run(&self, first: u64, n: u32) -> SettleStart;
    /// Settles one in any way.
    fn settle(&self, slot: u64, how: Disposition) -> SettleStart;
    /// The fate of a queued settlement. Being asked marks it urgent: it is flushed now, without waiting for others.
    fn poll_settled(&self, op: u64, cx: &mut Context<'_>) -> Poll<Settled>;
    /// Ready when the delivery is no longer owned (settled, lease lost, partition revoked, past `max_processing`).
    fn poll_lost(&self, slot: u64, cx: &mut Context<'_>) -> Poll<()>;
    /// Whether the delivery is still owned.
    fn is_owned(&self, slot: u64) -> bool;
    /// Where it came from.
    fn source(&self) -> &Source;
}

/// The pending answer to a settlement. The settlement itself took effect when this was made, so dropping this loses
/// nothing; awaiting it makes the settlement urgent and tells what became of it. Cancel-safe.
#[must_use = "awaiting tells whether the broker has the settlement; `drop(..)` says that you do not need to know"]
pub struct Settling(State);

enum State {
    Ready(Settled),
    Wait(Arc<dyn Settle>, u64),
}

impl Settling {
    /// A known answer.
    #[inline]
    pub fn ready(settled: Settled) -> Self {
        Self(State::Ready(settled))
    }

    /// From a start.
    #[inline]
    pub fn start(lane: Arc<dyn Settle>, start: SettleStart) -> Self {
        match start {
            SettleStart::Done(settled) => Self(State::Ready(settled)),
            SettleStart::Queued(op) => Self(State::Wait(lane, op)),
        }
    }
}

impl Future for Settling {
    type Output = Settled;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Settled> {
        let settled = match &self.0 {
            State::Ready(settled) => return Poll::Ready(*settled),
            State::Wait(lane, op) => match lane.poll_settled(*op, cx) {
                Poll::Ready(settled) => settled,
                Poll::Pending => return Poll::Pending,
            },
        };
        self.0 = State::Ready(settled);
        Poll::Ready(settled)
    }
}

impl fmt::Debug for Settling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            State::Ready(settled) => write!(f, "Settling({settled:?})"),
            State::Wait(_, op) => write!(f, "Settling(op {op})"),
        }
    }
}

/// Resolves when a delivery is no longer owned. See [`Delivery::lost`](crate::Delivery::lost). Cancel-safe; a clone
/// watches the same delivery.
#[derive(Clone)]
pub struct Lost {
    pub(crate) lane: Arc<dyn Settle>,
    pub(crate) slot: u64,
}

impl Lost {
    /// Of this slot.
    pub fn new(lane: Arc<dyn Settle>, slot: u64) -> Self {
        Self { lane, slot }
    }

    /// Where the delivery came from.
    pub fn source(&self) -> &Source {
        self.lane.source()
    }

    /// Whether the delivery is still owned, as far as this process knows.
    pub fn is_owned(&self) -> bool {
        self.lane.is_owned(self.slot)
    }
}

impl Future for Lost {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.lane.poll_lost(self.slot, cx)
    }
}

impl fmt::Debug for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lost(slot {})", self.slot)
    }
}
