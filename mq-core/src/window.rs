//! The table behind an outbox: which sends are open, which may be written next, and how retries keep the order of their keys.
//!
//! A key in trouble gets a *line*: its retries go out one at a time in order of sending, none before every first try of the key
//! that was written has its outcome, and no later send of the key is written until the last of them has its own. Other keys,
//! and messages without key, go on meanwhile.

use crate::env::later;
use crate::keeper::Target;
use crate::tries::{Outgoing, Slot, State};
use mq_api::SendResult;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::task::Waker;
use std::time::Duration;
use tokio::time::Instant;

/// Slot and sequence number: stale once the slot is used for another send.
type Entry = (u32, u64);

/// A key of which a send is being retried.
#[derive(Debug, Default)]
struct Line {
    retries: BTreeMap<u64, u32>,
    /// The retry that is being written.
    flying: Option<u64>,
    /// Where the first of `retries` stands in [`Table::ready`].
    offered: Option<(Instant, u64)>,
    /// Later sends, not written before.
    held: VecDeque<Entry>,
}

/// Adds one to a list from which those that are over are dropped by whoever takes them. When nobody does (the broker is away,
/// one flies for long), they are dropped here, or a program whose sends run out of time would fill the memory with them.
#[inline]
fn note(list: &mut VecDeque<Entry>, entry: Entry, open: usize, live: impl Fn(Entry) -> bool) {
    if list.len() > 64 + 4 * open {
        list.retain(|entry| live(*entry));
    }
    list.push_back(entry);
}

#[inline]
fn is_in(slots: &[Slot], (index, seq): Entry, state: impl Fn(&State) -> bool) -> bool {
    let slot = &slots[index as usize];
    slot.seq == seq && state(&slot.state)
}

/// Whether it is being written for the first time.
fn is_first_try(slots: &[Slot], entry: Entry) -> bool {
    slots[entry.0 as usize].tries == 0 && is_in(slots, entry, |state| matches!(state, State::Flying))
}

#[derive(Default)]
pub(crate) struct Table {
    pub(crate) slots: Vec<Slot>,
    pub(crate) free: Vec<u32>,
    queue: VecDeque<Entry>,
    waiting: VecDeque<Entry>,
    pub(crate) waits: usize,
    /// First tries of keyed messages, in order of writing; those that have their outcome are dropped later.
    flight: VecDeque<Entry>,
    lines: HashMap<u64, Line>,
    /// Retries that may be written, by the time they are due.
    ready: BTreeMap<(Instant, u64), u32>,
    pub(crate) used: usize,
    pub(crate) bytes: usize,
    pub(crate) seq: u64,
    pub(crate) driver: Option<Waker>,
    /// Those who wait for everything up to a sequence number.
    pub(crate) flush: Vec<(u64, Waker)>,
    pub(crate) closed: bool,
    pub(crate) unobserved: u64,
    /// No open send has its time limit before this.
    pub(crate) earliest: Option<Instant>,
    /// Why there is no session now.
    pub(crate) trouble: Option<String>,
}

impl Table {
    pub(crate) fn ticket(&self, index: u32) -> u64 {
        u64::from(self.slots[index as usize].generation) << 32 | u64::from(index)
    }

    /// The slot of a ticket, unless it is used for another send.
    pub(crate) fn slot(&mut self, ticket: u64) -> Option<&mut Slot> {
        self.slots.get_mut(ticket as u32 as usize).filter(|slot| slot.generation == (ticket >> 32) as u32)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.used == 0 && self.waits == 0
    }

    /// A free slot, with the next sequence number.
    pub(crate) fn claim(&mut self) -> (u32, &mut Slot) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        self.seq += 1;
        let slot = &mut self.slots[index as usize];
        (slot.seq, slot.forgotten, slot.doubtful, slot.passed) = (self.seq, false, false, false);
        (slot.due, slot.tries, slot.waker, slot.retry_until) = (None, 0, None, None);
        (index, slot)
    }

    pub(crate) fn wait(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.state = State::Waiting;
        self.waits += 1;
        let entry = (index, slot.seq);
        note(&mut self.waiting, entry, self.waits, |e| is_in(&self.slots, e, |state| matches!(state, State::Waiting)));
    }

    pub(crate) fn enqueue(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.state = State::Queued;
        self.used += 1;
        self.bytes += slot.size as usize;
        let entry = (index, slot.seq);
        note(&mut self.queue, entry, self.used, |e| is_in(&self.slots, e, |state| matches!(state, State::Queued)));
    }

    /// The first that waits for room, and its size.
    pub(crate) fn first_waiting(&mut self) -> Option<(u32, u32)> {
        while let Some((index, seq)) = self.waiting.front().copied() {
            let slot = &self.slots[index as usize];
            if slot.seq == seq && matches!(slot.state, State::Waiting) {
                return Some((index, slot.size));
            }
            self.waiting.pop_front();
        }
        None
    }

    /// Lets the first that waits in.
    pub(crate) fn let_in(&mut self, index: u32) {
        self.waiting.pop_front();
        self.waits -= 1;
        self.enqueue(index);
    }

    /// Whether something may be written now.
    pub(crate) fn has_work(&self) -> bool {
        !self.queue.is_empty() || self.ready.first_key_value().is_some_and(|((due, _), _)| *due <= Instant::now())
    }

    /// Takes at most `max` messages and about `max_bytes` bytes; says how many.
    pub(crate) fn take(
        &mut self,
        max: usize,
        max_bytes: usize,
        retry_for: Duration,
        into: &mut Vec<Outgoing>,
    ) -> usize {
        let (mut n, mut bytes) = (0, 0);
        if self.queue.is_empty() && self.ready.is_empty() {
            return 0;
        }
        let now = Instant::now();
        while n < max
            && (n == 0 || bytes < max_bytes)
            && let Some((due, seq, index)) = self.ready.first_key_value().map(|((due, seq), i)| (*due, *seq, *i))
            && due <= now
        {
            self.ready.pop_first();
            if let Some(key) = self.slots[index as usize].key {
                let others_fly = self.first_try_flies(key);
                let Some(line) = self.lines.get_mut(&key) else { continue };
                if others_fly {
                    // The outcome of an earlier one may put it before this one; that of a later one may forbid this try.
                    let later = (now + PAUSE, seq);
                    line.offered = Some(later);
                    self.ready.insert(later, index);
                    continue;
                }
                (line.offered, line.flying) = (None, Some(seq));
            }
            bytes += self.fly(index, now, retry_for, into);
            n += 1;
        }
        while n < max && (n == 0 || bytes < max_bytes) {
            let Some((index, seq)) = self.queue.pop_front() else { break };
            let slot = &self.slots[index as usize];
            if slot.seq != seq || !matches!(slot.state, State::Queued) {
                continue;
            }
            if let Some(key) = slot.key {
                if !self.lines.is_empty()
                    && let Some(line) = self.lines.get_mut(&key)
                {
                    let live = |e| is_in(&self.slots, e, |state| matches!(state, State::Queued));
                    note(&mut line.held, (index, seq), self.used, live);
                    continue;
                }
                self.note_flight(index, seq);
            }
            bytes += self.fly(index, now, retry_for, into);
            n += 1;
        }
        n
    }

    fn fly(&mut self, index: u32, now: Instant, retry_for: Duration, into: &mut Vec<Outgoing>) -> usize {
        let ticket = self.ticket(index);
        let slot = &mut self.slots[index as usize];
        slot.state = State::Flying;
        if slot.retry_until.is_none() {
            slot.retry_until = Some(later(now, retry_for));
        }
        let target = slot.target.clone().unwrap_or(Target::Topic);
        into.push(Outgoing { ticket, message: slot.message.clone(), target, size: slot.size });
        slot.size as usize
    }

    #[inline]
    fn note_flight(&mut self, index: u32, seq: u64) {
        self.drop_answered();
        note(&mut self.flight, (index, seq), self.used, |e| is_first_try(&self.slots, e));
    }

    /// Whether a send of this key is being written for the first time.
    fn first_try_flies(&mut self, key: u64) -> bool {
        self.drop_answered();
        self.flight
            .iter()
            .any(|entry| self.slots[entry.0 as usize].key == Some(key) && is_first_try(&self.slots, *entry))
    }

    fn drop_answered(&mut self) {
        while let Some(front) = self.flight.front()
            && !is_first_try(&self.slots, *front)
        {
            self.flight.pop_front();
        }
    }

    /// The send at `index` is confirmed, so that no earlier one of its key may be tried again. Those that are being written are
    /// marked; those that wait for their retry, or were to be tried again, are returned.
    pub(crate) fn pass(&mut self, index: u32) -> Vec<u32> {
        let slot = &self.slots[index as usize];
        let (Some(key), seq) = (slot.key, slot.seq) else { return Vec::new() };
        self.drop_answered();
        // First tries of one key are noted in order of sending: those before this one are all that it can have passed.
        for at in 0..self.flight.len() {
            let entry = self.flight[at];
            if entry.1 == seq {
                break;
            }
            if entry.1 < seq && self.slots[entry.0 as usize].key == Some(key) && is_first_try(&self.slots, entry) {
                self.slots[entry.0 as usize].passed = true;
            }
        }
        match self.lines.get(&key) {
            Some(line) => line.retries.range(..seq).map(|(_, index)| *index).collect(),
            None => Vec::new(),
        }
    }

    /// A flying one is to be tried again.
    pub(crate) fn requeue(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.state = State::Queued;
        slot.tries += 1;
        // 10 ms doubling to 1.3 s: a neighbour's channel error is over at once, a failover is not.
        let due = Instant::now() + PAUSE * (1 << slot.tries.min(8));
        slot.due = Some(due);
        let seq = slot.seq;
        let Some(key) = slot.key else {
            self.ready.insert((due, seq), index);
            return;
        };
        let line = self.lines.entry(key).or_default();
        if line.flying == Some(seq) {
            line.flying = None;
        }
        line.retries.insert(seq, index);
        self.offer(key);
    }

    /// Puts the first retry of a line among those that may be written, or ends the line.
    fn offer(&mut self, key: u64) {
        let Some(line) = self.lines.get_mut(&key) else { return };
        let first = line.retries.first_key_value().map(|(seq, index)| (*seq, *index));
        let wanted = match first {
            Some((seq, index)) if line.flying.is_none() => {
                self.slots[index as usize].due.map(|due| ((due, seq), index))
            }
            _ => None,
        };
        if let Some(offered) = line.offered.take() {
            self.ready.remove(&offered);
        }
        if let Some((at, index)) = wanted {
            line.offered = Some(at);
            self.ready.insert(at, index);
        }
        if first.is_none()
            && let Some(line) = self.lines.remove(&key)
        {
            line.held.into_iter().rev().for_each(|entry| self.queue.push_front(entry));
        }
    }

    /// An open one has its outcome: out of every list.
    pub(crate) fn close_slot(&mut self, index: u32) {
        let slot = &self.slots[index as usize];
        let (seq, size) = (slot.seq, slot.size as usize);
        if let State::Waiting = slot.state {
            self.waits -= 1;
            return;
        }
        self.used -= 1;
        self.bytes -= size;
        if slot.tries == 0 {
            return;
        }
        match slot.key {
            None => {
                if let Some(due) = slot.due {
                    self.ready.remove(&(due, seq));
                }
            }
            Some(key) => {
                if let Some(line) = self.lines.get_mut(&key) {
                    line.retries.remove(&seq);
                    if line.flying == Some(seq) {
                        line.flying = None;
                    }
                    self.offer(key);
                }
            }
        }
    }

    /// Gathers those whose flush is complete.
    pub(crate) fn flushed(&mut self, wakers: &mut Vec<Waker>) {
        if self.flush.is_empty() {
            return;
        }
        let lowest = match self.is_idle() {
            true => u64::MAX,
            false => self.slots.iter().filter(|s| s.is_open()).map(|s| s.seq).min().unwrap_or(u64::MAX),
        };
        wakers.extend(self.flush.extract_if(.., |(mark, _)| *mark < lowest || lowest == u64::MAX).map(|(_, w)| w));
    }

    /// Whether everything up to `mark` has its outcome.
    pub(crate) fn is_flushed(&self, mark: u64) -> bool {
        self.is_idle() || !self.slots.iter().any(|s| s.is_open() && s.seq <= mark)
    }

    /// Those whose time limit passed.
    pub(crate) fn late(&mut self, now: Instant) -> Vec<u32> {
        // Asked for many times a second by each producer: with hundreds of them, looking at every send each time would be felt.
        if self.earliest.is_none_or(|earliest| now < earliest) {
            return Vec::new();
        }
        let open = self.slots.iter().filter(|slot| slot.is_open()).filter_map(|slot| slot.deadline);
        self.earliest = open.filter(|deadline| *deadline > now).min();
        let late = |slot: &Slot| slot.is_open() && slot.deadline.is_some_and(|deadline| deadline <= now);
        (0..).zip(&self.slots).filter(|(_, slot)| late(slot)).map(|(index, _)| index).collect()
    }

    /// Those that are being written, in order of sending.
    pub(crate) fn flying(&self) -> Vec<u64> {
        let mut flying: Vec<(u64, u32)> =
            (0..).zip(&self.slots).filter(|(_, s)| matches!(s.state, State::Flying)).map(|(i, s)| (s.seq, i)).collect();
        flying.sort_unstable();
        flying.into_iter().map(|(_, index)| self.ticket(index)).collect()
    }

    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn open_entries(&self) -> (usize, usize) {
        (self.lines.len(), self.ready.len())
    }

    /// Entries of all lists that sends are queued in.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn noted(&self) -> usize {
        let held: usize = self.lines.values().map(|line| line.held.len()).sum();
        self.queue.len() + self.waiting.len() + self.flight.len() + held
    }

    /// A failure that nobody will see is counted.
    pub(crate) fn unseen(&mut self, result: &SendResult) {
        self.unobserved += u64::from(result.is_err());
    }
}

/// Half of the first pause before a retry.
const PAUSE: Duration = Duration::from_millis(5);
