use mq_api::BoxError;
use pin_project_lite::pin_project;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Sleep, sleep};
use tower_layer::Layer;
use tower_service::Service;

/// Ends a handler that takes longer than this; the message is nacked and comes again by the retry policy.
///
/// The time runs from the handler's first wait, and the handler is dropped at its next `.await`: a handler that computes
/// without awaiting cannot be ended. Choose less than the subscription's `max_processing`. Works around batch routes too,
/// where it nacks the whole batch.
#[derive(Debug, Clone, Copy)]
pub struct TimeoutLayer {
    limit: Duration,
}

impl TimeoutLayer {
    /// With this limit.
    pub fn new(limit: Duration) -> Self {
        Self { limit }
    }
}

impl<S> Layer<S> for TimeoutLayer {
    type Service = Timeout<S>;

    fn layer(&self, inner: S) -> Timeout<S> {
        Timeout { inner, limit: self.limit }
    }
}

/// A service with a time limit.
#[derive(Debug, Clone)]
pub struct Timeout<S> {
    inner: S,
    limit: Duration,
}

impl<S, R> Service<R> for Timeout<S>
where
    S: Service<R, Error: Into<BoxError>>,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = TimeoutFuture<S::Future>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    #[inline]
    fn call(&mut self, request: R) -> Self::Future {
        TimeoutFuture { future: self.inner.call(request), limit: self.limit, sleep: None }
    }
}

pin_project! {
    /// A handler at work under a time limit. The timer is made at the first wait, so that a handler that never waits pays
    /// nothing for it.
    pub struct TimeoutFuture<F> {
        #[pin]
        future: F,
        limit: Duration,
        #[pin]
        sleep: Option<Sleep>,
    }
}

impl<F, T, E> Future for TimeoutFuture<F>
where
    F: Future<Output = Result<T, E>>,
    E: Into<BoxError>,
{
    type Output = Result<T, BoxError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Poll::Ready(result) = this.future.poll(cx) {
            return Poll::Ready(result.map_err(Into::into));
        }
        if this.sleep.is_none() {
            this.sleep.set(Some(sleep(*this.limit)));
        }
        match this.sleep.as_mut().as_pin_mut().map(|sleep| sleep.poll(cx)) {
            Some(Poll::Ready(())) => Poll::Ready(Err(Elapsed(*this.limit).into())),
            _ => Poll::Pending,
        }
    }
}

impl<F> fmt::Debug for TimeoutFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TimeoutFuture({:?})", self.limit)
    }
}

/// The handler took longer than its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elapsed(pub Duration);

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the handler took longer than its limit of {:?}", self.0)
    }
}

impl std::error::Error for Elapsed {}
