//! Routes: a subscription and the service that handles it, typed until the worker runs, so that no message pays for a box.

use super::batch::{BatchRequest, Outcomes};
use super::batch_runner::BatchRunner;
use super::books::Report;
use super::slots::Signal;
use super::{Outcome, Request, runner::Runner};
use futures_core::future::BoxFuture;
use mq_api::{BoxError, Consumer, Error, ErrorKind, Subscription};
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;
use tower_layer::Layer;
use tower_service::Service;

/// A service that handles messages one by one: a handler with any number of layers around it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a service that handles messages",
    label = "this stack of layers does not fit a worker",
    note = "a layer must give a `tower::Service<Request, Response = Outcome>` that is `Clone + Send + 'static`, with a `Send` future and an error that is an error or text"
)]
pub trait MessageService:
    Service<Request, Response = Outcome, Error: Into<BoxError>, Future: Send + 'static> + Clone + Send + 'static
{
}

impl<T> MessageService for T where
    T: Service<Request, Response = Outcome, Error: Into<BoxError>, Future: Send + 'static> + Clone + Send + 'static
{
}

/// A service that handles batches of messages.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a service that handles batches",
    label = "this stack of layers does not fit a batch route",
    note = "a layer around a batch route must give a `tower::Service<BatchRequest, Response = Outcomes>`; layers made for single messages go before `.batch(..)`"
)]
pub trait BatchService:
    Service<BatchRequest, Response = Outcomes, Error: Into<BoxError>, Future: Send + 'static> + Clone + Send + 'static
{
}

impl<T> BatchService for T where
    T: Service<BatchRequest, Response = Outcomes, Error: Into<BoxError>, Future: Send + 'static>
        + Clone
        + Send
        + 'static
{
}

/// A route for messages one by one.
pub struct One<Svc> {
    pub(super) subscriptions: Vec<Subscription>,
    pub(super) service: Svc,
}

/// A route for batches of messages.
pub struct Many<Svc> {
    pub(super) subscriptions: Vec<Subscription>,
    pub(super) service: Svc,
    pub(super) max: usize,
}

/// How a running route ends.
pub(super) type End = Result<Report, (Error, Report)>;

type Start = Box<dyn FnOnce(Box<dyn Consumer>, Arc<Signal>, Duration) -> BoxFuture<'static, End> + Send>;

/// A route whose types are no longer of interest: what to subscribe to, and how to begin.
pub struct Plan {
    /// Which call of `route` or `batch` it comes from.
    pub(super) route: usize,
    pub(super) subscription: Subscription,
    pub(super) start: Start,
}

impl Plan {
    fn new(
        route: usize,
        subscription: Subscription,
        start: impl FnOnce(Box<dyn Consumer>, Arc<Signal>, Duration) -> BoxFuture<'static, End> + Send + 'static,
    ) -> Self {
        Self { route, subscription, start: Box::new(start) }
    }

    /// The number of the next route.
    fn next(plans: &[Self]) -> usize {
        plans.last().map_or(0, |plan| plan.route + 1)
    }

    /// Refuses two routes whose handlers would each get a part of one group's messages, by chance. Several members of one
    /// group share a handler: one route with several subscriptions.
    pub(super) fn check(plans: &[Self]) -> Result<(), Error> {
        for (n, plan) in plans.iter().enumerate() {
            let Some(group) = plan.subscription.group_name() else { continue };
            let topic = &plan.subscription.topic;
            let shares =
                |other: &&Self| other.subscription.topic == *topic && other.subscription.group_name() == Some(group);
            if plans.iter().take(n).find(shares).is_some_and(|other| other.route != plan.route) {
                return Err(Error::new(
                    ErrorKind::Config,
                    format!(
                        "two routes of this worker receive '{topic}' as group '{group}', so each message would go to one of the two handlers by chance; give the routes different groups, or use one handler"
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// The routes of a worker, as a nested list of types. Grows by [`Worker::route`](super::Worker::route).
pub trait Routes {
    #[doc(hidden)]
    fn plans(self, plans: &mut Vec<Plan>);

    /// Whether one of them was given no subscription.
    #[doc(hidden)]
    fn any_without(&self) -> bool;
}

impl Routes for () {
    fn plans(self, _: &mut Vec<Plan>) {}

    fn any_without(&self) -> bool {
        false
    }
}

impl<R: Routes, Svc: MessageService> Routes for (R, One<Svc>) {
    fn any_without(&self) -> bool {
        self.1.subscriptions.is_empty() || self.0.any_without()
    }

    fn plans(self, plans: &mut Vec<Plan>) {
        self.0.plans(plans);
        let One { subscriptions, service } = self.1;
        let route = Plan::next(plans);
        for subscription in subscriptions {
            let (sub, service) = (subscription.clone(), service.clone());
            plans.push(Plan::new(route, subscription, move |consumer, signal, deadline| {
                let mut runner = Runner::new(&sub, service, consumer, signal, deadline);
                Box::pin(poll_fn(move |cx| runner.poll_run(cx)))
            }));
        }
    }
}

impl<R: Routes, Svc: BatchService> Routes for (R, Many<Svc>) {
    fn any_without(&self) -> bool {
        self.1.subscriptions.is_empty() || self.0.any_without()
    }

    fn plans(self, plans: &mut Vec<Plan>) {
        self.0.plans(plans);
        let Many { subscriptions, service, max } = self.1;
        let route = Plan::next(plans);
        for subscription in subscriptions {
            let (sub, service) = (subscription.clone(), service.clone());
            plans.push(Plan::new(route, subscription, move |consumer, signal, deadline| {
                let mut runner = BatchRunner::new(&sub, service, max, consumer, signal, deadline);
                Box::pin(poll_fn(move |cx| runner.poll_run(cx)))
            }));
        }
    }
}

/// Routes that a layer can be put around.
#[diagnostic::on_unimplemented(
    message = "the layer `{L}` cannot be put around these routes",
    label = "no route to put it around, or a service it does not fit",
    note = "a layer wraps the routes added before it: call `.route(..)` first, then `.layer(..)`",
    note = "it must implement `tower::Layer` and give a `tower::Service<Request, Response = Outcome>` (`BatchRequest` and `Outcomes` for batch routes)"
)]
pub trait Layered<L>: Routes {
    /// The routes with the layer.
    type Output: Routes;
    #[doc(hidden)]
    fn layered(self, layer: &L) -> Self::Output;
}

/// What is under the first route.
pub trait LayeredRest<L>: Routes {
    #[doc(hidden)]
    type Rest: Routes;
    #[doc(hidden)]
    fn rest(self, layer: &L) -> Self::Rest;
}

impl<L> LayeredRest<L> for () {
    type Rest = ();
    fn rest(self, _: &L) {}
}

impl<L, R, T> LayeredRest<L> for (R, T)
where
    (R, T): Layered<L>,
{
    type Rest = <(R, T) as Layered<L>>::Output;
    fn rest(self, layer: &L) -> Self::Rest {
        self.layered(layer)
    }
}

impl<L, R, Svc> Layered<L> for (R, One<Svc>)
where
    R: LayeredRest<L>,
    Svc: MessageService,
    L: Layer<Svc, Service: MessageService>,
{
    type Output = (R::Rest, One<L::Service>);
    fn layered(self, layer: &L) -> Self::Output {
        let One { subscriptions, service } = self.1;
        (self.0.rest(layer), One { subscriptions, service: layer.layer(service) })
    }
}

impl<L, R, Svc> Layered<L> for (R, Many<Svc>)
where
    R: LayeredRest<L>,
    Svc: BatchService,
    L: Layer<Svc, Service: BatchService>,
{
    type Output = (R::Rest, Many<L::Service>);
    fn layered(self, layer: &L) -> Self::Output {
        let Many { subscriptions, service, max } = self.1;
        (self.0.rest(layer), Many { subscriptions, service: layer.layer(service), max })
    }
}

/// One subscription, or several that share a handler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a subscription",
    label = "not a subscription",
    note = "say as whom to receive: `Subscription::group(\"orders\", \"billing\")`, or `Subscription::broadcast(\"orders\")`",
    note = "several that share a handler: an array or a `Vec` of `Subscription`"
)]
pub trait IntoSubscriptions {
    /// The subscriptions.
    fn into_subscriptions(self) -> Vec<Subscription>;
}

impl IntoSubscriptions for Subscription {
    fn into_subscriptions(self) -> Vec<Subscription> {
        vec![self]
    }
}

impl IntoSubscriptions for Vec<Subscription> {
    fn into_subscriptions(self) -> Vec<Subscription> {
        self
    }
}

impl<const N: usize> IntoSubscriptions for [Subscription; N] {
    fn into_subscriptions(self) -> Vec<Subscription> {
        self.into()
    }
}

macro_rules! opaque_debug {
    ($($name:ident $(<$g:ident>)?),*) => { $(
        impl$(<$g>)? fmt::Debug for $name$(<$g>)? {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str(stringify!($name)) }
        }
    )* };
}
opaque_debug!(One<Svc>, Many<Svc>, Plan);
