//! Consumers that make one mistake.

use super::lane::{FaultyLane, Siblings};
use super::{Bug, State};
use futures_util::future::BoxFuture;
use mq_api::{
    CloseReport, Consumer, ConsumerControl, Control, Deliveries, Delivery, Disposition, Envelope, EventLog, Events,
    HealthSetter, HealthState, HealthWatch, Message, MessageId, Position, Reason, Result, Source, Stored, Ticket,
};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

pub(super) struct FaultyConsumer {
    inner: Box<dyn Consumer>,
    state: Arc<State>,
    siblings: Arc<Siblings>,
    connection: u64,
    /// 0 for the first consumer of the world.
    order: usize,
    turn: u64,
    /// A second copy of what was handed over last.
    double: Option<Delivery>,
    /// Taken by a poll that then said that nothing is there.
    stash: Option<(Delivery, Waker)>,
    ids: HashSet<MessageId>,
    pause: Option<std::pin::Pin<Box<tokio::time::Sleep>>>,
}

impl FaultyConsumer {
    pub(super) fn new(inner: Box<dyn Consumer>, state: Arc<State>, connection: u64, order: usize) -> Self {
        Self {
            inner,
            state,
            siblings: Arc::default(),
            connection,
            order,
            turn: 0,
            double: None,
            stash: None,
            ids: HashSet::new(),
            pause: None,
        }
    }

    /// Whether this delivery is kept from the application, settled in the way that loses it.
    fn swallowed(&mut self, delivery: &Delivery) -> Option<Disposition> {
        self.turn += 1;
        let text = std::str::from_utf8(delivery.payload_bytes()).is_ok();
        let known = !self.state.seen.lock().insert(delivery.id.clone());
        let mine = !self.ids.insert(delivery.id.clone());
        let lose = match self.state.bug {
            Bug::BroadcastLoses => delivery.source().group.is_none(),
            Bug::FirstMissed => self.turn == 1,
            Bug::ForeignLost => !text,
            Bug::LoseMessage => self.turn.is_multiple_of(3),
            Bug::SameIdOnce => mine && delivery.attempt() == 1,
            Bug::UnsettledForgotten => known && self.state.forget.load(Ordering::Relaxed),
            Bug::NeighboursBlamed => {
                let blame = self.state.crashes.load(Ordering::Relaxed) >= 1
                    && delivery.attempt() == 1
                    && !self.state.blamed.swap(true, Ordering::Relaxed);
                return blame.then_some(Disposition::DeadLetter { reason: Reason::Crash, error: None });
            }
            _ => false,
        };
        lose.then_some(Disposition::Ack)
    }

    fn changed(&self, mut message: Message) -> Message {
        match self.state.bug {
            Bug::EmptyKeyIsNone if message.key.as_ref().is_some_and(|k| k.is_empty()) => message.key = None,
            Bug::TombstoneIsEmpty if message.payload.is_none() => message.payload = Some(bytes::Bytes::new()),
            Bug::HeadersReversed => {
                let mut list: Vec<_> = message.headers.iter().map(|(n, v)| (n.to_owned(), v.clone())).collect();
                list.reverse();
                message.headers = list.into_iter().collect();
            }
            Bug::HeaderLost => {
                let last = message.headers.iter().map(|(n, _)| n.to_owned()).filter(|n| !n.starts_with("mq-")).last();
                if let Some(last) = last {
                    message.headers.remove(&last);
                }
            }
            Bug::IdReplaced => message.id = MessageId::make(),
            Bug::TimestampLost => message.timestamp = None,
            Bug::PayloadCut => message.payload = message.payload.map(|p| p.slice(..p.len().min(65_535))),
            Bug::EnvelopeLacks if Envelope::read(&message.headers).is_some() => {
                message.headers.remove("mq-attempts");
                message.headers.remove("mq-error");
            }
            _ => {}
        }
        message
    }

    fn wrapped(&mut self, delivery: Delivery, last_of_batch: bool) -> Delivery {
        let source = match self.state.bug {
            Bug::SourceLost => Source::new("".into(), None),
            _ => delivery.source().clone(),
        };
        let (stored, position, attempt, ticket) = delivery.into_parts();
        let stored = Arc::new(Stored::new(self.changed(stored.message.clone())));
        let position = if self.state.bug == Bug::PositionLost { Position::default() } else { position };
        let attempt = match self.state.bug {
            Bug::AttemptStuck => 1,
            Bug::AttemptTooHigh => attempt + 1,
            _ => attempt,
        };
        let lane =
            |ticket, source| FaultyLane::new(self.state.clone(), self.siblings.clone(), source, ticket, last_of_batch);
        if self.state.bug == Bug::DeliverTwice {
            let copy = lane(None, source.clone());
            self.double = Some(Delivery::new(stored.clone(), position, attempt, Ticket::new(copy, 0)));
        }
        let lane = lane(Some(ticket), source);
        Delivery::new(stored, position, attempt, Ticket::new(lane, 0))
    }

    fn poll_one(&mut self, cx: &mut Context<'_>, last_of_batch: bool) -> Poll<Result<Option<Delivery>>> {
        let bug = self.state.bug;
        if bug == Bug::BlocksRuntime && self.turn == 2 {
            std::thread::sleep(Duration::from_millis(400));
        }
        if (bug == Bug::StaysDown && self.state.cut.lock().contains(&self.connection))
            || (bug == Bug::SecondIdle && self.order == 1)
            || (bug == Bug::GoneForGood && self.state.forget.load(Ordering::Relaxed))
        {
            return Poll::Pending;
        }
        if let Some(until) = self.siblings.parked_until.lock().take() {
            self.pause = Some(Box::pin(tokio::time::sleep_until(until)));
        }
        if let Some(pause) = &mut self.pause {
            std::task::ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        if let Some(double) = self.double.take() {
            return Poll::Ready(Ok(Some(double)));
        }
        if let Some((delivery, waker)) = self.stash.take() {
            if waker.will_wake(cx.waker()) {
                return Poll::Ready(Ok(Some(delivery)));
            }
            drop(delivery.ack());
        }
        loop {
            let Some(delivery) = std::task::ready!(self.inner.poll_next(cx))? else { return Poll::Ready(Ok(None)) };
            if let Some(how) = self.swallowed(&delivery) {
                drop(delivery.settle(how));
                continue;
            }
            let delivery = self.wrapped(delivery, last_of_batch);
            if bug == Bug::CancelLoses {
                cx.waker().wake_by_ref();
                self.stash = Some((delivery, cx.waker().clone()));
                return Poll::Pending;
            }
            return Poll::Ready(Ok(Some(delivery)));
        }
    }
}

impl Consumer for FaultyConsumer {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Delivery>>> {
        self.poll_one(cx, false)
    }

    fn poll_batch(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Deliveries) -> Poll<Result<usize>> {
        let mut n = 0;
        while n < max {
            match self.poll_one(cx, n == 0) {
                Poll::Ready(Ok(Some(delivery))) => {
                    out.push(delivery);
                    n += 1;
                }
                Poll::Ready(Ok(None)) => break,
                Poll::Ready(Err(e)) => return Poll::Ready(Err(e)),
                Poll::Pending if n == 0 => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        Poll::Ready(Ok(n))
    }

    fn control(&self) -> ConsumerControl {
        ConsumerControl::new(Arc::new(FaultyControl { inner: self.inner.control(), state: self.state.clone() }))
    }
}

struct FaultyControl {
    inner: ConsumerControl,
    state: Arc<State>,
}

impl Control for FaultyControl {
    fn pause(&self) {
        if self.state.bug != Bug::PauseIgnored {
            self.inner.pause();
        }
    }

    fn resume(&self) {
        self.inner.resume();
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn health(&self) -> HealthWatch {
        match self.state.bug {
            Bug::HealthAlwaysRunning => HealthSetter::new(HealthState::Running, SystemTime::UNIX_EPOCH).watch(),
            _ => self.inner.health(),
        }
    }

    fn events(&self) -> Events {
        match self.state.bug {
            Bug::GapHidden | Bug::LagHidden => EventLog::default().reader(),
            _ => self.inner.events(),
        }
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'static, CloseReport> {
        match self.state.bug {
            Bug::DrainHurries => self.inner.close(Duration::ZERO),
            Bug::CloseLeaks => Box::pin(async { CloseReport::default() }),
            Bug::CloseHangs => {
                let inner = self.inner.clone();
                Box::pin(async move {
                    tokio::time::sleep(deadline * 3 + Duration::from_secs(3)).await;
                    inner.close(deadline).await
                })
            }
            _ => self.inner.close(deadline),
        }
    }
}

/// A consumer that was granted and does nothing.
pub(super) struct Idle(HealthSetter);

impl Idle {
    pub(super) fn new() -> Self {
        Self(HealthSetter::new(HealthState::Running, SystemTime::UNIX_EPOCH))
    }
}

impl Consumer for Idle {
    fn poll_next(&mut self, _: &mut Context<'_>) -> Poll<Result<Option<Delivery>>> {
        Poll::Pending
    }

    fn poll_batch(&mut self, _: &mut Context<'_>, _: usize, _: &mut Deliveries) -> Poll<Result<usize>> {
        Poll::Pending
    }

    fn control(&self) -> ConsumerControl {
        ConsumerControl::new(Arc::new(Idle(self.0.clone())))
    }
}

impl Control for Idle {
    fn pause(&self) {}

    fn resume(&self) {}

    fn in_flight(&self) -> usize {
        0
    }

    fn health(&self) -> HealthWatch {
        self.0.watch()
    }

    fn events(&self) -> Events {
        EventLog::default().reader()
    }

    fn close(&self, _: Duration) -> BoxFuture<'static, CloseReport> {
        Box::pin(async { CloseReport::default() })
    }
}
