//! Producers that make one mistake.

use super::{Bug, State};
use futures_util::future::BoxFuture;
use mq_api::{
    Batch, CloseReport, Durability, Error, ErrorKind, HealthWatch, Message, MessageId, Outcome, Producer, Receipt,
    SendOptions, SendResult, SendTable, Sending, SendingBatch, Topic,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

pub(super) struct FaultyProducer {
    table: Arc<Table>,
    level: Durability,
    /// The producer was made without naming groups.
    plain: bool,
}

struct Table {
    inner: Arc<dyn Producer>,
    state: Arc<State>,
    closed: AtomicBool,
    next: AtomicU64,
    flying: Mutex<HashMap<u64, BoxFuture<'static, SendResult>>>,
    /// Waits for the next send, to go after it.
    held: Mutex<Option<(u64, Message, SendOptions)>>,
    /// Which ticket answers for an id.
    by_id: Mutex<HashMap<MessageId, u64>>,
    /// Whose answer a ticket gets in place of its own.
    swapped: Mutex<HashMap<u64, u64>>,
}

impl FaultyProducer {
    pub(super) fn new(inner: Arc<dyn Producer>, state: Arc<State>, plain: bool, level: Durability) -> Self {
        let table = Table {
            inner,
            state,
            closed: AtomicBool::new(false),
            next: AtomicU64::new(0),
            flying: Mutex::default(),
            held: Mutex::default(),
            by_id: Mutex::default(),
            swapped: Mutex::default(),
        };
        Self { table: Arc::new(table), level, plain }
    }

    fn bug(&self) -> Bug {
        self.table.state.bug
    }

    /// A receipt for nothing.
    fn pretend(&self) -> Sending {
        Sending::ready(Ok(Receipt::new(self.level)))
    }
}

impl Table {
    /// The outcome as the mistake reports it.
    fn told(bug: Bug, result: SendResult, message: &Message) -> SendResult {
        let error = match result {
            Ok(receipt) if bug == Bug::LevelInflated => {
                let mut told = receipt;
                told.level = Durability::Replicated;
                return Ok(told);
            }
            Ok(receipt) => return Ok(receipt),
            Err(error) => error,
        };
        match bug {
            Bug::FullHidden if error.kind() == ErrorKind::Full => Ok(Receipt::new(Durability::Memory)),
            Bug::UnknownAsNotSent if error.outcome() == Some(Outcome::Unknown) => {
                Err(error.with_outcome(Outcome::NotSent))
            }
            Bug::NotSentAsUnknown => Err(error.with_outcome(Outcome::Unknown)),
            Bug::OutcomeMissing => Err(Error::new(error.kind(), error.context())),
            Bug::SecretsShown => {
                let values: Vec<_> = message.headers.iter().map(|(_, v)| String::from_utf8_lossy(v)).collect();
                let text = format!("{}: payload {:?}, headers {values:?}", error.context(), message.payload_bytes());
                Err(Error::new(error.kind(), text).with_outcome(Outcome::NotSent))
            }
            _ => Err(error),
        }
    }

    fn fly(&self, message: Message, options: SendOptions) -> BoxFuture<'static, SendResult> {
        let bug = self.state.bug;
        // Only what an error may have to show.
        let copy = message.clone();
        let sending = self.inner.send_with(message, options);
        Box::pin(async move { Self::told(bug, sending.await, &copy) })
    }

    /// Whether a message of this key is held; `None` when one of another key is.
    fn holds(&self, key: Option<&bytes::Bytes>) -> Option<bool> {
        match &*self.held.lock() {
            None => Some(false),
            Some((_, held, _)) => (held.key.as_ref() == key).then_some(true),
        }
    }

    fn ticket(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn let_go(&self) {
        let held = self.held.lock().take();
        if let Some((ticket, message, options)) = held {
            let flying = self.fly(message, options);
            self.flying.lock().insert(ticket, flying);
        }
    }
}

impl SendTable for Table {
    fn poll_sent(&self, ticket: u64, cx: &mut Context<'_>) -> Poll<SendResult> {
        self.let_go();
        let ticket = self.swapped.lock().get(&ticket).copied().unwrap_or(ticket);
        // Polled outside the lock: what flies may itself be a ticket of this table.
        let Some(mut future) = self.flying.lock().remove(&ticket) else {
            return Poll::Ready(Err(Error::closed("this producer")));
        };
        let polled = future.as_mut().poll(cx);
        if polled.is_pending() {
            self.flying.lock().insert(ticket, future);
        }
        polled
    }

    fn forget(&self, ticket: u64) {
        let gone = self.flying.lock().remove(&ticket);
        drop(gone);
    }
}

impl Producer for FaultyProducer {
    fn send_with(&self, mut message: Message, options: SendOptions) -> Sending {
        let table = &self.table;
        let turn = table.state.turn.fetch_add(1, Ordering::Relaxed);
        match self.bug() {
            Bug::ConfirmUnsent if turn.is_multiple_of(3) => return self.pretend(),
            Bug::ClosedAccepts if table.closed.load(Ordering::Relaxed) => return self.pretend(),
            Bug::UnroutableHidden if self.plain => return self.pretend(),
            Bug::SendTwice => drop(table.inner.send_with(message.clone(), options)),
            Bug::NamesUnchecked => {
                let kept =
                    message.headers.iter().filter(|(n, _)| n.len() > 1 && !n.contains('\n') && !n.contains('\0'));
                message.headers = kept.map(|(n, v)| (n.to_owned(), v.clone())).collect();
            }
            _ => {}
        }
        let ticket = table.ticket();
        match self.bug() {
            Bug::SendsReordered if table.holds(message.key.as_ref()) == Some(false) => {
                *table.held.lock() = Some((ticket, message, options));
            }
            Bug::CloseForgetsSends => {
                // Sent when somebody asks, if the producer is still open then.
                let late = table.clone();
                let future = async move {
                    match late.closed.load(Ordering::Relaxed) {
                        true => Err(Error::closed("this producer")),
                        false => late.fly(message, options).await,
                    }
                };
                table.flying.lock().insert(ticket, Box::pin(future));
            }
            bug => {
                // One of the same key is held: this one goes before it.
                let overtakes = bug == Bug::SendsReordered && table.holds(message.key.as_ref()) == Some(true);
                if bug == Bug::ResultsById
                    && let Some(twin) = table.by_id.lock().insert(message.id.clone(), ticket)
                    && table.flying.lock().contains_key(&twin)
                {
                    table.swapped.lock().insert(ticket, twin);
                    table.swapped.lock().insert(twin, ticket);
                }
                let flying = table.fly(message, options);
                table.flying.lock().insert(ticket, flying);
                if overtakes {
                    table.let_go();
                }
            }
        }
        Sending::wait(table.clone(), ticket)
    }

    fn send_batch(&self, mut batch: Batch) -> SendingBatch {
        let mut results: Vec<Result<SendResult, u64>> = Vec::new();
        let messages: Vec<Message> = batch.messages.drain(..).collect();
        for message in messages {
            // The ticket is kept by hand: the batch asks for it.
            let sending = self.send_with(message, SendOptions::default());
            let ticket = self.table.ticket();
            self.table.flying.lock().insert(ticket, Box::pin(sending));
            results.push(Err(ticket));
        }
        if self.bug() == Bug::BatchResultsReversed {
            results.reverse();
        }
        SendingBatch::wait(batch, self.table.clone(), results)
    }

    fn flush(&self, deadline: Duration) -> BoxFuture<'_, bool> {
        self.table.let_go();
        self.table.inner.flush(deadline)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, CloseReport> {
        self.table.let_go();
        self.table.closed.store(true, Ordering::Relaxed);
        Box::pin(async move {
            let mut report = self.table.inner.close(deadline).await;
            if self.bug() == Bug::CloseHidesUnknown {
                report.unknown = 0;
            }
            report
        })
    }

    fn health(&self) -> HealthWatch {
        self.table.inner.health()
    }

    fn topic(&self) -> &Topic {
        self.table.inner.topic()
    }
}
