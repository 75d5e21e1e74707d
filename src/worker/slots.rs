//! A fixed set of places for handlers at work, each with its own waker. Everything is made once: a message that passes
//! through costs no allocation.

use futures_util::task::AtomicWaker;
use mq_api::Lost;
use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use tokio::sync::Notify;

/// What a route's task is told from outside, and the waker that tells it.
#[derive(Default)]
pub(super) struct Signal {
    stop: AtomicU8,
    task: AtomicWaker,
    /// Of the whole worker: told whenever nothing is at work in one of its routes.
    idle: Arc<Notify>,
}

/// How a route is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stop {
    /// Go on.
    No,
    /// Fetch no more, finish what is in hand.
    Drain,
    /// Leave what is in hand.
    Abandon,
}

impl Signal {
    pub(super) fn new(idle: Arc<Notify>) -> Self {
        Self { idle, ..Self::default() }
    }

    /// No handler of this route is at work.
    #[inline]
    pub(super) fn idle(&self) {
        self.idle.notify_waiters();
    }

    pub(super) fn stop(&self, how: Stop) {
        self.stop.fetch_max(how as u8, Ordering::AcqRel);
        self.task.wake();
    }

    #[inline]
    pub(super) fn stopping(&self) -> Stop {
        match self.stop.load(Ordering::Acquire) {
            0 => Stop::No,
            1 => Stop::Drain,
            _ => Stop::Abandon,
        }
    }

    #[inline]
    pub(super) fn register(&self, cx: &Context<'_>) {
        self.task.register(cx.waker());
    }
}

/// One bit for each slot that was woken.
struct Ready {
    words: Box<[AtomicU64]>,
    signal: Arc<Signal>,
}

struct SlotWaker {
    ready: Arc<Ready>,
    word: usize,
    bit: u64,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.ready.words[self.word].fetch_or(self.bit, Ordering::AcqRel) & self.bit == 0 {
            self.ready.signal.task.wake();
        }
    }
}

struct Slot<F, K, L> {
    future: Pin<Box<Option<F>>>,
    /// What settles the message when the future is done; `None` while the slot is free.
    kept: Option<K>,
    lost: Option<L>,
    waker: Waker,
}

/// What became of a poll.
pub(super) enum Polled<T, K> {
    /// Not yet.
    Pending,
    /// Finished.
    Done(T, K),
    /// It panicked, with this message.
    Panicked(String, K),
    /// What it worked on is no longer ours; it was dropped.
    Lost(K),
}

/// Handlers at work. `L` tells that what one works on is no longer ours.
pub(super) struct Slots<F, K, L = Lost> {
    slots: Vec<Slot<F, K, L>>,
    free: Vec<u32>,
    /// A future is being started, in the slot on top of `free`.
    starting: bool,
    ready: Arc<Ready>,
}

impl<F: Future, K, L: Future + Unpin> Slots<F, K, L> {
    pub(super) fn new(count: usize, signal: Arc<Signal>) -> Self {
        let words = (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let ready = Arc::new(Ready { words, signal });
        let slot = |at: usize| Slot {
            future: Box::pin(None),
            kept: None,
            lost: None,
            waker: Arc::new(SlotWaker { ready: ready.clone(), word: at / 64, bit: 1 << (at % 64) }).into(),
        };
        let free = (0..u32::try_from(count).unwrap_or(u32::MAX)).rev().collect();
        Self { slots: (0..count).map(slot).collect(), free, starting: false, ready }
    }

    /// How many are free.
    #[inline]
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    /// How many are at work.
    #[inline]
    pub(super) fn busy(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Starts a future in a free slot and polls it once; there must be one.
    ///
    /// A panic of `start`, of the poll or of the drop goes through to the caller, which hands it to
    /// [`panicked`](Self::panicked): one `catch_unwind` around many starts costs less than one around each.
    #[inline(always)]
    pub(super) fn start(
        &mut self,
        kept: K,
        watch: impl FnOnce(&K) -> Option<L>,
        start: impl FnOnce() -> F,
    ) -> Polled<F::Output, K> {
        let Some(&at) = self.free.last() else { return Polled::Lost(kept) };
        let slot = &mut self.slots[at as usize];
        slot.kept = Some(kept);
        self.starting = true;
        slot.future.set(Some(start()));
        let polled = match slot.future.as_mut().as_pin_mut() {
            Some(future) => future.poll(&mut Context::from_waker(&slot.waker)),
            None => Poll::Pending,
        };
        match polled {
            Poll::Ready(output) => {
                // The message goes with the future, so that the engine's own handle is unique when it is acknowledged.
                slot.future.set(None);
                self.starting = false;
                match slot.kept.take() {
                    Some(kept) => Polled::Done(output, kept),
                    None => Polled::Pending,
                }
            }
            Poll::Pending => {
                self.starting = false;
                self.free.pop();
                slot.lost = slot.kept.as_ref().and_then(watch);
                self.begun_waiting(at)
            }
        }
    }

    /// A future was not ready at its first poll.
    fn begun_waiting(&mut self, at: u32) -> Polled<F::Output, K> {
        if self.is_lost(at) { self.clear(at).map_or(Polled::Pending, Polled::Lost) } else { Polled::Pending }
    }

    /// Whose panic came out of [`start`](Self::start), and tidies up after it; `None` if it was none of ours.
    #[cold]
    pub(super) fn panicked(&mut self, panic: &(dyn Any + Send)) -> Option<Polled<F::Output, K>> {
        if !std::mem::take(&mut self.starting) {
            return None;
        }
        let at = self.free.pop()?;
        Some(self.clear_panicked(at, panic))
    }

    #[cold]
    fn clear_panicked(&mut self, at: u32, panic: &(dyn Any + Send)) -> Polled<F::Output, K> {
        self.clear(at).map_or(Polled::Pending, |kept| Polled::Panicked(panic_text(panic), kept))
    }

    /// Polls the future of one slot.
    fn poll_slot(&mut self, at: u32) -> Polled<F::Output, K> {
        let slot = &mut self.slots[at as usize];
        let future = &mut slot.future;
        let waker = &slot.waker;
        let polled = catch_unwind(AssertUnwindSafe(|| match future.as_mut().as_pin_mut() {
            Some(future) => future.poll(&mut Context::from_waker(waker)),
            None => Poll::Pending,
        }));
        match polled {
            Ok(Poll::Pending) if !self.is_lost(at) => Polled::Pending,
            Ok(Poll::Pending) => self.clear(at).map_or(Polled::Pending, Polled::Lost),
            Ok(Poll::Ready(output)) => self.clear(at).map_or(Polled::Pending, |kept| Polled::Done(output, kept)),
            Err(panic) => self.clear_panicked(at, &*panic),
        }
    }

    fn is_lost(&mut self, at: u32) -> bool {
        let slot = &mut self.slots[at as usize];
        let mut cx = Context::from_waker(&slot.waker);
        slot.lost.as_mut().is_some_and(|lost| Pin::new(lost).poll(&mut cx).is_ready())
    }

    /// Frees a slot. `None` if it was free: then it is not freed a second time.
    fn clear(&mut self, at: u32) -> Option<K> {
        let slot = &mut self.slots[at as usize];
        let kept = slot.kept.take()?;
        slot.lost = None;
        let future = &mut slot.future;
        // A future may panic again while it is dropped; the slot is free all the same.
        if catch_unwind(AssertUnwindSafe(|| future.set(None))).is_err() {
            slot.future = Box::pin(None);
        }
        self.free.push(at);
        Some(kept)
    }

    /// Polls all that were woken since the last call.
    #[inline]
    pub(super) fn poll_woken(&mut self, mut then: impl FnMut(Polled<F::Output, K>)) {
        for word in 0..self.ready.words.len() {
            if self.ready.words[word].load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = self.ready.words[word].swap(0, Ordering::AcqRel);
            while bits != 0 {
                let at = word as u32 * 64 + bits.trailing_zeros();
                bits &= bits - 1;
                match self.poll_slot(at) {
                    Polled::Pending => {}
                    polled => then(polled),
                }
            }
        }
    }

    /// Drops all futures at work.
    pub(super) fn abandon(&mut self, mut then: impl FnMut(K)) {
        for at in 0..self.slots.len() as u32 {
            if let Some(kept) = self.clear(at) {
                then(kept);
            }
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("the handler panicked: {}", text.unwrap_or("(no text)"))
}

#[cfg(test)]
mod tests {
    use super::{Polled, Signal, Slots};
    use futures_util::future::{BoxFuture, FutureExt, pending, poll_fn};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::{Arc, Mutex};
    use std::task::{Poll, Waker};

    #[test]
    fn each_slot_is_woken_on_its_own_beyond_64() {
        let mut slots: Slots<BoxFuture<'static, usize>, usize> = Slots::new(130, Arc::new(Signal::default()));
        let wakers: Arc<Mutex<Vec<Option<Waker>>>> = Arc::new(Mutex::new(vec![None; 130]));
        for n in 0..130 {
            let wakers = wakers.clone();
            let mut first = true;
            let future = poll_fn(move |cx| {
                if std::mem::take(&mut first) {
                    wakers.lock().unwrap()[n] = Some(cx.waker().clone());
                    return Poll::Pending;
                }
                Poll::Ready(n)
            });
            assert!(matches!(slots.start(n, |_| None, || future.boxed()), Polled::Pending));
        }
        assert_eq!((slots.free(), slots.busy()), (0, 130));
        for n in [129, 64, 3] {
            wakers.lock().unwrap()[n].take().unwrap().wake();
        }
        let mut done = Vec::new();
        slots.poll_woken(|polled| {
            if let Polled::Done(n, kept) = polled {
                done.push((n, kept))
            }
        });
        done.sort_unstable();
        assert_eq!(done, [(3, 3), (64, 64), (129, 129)]);
        let mut left = 0;
        slots.abandon(|_| left += 1);
        assert_eq!((left, slots.free()), (127, 130));
    }

    #[test]
    fn a_panic_frees_the_slot_and_keeps_what_settles() {
        let mut slots: Slots<BoxFuture<'static, ()>, &str> = Slots::new(1, Arc::new(Signal::default()));
        let start = |slots: &mut Slots<BoxFuture<'static, ()>, &'static str>,
                     future: fn() -> BoxFuture<'static, ()>| {
            let started = catch_unwind(AssertUnwindSafe(|| slots.start("ticket", |_| None, future)));
            started.unwrap_or_else(|panic| slots.panicked(&*panic).unwrap())
        };
        for _ in 0..3 {
            let polled = start(&mut slots, || async { panic!("boom {}", 1) }.boxed());
            let Polled::Panicked(text, "ticket") = polled else { panic!("no panic seen") };
            assert!(text.ends_with("boom 1"), "{text}");
        }
        assert!(matches!(start(&mut slots, || panic!("at the start")), Polled::Panicked(..)));
        assert!(slots.panicked(&"somebody else's").is_none());
        assert!(matches!(start(&mut slots, || pending().boxed()), Polled::Pending));
        assert_eq!(slots.busy(), 1);
    }
}
