//! A member's consumer: takes from its partitions in the caller's own task, so that nothing stands between send and receive.

use crate::group::Group;
use crate::lane::MemoryLane;
use crate::member::Member;
use crate::partition::Part;
use crate::pending::Pending;
use crate::presence::Presence;
use crate::take::{Taken, Took, take_run, take_slow};
use mq_api::{Consumer, ConsumerControl, Deliveries, Delivery, Position, Result, Ticket};
use mq_core::Gate;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;

mod changed;

type Pauses = Box<dyn Iterator<Item = Duration> + Send>;

pub(crate) struct MemoryConsumer {
    member: Arc<Member>,
    group: Arc<Group>,
    lanes: Vec<Arc<MemoryLane>>,
    control: ConsumerControl,
    version: u64,
    /// The lane that has its turn. It keeps it until a batch, the budget, or the credit ends.
    at: usize,
    budget: u32,
    /// Of this lane a suspect waits to be handed over alone.
    suspect: Option<Arc<MemoryLane>>,
    /// Nobody wants to hear of every message, and deliveries are settled one by one: new messages may go the short way.
    short: bool,
    /// For [`poll_next`](Consumer::poll_next) beside its hot path; always empty between calls.
    one: Deliveries,
    /// Its topic or group is not there, and not its to make: the pauses that are left, and when it looks again.
    absent: Option<(Pauses, Instant)>,
    /// Behind the engine's seam the driver has it.
    presence: Option<Arc<Presence>>,
}

/// Ready results in a row after which others get a turn.
const BUDGET: u32 = 128;

impl MemoryConsumer {
    pub(crate) fn new(member: Arc<Member>, group: Arc<Group>) -> Self {
        let control = ConsumerControl::new(member.clone());
        let short = !member.core.watched;
        let one = Deliveries::new();
        Self {
            member,
            group,
            lanes: Vec::new(),
            control,
            version: 0,
            at: 0,
            budget: 0,
            suspect: None,
            short,
            one,
            absent: None,
            presence: None,
        }
    }

    pub(crate) fn kept_by(mut self, presence: Arc<Presence>) -> Self {
        self.presence = Some(presence);
        self
    }

    /// The next lane has its turn; after the last comes the first.
    fn turn_ends(&mut self) {
        self.at = (self.at + 1) % self.lanes.len().max(1);
    }

    /// The hot path: one new message of the partition that has its turn, if nothing special goes on there.
    #[inline(always)]
    fn try_one(&mut self) -> Option<Delivery> {
        let member = &*self.member;
        if !self.short || !member.flow.is_open() {
            return None;
        }
        let lane = self.lanes.get(self.at)?;
        let mut guard = lane.part.lock();
        let part = &mut *guard;
        let group = part.groups.get_mut(lane.group.number)?;
        if !group.takes_short(member.id) {
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
        let at = member.tick();
        *group.entries.push_cell().1 = Pending::held(member.id, 1, size, at);
        let message = stored.clone();
        drop(guard);
        member.flow.take(1, size as usize);
        Some(Delivery::new(message, Position::offset(next), 1, Ticket::new(lane.clone(), next)))
    }

    /// Takes from one partition what there is, at most `max`.
    fn take(&self, lane: &Arc<MemoryLane>, max: usize, out: &mut Deliveries, cx: &mut Context<'_>) -> Took {
        let member = &*self.member;
        let mut guard = lane.part.lock();
        let mut took = Took::default();
        {
            let part = &mut *guard;
            let Some(group) = part.groups.get_mut(lane.group.number) else { return took };
            if !group.is_open_to(member.id) {
                return took;
            }
            if self.short && group.takes_short(member.id) {
                took.n = take_run(lane, part, max, out);
            }
        }
        if took.n == 0 {
            took = take_slow(lane, &mut guard, max, out);
        }
        self.wait_if_none(lane, &mut guard, &took, cx);
        took
    }

    /// A suspect waits to be handed over alone. Until nothing is in hand nothing else goes out, of no partition: else it would
    /// wait for ever beside one that is busy. Unless another member takes it first. Ready: this one may take again, and begins
    /// with that lane.
    fn poll_suspect(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(lane) = &self.suspect else { return Poll::Ready(()) };
        let mut guard = lane.part.lock();
        let slot = guard.groups.get(lane.group.number);
        let waits = slot.is_some_and(|slot| slot.is_open_to(self.member.id) && !slot.suspects.is_empty());
        if waits && self.member.flow.poll_drained(cx).is_pending() {
            self.listen(lane, &mut guard, cx);
            return Poll::Pending;
        }
        drop(guard);
        let at = self.lanes.iter().position(|l| Arc::ptr_eq(l, lane));
        self.at = at.unwrap_or(self.at);
        self.suspect = None;
        self.member.flow.open(Gate::Alone);
        Poll::Ready(())
    }

    fn await_suspect(&mut self, at: usize) {
        self.suspect = self.lanes.get(at).cloned();
        self.member.flow.shut(Gate::Alone);
    }

    /// Whoever changes something there wakes this member.
    fn listen(&self, lane: &MemoryLane, part: &mut Part, cx: &Context<'_>) {
        part.waiting = true;
        let Some(group) = part.groups.get_mut(lane.group.number) else { return };
        // One for each member: polls that ended leave nothing behind.
        match group.wakers.iter_mut().find(|(id, _)| *id == self.member.id) {
            Some((_, waker)) if waker.will_wake(cx.waker()) => {}
            Some((_, waker)) => waker.clone_from(cx.waker()),
            None => group.wakers.push((self.member.id, cx.waker().clone())),
        }
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
            self.listen(lane, guard, cx);
        }
    }

    /// For the engine's driver: ready when the member has died, or sits elsewhere, whether or not it may take more.
    pub(crate) fn poll_changed(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.member.wait(cx);
        if self.member.is_crashed() {
            return Poll::Ready(Ok(()));
        }
        if self.version == self.group.version() {
            return Poll::Pending;
        }
        Poll::Ready(self.refresh())
    }

    /// For the engine's driver: takes without making deliveries.
    pub(crate) fn poll_take(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Vec<Taken>) -> Poll<Result<()>> {
        if self.poll_suspect(cx).is_pending() || self.member.flow.poll_credit(cx).is_pending() {
            return Poll::Pending;
        }
        let max = max.max(1).min(self.member.flow.credit().count.max(1));
        let lanes = self.lanes.len();
        for turn in 0..lanes {
            let at = (self.at + turn) % lanes;
            let lane = &self.lanes[at];
            let mut guard = lane.part.lock();
            let Some(group) = guard.groups.get(lane.group.number) else { continue };
            if !group.is_open_to(self.member.id) {
                continue;
            }
            let took = take_slow(lane, &mut guard, max, out);
            self.wait_if_none(lane, &mut guard, &took, cx);
            drop(guard);
            if took.n > 0 {
                self.at = at;
                self.turn_ends();
                return Poll::Ready(Ok(()));
            }
            if took.suspect_waits {
                self.await_suspect(at);
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
        if self.version != self.group.version() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    #[cold]
    #[inline(never)]
    fn fill_one(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Delivery>>> {
        let mut one = std::mem::take(&mut self.one);
        let filled = self.fill(cx, 1, &mut one);
        let delivery = one.pop();
        self.one = one;
        filled.map_ok(|_| delivery)
    }

    fn fill(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Deliveries) -> Poll<Result<usize>> {
        self.budget += 1;
        if self.budget >= BUDGET {
            self.budget = 0;
            self.turn_ends();
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.member.flow.is_shut(Gate::Stopping) {
            return Poll::Ready(Ok(0));
        }
        if let Some(presence) = &self.presence {
            // It may be used in another runtime than it was made in.
            presence.be_here();
        }
        self.member.wait(cx);
        if self.version != self.group.version() {
            if self.absent.as_ref().is_some_and(|(_, again)| self.member.core.env.now() < *again) {
                return Poll::Pending;
            }
            if let Err(error) = self.refresh() {
                self.wait_for_topology(&error);
                return Poll::Pending;
            }
            self.absent = None;
        }
        if self.poll_suspect(cx).is_pending() || self.member.flow.poll_credit(cx).is_pending() {
            self.budget = 0;
            self.turn_ends();
            self.member.waits_for_room();
            // A gate may have shut meanwhile.
            return if self.member.flow.is_shut(Gate::Stopping) { Poll::Ready(Ok(0)) } else { Poll::Pending };
        }
        let credit = self.member.flow.credit();
        let max = max.max(1).min(credit.count.max(1));
        let lanes = self.lanes.len();
        for turn in 0..lanes {
            let at = (self.at + turn) % lanes;
            let took = self.take(&self.lanes[at], max, out, cx);
            if took.n > 0 {
                self.at = at;
                return Poll::Ready(Ok(took.n));
            }
            if took.suspect_waits {
                self.await_suspect(at);
                // It looks again at once, and then waits until nothing is in hand.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
        self.budget = 0;
        if self.version != self.group.version() {
            cx.waker().wake_by_ref();
        }
        if self.member.flow.is_shut(Gate::Stopping) { Poll::Ready(Ok(0)) } else { Poll::Pending }
    }
}

impl Consumer for MemoryConsumer {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Delivery>>> {
        if self.version == self.group.version()
            && self.budget < BUDGET - 1
            && let Some(delivery) = self.try_one()
        {
            self.budget += 1;
            return Poll::Ready(Ok(Some(delivery)));
        }
        self.fill_one(cx)
    }

    fn poll_batch(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Deliveries) -> Poll<Result<usize>> {
        let filled = self.fill(cx, max, out);
        if filled.is_ready() {
            self.turn_ends();
        }
        filled
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
