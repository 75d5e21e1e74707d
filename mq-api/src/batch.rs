use crate::{Error, Message, Position, Receipt, SendResult, SendTable};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Messages to send together, and afterwards their outcomes, in order. Reusable: sending drains the messages.
#[derive(Debug, Default)]
pub struct Batch {
    /// What to send.
    pub messages: Vec<Message>,
    outcomes: Vec<Run>,
}

/// Outcomes of neighbours.
#[derive(Debug)]
pub enum Run {
    /// `n` messages at neighbouring positions from that of `first` on.
    Ok {
        /// The receipt of the first.
        first: Receipt,
        /// How many.
        n: u32,
    },
    /// One that was not sent, or may not have been.
    Err(Error),
}

impl Batch {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs of outcomes, in order.
    pub fn runs(&self) -> &[Run] {
        &self.outcomes
    }

    /// One result per message, in order; empties the outcomes.
    pub fn take_results(&mut self) -> Vec<SendResult> {
        let mut results = Vec::new();
        for run in self.outcomes.drain(..) {
            match run {
                Run::Err(e) => results.push(Err(e)),
                Run::Ok { first, n } => results.extend((0..n).map(|i| {
                    let position = first.position.map(|p| Position { major: p.major + u64::from(i), ..p });
                    Ok(Receipt { position, ..first })
                })),
            }
        }
        results
    }

    /// Whether every message was confirmed.
    pub fn all_ok(&self) -> bool {
        self.outcomes.iter().all(|run| matches!(run, Run::Ok { .. }))
    }

    /// How many were confirmed.
    pub fn confirmed(&self) -> usize {
        self.outcomes.iter().map(|run| if let Run::Ok { n, .. } = run { *n as usize } else { 0 }).sum()
    }

    /// For backends: forgets the outcomes.
    #[inline]
    pub fn clear_outcomes(&mut self) {
        self.outcomes.clear();
    }

    /// For backends: `n` neighbours were confirmed.
    #[inline]
    pub fn push_run(&mut self, first: Receipt, n: u32) {
        if n > 0 {
            self.outcomes.push(Run::Ok { first, n });
        }
    }

    /// For backends: the outcome of one; joins the last run when it fits.
    #[inline]
    pub fn push(&mut self, result: SendResult) {
        match result {
            Err(e) => self.outcomes.push(Run::Err(e)),
            Ok(receipt) => {
                if let Some(Run::Ok { first, n }) = self.outcomes.last_mut()
                    && let (Some(a), Some(b)) = (first.position, receipt.position)
                    && (a.minor, b.minor) == (0, 0)
                    && a.major + u64::from(*n) == b.major
                    && (first.partition, first.level) == (receipt.partition, receipt.level)
                {
                    *n += 1;
                    return;
                }
                self.outcomes.push(Run::Ok { first: receipt, n: 1 });
            }
        }
    }
}

impl From<Vec<Message>> for Batch {
    fn from(messages: Vec<Message>) -> Self {
        Self { messages, outcomes: Vec::new() }
    }
}

/// The outcome of a batch, to come: gives the same [`Batch`] back. All messages were queued when this was made.
///
/// Cancel-safe in the sense of [`Sending`](crate::Sending): each message is sent or counted.
#[must_use = "a send is confirmed only when this was awaited and the outcomes are `Ok`"]
pub struct SendingBatch {
    batch: Option<Batch>,
    table: Option<Arc<dyn SendTable>>,
    waiting: std::collections::VecDeque<Result<SendResult, u64>>,
}

impl SendingBatch {
    /// All outcomes are known.
    #[inline]
    pub fn ready(batch: Batch) -> Self {
        Self { batch: Some(batch), table: None, waiting: Default::default() }
    }

    /// Outcomes known already, or the tickets to ask for, in order.
    pub fn wait(
        batch: Batch,
        table: Arc<dyn SendTable>,
        waiting: impl IntoIterator<Item = Result<SendResult, u64>>,
    ) -> Self {
        Self { batch: Some(batch), table: Some(table), waiting: waiting.into_iter().collect() }
    }
}

impl Future for SendingBatch {
    type Output = Batch;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Batch> {
        let this = &mut *self;
        if let Some(table) = &this.table
            && let Some(batch) = &mut this.batch
        {
            while let Some(next) = this.waiting.front_mut() {
                let result = match next {
                    Err(ticket) => std::task::ready!(table.poll_sent(*ticket, cx)),
                    Ok(_) => match this.waiting.pop_front() {
                        Some(Ok(result)) => {
                            batch.push(result);
                            continue;
                        }
                        _ => continue,
                    },
                };
                this.waiting.pop_front();
                batch.push(result);
            }
        }
        Poll::Ready(self.batch.take().unwrap_or_default())
    }
}

impl Drop for SendingBatch {
    fn drop(&mut self) {
        if let Some(table) = &self.table {
            for ticket in self.waiting.drain(..).filter_map(Result::err) {
                table.forget(ticket);
            }
        }
    }
}

impl fmt::Debug for SendingBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SendingBatch(waiting for {})", self.waiting.len())
    }
}
