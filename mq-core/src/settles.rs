//! Settlements on their way to the broker. What piles up while one flush is in flight is the next batch, so batching needs no
//! timer. Operations are numbered; confirmation is a watermark, so that an awaited ack needs no cell of its own.

use crate::policy::Settlement;
use mq_api::{Durability, Position, Settled, Stored};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// What a driver knows a delivery by: a stream id, a delivery tag, an offset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub u64, pub u64);

/// An acknowledgement to carry out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// Which lane, by [`Lane::id`](crate::Lane::id).
    pub lane: u32,
    /// Which delivery.
    pub token: Token,
    /// The operation it belongs to.
    pub op: u64,
}

/// Anything else to carry out.
#[derive(Debug)]
pub struct Other {
    /// Which lane.
    pub lane: u32,
    /// Which delivery.
    pub token: Token,
    /// The operation.
    pub op: u64,
    /// Where the message is, for envelopes.
    pub position: Position,
    /// The message, for drivers that move it by writing it again.
    pub message: Option<Arc<Stored>>,
    /// What to do.
    pub how: Carry,
}

/// What a driver is asked to carry out besides acks.
#[derive(Debug)]
pub enum Carry {
    /// By the retry and dead-letter policy.
    Settle(Settlement),
    /// Record durably that this crash suspect is about to be handed over alone for the n-th time, then tell
    /// [`SettleQueue::trial_recorded`]. A driver that cannot record it tells so at once.
    Trial(u32),
}

/// What piled up. Reused between flushes.
#[derive(Debug, Default)]
pub struct Plan {
    /// Acknowledgements, in order of the calls.
    pub acks: Vec<Ack>,
    /// Everything else, in order of the calls.
    pub others: Vec<Other>,
    /// Lanes in which something was parked: there is nothing to carry out, and a driver that records attempts durably does so
    /// before it confirms.
    pub noted: Vec<u32>,
    /// Confirm up to this operation.
    pub upto: u64,
    /// Somebody waits for an answer: flush now, do not gather more.
    pub urgent: bool,
}

impl Plan {
    /// Whether there is nothing to carry out.
    pub fn is_empty(&self) -> bool {
        self.acks.is_empty() && self.others.is_empty() && self.noted.is_empty()
    }
}

struct State {
    acks: Vec<Ack>,
    others: Vec<Other>,
    noted: Vec<u32>,
    ops: u64,
    confirmed: u64,
    taken: u64,
    level: Durability,
    exceptions: BTreeMap<u64, Settled>,
    driver: Option<Waker>,
    waiters: Vec<(u64, Waker)>,
    urgent: bool,
    ended: bool,
    trials: Vec<(u32, Token)>,
    on_trial: Option<Waker>,
}

/// The settlements of one session. The driver takes and confirms, deliveries ask.
pub struct SettleQueue(Mutex<State>);

/// Exceptions kept for answers that nobody asked for yet.
const KEPT: usize = 65_536;

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
            driver: None,
            waiters: Vec::new(),
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

    pub(crate) fn ack(&self, lane: u32, tokens: impl IntoIterator<Item = Token>) -> u64 {
        let mut st = self.0.lock();
        st.ops += 1;
        let op = st.ops;
        st.acks.extend(tokens.into_iter().map(|token| Ack { lane, token, op }));
        let waker = st.driver.take();
        drop(st);
        if let Some(waker) = waker {
            waker.wake();
        }
        op
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
        st.others.push(Other { lane, token, op, position, message, how });
        let waker = st.driver.take();
        drop(st);
        if let Some(waker) = waker {
            waker.wake();
        }
        op
    }

    /// Something was parked in this lane.
    pub(crate) fn note(&self, lane: u32) -> u64 {
        let mut st = self.0.lock();
        st.ops += 1;
        let op = st.ops;
        if !st.noted.contains(&lane) {
            st.noted.push(lane);
        }
        let waker = st.driver.take();
        drop(st);
        if let Some(waker) = waker {
            waker.wake();
        }
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
        st.exceptions.extend(exceptions);
        while st.exceptions.len() > KEPT {
            st.exceptions.pop_first();
        }
        st.confirmed = st.confirmed.max(upto);
        Self::wake_waiters(st);
    }

    /// For the driver: an answer for one operation before its turn.
    pub fn answer(&self, op: u64, settled: Settled) {
        let mut st = self.0.lock();
        st.exceptions.insert(op, settled);
        Self::wake_waiters(st);
    }

    fn wake_waiters(mut st: parking_lot::MutexGuard<'_, State>) {
        let confirmed = st.confirmed;
        let mut ready = Vec::new();
        let mut i = 0;
        while i < st.waiters.len() {
            let op = st.waiters[i].0;
            if op <= confirmed || st.exceptions.contains_key(&op) || st.ended {
                ready.push(st.waiters.swap_remove(i).1);
            } else {
                i += 1;
            }
        }
        drop(st);
        ready.into_iter().for_each(Waker::wake);
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
        if op <= st.confirmed {
            return Poll::Ready(Settled::Confirmed(st.level));
        }
        if st.ended {
            return Poll::Ready(Settled::Unknown);
        }
        match st.waiters.iter_mut().find(|(o, w)| *o == op && w.will_wake(cx.waker())) {
            Some(_) => {}
            None => st.waiters.push((op, cx.waker().clone())),
        }
        st.urgent = true;
        let waker = st.driver.take();
        drop(st);
        if let Some(waker) = waker {
            waker.wake();
        }
        Poll::Pending
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

    /// Waits until everything was confirmed, or the session ended. Cancel-safe.
    pub async fn flushed(&self) {
        std::future::poll_fn(|cx| {
            let op = {
                let st = self.0.lock();
                if st.ended || st.confirmed >= st.ops {
                    return Poll::Ready(());
                }
                st.ops
            };
            match self.poll_settled(op, cx) {
                // Answered before its turn: others may still be open.
                Poll::Ready(_) if !self.is_flushed() && !self.0.lock().ended => {
                    let mut st = self.0.lock();
                    let last = st.ops;
                    st.waiters.push((last, cx.waker().clone()));
                    Poll::Pending
                }
                other => other.map(|_| ()),
            }
        })
        .await;
    }

    /// The session ended: what was not confirmed is unknown.
    pub(crate) fn end(&self) {
        let mut st = self.0.lock();
        st.ended = true;
        st.acks.clear();
        let others = std::mem::take(&mut st.others);
        Self::wake_waiters(st);
        drop(others);
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
