//! Runs one batch route: fetches what is there, calls the service, settles each message.

use super::Outcome;
use super::batch::{BatchRequest, Outcomes};
use super::books::Books;
use super::course::{Course, refused};
use super::request::Request;
use super::route::{BatchService, End};
use super::slots::{Polled, Signal, Slots};
use mq_api::{BoxError, Consumer, Deliveries, Lost, Subscription, Ticket};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// Ready when all messages of a batch are lost. They are looked at one after the other, since it takes all of them.
struct AllLost(Vec<Lost>);

impl AllLost {
    fn of(tickets: &[Ticket]) -> Option<Self> {
        let all: Option<Vec<Lost>> = tickets.iter().map(Ticket::lost).collect();
        all.map(Self)
    }
}

impl Future for AllLost {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(last) = self.0.last_mut() {
            ready!(Pin::new(last).poll(cx));
            self.0.pop();
        }
        Poll::Ready(())
    }
}

/// Batches run before other tasks get their turn.
const TURN: u32 = 16;

/// One batch route at work. A batch is what is there when a slot is free, at most `max`: nothing waits for a batch to fill.
pub(super) struct BatchRunner<Svc: BatchService> {
    service: Svc,
    ready: bool,
    course: Course,
    slots: Slots<Svc::Future, Vec<Ticket>, AllLost>,
    buffer: Deliveries,
    max: usize,
    books: Books,
}

impl<Svc: BatchService> BatchRunner<Svc> {
    pub(super) fn new(
        subscription: &Subscription,
        service: Svc,
        max: usize,
        consumer: Box<dyn Consumer>,
        signal: Arc<Signal>,
        deadline: Duration,
    ) -> Self {
        Self {
            service,
            ready: false,
            course: Course::new(subscription, consumer, signal.clone(), deadline),
            slots: Slots::new(subscription.concurrency.max(1), signal),
            buffer: Deliveries::new(),
            max: max.clamp(1, subscription.max_in_flight.max(1)),
            books: Books::default(),
        }
    }

    pub(super) fn poll_run(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        self.course.register(cx);
        let books = &mut self.books;
        self.slots.poll_woken(|polled| enter(books, polled));
        if self.course.is_to_close() {
            self.course.begin_close();
        }
        if self.course.goes_on() {
            self.feed_safely(cx);
        }
        self.books.flush();
        if self.slots.busy() == 0 {
            self.course.idle();
        }
        let lost = |books: &mut Books, tickets: Vec<Ticket>| tickets.into_iter().for_each(|ticket| books.lost(ticket));
        ready!(self.course.poll_close(cx, &mut self.slots, &mut self.books, lost));
        Poll::Ready(self.course.end(self.books.report))
    }

    /// Feeds, and goes on after a handler that panicked.
    fn feed_safely(&mut self, cx: &mut Context<'_>) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.feed(cx))) {
            // The rest has its turn after the other tasks.
            cx.waker().wake_by_ref();
            match self.slots.panicked(&*panic) {
                Some(polled) => enter(&mut self.books, polled),
                None => resume_unwind(panic),
            }
        }
    }

    fn feed(&mut self, cx: &mut Context<'_>) {
        for _ in 0..TURN {
            if self.slots.free() == 0 {
                return;
            }
            if !self.ready {
                match self.service.poll_ready(cx) {
                    Poll::Ready(Ok(())) => self.ready = true,
                    Poll::Ready(Err(e)) => return self.course.fail(refused(e)),
                    Poll::Pending => return,
                }
            }
            self.books.flush();
            match self.course.consumer.poll_batch(cx, self.max, &mut self.buffer) {
                Poll::Ready(Ok(0)) => return self.course.begin_close(),
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(e)) => return self.course.fail(e),
                Poll::Pending => return,
            }
            let mut requests = Vec::with_capacity(self.buffer.len());
            let mut tickets = Vec::with_capacity(self.buffer.len());
            while let Some(delivery) = self.buffer.pop() {
                let (message, position, attempt, ticket) = delivery.into_parts();
                requests.push(Request::new(message, position, attempt, ticket.lost()));
                tickets.push(ticket);
            }
            self.ready = false;
            let service = &mut self.service;
            // Of a batch some may be lost: their settlement is stale, and their neighbours go on. Once all are, so is the handler.
            let polled =
                self.slots.start(tickets, |tickets| AllLost::of(tickets), || service.call(BatchRequest(requests)));
            enter(&mut self.books, polled);
        }
        cx.waker().wake_by_ref();
    }
}

fn enter<E: Into<BoxError>>(books: &mut Books, polled: Polled<Result<Outcomes, E>, Vec<Ticket>>) {
    match polled {
        Polled::Pending => {}
        Polled::Lost(tickets) => tickets.into_iter().for_each(|ticket| books.lost(ticket)),
        Polled::Panicked(text, tickets) => tickets.into_iter().for_each(|ticket| books.panicked(text.clone(), ticket)),
        Polled::Done(Ok(Outcomes::All(outcome)), tickets) => {
            tickets.into_iter().for_each(|ticket| books.settle_or_ack(outcome.clone(), ticket));
        }
        Polled::Done(Ok(Outcomes::Each(each)), tickets) if each.len() == tickets.len() => {
            each.into_iter().zip(tickets).for_each(|(outcome, ticket)| books.settle_or_ack(outcome, ticket));
        }
        // Which is whose nobody knows: an ack may be meant for another.
        Polled::Done(Ok(Outcomes::Each(each)), tickets) => {
            let (some, all) = (each.len(), tickets.len());
            let text = format!("a layer of a batch route returned {some} outcomes for {all} messages");
            let outcome = Outcome::failed(text);
            tickets.into_iter().for_each(|ticket| books.settle_or_ack(outcome.clone(), ticket));
        }
        Polled::Done(Err(error), tickets) => {
            let outcome = Outcome::failed(error);
            tickets.into_iter().for_each(|ticket| books.settle_or_ack(outcome.clone(), ticket));
        }
    }
}
