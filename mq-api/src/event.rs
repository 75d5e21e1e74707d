use crate::{Position, Topic};
use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Something a subscription should know that is no delivery and no error.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Messages left the broker without having been handled by this group or seen by this broadcast subscription.
    Gap(Gap),
    /// A broadcast subscriber fell behind and this many were dropped.
    Lagged(u64),
    /// The reader was too slow for this many events: they are not listed.
    Missed(u64),
}

/// Messages that the broker lost, trimmed or deleted before they were handled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gap {
    /// Of this topic.
    pub topic: Topic,
    /// Of this partition, where topics have them.
    pub partition: Option<u32>,
    /// The last position seen before it, where known.
    pub from: Option<Position>,
    /// The first position after it, where known.
    pub to: Option<Position>,
    /// How many messages, where known.
    pub count: Option<u64>,
    /// Why.
    pub cause: GapCause,
}

impl Gap {
    /// One of which the cause is known, and nothing of where or how many.
    pub fn new(topic: Topic, cause: GapCause) -> Self {
        Self { topic, partition: None, from: None, to: None, count: None, cause }
    }
}

/// Why there is a [`Gap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GapCause {
    /// Retention or expiry removed them.
    Retention,
    /// The topic, group or queue was deleted.
    Deleted,
    /// A broadcast subscription was disconnected.
    Disconnected,
    /// The broker lost state (restart without persistence, failover).
    BrokerLoss,
}

/// Events kept for a slow reader; the oldest are replaced by [`Event::Missed`].
const KEPT: usize = 1024;

#[derive(Default)]
struct Log {
    first: u64,
    events: VecDeque<Event>,
    wakers: Vec<Waker>,
    closed: bool,
}

/// Writes events. For backends.
#[derive(Clone, Default)]
pub struct EventLog(Arc<Mutex<Log>>);

/// Reads the events of a subscription, from the moment it was made.
pub struct Events {
    log: Arc<Mutex<Log>>,
    next: u64,
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EventLog {
    /// Adds one.
    pub fn push(&self, event: Event) {
        let mut log = lock(&self.0);
        log.events.push_back(event);
        if log.events.len() > KEPT {
            log.events.pop_front();
            log.first += 1;
        }
        let wakers = std::mem::take(&mut log.wakers);
        drop(log);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// No more will come.
    pub fn close(&self) {
        let mut log = lock(&self.0);
        log.closed = true;
        let wakers = std::mem::take(&mut log.wakers);
        drop(log);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// A reader of all events still kept.
    pub fn reader(&self) -> Events {
        let next = lock(&self.0).first;
        Events { log: self.0.clone(), next }
    }
}

impl Events {
    /// The next event; `None` after the subscription closed.
    pub fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        let mut log = lock(&self.log);
        if self.next < log.first {
            let missed = log.first - self.next;
            self.next = log.first;
            return Poll::Ready(Some(Event::Missed(missed)));
        }
        let at = usize::try_from(self.next - log.first).unwrap_or(usize::MAX);
        if let Some(event) = log.events.get(at) {
            self.next += 1;
            return Poll::Ready(Some(event.clone()));
        }
        if log.closed {
            return Poll::Ready(None);
        }
        if !log.wakers.iter().any(|w| w.will_wake(cx.waker())) {
            log.wakers.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// The next event; `None` after the subscription closed. Cancel-safe.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|cx| self.poll_event(cx)).await
    }

    /// What is there now, without waiting.
    pub fn drain(&mut self) -> Vec<Event> {
        let mut cx = Context::from_waker(Waker::noop());
        let mut all = Vec::new();
        while let Poll::Ready(Some(event)) = self.poll_event(&mut cx) {
            all.push(event);
        }
        all
    }
}

impl fmt::Debug for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EventLog({})", lock(&self.0).events.len())
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Events(next {})", self.next)
    }
}
