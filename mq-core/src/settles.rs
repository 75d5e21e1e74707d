//! Settlements on their way to the broker. What piles up while one flush is in flight is the next batch, so batching needs no
//! timer. Operations are numbered; confirmation is a watermark, so that an awaited ack needs no cell of its own.

use crate::plan::{Ack, Carry, Other, Plan, Token};
use crate::policy::Settlement;
use crate::sync::{Mutex, MutexGuard};
use mq_api::{Durability, Position, Settled, Stored};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

struct State {
    acks: Vec<Ack>,
    others: Vec<Other>,
    noted: Vec<u32>,
    ops: u64,
    confirmed: u64,
    taken: u64,
    level: Durability,
    exceptions: BTreeMap<u64, Settled>,
    /// Exceptions up to here may have been forgotten.
    forgotten: u64,
    /// Unconfirmed operations that move a message elsewhere: until then it is not known settled.
    moving: VecDeque<(u64, u32, Position)>,
    /// Unconfirmed operations that give something back at close.
    returned: VecDeque<u64>,
    driver: Option<Waker>,
    /// By operation, several for one that several tasks ask for.
    waiters: BTreeMap<(u64, u32), Waker>,
    flush: Vec<Waker>,
    urgent: bool,
    ended: bool,
    trials: Vec<(u32, Token)>,
    on_trial: Option<Waker>,
}

/// The settlements of one session. The driver takes and confirms, deliveries ask.
pub struct SettleQueue(Mutex<State>);

/// Exceptions kept for answers that nobody asked for yet.
const KEPT: usize = 65_536;

/// Gathers the tokens of one acknowledgement.
pub(crate) struct Tokens<'a> {
    acks: &'a mut Vec<Ack>,
    lane: u32,
    op: u64,
}

impl Tokens<'_> {
    #[inline]
    pub(crate) fn push(&mut self, token: Token) {
        self.acks.push(Ack { lane: self.lane, token, op: self.op });
    }
}

/// What was not confirmed when a session ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Settlements.
    pub(crate) unknown: u64,
    /// Deliveries given back at close.
    pub(crate) returned: u64,
}

impl SettleQueue {
    /// Empty; confirmed settlements have this level.
    pub fn new(level: Durability) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            acks: Vec::new(),
            others: Vec::new(),
            noted: Vec::new(),
            ops: 0,
            confirmed: 0,
            taken: 0,
            level,
            exceptions: BTreeMap::new(),
            forgotten: 0,
            moving: VecDeque::new(),
            returned: VecDeque::new(),
            driver: None,
            waiters: BTreeMap::new(),
            flush: Vec::new(),
            urgent: false,
            ended: false,
            trials: Vec::new(),
            on_trial: None,
        })))
    }

    /// Changes the level of later confirmations.
    pub fn set_level(&self, level: Durability) {
        self.0.lock().level = level;
    }

    /// One operation that acknowledges what `gather` pushes; `None` if that is nothing.
    #[inline]
    pub(crate) fn ack_with(&self, lane: u32, gather: impl FnOnce(&mut Tokens<'_>)) -> Option<u64> {
        let mut st = self.0.lock();
        let (before, op) = (st.acks.len(), st.ops + 1);
        gather(&mut Tokens { acks: &mut st.acks, lane, op });
        if st.acks.len() == before {
            return None;
        }
        st.ops = op;
        Self::call_driver(st);
        Some(op)
    }

    pub(crate) fn ack(&self, lane: u32, tokens: impl IntoIterator<Item = Token>) -> u64 {
        let mut st = self.0.lock();
        st.ops += 1;
        let op = st.ops;
        st.acks.extend(tokens.into_iter().map(|token| Ack { lane, token, op }));
        Self::call_driver(st);
        op
    }

    #[inline]
    fn call_driver(mut st: MutexGuard<'_, State>) {
        let waker = st.driver.take();
        drop(st);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn carry(
        &self,
        lane: u32,
        token: Token,
        position: Position,
        message: Option<Arc<Stored>>,
        how: Carry,
    ) -> u64 {
        let mut st = self.0.lock();
        st.ops += 1;
        let op = st.ops;
        if let Carry::Settle(Settlement::DeadLetter { .. }) = how {
            st.moving.push_back((op, lane, position));
        }
        st.others.push(Other { lane, token, op, position, message, how });
        Self::call_driver(st);
        op
    }

    /// Gives a delivery back at close or at the end of ownership.
    pub(crate) fn give_back(
        &self,
        lane: u32,
        token: Token,
        position: Position,
        message: Option<Arc<Stored>>,
        how: Settlement,
    ) {
        let mut st = self.0.lock();
        st.ops += 1;
        let op = st.ops;
        st.returned.push_back(op);
        st.others.push(Other { lane, token, op, position, message, how: Carry::Settle(how) });
        Self::call_driver(st);
    }

    /// Something was parked in this lane.
    pub(crate) fn note(&self, lane: u32) -> u64 {
        let mut st = self.0.lock();
        st.ops += 1;
        let op = st.ops;
        if !st.noted.contains(&lane) {
            st.noted.push(lane);
        }
        Self::call_driver(st);
        op
    }

    /// For the driver: takes everything that piled up; ready when there is something.
    pub fn poll_take(&self, cx: &mut Context<'_>, plan: &mut Plan) -> Poll<()> {
        let mut st = self.0.lock();
        let nothing = st.acks.is_empty() && st.others.is_empty() && st.noted.is_empty();
        if nothing && !(st.urgent && st.taken > st.confirmed) {
            if !st.driver.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
                st.driver = Some(cx.waker().clone());
            }
            return Poll::Pending;
        }
        plan.acks.append(&mut st.acks);
        plan.others.append(&mut st.others);
        plan.noted.append(&mut st.noted);
        plan.upto = st.ops;
        plan.urgent |= std::mem::take(&mut st.urgent);
        st.taken = st.ops;
        Poll::Ready(())
    }

    /// For the driver: waits for work. Cancel-safe.
    pub async fn take(&self, plan: &mut Plan) {
        std::future::poll_fn(|cx| self.poll_take(cx, plan)).await;
    }

    /// For the driver: everything up to `upto` is carried out and confirmed, except those listed. Call in order of the plans.
    pub fn confirm(&self, upto: u64, exceptions: impl IntoIterator<Item = (u64, Settled)>) {
        let mut st = self.0.lock();
        let mut wakers = Vec::new();
        for (op, settled) in exceptions {
            st.except(op, settled, &mut wakers);
        }
        st.confirmed = st.confirmed.max(upto);
        st.after_confirm(&mut wakers);
        drop(st);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// For the driver: an answer for one operation before its turn.
    pub fn answer(&self, op: u64, settled: Settled) {
        let mut st = self.0.lock();
        let mut wakers = Vec::new();
        st.except(op, settled, &mut wakers);
        drop(st);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// For the driver: the trial of this suspect is recorded; it may be handed over.
    pub fn trial_recorded(&self, lane: u32, token: Token) {
        let mut st = self.0.lock();
        st.trials.push((lane, token));
        let waker = st.on_trial.take();
        drop(st);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn poll_trial(&self, cx: &mut Context<'_>, lane: u32, token: Token) -> Poll<()> {
        let mut st = self.0.lock();
        if let Some(at) = st.trials.iter().position(|t| *t == (lane, token)) {
            st.trials.swap_remove(at);
            return Poll::Ready(());
        }
        st.on_trial = Some(cx.waker().clone());
        Poll::Pending
    }

    pub(crate) fn poll_settled(&self, op: u64, cx: &mut Context<'_>) -> Poll<Settled> {
        let mut st = self.0.lock();
        if let Some(settled) = st.exceptions.get(&op) {
            return Poll::Ready(*settled);
        }
        if op <= st.forgotten {
            return Poll::Ready(Settled::Unknown);
        }
        if op <= st.confirmed {
            return Poll::Ready(Settled::Confirmed(st.level));
        }
        if st.ended {
            return Poll::Ready(Settled::Unknown);
        }
        let mut last = 0;
        let known = st.waiters.range((op, 0)..=(op, u32::MAX)).any(|((_, n), waker)| {
            last = *n + 1;
            waker.will_wake(cx.waker())
        });
        if !known {
            st.waiters.insert((op, last), cx.waker().clone());
        }
        st.urgent = true;
        Self::call_driver(st);
        Poll::Pending
    }

    /// Whether an operation has its answer, without asking for it.
    pub(crate) fn is_answered(&self, op: u64) -> bool {
        let st = self.0.lock();
        st.ended || op <= st.confirmed || st.exceptions.contains_key(&op)
    }

    /// Whether everything was confirmed.
    pub fn is_flushed(&self) -> bool {
        let st = self.0.lock();
        st.confirmed >= st.ops
    }

    /// Operations that were not confirmed.
    pub fn unconfirmed(&self) -> u64 {
        let st = self.0.lock();
        st.ops - st.confirmed
    }

    /// Ready when everything was confirmed, or the session ended.
    pub fn poll_flushed(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut st = self.0.lock();
        if st.ended || st.confirmed >= st.ops {
            return Poll::Ready(());
        }
        if !st.flush.iter().any(|w| w.will_wake(cx.waker())) {
            st.flush.push(cx.waker().clone());
        }
        st.urgent = true;
        Self::call_driver(st);
        Poll::Pending
    }

    /// Waits until everything was confirmed, or the session ended. Cancel-safe.
    pub async fn flushed(&self) {
        std::future::poll_fn(|cx| self.poll_flushed(cx)).await;
    }

    /// The session ended: what was not confirmed is unknown. Says what that is, and which messages were on their way elsewhere.
    pub(crate) fn end(&self) -> (Tally, Vec<(u32, Position)>) {
        let mut st = self.0.lock();
        let first = !std::mem::replace(&mut st.ended, true);
        let tally = if first { st.tally() } else { Tally::default() };
        let moving = st.moving.drain(..).map(|(_, lane, position)| (lane, position)).collect();
        (st.acks, st.noted) = (Vec::new(), Vec::new());
        let others = std::mem::take(&mut st.others);
        let mut wakers: Vec<Waker> = std::mem::take(&mut st.waiters).into_values().collect();
        wakers.append(&mut st.flush);
        drop(st);
        drop(others);
        wakers.into_iter().for_each(Waker::wake);
        (tally, moving)
    }
}

impl State {
    /// An answer that differs from that of the watermark, or comes before it.
    fn except(&mut self, op: u64, settled: Settled, wakers: &mut Vec<Waker>) {
        // The first answer stays: somebody may have been told it.
        self.exceptions.entry(op).or_insert(settled);
        while self.exceptions.len() > KEPT
            && let Some(oldest) = self.exceptions.first_key_value().map(|(op, _)| *op)
            && oldest <= self.confirmed
        {
            self.exceptions.remove(&oldest);
            self.forgotten = oldest;
        }
        let waiting: Vec<(u64, u32)> = self.waiters.range((op, 0)..=(op, u32::MAX)).map(|(key, _)| *key).collect();
        wakers.extend(waiting.iter().filter_map(|key| self.waiters.remove(key)));
    }

    fn after_confirm(&mut self, wakers: &mut Vec<Waker>) {
        let confirmed = self.confirmed;
        while self.moving.front().is_some_and(|(op, ..)| *op <= confirmed) {
            self.moving.pop_front();
        }
        while self.returned.front().is_some_and(|op| *op <= confirmed) {
            self.returned.pop_front();
        }
        if !self.waiters.is_empty() {
            let rest = self.waiters.split_off(&(confirmed + 1, 0));
            wakers.extend(std::mem::replace(&mut self.waiters, rest).into_values());
        }
        if confirmed >= self.ops {
            wakers.append(&mut self.flush);
        }
    }

    fn tally(&self) -> Tally {
        let returned = self.returned.iter().filter(|op| !self.exceptions.contains_key(op)).count() as u64;
        let answered = self.exceptions.range(self.confirmed + 1..).count() as u64;
        let open = (self.ops - self.confirmed.min(self.ops)).saturating_sub(answered);
        Tally { unknown: open.saturating_sub(returned), returned }
    }
}

impl std::fmt::Debug for SettleQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let st = self.0.lock();
        write!(f, "SettleQueue({} of {} confirmed)", st.confirmed, st.ops)
    }
}

#[cfg(test)]
mod tests {
    use super::{Plan, SettleQueue, Token};
    use mq_api::{Durability, Settled};
    use std::task::{Context, Poll, Waker};

    #[test]
    fn confirmation_is_a_watermark_with_exceptions() {
        let queue = SettleQueue::new(Durability::Disk);
        let cx = &mut Context::from_waker(Waker::noop());
        let (a, b, c) = (queue.ack(0, [Token(1, 0)]), queue.ack(0, [Token(2, 0)]), queue.ack(0, [Token(3, 0)]));
        assert!(queue.poll_settled(b, cx).is_pending());
        let mut plan = Plan::default();
        assert!(queue.poll_take(cx, &mut plan).is_ready());
        assert!(plan.acks.len() == 3 && plan.urgent && plan.upto == c);
        queue.confirm(b, [(a, Settled::Stale)]);
        assert_eq!(queue.poll_settled(a, cx), Poll::Ready(Settled::Stale));
        assert_eq!(queue.poll_settled(b, cx), Poll::Ready(Settled::Confirmed(Durability::Disk)));
        assert!(queue.poll_settled(c, cx).is_pending());
        queue.end();
        assert_eq!(queue.poll_settled(c, cx), Poll::Ready(Settled::Unknown), "written, no answer");
    }

    #[test]
    fn parking_is_confirmed_like_an_ack() {
        let queue = SettleQueue::new(Durability::Disk);
        let cx = &mut Context::from_waker(Waker::noop());
        let op = queue.note(7).max(queue.note(7));
        assert!(queue.poll_settled(op, cx).is_pending());
        let mut plan = Plan::default();
        assert!(queue.poll_take(cx, &mut plan).is_ready());
        assert!(plan.noted == [7] && plan.acks.is_empty() && plan.upto == op && plan.urgent);
        queue.confirm(op, []);
        assert_eq!(queue.poll_settled(op, cx), Poll::Ready(Settled::Confirmed(Durability::Disk)));
    }
}
