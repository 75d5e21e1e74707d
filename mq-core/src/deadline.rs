//! A close that several ask for: the first call does it, all have its report, and it is over by the earliest deadline of all.

use futures_core::future::BoxFuture;
use mq_api::CloseReport;
use parking_lot::Mutex;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

type Told = watch::Sender<Option<CloseReport>>;

/// Whether a close was asked for, and what all who asked wait for.
#[derive(Debug, Default)]
pub struct Closing(Mutex<Option<(Deadline, watch::Receiver<Option<CloseReport>>)>>);

/// What the first who asks has to do: to close by the deadline, and to tell the report. When it is dropped, all have an empty one.
#[derive(Debug)]
pub struct Begun {
    /// Of all calls.
    pub deadline: Deadline,
    told: Told,
}

impl Begun {
    /// It is closed.
    pub fn tell(&self, report: CloseReport) {
        self.told.send_replace(Some(report));
    }
}

impl Closing {
    /// Whether somebody asked.
    pub fn is_begun(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Asks for a close by this time: the work, for the first call, and the report.
    pub fn ask(&self, until: Instant) -> (Option<Begun>, BoxFuture<'static, CloseReport>) {
        let (begun, mut done) = match &mut *self.0.lock() {
            Some((deadline, done)) => {
                deadline.at_latest(until);
                (None, done.clone())
            }
            none => {
                let ((told, done), deadline) = (watch::channel(None), Deadline::new(until));
                *none = Some((deadline.clone(), done.clone()));
                (Some(Begun { deadline, told }), done)
            }
        };
        let report = async move { done.wait_for(Option::is_some).await.ok().and_then(|r| *r).unwrap_or_default() };
        (begun, Box::pin(report))
    }
}

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
        self.within_or(Duration::ZERO, work).await
    }

    /// As [`within`](Self::within), with a moment from now on at least.
    pub(crate) async fn within_or<T>(&self, moment: Duration, work: impl Future<Output = T>) -> Option<T> {
        let least = Instant::now() + moment;
        let mut seen = self.0.subscribe();
        let mut work = pin!(work);
        loop {
            let at = least.max(*seen.borrow_and_update());
            tokio::select! { biased;
                done = &mut work => return Some(done),
                () = tokio::time::sleep_until(at) => return None,
                // Somebody brought it forward; the sender is held here.
                _ = seen.changed() => {}
            }
        }
    }
}
