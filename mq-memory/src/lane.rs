//! One member's hold on one partition: what its deliveries settle through. The slot of a delivery is its position.

use crate::group::Group;
use crate::letter::{Letter, finish};
use crate::member::Member;
use crate::partition::{Part, SharedPart};
use crate::pending::HELD;
use crate::topic::Topic;
use crate::trace::What;
use mq_api::{Disposition, Settle, SettleStart, Settled, Source};
use mq_core::Verdict;
use std::sync::Arc;
use std::task::{Context, Poll};

pub(crate) struct MemoryLane {
    pub(crate) member: Arc<Member>,
    pub(crate) topic: Arc<Topic>,
    pub(crate) group: Arc<Group>,
    pub(crate) part: SharedPart,
    pub(crate) number: usize,
    /// Which hand-over of its message it settles: 0 for all that came for the first time.
    pub(crate) turn: u64,
    pub(crate) source: Source,
    /// What a settlement is confirmed as.
    pub(crate) settled: Settled,
}

impl MemoryLane {
    /// The same hold, by a later hand-over.
    pub(crate) fn of(&self, turn: u64) -> Self {
        Self {
            member: self.member.clone(),
            topic: self.topic.clone(),
            group: self.group.clone(),
            part: self.part.clone(),
            number: self.number,
            turn,
            source: self.source.clone(),
            settled: self.settled,
        }
    }

    #[cold]
    #[inline(never)]
    fn stale(&self, position: u64) -> SettleStart {
        self.trace_stale(position);
        SettleStart::Done(Settled::Stale)
    }

    /// With the partition unlocked.
    fn trace_stale(&self, position: u64) {
        let Some(trace) = &self.member.core.trace else { return };
        let there = self.part.lock().stored(position).map(|s| s.message.id.clone());
        let id = there.unwrap_or_else(|| trace.id_of(&self.topic.name, self.number as u32, position));
        trace.push(What::Stale, self.member.place(&self.source, position), &id);
    }

    #[cold]
    fn trace_acked(&self, part: &Part, position: u64) {
        self.member.core.hooks.acked(&self.source, 1);
        if let Some(trace) = &self.member.core.trace {
            let id = part.stored(position).map(|s| s.message.id.clone()).unwrap_or_default();
            trace.push(What::Acked, self.member.place(&self.source, position), &id);
        }
    }

    #[cold]
    #[inline(never)]
    fn ack_slow(&self, first: u64, n: u32) -> SettleStart {
        if self.member.is_crashed() {
            return self.stale(first);
        }
        let (mut done, mut bytes) = (0, 0);
        let (mut free, mut stale) = (false, Vec::new());
        {
            let mut guard = self.part.lock();
            for position in first..first + u64::from(n) {
                let part = &mut *guard;
                let Some(group) = part.groups.get_mut(self.group.number) else { break };
                let Some(entry) = group.held_by(self.member.id, self.turn, position) else {
                    stale.push(position);
                    continue;
                };
                bytes += entry.size as usize;
                done += 1;
                self.trace_acked(part, position);
                free |= finish(&self.topic, &self.group, part, position);
            }
            guard.wake();
        }
        self.member.end_suspect(self.number, first);
        if done > 0 {
            self.member.flow.give(done, bytes);
            self.member.has_room();
            self.member.handled();
        }
        if free {
            self.group.assign_free();
        }
        stale.iter().for_each(|position| self.trace_stale(*position));
        if done < n as usize { SettleStart::Done(Settled::Stale) } else { SettleStart::Done(self.settled) }
    }
}

impl Settle for MemoryLane {
    #[inline]
    fn ack(&self, position: u64) -> SettleStart {
        if !self.member.is_plain() {
            return self.ack_slow(position, 1);
        }
        let mut guard = self.part.lock();
        let part = &mut *guard;
        let Some(group) = part.groups.get_mut(self.group.number) else {
            drop(guard);
            return self.stale(position);
        };
        if !group.acks_short() {
            drop(guard);
            return self.ack_slow(position, 1);
        }
        // No entry has a history here, so that each is in its first hand-over.
        let Some(entry) = group.held_by_member(self.member.id, position) else {
            drop(guard);
            return self.stale(position);
        };
        let size = entry.size as usize;
        entry.state = 0;
        if position == group.entries.head() {
            group.entries.retire();
            group.advance();
            let upto = group.entries.head();
            part.trim(&self.topic.keep, upto);
        }
        drop(guard);
        self.member.flow.give(1, size);
        SettleStart::Done(self.settled)
    }

    fn ack_run(&self, first: u64, n: u32) -> SettleStart {
        if !self.member.is_plain() {
            return self.ack_slow(first, n);
        }
        let mut guard = self.part.lock();
        let part = &mut *guard;
        let Some(group) = part.groups.get_mut(self.group.number) else {
            drop(guard);
            return self.stale(first);
        };
        if !group.acks_short() {
            drop(guard);
            return self.ack_slow(first, n);
        }
        let (mut done, mut bytes) = (0usize, 0usize);
        let owner = self.member.id;
        let (a, b) = group.entries.slices_mut(first, n as usize);
        for piece in [a, b] {
            for entry in piece {
                if entry.owner == owner && entry.state & HELD != 0 {
                    entry.state = 0;
                    done += 1;
                    bytes += entry.size as usize;
                }
            }
        }
        if group.entries.head() == first && done == n as usize {
            // All of them, and they are the oldest: no need to look at each again.
            group.entries.retire_n(u64::from(n));
        }
        group.advance();
        let upto = group.entries.head();
        part.trim(&self.topic.keep, upto);
        drop(guard);
        self.member.flow.give(done, bytes);
        if done < n as usize { self.stale(first) } else { SettleStart::Done(self.settled) }
    }

    fn settle(&self, position: u64, how: Disposition) -> SettleStart {
        if let Disposition::Ack = how {
            return self.ack(position);
        }
        if self.member.is_crashed() {
            return self.stale(position);
        }
        let core = &self.member.core;
        let mut guard = self.part.lock();
        let part = &mut *guard;
        let held = part.groups.get_mut(self.group.number).and_then(|g| g.held_by(self.member.id, self.turn, position));
        let Some(entry) = held.copied() else {
            drop(guard);
            return self.stale(position);
        };
        let random = core.env.random_share();
        let (settlement, verdict) = self.member.policy.decide(how, entry.attempt(), random, self.member.is_stopping());
        let letter = Letter {
            topic: &self.topic,
            group: &self.group,
            part: self.number,
            position,
            attempt: entry.attempt(),
            member: &self.member,
        };
        letter.carry_out(guard, entry.size, settlement);
        if verdict == Verdict::Transient {
            self.member.transient();
        }
        SettleStart::Done(self.settled)
    }

    fn poll_settled(&self, _: u64, _: &mut Context<'_>) -> Poll<Settled> {
        Poll::Ready(self.settled)
    }

    fn poll_lost(&self, position: u64, cx: &mut Context<'_>) -> Poll<()> {
        let mut part = self.part.lock();
        let Some(group) = part.groups.get_mut(self.group.number) else { return Poll::Ready(()) };
        if group.deleted || self.member.is_crashed() || group.held_by(self.member.id, self.turn, position).is_none() {
            return Poll::Ready(());
        }
        if !group.lost.iter().any(|(p, _, w)| *p == position && w.will_wake(cx.waker())) {
            group.lost.push((position, self.member.id, cx.waker().clone()));
        }
        Poll::Pending
    }

    fn is_owned(&self, position: u64) -> bool {
        let mut part = self.part.lock();
        let (member, turn) = (self.member.id, self.turn);
        !self.member.is_crashed()
            && part
                .groups
                .get_mut(self.group.number)
                .is_some_and(|g| !g.deleted && g.held_by(member, turn, position).is_some())
    }

    fn source(&self) -> &Source {
        &self.source
    }
}
