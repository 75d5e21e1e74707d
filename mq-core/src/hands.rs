//! What an application does with the deliveries of a lane, and what follows for those that wait behind them.

use crate::lane::{Lane, Ring, slot_of};
use crate::slots::SlotState;
use mq_api::{Disposition, Settle, SettleStart, Settled, Source};
use std::task::{Context, Poll};
use tokio::time::Instant;

impl Lane {
    /// A slot is settled for good. [`advance`](Self::advance) lets the next of its key out.
    #[inline]
    pub(crate) fn finish(&self, ring: &mut Ring, slot: u64) {
        let Some(s) = ring.slots.get_mut(slot) else { return };
        if let Some(key) = s.key.take() {
            ring.freed.push(key);
        }
        if s.again {
            self.unsettled.settled(s.position);
        }
        ring.slots.done(slot);
    }

    /// Lets out the next of every key that is free. A loop: what is let out may be settled at once.
    pub(crate) fn advance(&self, ring: &mut Ring) {
        while let Some(key) = ring.freed.pop() {
            while let Some(next) = ring.gate.leave(key) {
                if self.let_out(ring, next) {
                    break;
                }
            }
        }
    }

    /// Lets a blocked slot out; false if it is gone.
    fn let_out(&self, ring: &mut Ring, slot: u64) -> bool {
        let Some(me) = self.strong() else { return true };
        let Some(s) = ring.slots.get_mut(slot) else { return false };
        if s.state != SlotState::Blocked {
            return false;
        }
        s.state = SlotState::Buffered;
        let (token, suspect, trials) = (s.token, s.suspect, s.trials);
        self.shared.flow.take(1, s.bytes as usize);
        if ring.draining {
            self.give_back(ring, slot);
            return false;
        }
        if self.is_parked_key(ring, slot) || suspect && trials >= self.shared.policy.crash_trials {
            self.doom(ring, slot);
        } else if self.shared.at_most_once {
            let op = self.settles.ack(self.id(), [token]);
            self.shared.inbox.push_after(&me, slot, 1, op);
        } else if suspect {
            self.shared.inbox.push_suspect(&me, slot);
        } else {
            self.shared.inbox.push(&me, slot, 1);
        }
        true
    }

    /// Back into the inbox.
    pub(crate) fn reinbox(&self, slot: u64, suspect: bool) {
        match self.strong() {
            Some(me) if suspect => self.shared.inbox.push_suspect(&me, slot),
            Some(me) => self.shared.inbox.push(&me, slot, 1),
            None => {}
        }
    }

    /// A parked one is due.
    pub(crate) fn unpark(&self, slot: u64) {
        let mut ring = self.ring.lock();
        if !ring.open {
            return;
        }
        let Some(s) = ring.slots.get_mut(slot).filter(|s| s.state == SlotState::Parked) else { return };
        s.state = SlotState::Buffered;
        let bytes = s.bytes as usize;
        if !self.shared.unpark(std::mem::take(&mut s.uncharged)) {
            self.shared.flow.take(1, bytes);
        }
        drop(ring);
        self.reinbox(slot, false);
    }

    /// A slot leaves the application's hands, and its handle is stale from now on.
    fn take_back(&self, ring: &mut Ring, slot: u64) {
        let Some(s) = ring.slots.get_mut(slot) else { return };
        let handle = Ring::handle(s, slot);
        s.hand = s.hand.wrapping_add(1);
        self.shared.hands.give(1, s.bytes as usize);
        Self::wake_lost(ring, handle);
    }

    /// Settles what was in hand since before `limit` as timed out; says since when the rest is, at the longest.
    pub(crate) fn expire(&self, limit: Instant) -> Option<Instant> {
        let mut ring = self.ring.lock();
        let mut oldest: Option<Instant> = None;
        let late = ring.slots.which(|s| {
            let Some(since) = s.handed_at.filter(|_| s.state == SlotState::Handed) else { return false };
            if since > limit {
                oldest = Some(oldest.map_or(since, |oldest| oldest.min(since)));
            }
            since <= limit
        });
        if late.is_empty() {
            return oldest;
        }
        for slot in late {
            let Some(s) = ring.slots.get(slot) else { continue };
            let (attempt, bytes) = (s.attempt, s.bytes as usize);
            self.take_back(&mut ring, slot);
            if self.shared.policy.untracked {
                self.finish(&mut ring, slot);
                self.shared.flow.give(1, bytes);
                continue;
            }
            let how = self.shared.policy.timed_out(attempt, self.shared.env.random_share());
            self.apply(&mut ring, slot, how);
        }
        self.advance(&mut ring);
        ring.slots.retire();
        self.unlock(ring);
        self.shared.settled_one();
        oldest
    }

    fn nothing_to_settle(&self) -> SettleStart {
        SettleStart::Done(if self.shared.policy.untracked { Settled::Untracked } else { Settled::Stale })
    }
}

impl Settle for Lane {
    #[inline]
    fn ack(&self, slot: u64) -> SettleStart {
        self.ack_run(slot, 1)
    }

    fn ack_run(&self, first: u64, n: u32) -> SettleStart {
        let untracked = self.shared.policy.untracked;
        let (mut done, mut bytes, mut strays) = (0usize, 0usize, false);
        let mut guard = self.ring.lock();
        let ring = &mut *guard;
        // Queued while the lane is locked, so that a fence comes before or after it as a whole.
        let op = self.settles.ack_with(self.id(), |tokens| {
            for handle in first..first + u64::from(n) {
                let Some(s) = ring.handed(handle) else {
                    strays |= self.drop_stray(ring, handle);
                    continue;
                };
                done += 1;
                bytes += s.bytes as usize;
                if !untracked {
                    tokens.push(s.token);
                }
                self.finish(ring, slot_of(handle));
                Self::wake_lost(ring, handle);
            }
        });
        if !ring.freed.is_empty() {
            self.advance(ring);
        }
        ring.slots.retire();
        self.unlock(guard);
        if done > 0 {
            self.shared.hands.give(done, bytes);
            self.shared.flow.give(done, bytes);
            self.shared.handled();
            if !untracked {
                self.shared.hooks.acked(&self.source, done);
            }
        }
        if done > 0 || strays {
            self.shared.settled_one();
        }
        match op {
            _ if untracked => SettleStart::Done(Settled::Untracked),
            Some(op) if done == n as usize => SettleStart::Queued(op),
            _ => SettleStart::Done(Settled::Stale),
        }
    }

    fn settle(&self, handle: u64, how: Disposition) -> SettleStart {
        if let Disposition::Ack = how {
            return self.ack_run(handle, 1);
        }
        let mut ring = self.ring.lock();
        let Some(s) = ring.handed(handle) else {
            let stray = self.drop_stray(&mut ring, handle);
            drop(ring);
            if stray {
                self.shared.settled_one();
            }
            return self.nothing_to_settle();
        };
        let (attempt, bytes, slot) = (s.attempt, s.bytes as usize, slot_of(handle));
        self.take_back(&mut ring, slot);
        let (start, verdict) = if self.shared.policy.untracked {
            self.finish(&mut ring, slot);
            self.shared.flow.give(1, bytes);
            (SettleStart::Done(Settled::Untracked), crate::Verdict::Plain)
        } else {
            let random = self.shared.env.random_share();
            let (settlement, verdict) = self.shared.policy.decide(how, attempt, random, self.shared.is_stopping());
            (self.apply(&mut ring, slot, settlement), verdict)
        };
        self.advance(&mut ring);
        ring.slots.retire();
        self.unlock(ring);
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

    fn poll_lost(&self, handle: u64, cx: &mut Context<'_>) -> Poll<()> {
        let mut ring = self.ring.lock();
        if ring.handed(handle).is_none() {
            return Poll::Ready(());
        }
        if !ring.lost.iter().any(|(h, w)| *h == handle && w.will_wake(cx.waker())) {
            ring.lost.push((handle, cx.waker().clone()));
        }
        Poll::Pending
    }

    fn is_owned(&self, handle: u64) -> bool {
        self.ring.lock().handed(handle).is_some()
    }

    fn source(&self) -> &Source {
        &self.source
    }
}
