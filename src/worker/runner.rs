//! Runs one route: fetches, calls the service, settles.

use super::Outcome;
use super::books::Books;
use super::course::{Course, refused};
use super::request::Request;
use super::route::{End, MessageService};
use super::slots::{Polled, Signal, Slots};
use mq_api::{Consumer, Deliveries, Error, Guarantee, Subscription, Ticket};
use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
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
    course: Course,
    slots: Slots<Svc::Future, Ticket>,
    buffer: Deliveries,
    books: Books,
    appetite: Appetite,
    /// Whether what was fetched and not begun can be given back; a broadcast or at-most-once delivery cannot.
    returns: bool,
}

impl<Svc: MessageService> Runner<Svc> {
    pub(super) fn new(
        subscription: &Subscription,
        service: Svc,
        consumer: Box<dyn Consumer>,
        signal: Arc<Signal>,
        deadline: Duration,
    ) -> Self {
        Self {
            service,
            ready: false,
            held_up: false,
            course: Course::new(subscription, consumer, signal.clone(), deadline),
            slots: Slots::new(subscription.concurrency.max(1), signal),
            buffer: Deliveries::new(),
            books: Books::default(),
            // At most once is settled at the fetch: what is fetched ahead would be lost with this process.
            appetite: Appetite { at_once: 0, ahead: subscription.guarantee == Guarantee::AtLeastOnce },
            returns: subscription.group_name().is_some() && !subscription.settles_first(),
        }
    }

    /// Runs until the consumer ends or the signal says stop; ready after everything in hand was settled or given back.
    #[inline]
    pub(super) fn poll_run(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        self.course.register(cx);
        let books = &mut self.books;
        self.slots.poll_woken(|polled| books.enter(polled));
        self.heed_transient();
        if self.course.is_to_close() {
            self.begin_close();
        }
        if self.course.goes_on() {
            self.feed_safely(cx);
        }
        if self.course.is_closing() && self.slots.busy() == 0 && self.held_up {
            self.lose_buffer();
        }
        self.books.flush();
        if self.slots.busy() == 0 {
            self.course.idle();
        }
        if self.course.is_closing() { self.poll_close(cx) } else { Poll::Pending }
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
                    Poll::Ready(Err(e)) => return self.fail(refused(e)),
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
                match self.course.consumer.poll_batch(cx, most, &mut self.buffer) {
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
        self.give_back();
        self.course.fail(error);
        // Nothing is begun any more.
        self.lose_buffer();
    }

    /// What was fetched and cannot be begun or given back. Of a broadcast the next program has its own copy.
    #[cold]
    fn lose_buffer(&mut self) {
        if self.course.settled_first {
            self.books.report.lost += self.buffer.len() as u64;
        }
        self.buffer.release_all();
    }

    #[cold]
    fn begin_close(&mut self) {
        self.give_back();
        if !self.returns && !self.course.settled_first {
            self.lose_buffer();
        }
        self.course.begin_close();
    }

    #[cold]
    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        ready!(self.course.poll_close(cx, &mut self.slots, &mut self.books, Books::lost));
        // What a layer held up until the deadline.
        self.lose_buffer();
        Poll::Ready(self.course.end(self.books.report))
    }
}
