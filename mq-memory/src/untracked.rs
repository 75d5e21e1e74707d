//! Broadcast deliveries in the program's hands: nothing to settle, but they count, and not longer than `max_processing`.

use crate::member::Member;
use mq_api::{Disposition, Settle, SettleStart, Settled, Source};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use tokio::time::Instant;

struct Hand {
    size: u32,
    since: Instant,
    /// Who waits to hear that it counts no more.
    lost: Vec<Waker>,
}

#[derive(Default)]
struct Hands {
    /// By position.
    held: BTreeMap<u64, Hand>,
    /// Whether a look for what is held too long is planned.
    planned: bool,
}

/// What is said of these deliveries only tells that they left the program's hands.
pub(crate) struct Untracked {
    pub(crate) source: Source,
    member: Weak<Member>,
    hands: Mutex<Hands>,
}

impl Untracked {
    pub(crate) fn new(source: Source, member: Weak<Member>) -> Self {
        Self { source, member, hands: Mutex::default() }
    }

    /// It comes to the program's hands, and is charged.
    pub(crate) fn hand_out(self: &Arc<Self>, member: &Member, position: u64, size: u32) {
        let since = member.core.env.now();
        let mut hands = self.hands.lock();
        hands.held.insert(position, Hand { size, since, lost: Vec::new() });
        let plan = !std::mem::replace(&mut hands.planned, true);
        drop(hands);
        if plan {
            self.look_at(member, since + member.sub.max_processing);
        }
    }

    fn look_at(self: &Arc<Self>, member: &Member, at: Instant) {
        let me = Arc::downgrade(self);
        member.core.timer.at(at, move || {
            if let Some(me) = me.upgrade() {
                me.end_late();
            }
        });
    }

    /// What is held too long counts no more, and its handler is told.
    fn end_late(self: &Arc<Self>) {
        let Some(member) = self.member.upgrade() else { return };
        let (now, limit) = (member.core.env.now(), member.sub.max_processing);
        let mut hands = self.hands.lock();
        let late: Vec<u64> =
            hands.held.iter().filter(|(_, hand)| hand.since + limit <= now).map(|(position, _)| *position).collect();
        let late = late.iter().filter_map(|position| hands.held.remove(position)).collect();
        let oldest = hands.held.values().map(|hand| hand.since).min();
        hands.planned = oldest.is_some();
        drop(hands);
        self.give(late);
        if let Some(oldest) = oldest {
            self.look_at(&member, oldest + limit);
        }
    }

    fn give(&self, left: Vec<Hand>) {
        if let Some(member) = self.member.upgrade() {
            member.flow.give(left.len(), left.iter().map(|hand| hand.size as usize).sum());
            member.has_room();
        }
        left.into_iter().flat_map(|hand| hand.lost).for_each(Waker::wake);
    }

    fn done(&self, first: u64, n: u32) -> SettleStart {
        let left = {
            let mut hands = self.hands.lock();
            (first..first + u64::from(n)).filter_map(|position| hands.held.remove(&position)).collect()
        };
        self.give(left);
        SettleStart::Done(Settled::Untracked)
    }
}

impl Settle for Untracked {
    fn ack(&self, position: u64) -> SettleStart {
        self.done(position, 1)
    }
    fn ack_run(&self, first: u64, n: u32) -> SettleStart {
        self.done(first, n)
    }
    fn settle(&self, position: u64, _: Disposition) -> SettleStart {
        self.done(position, 1)
    }
    fn poll_settled(&self, _: u64, _: &mut Context<'_>) -> Poll<Settled> {
        Poll::Ready(Settled::Untracked)
    }
    fn poll_lost(&self, position: u64, cx: &mut Context<'_>) -> Poll<()> {
        let mut hands = self.hands.lock();
        let Some(hand) = hands.held.get_mut(&position) else { return Poll::Ready(()) };
        if !hand.lost.iter().any(|waker| waker.will_wake(cx.waker())) {
            hand.lost.push(cx.waker().clone());
        }
        Poll::Pending
    }
    fn is_owned(&self, position: u64) -> bool {
        self.hands.lock().held.contains_key(&position)
    }
    fn source(&self) -> &Source {
        &self.source
    }
}
