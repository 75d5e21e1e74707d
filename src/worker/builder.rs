use super::batch::{BatchHandler, BatchHandlerService};
use super::books::Report;
use super::handle::{Phase, WorkerHandle};
use super::handler::{Handler, HandlerService};
use super::route::{End, IntoSubscriptions, Layered, Many, One, Plan, Routes};
use super::signals::shutdown_signal;
use super::slots::Stop;
use mq_api::{Broker, Consumer, Error, ErrorKind, Result};
use std::fmt;
use std::future::{Future, pending};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// Time for handlers to finish at shutdown. Kubernetes kills a pod 30 s after SIGTERM; this leaves it 5 s to disconnect.
const DEADLINE: Duration = Duration::from_secs(25);

/// Receives from any number of subscriptions and runs a handler for each message.
///
/// ```
/// use anymq::prelude::*;
/// # #[derive(Clone)] struct Db;
/// # #[derive(serde::Deserialize)] struct Order { total: u64 }
/// async fn bill(Json(order): Json<Order>, State(db): State<Db>) -> Result<(), std::io::Error> {
///     // An error is a nack: tried again after a back-off, dead-lettered after the last attempt.
///     Ok(())
/// }
///
/// # async fn run(broker: std::sync::Arc<dyn Broker>) -> anymq::Result<()> {
/// Worker::new(broker)
///     .state(Db)
///     .route(Subscription::group("orders", "billing").concurrency(16), bill)
///     .layer(TimeoutLayer::new(std::time::Duration::from_secs(5)))
///     .run_until_signal()
///     .await?;
/// # Ok(()) }
/// ```
///
/// Each route is one task; up to `concurrency` of its handlers are at work at a time, driven by that task, so a handler
/// must not block it (use `tokio::task::spawn_blocking` for that). Under
/// [`Ordering::PerKey`](mq_api::Ordering::PerKey) two messages of one key are never at work together.
///
/// Nothing happens before one of the `run` methods is awaited.
#[must_use = "a worker does nothing until `run`, `run_until` or `run_until_signal` is awaited"]
pub struct Worker<S = (), R = ()> {
    broker: Arc<dyn Broker>,
    state: S,
    routes: R,
    deadline: Duration,
    handle: WorkerHandle,
}

/// A worker with one more route.
pub type Routed<S, R, H, Args> = Worker<S, (R, One<HandlerService<H, Args, S>>)>;

/// A worker with one more batch route.
pub type BatchRouted<S, R, H, Args> = Worker<S, (R, Many<BatchHandlerService<H, Args, S>>)>;

impl Worker {
    /// A worker on this broker. The broker stays open when the worker ends.
    pub fn new(broker: Arc<dyn Broker>) -> Self {
        Self { broker, state: (), routes: (), deadline: DEADLINE, handle: WorkerHandle::new() }
    }
}

impl<S: Clone, R> Worker<S, R> {
    /// Sets what `State<T>` arguments are taken from, for the routes added from here on. Cloned for each message that takes
    /// it: keep it cheap (`Arc`).
    pub fn state<T: Clone + Send + 'static>(self, state: T) -> Worker<T, R> {
        let Self { broker, routes, deadline, handle, .. } = self;
        Worker { broker, state, routes, deadline, handle }
    }

    /// Handles the messages of a subscription, or of several (an array or a `Vec`), one by one.
    pub fn route<Args, H>(self, subscriptions: impl IntoSubscriptions, handler: H) -> Routed<S, R, H, Args>
    where
        H: Handler<Args, S>,
    {
        let service = HandlerService::new(handler, self.state.clone());
        let one = One { subscriptions: subscriptions.into_subscriptions(), service };
        self.with(|routes| (routes, one))
    }

    /// Handles the messages of a subscription in batches: what is there, at most `max`, without waiting for more.
    /// `concurrency` of the subscription is the number of batches at work.
    pub fn batch<Args, H>(
        self,
        subscriptions: impl IntoSubscriptions,
        max: usize,
        handler: H,
    ) -> BatchRouted<S, R, H, Args>
    where
        H: BatchHandler<Args, S>,
    {
        let service = BatchHandlerService::new(handler, self.state.clone());
        let many = Many { subscriptions: subscriptions.into_subscriptions(), service, max };
        self.with(|routes| (routes, many))
    }
}

impl<S, R> Worker<S, R> {
    fn with<R2>(self, change: impl FnOnce(R) -> R2) -> Worker<S, R2> {
        let Self { broker, state, routes, deadline, handle } = self;
        Worker { broker, state, routes: change(routes), deadline, handle }
    }

    /// Puts a `tower::Layer` around all routes added so far. The last layer is the outermost.
    pub fn layer<L>(self, layer: L) -> Worker<S, R::Output>
    where
        R: Layered<L>,
    {
        self.with(|routes| routes.layered(&layer))
    }

    /// Time that handlers at work get at shutdown; then they are dropped and their messages given back. Default 25 s: within
    /// the 30 s that Kubernetes gives.
    pub fn shutdown_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// A handle to pause, resume and shut down with.
    pub fn handle(&self) -> WorkerHandle {
        self.handle.clone()
    }

    /// The broker.
    pub fn broker(&self) -> &Arc<dyn Broker> {
        &self.broker
    }
}

impl<S, R: Routes> Worker<S, R> {
    /// Runs until [`WorkerHandle::shutdown`], or until the broker is closed.
    ///
    /// # Errors
    /// What opening a consumer or receiving ended with, after the other routes were drained. Failing handlers are no error
    /// of the worker.
    ///
    /// # Cancel safety
    /// Dropping the future drops the handlers at work; their messages go back.
    pub async fn run(self) -> Result<Report> {
        self.run_until(pending()).await
    }

    /// Runs until SIGTERM or SIGINT, then drains within the deadline. A second signal ends the drain at once.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn run_until_signal(self) -> Result<Report> {
        let handle = self.handle.clone();
        let until = async {
            match shutdown_signal().await {
                Ok(signal) => tracing::info!(signal, "draining; a second signal ends the drain"),
                Err(error) => {
                    tracing::error!(%error, "signals cannot be received; the worker ends only by its handle");
                    pending::<()>().await;
                }
            }
        };
        let second = async {
            handle.stopped().await;
            if shutdown_signal().await.is_ok() {
                handle.abandon();
            }
            pending::<std::convert::Infallible>().await
        };
        let running = pin!(self.run_until(until));
        tokio::select! {
            biased;
            report = running => report,
            never = second => match never {},
        }
    }

    /// Runs until `until` is ready, then drains within the deadline.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn run_until(self, until: impl Future<Output = ()>) -> Result<Report> {
        let Self { broker, routes, deadline, handle, .. } = self;
        let mut plans = Vec::new();
        let any_without = routes.any_without();
        routes.plans(&mut plans);
        let _ended = Ended(handle.clone());
        if any_without {
            return Err(Error::new(
                ErrorKind::Config,
                "a route of the worker has no subscription (an empty list), so its handler would never be called",
            ));
        }
        if plans.is_empty() {
            return Err(Error::new(
                ErrorKind::Config,
                "the worker has no routes; add one with `.route(subscription, handler)`",
            ));
        }
        Plan::check(&plans)?;
        let mut until = pin!(until);
        let mut stopped = pin!(handle.stopped());
        let opened = tokio::select! {
            biased;
            opened = open_all(&broker, plans) => opened?,
            () = &mut until => return Ok(Report::default()),
            () = &mut stopped => return Ok(Report::default()),
        };
        let mut tasks = JoinSet::new();
        for (plan, consumer) in opened {
            let signal = handle.add(plan.subscription.topic, consumer.control());
            tasks.spawn((plan.start)(consumer, signal, deadline));
        }
        handle.enter(Phase::Running);
        let mut total = Total::default();
        // Neither future may be polled again once it was ready.
        let mut asked = false;
        loop {
            tokio::select! {
                biased;
                ended = tasks.join_next() => match ended {
                    Some(ended) => {
                        if total.add(ended) {
                            handle.shutdown();
                        }
                    }
                    None => break,
                },
                () = &mut until, if !asked => {
                    asked = true;
                    handle.shutdown();
                }
                () = &mut stopped, if handle.phase() < Phase::Draining => {
                    asked = true;
                    handle.enter(Phase::Draining);
                }
            }
        }
        total.finish()
    }
}

/// Opens all consumers, or none: those opened before one failed are closed again.
async fn open_all(broker: &Arc<dyn Broker>, plans: Vec<Plan>) -> Result<Vec<(Plan, Box<dyn Consumer>)>> {
    let mut opened: Vec<(Plan, Box<dyn Consumer>)> = Vec::with_capacity(plans.len());
    for plan in plans {
        match broker.open_consumer(plan.subscription.clone()).await {
            Ok(consumer) => opened.push((plan, consumer)),
            Err(error) => {
                for (_, consumer) in opened {
                    consumer.control().close(Duration::from_secs(1)).await;
                }
                return Err(error);
            }
        }
    }
    Ok(opened)
}

#[derive(Default)]
struct Total {
    report: Report,
    error: Option<Error>,
}

impl Total {
    /// Adds a route's end. True if it ended by an error.
    fn add(&mut self, ended: Result<End, tokio::task::JoinError>) -> bool {
        let error = match ended {
            Ok(Ok(report)) => {
                self.report += report;
                return false;
            }
            Ok(Err((error, report))) => {
                self.report += report;
                error
            }
            Err(e) => {
                Error::new(ErrorKind::Other, "the task of a route ended; this is a defect of anymq").with_source(e)
            }
        };
        self.error.get_or_insert(error);
        true
    }

    fn finish(self) -> Result<Report> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(self.report),
        }
    }
}

/// Says that the worker has ended, also when its future is dropped.
struct Ended(WorkerHandle);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.stop(Stop::Abandon);
        self.0.enter(Phase::Ended);
    }
}

impl<S, R> fmt::Debug for Worker<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("handle", &self.handle).field("deadline", &self.deadline).finish_non_exhaustive()
    }
}
