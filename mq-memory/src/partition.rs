//! One partition: a log, and what each group made of it. One lock; it is also the lock of every lane on it, so that send,
//! receive and settle take one lock each.

use crate::broadcast::Queue;
use crate::pending::{GroupPart, Pending};
use mq_api::{Message, Stored};
use mq_core::SeqRing;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Emptied allocations kept for reuse, last in first out (warm in the cache): steady state allocates nothing.
const SPARE: usize = 1024;

/// How long a topic keeps what it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Keep {
    /// Handled messages kept for a replay, while there is room.
    pub(crate) history: u64,
    /// Handled messages at which the oldest go, down to `history`: a little more, so that what comes finds allocations to use.
    pub(crate) most: u64,
    /// Messages at most; beyond it sends are refused, or in a log the oldest go.
    pub(crate) capacity: u64,
    /// Bytes at most; beyond it sends are refused, or in a log the oldest go.
    pub(crate) bytes: u64,
    /// In a log: the oldest age.
    pub(crate) age: Option<Duration>,
    /// Whether the oldest go, handled or not.
    pub(crate) is_log: bool,
}

/// One message of the log.
#[derive(Debug, Default)]
pub(crate) struct Cell {
    pub(crate) stored: Option<Arc<Stored>>,
    /// 0 = for every group; else the group (number + 1) that it was redriven to.
    pub(crate) only: u32,
}

#[derive(Default)]
pub(crate) struct Part {
    pub(crate) log: SeqRing<Cell>,
    pub(crate) bytes: u64,
    pub(crate) groups: Vec<GroupPart>,
    pub(crate) waiting: bool,
    pub(crate) broadcast: Vec<Arc<Queue>>,
    spare: Vec<Arc<Stored>>,
    /// Cells whose message was taken out of the middle.
    holes: u64,
}

pub(crate) type SharedPart = Arc<Mutex<Part>>;

#[cold]
#[inline(never)]
fn fresh(message: Message, size: u32) -> Arc<Stored> {
    Arc::new(Stored { message, size })
}

#[inline(never)]
fn lowest_head(groups: &[GroupPart]) -> u64 {
    groups.iter().filter(|g| !g.deleted).map(|g| g.entries.head()).min().unwrap_or(0)
}

/// What left the log before a group had handled it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trimmed {
    pub(crate) group: usize,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) count: u64,
}

impl Keep {
    /// Until every group has handled it, at most so many messages and bytes; then as history.
    pub(crate) fn handled(history: u64, capacity: u64, bytes: u64) -> Self {
        let most = history.saturating_add(history.min(SPARE as u64));
        Self { history, most, capacity, bytes, age: None, is_log: false }
    }

    /// The newest, handled or not.
    pub(crate) fn log(max: Option<u64>, age: Option<Duration>, bytes: u64) -> Self {
        let capacity = max.unwrap_or(u64::MAX);
        Self { history: u64::MAX, most: u64::MAX, capacity, bytes, age, is_log: true }
    }

    /// Whether one more of `size` bytes may come to so many messages and bytes.
    #[inline(always)]
    fn admits(&self, count: u64, bytes: u64, size: u32) -> bool {
        self.is_log || (count < self.capacity && bytes + u64::from(size) <= self.bytes)
    }
}

impl Part {
    /// Whether a message of `size` bytes has room, if need be when history gives way to it.
    #[inline(always)]
    pub(crate) fn admits(&mut self, size: u32, keep: &Keep) -> bool {
        keep.admits(self.log.len() as u64, self.bytes, size) || self.make_room(size, keep)
    }

    #[cold]
    #[inline(never)]
    fn make_room(&mut self, size: u32, keep: &Keep) -> bool {
        // Looked at before anything is dropped: a message that will be refused must not cost the history.
        // Holes are no messages.
        let (mut count, mut bytes) = (self.log.len() as u64 - self.holes, self.bytes);
        let (head, handled) = (self.log.head(), self.handled());
        let mut end = head;
        while !keep.admits(count, bytes, size) {
            if end >= handled {
                return false;
            }
            if let Some(stored) = self.stored(end) {
                (count, bytes) = (count - 1, bytes - u64::from(stored.size));
            }
            end += 1;
        }
        (head..end).for_each(|_| self.drop_oldest());
        true
    }

    /// Up to where `append` may take the oldest messages away: all groups have handled them, and the history is full.
    #[inline(always)]
    pub(crate) fn spent(&self, keep: &Keep) -> u64 {
        // Looked at first, since it is one look, and asking all groups is one for each.
        let none = self.log.len() as u64 <= keep.history;
        if none { 0 } else { self.handled().saturating_sub(keep.history) }
    }

    /// Puts a message at the end. Steady state allocates nothing: what leaves the history gives its allocation to what comes.
    #[inline(always)]
    pub(crate) fn append(&mut self, message: Message, size: u32, only: u32, spent: u64) -> u64 {
        self.bytes += u64::from(size);
        let used = match self.log.head() < spent {
            true => self.take_oldest(),
            false => self.spare.pop(),
        };
        let stored = match used {
            Some(mut used) => match Arc::get_mut(&mut used) {
                Some(unique) => {
                    unique.message.clear();
                    unique.size = size;
                    // What is replaced was emptied just now: nothing to drop.
                    std::mem::forget(std::mem::replace(&mut unique.message, message));
                    used
                }
                None => fresh(message, size),
            },
            None => fresh(message, size),
        };
        if !self.broadcast.is_empty() && only == 0 {
            self.broadcast(&stored);
        }
        let (position, cell) = self.log.push_cell();
        cell.only = only;
        // A retired cell is empty: nothing to drop.
        std::mem::forget(cell.stored.replace(stored));
        position
    }

    #[inline(never)]
    fn broadcast(&self, stored: &Arc<Stored>) {
        let position = self.log.tail();
        self.broadcast.iter().for_each(|queue| queue.push(stored, position));
    }

    #[inline]
    pub(crate) fn wake(&mut self) {
        if self.waiting {
            self.wake_all();
        }
    }

    #[cold]
    fn wake_all(&mut self) {
        self.waiting = false;
        for group in &mut self.groups {
            group.wakers.drain(..).for_each(|(_, waker)| waker.wake());
        }
    }

    /// The oldest leaves the log.
    #[inline(always)]
    fn take_oldest(&mut self) -> Option<Arc<Stored>> {
        let stored = self.log.front_mut()?.stored.take();
        self.log.retire();
        match &stored {
            Some(stored) => self.bytes -= u64::from(stored.size),
            None => self.holes = self.holes.saturating_sub(1),
        }
        stored
    }

    /// The oldest leaves the log; its allocation is kept, empty.
    fn drop_oldest(&mut self) {
        if let Some(mut stored) = self.take_oldest()
            && self.spare.len() < SPARE
            && let Some(unique) = Arc::get_mut(&mut stored)
        {
            unique.message.clear();
            self.spare.push(stored);
        }
    }

    /// What all groups have handled ends here; 0 if there is no group.
    #[inline(always)]
    fn handled(&self) -> u64 {
        match &self.groups[..] {
            // One group is the common case.
            [only] if !only.deleted => only.entries.head(),
            groups => lowest_head(groups),
        }
    }

    /// A group has handled everything before `upto`: drops what every group handled, beyond the history kept.
    #[inline(always)]
    pub(crate) fn trim(&mut self, keep: &Keep, upto: u64) {
        if upto.saturating_sub(self.log.head()) > keep.most {
            self.drop_handled(keep);
        }
    }

    #[inline(never)]
    fn drop_handled(&mut self, keep: &Keep) {
        let until = self.handled();
        if until.saturating_sub(self.log.head()) <= keep.most {
            return;
        }
        while self.log.head().saturating_add(keep.history) < until {
            self.drop_oldest();
        }
    }

    /// A log drops its oldest, handled or not. Says what groups lost by it.
    #[cold]
    pub(crate) fn expire(&mut self, keep: &Keep, now: SystemTime, lost: &mut Vec<Trimmed>) {
        if !keep.is_log {
            return;
        }
        let first = self.log.head();
        loop {
            let too_many = self.log.len() as u64 > keep.capacity || self.bytes > keep.bytes;
            let Some(cell) = self.log.front_mut() else { break };
            let stamp = cell.stored.as_ref().and_then(|s| s.message.timestamp);
            let too_old =
                keep.age.is_some_and(|age| stamp.and_then(|t| t.checked_add(age)).is_some_and(|end| end <= now));
            if !too_many && !too_old {
                break;
            }
            self.drop_oldest();
        }
        let end = self.log.head();
        let mut freed = false;
        for (number, group) in self.groups.iter_mut().enumerate() {
            if group.deleted || group.entries.head() >= end {
                continue;
            }
            let (mut count, from) = (0, group.entries.head().max(first));
            while group.entries.tail() < end {
                // Never taken, and gone.
                let (_, entry) = group.entries.push_cell();
                *entry = Pending::default();
                count += 1;
            }
            for position in group.entries.head()..end {
                let Some(entry) = group.entries.get_mut(position) else { continue };
                // What is in hand is looked at when it comes back: maybe it is acked.
                if !entry.is_settled() && !entry.is(crate::pending::HELD) {
                    freed |= group.end(position);
                    count += 1;
                }
            }
            group.advance();
            if count > 0 {
                lost.push(Trimmed { group: number, from, to: end, count });
            }
        }
        self.waiting |= freed;
    }

    /// Takes one message out of the log, wherever it is; false if it was gone.
    pub(crate) fn remove(&mut self, position: u64) -> bool {
        let Some(cell) = self.log.get_mut(position) else { return false };
        let Some(stored) = cell.stored.take() else { return false };
        self.bytes -= u64::from(stored.size);
        self.holes += 1;
        for group in &mut self.groups {
            if group.entries.get(position).is_some_and(|e| !e.is(crate::pending::HELD)) {
                self.waiting |= group.end(position);
                group.advance();
            }
        }
        while self.log.front_mut().is_some_and(|cell| cell.stored.is_none()) {
            let head = self.log.head();
            // A group that has not taken it yet must not wait for it.
            for group in self.groups.iter_mut().filter(|g| !g.deleted && g.entries.tail() <= head) {
                while group.entries.tail() <= head {
                    *group.entries.push_cell().1 = Pending::default();
                }
                group.advance();
            }
            self.log.retire();
            self.holes -= 1;
        }
        true
    }

    /// What was redriven to one of these groups is meant for another, which was made in its place.
    pub(crate) fn redirect(&mut self, before: &[u32], to: u32) {
        for position in self.log.head()..self.log.tail() {
            if let Some(cell) = self.log.get_mut(position)
                && before.contains(&cell.only)
            {
                cell.only = to;
            }
        }
    }

    /// Messages that are there.
    pub(crate) fn count(&self) -> u64 {
        self.log.iter().filter(|(_, cell)| cell.stored.is_some()).count() as u64
    }

    /// Whether a log has something to drop.
    #[inline]
    pub(crate) fn is_over(&self, keep: &Keep) -> bool {
        keep.is_log && (self.log.len() as u64 > keep.capacity || self.bytes > keep.bytes || keep.age.is_some())
    }

    /// The first position stored at or after `time`.
    pub(crate) fn position_at(&self, time: SystemTime) -> u64 {
        let found = self.log.iter().find(|(_, cell)| {
            cell.stored.as_ref().and_then(|s| s.message.timestamp).is_some_and(|stamp| stamp >= time)
        });
        found.map_or(self.log.tail(), |(position, _)| position)
    }

    /// The message at a position.
    pub(crate) fn stored(&self, position: u64) -> Option<&Arc<Stored>> {
        self.log.get(position)?.stored.as_ref()
    }
}
