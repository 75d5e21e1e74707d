//! Batch handlers: several messages at once, a result for each.

use super::extract::{FromRef, State};
use super::handler::Never;
use super::{FromDelivery, IntoOutcome, Outcome, Request};
use mq_api::BoxError;
use pin_project_lite::pin_project;
use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::ops::Deref;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tower_service::Service;

/// The messages of one batch, each taken by an extractor: `Batch<Json<Order>>`, or several as a tuple,
/// `Batch<(Json<Order>, Attempt)>`. What cannot be decoded is settled on its own and is not in here.
#[derive(Debug)]
pub struct Batch<T>(pub Vec<T>);

impl<T> Deref for Batch<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> IntoIterator for Batch<T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// What the service of a batch route gets.
#[derive(Debug, Clone)]
pub struct BatchRequest(pub Vec<Request>);

/// What a batch handler decided.
#[derive(Debug, Clone)]
pub enum Outcomes {
    /// The same for all.
    All(Outcome),
    /// One for each, in order.
    Each(Vec<Outcome>),
}

/// What a batch handler may return: `()` (all done), `Vec<T>` of outcomes (one for each message, in order), [`Outcome`]
/// (for all), or a `Result` of these, whose error is a nack of all.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot decide what happens to a batch of messages",
    note = "return `()`, `Vec<Result<(), E>>` (one for each message, in order), `Outcome` (for all), or a `Result` of these"
)]
pub trait IntoOutcomes {
    /// The outcomes.
    fn into_outcomes(self) -> Outcomes;
}

impl IntoOutcomes for () {
    fn into_outcomes(self) -> Outcomes {
        Outcomes::All(Outcome::Ack)
    }
}

impl IntoOutcomes for Outcome {
    fn into_outcomes(self) -> Outcomes {
        Outcomes::All(self)
    }
}

impl<T: IntoOutcome> IntoOutcomes for Vec<T> {
    fn into_outcomes(self) -> Outcomes {
        Outcomes::Each(self.into_iter().map(T::into_outcome).collect())
    }
}

impl<T: IntoOutcomes, E: Into<BoxError>> IntoOutcomes for Result<T, E> {
    fn into_outcomes(self) -> Outcomes {
        match self {
            Ok(value) => value.into_outcomes(),
            Err(error) => Outcomes::All(Outcome::failed(error)),
        }
    }
}

/// An `async fn(Batch<T>)`, or with one or two `State<..>` after it, that returns outcomes.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a batch handler for a worker state of `{S}`",
    label = "not a batch handler",
    note = "a batch handler is an `async fn(Batch<T>)`, `async fn(Batch<T>, State<A>)` or `async fn(Batch<T>, State<A>, State<B>)` whose `T` is an extractor, such as `Json<Order>`",
    note = "it returns `()`, `Vec<Result<(), E>>`, `Outcome`, or a `Result` of these; its future must be `Send`"
)]
pub trait BatchHandler<Args, S>: Clone + Send + 'static {
    /// The handler at work.
    type Future: Future<Output = Outcomes> + Send + 'static;

    /// Takes the arguments from the messages and starts.
    fn call(&self, request: BatchRequest, state: &S) -> Self::Future;
}

pin_project! {
    /// A batch handler at work.
    pub struct BatchFuture<F> {
        #[pin]
        future: F,
        // What became of each message before the handler was called; `None` = the handler decides.
        settled: Vec<Option<Outcome>>,
        any: bool,
    }
}

impl<F: Future<Output: IntoOutcomes>> Future for BatchFuture<F> {
    type Output = Outcomes;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcomes> {
        let this = self.project();
        let decided = if *this.any { ready!(this.future.poll(cx)).into_outcomes() } else { Outcomes::Each(Vec::new()) };
        let settled = std::mem::take(this.settled);
        let asked = settled.iter().filter(|outcome| outcome.is_none()).count();
        Poll::Ready(match decided {
            Outcomes::All(outcome) => {
                Outcomes::Each(settled.into_iter().map(|s| s.unwrap_or_else(|| outcome.clone())).collect())
            }
            Outcomes::Each(each) if each.len() == asked => {
                let mut each = each.into_iter();
                let next = |s: Option<Outcome>| s.or_else(|| each.next()).unwrap_or(Outcome::Release);
                Outcomes::Each(settled.into_iter().map(next).collect())
            }
            Outcomes::Each(each) => {
                let text = format!(
                    "the batch handler returned {} results for {asked} messages; return one for each, in order",
                    each.len()
                );
                let wrong = |s: Option<Outcome>| s.unwrap_or_else(|| Outcome::failed(text.as_str()));
                Outcomes::Each(settled.into_iter().map(wrong).collect())
            }
        })
    }
}

impl<F> fmt::Debug for BatchFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BatchFuture")
    }
}

macro_rules! batch_handlers {
    ($(($($state:ident),*);)*) => { $(
        impl<Fun, Fut, S, T, $($state,)*> BatchHandler<(Batch<T>, $(State<$state>,)*), S> for Fun
        where
            Fun: Fn(Batch<T>, $(State<$state>),*) -> Fut + Clone + Send + 'static,
            Fut: Future<Output: IntoOutcomes> + Send + 'static,
            T: FromDelivery<S>,
            $($state: FromRef<S>,)*
        {
            type Future = BatchFuture<Fut>;

            #[allow(unused_variables)]
            fn call(&self, request: BatchRequest, state: &S) -> Self::Future {
                let mut taken = Vec::with_capacity(request.0.len());
                let mut settled = Vec::with_capacity(request.0.len());
                for request in &request.0 {
                    match T::from_delivery(request, state) {
                        Ok(value) => {
                            taken.push(value);
                            settled.push(None);
                        }
                        Err(outcome) => settled.push(Some(outcome)),
                    }
                }
                let any = !taken.is_empty();
                BatchFuture { future: self(Batch(taken), $(State($state::from_ref(state))),*), settled, any }
            }
        }
    )* };
}
batch_handlers! { (); (A); (A, B); }

/// The innermost service of a batch route.
pub struct BatchHandlerService<H, Args, S> {
    handler: H,
    state: S,
    args: PhantomData<fn(Args)>,
}

impl<H, Args, S> BatchHandlerService<H, Args, S> {
    pub(crate) fn new(handler: H, state: S) -> Self {
        Self { handler, state, args: PhantomData }
    }
}

impl<H: Clone, Args, S: Clone> Clone for BatchHandlerService<H, Args, S> {
    fn clone(&self) -> Self {
        Self::new(self.handler.clone(), self.state.clone())
    }
}

impl<H, Args, S> fmt::Debug for BatchHandlerService<H, Args, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BatchHandlerService({})", std::any::type_name::<H>())
    }
}

impl<H: BatchHandler<Args, S>, Args, S> Service<BatchRequest> for BatchHandlerService<H, Args, S> {
    type Response = Outcomes;
    type Error = Infallible;
    type Future = Never<H::Future>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: BatchRequest) -> Self::Future {
        Never { future: self.handler.call(request, &self.state) }
    }
}
