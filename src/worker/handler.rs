//! Handlers: plain `async fn`s whose arguments are taken from the message.

use super::{FromDelivery, IntoOutcome, Outcome, Request};
use pin_project_lite::pin_project;
use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};
use tower_service::Service;

/// An `async fn` of up to eight extractors that returns an outcome.
///
/// Implemented for functions and closures; nobody else needs to.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a message handler for a worker state of `{S}`",
    label = "not a handler",
    note = "a handler is an `async fn` of up to 8 extractors (`Json<T>`, `Payload`, `Key`, `Headers`, `Attempt`, `State<T>`, ..) that returns `()`, `Result<(), E>` or `Outcome`",
    note = "its future must be `Send`: no `Rc`, `RefCell` borrow or `std` lock guard across an `.await`; a closure must be `Clone`",
    note = "to see which argument or result is wrong: `anymq::worker::handler::check::<(Arg1, Arg2), StateType, _>(&your_handler)`"
)]
pub trait Handler<Args, S>: Clone + Send + 'static {
    /// The handler at work.
    type Future: Future<Output = Outcome> + Send + 'static;

    /// Takes the arguments from the message and starts.
    fn call(&self, request: Request, state: &S) -> Self::Future;
}

/// Compiles if `handler` is a handler, else names the argument or result that is wrong.
///
/// ```
/// use anymq::worker::{Json, State, handler};
/// async fn bill(Json(order): Json<u64>, State(rate): State<u32>) -> Result<(), String> { Ok(()) }
/// handler::check::<(Json<u64>, State<u32>), u32, _>(&bill);
/// ```
pub fn check<Args, S, H>(_handler: &H)
where
    H: Handler<Args, S>,
{
}

pin_project! {
    /// A handler at work.
    pub struct HandlerFuture<F> {
        #[pin]
        work: Work<F>,
    }
}

pin_project! {
    #[project = WorkProj]
    enum Work<F> {
        // An argument could not be taken.
        Rejected { outcome: Option<Outcome> },
        Running { #[pin] future: F },
    }
}

impl<F: Future<Output: IntoOutcome>> Future for HandlerFuture<F> {
    type Output = Outcome;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        match self.project().work.project() {
            WorkProj::Running { future } => future.poll(cx).map(IntoOutcome::into_outcome),
            WorkProj::Rejected { outcome } => Poll::Ready(outcome.take().unwrap_or(Outcome::Release)),
        }
    }
}

impl<F> fmt::Debug for HandlerFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandlerFuture")
    }
}

macro_rules! handlers {
    ($(($($arg:ident),*);)*) => { $(
        impl<Fun, Fut, S, $($arg,)*> Handler<($($arg,)*), S> for Fun
        where
            Fun: Fn($($arg),*) -> Fut + Clone + Send + 'static,
            Fut: Future<Output: IntoOutcome> + Send + 'static,
            $($arg: FromDelivery<S>,)*
        {
            type Future = HandlerFuture<Fut>;

            #[inline]
            #[allow(non_snake_case, unused_variables)]
            fn call(&self, request: Request, state: &S) -> Self::Future {
                $(let $arg = match $arg::from_delivery(&request, state) {
                    Ok(taken) => taken,
                    Err(outcome) => return HandlerFuture { work: Work::Rejected { outcome: Some(outcome) } },
                };)*
                // The message goes before the handler runs: what was not taken is not kept.
                drop(request);
                HandlerFuture { work: Work::Running { future: self($($arg),*) } }
            }
        }
    )* };
}
handlers! {
    (); (A); (A, B); (A, B, C); (A, B, C, D); (A, B, C, D, E); (A, B, C, D, E, F); (A, B, C, D, E, F, G);
    (A, B, C, D, E, F, G, H);
}

/// The innermost service of a route: the handler and its state.
pub struct HandlerService<H, Args, S> {
    handler: H,
    state: S,
    args: PhantomData<fn(Args)>,
}

impl<H, Args, S> HandlerService<H, Args, S> {
    pub(crate) fn new(handler: H, state: S) -> Self {
        Self { handler, state, args: PhantomData }
    }
}

impl<H: Clone, Args, S: Clone> Clone for HandlerService<H, Args, S> {
    fn clone(&self) -> Self {
        Self::new(self.handler.clone(), self.state.clone())
    }
}

impl<H, Args, S> fmt::Debug for HandlerService<H, Args, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandlerService({})", std::any::type_name::<H>())
    }
}

impl<H: Handler<Args, S>, Args, S> Service<Request> for HandlerService<H, Args, S> {
    type Response = Outcome;
    type Error = Infallible;
    type Future = Never<H::Future>;

    #[inline]
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    #[inline]
    fn call(&mut self, request: Request) -> Self::Future {
        Never { future: self.handler.call(request, &self.state) }
    }
}

pin_project! {
    /// A future that cannot fail, as a service's future.
    pub struct Never<F> { #[pin] pub(crate) future: F }
}

impl<F: Future> Future for Never<F> {
    type Output = Result<F::Output, Infallible>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().future.poll(cx).map(Ok)
    }
}

impl<F> fmt::Debug for Never<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Never")
    }
}
