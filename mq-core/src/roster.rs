//! What a broker's handle has made, and the order in which its close ends it: consumers first, since a handler that is waited
//! for may still send; then producers; then what is the backend's own.

use crate::producer::EngineProducer;
use futures_util::future::join_all;
use mq_api::{CloseReport, ConsumerControl, Error, ErrorKind, Group, HealthState, Result, Subscription, Topic};
use parking_lot::Mutex;
use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The producers and consumers of one connection.
#[derive(Default)]
pub struct Roster {
    made: Mutex<Made>,
    /// Names of members that are being made.
    coming: Arc<Mutex<Vec<Seat>>>,
    /// Held while closing: a second call waits for the first, and has its report.
    report: tokio::sync::Mutex<Option<CloseReport>>,
}

/// What a named member of a group goes by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seat {
    topic: Topic,
    group: Group,
    name: String,
}

impl Seat {
    /// Of a subscription of a group that has a name; others cannot be mistaken for each other.
    pub fn of(sub: &Subscription) -> Option<Self> {
        Some(Self { topic: sub.topic.clone(), group: sub.group_name()?.clone(), name: sub.member.clone()? })
    }

    /// Refuses a second one of a name while the first lives: to the broker both would be one, and take each other's messages.
    ///
    /// # Errors
    /// [`ErrorKind::Config`].
    pub fn refuse_if(&self, taken: bool) -> Result<()> {
        let Self { topic, group, name } = self;
        match taken {
            true => Err(Error::new(
                ErrorKind::Config,
                format!(
                    "a member named '{name}' of group '{group}' receives from topic '{topic}' already; names tell members \
                     apart: give each its own, or none"
                ),
            )),
            false => Ok(()),
        }
    }
}

/// A name that is kept for a member while it is made.
#[derive(Debug, Default)]
pub struct Reserved {
    seat: Option<Seat>,
    coming: Arc<Mutex<Vec<Seat>>>,
}

impl Reserved {
    /// The name, if the member has one.
    pub fn seat(&self) -> Option<&Seat> {
        self.seat.as_ref()
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut coming = self.coming.lock();
        if let Some(at) = coming.iter().position(|seat| Some(seat) == self.seat.as_ref()) {
            coming.swap_remove(at);
        }
    }
}

#[derive(Default)]
struct Made {
    consumers: Vec<(ConsumerControl, Option<Seat>)>,
    producers: Vec<Weak<EngineProducer>>,
    closed: bool,
}

impl Made {
    fn drop_closed(&mut self) {
        self.consumers.retain(|(c, _)| c.health().current().state != HealthState::Closed);
    }
}

impl Roster {
    /// Refuses after a close began.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`](mq_api::ErrorKind::Closed).
    pub fn open(&self) -> Result<()> {
        match self.made.lock().closed {
            true => Err(Error::closed("the connection")),
            false => Ok(()),
        }
    }

    /// Refuses after a close began, and a second member of one name. The name is kept while the answer lives.
    ///
    /// # Errors
    /// As [`open`](Self::open), and as [`Seat::refuse_if`].
    pub fn admit(&self, sub: &Subscription) -> Result<Reserved> {
        self.open()?;
        let coming = self.coming.clone();
        let Some(seat) = Seat::of(sub) else { return Ok(Reserved { seat: None, coming }) };
        {
            let mut made = self.made.lock();
            made.drop_closed();
            let mut names = coming.lock();
            let here = |(_, other): &(ConsumerControl, Option<Seat>)| other.as_ref() == Some(&seat);
            seat.refuse_if(names.contains(&seat) || made.consumers.iter().any(here))?;
            names.push(seat.clone());
        }
        Ok(Reserved { seat: Some(seat), coming })
    }

    /// Enters a consumer that was made. One whose connection was closed meanwhile is closed too.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn consumer(&self, control: ConsumerControl, name: Reserved) -> Result<()> {
        let closed = {
            let mut made = self.made.lock();
            made.drop_closed();
            made.consumers.push((control.clone(), name.seat.clone()));
            made.closed
        };
        if closed {
            control.close(Duration::ZERO).await;
        }
        self.open()
    }

    /// Enters a producer that was made. One whose connection was closed meanwhile is closed too.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn producer(&self, producer: &Arc<EngineProducer>) -> Result<()> {
        let closed = {
            let mut made = self.made.lock();
            made.producers.retain(|p| p.strong_count() > 0);
            made.producers.push(Arc::downgrade(producer));
            made.closed
        };
        if closed {
            mq_api::Producer::close(&**producer, Duration::ZERO).await;
        }
        self.open()
    }

    /// Closes all of it within `deadline`, side by side, then does what is the backend's own, which says how many things it had
    /// to abandon.
    ///
    /// # Cancel safety
    /// Nothing is forgotten when this is dropped midway: the next call closes what is open still, as far as that had not gone on
    /// by itself.
    pub async fn close(&self, deadline: Duration, rest: impl Future<Output = u64>) -> CloseReport {
        let mut known = match self.report.try_lock() {
            Ok(known) => known,
            Err(_) => {
                // Another call closes, by a deadline of its own. It is to be over by the earliest of all.
                self.hurry(deadline);
                self.report.lock().await
            }
        };
        if let Some(report) = *known {
            return report;
        }
        let (consumers, producers) = {
            let mut made = self.made.lock();
            made.closed = true;
            // Copies: what is taken out would be lost with a future that is dropped.
            (made.consumers.clone(), made.producers.clone())
        };
        let mut report = CloseReport::default();
        let until = tokio::time::Instant::now() + deadline.min(mq_api::LONGEST);
        for closed in join_all(consumers.iter().map(|(c, _)| c.close(deadline))).await {
            report += closed;
        }
        let producers: Vec<_> = producers.iter().filter_map(Weak::upgrade).collect();
        // What the consumers left of it: the deadline is for all together.
        let rest_of = until.saturating_duration_since(tokio::time::Instant::now());
        for closed in join_all(producers.iter().map(|p| mq_api::Producer::close(&**p, rest_of))).await {
            report += closed;
        }
        report.abandoned += rest.await;
        *self.made.lock() = Made { closed: true, ..Made::default() };
        *known = Some(report);
        report
    }

    /// Brings the deadline of a close that goes on forward.
    fn hurry(&self, deadline: Duration) {
        let (consumers, producers) = {
            let made = self.made.lock();
            (made.consumers.clone(), made.producers.clone())
        };
        // A close takes effect at the call.
        consumers.iter().for_each(|(consumer, _)| drop(consumer.close(deadline)));
        for producer in producers.iter().filter_map(Weak::upgrade) {
            drop(mq_api::Producer::close(&*producer, deadline));
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::{Reserved, Roster};
    use futures_core::future::BoxFuture;
    use mq_api::{
        CloseReport, ConsumerControl, Control, ErrorKind, EventLog, Events, HealthSetter, HealthState, HealthWatch,
    };
    use std::future::Future;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Waker};
    use std::time::{Duration, SystemTime};

    /// A consumer whose close takes some turns and counts how often it was begun.
    struct Fake {
        closes: AtomicUsize,
        turns: usize,
    }

    impl Control for Fake {
        fn pause(&self) {}
        fn resume(&self) {}
        fn in_flight(&self) -> usize {
            0
        }
        fn health(&self) -> HealthWatch {
            HealthSetter::new(HealthState::Running, SystemTime::UNIX_EPOCH).watch()
        }
        fn events(&self) -> Events {
            EventLog::default().reader()
        }
        fn close(&self, _: Duration) -> BoxFuture<'static, CloseReport> {
            self.closes.fetch_add(1, Ordering::Relaxed);
            let turns = self.turns;
            Box::pin(async move {
                for _ in 0..turns {
                    tokio::task::yield_now().await;
                }
                CloseReport::default()
            })
        }
    }

    #[tokio::test]
    async fn a_close_that_is_dropped_at_any_await_forgets_nothing() {
        // Three turns of the consumers, side by side, two of the rest: five times it waits.
        for stop_after in 0..=5 {
            let roster = Roster::default();
            let fakes: Vec<_> = (0..2).map(|_| Arc::new(Fake { closes: AtomicUsize::new(0), turns: 3 })).collect();
            for fake in &fakes {
                roster.consumer(ConsumerControl::new(fake.clone()), Reserved::default()).await.unwrap();
            }
            let rest = || async {
                tokio::task::yield_now().await;
                tokio::task::yield_now().await;
                1
            };
            {
                let mut close = pin!(roster.close(Duration::from_secs(1), rest()));
                for _ in 0..stop_after {
                    assert!(close.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
                }
            }
            if stop_after > 0 {
                assert_eq!(roster.open().unwrap_err().kind(), ErrorKind::Closed, "after {stop_after} turns");
            }
            assert_eq!(roster.close(Duration::from_secs(1), rest()).await.abandoned, 1);
            let begun = usize::from(stop_after > 0) + 1;
            assert!(fakes.iter().all(|fake| fake.closes.load(Ordering::Relaxed) == begun), "after {stop_after} turns");
            // A third finds its report, and begins nothing.
            assert_eq!(roster.close(Duration::from_secs(1), rest()).await.abandoned, 1);
            assert!(fakes.iter().all(|fake| fake.closes.load(Ordering::Relaxed) == begun));
        }
    }

    #[tokio::test]
    async fn what_is_made_while_the_connection_closes_is_closed_too() {
        let roster = Roster::default();
        roster.close(Duration::from_secs(1), async { 0 }).await;
        let late = Arc::new(Fake { closes: AtomicUsize::new(0), turns: 0 });
        let refused = roster.consumer(ConsumerControl::new(late.clone()), Reserved::default()).await.unwrap_err();
        assert_eq!((refused.kind(), late.closes.load(Ordering::Relaxed)), (ErrorKind::Closed, 1));
    }
}
