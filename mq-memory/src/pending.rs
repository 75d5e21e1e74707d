//! What one group has taken from one partition and not settled: a ring that runs beside the log, addressed by position.

use crate::lines::Lines;
use mq_api::Failure;
use mq_core::SeqRing;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::{Deref, DerefMut};
use std::task::Waker;
use tokio::time::Instant;

/// One entry, 16 bytes: what the hot path reads and writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Pending {
    /// The member that holds it, or held it last. Which of its hand-overs that was is in [`History::turn`].
    pub(crate) owner: u32,
    /// `attempt << 3 | flags`; 0 = settled.
    pub(crate) state: u32,
    pub(crate) size: u32,
    /// In hand: the tick of the member's clock in which it was handed over. Delayed: since when, in tenths of a second of the
    /// broker's life.
    pub(crate) at: u32,
}

/// In the application's hands.
pub(crate) const HELD: u32 = 1;
/// Waits for its time.
pub(crate) const DELAYED: u32 = 2;
/// Waits behind another of its key.
pub(crate) const BLOCKED: u32 = 4;
const FLAGS: u32 = 7;

impl Pending {
    #[inline]
    pub(crate) fn held(owner: u32, attempt: u32, size: u32, at: u32) -> Self {
        Self { owner, state: attempt << 3 | HELD, size, at }
    }
    #[inline]
    pub(crate) fn attempt(self) -> u32 {
        self.state >> 3
    }
    #[inline]
    pub(crate) fn is(self, flag: u32) -> bool {
        self.state & flag != 0
    }
    #[inline]
    pub(crate) fn is_settled(self) -> bool {
        self.state == 0
    }
    /// Unsettled, in nobody's hands, and due.
    pub(crate) fn is_ready(self) -> bool {
        self.state != 0 && self.state & FLAGS == 0
    }
    pub(crate) fn set(&mut self, attempt: u32, flags: u32) {
        self.state = attempt << 3 | flags;
    }
}

/// What only entries with a history have.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    pub(crate) takes: u32,
    pub(crate) trials: u32,
    pub(crate) failure: Option<Box<Failure>>,
    /// It is to be handed over alone.
    pub(crate) suspect: bool,
    /// The number of its last hand-over; the first is 0. A handle of an earlier one settles nothing.
    pub(crate) turn: u64,
}

impl History {
    /// It is in hand alone, and goes back for a reason that says nothing of it.
    pub(crate) fn untried(&mut self) {
        self.trials = self.trials.saturating_sub(u32::from(self.suspect));
    }

    /// Whoever settles it did not die with it.
    pub(crate) fn survived(&mut self) {
        (self.takes, self.trials, self.suspect) = (0, 0, false);
    }
}

/// One group in one partition.
#[derive(Default)]
pub(crate) struct GroupPart {
    /// `head` = first unsettled position, `tail` = next one to take.
    pub(crate) entries: SeqRing<Pending>,
    /// Who waits for a message: members, each with its last poll.
    pub(crate) wakers: Vec<(u32, Waker)>,
    short: Short,
    rare: Rare,
}

/// What of [`Rare`] the hot paths need to know, so that they look once instead of at every field. Each mutable look at `Rare`
/// forgets it (see `DerefMut` of [`GroupPart`]), so it cannot be wrong; whoever finds it forgotten asks again.
#[derive(Default)]
struct Short {
    /// Who may take new messages without a look at anything else: a member, [`ANYBODY`], or nobody (0).
    take: u32,
    /// Whether an ack is only a mark on its entry.
    ack: bool,
}

/// No member is called this, and none 0.
pub(crate) const ANYBODY: u32 = u32::MAX;

/// What most messages have nothing to do with.
#[derive(Default)]
pub(crate) struct Rare {
    /// Due again, in order.
    pub(crate) again: BTreeSet<u64>,
    /// Due again, to be handed over alone.
    pub(crate) suspects: BTreeSet<u64>,
    pub(crate) delayed: BTreeMap<(Instant, u64), ()>,
    pub(crate) history: HashMap<u64, History>,
    pub(crate) gate: Option<Lines>,
    /// Who may take, where partitions are exclusive: owner, and whether it is to give the partition up.
    pub(crate) owner: Option<u32>,
    pub(crate) draining: bool,
    pub(crate) epoch: u64,
    /// Who waits to hear that a delivery is lost: position, owner, waker.
    pub(crate) lost: Vec<(u64, u32, Waker)>,
    pub(crate) deleted: bool,
    /// Under `ParkKey`: keys whose message was dead-lettered.
    pub(crate) parked_keys: BTreeMap<u64, u32>,
}

impl Deref for GroupPart {
    type Target = Rare;

    fn deref(&self) -> &Rare {
        &self.rare
    }
}

impl DerefMut for GroupPart {
    fn deref_mut(&mut self) -> &mut Rare {
        self.short = Short::default();
        &mut self.rare
    }
}

impl GroupPart {
    pub(crate) fn starting_at(position: u64, per_key: bool) -> Self {
        let rare = Rare { gate: per_key.then(Lines::default), ..Rare::default() };
        Self { entries: SeqRing::starting_at(position), rare, ..Self::default() }
    }

    /// Whether this member may take here.
    pub(crate) fn is_open_to(&self, member: u32) -> bool {
        !self.deleted && self.owner.is_none_or(|owner| owner == member && !self.draining)
    }

    /// Whether there is nothing but new messages, for this member to take.
    #[inline(always)]
    pub(crate) fn takes_short(&mut self, member: u32) -> bool {
        let may = |short: &Short| short.take == ANYBODY || short.take == member;
        may(&self.short) || may(self.look())
    }

    /// Whether an ack has nothing to do but mark its entry.
    #[inline(always)]
    pub(crate) fn acks_short(&mut self) -> bool {
        self.short.ack || self.look().ack
    }

    #[cold]
    #[inline(never)]
    fn look(&mut self) -> &Short {
        let Rare { again, suspects, gate, parked_keys, history, lost, owner, draining, deleted, .. } = &self.rare;
        let in_order = gate.is_none() && !*draining && !*deleted;
        let only_new = again.is_empty() && suspects.is_empty() && parked_keys.is_empty();
        let take = if in_order && only_new { owner.unwrap_or(ANYBODY) } else { 0 };
        self.short = Short { take, ack: in_order && history.is_empty() && lost.is_empty() };
        &self.short
    }

    /// The entry, if this member holds it by this hand-over.
    pub(crate) fn held_by(&mut self, member: u32, turn: u64, position: u64) -> Option<&mut Pending> {
        let now = self.rare.history.get(&position).map_or(0, |h| h.turn);
        if now == turn { self.held_by_member(member, position) } else { None }
    }

    /// The entry, if this member holds it by any of its hand-overs. Where no entry has a history, all are the first.
    #[inline]
    pub(crate) fn held_by_member(&mut self, member: u32, position: u64) -> Option<&mut Pending> {
        self.entries.get_mut(position).filter(|e| e.owner == member && e.state & HELD != 0)
    }

    /// Changes what only entries with a history have, if this one has it.
    pub(crate) fn on_history(&mut self, position: u64, change: impl FnOnce(&mut History)) {
        self.history.get_mut(&position).map(change);
    }

    /// An entry is over: handled, dead-lettered, or gone with its message. Says whether the next of its key may go out now.
    pub(crate) fn end(&mut self, position: u64) -> bool {
        if let Some(entry) = self.entries.get_mut(position) {
            entry.state = 0;
        }
        self.again.remove(&position);
        self.suspects.remove(&position);
        self.history.remove(&position);
        self.wake_lost(position);
        let next = self.gate.as_mut().and_then(|lines| lines.leave(position));
        next.is_some_and(|next| self.let_out(next))
    }

    /// What waited for another may go out, unless it waits for its time too.
    pub(crate) fn let_out(&mut self, position: u64) -> bool {
        let Some(entry) = self.entries.get_mut(position).filter(|e| e.is(BLOCKED)) else { return false };
        entry.set(entry.attempt(), 0);
        self.queue(position);
        true
    }

    fn queue(&mut self, position: u64) {
        match self.history.get(&position).is_some_and(|h| h.suspect) {
            true => self.suspects.insert(position),
            false => self.again.insert(position),
        };
    }

    /// Retires the settled prefix; says whether the head moved.
    #[inline]
    pub(crate) fn advance(&mut self) -> bool {
        let before = self.entries.head();
        while let Some(Pending { state: 0, .. }) = self.entries.front_mut() {
            self.entries.retire();
        }
        self.entries.head() != before
    }

    pub(crate) fn wake_lost(&mut self, position: u64) {
        let mut i = 0;
        while i < self.lost.len() {
            if self.lost[i].0 == position { self.lost.swap_remove(i).2.wake() } else { i += 1 }
        }
    }

    /// Whether a member holds anything here.
    pub(crate) fn holds(&self, owner: u32) -> bool {
        self.entries.iter().any(|(_, e)| e.owner == owner && e.is(HELD))
    }

    /// Positions that a member holds.
    pub(crate) fn held_positions(&self, owner: u32) -> Vec<u64> {
        self.entries.iter().filter(|(_, e)| e.owner == owner && e.is(HELD)).map(|(p, _)| p).collect()
    }

    /// Makes an entry due again, alone if it is a suspect. Behind another of its key it waits for that one.
    pub(crate) fn make_due(&mut self, position: u64, attempt: u32, suspect_at: u32) {
        let blocked = self.gate.as_ref().is_some_and(|lines| lines.waits(position));
        let Some(entry) = self.entries.get_mut(position) else { return };
        entry.set(attempt, if blocked { BLOCKED } else { 0 });
        if let Some(history) = self.history.get_mut(&position) {
            history.suspect = history.takes > 0 && history.takes.saturating_add(1) >= suspect_at;
        }
        if !blocked {
            self.queue(position);
        }
    }

    /// Moves what is due by `now` to the ready ones; says when the next is.
    pub(crate) fn release_due(&mut self, now: Instant, suspect_at: u32) -> (bool, Option<Instant>) {
        let mut any = false;
        while let Some((&(due, position), ())) = self.delayed.first_key_value() {
            if due > now {
                return (any, Some(due));
            }
            self.delayed.pop_first();
            if let Some(entry) = self.entries.get(position).copied()
                && entry.is(DELAYED)
            {
                self.make_due(position, entry.attempt(), suspect_at);
                any = true;
            }
        }
        (any, None)
    }
}
