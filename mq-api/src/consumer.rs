use crate::{CloseReport, Deliveries, Delivery, Events, HealthWatch, Result};
use futures_core::future::BoxFuture;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// Receives from one subscription. Made by [`Broker::open_consumer`](crate::Broker::open_consumer).
///
/// Object-safe; all state lives behind `&mut self`, so there is no future that could lose a message when it is dropped.
/// `recv`, `recv_batch`, `stream`, `json` are in [`ConsumerExt`](crate::ConsumerExt).
pub trait Consumer: Send {
    /// The next delivery; `None` after close. Losing a connection is no error: the consumer comes back by itself, and
    /// [`ConsumerControl::health`] tells.
    ///
    /// # Errors
    /// Only what no retry can mend, such as a topology that differs from the one asked for.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Delivery>>>;

    /// Appends what is there, at most `max`; ready with 0 only after close.
    ///
    /// # Errors
    /// As [`poll_next`](Self::poll_next).
    fn poll_batch(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Deliveries) -> Poll<Result<usize>>;

    /// A handle that works while the consumer is borrowed or elsewhere.
    fn control(&self) -> ConsumerControl;
}

/// What a [`ConsumerControl`] points to. Implemented by the engine.
pub trait Control: Send + Sync {
    /// Stops fetching. What was handed out or buffered is not touched.
    fn pause(&self);
    /// Fetches again.
    fn resume(&self);
    /// Deliveries in the application's hands or buffered for it.
    fn in_flight(&self) -> usize;
    /// How the consumer is doing.
    fn health(&self) -> HealthWatch;
    /// Gaps and lags from now on.
    fn events(&self) -> Events;
    /// See [`ConsumerControl::close`].
    fn close(&self, deadline: Duration) -> BoxFuture<'static, CloseReport>;
}

/// Controls a consumer from anywhere. Cheap to clone.
#[derive(Clone)]
pub struct ConsumerControl(Arc<dyn Control>);

impl ConsumerControl {
    /// For backends.
    pub fn new(control: Arc<dyn Control>) -> Self {
        Self(control)
    }

    /// Stops fetching. What was handed out or buffered is not touched; health shows it.
    pub fn pause(&self) {
        self.0.pause();
    }

    /// Fetches again after a pause.
    pub fn resume(&self) {
        self.0.resume();
    }

    /// Deliveries in the application's hands or buffered for it.
    pub fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    /// How the consumer is doing: "fetching", not merely "connected".
    pub fn health(&self) -> HealthWatch {
        self.0.health()
    }

    /// Gaps and lags from now on.
    pub fn events(&self) -> Events {
        self.0.events()
    }

    /// Stops fetching, gives back what was buffered, waits for the deliveries in hand and their settlements until
    /// `deadline`, gives back the rest so that another member has it as soon as the broker allows, and disconnects.
    ///
    /// Idempotent, and bounded also while the broker is away. Takes effect at the call; dropping the future does not stop it.
    pub fn close(&self, deadline: Duration) -> BoxFuture<'static, CloseReport> {
        self.0.close(deadline)
    }
}

impl fmt::Debug for ConsumerControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConsumerControl({:?}, in flight {})", self.health().current().state, self.in_flight())
    }
}

impl<C: Consumer + ?Sized> Consumer for Box<C> {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Delivery>>> {
        (**self).poll_next(cx)
    }
    fn poll_batch(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Deliveries) -> Poll<Result<usize>> {
        (**self).poll_batch(cx, max, out)
    }
    fn control(&self) -> ConsumerControl {
        (**self).control()
    }
}
