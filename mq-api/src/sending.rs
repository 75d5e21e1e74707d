use crate::{Durability, Error, Position, Result};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// The broker has the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// Where it is, on brokers that say so.
    pub position: Option<Position>,
    /// The partition, where topics have them.
    pub partition: Option<u32>,
    /// How safely the broker holds it.
    pub level: Durability,
    /// How many subscribers received it, where the broker counts them (Redis Pub/Sub). 0 is no error.
    pub receivers: Option<u32>,
}

impl Receipt {
    /// With a level only.
    #[inline]
    pub const fn new(level: Durability) -> Self {
        Self { position: None, partition: None, level, receivers: None }
    }

    /// Adds where the message is.
    #[inline]
    pub const fn at(mut self, partition: Option<u32>, position: Position) -> Self {
        self.partition = partition;
        self.position = Some(position);
        self
    }

    /// Adds how many received it.
    pub const fn received_by(mut self, receivers: u32) -> Self {
        self.receivers = Some(receivers);
        self
    }
}

/// What became of a send.
pub type SendResult = Result<Receipt>;

/// Where a waiting send looks for its outcome. Implemented by the engine.
pub trait SendTable: Send + Sync {
    /// The outcome of a ticket. Wakes the last waker given.
    fn poll_sent(&self, ticket: u64, cx: &mut Context<'_>) -> Poll<SendResult>;
    /// Nobody waits any more: not sent if it still waits for room, else its outcome is counted.
    fn forget(&self, ticket: u64);
}

/// The outcome of a send, to come. The message was queued when this was made, so call order is send order.
///
/// Cancel-safe: dropped while the message waits for room it is not sent; once taken it is sent, and a failure that nobody
/// awaits is counted and shown by health.
#[must_use = "a send is confirmed only when this was awaited and is `Ok`"]
pub struct Sending {
    /// The usual outcome. It has nothing to drop, so that the usual case drops nothing.
    ready: Option<Receipt>,
    slow: Slow,
}

enum Slow {
    No,
    Yield,
    Failed { error: Error, yields: bool },
    Wait(Waiting),
    Done,
}

/// The one state that has to be told when nobody waits any more; the others drop without a look.
struct Waiting {
    table: Arc<dyn SendTable>,
    ticket: u64,
    told: bool,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.told {
            self.table.forget(self.ticket);
        }
    }
}

impl Sending {
    /// Known already.
    #[inline(always)]
    pub fn ready(result: SendResult) -> Self {
        match result {
            Ok(receipt) => Self::confirmed(receipt, false),
            Err(error) => Self::failed(error, false),
        }
    }

    /// Failed already, and as [`confirmed`](Self::confirmed).
    #[cold]
    pub fn failed(error: Error, yields: bool) -> Self {
        Self { ready: None, slow: Slow::Failed { error, yields } }
    }

    /// Confirmed already. With `yields`, other tasks run once first: a loop of ready sends must not starve them.
    #[inline(always)]
    pub fn confirmed(receipt: Receipt, yields: bool) -> Self {
        Self { ready: Some(receipt), slow: if yields { Slow::Yield } else { Slow::No } }
    }

    /// To be asked for.
    pub fn wait(table: Arc<dyn SendTable>, ticket: u64) -> Self {
        Self { ready: None, slow: Slow::Wait(Waiting { table, ticket, told: false }) }
    }

    #[cold]
    #[inline(never)]
    fn poll_slow(&mut self, cx: &mut Context<'_>) -> Poll<SendResult> {
        match &mut self.slow {
            Slow::Yield => {
                self.slow = Slow::No;
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Slow::Wait(waiting) => {
                let result = std::task::ready!(waiting.table.poll_sent(waiting.ticket, cx));
                waiting.told = true;
                self.slow = Slow::Done;
                Poll::Ready(result)
            }
            Slow::Failed { yields: yields @ true, .. } => {
                *yields = false;
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Slow::No | Slow::Failed { .. } | Slow::Done => {
                Poll::Ready(Err(match std::mem::replace(&mut self.slow, Slow::Done) {
                    Slow::Failed { error, .. } => error,
                    _ => Error::closed("this send (it was awaited before)"),
                }))
            }
        }
    }
}

impl Future for Sending {
    type Output = SendResult;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<SendResult> {
        if let Slow::No = self.slow
            && let Some(receipt) = self.ready.take()
        {
            return Poll::Ready(Ok(receipt));
        }
        self.poll_slow(cx)
    }
}

impl fmt::Debug for Sending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.slow {
            Slow::Wait(waiting) => write!(f, "Sending(ticket {})", waiting.ticket),
            Slow::Failed { error, .. } => write!(f, "Sending(failed: {error})"),
            _ => write!(f, "Sending({:?})", self.ready),
        }
    }
}
