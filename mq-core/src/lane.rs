//! A lane: one ownership period of one ordered slice (a stream, a channel, a partition epoch). Deliveries settle only through
//! their lane, and closing it is the only fence: settle, close and reading what to commit share one lock.

use crate::keygate::{KeyGate, key_hash};
use crate::ring::SeqRing;
use crate::settles::{Carry, SettleQueue, Token};
use crate::shared::Shared;
use mq_api::{Deliveries, Disposition, Message, Position, Settle, SettleStart, Settled, Source, Stored};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tokio::time::Instant;

/// A message that a driver fetched.
#[derive(Debug)]
pub struct Incoming {
    /// What the driver knows it by.
    pub token: Token,
    /// Where it is.
    pub position: Position,
    /// The message, library headers taken off.
    pub message: Message,
    /// The number of the hand-over that is to come, 1 for the first.
    pub attempt: u32,
    /// How often the broker says it was taken, this time included; 0 where it does not say. Suspicion only.
    pub takes: u32,
    /// How often it was recorded as handed over alone.
    pub trials: u32,
}

impl Incoming {
    /// A first delivery.
    pub fn new(token: Token, position: Position, message: Message) -> Self {
        Self { token, position, message, attempt: 1, takes: 1, trials: 0 }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// Waits behind another of its key.
    Blocked,
    /// In the inbox.
    Buffered,
    /// In the application's hands.
    Handed,
    /// Held until it is due again.
    Parked,
    /// A copy is being published; acknowledged when that is confirmed.
    Moving,
    /// Given back or lost without settlement: it must never count as settled.
    Left,
    #[default]
    Done,
}

/// What a driver may see of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotView {
    /// What the driver knows it by.
    pub token: Token,
    /// Whether it is settled.
    pub settled: bool,
    /// Whether it was handed to the application.
    pub handed: bool,
    /// Whether it is in the application's hands now.
    pub in_hand: bool,
    /// The attempt number.
    pub attempt: u32,
    /// How often it was recorded as handed over alone.
    pub trials: u32,
}

#[derive(Default)]
pub(crate) struct Slot {
    pub(crate) token: Token,
    pub(crate) position: Position,
    pub(crate) attempt: u32,
    pub(crate) bytes: u32,
    pub(crate) state: SlotState,
    suspect: bool,
    asked: bool,
    /// Parked within the bound of parked messages: its credit was given back.
    pub(crate) uncharged: bool,
    trials: u32,
    key: Option<u64>,
    handed_at: Option<Instant>,
    /// Kept while unsettled: retry and dead letter by publishing need it after the program took the message apart. A
    /// retired cell keeps the emptied allocation.
    pub(crate) keep: Option<Arc<Stored>>,
}

pub(crate) struct Ring {
    pub(crate) open: bool,
    pub(crate) slots: SeqRing<Slot>,
    gate: KeyGate,
    lost: Vec<(u64, Waker)>,
    drained: Vec<Waker>,
    prefix: Option<Token>,
    seen: Option<Position>,
}

/// See the module.
pub struct Lane {
    id: u32,
    pub(crate) ring: Mutex<Ring>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) settles: Arc<SettleQueue>,
    source: Source,
    me: std::sync::Weak<Lane>,
}

impl Lane {
    pub(crate) fn new(id: u32, shared: Arc<Shared>, settles: Arc<SettleQueue>, source: Source) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            id,
            ring: Mutex::new(Ring {
                open: true,
                slots: SeqRing::default(),
                gate: KeyGate::default(),
                lost: Vec::new(),
                drained: Vec::new(),
                prefix: None,
                seen: None,
            }),
            shared,
            settles,
            source,
            me: me.clone(),
        })
    }

    /// Its number within the session, as in [`Ack::lane`](crate::Ack::lane).
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Topic, group, partition, epoch.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// For the driver: messages arrived, in order. Charges the flow and wakes the consumer. Ignored after close.
    pub fn push(&self, incoming: impl IntoIterator<Item = Incoming>) {
        let Some(me) = self.me.upgrade() else { return };
        let policy = &self.shared.policy;
        let (mut first, mut n, mut count, mut bytes) = (0, 0, 0, 0usize);
        let mut suspects = Vec::new();
        let mut crashed = Vec::new();
        let mut at_most_once = Vec::new();
        let mut ring = self.ring.lock();
        if !ring.open {
            return;
        }
        let ring_mut = &mut *ring;
        for item in incoming {
            let key = if policy.per_key { item.message.key.as_deref().map(key_hash) } else { None };
            let (slot, cell) = ring_mut.slots.push_cell();
            let stored = Stored::new(item.message);
            ring_mut.seen = ring_mut.seen.max(Some(item.position));
            (cell.token, cell.position, cell.attempt) = (item.token, item.position, item.attempt);
            (cell.bytes, cell.trials, cell.key, cell.handed_at, cell.asked) =
                (stored.size, item.trials, key, None, false);
            let doubtful = !policy.untracked && self.shared.crash_tracked && item.takes >= policy.suspect_at;
            cell.suspect = doubtful;
            match cell.keep.as_mut().and_then(Arc::get_mut) {
                Some(reused) => *reused = stored,
                None => cell.keep = Some(Arc::new(stored)),
            }
            cell.state = SlotState::Buffered;
            if let Some(key) = key
                && !ring_mut.gate.arrive(key, slot)
            {
                cell.state = SlotState::Blocked;
                continue;
            }
            if doubtful && item.trials >= policy.crash_trials {
                crashed.push(slot);
            } else if doubtful {
                suspects.push(slot);
            } else {
                if n > 0 && first + n != slot {
                    self.shared.inbox.push(&me, first, n as u32);
                    n = 0;
                }
                if n == 0 {
                    first = slot;
                }
                n += 1;
                if self.shared.at_most_once {
                    at_most_once.push(cell.token);
                }
            }
            count += 1;
            bytes += cell.bytes as usize;
        }
        self.shared.flow.take(count, bytes);
        for slot in crashed {
            let attempts = ring.slots.get(slot).map_or(0, |s| s.attempt.saturating_sub(1));
            self.apply(&mut ring, slot, policy.crashed(attempts));
        }
        drop(ring);
        for slot in suspects {
            self.shared.inbox.push_suspect(&me, slot);
        }
        if self.shared.at_most_once && n > 0 {
            // Settled before the hand-over: handed out when the broker confirmed.
            let op = self.settles.ack(self.id, at_most_once);
            self.shared.inbox.push_after(&me, first, n as u32, op);
        } else {
            self.shared.inbox.push(&me, first, n as u32);
        }
        if self.shared.broadcast {
            self.shared.inbox.drop_beyond(self.shared.flow.max(), &self.shared.events);
        }
    }

    /// For the driver: one message arrived that is not due yet. It is parked, and handed out when it is.
    pub fn push_due(&self, item: Incoming, due: Instant) {
        let mut ring = self.ring.lock();
        if !ring.open {
            return;
        }
        let stored = Stored::new(item.message);
        let ring_mut = &mut *ring;
        ring_mut.seen = ring_mut.seen.max(Some(item.position));
        let (slot, cell) = ring_mut.slots.push_cell();
        (cell.token, cell.position, cell.attempt) = (item.token, item.position, item.attempt);
        (cell.bytes, cell.trials, cell.key, cell.handed_at, cell.asked) = (stored.size, item.trials, None, None, false);
        cell.suspect = false;
        cell.keep = Some(Arc::new(stored));
        cell.state = SlotState::Parked;
        cell.uncharged = self.shared.park();
        if !cell.uncharged {
            self.shared.flow.take(1, cell.bytes as usize);
        }
        drop(ring);
        self.shared.keeper.park(due, self, slot);
    }

    /// For the driver: whether another delayed message may be held in memory; past it they wait at the broker.
    pub fn may_park(&self) -> bool {
        self.shared.may_park()
    }

    /// For the driver: whether more may be pushed. Under `PerKey` at most `max_blocked` messages wait behind delayed keys;
    /// then this partition waits, and health names it. Asked again whenever the flow wakes.
    pub fn has_room(&self) -> bool {
        let blocked = self.ring.lock().gate.waiting();
        let full = blocked >= self.shared.max_blocked;
        self.shared.set_blocked(&self.source, full);
        !full
    }

    /// For the driver: these are no longer owned (lease lost, claimed by another). Their handles turn stale.
    pub fn lose(&self, tokens: &[Token]) {
        let mut ring = self.ring.lock();
        let lost: Vec<u64> =
            ring.slots.iter().filter(|(_, s)| s.is_held() && tokens.contains(&s.token)).map(|(seq, _)| seq).collect();
        for slot in lost {
            self.let_go(&mut ring, slot, SlotState::Done);
        }
        Self::retire(&mut ring);
    }

    /// For the driver: everything it still owns (in hand, buffered, parked or moving), for renewing leases.
    pub fn held(&self, into: &mut Vec<Token>) {
        let ring = self.ring.lock();
        into.extend(ring.slots.iter().filter(|(_, s)| s.is_held()).map(|(_, s)| s.token));
    }

    /// For the driver: every slot from the first unsettled one on, in order.
    pub fn visit(&self, mut f: impl FnMut(SlotView)) {
        let ring = self.ring.lock();
        for (_, s) in ring.slots.iter() {
            f(SlotView {
                token: s.token,
                settled: s.state == SlotState::Done,
                handed: s.handed_at.is_some(),
                in_hand: s.state == SlotState::Handed,
                attempt: s.attempt,
                trials: s.trials,
            });
        }
    }

    /// For the driver: the last token below which everything is settled. `None` before the first.
    pub fn prefix(&self) -> Option<Token> {
        self.ring.lock().prefix
    }

    /// For the driver: unsettled slots, and the span from the first unsettled one to the last pushed.
    pub fn span(&self) -> (usize, usize) {
        let ring = self.ring.lock();
        (ring.slots.iter().filter(|(_, s)| s.state != SlotState::Done).count(), ring.slots.len())
    }

    /// For the driver: stops handing out; what is buffered is given back. The lane stays open for what is in hand.
    pub fn begin_drain(&self) {
        let mut ring = self.ring.lock();
        let waiting: Vec<u64> = ring
            .slots
            .iter()
            .filter(|(_, s)| matches!(s.state, SlotState::Buffered | SlotState::Blocked | SlotState::Parked))
            .map(|(seq, _)| seq)
            .collect();
        for slot in waiting {
            self.give_back(&mut ring, slot);
        }
        Self::retire(&mut ring);
    }

    /// For the driver: ready when nothing of this lane is in hand or moving.
    pub fn poll_drained(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut ring = self.ring.lock();
        let busy =
            ring.open && ring.slots.iter().any(|(_, s)| matches!(s.state, SlotState::Handed | SlotState::Moving));
        if !busy {
            return Poll::Ready(());
        }
        if !ring.drained.iter().any(|w| w.will_wake(cx.waker())) {
            ring.drained.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Fences every handle of this period; says how many were in hand.
    pub fn close(&self) -> usize {
        let mut ring = self.ring.lock();
        if !ring.open {
            return 0;
        }
        ring.open = false;
        let held: Vec<(u64, bool)> = ring
            .slots
            .iter()
            .filter(|(_, s)| s.is_held())
            .map(|(seq, s)| (seq, s.state == SlotState::Handed))
            .collect();
        for (slot, _) in &held {
            self.let_go(&mut ring, *slot, SlotState::Left);
        }
        let mut wakers = std::mem::take(&mut ring.drained);
        wakers.extend(ring.lost.drain(..).map(|(_, w)| w));
        drop(ring);
        wakers.into_iter().for_each(Waker::wake);
        self.shared.inbox.nudge();
        held.iter().filter(|(_, handed)| *handed).count()
    }

    /// Gives a waiting slot back to the broker.
    fn give_back(&self, ring: &mut Ring, slot: u64) {
        let Some(s) = ring.slots.get_mut(slot) else { return };
        let (token, position, message) = (s.token, s.position, s.keep.clone());
        match self.shared.mechanics.release {
            crate::ReleaseBy::Driver => {
                let how = Carry::Settle(crate::Settlement::Release);
                self.settles.carry(self.id, token, position, message, how);
                self.let_go(ring, slot, SlotState::Done);
            }
            crate::ReleaseBy::Engine => self.let_go(ring, slot, SlotState::Left),
        }
    }

    /// Takes a held slot out of play, without a word to the broker.
    fn let_go(&self, ring: &mut Ring, slot: u64, to: SlotState) {
        let Some(s) = ring.slots.get_mut(slot) else { return };
        let bytes = s.bytes as usize;
        let charged = match s.state {
            SlotState::Blocked | SlotState::Done | SlotState::Left => false,
            SlotState::Parked => self.shared.unpark(std::mem::take(&mut s.uncharged)),
            SlotState::Handed => {
                self.shared.hands.give(1, bytes);
                true
            }
            SlotState::Buffered | SlotState::Moving => true,
        };
        s.state = to;
        if to == SlotState::Left {
            s.keep = None;
        }
        if charged {
            self.shared.flow.give(1, bytes);
        }
        Self::wake_lost(ring, slot);
    }

    fn wake_lost(ring: &mut Ring, slot: u64) {
        let mut i = 0;
        while i < ring.lost.len() {
            if ring.lost[i].0 == slot { ring.lost.swap_remove(i).1.wake() } else { i += 1 }
        }
    }

    /// Retires the settled prefix.
    pub(crate) fn retire(ring: &mut Ring) {
        while let Some(s) = ring.slots.front_mut()
            && s.state == SlotState::Done
        {
            match s.keep.as_mut().map(Arc::get_mut) {
                Some(Some(unique)) => unique.message.clear(),
                _ => s.keep = None,
            }
            ring.prefix = Some(s.token);
            ring.slots.retire();
        }
        if !ring.drained.is_empty()
            && !ring.slots.iter().any(|(_, s)| matches!(s.state, SlotState::Handed | SlotState::Moving))
        {
            ring.drained.drain(..).for_each(Waker::wake);
        }
    }

    /// A slot is settled for good: the next of its key may go out.
    pub(crate) fn finish(&self, ring: &mut Ring, slot: u64) {
        let Some(s) = ring.slots.get_mut(slot) else { return };
        s.state = SlotState::Done;
        if let Some(key) = s.key.take()
            && let Some(next) = ring.gate.leave(key)
            && let Some(waiting) = ring.slots.get_mut(next)
            && let Some(me) = self.me.upgrade()
            && waiting.state == SlotState::Blocked
        {
            waiting.state = SlotState::Buffered;
            self.shared.flow.take(1, waiting.bytes as usize);
            match waiting.suspect {
                true => self.shared.inbox.push_suspect(&me, next),
                false => self.shared.inbox.push(&me, next, 1),
            }
        }
        Self::wake_lost(ring, slot);
        Self::retire(ring);
    }

    /// Back into the inbox: a parked one is due.
    pub(crate) fn unpark(&self, slot: u64) {
        let mut ring = self.ring.lock();
        let Some(me) = self.me.upgrade() else { return };
        if !ring.open {
            return;
        }
        let Some(s) = ring.slots.get_mut(slot) else { return };
        if s.state != SlotState::Parked {
            return;
        }
        s.state = SlotState::Buffered;
        let bytes = s.bytes as usize;
        if !self.shared.unpark(std::mem::take(&mut s.uncharged)) {
            self.shared.flow.take(1, bytes);
        }
        drop(ring);
        self.shared.inbox.push(&me, slot, 1);
    }

    /// Hands out of `first..first + n` what is still buffered; says how many were handed and how many looked at.
    pub(crate) fn hand_out(&self, first: u64, n: u32, out: &mut Deliveries, now: Instant) -> (usize, u32) {
        let Some(me) = self.me.upgrade() else { return (0, n) };
        let mut ring = self.ring.lock();
        if !ring.open {
            return (0, n);
        }
        let (mut got, mut looked) = (0, 0);
        for slot in first..first + u64::from(n) {
            let Some(s) = ring.slots.get_mut(slot) else {
                looked += 1;
                continue;
            };
            if s.state != SlotState::Buffered {
                looked += 1;
                continue;
            }
            let size = s.bytes as usize;
            if !self.shared.hands.fits(size) {
                break;
            }
            let Some(message) = s.keep.clone() else {
                looked += 1;
                continue;
            };
            looked += 1;
            s.state = SlotState::Handed;
            s.handed_at = Some(now);
            if s.suspect {
                s.trials += 1;
            }
            self.shared.hands.take(1, size);
            out.run(&me, slot).push(message, s.position, s.attempt);
            got += 1;
        }
        (got, looked)
    }

    pub(crate) fn weak(&self) -> std::sync::Weak<Lane> {
        self.me.clone()
    }

    pub(crate) fn reinbox(&self, slot: u64) {
        if let Some(me) = self.me.upgrade() {
            self.shared.inbox.push(&me, slot, 1);
        }
    }

    /// At the deadline of a close: what is still in hand goes back; says how many.
    pub(crate) fn give_back_handed(&self) -> u64 {
        let mut ring = self.ring.lock();
        let handed: Vec<u64> =
            ring.slots.iter().filter(|(_, s)| s.state == SlotState::Handed).map(|(seq, _)| seq).collect();
        handed.iter().for_each(|slot| self.give_back(&mut ring, *slot));
        Self::retire(&mut ring);
        handed.len() as u64
    }

    /// Where a re-created group would have to start: the first position not known settled, and the last one seen.
    pub(crate) fn resume_point(&self) -> (Option<Position>, Option<Position>) {
        let ring = self.ring.lock();
        let low = ring.slots.iter().find(|(_, s)| s.state != SlotState::Done).map(|(_, s)| s.position);
        (low, ring.seen)
    }

    pub(crate) fn is_unsettled(&self, slot: u64) -> bool {
        let ring = self.ring.lock();
        ring.open && ring.slots.get(slot).is_some_and(|s| matches!(s.state, SlotState::Buffered | SlotState::Handed))
    }

    pub(crate) fn any_handed_here(&self) -> bool {
        self.shared.hands.in_flight() > 0
    }

    /// The trial of a suspect is recorded at the broker.
    pub(crate) fn poll_trial(&self, slot: u64, cx: &mut Context<'_>) -> Poll<()> {
        let (token, ask) = {
            let mut ring = self.ring.lock();
            let Some(s) = ring.slots.get_mut(slot) else { return Poll::Ready(()) };
            let ask = (!std::mem::replace(&mut s.asked, true)).then_some((s.position, s.keep.clone(), s.trials + 1));
            (s.token, ask)
        };
        if let Some((position, message, n)) = ask {
            self.settles.carry(self.id, token, position, message, Carry::Trial(n));
        }
        self.settles.poll_trial(cx, self.id, token)
    }

    /// For broadcast: the oldest buffered were dropped.
    pub(crate) fn forget_buffered(&self, first: u64, n: u32) {
        let mut ring = self.ring.lock();
        for slot in first..first + u64::from(n) {
            if ring.slots.get(slot).is_some_and(|s| s.state == SlotState::Buffered) {
                self.let_go(&mut ring, slot, SlotState::Done);
            }
        }
        Self::retire(&mut ring);
    }

    /// Settles what was in hand since before `limit` as timed out.
    pub(crate) fn expire(&self, limit: Instant) {
        let mut ring = self.ring.lock();
        let late: Vec<(u64, u32)> = ring
            .slots
            .iter()
            .filter(|(_, s)| s.state == SlotState::Handed && s.handed_at.is_some_and(|t| t <= limit))
            .map(|(seq, s)| (seq, s.attempt))
            .collect();
        for (slot, attempt) in late {
            let how = self.shared.policy.timed_out(attempt, self.shared.env.random_share());
            self.take_back(&mut ring, slot);
            self.apply(&mut ring, slot, how);
            Self::wake_lost(&mut ring, slot);
        }
    }

    fn take_back(&self, ring: &mut Ring, slot: u64) {
        if let Some(s) = ring.slots.get_mut(slot) {
            self.shared.hands.give(1, s.bytes as usize);
        }
    }

    #[inline]
    fn handed<'r>(&self, ring: &'r mut MutexGuard<'_, Ring>, slot: u64) -> Option<&'r mut Slot> {
        if !ring.open {
            return None;
        }
        ring.slots.get_mut(slot).filter(|s| s.state == SlotState::Handed)
    }

    fn after_settle(&self, bytes: usize) {
        self.shared.flow.give(1, bytes);
        self.shared.settled_one();
    }
}

impl Slot {
    fn is_held(&self) -> bool {
        !matches!(self.state, SlotState::Done | SlotState::Left)
    }
}

impl Settle for Lane {
    fn ack(&self, slot: u64) -> SettleStart {
        self.ack_run(slot, 1)
    }

    fn ack_run(&self, first: u64, n: u32) -> SettleStart {
        let mut ring = self.ring.lock();
        let (mut done, mut bytes) = (0usize, 0usize);
        let untracked = self.shared.policy.untracked;
        let mut tokens = Vec::new();
        let keyed = self.shared.policy.per_key;
        for slot in first..first + u64::from(n) {
            let Some(s) = self.handed(&mut ring, slot) else { continue };
            s.state = SlotState::Done;
            done += 1;
            bytes += s.bytes as usize;
            tokens.push(s.token);
            if keyed {
                self.finish(&mut ring, slot);
            }
        }
        if done == 0 {
            return SettleStart::Done(if untracked { Settled::Untracked } else { Settled::Stale });
        }
        if !ring.lost.is_empty() {
            (first..first + u64::from(n)).for_each(|slot| Self::wake_lost(&mut ring, slot));
        }
        Self::retire(&mut ring);
        let op = if untracked { 0 } else { self.settles.ack(self.id, tokens) };
        drop(ring);
        self.shared.hands.give(done, bytes);
        self.shared.flow.give(done, bytes);
        self.shared.settled_one();
        self.shared.handled();
        match (untracked, done == n as usize) {
            (true, _) => SettleStart::Done(Settled::Untracked),
            (false, true) => SettleStart::Queued(op),
            (false, false) => SettleStart::Done(Settled::Stale),
        }
    }

    fn settle(&self, slot: u64, how: Disposition) -> SettleStart {
        if let Disposition::Ack = how {
            return self.ack_run(slot, 1);
        }
        let mut ring = self.ring.lock();
        let Some(s) = self.handed(&mut ring, slot) else {
            return SettleStart::Done(if self.shared.policy.untracked { Settled::Untracked } else { Settled::Stale });
        };
        let (attempt, bytes) = (s.attempt, s.bytes as usize);
        self.take_back(&mut ring, slot);
        if self.shared.policy.untracked {
            self.finish(&mut ring, slot);
            drop(ring);
            self.after_settle(bytes);
            return SettleStart::Done(Settled::Untracked);
        }
        let random = self.shared.env.random_share();
        let (settlement, verdict) = self.shared.policy.decide(how, attempt, random, self.shared.is_stopping());
        let start = self.apply(&mut ring, slot, settlement);
        drop(ring);
        if verdict == crate::Verdict::Transient {
            self.shared.transient();
        }
        self.shared.settled_one();
        start
    }

    fn poll_settled(&self, op: u64, cx: &mut Context<'_>) -> Poll<Settled> {
        match op & crate::keeper::MOVE {
            0 => self.settles.poll_settled(op, cx),
            _ => self.shared.keeper.poll_moved(op, cx),
        }
    }

    fn poll_lost(&self, slot: u64, cx: &mut Context<'_>) -> Poll<()> {
        let mut ring = self.ring.lock();
        if self.handed(&mut ring, slot).is_none() {
            return Poll::Ready(());
        }
        if !ring.lost.iter().any(|(s, w)| *s == slot && w.will_wake(cx.waker())) {
            ring.lost.push((slot, cx.waker().clone()));
        }
        Poll::Pending
    }

    fn is_owned(&self, slot: u64) -> bool {
        let mut ring = self.ring.lock();
        self.handed(&mut ring, slot).is_some()
    }

    fn source(&self) -> &Source {
        &self.source
    }
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ring = self.ring.lock();
        write!(f, "Lane({} of {:?}, {} slots, open {})", self.id, self.source.partition, ring.slots.len(), ring.open)
    }
}
