//! Taking messages out of one partition, under its lock: a run of new ones, or one at a time where anything special goes on.

use crate::lane::MemoryLane;
use crate::letter::{Letter, finish};
use crate::member::Trouble;
use crate::partition::Part;
use crate::pending::{BLOCKED, Pending};
use mq_api::{Deliveries, Position, Reason, Stored};
use mq_core::{Settlement, key_hash};
use std::sync::Arc;

/// What a look at a partition gave.
#[derive(Default)]
pub(crate) struct Took {
    pub(crate) n: usize,
    /// There is a message, but no room for its bytes; what was in hand then.
    pub(crate) no_room: Option<u64>,
    /// There is a suspect, which goes out alone: when nothing is in hand.
    pub(crate) suspect_waits: bool,
}

/// What takes messages out of a partition.
pub(crate) trait Receives {
    fn held(&mut self, lane: &Arc<MemoryLane>, position: u64, stored: Arc<Stored>, attempt: u32);
}

impl Receives for Deliveries {
    fn held(&mut self, lane: &Arc<MemoryLane>, position: u64, stored: Arc<Stored>, attempt: u32) {
        self.run(lane, position).push(stored, Position::offset(position), attempt);
    }
}

/// One taken for the engine.
pub(crate) struct Taken {
    pub(crate) part: usize,
    pub(crate) epoch: u64,
    pub(crate) position: u64,
    pub(crate) stored: Arc<Stored>,
    pub(crate) attempt: u32,
}

impl Receives for Vec<Taken> {
    fn held(&mut self, lane: &Arc<MemoryLane>, position: u64, stored: Arc<Stored>, attempt: u32) {
        self.push(Taken { part: lane.number, epoch: lane.source.epoch, position, stored, attempt });
    }
}

/// The hot path of a batch: neighbours of the log, one pass.
#[inline]
pub(crate) fn take_run(lane: &Arc<MemoryLane>, part: &mut Part, max: usize, out: &mut Deliveries) -> usize {
    let member = &*lane.member;
    let Some(group) = part.groups.get_mut(lane.group.number) else { return 0 };
    let first = group.entries.tail();
    if part.log.tail() == first {
        return 0;
    }
    let at = member.tick();
    let (mut n, mut bytes) = (0usize, 0usize);
    // A message that is larger than the bound goes alone.
    let room = member.flow.credit().bytes;
    let alone = member.flow.in_flight() == 0;
    let mut run = out.run(lane, first);
    // Log and entries are rings of different lengths: a piece ends where one of them turns around.
    while n < max {
        let next = first + n as u64;
        let cells = part.log.slice(next, max - n);
        let mut taken = 0;
        for (cell, entry) in cells.iter().zip(group.entries.push_slice(cells.len())) {
            let Some(stored) = &cell.stored else { break };
            let size = stored.size;
            bytes += size as usize;
            if cell.only != 0 || (bytes > room && !(alone && n + taken == 0)) {
                bytes -= size as usize;
                break;
            }
            *entry = Pending::held(member.id, 1, size, at);
            run.push(stored.clone(), Position::offset(next + taken as u64), 1);
            taken += 1;
        }
        group.entries.commit(taken);
        n += taken;
        if taken == 0 {
            break;
        }
    }
    if n > 0 {
        member.flow.take(n, bytes);
    }
    n
}

/// Retries, suspects, order per key, redriven messages, at most once, a trace: one at a time.
#[cold]
pub(crate) fn take_slow(lane: &Arc<MemoryLane>, part: &mut Part, max: usize, out: &mut impl Receives) -> Took {
    let member = &*lane.member;
    let mark = member.flow.mark();
    let mut took = Took::default();
    while took.n < max {
        let Some(group) = part.groups.get_mut(lane.group.number) else { break };
        let suspect = group.suspects.first().copied();
        if suspect.is_some() && member.flow.in_flight() > 0 {
            // It goes out alone: what is in hand is settled first.
            took.suspect_waits = took.n == 0;
            break;
        }
        let Some(position) = suspect.or_else(|| group.again.first().copied()).or_else(|| next_new(lane, part)) else {
            break;
        };
        let Some(group) = part.groups.get_mut(lane.group.number) else { break };
        let Some(stored) = part.log.get(position).and_then(|cell| cell.stored.clone()) else {
            // Trimmed meanwhile: settled as gone.
            group.again.remove(&position);
            group.suspects.remove(&position);
            finish(&lane.topic, &lane.group, part, position);
            continue;
        };
        let size = stored.size as usize;
        if !member.flow.fits(size) {
            took.no_room = Some(mark);
            // Taken off the log, maybe: it waits for room among those that are due.
            if suspect.is_none() {
                group.again.insert(position);
            }
            break;
        }
        let came_again = suspect.is_some() || group.again.contains(&position);
        group.again.remove(&position);
        group.suspects.remove(&position);
        let Some(attempt) = group.entries.get(position).map(|entry| entry.attempt().max(1)) else { continue };
        let mut turn = 0;
        if came_again {
            let history = group.history.entry(position).or_default();
            history.turn += 1;
            turn = history.turn;
        }
        if let Some(entry) = group.entries.get_mut(position) {
            *entry = Pending::held(member.id, attempt, stored.size, member.tick());
        }
        if let Some(key) = stored.message.key.as_deref().map(key_hash)
            && group.parked_keys.contains_key(&key)
        {
            let error = mq_api::Failure::failed("an earlier message of its key was dead-lettered");
            let (reason, error) = (Reason::Other("key-parked".into()), Some(Box::new(error)));
            let how = Settlement::DeadLetter { reason, error, attempts: attempt - 1 };
            let (topic, group) = (&lane.topic, &lane.group);
            Letter { topic, group, part: lane.number, position, attempt, member }.settle(&member.core, part, how);
            continue;
        }
        if suspect.is_some()
            && group.history.get(&position).is_some_and(|h| h.trials >= member.policy.crash_trials)
            && member.suspect_at() != u32::MAX
        {
            // Its dead letter could not be written when its last consumer died with it.
            let (topic, group) = (&lane.topic, &lane.group);
            let letter = Letter { topic, group, part: lane.number, position, attempt: attempt - 1, member };
            letter.settle_crashed(&member.core, part);
            continue;
        }
        if suspect.is_some() {
            group.history.entry(position).or_default().trials += 1;
            member.begin_suspect(lane.number, position);
            // Others may have waited for it.
            part.waiting = true;
            part.wake();
        }
        member.trace_delivered(&lane.source, position, &stored, attempt);
        took.n += 1;
        member.flow.take(1, size);
        match turn {
            0 => out.held(lane, position, stored, attempt),
            again => out.held(&Arc::new(lane.of(again)), position, stored, attempt),
        }
        if suspect.is_some() {
            break;
        }
    }
    took
}

/// Moves the tail to the next message that may go out now.
fn next_new(lane: &MemoryLane, part: &mut Part) -> Option<u64> {
    let number = lane.group.number;
    loop {
        let group = part.groups.get_mut(number)?;
        if let Some(gate) = &group.gate {
            let full = gate.waiting() >= lane.member.sub.max_blocked;
            let what = full.then(|| {
                format!("partition {} waits: {} messages are behind delayed keys", lane.number, gate.waiting())
            });
            lane.member.trouble(Trouble::Keys(lane.number), what);
            if full {
                return None;
            }
        }
        let next = group.entries.tail();
        let cell = part.log.get(next)?;
        let (_, entry) = group.entries.push_cell();
        if cell.only != 0 && cell.only as usize != number + 1 {
            // Redriven to another group.
            *entry = Pending::default();
            if group.advance() {
                let upto = group.entries.head();
                part.trim(&lane.topic.keep, upto);
            }
            continue;
        }
        entry.set(1, 0);
        let key = cell.stored.as_ref().and_then(|s| s.message.key.as_deref()).map(key_hash);
        if let (Some(gate), Some(key)) = (&mut group.gate, key)
            && !gate.arrive(key, next)
        {
            if let Some(entry) = group.entries.get_mut(next) {
                entry.set(1, BLOCKED);
            }
            continue;
        }
        return Some(next);
    }
}
