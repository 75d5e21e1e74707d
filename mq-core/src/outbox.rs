//! Messages on their way to the broker: accepted, queued, flying, outcome. One window of messages and bytes, a first-in
//! first-out waiting room before it, retries of unknown outcomes in order, time limits.
//!
//! **Order of a key.** Sends of one key that were all confirmed stand in the log in the order of the calls, by their first
//! occurrences. Writing is pipelined, so when one fails, later ones of its key may be written already. Therefore
//!
//! 1. while a send of a key waits for its retry, or is tried again, no later send of that key is written;
//! 2. a retry waits until every send of its key that was written before has its outcome; those that failed too are tried
//!    again after it, in order;
//! 3. a send that failed while a later one of its key was confirmed is *not* tried again: that would put it behind. It ends at
//!    once, as `Unknown` where a try of it may have been stored, and from then on order for that key is the caller's.
//!
//! What this takes from a driver: it writes the messages of a key in the order in which it took them, to a broker that handles
//! them in that order. Then of two that a lost connection left without answer, the later was stored only if the earlier was,
//! and tries of both, in order, can only add duplicates.

use crate::env::later;
use crate::hooks::Hooks;
use crate::keeper::Target;
use crate::keygate::key_hash;
use crate::sync::Mutex;
use crate::tries::{Outgoing, Slot, State, may_be_stored, outcome_now};
use crate::window::Table;
use mq_api::{Error, ErrorKind, Message, Outcome, ProducerSpec, SendResult, Sending, Topic};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::time::Instant;

/// See the module.
pub struct Outbox {
    hooks: Arc<dyn Hooks>,
    topic: Topic,
    pub(crate) table: Mutex<Table>,
    max: usize,
    max_bytes: usize,
    retry_for: Duration,
    timeout: Duration,
    me: std::sync::Weak<Outbox>,
}

impl Outbox {
    pub(crate) fn new(spec: &ProducerSpec, hooks: Arc<dyn Hooks>) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            hooks,
            topic: spec.topic.clone(),
            table: Mutex::default(),
            max: spec.max_in_flight,
            max_bytes: spec.max_in_flight_bytes,
            retry_for: spec.retry_for,
            timeout: spec.send_timeout,
            me: me.clone(),
        })
    }

    /// Accepts a message: queued, or waiting for room, when this returns.
    pub fn send(&self, message: Message, target: Target, timeout: Option<Duration>) -> Sending {
        let size = message.size() as u32;
        let now = Instant::now();
        let mut table = self.table.lock();
        if table.closed {
            return Sending::ready(Err(Error::closed("the producer")));
        }
        let ticket = self.accept(&mut table, message, target, size, now, timeout);
        let waker = table.driver.take();
        drop(table);
        if let Some(waker) = waker {
            waker.wake();
        }
        match self.me.upgrade() {
            Some(me) => Sending::wait(me, ticket),
            None => Sending::ready(Err(Error::closed("the producer"))),
        }
    }

    /// Accepts many under one lock; tickets in order.
    pub(crate) fn send_many(
        &self,
        messages: impl Iterator<Item = Result<(Message, u32), Error>>,
    ) -> Vec<Result<SendResult, u64>> {
        let now = Instant::now();
        let mut table = self.table.lock();
        let closed = table.closed;
        let tickets = messages
            .map(|item| match item {
                Ok(_) if closed => Ok(Err(Error::closed("the producer"))),
                Ok((message, size)) => Err(self.accept(&mut table, message, Target::Topic, size, now, None)),
                Err(refused) => Ok(Err(refused)),
            })
            .collect();
        let waker = table.driver.take();
        drop(table);
        if let Some(waker) = waker {
            waker.wake();
        }
        tickets
    }

    fn accept(
        &self,
        table: &mut Table,
        message: Message,
        target: Target,
        size: u32,
        now: Instant,
        timeout: Option<Duration>,
    ) -> u64 {
        let fits = table.waits == 0 && self.fits(table, size);
        let (index, slot) = table.claim();
        slot.key = message.key.as_deref().map(key_hash);
        slot.message = message;
        slot.target = Some(target);
        slot.size = size;
        slot.limit = timeout.unwrap_or(self.timeout);
        let deadline = later(now, slot.limit);
        slot.deadline = Some(deadline);
        table.earliest = Some(table.earliest.map_or(deadline, |earliest| earliest.min(deadline)));
        match fits {
            true => table.enqueue(index),
            false => table.wait(index),
        }
        table.ticket(index)
    }

    fn fits(&self, table: &Table, size: u32) -> bool {
        table.used == 0 || (table.used < self.max && table.bytes + size as usize <= self.max_bytes)
    }

    /// For the driver: takes at most `max` messages and about `max_bytes` bytes, at least one; ready when there is one.
    /// Whatever it takes it must complete; when its session ends the engine does.
    ///
    /// Messages of one key come in order, and while one of them is tried again no later one comes. A driver that writes several
    /// at once must not store a later one of a key when an earlier one may yet fail and be tried again.
    pub fn poll_take(&self, cx: &mut Context<'_>, max: usize, max_bytes: usize, into: &mut Vec<Outgoing>) -> Poll<()> {
        let mut table = self.table.lock();
        if table.take(max, max_bytes, self.retry_for, into) > 0 {
            return Poll::Ready(());
        }
        if !table.driver.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
            table.driver = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    /// For the driver: waits for messages. Cancel-safe: nothing is taken unless it returns.
    pub async fn take(&self, max: usize, max_bytes: usize, into: &mut Vec<Outgoing>) {
        std::future::poll_fn(|cx| self.poll_take(cx, max, max_bytes, into)).await;
    }

    /// For the driver, from any thread: outcomes. One lock for all. Errors without outcome count as unknown.
    pub fn complete(&self, results: impl IntoIterator<Item = (u64, SendResult)>) {
        let mut wakers = Vec::new();
        let mut sent = 0;
        let mut guard = self.table.lock();
        let table = &mut *guard;
        for (ticket, result) in results {
            let Some(slot) = table.slot(ticket).filter(|slot| matches!(slot.state, State::Flying)) else { continue };
            let index = ticket as u32;
            match result {
                Err(error) if Self::may_retry(slot, &error) => {
                    slot.doubtful |= may_be_stored(&error);
                    slot.last = Some(error);
                    table.requeue(index);
                }
                other => {
                    // Copies go to places of their own, and are tried again by whoever made them.
                    let is_send = matches!(slot.target, Some(Target::Topic));
                    let passes = other.is_ok() && is_send && slot.key.is_some();
                    let passed = if passes { table.pass(index) } else { Vec::new() };
                    // Copies of retries and dead letters are no sends of the program's.
                    sent += usize::from(other.is_ok() && is_send);
                    self.finish(table, index, other, &mut wakers);
                    for index in passed {
                        let error = table.slots[index as usize].overtaken();
                        self.finish(table, index, Err(error), &mut wakers);
                    }
                }
            }
        }
        self.admit(table);
        if table.driver.is_some() && table.has_work() {
            wakers.extend(table.driver.take());
        }
        table.flushed(&mut wakers);
        drop(guard);
        if sent > 0 {
            // Before the senders learn of it, so that whoever awaited a send finds it counted.
            self.hooks.sent(&self.topic, sent);
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Unknown outcomes and connections that failed before a byte was written are tried again, with the same id, within the
    /// time limit. What the broker refused is not.
    fn may_retry(slot: &Slot, error: &Error) -> bool {
        let open = slot.retry_until.is_some_and(|t| Instant::now() < t) && !slot.forgotten && !slot.passed;
        match error.outcome() {
            Some(Outcome::Rejected) => false,
            Some(Outcome::NotSent) => {
                open && matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Disconnected | ErrorKind::Timeout)
            }
            Some(Outcome::Unknown) | None => open,
        }
    }

    fn finish(&self, table: &mut Table, index: u32, result: SendResult, wakers: &mut Vec<Waker>) {
        table.close_slot(index);
        let slot = &mut table.slots[index as usize];
        let result = slot.honest(result);
        slot.message.clear();
        if let (Err(error), Some(Target::Topic)) = (&result, slot.target.take()) {
            self.hooks.send_failed(&self.topic, error);
        }
        if slot.forgotten {
            slot.release();
            table.unseen(&result);
            table.free.push(index);
        } else {
            slot.state = State::Done(result);
            wakers.extend(slot.waker.take());
        }
    }

    /// Lets waiting sends in, in order.
    pub(crate) fn admit(&self, table: &mut Table) {
        while table.waits > 0
            && let Some((index, size)) = table.first_waiting()
            && self.fits(table, size)
        {
            table.let_in(index);
        }
    }

    /// A session began.
    pub(crate) fn session_begun(&self) {
        self.table.lock().trouble = None;
    }

    /// The session ended, or none could begin: what was flying is unknown, and is tried again.
    pub(crate) fn session_lost(&self, why: &str) {
        let flying = {
            let mut table = self.table.lock();
            table.trouble = Some(why.to_owned());
            table.flying()
        };
        self.complete(flying.into_iter().map(|ticket| {
            let text = format!("the connection was lost before the broker confirmed: {why}");
            (ticket, Err(Error::new(ErrorKind::Disconnected, text).with_outcome(Outcome::Unknown)))
        }));
    }

    /// Ends what ran out of time; says whether anything is open.
    pub(crate) fn tick(&self, now: Instant) -> bool {
        let mut wakers = Vec::new();
        let mut guard = self.table.lock();
        let table = &mut *guard;
        for index in table.late(now) {
            let error = table.slots[index as usize].too_late(table.trouble.as_deref());
            self.finish(table, index, Err(error), &mut wakers);
        }
        self.admit(table);
        if table.driver.is_some() && table.has_work() {
            wakers.extend(table.driver.take());
        }
        table.flushed(&mut wakers);
        let open = !table.is_idle();
        drop(guard);
        wakers.into_iter().for_each(Waker::wake);
        open
    }

    /// Ready when everything accepted has its outcome.
    pub fn poll_flushed(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_flushed_to(u64::MAX, cx)
    }

    /// What [`poll_flushed_to`](Self::poll_flushed_to) takes to mean everything accepted until now.
    pub(crate) fn mark(&self) -> u64 {
        self.table.lock().seq
    }

    /// Ready when everything accepted until `mark` has its outcome.
    pub(crate) fn poll_flushed_to(&self, mark: u64, cx: &mut Context<'_>) -> Poll<()> {
        let mut table = self.table.lock();
        if table.is_flushed(mark) {
            return Poll::Ready(());
        }
        if !table.flush.iter().any(|(m, w)| *m == mark && w.will_wake(cx.waker())) {
            table.flush.push((mark, cx.waker().clone()));
        }
        Poll::Pending
    }

    /// Whether nothing is open.
    pub fn is_idle(&self) -> bool {
        self.table.lock().is_idle()
    }

    /// Failures of sends that nobody awaited.
    pub fn unobserved_failures(&self) -> u64 {
        self.table.lock().unobserved
    }

    /// Refuses new sends.
    pub(crate) fn shut(&self) {
        self.table.lock().closed = true;
    }

    /// Ends everything that is still open; says how many are unknown.
    pub(crate) fn end(&self) -> u64 {
        let mut wakers = Vec::new();
        let mut unknown = 0;
        let mut guard = self.table.lock();
        let table = &mut *guard;
        table.closed = true;
        for index in 0..table.slots.len() as u32 {
            let slot = &table.slots[index as usize];
            if !slot.is_open() {
                continue;
            }
            let outcome = outcome_now(slot);
            unknown += u64::from(outcome == Outcome::Unknown);
            let error = Error::new(ErrorKind::Closed, "the producer was closed first").with_outcome(outcome);
            self.finish(table, index, Err(error), &mut wakers);
        }
        table.flushed(&mut wakers);
        drop(guard);
        wakers.into_iter().for_each(Waker::wake);
        unknown
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
impl Outbox {
    /// Whether the driver still has it.
    pub(crate) fn is_flying(&self, ticket: u64) -> bool {
        self.table.lock().slot(ticket).is_some_and(|slot| matches!(slot.state, State::Flying))
    }

    /// Lines of keys, and retries on offer.
    pub(crate) fn open_entries(&self) -> (usize, usize) {
        self.table.lock().open_entries()
    }

    /// Entries of all lists that sends are queued in.
    pub(crate) fn noted(&self) -> usize {
        self.table.lock().noted()
    }
}

impl std::fmt::Debug for Outbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let table = self.table.lock();
        write!(f, "Outbox({} in flight, {} waiting)", table.used, table.waits)
    }
}
