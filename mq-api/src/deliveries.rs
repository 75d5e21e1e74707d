use crate::{Delivery, Disposition, Message, Position, Settle, SettleStart, Settled, Settling, Stored, Ticket};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// A reusable batch of deliveries, in order. Neighbours of one source share one handle, so that settling all of them is
/// one call per run.
///
/// Dropped or cleared by the program, what is left in it is nacked like any dropped delivery.
#[derive(Default)]
#[must_use = "dropping deliveries is a nack: they will come again"]
pub struct Deliveries {
    items: Vec<Option<Item>>,
    at: usize,
    runs: VecDeque<LaneRun>,
}

struct Item {
    message: Arc<Stored>,
    position: Position,
    attempt: u32,
}

struct LaneRun {
    lane: Arc<dyn Settle>,
    first: u64,
    n: u32,
}

/// Appends to one run of a [`Deliveries`]. For backends.
pub struct RunWriter<'a> {
    items: &'a mut Vec<Option<Item>>,
    run: &'a mut LaneRun,
}

impl RunWriter<'_> {
    /// Appends the delivery of the next slot.
    #[inline]
    pub fn push(&mut self, message: Arc<Stored>, position: Position, attempt: u32) {
        self.items.push(Some(Item { message, position, attempt }));
        self.run.n += 1;
    }
}

impl fmt::Debug for RunWriter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RunWriter(first {}, n {})", self.run.first, self.run.n)
    }
}

impl Deliveries {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many are left.
    #[inline]
    pub fn len(&self) -> usize {
        self.items.len() - self.at
    }

    /// Whether none is left.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.at == self.items.len()
    }

    /// The messages, without taking them.
    pub fn messages(&self) -> impl Iterator<Item = &Message> {
        self.items[self.at..].iter().flatten().map(|i| &i.message.message)
    }

    /// Opens a run whose next slot is `first`, joining the last run when it fits. For backends.
    #[inline]
    pub fn run<L: Settle + 'static>(&mut self, lane: &Arc<L>, first: u64) -> RunWriter<'_> {
        let fits = |r: &LaneRun| {
            r.first + u64::from(r.n) == first && std::ptr::addr_eq(Arc::as_ptr(&r.lane), Arc::as_ptr(lane))
        };
        if !self.runs.back().is_some_and(fits) {
            self.runs.push_back(LaneRun { lane: lane.clone(), first, n: 0 });
        }
        let last = self.runs.len() - 1;
        RunWriter { items: &mut self.items, run: &mut self.runs[last] }
    }

    /// Takes the next one.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<Delivery> {
        let Item { message, position, attempt } = self.items.get_mut(self.at)?.take()?;
        self.at += 1;
        let ticket = match self.runs.front_mut() {
            // Neither the last of its run nor of the batch: nothing to tidy up.
            Some(run) if run.n > 1 => {
                let slot = run.first;
                run.first += 1;
                run.n -= 1;
                Ticket::new(run.lane.clone(), slot)
            }
            _ => self.last_of_run()?,
        };
        Some(Delivery::new(message, position, attempt, ticket))
    }

    /// The ticket of the last delivery of a run.
    #[inline(never)]
    fn last_of_run(&mut self) -> Option<Ticket> {
        if self.at == self.items.len() {
            self.items.clear();
            self.at = 0;
        }
        while self.runs.front().is_some_and(|r| r.n == 0) {
            self.runs.pop_front();
        }
        let run = self.runs.front_mut()?;
        let slot = run.first;
        run.first += 1;
        run.n -= 1;
        let lane = if run.n == 0 { self.runs.pop_front()?.lane } else { run.lane.clone() };
        Some(Ticket::new(lane, slot))
    }

    /// Acknowledges all that are left: one call per run. The answer is that of the last run, or the first that is not
    /// confirmed at once.
    pub fn ack_all(&mut self) -> Settling {
        self.at = 0;
        // The messages go first: the engine's handles are then unique and are used again.
        self.items.clear();
        let mut answer = Settling::ready(Settled::Untracked);
        let mut bad = false;
        for run in self.runs.drain(..) {
            if run.n == 0 {
                continue;
            }
            let start = run.lane.ack_run(run.first, run.n);
            if !bad {
                bad = matches!(start, SettleStart::Done(s) if !s.is_ok());
                answer = Settling::start(run.lane, start);
            }
        }
        answer
    }

    /// Settles all that are left in one way.
    pub fn settle_all(&mut self, how: &Disposition) {
        while let Some(delivery) = self.pop() {
            drop(delivery.settle(how.clone()));
        }
    }

    /// Gives back all that are left, untried. For backends: what they buffered and never handed over.
    pub fn release_all(&mut self) {
        self.settle_all(&Disposition::Release);
    }

    /// Takes all of `other`, at the end.
    pub fn append(&mut self, other: &mut Deliveries) {
        if self.is_empty() {
            self.items.clear();
            self.at = 0;
            self.runs.clear();
            std::mem::swap(self, other);
            return;
        }
        self.items.extend(other.items.drain(other.at..));
        other.items.clear();
        other.at = 0;
        self.runs.extend(other.runs.drain(..));
    }

    /// Takes at most `n` of `other`, at the end; says how many.
    pub fn append_some(&mut self, other: &mut Deliveries, n: usize) -> usize {
        if n >= other.len() {
            let taken = other.len();
            self.append(other);
            return taken;
        }
        for taken in 0..n {
            let Some(delivery) = other.pop() else { return taken };
            self.push(delivery);
        }
        n
    }

    /// Adds one at the end.
    pub fn push(&mut self, delivery: Delivery) {
        let (message, position, attempt, ticket) = delivery.into_parts();
        let Some((lane, slot)) = ticket.take() else { return };
        match self.runs.back_mut() {
            Some(r) if r.first + u64::from(r.n) == slot && Arc::ptr_eq(&r.lane, &lane) => r.n += 1,
            _ => self.runs.push_back(LaneRun { lane, first: slot, n: 1 }),
        }
        self.items.push(Some(Item { message, position, attempt }));
    }
}

impl Drop for Deliveries {
    fn drop(&mut self) {
        self.settle_all(&Disposition::Dropped);
    }
}

impl fmt::Debug for Deliveries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Deliveries({})", self.len())
    }
}

impl Extend<Delivery> for Deliveries {
    fn extend<I: IntoIterator<Item = Delivery>>(&mut self, items: I) {
        items.into_iter().for_each(|d| self.push(d));
    }
}

/// Takes the deliveries out, in order.
#[derive(Debug)]
pub struct DeliveriesIter(Deliveries);

impl Iterator for DeliveriesIter {
    type Item = Delivery;

    fn next(&mut self) -> Option<Delivery> {
        self.0.pop()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.0.len(), Some(self.0.len()))
    }
}

impl IntoIterator for Deliveries {
    type Item = Delivery;
    type IntoIter = DeliveriesIter;

    fn into_iter(self) -> DeliveriesIter {
        DeliveriesIter(self)
    }
}

/// Gathers acknowledgements of neighbours so that one call settles them. Flush before giving up control; dropping flushes.
#[derive(Default)]
pub struct AckRun {
    lane: Option<Arc<dyn Settle>>,
    first: u64,
    n: u32,
}

impl AckRun {
    /// Adds one.
    #[inline(always)]
    pub fn push(&mut self, ticket: Ticket) {
        let Some((lane, slot)) = ticket.take() else { return };
        match &self.lane {
            Some(own) if self.first + u64::from(self.n) == slot && Arc::ptr_eq(own, &lane) => self.n += 1,
            _ => self.begin(lane, slot),
        }
    }

    #[inline(never)]
    fn begin(&mut self, lane: Arc<dyn Settle>, slot: u64) {
        self.flush();
        self.lane = Some(lane);
        self.first = slot;
        self.n = 1;
    }

    /// Settles what was gathered.
    #[inline]
    pub fn flush(&mut self) {
        if let Some(lane) = self.lane.take() {
            lane.ack_run(self.first, self.n);
        }
    }
}

impl Drop for AckRun {
    fn drop(&mut self) {
        self.flush();
    }
}

impl fmt::Debug for AckRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AckRun({})", self.n)
    }
}
