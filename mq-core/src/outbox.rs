//! Messages on their way to the broker: accepted, queued, flying, outcome. One window of messages and bytes, a first-in
//! first-out waiting room before it, retries of unknown outcomes in order, time limits.

use crate::hooks::Hooks;
use crate::keeper::Target;
use crate::keygate::key_hash;
use mq_api::{Error, ErrorKind, Message, Outcome, ProducerSpec, SendResult, SendTable, Sending, Topic};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::time::Instant;

/// A message for a driver to write.
#[derive(Debug)]
pub struct Outgoing {
    /// To complete it by.
    pub ticket: u64,
    /// The message. Its contents are shared with the outbox, which keeps it for a retry.
    pub message: Message,
    /// Where to.
    pub target: Target,
    /// Its size, as [`Message::size`].
    pub size: u32,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Free,
    /// Waits for room.
    Waiting,
    /// May be written.
    Queued,
    /// Is being written or waits for its confirmation.
    Flying,
    Done(SendResult),
}

#[derive(Debug, Default)]
struct Slot {
    state: State,
    generation: u32,
    seq: u64,
    forgotten: bool,
    message: Message,
    target: Option<Target>,
    size: u32,
    key: Option<u64>,
    deadline: Option<Instant>,
    retry_until: Option<Instant>,
    not_before: Option<Instant>,
    tries: u32,
    waker: Option<Waker>,
}

#[derive(Default)]
struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    queue: VecDeque<u32>,
    waiting: VecDeque<u32>,
    /// Keys of which a send is being retried: no later one of them is written meanwhile.
    retrying: HashMap<u64, u32>,
    used: usize,
    bytes: usize,
    seq: u64,
    driver: Option<Waker>,
    flush: Vec<Waker>,
    closed: bool,
    unobserved: u64,
}

/// See the module.
pub struct Outbox {
    hooks: Arc<dyn Hooks>,
    topic: Topic,
    table: Mutex<Table>,
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
        let mut table = self.table.lock();
        if table.closed {
            return Sending::ready(Err(Error::closed("the producer")));
        }
        let ticket = self.accept(&mut table, message, target, size, timeout);
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
        let mut table = self.table.lock();
        let closed = table.closed;
        let tickets = messages
            .map(|item| match item {
                Ok(_) if closed => Ok(Err(Error::closed("the producer"))),
                Ok((message, size)) => Err(self.accept(&mut table, message, Target::Topic, size, None)),
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

    fn accept(&self, table: &mut Table, message: Message, target: Target, size: u32, timeout: Option<Duration>) -> u64 {
        let now = Instant::now();
        let index = table.free.pop().unwrap_or_else(|| {
            table.slots.push(Slot::default());
            (table.slots.len() - 1) as u32
        });
        table.seq += 1;
        let fits = table.waiting.is_empty() && self.fits(table, size);
        let slot = &mut table.slots[index as usize];
        slot.seq = table.seq;
        slot.forgotten = false;
        slot.key = message.key.as_deref().map(key_hash);
        slot.message = message;
        slot.target = Some(target);
        slot.size = size;
        slot.deadline = now.checked_add(timeout.unwrap_or(self.timeout));
        slot.retry_until = now.checked_add(self.retry_for);
        slot.not_before = None;
        slot.tries = 0;
        slot.waker = None;
        let ticket = u64::from(slot.generation) << 32 | u64::from(index);
        if fits {
            slot.state = State::Queued;
            table.used += 1;
            table.bytes += size as usize;
            table.queue.push_back(index);
        } else {
            slot.state = State::Waiting;
            table.waiting.push_back(index);
        }
        ticket
    }

    fn fits(&self, table: &Table, size: u32) -> bool {
        table.used == 0 || (table.used < self.max && table.bytes + size as usize <= self.max_bytes)
    }

    /// For the driver: takes at most `max` messages and about `max_bytes` bytes, at least one; ready when there is one.
    /// Whatever it takes it must complete; when its session ends the engine does.
    pub fn poll_take(&self, cx: &mut Context<'_>, max: usize, max_bytes: usize, into: &mut Vec<Outgoing>) -> Poll<()> {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let (mut n, mut bytes) = (0, 0);
        let mut now = None;
        let mut kept = VecDeque::new();
        while n < max && (n == 0 || bytes < max_bytes) {
            let Some(index) = table.queue.pop_front() else { break };
            let slot = &mut table.slots[index as usize];
            if let Some(at) = slot.not_before
                && at > *now.get_or_insert_with(Instant::now)
            {
                // A retry that waits its back-off holds back what is behind it: order.
                kept.push_back(index);
                break;
            }
            if slot.tries == 0
                && !table.retrying.is_empty()
                && slot.key.is_some_and(|key| table.retrying.contains_key(&key))
            {
                kept.push_back(index);
                continue;
            }
            slot.state = State::Flying;
            into.push(Outgoing {
                ticket: u64::from(slot.generation) << 32 | u64::from(index),
                message: slot.message.clone(),
                target: slot.target.clone().unwrap_or(Target::Topic),
                size: slot.size,
            });
            n += 1;
            bytes += slot.size as usize;
        }
        while let Some(index) = kept.pop_back() {
            table.queue.push_front(index);
        }
        if n > 0 {
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
            let index = ticket as u32;
            let Some(slot) = table.slots.get(index as usize) else { continue };
            if slot.generation != (ticket >> 32) as u32 || !matches!(slot.state, State::Flying) {
                continue;
            }
            match result {
                Err(error) if Self::may_retry(slot, &error) => Self::requeue(table, index),
                other => {
                    // Copies of retries and dead letters are no sends of the program's.
                    sent += usize::from(other.is_ok() && matches!(slot.target, Some(Target::Topic)));
                    self.finish(table, index, other, &mut wakers);
                }
            }
        }
        self.admit(table);
        let driver = if table.queue.is_empty() { None } else { table.driver.take() };
        wakers.extend(driver);
        if table.used == 0 && table.waiting.is_empty() {
            wakers.append(&mut table.flush);
        }
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
        let open = slot.retry_until.is_some_and(|t| Instant::now() < t) && !slot.forgotten;
        match error.outcome() {
            Some(Outcome::Rejected) => false,
            Some(Outcome::NotSent) => {
                open && matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Disconnected | ErrorKind::Timeout)
            }
            Some(Outcome::Unknown) | None => open,
        }
    }

    fn requeue(table: &mut Table, index: u32) {
        let slot = &mut table.slots[index as usize];
        slot.state = State::Queued;
        if slot.tries == 0
            && let Some(key) = slot.key
        {
            *table.retrying.entry(key).or_default() += 1;
        }
        slot.tries += 1;
        // 5 ms doubling to 1.3 s: a neighbour's channel error is over at once, a failover is not.
        slot.not_before = Some(Instant::now() + Duration::from_millis(5 << slot.tries.min(8)));
        let seq = slot.seq;
        let slots = &table.slots;
        let at = table.queue.partition_point(|i| slots[*i as usize].seq < seq);
        table.queue.insert(at, index);
    }

    fn finish(&self, table: &mut Table, index: u32, result: SendResult, wakers: &mut Vec<Waker>) {
        let slot = &mut table.slots[index as usize];
        if slot.tries > 0
            && let Some(key) = slot.key
            && let Some(n) = table.retrying.get_mut(&key)
        {
            *n -= 1;
            if *n == 0 {
                table.retrying.remove(&key);
            }
        }
        table.used -= 1;
        table.bytes -= slot.size as usize;
        slot.message.clear();
        if let (Err(error), Some(Target::Topic)) = (&result, slot.target.take()) {
            self.hooks.send_failed(&self.topic, error);
        }
        if slot.forgotten {
            table.unobserved += u64::from(result.is_err());
            Self::release(slot);
            table.free.push(index);
        } else {
            slot.state = State::Done(result);
            wakers.extend(slot.waker.take());
        }
    }

    fn release(slot: &mut Slot) {
        slot.state = State::Free;
        slot.generation = slot.generation.wrapping_add(1);
        slot.waker = None;
        slot.message.clear();
        slot.target = None;
    }

    /// Lets waiting sends in, in order.
    fn admit(&self, table: &mut Table) {
        while let Some(index) = table.waiting.front().copied() {
            let size = table.slots[index as usize].size;
            if !self.fits(table, size) {
                return;
            }
            table.waiting.pop_front();
            table.used += 1;
            table.bytes += size as usize;
            table.slots[index as usize].state = State::Queued;
            table.queue.push_back(index);
        }
    }

    /// The session ended: what was flying is unknown, and is tried again.
    pub(crate) fn session_lost(&self, why: &str) {
        let flying: Vec<u64> = {
            let table = self.table.lock();
            let flying = table.slots.iter().enumerate().filter(|(_, s)| matches!(s.state, State::Flying));
            flying.map(|(i, s)| u64::from(s.generation) << 32 | i as u64).collect()
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
        let late: Vec<u32> = (0..table.slots.len() as u32)
            .filter(|i| {
                let slot = &table.slots[*i as usize];
                let open = matches!(slot.state, State::Waiting | State::Queued | State::Flying);
                open && slot.deadline.is_some_and(|d| d <= now)
            })
            .collect();
        for index in late {
            let slot = &mut table.slots[index as usize];
            let limit = "the time limit of the send passed";
            let (text, outcome) = match slot.state {
                State::Waiting => (format!("{limit} while it waited for room"), Outcome::NotSent),
                State::Queued if slot.tries == 0 => {
                    (format!("{limit} before the broker could be reached"), Outcome::NotSent)
                }
                _ => (format!("{limit} before the broker confirmed"), Outcome::Unknown),
            };
            let error = Error::new(ErrorKind::Timeout, text).with_outcome(outcome);
            match slot.state {
                State::Waiting => {
                    table.waiting.retain(|i| *i != index);
                    table.used += 1;
                    table.bytes += slot.size as usize;
                }
                State::Queued => table.queue.retain(|i| *i != index),
                _ => {}
            }
            self.finish(table, index, Err(error), &mut wakers);
        }
        self.admit(table);
        let due = table.queue.front().is_some_and(|i| table.slots[*i as usize].not_before.is_none_or(|t| t <= now));
        if due {
            wakers.extend(table.driver.take());
        }
        if table.used == 0 && table.waiting.is_empty() {
            wakers.append(&mut table.flush);
        }
        let open = table.used > 0 || !table.waiting.is_empty();
        drop(guard);
        wakers.into_iter().for_each(Waker::wake);
        open
    }

    /// Ready when everything accepted has its outcome.
    pub fn poll_flushed(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut table = self.table.lock();
        if table.used == 0 && table.waiting.is_empty() {
            return Poll::Ready(());
        }
        if !table.flush.iter().any(|w| w.will_wake(cx.waker())) {
            table.flush.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Whether nothing is open.
    pub fn is_idle(&self) -> bool {
        let table = self.table.lock();
        table.used == 0 && table.waiting.is_empty()
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
        table.queue.clear();
        table.waiting.clear();
        for index in 0..table.slots.len() as u32 {
            let slot = &mut table.slots[index as usize];
            let outcome = match slot.state {
                State::Waiting => {
                    table.used += 1;
                    table.bytes += slot.size as usize;
                    Outcome::NotSent
                }
                State::Queued if slot.tries == 0 => Outcome::NotSent,
                State::Queued | State::Flying => Outcome::Unknown,
                State::Free | State::Done(_) => continue,
            };
            unknown += u64::from(outcome == Outcome::Unknown);
            let error = Error::new(ErrorKind::Closed, "the producer was closed first").with_outcome(outcome);
            self.finish(table, index, Err(error), &mut wakers);
        }
        wakers.append(&mut table.flush);
        drop(guard);
        wakers.into_iter().for_each(Waker::wake);
        unknown
    }
}

impl SendTable for Outbox {
    fn poll_sent(&self, ticket: u64, cx: &mut Context<'_>) -> Poll<SendResult> {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let index = ticket as u32;
        let slot = match table.slots.get_mut(index as usize) {
            Some(slot) if slot.generation == (ticket >> 32) as u32 => slot,
            _ => return Poll::Ready(Err(Error::closed("this send"))),
        };
        if !matches!(slot.state, State::Done(_)) {
            if !slot.waker.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
                slot.waker = Some(cx.waker().clone());
            }
            return Poll::Pending;
        }
        let state = std::mem::take(&mut slot.state);
        Self::release(slot);
        table.free.push(index);
        match state {
            State::Done(result) => Poll::Ready(result),
            _ => Poll::Ready(Err(Error::closed("this send"))),
        }
    }

    fn forget(&self, ticket: u64) {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let index = ticket as u32;
        let Some(slot) = table.slots.get_mut(index as usize) else { return };
        if slot.generation != (ticket >> 32) as u32 {
            return;
        }
        slot.waker = None;
        match &slot.state {
            State::Waiting => {
                Self::release(slot);
                table.waiting.retain(|i| *i != index);
                table.free.push(index);
            }
            State::Done(result) => {
                table.unobserved += u64::from(result.is_err());
                Self::release(slot);
                table.free.push(index);
            }
            State::Queued | State::Flying => slot.forgotten = true,
            State::Free => {}
        }
    }
}

impl std::fmt::Debug for Outbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let table = self.table.lock();
        write!(f, "Outbox({} in flight, {} waiting)", table.used, table.waiting.len())
    }
}
