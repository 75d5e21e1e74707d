//! A lane as its driver sees it, and every way in which slots leave it without being settled: lost, given back, fenced.

use crate::Settlement;
use crate::lane::{Lane, Ring, Stray};
use crate::plan::Token;
use crate::slots::SlotState;
use mq_api::Position;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;

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
    /// When it was handed out last.
    pub since: Option<Instant>,
    /// The attempt number.
    pub attempt: u32,
    /// How often it was recorded as handed over alone.
    pub trials: u32,
}

/// What a fence found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Fenced {
    /// In the application's hands.
    pub(crate) handed: usize,
    /// Buffered, parked or blocked.
    pub(crate) waiting: usize,
    /// Being copied elsewhere.
    pub(crate) moving: usize,
}

impl std::ops::AddAssign for Fenced {
    fn add_assign(&mut self, other: Self) {
        self.handed += other.handed;
        self.waiting += other.waiting;
        self.moving += other.moving;
    }
}

impl Lane {
    /// For the driver: whether another delayed message may be held in memory; past it they wait at the broker.
    pub fn may_park(&self) -> bool {
        self.shared.may_park()
    }

    /// For the driver: whether more may be pushed. Under `PerKey` at most `max_blocked` messages wait behind delayed keys;
    /// then this partition waits, and health names it. Ask again after [`poll_room`](Self::poll_room).
    pub fn has_room(&self) -> bool {
        let blocked = self.ring.lock().gate.waiting();
        let full = blocked >= self.shared.max_blocked;
        self.shared.set_blocked(&self.source, full);
        !full
    }

    /// For the driver: ready when [`has_room`](Self::has_room), or when the lane is closed.
    pub fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut ring = self.ring.lock();
        if !ring.open || ring.gate.waiting() < self.shared.max_blocked {
            drop(ring);
            self.shared.set_blocked(&self.source, false);
            return Poll::Ready(());
        }
        if !ring.room.iter().any(|w| w.will_wake(cx.waker())) {
            ring.room.push(cx.waker().clone());
        }
        drop(ring);
        self.shared.set_blocked(&self.source, true);
        Poll::Pending
    }

    /// For the driver: these are no longer owned (lease lost, claimed by another). Their handles turn stale.
    pub fn lose(&self, tokens: &[Token]) {
        let mut sorted = tokens.to_vec();
        sorted.sort_unstable();
        let mut ring = self.ring.lock();
        let lost = ring.slots.which(|s| s.is_held() && sorted.binary_search(&s.token).is_ok());
        // Another owner settles them, or not.
        self.unsettled.add(lost.iter().filter_map(|slot| ring.slots.get(*slot)).map(|s| s.position));
        lost.into_iter().for_each(|slot| self.let_go(&mut ring, slot, SlotState::Done));
        self.advance(&mut ring);
        ring.slots.retire();
        self.unlock(ring);
        self.shared.settled_one();
    }

    /// For the driver: everything it still owns (in hand, buffered, parked or moving), for renewing leases.
    pub fn held(&self, into: &mut Vec<Token>) {
        // What is settled before the hand-over has no lease.
        if self.shared.policy.untracked {
            return;
        }
        let ring = self.ring.lock();
        into.extend(ring.slots.iter().filter(|(_, s)| s.is_held()).map(|(_, s)| s.token));
    }

    /// Whether the broker may forget it: settled, or settled before the hand-over.
    fn is_settled(&self, state: SlotState) -> bool {
        state == SlotState::Done || self.shared.at_most_once && matches!(state, SlotState::Buffered | SlotState::Handed)
    }

    /// For the driver: every slot from the first unsettled one on, in order.
    pub fn visit(&self, mut f: impl FnMut(SlotView)) {
        let ring = self.ring.lock();
        for (_, s) in ring.slots.iter() {
            f(SlotView {
                token: s.token,
                settled: self.is_settled(s.state),
                handed: s.handed_at.is_some(),
                in_hand: s.state == SlotState::Handed,
                since: s.handed_at,
                attempt: s.attempt,
                trials: s.trials,
            });
        }
    }

    /// For the driver: the first that is not settled.
    pub fn first_unsettled(&self) -> Option<Token> {
        let ring = self.ring.lock();
        ring.slots.iter().find(|(_, s)| !self.is_settled(s.state)).map(|(_, s)| s.token)
    }

    /// For the driver: unsettled slots, and the span from the first unsettled one to the last pushed.
    pub fn span(&self) -> (usize, usize) {
        let ring = self.ring.lock();
        (ring.slots.open(), ring.slots.span())
    }

    /// For the driver: stops handing out; what is buffered is given back, and so is what still arrives. The lane stays open
    /// for what is in hand.
    pub fn begin_drain(&self) {
        let mut ring = self.ring.lock();
        ring.draining = true;
        let settled = self.shared.at_most_once;
        let waiting = ring.slots.which(|s| match s.state {
            SlotState::Buffered => !settled,
            state => matches!(state, SlotState::Blocked | SlotState::Parked),
        });
        self.shared.count_given_back(waiting.len());
        waiting.into_iter().for_each(|slot| self.give_back(&mut ring, slot));
        ring.slots.retire();
        self.unlock(ring);
    }

    /// For the driver: ready when nothing of this lane is in hand or moving.
    pub fn poll_drained(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut ring = self.ring.lock();
        if !self.is_busy(&ring) {
            return Poll::Ready(());
        }
        if !ring.drained.iter().any(|w| w.will_wake(cx.waker())) {
            ring.drained.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Fences every handle of this period; says how many were in hand.
    pub fn close(&self) -> usize {
        self.fence().handed
    }

    pub(crate) fn fence(&self) -> Fenced {
        let mut ring = self.ring.lock();
        let mut fenced = Fenced::default();
        if !ring.open {
            return fenced;
        }
        let mut positions: Vec<Position> = Vec::new();
        let mut held = Vec::new();
        for (slot, s) in ring.slots.iter() {
            match s.state {
                SlotState::Done => continue,
                SlotState::Handed => fenced.handed += 1,
                SlotState::Moving => fenced.moving += 1,
                SlotState::Left => {}
                SlotState::Blocked | SlotState::Buffered | SlotState::Parked => fenced.waiting += 1,
            }
            if !self.is_settled(s.state) {
                positions.push(s.position);
            }
            if s.is_held() {
                held.push(slot);
            }
        }
        self.unsettled.add(positions);
        self.unsettled.saw(ring.seen);
        ring.draining = true;
        held.into_iter().for_each(|slot| self.let_go(&mut ring, slot, SlotState::Left));
        ring.open = false;
        let ring_mut = &mut *ring;
        ring_mut.wake.extend(ring_mut.lost.drain(..).map(|(_, w)| w));
        ring_mut.wake.append(&mut ring_mut.room);
        self.unlock(ring);
        self.shared.inbox.nudge();
        fenced
    }

    /// Gives a waiting or handed slot back to the broker.
    pub(crate) fn give_back(&self, ring: &mut Ring, slot: u64) {
        let Some(s) = ring.slots.get_mut(slot) else { return };
        let (token, position, message) = (s.token, s.position, s.keep.clone());
        // A failure that was parked here stays counted.
        let how = match s.state {
            SlotState::Parked => Settlement::Retry { after: Duration::ZERO, attempt: s.attempt, cause: None },
            _ => Settlement::Release,
        };
        // Settled before the hand-over: there is nothing to give back.
        let gone = self.shared.broadcast || self.is_settled(s.state);
        match self.shared.mechanics.release {
            _ if gone => self.let_go(ring, slot, SlotState::Done),
            crate::ReleaseBy::Driver => {
                self.unsettled.add([position]);
                self.settles.give_back(self.id(), token, position, message, how);
                self.let_go(ring, slot, SlotState::Done);
            }
            crate::ReleaseBy::Engine => self.let_go(ring, slot, SlotState::Left),
        }
    }

    /// Takes a held slot out of play, without a word to the broker.
    pub(crate) fn let_go(&self, ring: &mut Ring, slot: u64, to: SlotState) {
        let Some(s) = ring.slots.get_mut(slot) else { return };
        let (bytes, state, key) = (s.bytes as usize, s.state, s.key.take());
        let (handle, since) = (Ring::handle(s, slot), s.handed_at);
        let uncharged = std::mem::take(&mut s.uncharged);
        if to == SlotState::Done {
            ring.slots.done(slot);
        } else {
            (s.state, s.keep) = (to, None);
        }
        let charged = match state {
            SlotState::Blocked | SlotState::Done | SlotState::Left => false,
            SlotState::Parked => self.shared.unpark(uncharged),
            SlotState::Handed if self.shared.is_stopping() => {
                self.shared.hands.give(1, bytes);
                true
            }
            SlotState::Handed => {
                // Credit comes back when the application lets go of it.
                ring.strays.insert(handle, Stray { bytes: bytes as u32, since });
                false
            }
            SlotState::Buffered | SlotState::Moving => true,
        };
        if charged {
            self.shared.flow.give(1, bytes);
        }
        if state == SlotState::Handed {
            Self::wake_lost(ring, handle);
        }
        match key {
            Some(key) if state == SlotState::Blocked => ring.gate.forget(key, slot),
            Some(key) if !ring.draining => ring.freed.push(key),
            _ => {}
        }
    }

    pub(crate) fn wake_lost(ring: &mut Ring, handle: u64) {
        if ring.lost.is_empty() {
            return;
        }
        let wake = &mut ring.wake;
        wake.extend(ring.lost.extract_if(.., |(h, _)| *h == handle).map(|(_, w)| w));
    }

    /// The application let go of a delivery that it no longer owned.
    pub(crate) fn drop_stray(&self, ring: &mut Ring, handle: u64) -> bool {
        if ring.strays.is_empty() {
            return false;
        }
        let Some(stray) = ring.strays.remove(&handle) else { return false };
        self.shared.hands.give(1, stray.bytes as usize);
        self.shared.flow.give(1, stray.bytes as usize);
        true
    }

    /// Forgets what is in hand unowned, handed out before `limit` (all if `None`); says whether any is left.
    pub(crate) fn drop_strays(&self, limit: Option<Instant>) -> bool {
        let mut ring = self.ring.lock();
        let late = |s: &Stray| limit.is_none_or(|limit| s.since.is_none_or(|t| t <= limit));
        let gone: Vec<u64> = ring.strays.iter().filter(|(_, s)| late(s)).map(|(handle, _)| *handle).collect();
        let any = !gone.is_empty();
        for handle in gone {
            self.drop_stray(&mut ring, handle);
        }
        let left = !ring.strays.is_empty();
        drop(ring);
        if any {
            self.shared.settled_one();
        }
        left
    }

    pub(crate) fn has_strays(&self) -> bool {
        !self.ring.lock().strays.is_empty()
    }

    /// At the deadline of a close: what is still in hand goes back.
    pub(crate) fn give_back_handed(&self) {
        let mut ring = self.ring.lock();
        let handed = ring.slots.which(|s| s.state == SlotState::Handed);
        self.shared.count_given_back(handed.len());
        handed.into_iter().for_each(|slot| self.give_back(&mut ring, slot));
        ring.slots.retire();
        self.unlock(ring);
    }

    /// For broadcast: the oldest buffered were dropped. At most once: the broker did not confirm.
    pub(crate) fn forget_buffered(&self, first: u64, n: u32) {
        let mut ring = self.ring.lock();
        for slot in first..first + u64::from(n) {
            if ring.slots.get(slot).is_some_and(|s| s.state == SlotState::Buffered) {
                self.let_go(&mut ring, slot, SlotState::Done);
            }
        }
        self.advance(&mut ring);
        ring.slots.retire();
        self.unlock(ring);
    }
}
