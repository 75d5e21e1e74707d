//! What a driver fetched and the application has not taken yet. Slots live in their lanes; only runs of slot numbers cross,
//! so that a lost lease or a drain finds buffered deliveries where they are.

use crate::flow::{Flow, Gate};
use crate::lane::Lane;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use mq_api::{Deliveries, Error, Event, EventLog};
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tokio::time::Instant;

struct Run {
    lane: Arc<Lane>,
    first: u64,
    n: u32,
}

#[derive(Default)]
struct State {
    ready: VecDeque<Run>,
    suspects: VecDeque<(Arc<Lane>, u64)>,
    deferred: VecDeque<(Arc<Lane>, u64, u32, u64)>,
    /// The suspect in hand (`true`), asked to be recorded before, or settled without an answer yet.
    alone: Option<(Arc<Lane>, u64, bool)>,
    consumer: Option<Waker>,
    closed: bool,
    error: Option<Error>,
    buffered: usize,
}

/// The buffer of one consumer, over all its sessions.
pub(crate) struct Inbox {
    state: Mutex<State>,
    flow: Arc<Flow>,
    /// At most once: what is in here is settled, and would be lost if it were not handed out.
    settled: bool,
    /// Looks of the consumer since it stops.
    looks: AtomicU64,
}

impl Inbox {
    pub(crate) fn new(flow: Arc<Flow>, settled: bool) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), flow, settled, looks: AtomicU64::new(0) })
    }

    /// How often the consumer looked for more since it stops.
    pub(crate) fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }

    /// Whether something waits for nothing but the consumer to take it; what the broker has not confirmed waits for the broker.
    pub(crate) fn is_owed(&self) -> bool {
        let first = {
            let st = self.state.lock();
            if !st.ready.is_empty() {
                return true;
            }
            st.deferred.front().map(|(lane, _, _, op)| (lane.clone(), *op))
        };
        first.is_some_and(|(lane, op)| lane.settles.is_answered(op))
    }

    /// Nobody takes what was settled before its hand-over: it is lost. Says how much it was.
    pub(crate) fn forget_settled(&self) -> usize {
        let (ready, deferred) = {
            let mut st = self.state.lock();
            (std::mem::take(&mut st.ready), std::mem::take(&mut st.deferred))
        };
        let ready = ready.into_iter().map(|run| (run.lane, run.first, run.n));
        let deferred = deferred.into_iter().map(|(lane, first, n, _)| (lane, first, n));
        let mut lost = 0;
        for (lane, first, n) in ready.chain(deferred) {
            lane.forget_buffered(first, n);
            lost += n as usize;
        }
        lost
    }

    /// Slots `first..first + n` of `lane` may be handed out.
    pub(crate) fn push(&self, lane: &Arc<Lane>, first: u64, n: u32) {
        if n == 0 {
            return;
        }
        let mut st = self.state.lock();
        match st.ready.back_mut() {
            Some(run) if Arc::ptr_eq(&run.lane, lane) && run.first + u64::from(run.n) == first => run.n += n,
            _ => st.ready.push_back(Run { lane: lane.clone(), first, n }),
        }
        st.buffered += n as usize;
        let waker = st.consumer.take();
        drop(st);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// A crash suspect is to be handed out alone.
    pub(crate) fn push_suspect(&self, lane: &Arc<Lane>, slot: u64) {
        let mut st = self.state.lock();
        st.suspects.push_back((lane.clone(), slot));
        let waker = st.consumer.take();
        drop(st);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// For broadcast: drops the oldest buffered beyond the bounds, and says how many.
    pub(crate) fn drop_beyond(&self, hands: &Flow, events: &EventLog) {
        let mut dropped = 0u64;
        loop {
            let oldest = {
                let mut st = self.state.lock();
                let bytes = self.flow.in_flight_bytes().saturating_sub(hands.in_flight_bytes());
                let excess = match st.buffered.saturating_sub(self.flow.max()) {
                    // One by one: their sizes differ. The last one stays, however large.
                    0 => usize::from(bytes > self.flow.max_bytes() && st.buffered > 1),
                    excess => excess,
                };
                let Some(run) = st.ready.front_mut().filter(|_| excess > 0) else { break };
                let n = (run.n as usize).min(excess) as u32;
                let oldest = (run.lane.clone(), run.first, n);
                run.first += u64::from(n);
                run.n -= n;
                let empty = run.n == 0;
                if empty {
                    st.ready.pop_front();
                }
                st.buffered -= n as usize;
                oldest
            };
            let (lane, first, n) = oldest;
            lane.forget_buffered(first, n);
            dropped += u64::from(n);
        }
        if dropped > 0 {
            events.push(Event::Lagged(dropped));
        }
    }

    /// No more will come: the consumer ends, with an error or without.
    pub(crate) fn close(&self, error: Option<Error>) {
        let mut st = self.state.lock();
        st.closed = true;
        st.error = error.or(st.error.take());
        st.ready.clear();
        st.suspects.clear();
        st.deferred.clear();
        st.alone = None;
        st.buffered = 0;
        let waker = st.consumer.take();
        drop(st);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The lanes of a session were closed: forgets what was buffered from them.
    pub(crate) fn clear(&self) {
        let mut st = self.state.lock();
        st.ready.clear();
        st.suspects.clear();
        st.deferred.clear();
        st.alone = None;
        st.buffered = 0;
        drop(st);
        self.flow.open(Gate::Alone);
    }

    /// Wakes the consumer to look again (a gate opened or shut).
    pub(crate) fn nudge(&self) {
        let waker = self.state.lock().consumer.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn wait(st: &mut State, cx: &mut Context<'_>) {
        if !st.consumer.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
            st.consumer = Some(cx.waker().clone());
        }
    }

    /// Hands out at most `max` into `out`; ready with 0 only when closed.
    pub(crate) fn poll_hand_out(
        &self,
        cx: &mut Context<'_>,
        max: usize,
        out: &mut Deliveries,
        now: Instant,
    ) -> Poll<Result<usize, Error>> {
        let (mut handed, mut full) = (0, false);
        if self.settled && self.flow.is_shut(Gate::Stopping) {
            self.looks.fetch_add(1, Ordering::Relaxed);
        }
        if !self.state.lock().deferred.is_empty() {
            self.admit_deferred(cx);
        }
        loop {
            let mut st = self.state.lock();
            let stopping = self.flow.is_shut(Gate::Stopping);
            // What was settled for this consumer is still its own.
            let left = self.settled && !(st.ready.is_empty() && st.deferred.is_empty());
            if st.closed || stopping && !left {
                return Poll::Ready(match st.error.take() {
                    Some(error) if handed == 0 => Err(error),
                    _ => Ok(handed),
                });
            }
            if handed == max {
                break;
            }
            if !stopping && (self.flow.is_shut(Gate::Paused) || self.flow.is_shut(Gate::Transient)) {
                Self::wait(&mut st, cx);
                break;
            }
            if st.alone.is_some() || !st.suspects.is_empty() {
                match self.poll_suspect(st, cx, handed, out, now) {
                    Poll::Ready(Some(n)) => return Poll::Ready(Ok(n)),
                    Poll::Ready(None) => continue,
                    Poll::Pending => break,
                }
            }
            let Some(run) = st.ready.front_mut() else {
                Self::wait(&mut st, cx);
                break;
            };
            let n = (run.n as usize).min(max - handed) as u32;
            let (lane, first) = (run.lane.clone(), run.first);
            run.first += u64::from(n);
            run.n -= n;
            let empty = run.n == 0;
            if empty {
                st.ready.pop_front();
            }
            st.buffered = st.buffered.saturating_sub(n as usize);
            drop(st);
            let (got, looked) = lane.hand_out(first, n, out, now);
            handed += got;
            if looked < n {
                // The bound of what is in hand: the rest goes back to the front and waits for a settlement.
                let mut st = self.state.lock();
                st.buffered += (n - looked) as usize;
                st.ready.push_front(Run { lane, first: first + u64::from(looked), n: n - looked });
                Self::wait(&mut st, cx);
                if std::mem::replace(&mut full, true) {
                    break;
                }
                // Once more with the waker in place: a settlement in between found none.
            }
        }
        if handed > 0 { Poll::Ready(Ok(handed)) } else { Poll::Pending }
    }

    /// A suspect goes out only when nothing else is in hand, and nothing else goes out while it is.
    fn poll_suspect(
        &self,
        mut st: crate::sync::MutexGuard<'_, State>,
        cx: &mut Context<'_>,
        handed: usize,
        out: &mut Deliveries,
        now: Instant,
    ) -> Poll<Option<usize>> {
        if st.alone.is_none()
            && let Some((lane, slot)) = st.suspects.pop_front()
        {
            st.alone = Some((lane, slot, false));
            self.flow.shut(Gate::Alone);
        }
        Self::wait(&mut st, cx);
        let Some((lane, slot, out_already)) = st.alone.clone() else { return Poll::Pending };
        // A lane is never called with the inbox locked: lanes lock first.
        drop(st);
        if out_already {
            // Until the broker has heard of its settlement: died of the next one before, the suspect would come back as if it had
            // killed its consumer.
            if lane.is_in_hand(slot) || lane.is_moving(slot) || lane.settles.poll_flushed(cx).is_pending() {
                return Poll::Pending;
            }
            self.end_alone();
            return Poll::Ready(None);
        }
        if handed > 0 || lane.any_handed_here() {
            return Poll::Pending;
        }
        if !lane.is_unsettled(slot) {
            self.end_alone();
            return Poll::Ready(None);
        }
        // Recorded at the broker before it is handed over: else its death would not be counted.
        if lane.poll_trial(slot, cx).is_pending() {
            return Poll::Pending;
        }
        if let Some(alone) = &mut self.state.lock().alone {
            alone.2 = true;
        }
        let (got, _) = lane.hand_out(slot, 1, out, now);
        Poll::Ready(if got > 0 { Some(got) } else { None })
    }
}

impl Inbox {
    fn end_alone(&self) {
        let mut st = self.state.lock();
        st.alone = None;
        if st.suspects.is_empty() {
            self.flow.open(Gate::Alone);
        }
    }

    /// At most once: handed out when the broker confirmed operation `op`.
    pub(crate) fn push_after(&self, lane: &Arc<Lane>, first: u64, n: u32, op: u64) {
        let mut st = self.state.lock();
        st.deferred.push_back((lane.clone(), first, n, op));
        let waker = st.consumer.take();
        drop(st);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Moves what was confirmed to the ready ones.
    fn admit_deferred(&self, cx: &mut Context<'_>) {
        loop {
            let next = self.state.lock().deferred.pop_front();
            let Some((lane, first, n, op)) = next else { return };
            match lane.settles.poll_settled(op, cx) {
                Poll::Pending => {
                    self.state.lock().deferred.push_front((lane, first, n, op));
                    return;
                }
                Poll::Ready(settled) if settled.is_ok() => self.push(&lane, first, n),
                // Settled, and never handed over: at most once.
                Poll::Ready(_) => lane.forget_buffered(first, n),
            }
        }
    }
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Inbox({} buffered)", self.state.lock().buffered)
    }
}
