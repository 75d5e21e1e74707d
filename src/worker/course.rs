//! How a route goes on and comes to its end, whether it handles messages one by one or in batches.

use super::books::{Books, Report};
use super::route::End;
use super::slots::{Signal, Slots, Stop};
use futures_core::future::BoxFuture;
use mq_api::{BoxError, CloseReport, Consumer, Error, ErrorKind, Subscription};
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// How long a close may go on once nobody waits for handlers any more: enough to give back what a server that answers is given.
const GOODBYE: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct Course {
    pub(super) consumer: Box<dyn Consumer>,
    /// At most once: what was fetched is settled, and is begun also while the route closes.
    pub(super) settled_first: bool,
    signal: Arc<Signal>,
    deadline: Duration,
    closing: Option<BoxFuture<'static, CloseReport>>,
    hurried: bool,
    error: Option<Error>,
}

impl Course {
    pub(super) fn new(
        subscription: &Subscription,
        consumer: Box<dyn Consumer>,
        signal: Arc<Signal>,
        deadline: Duration,
    ) -> Self {
        let settled_first = subscription.settles_first();
        Self { consumer, settled_first, signal, deadline, closing: None, hurried: false, error: None }
    }

    /// The task is woken by what it is told from outside.
    #[inline]
    pub(super) fn register(&self, cx: &Context<'_>) {
        self.signal.register(cx);
    }

    #[inline]
    pub(super) fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    /// It was told to end, and does not yet.
    #[inline]
    pub(super) fn is_to_close(&self) -> bool {
        self.closing.is_none() && self.signal.stopping() != Stop::No
    }

    /// Whether what the consumer has is begun.
    #[inline]
    pub(super) fn goes_on(&self) -> bool {
        match self.closing {
            None => true,
            Some(_) => self.settled_first && self.error.is_none() && self.signal.stopping() != Stop::Abandon,
        }
    }

    /// No handler is at work.
    #[inline]
    pub(super) fn idle(&self) {
        self.signal.idle();
    }

    #[cold]
    pub(super) fn begin_close(&mut self) {
        if self.closing.is_none() {
            self.closing = Some(self.consumer.control().close(self.deadline));
        }
    }

    /// It ends by an error, and begins nothing any more.
    #[cold]
    pub(super) fn fail(&mut self, error: Error) {
        tracing::error!(error = %error, "a route ends");
        self.error = Some(error);
        self.begin_close();
    }

    /// Waits for the close, then drops the handlers that are at work still. `lost` enters what they had.
    #[cold]
    pub(super) fn poll_close<F: Future, K, L: Future + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        slots: &mut Slots<F, K, L>,
        books: &mut Books,
        lost: impl Fn(&mut Books, K),
    ) -> Poll<()> {
        let Some(closing) = &mut self.closing else { return Poll::Pending };
        if self.signal.stopping() == Stop::Abandon {
            // After the close began, a dropped ticket goes back at once.
            slots.abandon(|kept| lost(books, kept));
            if !std::mem::replace(&mut self.hurried, true) {
                // The earliest deadline of all counts; a server that is away would be waited for until the other.
                drop(self.consumer.control().close(GOODBYE));
            }
        }
        let close = ready!(closing.as_mut().poll(cx));
        if slots.busy() > 0 {
            tracing::warn!(handlers = slots.busy(), "the deadline passed: handlers still at work are dropped");
        }
        slots.abandon(|kept| lost(books, kept));
        books.report.close += close;
        Poll::Ready(())
    }

    /// What became of it.
    pub(super) fn end(&mut self, report: Report) -> End {
        match self.error.take() {
            None => Ok(report),
            Some(error) => Err((error, report)),
        }
    }
}

/// A layer says that it will take no more.
#[cold]
pub(super) fn refused(error: impl Into<BoxError>) -> Error {
    let error = error.into();
    Error::new(ErrorKind::Other, format!("a layer of the worker is not ready any more: {error}")).with_source(error)
}
