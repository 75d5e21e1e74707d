//! Runs one route: fetches, calls the service, settles.

use super::Outcome;
use super::books::{Books, Report};
use super::request::Request;
use super::route::MessageService;
use super::slots::{Polled, Signal, Slots, Stop};
use futures_core::future::BoxFuture;
use mq_api::{CloseReport, Consumer, Deliveries, Error, ErrorKind, Guarantee, Subscription, Ticket};
use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::task::coop::has_budget_remaining;

/// Messages handled before other tasks get their turn.
const TURN: u32 = 256;
/// Messages fetched at once while handlers finish at their first poll. More gains nothing measurable.
const MOST: usize = 64;

/// How much to fetch. A handler that waits must not hoard messages that other members could handle, so the rule is "as
/// many as there are free slots"; handlers that finish at once get batches, which cost half as much for each message.
struct Appetite {
    at_once: u32,
    ahead: bool,
}

impl Appetite {
    #[inline]
    fn next(&self, free: usize) -> usize {
        if self.ahead && self.at_once as usize >= MOST { free.max(MOST) } else { free.min(MOST) }
    }

    #[inline]
    fn finished_at_once(&mut self) {
        self.at_once = self.at_once.saturating_add(1);
    }

    #[inline]
    fn waited(&mut self) {
        self.at_once = 0;
    }
}

/// One route at work.
pub(super) struct Runner<Svc: MessageService> {
    service: Svc,
    ready: bool,
    /// A layer lets nothing through, as far as was seen last.
    held_up: bool,
    consumer: Box<dyn Consumer>,
    slots: Slots<Svc::Future, Ticket>,
    buffer: Deliveries,
    books: Books,
    appetite: Appetite,
    /// Whether what was fetched and not begun can be given back; a broadcast or at-most-once delivery cannot.
    returns: bool,
    /// At most once: what was fetched is settled, and is begun also while the route closes.
    settled_first: bool,
    signal: Arc<Signal>,
    deadline: Duration,
    closing: Option<BoxFuture<'static, CloseReport>>,
    error: Option<Error>,
}

impl<Svc: MessageService> Runner<Svc> {
    pub(super) fn new(
        subscription: &Subscription,
        service: Svc,
        consumer: Box<dyn Consumer>,
        signal: Arc<Signal>,
        deadline: Duration,
    ) -> Self {
        let settled_first = subscription.settles_first();
        Self {
            service,
            ready: false,
            held_up: false,
            consumer,
            slots: Slots::new(subscription.concurrency.max(1), signal.clone()),
            buffer: Deliveries::new(),
            books: Books::default(),
            // At most once is settled at the fetch: what is fetched ahead would be lost with this process.
            appetite: Appetite { at_once: 0, ahead: subscription.guarantee == Guarantee::AtLeastOnce },
            returns: subscription.group_name().is_some() && !settled_first,
            settled_first,
            signal,
            deadline,
            closing: None,
            error: None,
        }
    }

    /// Runs until the consumer ends or the signal says stop; ready after everything in hand was settled or given back.
    #[inline]
    pub(super) fn poll_run(&mut self, cx: &mut Context<'_>) -> Poll<Result<Report, (Error, Report)>> {
        self.signal.register(cx);
        let books = &mut self.books;
        self.slots.poll_woken(|polled| books.enter(polled));
        self.heed_transient();
        if self.closing.is_none() {
            match self.signal.stopping() {
                Stop::No => self.feed_safely(cx),
                _ => self.begin_close(),
            }
        }
        let goes_on = self.settled_first && self.error.is_none() && self.signal.stopping() != Stop::Abandon;
        if self.closing.is_some() && goes_on {
            self.feed_safely(cx);
            if self.slots.busy() == 0 && self.held_up {
                self.lose_buffer();
            }
        }
        self.books.flush();
        if self.slots.busy() == 0 {
            self.signal.idle();
        }
        if self.closing.is_some() { self.poll_close(cx) } else { Poll::Pending }
    }

    /// Feeds, and goes on after a handler that panicked.
    #[inline]
    fn feed_safely(&mut self, cx: &mut Context<'_>) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.feed(cx))) {
            // The rest has its turn after the other tasks.
            cx.waker().wake_by_ref();
            match self.slots.panicked(&*panic) {
                Some(polled) => self.books.enter(polled),
                // Not a handler's: a defect that must not be hidden.
                None => resume_unwind(panic),
            }
        }
    }

    #[inline]
    fn feed(&mut self, cx: &mut Context<'_>) {
        let mut left = TURN;
        self.held_up = false;
        while self.slots.free() > 0 {
            if !self.ready {
                match self.service.poll_ready(cx) {
                    Poll::Ready(Ok(())) => self.ready = true,
                    Poll::Ready(Err(e)) => return self.fail(refused(e.into())),
                    Poll::Pending => {
                        self.held_up = true;
                        self.appetite.waited();
                        break;
                    }
                }
            }
            if self.buffer.is_empty() {
                self.books.flush();
                let most = self.appetite.next(self.slots.free());
                match self.consumer.poll_batch(cx, most, &mut self.buffer) {
                    Poll::Ready(Ok(0)) => return self.begin_close(),
                    Poll::Ready(Ok(_)) => {}
                    Poll::Ready(Err(e)) => return self.fail(e),
                    Poll::Pending => return,
                }
            }
            let Some(delivery) = self.buffer.pop() else { continue };
            self.ready = false;
            let (message, position, attempt, ticket) = delivery.into_parts();
            let request = Request::new(message, position, attempt, ticket.lost());
            let service = &mut self.service;
            match self.slots.start(ticket, Ticket::lost, || service.call(request)) {
                // Out of tokio's budget everything of tokio's waits, ready or not: that says nothing about the handler.
                Polled::Pending if !has_budget_remaining() => {
                    // What it waits for may be none of tokio's, and then nobody else would call again.
                    cx.waker().wake_by_ref();
                    return;
                }
                Polled::Pending => self.appetite.waited(),
                Polled::Done(Ok(outcome @ Outcome::Ack), ticket) => {
                    // There is nothing in it to drop, which the compiler does not see.
                    forget(outcome);
                    self.appetite.finished_at_once();
                    self.books.ack(ticket);
                }
                polled => {
                    self.appetite.finished_at_once();
                    self.books.enter(polled);
                    self.heed_transient();
                }
            }
            left -= 1;
            if left == 0 {
                cx.waker().wake_by_ref();
                return;
            }
        }
        self.give_back();
    }

    /// What a handler depends on is down: what was fetched ahead is not begun, it comes again after the pause.
    #[inline]
    fn heed_transient(&mut self) {
        if self.books.take_transient() {
            self.give_back();
        }
    }

    /// No slot is free: what was fetched ahead goes to whoever can handle it now.
    fn give_back(&mut self) {
        if self.returns && !self.buffer.is_empty() {
            self.books.report.released += self.buffer.len() as u64;
            self.buffer.release_all();
        }
    }

    #[cold]
    fn fail(&mut self, error: Error) {
        tracing::error!(error = %error, "a route ends");
        self.error = Some(error);
        self.begin_close();
        // Nothing is begun any more.
        self.lose_buffer();
    }

    /// What was fetched and cannot be begun or given back. Of a broadcast the next program has its own copy.
    #[cold]
    fn lose_buffer(&mut self) {
        if self.settled_first {
            self.books.report.lost += self.buffer.len() as u64;
        }
        self.buffer.release_all();
    }

    #[cold]
    fn begin_close(&mut self) {
        if self.closing.is_some() {
            return;
        }
        self.give_back();
        if !self.returns && !self.settled_first {
            self.lose_buffer();
        }
        self.closing = Some(self.consumer.control().close(self.deadline));
    }

    #[cold]
    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<Result<Report, (Error, Report)>> {
        if self.signal.stopping() == Stop::Abandon {
            // After the close began, a dropped ticket goes back at once.
            self.slots.abandon(|ticket| self.books.lost(ticket));
        }
        let Some(closing) = &mut self.closing else { return Poll::Pending };
        let Poll::Ready(close) = closing.as_mut().poll(cx) else { return Poll::Pending };
        if self.slots.busy() > 0 {
            tracing::warn!(handlers = self.slots.busy(), "the deadline passed: handlers still at work are dropped");
        }
        self.slots.abandon(|ticket| self.books.lost(ticket));
        self.books.report.close += close;
        let report = self.books.report;
        Poll::Ready(match self.error.take() {
            None => Ok(report),
            Some(error) => Err((error, report)),
        })
    }
}

#[cold]
fn refused(error: mq_api::BoxError) -> Error {
    Error::new(ErrorKind::Other, format!("a layer of the worker is not ready any more: {error}")).with_source(error)
}
