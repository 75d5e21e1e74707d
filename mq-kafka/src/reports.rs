//! What became of messages that were handed over: a thread per producer reads librdkafka's reports, in batches.

use crate::client::Ctx;
use crate::fault;
use crate::ffi::{Report, Reports};
use crate::spread::Spread;
use mq_api::{Durability, Error, ErrorKind, Outcome, Position, Receipt, SendResult};
use mq_core::Outbox;
use parking_lot::Mutex;
use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::producer::{BaseProducer, Producer};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// Reports gathered before they are told.
const GATHER: usize = 4_096;

/// Whether no broker can be reached.
#[derive(Default)]
pub(crate) struct Down {
    pub(crate) is: AtomicBool,
    pub(crate) changed: Notify,
    why: Mutex<String>,
}

impl Down {
    /// Why, as far as the client told.
    pub(crate) fn why(&self) -> String {
        self.why.lock().clone()
    }

    pub(crate) fn is_over(&self) {
        self.is.store(false, Ordering::Release);
        self.why.lock().clear();
    }
}

/// Reads delivery reports.
pub(crate) struct Reader {
    pub(crate) producer: Arc<BaseProducer<Ctx, Spread>>,
    pub(crate) down: Arc<Down>,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) level: Durability,
    pub(crate) anew: Arc<Notify>,
    pub(crate) topic: String,
    /// Whether a topic that is gone is made again.
    pub(crate) makes: bool,
    pub(crate) odd: Arc<Odd>,
}

impl Reader {
    pub(crate) fn run(self) {
        let reports = Reports::of(self.producer.client());
        let mut done: Vec<(u64, SendResult)> = Vec::new();
        loop {
            let stopping = self.stop.load(Ordering::Acquire);
            let mut wait = Duration::from_millis(if stopping { 0 } else { 50 });
            while done.len() < GATHER {
                let came = reports.poll(
                    wait,
                    |report| done.push(self.result(report)),
                    |code, reason| self.error(code, reason),
                );
                wait = Duration::ZERO;
                if !came {
                    break;
                }
            }
            if !done.is_empty() {
                self.outbox.complete(done.drain(..));
            } else if stopping {
                return;
            }
        }
    }

    fn result(&self, report: Report) -> (u64, SendResult) {
        let is_odd = self.odd.take(report.ticket);
        let result = match report.error {
            None => {
                let position = Position::offset(u64::try_from(report.offset).unwrap_or_default());
                Ok(Receipt::new(self.level).at(u32::try_from(report.partition).ok(), position))
            }
            Some(Code::InvalidTimestamp) if !is_odd => {
                Err(fault::send_error(&self.topic, Code::InvalidDifferentRecord, Outcome::NotSent))
            }
            Some(code) => {
                let gone = self.makes && fault::is_gone(code);
                if gone || code == Code::Fatal || self.producer.client().fatal_error().is_some() {
                    self.anew.notify_one();
                }
                Err(refused(&self.topic, code, fault::outcome(code, report.persisted), gone))
            }
        };
        (report.ticket, result)
    }

    fn error(&self, code: Code, reason: String) {
        tracing::debug!(target: "librdkafka", ?code, "{reason}");
        if code == Code::Fatal {
            self.anew.notify_one();
        }
        match fault::kind(code) {
            ErrorKind::Auth | ErrorKind::Tls | ErrorKind::Permission => *self.down.why.lock() = reason,
            _ if code == Code::AllBrokersDown => {
                // A refusal says more than that nobody is left.
                let mut why = self.down.why.lock();
                if why.is_empty() {
                    *why = format!("no broker can be reached: {reason}");
                }
            }
            _ => {}
        }
        if code == Code::AllBrokersDown {
            self.down.is.store(true, Ordering::Release);
            self.down.changed.notify_one();
        }
    }
}

/// The error of a message; `gone`: its topic is, and is made again by those who made it, so that it may be tried again.
pub(crate) fn refused(topic: &str, code: Code, outcome: Outcome, gone: bool) -> Error {
    if !gone {
        return fault::send_error(topic, code, outcome);
    }
    // What is not there has no say in what is stored.
    let outcome = if outcome == Outcome::Rejected { Outcome::NotSent } else { outcome };
    fault::send_error(topic, code, outcome).of_kind(ErrorKind::Unavailable)
}

/// Messages under way whose time stamp is not about now. The broker refuses a whole batch when it does not take one message's
/// stamp, and does not say whose. It was not that of a message stamped just now, or the topic would take none at all: such a one
/// is sent again.
#[derive(Debug, Default)]
pub(crate) struct Odd {
    some: AtomicBool,
    tickets: Mutex<HashSet<u64>>,
}

impl Odd {
    /// Notes a message that is about to be handed over.
    pub(crate) fn note(&self, ticket: u64, stamp: i64, now: i64) {
        // 0: it gets one from librdkafka.
        if stamp != 0 && now.abs_diff(stamp) >= 60_000 {
            self.tickets.lock().insert(ticket);
            self.some.store(true, Ordering::Release);
        }
    }

    /// Whether a message was noted; it is no longer.
    pub(crate) fn take(&self, ticket: u64) -> bool {
        if !self.some.load(Ordering::Acquire) {
            return false;
        }
        let mut tickets = self.tickets.lock();
        let was = tickets.remove(&ticket);
        self.some.store(!tickets.is_empty(), Ordering::Release);
        was
    }
}
