//! Keeps a session running: attach, wait for its end, fence, back off, attach again. For consumers and producers alike.

use crate::env::Env;
use crate::seam::{End, Run, Stop};
use backon::BackoffBuilder;
use futures_util::FutureExt;
use mq_api::{Error, ErrorKind, HealthState, Result};
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long a broker that is down at start is waited for, and how attempts are spaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectPolicy {
    /// Longest wait for the first success. Default 30 s: a broker that starts beside the program is up by then.
    pub first: Duration,
    /// First pause between attempts. Default 100 ms.
    pub min_pause: Duration,
    /// Longest pause. Default 2 s: fetching again at most that long after the broker is back.
    pub max_pause: Duration,
    /// Longest single attempt. Default 10 s: a half-open broker must not hold it for ever.
    pub attempt: Duration,
}

impl Default for ConnectPolicy {
    fn default() -> Self {
        Self {
            first: Duration::from_secs(30),
            min_pause: Duration::from_millis(100),
            max_pause: Duration::from_secs(2),
            attempt: Duration::from_secs(10),
        }
    }
}

impl ConnectPolicy {
    /// The pauses between attempts: doubled each time, from the first to the longest, without end. [`Env::jittered`] spreads them.
    pub fn pauses(&self) -> impl Iterator<Item = Duration> + Send + use<> {
        backon::ExponentialBuilder::default()
            .with_min_delay(self.min_pause)
            .with_max_delay(self.max_pause)
            .without_max_times()
            .build()
    }
}

/// What a supervised thing does at each turn.
pub(crate) trait Supervised: Send + Sync + 'static {
    /// One attempt to start a session; `again` when one ran before.
    fn start(&self, generation: u64, again: bool) -> impl Future<Output = Result<Run>> + Send;
    /// A session runs.
    fn running(&self);
    /// A session ended, or an attempt failed: fence, and tell.
    fn lost(&self, state: HealthState, why: &Error);
    /// It is over.
    fn over(&self, error: Option<Error>);
}

/// Whether no retry before the first success can mend it.
fn fails_at_once(error: &Error) -> bool {
    use ErrorKind as K;
    matches!(
        error.kind(),
        K::Auth
            | K::Permission
            | K::Tls
            | K::Topology
            | K::Unsupported
            | K::Config
            | K::InvalidName
            | K::NotFound
            | K::NotBuilt
    )
}

fn panicked() -> Error {
    Error::new(ErrorKind::Other, "the driver panicked; its message was printed where panics are")
}

/// Runs until `stop`, or until a fatal end. `first` gets the outcome of the first start.
pub(crate) async fn supervise<S: Supervised>(
    it: Arc<S>,
    env: Env,
    policy: ConnectPolicy,
    stop: Stop,
    first: oneshot::Sender<Result<()>>,
) {
    let mut first = Some(first);
    let mut generation = 0;
    let give_up = env.after(policy.first);
    let mut pauses = policy.pauses();
    loop {
        generation += 1;
        // A panic of a driver is the loss of its session, not the silent end of the consumer.
        let start = AssertUnwindSafe(it.start(generation, first.is_none())).catch_unwind();
        let attempt = tokio::time::timeout(policy.attempt, start);
        let started = tokio::select! { biased;
            () = stop.cancelled() => break,
            started = attempt => match started {
                Ok(started) => started.unwrap_or_else(|_| Err(panicked())),
                Err(_) => {
                    Err(Error::new(ErrorKind::Timeout, format!("the broker did not answer within {:?}", policy.attempt)))
                }
            },
        };
        let error = match started {
            Ok(run) => {
                it.running();
                if let Some(first) = first.take() {
                    // Nobody waits any more: the caller was cancelled, and its stop follows.
                    let _ = first.send(Ok(()));
                }
                let began = env.now();
                let end = AssertUnwindSafe(run).catch_unwind().await.unwrap_or_else(|_| End::Lost(panicked()));
                if env.now() - began > policy.max_pause {
                    pauses = policy.pauses();
                }
                match end {
                    End::Closed => break,
                    End::Lost(error) if stop.is_cancelled() => {
                        it.lost(HealthState::Closed, &error);
                        break;
                    }
                    End::Lost(error) => error,
                    End::Fatal(error) => {
                        it.lost(HealthState::Failed, &error);
                        return it.over(Some(error));
                    }
                }
            }
            Err(error) => {
                if let Some(waiting) = &first
                    && (fails_at_once(&error) || env.now() >= give_up || waiting.is_closed())
                {
                    it.lost(HealthState::Failed, &error);
                    if let Some(first) = first.take() {
                        let _ = first.send(Err(error));
                    }
                    return it.over(None);
                }
                error
            }
        };
        let state = if first.is_some() { HealthState::Connecting } else { HealthState::Reconnecting };
        it.lost(state, &error);
        let next = env.jittered(pauses.next().unwrap_or(policy.max_pause));
        tokio::select! { biased;
            () = stop.cancelled() => break,
            () = tokio::time::sleep(next) => {}
        }
    }
    if let Some(first) = first.take() {
        let _ = first.send(Err(Error::closed("the connection")));
    }
    it.over(None);
}
