//! What became of messages that were handed over: a thread per producer reads librdkafka's reports, in batches.

use crate::client::Ctx;
use crate::fault;
use crate::ffi::{Report, Reports};
use mq_api::{Durability, Position, Receipt, SendResult};
use mq_core::Outbox;
use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::producer::{BaseProducer, Producer};
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
    pub(crate) producer: Arc<BaseProducer<Ctx>>,
    pub(crate) down: Arc<Down>,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) level: Durability,
    pub(crate) fatal: Arc<Notify>,
    pub(crate) topic: String,
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
        let result = match report.error {
            None => {
                let position = Position::offset(u64::try_from(report.offset).unwrap_or_default());
                Ok(Receipt::new(self.level).at(u32::try_from(report.partition).ok(), position))
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
