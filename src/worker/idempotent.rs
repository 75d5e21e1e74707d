//! The idempotent consumer: what was handled with success once is not handled again.
//!
//! Delivery is at least once, so a message may come twice: a lease ran out, an acknowledgement got lost, a sender repeated
//! itself. This layer keeps the ids of messages whose handler *succeeded* and acknowledges repeats without calling it. An
//! id is stored only after the success, so a crash between handler and mark repeats the handler and never skips it: to be
//! exact across crashes, mark in the same transaction as the handler's own work.
//!
//! A broadcast is handed out once to each receiver, and each has to handle its own copy: the layer lets those through.

use super::{Outcome, Request};
use mq_api::{BoxError, Failure, Group, MessageId, Topic};
use pin_project_lite::pin_project;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use tower_layer::Layer;
use tower_service::Service;

/// What a message is known by in a store. Each group of a topic handles a message on its own.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct IdempotencyKey {
    /// The topic.
    pub topic: Topic,
    /// The group.
    pub group: Option<Group>,
    /// The message's id, or what the layer's key function gave.
    pub id: MessageId,
}

/// Where the keys of handled messages are kept. Cloned handles share their contents.
///
/// The futures are types of the store's own, so that a store that answers at once costs no box; a store that does not care
/// uses `futures::future::BoxFuture<'static, _>`.
pub trait IdempotencyStore: Clone + Send + Sync + 'static {
    /// See [`is_done`](Self::is_done).
    type IsDone: Future<Output = Result<bool, BoxError>> + Send + 'static;
    /// See [`mark_done`](Self::mark_done).
    type MarkDone: Future<Output = Result<(), BoxError>> + Send + 'static;

    /// Whether this was marked. An error is a transient failure: the message waits and comes again, uncounted.
    fn is_done(&self, key: &IdempotencyKey) -> Self::IsDone;

    /// Marks it. Called after the handler succeeded. An error is logged, and the message acknowledged all the same: its work
    /// is done, and doing it once more is what this is there to avoid.
    fn mark_done(&self, key: &IdempotencyKey) -> Self::MarkDone;
}

/// Keys in memory: the latest `capacity` of them, known to this process alone and gone with it. Enough for tests and for one
/// process; members in several processes need a store that they share, such as a table of their database.
#[derive(Clone)]
pub struct MemoryStore(Arc<Mutex<Seen>>);

struct Seen {
    keys: HashSet<IdempotencyKey>,
    order: VecDeque<IdempotencyKey>,
    capacity: usize,
}

impl MemoryStore {
    /// Keeps at most this many keys; the oldest go first. About 150 B each.
    pub fn new(capacity: usize) -> Self {
        Self(Arc::new(Mutex::new(Seen { keys: HashSet::new(), order: VecDeque::new(), capacity })))
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IdempotencyStore for MemoryStore {
    type IsDone = Ready<Result<bool, BoxError>>;
    type MarkDone = Ready<Result<(), BoxError>>;

    fn is_done(&self, key: &IdempotencyKey) -> Self::IsDone {
        ready(Ok(self.seen().keys.contains(key)))
    }

    fn mark_done(&self, key: &IdempotencyKey) -> Self::MarkDone {
        let mut seen = self.seen();
        if seen.keys.insert(key.clone()) {
            seen.order.push_back(key.clone());
        }
        while seen.order.len() > seen.capacity {
            if let Some(oldest) = seen.order.pop_front() {
                seen.keys.remove(&oldest);
            }
        }
        ready(Ok(()))
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seen = self.seen();
        write!(f, "MemoryStore({} of {} keys)", seen.keys.len(), seen.capacity)
    }
}

/// Messages at work in this process, and who waits for each: two of one id are never at work together.
#[derive(Clone, Default)]
struct Gate(Arc<Mutex<HashMap<IdempotencyKey, Vec<Waker>>>>);

impl Gate {
    fn at_work(&self) -> MutexGuard<'_, HashMap<IdempotencyKey, Vec<Waker>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll_enter(&self, key: &IdempotencyKey, cx: &Context<'_>) -> Poll<Claim> {
        let mut at_work = self.at_work();
        if let Some(waiting) = at_work.get_mut(key) {
            if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                waiting.push(cx.waker().clone());
            }
            return Poll::Pending;
        }
        at_work.insert(key.clone(), Vec::new());
        Poll::Ready(Claim { gate: self.clone(), key: key.clone() })
    }
}

struct Claim {
    gate: Gate,
    key: IdempotencyKey,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let waiting = self.gate.at_work().remove(&self.key);
        waiting.into_iter().flatten().for_each(Waker::wake);
    }
}

type KeyOf = fn(&Request) -> MessageId;

/// Acknowledges messages that were handled before, without calling the handler. See the [module](self).
#[derive(Clone)]
pub struct IdempotentLayer<St> {
    store: St,
    key: KeyOf,
    gate: Gate,
}

impl<St: IdempotencyStore> IdempotentLayer<St> {
    /// Messages are known by their id.
    pub fn new(store: St) -> Self {
        Self { store, key: |request| request.id.clone(), gate: Gate::default() }
    }

    /// Messages are known by what `key` gives: for senders that make a new message each time they repeat themselves and put
    /// their own number into a header.
    pub fn key(mut self, key: fn(&Request) -> MessageId) -> Self {
        self.key = key;
        self
    }
}

impl<St: fmt::Debug> fmt::Debug for IdempotentLayer<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("IdempotentLayer").field(&self.store).finish()
    }
}

impl<St: Clone, S> Layer<S> for IdempotentLayer<St> {
    type Service = Idempotent<St, S>;

    fn layer(&self, inner: S) -> Self::Service {
        Idempotent { layer: self.clone(), inner }
    }
}

/// A service that skips what was handled before.
#[derive(Debug, Clone)]
pub struct Idempotent<St, S> {
    layer: IdempotentLayer<St>,
    inner: S,
}

impl<St, S> Service<Request> for Idempotent<St, S>
where
    St: IdempotencyStore,
    S: Service<Request, Response = Outcome> + Clone,
{
    type Response = Outcome;
    type Error = S::Error;
    type Future = IdempotentFuture<St, S>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let id = (self.layer.key)(&request);
        let source = request.source();
        let key = IdempotencyKey { topic: source.topic.clone(), group: source.group.clone(), id };
        // The one that said it is ready goes along; its clone is asked before the next call.
        let next = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, next);
        IdempotentFuture {
            key,
            store: self.layer.store.clone(),
            gate: self.layer.gate.clone(),
            claim: None,
            step: if source.group.is_some() { Step::Enter } else { Step::Through },
            waiting: Some((ready, request)),
        }
    }
}

pin_project! {
    #[project = StepProj]
    enum Step<C, H, M> {
        // Each receiver of a broadcast has a copy: what another handled is not done here.
        Through,
        Enter,
        Check { #[pin] check: C },
        Handle { #[pin] handler: H },
        Mark { #[pin] mark: M },
    }
}

pin_project! {
    /// A handler at work behind the store's answer.
    pub struct IdempotentFuture<St: IdempotencyStore, S: Service<Request>> {
        key: IdempotencyKey,
        store: St,
        gate: Gate,
        claim: Option<Claim>,
        // The service is called only after the store said that the message is new.
        waiting: Option<(S, Request)>,
        #[pin]
        step: Step<St::IsDone, S::Future, St::MarkDone>,
    }
}

impl<St, S> Future for IdempotentFuture<St, S>
where
    St: IdempotencyStore,
    S: Service<Request, Response = Outcome>,
{
    type Output = Result<Outcome, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let outcome = loop {
            match this.step.as_mut().project() {
                StepProj::Through => match this.waiting.take() {
                    Some((mut service, request)) => this.step.set(Step::Handle { handler: service.call(request) }),
                    None => break Ok(Outcome::Release),
                },
                StepProj::Enter => match this.gate.poll_enter(this.key, cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(claim) => {
                        *this.claim = Some(claim);
                        this.step.set(Step::Check { check: this.store.is_done(this.key) });
                    }
                },
                StepProj::Check { check } => match check.poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(true)) => break Ok(Outcome::Ack),
                    Poll::Ready(Ok(false)) => match this.waiting.take() {
                        Some((mut service, request)) => this.step.set(Step::Handle { handler: service.call(request) }),
                        None => break Ok(Outcome::Release),
                    },
                    Poll::Ready(Err(error)) => {
                        break Ok(Outcome::failed(Failure::transient(format!(
                            "the idempotency store failed: {error}"
                        ))));
                    }
                },
                StepProj::Handle { handler } => match handler.poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(Outcome::Ack)) if this.claim.is_some() => {
                        this.step.set(Step::Mark { mark: this.store.mark_done(this.key) })
                    }
                    Poll::Ready(other) => break other,
                },
                StepProj::Mark { mark } => match mark.poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(())) => break Ok(Outcome::Ack),
                    Poll::Ready(Err(error)) => {
                        tracing::error!(key = ?this.key, %error, "a handled message could not be marked; a repeat will be handled again");
                        break Ok(Outcome::Ack);
                    }
                },
            }
        };
        // Whoever waits for this message goes on.
        *this.claim = None;
        Poll::Ready(outcome)
    }
}

impl<St: IdempotencyStore, S: Service<Request>> fmt::Debug for IdempotentFuture<St, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdempotentFuture({:?})", self.key.id)
    }
}
