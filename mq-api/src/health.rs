use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::SystemTime;

/// What a consumer, producer or connection is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HealthState {
    /// Not yet connected for the first time.
    Connecting,
    /// A consumer that fetches, or a producer or connection that works.
    Running,
    /// Paused by the program, or for a while after a transient failure; the reason says which.
    Paused,
    /// All that may be in flight is in flight; fetching goes on when the application settles.
    Backpressured,
    /// Works, but something needs attention: dead letters cannot be written, a partition waits behind delayed keys.
    Degraded,
    /// The connection was lost and is being re-made.
    Reconnecting,
    /// Ended by an error that no retry can mend.
    Failed,
    /// Closed by the program.
    Closed,
}

/// A state, why, and since when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// What it is doing.
    pub state: HealthState,
    /// Why; empty when all is well.
    pub reason: Arc<str>,
    /// Since when.
    pub since: SystemTime,
}

struct Shared {
    version: u64,
    health: Health,
    wakers: Vec<Waker>,
}

/// Watches a [`Health`]. Cheap to clone; each clone notices changes on its own.
#[derive(Clone)]
pub struct HealthWatch {
    shared: Arc<Mutex<Shared>>,
    seen: u64,
}

/// Sets a [`Health`]. For backends.
#[derive(Clone)]
pub struct HealthSetter(Arc<Mutex<Shared>>);

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HealthSetter {
    /// Starts in `state`.
    pub fn new(state: HealthState, now: SystemTime) -> Self {
        let health = Health { state, reason: "".into(), since: now };
        Self(Arc::new(Mutex::new(Shared { version: 0, health, wakers: Vec::new() })))
    }

    /// Changes it; the same state and reason again change nothing.
    pub fn set(&self, state: HealthState, reason: impl AsRef<str>, now: SystemTime) {
        let mut shared = lock(&self.0);
        if shared.health.state == state && *shared.health.reason == *reason.as_ref() {
            return;
        }
        // Closed and failed are final: a supervisor that ends late must not bring it back.
        if matches!(shared.health.state, HealthState::Closed) {
            return;
        }
        shared.health = Health { state, reason: reason.as_ref().into(), since: now };
        shared.version += 1;
        let wakers = std::mem::take(&mut shared.wakers);
        drop(shared);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// The state now.
    pub fn state(&self) -> HealthState {
        lock(&self.0).health.state
    }

    /// A watch.
    pub fn watch(&self) -> HealthWatch {
        HealthWatch { shared: self.0.clone(), seen: 0 }
    }
}

impl HealthWatch {
    /// The health now.
    pub fn current(&self) -> Health {
        lock(&self.shared).health.clone()
    }

    /// Waits for the next change that this watch has not shown yet. Cancel-safe.
    pub async fn changed(&mut self) -> Health {
        poll_fn(|cx| {
            let mut shared = lock(&self.shared);
            if shared.version != self.seen {
                self.seen = shared.version;
                return Poll::Ready(shared.health.clone());
            }
            if !shared.wakers.iter().any(|w| w.will_wake(cx.waker())) {
                shared.wakers.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    /// Waits until the state is as wanted; ready at once if it is. Cancel-safe.
    pub async fn wait_for(&mut self, wanted: impl Fn(&Health) -> bool) -> Health {
        loop {
            let current = {
                let shared = lock(&self.shared);
                self.seen = shared.version;
                shared.health.clone()
            };
            if wanted(&current) {
                return current;
            }
            self.changed().await;
        }
    }
}

impl fmt::Debug for HealthWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.current(), f)
    }
}

impl fmt::Debug for HealthSetter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&lock(&self.0).health, f)
    }
}
