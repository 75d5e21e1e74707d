//! Settlements that make one mistake. Each delivery has a lane of its own, with one slot.

use super::{Bug, State};
use futures_util::future::BoxFuture;
use mq_api::{Class, Disposition, Durability, Failure, Lost, Settle, SettleStart, Settled, Source, Ticket};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;

/// What the lanes of one consumer share.
#[derive(Default)]
pub(super) struct Siblings {
    /// In order of hand-over.
    pub(super) earlier: Mutex<Vec<Weak<FaultyLane>>>,
    /// Nothing is handed over before this.
    pub(super) parked_until: Mutex<Option<Instant>>,
}

pub(super) struct FaultyLane {
    state: Arc<State>,
    siblings: Arc<Siblings>,
    source: Source,
    /// The last message of a batch, under [`Bug::BatchAckLosesLast`].
    last_of_batch: bool,
    ticket: Mutex<Option<Ticket>>,
    lost: Mutex<Option<Lost>>,
    answer: Mutex<Option<BoxFuture<'static, Settled>>>,
}

impl FaultyLane {
    /// Without a ticket it is a delivery that the broker knows nothing of.
    pub(super) fn new(
        state: Arc<State>,
        siblings: Arc<Siblings>,
        source: Source,
        ticket: Option<Ticket>,
        last_of_batch: bool,
    ) -> Arc<Self> {
        let lane = Arc::new(Self {
            state,
            siblings,
            source,
            last_of_batch,
            lost: Mutex::new(ticket.as_ref().and_then(Ticket::lost)),
            ticket: Mutex::new(ticket),
            answer: Mutex::new(None),
        });
        lane.siblings.earlier.lock().push(Arc::downgrade(&lane));
        lane
    }

    fn act(&self, how: Disposition) -> SettleStart {
        let Some(ticket) = self.ticket.lock().take() else {
            return SettleStart::Done(Settled::Confirmed(Durability::Memory));
        };
        let bug = self.state.bug;
        let ack = matches!(how, Disposition::Ack);
        if ack && (bug == Bug::AckLost || (bug == Bug::BatchAckLosesLast && self.last_of_batch)) {
            // Kept, so that not even its drop settles it; the lane lives as long as anyone asks.
            std::mem::forget(ticket);
            return SettleStart::Done(Settled::Confirmed(Durability::Memory));
        }
        if ack && bug == Bug::AckIsCumulative {
            self.ack_earlier();
        }
        let how = mistaken(bug, how);
        if bug == Bug::ParkedBlocks
            && let Disposition::Nack { after: Some(after), .. } = &how
        {
            *self.siblings.parked_until.lock() = Some(Instant::now() + *after);
        }
        let lost = self.lost.lock().take();
        let answer: BoxFuture<'static, Settled> = match bug {
            Bug::SettlesWhenPolled => Box::pin(async move { ticket.settle(how).await }),
            Bug::AckTicks if ack => {
                let settling = ticket.settle(how);
                Box::pin(async move {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    settling.await
                })
            }
            _ => Box::pin(ticket.settle(how)),
        };
        drop(lost);
        *self.answer.lock() = Some(answer);
        SettleStart::Queued(0)
    }

    fn ack_earlier(&self) {
        let earlier: Vec<_> = self.siblings.earlier.lock().iter().filter_map(Weak::upgrade).collect();
        for lane in earlier {
            if std::ptr::eq(&*lane, self) {
                return;
            }
            if let Some(ticket) = lane.ticket.lock().take() {
                drop(ticket.ack());
            }
        }
    }
}

/// What the broker is told in place of `how`.
fn mistaken(bug: Bug, how: Disposition) -> Disposition {
    let class = match &how {
        Disposition::Nack { failure: Some(failure), .. } => Some(failure.class()),
        _ => None,
    };
    let plain = |after| Disposition::Nack { failure: Some(Box::new(Failure::failed("it failed"))), after };
    match (bug, how) {
        (Bug::DeadLetterIsAck, Disposition::DeadLetter { .. }) => Disposition::Ack,
        (Bug::DeadLetterIsAck, Disposition::Nack { .. }) if class == Some(Class::Permanent) => Disposition::Ack,
        (Bug::DelayDoubled, Disposition::Nack { failure, after: Some(d) }) => {
            Disposition::Nack { failure, after: Some(d * 3) }
        }
        (Bug::DelayIgnored, Disposition::Nack { failure, .. }) => {
            Disposition::Nack { failure, after: Some(Duration::ZERO) }
        }
        (Bug::DropIsAck, Disposition::Dropped) => Disposition::Ack,
        (Bug::DropIsRelease, Disposition::Dropped) => Disposition::Release,
        (Bug::LateDropCounts, Disposition::Dropped) => plain(None),
        (Bug::NackIsAck, Disposition::Nack { .. }) => Disposition::Ack,
        (Bug::PermanentRetried, Disposition::Nack { after, .. }) if class == Some(Class::Permanent) => plain(after),
        (Bug::ReleaseCounts, Disposition::Release) => plain(Some(Duration::ZERO)),
        (Bug::TransientCounts, Disposition::Nack { after, .. }) if class == Some(Class::Transient) => plain(after),
        (_, how) => how,
    }
}

impl Settle for FaultyLane {
    fn ack(&self, _: u64) -> SettleStart {
        self.act(Disposition::Ack)
    }

    fn ack_run(&self, _: u64, _: u32) -> SettleStart {
        self.act(Disposition::Ack)
    }

    fn settle(&self, _: u64, how: Disposition) -> SettleStart {
        self.act(how)
    }

    fn poll_settled(&self, _: u64, cx: &mut Context<'_>) -> Poll<Settled> {
        let mut answer = self.answer.lock();
        let Some(future) = answer.as_mut() else { return Poll::Ready(Settled::Untracked) };
        let settled = std::task::ready!(future.as_mut().poll(cx));
        *answer = None;
        Poll::Ready(match (self.state.bug, settled) {
            (Bug::StaleConfirmed, Settled::Stale) => Settled::Confirmed(Durability::Memory),
            (Bug::UnknownConfirmed, Settled::Unknown) => Settled::Confirmed(Durability::Memory),
            (Bug::LevelInflated, Settled::Confirmed(_)) => Settled::Confirmed(Durability::Replicated),
            (_, settled) => settled,
        })
    }

    fn poll_lost(&self, _: u64, cx: &mut Context<'_>) -> Poll<()> {
        if self.state.bug == Bug::LostSilent {
            return Poll::Pending;
        }
        match self.lost.lock().as_mut() {
            Some(lost) => std::pin::Pin::new(lost).poll(cx),
            None => Poll::Ready(()),
        }
    }

    fn is_owned(&self, _: u64) -> bool {
        self.state.bug == Bug::LostSilent || self.ticket.lock().as_ref().is_some_and(Ticket::is_owned)
    }

    fn source(&self) -> &Source {
        &self.source
    }
}
