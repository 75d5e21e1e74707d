//! What a consumer may still take: counts, bytes, and the gates that stop it (pause, transient pause, drain, a suspect alone).

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use mq_api::MOST_IN_FLIGHT;
use std::task::{Context, Poll, Waker};

/// Why nothing is handed out. Several may hold at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Gate {
    /// The program paused the subscription.
    Paused = 1,
    /// A transient failure pauses it for a while.
    Transient = 2,
    /// It is closing.
    Stopping = 4,
    /// A crash suspect is in hand, or waits to be handed over alone.
    Alone = 8,
    /// The broker cannot be reached.
    Away = 16,
}

/// What may still be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credit {
    /// Deliveries.
    pub count: usize,
    /// Bytes.
    pub bytes: usize,
}

/// Bounds of one consumer. One atomic word holds count (high 24 bits) and bytes (low 40), so that both change together.
#[derive(Debug)]
pub struct Flow {
    used: AtomicU64,
    gates: AtomicU32,
    max: u64,
    max_bytes: u64,
    /// Who waits for something to be given back: [`TAKER`], [`DRAIN`]. One cell, so that giving back looks once.
    awaited: AtomicU8,
    /// One cell per role: a shared cell would lose wake-ups, a list would leak on cancelled polls.
    taker: Mutex<Option<Waker>>,
    drain: Mutex<Vec<Waker>>,
    shutting: Mutex<Vec<Waker>>,
}

const ONE: u64 = 1 << 40;
const BYTES: u64 = ONE - 1;
/// The task that takes waits for credit.
const TAKER: u8 = 1;
/// Close waits until nothing is in hand.
const DRAIN: u8 = 2;

impl Flow {
    /// At most `max` deliveries and `max_bytes` bytes.
    pub fn new(max: usize, max_bytes: usize) -> Self {
        Self {
            used: AtomicU64::new(0),
            gates: AtomicU32::new(0),
            max: max.min(MOST_IN_FLIGHT) as u64,
            max_bytes: (max_bytes as u64).min(BYTES >> 1),
            awaited: AtomicU8::new(0),
            taker: Mutex::new(None),
            drain: Mutex::new(Vec::new()),
            shutting: Mutex::new(Vec::new()),
        }
    }

    /// What may be taken now; nothing while a gate is shut.
    #[inline]
    pub fn credit(&self) -> Credit {
        let used = self.used.load(Ordering::Relaxed);
        if self.gates.load(Ordering::Relaxed) != 0 {
            return Credit { count: 0, bytes: 0 };
        }
        Credit {
            count: self.max.saturating_sub(used >> 40) as usize,
            bytes: self.max_bytes.saturating_sub(used & BYTES) as usize,
        }
    }

    /// Whether a message of `size` bytes fits: within the bounds, or alone.
    #[inline]
    pub fn fits(&self, size: usize) -> bool {
        let used = self.used.load(Ordering::Relaxed);
        used == 0 || (used >> 40 < self.max && (used & BYTES) + size as u64 <= self.max_bytes)
    }

    /// Charges `n` deliveries of `bytes` together.
    #[inline]
    pub fn take(&self, n: usize, bytes: usize) {
        self.used.fetch_add(n as u64 * ONE + bytes as u64, Ordering::Relaxed);
    }

    /// Gives back, and wakes who waits for it. `SeqCst` pairs with the flag in [`poll_credit`](Self::poll_credit): either the
    /// waiter sees the credit or this sees the waiter.
    #[inline]
    pub fn give(&self, n: usize, bytes: usize) {
        self.used.fetch_sub(n as u64 * ONE + bytes as u64, Ordering::SeqCst);
        let awaited = self.awaited.load(Ordering::SeqCst);
        if awaited != 0 {
            self.given(awaited);
        }
    }

    #[cold]
    #[inline(never)]
    fn given(&self, awaited: u8) {
        if awaited & TAKER != 0 {
            self.wake();
        }
        if awaited & DRAIN != 0 {
            self.wake_drain();
        }
    }

    /// Wakes whoever waits for credit.
    #[cold]
    pub fn wake(&self) {
        self.awaited.fetch_and(!TAKER, Ordering::SeqCst);
        let waker = self.taker.lock().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn wake_drain(&self) {
        let wakers = std::mem::take(&mut *self.drain.lock());
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Ready when at least one delivery may be taken. For the one task that takes.
    pub fn poll_credit(&self, cx: &mut Context<'_>) -> Poll<Credit> {
        let credit = self.credit();
        if credit.count > 0 && credit.bytes > 0 {
            return Poll::Ready(credit);
        }
        self.await_given(cx);
        let used = self.used.load(Ordering::SeqCst);
        let credit = self.credit();
        if credit.count > 0 && credit.bytes > 0 && used >> 40 < self.max { Poll::Ready(credit) } else { Poll::Pending }
    }

    /// Who takes is woken by the next that is given back. Whoever calls this looks once more afterwards.
    fn await_given(&self, cx: &mut Context<'_>) {
        let mut taker = self.taker.lock();
        if !taker.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
            *taker = Some(cx.waker().clone());
        }
        drop(taker);
        self.awaited.fetch_or(TAKER, Ordering::SeqCst);
    }

    /// What is in hand now, to compare with: see [`poll_given`](Self::poll_given).
    pub fn mark(&self) -> u64 {
        self.used.load(Ordering::SeqCst)
    }

    /// Ready when something was given back since `mark`. For the one task that takes, when there is credit but the next message
    /// has no room.
    pub fn poll_given(&self, mark: u64, cx: &mut Context<'_>) -> Poll<()> {
        self.await_given(cx);
        if self.used.load(Ordering::SeqCst) != mark { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Ready when nothing is in hand. For close.
    pub fn poll_drained(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.in_flight() == 0 {
            return Poll::Ready(());
        }
        {
            let mut drain = self.drain.lock();
            if !drain.iter().any(|w| w.will_wake(cx.waker())) {
                drain.push(cx.waker().clone());
            }
        }
        self.awaited.fetch_or(DRAIN, Ordering::SeqCst);
        if self.used.load(Ordering::SeqCst) >> 40 == 0 { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Shuts a gate; says whether it was open.
    pub fn shut(&self, gate: Gate) -> bool {
        let was = self.gates.fetch_or(gate as u32, Ordering::SeqCst);
        self.wake();
        let wakers = std::mem::take(&mut *self.shutting.lock());
        wakers.into_iter().for_each(Waker::wake);
        was & gate as u32 == 0
    }

    /// Opens a gate.
    pub fn open(&self, gate: Gate) {
        self.gates.fetch_and(!(gate as u32), Ordering::SeqCst);
        self.wake();
    }

    /// Ready when `gate` is shut. For a driver that waits for its broker meanwhile (a blocking read to be cut short at close).
    pub fn poll_shut(&self, gate: Gate, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_shut(gate) {
            return Poll::Ready(());
        }
        {
            let mut shutting = self.shutting.lock();
            if !shutting.iter().any(|w| w.will_wake(cx.waker())) {
                shutting.push(cx.waker().clone());
            }
        }
        // `shut` sets the gate before it takes the wakers: either it finds this one, or this finds the gate.
        if self.gates.load(Ordering::SeqCst) & gate as u32 != 0 { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Whether a gate is shut.
    #[inline]
    pub fn is_shut(&self, gate: Gate) -> bool {
        self.gates.load(Ordering::Relaxed) & gate as u32 != 0
    }

    /// Whether every gate is open.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.gates.load(Ordering::Relaxed) == 0
    }

    /// Deliveries charged.
    #[inline]
    pub fn in_flight(&self) -> usize {
        (self.used.load(Ordering::Relaxed) >> 40) as usize
    }

    /// Bytes charged.
    pub fn in_flight_bytes(&self) -> usize {
        (self.used.load(Ordering::Relaxed) & BYTES) as usize
    }

    /// The bound on deliveries.
    pub fn max(&self) -> usize {
        self.max as usize
    }

    /// The bound on bytes.
    pub fn max_bytes(&self) -> usize {
        self.max_bytes as usize
    }
}

#[cfg(test)]
mod tests {
    use super::{Flow, Gate};
    use std::task::{Context, Poll, Waker};

    #[test]
    fn the_most_that_can_be_asked_for_is_counted() {
        let flow = Flow::new(usize::MAX, usize::MAX);
        assert_eq!(flow.max(), mq_api::MOST_IN_FLIGHT);
        flow.take(flow.max(), flow.max_bytes());
        assert_eq!((flow.in_flight(), flow.in_flight_bytes(), flow.credit().count), (flow.max(), flow.max_bytes(), 0));
        flow.give(flow.max(), flow.max_bytes());
        assert_eq!((flow.in_flight(), flow.in_flight_bytes()), (0, 0));
    }

    #[test]
    fn bounds_hold_and_one_large_message_goes_alone() {
        let flow = Flow::new(2, 100);
        let cx = &mut Context::from_waker(Waker::noop());
        assert!(flow.fits(1000), "alone");
        flow.take(1, 60);
        assert!(flow.fits(40) && !flow.fits(41));
        flow.take(1, 1);
        assert!(flow.poll_credit(cx).is_pending());
        flow.give(1, 60);
        assert!(flow.poll_credit(cx).is_ready());
        assert!(flow.poll_shut(Gate::Paused, cx).is_pending());
        flow.shut(Gate::Paused);
        assert!(flow.poll_shut(Gate::Paused, cx).is_ready());
        assert!(flow.poll_credit(cx).is_pending());
        flow.open(Gate::Paused);
        assert!(flow.poll_credit(cx).is_ready());
        assert!(flow.poll_drained(cx).is_pending());
        flow.give(1, 1);
        assert_eq!(flow.poll_drained(cx), Poll::Ready(()));
    }
}
