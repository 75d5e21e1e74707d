//! A member's consumer: takes from its partitions in the caller's own task, so that nothing stands between send and receive.

use crate::group::Group;
use crate::lane::{Letter, MemoryLane};
use crate::member::Member;
use crate::partition::Part;
use crate::pending::{BLOCKED, Pending};
use mq_api::{
    Consumer, ConsumerControl, Deliveries, Delivery, Event, Gap, GapCause, Guarantee, Position, Provisioning, Reason,
    Result, Settled, Source, Start, Stored, Ticket,
};
use mq_core::{Gate, Settlement, key_hash};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};

pub(crate) struct MemoryConsumer {
    member: Arc<Member>,
    group: Arc<Group>,
    lanes: Vec<Arc<MemoryLane>>,
    control: ConsumerControl,
    version: u64,
    /// The version at which one new message may go the short way; [`NEVER`] if somebody wants to hear of every message, or
    /// deliveries are settled before the hand-over.
    hot: u64,
    /// The broker's coarse clock.
    coarse: Arc<AtomicU32>,
    /// The lane that has its turn, and its number.
    turn: Option<Arc<MemoryLane>>,
    at: usize,
    /// The lane that gave the last messages.
    last: usize,
    budget: u32,
    /// Nobody wants to hear of every message, and deliveries are settled one by one: new messages may go the short way.
    short: bool,
    /// For [`poll_next`](Consumer::poll_next) beside its hot path; always empty between calls.
    one: Deliveries,
}

/// Ready results in a row after which others get a turn.
const BUDGET: u32 = 128;
/// No version of a group is this.
const NEVER: u64 = u64::MAX;

impl MemoryConsumer {
    pub(crate) fn new(member: Arc<Member>, group: Arc<Group>) -> Self {
        let control = ConsumerControl::new(member.clone());
        let coarse = member.core.coarse.clone();
        let short = !member.core.watched && member.sub.guarantee == Guarantee::AtLeastOnce;
        Self {
            member,
            group,
            lanes: Vec::new(),
            control,
            version: 0,
            hot: NEVER,
            coarse,
            at: 0,
            turn: None,
            last: 0,
            budget: 0,
            short,
            one: Deliveries::new(),
        }
    }

    /// Gives a lane its turn; beyond the last comes the first.
    fn turn_to(&mut self, at: usize) {
        let at = if at < self.lanes.len() { at } else { 0 };
        if at != self.at || self.turn.is_none() {
            self.turn = self.lanes.get(at).cloned();
            self.at = at;
        }
    }

    /// Ownership changed, or the group is gone: looks again.
    #[cold]
    fn refresh(&mut self) -> Result<()> {
        let (mut topic, _) = self.member.seat();
        if self.group.is_deleted() || topic.deleted.load(Ordering::Acquire) {
            topic = self.make_again()?;
        }
        self.group.assign_free();
        self.version = self.group.version();
        self.hot = if self.short { self.version } else { NEVER };
        let mut lanes = Vec::new();
        for (number, part) in topic.parts.iter().enumerate() {
            let guard = part.lock();
            let Some(slot) = guard.groups.get(self.group.number) else { continue };
            if topic.exclusive && slot.owner != Some(self.member.id) {
                continue;
            }
            let epoch = slot.epoch;
            drop(guard);
            let kept = self.lanes.iter().find(|l| {
                l.number == number
                    && l.source.epoch == epoch
                    && Arc::ptr_eq(&l.topic, &topic)
                    && Arc::ptr_eq(&l.group, &self.group)
            });
            lanes.push(kept.cloned().unwrap_or_else(|| {
                let source = Source::new(topic.name.clone(), Some(self.group.name.clone()));
                Arc::new(MemoryLane {
                    member: self.member.clone(),
                    topic: topic.clone(),
                    group: self.group.clone(),
                    part: part.clone(),
                    number,
                    owner: self.member.id,
                    source: source.at(Some(number as u32), epoch),
                    settled: Settled::Confirmed(self.member.core.capabilities.settle_level),
                    slot: self.group.number,
                })
            }));
        }
        self.lanes = lanes;
        self.turn = None;
        self.turn_to(0);
        Ok(())
    }

    /// Somebody deleted the topic or the group that this member made: made again, at the lowest position not known settled, or
    /// at the beginning of a new topic.
    fn make_again(&mut self) -> Result<Arc<crate::topic::Topic>> {
        let (core, sub) = (&self.member.core, &self.member.sub);
        let (old, _) = self.member.seat();
        let topic = core.topic(&sub.topic, sub.partitions, sub.retention, sub.provisioning)?;
        let same = Arc::ptr_eq(&old, &topic);
        if topic.find_group(&self.group.name).is_none() && sub.provisioning != Provisioning::Create {
            let text = format!(
                "group '{}' of topic '{}' was deleted and provisioning is not Create",
                self.group.name, topic.name
            );
            self.member.trouble(Some(text.clone()));
            return Err(mq_api::Error::new(mq_api::ErrorKind::Topology, text));
        }
        let resume = self.group.resume();
        let made = topic.find_group(&self.group.name).is_none();
        let group = topic.group(&self.group.name, Start::Oldest, self.group.per_key());
        if made && same {
            for (part, at) in topic.parts.iter().zip(resume) {
                let mut part = part.lock();
                let head = part.log.head();
                if let Some(slot) = part.groups.get_mut(group.number) {
                    *slot = crate::pending::GroupPart::starting_at(at.max(head), group.per_key());
                }
            }
        }
        self.member.events.push(Event::Gap(Gap {
            topic: topic.name.clone(),
            partition: None,
            from: None,
            to: None,
            count: if same { Some(0) } else { None },
            cause: GapCause::Deleted,
        }));
        self.member.take_seat(topic.clone(), Some(group.clone()));
        self.group = group;
        self.group.join(&self.member);
        Ok(topic)
    }

    /// The hot path: one new message of the partition that has its turn, if nothing special goes on there.
    #[inline(always)]
    fn try_one(&mut self) -> Option<Delivery> {
        let member = &*self.member;
        if !member.flow.is_open() {
            return None;
        }
        let lane = self.turn.as_ref()?;
        let mut guard = lane.part.lock();
        let part = &mut *guard;
        let group = part.groups.get_mut(lane.slot)?;
        if !group.takes_short(lane.owner) {
            return None;
        }
        let next = group.entries.tail();
        let cell = part.log.get(next)?;
        if cell.only != 0 {
            return None;
        }
        let stored = cell.stored.as_ref()?;
        let size = stored.size;
        if !member.flow.fits(size as usize) {
            return None;
        }
        let at = self.coarse.load(Ordering::Relaxed);
        *group.entries.push_cell().1 = Pending::held(lane.owner, 1, size, at);
        let message = stored.clone();
        drop(guard);
        member.flow.take(1, size as usize);
        Some(Delivery::new(message, Position::offset(next), 1, Ticket::new(lane.clone(), next)))
    }

    /// Takes from one partition what there is, at most `max`; says how many.
    fn take(&self, lane: &Arc<MemoryLane>, max: usize, out: &mut Deliveries, cx: &mut Context<'_>) -> usize {
        let member = &*self.member;
        let mut guard = lane.part.lock();
        let mut took = Took { n: 0, no_room: None };
        {
            let part = &mut *guard;
            let Some(group) = part.groups.get_mut(lane.group.number) else { return 0 };
            if group.deleted || group.owner.is_some() && (group.owner != Some(member.id) || group.draining) {
                return 0;
            }
            if self.short && group.takes_short(member.id) {
                took.n = take_run(lane, part, max, out);
            }
        }
        if took.n == 0 {
            took = self.take_slow(lane, &mut guard, max, out);
        }
        self.wait_if_none(lane, &mut guard, &took, cx);
        took.n
    }

    /// Nothing there: whoever changes that wakes this member.
    fn wait_if_none(&self, lane: &MemoryLane, guard: &mut Part, took: &Took, cx: &mut Context<'_>) {
        let member = &*self.member;
        if took.n == 0 {
            if let Some(mark) = took.no_room
                && member.flow.poll_given(mark, cx).is_ready()
            {
                cx.waker().wake_by_ref();
            }
            guard.waiting = true;
            if let Some(group) = guard.groups.get_mut(lane.group.number) {
                // One for each member: polls that ended leave nothing behind.
                match group.wakers.iter_mut().find(|(id, _)| *id == member.id) {
                    Some((_, waker)) if waker.will_wake(cx.waker()) => {}
                    Some((_, waker)) => waker.clone_from(cx.waker()),
                    None => group.wakers.push((member.id, cx.waker().clone())),
                }
                if !group.suspects.is_empty() && member.flow.poll_drained(cx).is_ready() {
                    cx.waker().wake_by_ref();
                }
            }
        }
    }

    /// For the engine's driver: takes without making deliveries.
    pub(crate) fn poll_take(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Vec<Taken>) -> Poll<Result<()>> {
        self.member.wait(cx);
        if self.version != self.group.version()
            && let Err(error) = self.refresh()
        {
            return Poll::Ready(Err(error));
        }
        if self.member.flow.poll_credit(cx).is_pending() {
            return Poll::Pending;
        }
        let max = max.max(1).min(self.member.flow.credit().count.max(1));
        let lanes = self.lanes.len();
        for turn in 0..lanes {
            let at = (self.at + turn) % lanes;
            let lane = &self.lanes[at];
            let mut guard = lane.part.lock();
            let Some(group) = guard.groups.get(lane.group.number) else { continue };
            if group.deleted || group.owner.is_some() && (group.owner != Some(self.member.id) || group.draining) {
                continue;
            }
            let took = self.take_slow(lane, &mut guard, max, out);
            self.wait_if_none(lane, &mut guard, &took, cx);
            if took.n > 0 {
                drop(guard);
                self.turn_to(at + 1);
                return Poll::Ready(Ok(()));
            }
        }
        if self.version != self.group.version() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Retries, suspects, order per key, redriven messages, at most once, a trace: one at a time.
    #[cold]
    fn take_slow(&self, lane: &Arc<MemoryLane>, part: &mut Part, max: usize, out: &mut impl Receives) -> Took {
        let member = &*self.member;
        let mark = member.flow.mark();
        let mut no_room = None;
        let mut n = 0;
        while n < max {
            let Some(group) = part.groups.get_mut(lane.group.number) else { break };
            let suspect = group.suspects.first().copied();
            if suspect.is_some() && member.flow.in_flight() > 0 {
                // It goes out alone: what is in hand is settled first.
                break;
            }
            let Some(position) = suspect.or_else(|| group.again.first().copied()).or_else(|| self.next_new(lane, part))
            else {
                break;
            };
            let Some(group) = part.groups.get_mut(lane.group.number) else { break };
            let Some(stored) = part.log.get(position).and_then(|cell| cell.stored.clone()) else {
                // Trimmed meanwhile: settled as gone.
                group.again.remove(&position);
                group.suspects.remove(&position);
                crate::lane::finish(&lane.topic, &lane.group, part, position);
                continue;
            };
            let size = stored.size as usize;
            if !member.flow.fits(size) {
                no_room = Some(mark);
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
            let mut owner = member.id;
            if came_again {
                let history = group.history.entry(position).or_default();
                history.again += 1;
                owner |= history.again << 20;
            }
            if let Some(entry) = group.entries.get_mut(position) {
                *entry = Pending::held(owner, attempt, stored.size, member.core.coarse.load(Ordering::Relaxed));
            }
            if let Some(key) = stored.message.key.as_deref().map(key_hash)
                && group.parked_keys.contains(&key)
            {
                let error = mq_api::Failure::failed("an earlier message of its key was dead-lettered");
                let (reason, error) = (Reason::Other("key-parked".into()), Some(Box::new(error)));
                let how = Settlement::DeadLetter { reason, error, attempts: attempt - 1 };
                let (topic, group) = (&lane.topic, &lane.group);
                Letter { topic, group, part: lane.number, position, attempt, member }.settle(&member.core, part, how);
                continue;
            }
            if suspect.is_some() {
                group.history.entry(position).or_default().trials += 1;
                member.begin_suspect(lane.number, position);
            }
            member.trace_delivered(&lane.source, position, &stored, attempt);
            n += 1;
            if member.sub.guarantee == Guarantee::AtMostOnce {
                crate::lane::finish(&lane.topic, &lane.group, part, position);
                out.untracked(lane, position, stored, attempt);
                continue;
            }
            member.flow.take(1, size);
            match owner == lane.owner {
                true => out.held(lane, position, stored, attempt),
                false => out.held(&Arc::new(lane.of(owner)), position, stored, attempt),
            }
            if suspect.is_some() {
                break;
            }
        }
        Took { n, no_room }
    }

    /// Moves the tail to the next message that may go out now.
    fn next_new(&self, lane: &MemoryLane, part: &mut Part) -> Option<u64> {
        let number = lane.group.number;
        loop {
            let group = part.groups.get_mut(number)?;
            if let Some(gate) = &group.gate {
                let full = gate.waiting() >= self.member.sub.max_blocked;
                let what = full.then(|| {
                    format!("partition {} waits: {} messages are behind delayed keys", lane.number, gate.waiting())
                });
                self.member.trouble(what);
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

    #[cold]
    #[inline(never)]
    fn fill_one(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Delivery>>> {
        let mut one = std::mem::take(&mut self.one);
        let filled = self.fill(cx, 1, &mut one);
        let delivery = one.pop();
        self.one = one;
        if delivery.is_some() {
            // The partition keeps its turn until the budget ends: others get theirs then.
            self.turn_to(self.last);
        }
        filled.map_ok(|_| delivery)
    }

    fn fill(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Deliveries) -> Poll<Result<usize>> {
        self.budget += 1;
        if self.budget >= BUDGET {
            self.budget = 0;
            self.turn_to(self.at + 1);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.member.flow.is_shut(Gate::Stopping) {
            return Poll::Ready(Ok(0));
        }
        self.member.wait(cx);
        if self.version != self.group.version()
            && let Err(error) = self.refresh()
        {
            return Poll::Ready(Err(error));
        }
        if self.member.flow.poll_credit(cx).is_pending() {
            self.budget = 0;
            // A turn ends with the credit too, or a partition with a backlog would keep it for ever.
            self.turn_to(self.at + 1);
            // A gate may have shut meanwhile.
            return if self.member.flow.is_shut(Gate::Stopping) { Poll::Ready(Ok(0)) } else { Poll::Pending };
        }
        let credit = self.member.flow.credit();
        let max = max.max(1).min(credit.count.max(1));
        let lanes = self.lanes.len();
        for turn in 0..lanes {
            let at = (self.at + turn) % lanes;
            let n = self.take(&self.lanes[at], max, out, cx);
            if n > 0 {
                self.last = at;
                self.turn_to(at + 1);
                return Poll::Ready(Ok(n));
            }
        }
        self.budget = 0;
        if self.version != self.group.version() {
            cx.waker().wake_by_ref();
        }
        if self.member.flow.is_shut(Gate::Stopping) { Poll::Ready(Ok(0)) } else { Poll::Pending }
    }
}

/// What a look at a partition gave.
struct Took {
    n: usize,
    /// There is a message, but no room for its bytes; what was in hand then.
    no_room: Option<u64>,
}

/// What takes messages out of a partition.
pub(crate) trait Receives {
    /// One that is to be settled.
    fn held(&mut self, lane: &Arc<MemoryLane>, position: u64, stored: Arc<Stored>, attempt: u32);
    /// One that was settled before the hand-over.
    fn untracked(&mut self, lane: &Arc<MemoryLane>, position: u64, stored: Arc<Stored>, attempt: u32);
}

impl Receives for Deliveries {
    fn held(&mut self, lane: &Arc<MemoryLane>, position: u64, stored: Arc<Stored>, attempt: u32) {
        self.run(lane, position).push(stored, Position::offset(position), attempt);
    }
    fn untracked(&mut self, lane: &Arc<MemoryLane>, position: u64, stored: Arc<Stored>, attempt: u32) {
        let lane = Arc::new(crate::broadcast::Untracked(lane.source.clone()));
        self.push(Delivery::new(stored, Position::offset(position), attempt, Ticket::new(lane, position)));
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
    fn untracked(&mut self, lane: &Arc<MemoryLane>, position: u64, stored: Arc<Stored>, attempt: u32) {
        self.held(lane, position, stored, attempt);
    }
}

/// The hot path of a batch: neighbours of the log, one pass.
#[inline]
fn take_run(lane: &Arc<MemoryLane>, part: &mut Part, max: usize, out: &mut Deliveries) -> usize {
    let member = &*lane.member;
    let Some(group) = part.groups.get_mut(lane.group.number) else { return 0 };
    let first = group.entries.tail();
    if part.log.tail() == first {
        return 0;
    }
    let at = member.core.coarse.load(Ordering::Relaxed);
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
            *entry = Pending::held(lane.owner, 1, size, at);
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

impl Consumer for MemoryConsumer {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Delivery>>> {
        if self.hot == self.group.version()
            && self.budget < BUDGET - 1
            && let Some(delivery) = self.try_one()
        {
            self.budget += 1;
            return Poll::Ready(Ok(Some(delivery)));
        }
        self.fill_one(cx)
    }

    fn poll_batch(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Deliveries) -> Poll<Result<usize>> {
        self.fill(cx, max, out)
    }

    fn control(&self) -> ConsumerControl {
        self.control.clone()
    }
}

impl Drop for MemoryConsumer {
    fn drop(&mut self) {
        self.member.close_now();
    }
}
