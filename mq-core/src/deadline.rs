//! When a close has to be over: the earliest that any of its callers asked for.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::Instant;

/// A deadline that callers share and may bring forward.
#[derive(Debug, Clone)]
pub struct Deadline(Arc<watch::Sender<Instant>>);

impl Deadline {
    /// At this time.
    pub fn new(until: Instant) -> Self {
        Self(Arc::new(watch::Sender::new(until)))
    }

    /// Brings it forward to this time, never back.
    pub fn at_latest(&self, until: Instant) {
        self.0.send_if_modified(|at| {
            let sooner = until < *at;
            if sooner {
                *at = until;
            }
            sooner
        });
    }

    /// Does this until the deadline; `None` when that came first. Something that is ready is done also when it has passed.
    pub async fn within<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut seen = self.0.subscribe();
        let mut work = pin!(work);
        loop {
            let at = *seen.borrow_and_update();
            tokio::select! { biased;
                done = &mut work => return Some(done),
                () = tokio::time::sleep_until(at) => return None,
                // Somebody brought it forward; the sender is held here.
                _ = seen.changed() => {}
            }
        }
    }
}
