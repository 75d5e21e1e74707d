//! What became of messages that were handed over: a thread per producer reads librdkafka's reports, in batches.

use crate::client::Ctx;
use crate::fault;
use crate::ffi::{Report, Reports};
use crate::spread::Spread;
use mq_api::{Durability, Outcome, Position, Receipt, SendResult};
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
}

/// Reads delivery reports.
pub(crate) struct Reader {
    pub(crate) producer: Arc<BaseProducer<Ctx, Spread>>,
    pub(crate) down: Arc<Down>,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) level: Durability,
    pub(crate) fatal: Arc<Notify>,
    pub(crate) topic: String,
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
                if code == Code::Fatal || self.producer.client().fatal_error().is_some() {
                    self.fatal.notify_one();
                }
                Err(fault::send_error(&self.topic, code, fault::outcome(code, report.persisted)))
            }
        };
        (report.ticket, result)
    }

    fn error(&self, code: Code, reason: String) {
        tracing::debug!(target: "librdkafka", ?code, "{reason}");
        if code == Code::Fatal {
            self.fatal.notify_one();
        }
        if code == Code::AllBrokersDown {
            self.down.is.store(true, Ordering::Release);
            self.down.changed.notify_one();
        }
    }
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
