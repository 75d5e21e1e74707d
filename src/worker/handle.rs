use super::slots::{Signal, Stop};
use mq_api::{ConsumerControl, Topic};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, watch};

/// How far a worker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Phase {
    /// Not subscribed everywhere yet.
    Starting,
    /// All routes receive.
    Running,
    /// Fetches no more and finishes what it has.
    Draining,
    /// Done.
    Ended,
}

#[derive(Default)]
struct Routes {
    signals: Vec<Arc<Signal>>,
    controls: Vec<(Topic, ConsumerControl)>,
    paused: bool,
}

struct Shared {
    routes: Mutex<Routes>,
    stop: watch::Sender<Stop>,
    phase: watch::Sender<Phase>,
    idle: Arc<Notify>,
}

/// Controls a running worker from anywhere. Cheap to clone.
#[derive(Clone)]
pub struct WorkerHandle(Arc<Shared>);

impl WorkerHandle {
    pub(super) fn new() -> Self {
        let (stop, phase) = (watch::Sender::new(Stop::No), watch::Sender::new(Phase::Starting));
        Self(Arc::new(Shared { routes: Mutex::default(), stop, phase, idle: Arc::default() }))
    }

    fn routes(&self) -> MutexGuard<'_, Routes> {
        self.0.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches no more on all routes, lets the handlers finish within the worker's deadline, gives back the rest. Takes
    /// effect at the call, also before the worker runs; [`ended`](Self::ended) waits for it.
    pub fn shutdown(&self) {
        self.stop(Stop::Drain);
    }

    /// As [`shutdown`](Self::shutdown), but drops the handlers at work instead of waiting for them; their messages go back.
    /// A broker that is away is waited for no longer than a second.
    pub fn abandon(&self) {
        self.stop(Stop::Abandon);
    }

    pub(super) fn stop(&self, how: Stop) {
        self.0.stop.send_if_modified(|stop| std::mem::replace(stop, how.max(*stop)) < how);
        self.routes().signals.iter().for_each(|signal| signal.stop(how));
    }

    /// Stops fetching on all routes; handlers at work finish. Health shows it. A pause before the worker runs holds.
    pub fn pause(&self) {
        let mut routes = self.routes();
        routes.paused = true;
        routes.controls.iter().for_each(|(_, control)| control.pause());
    }

    /// Fetches again.
    pub fn resume(&self) {
        let mut routes = self.routes();
        routes.paused = false;
        routes.controls.iter().for_each(|(_, control)| control.resume());
    }

    /// The consumers of a topic's routes, to pause one alone, watch its health or read its events. Empty before the worker
    /// has subscribed.
    pub fn consumers(&self, topic: &Topic) -> Vec<ConsumerControl> {
        self.routes().controls.iter().filter(|(of, _)| of == topic).map(|(_, control)| control.clone()).collect()
    }

    /// How far the worker is.
    pub fn phase(&self) -> Phase {
        *self.0.phase.borrow()
    }

    /// Waits until all routes receive: what is sent afterwards is seen. True if they do, false if the worker ended before.
    /// Cancel-safe.
    pub async fn running(&self) -> bool {
        self.reached(Phase::Running).await == Phase::Running
    }

    /// Waits until the worker has ended. Cancel-safe.
    pub async fn ended(&self) {
        self.reached(Phase::Ended).await;
    }

    /// Deliveries that its routes have in hand or buffered, those with nothing to settle among them.
    #[cfg(feature = "memory")]
    pub(crate) fn in_hand(&self) -> usize {
        if self.phase() == Phase::Ended {
            return 0;
        }
        self.routes().controls.iter().map(|(_, control)| control.in_flight()).sum()
    }

    /// Ready when a route has become idle since the call.
    #[cfg(feature = "memory")]
    pub(crate) fn idle(&self) -> std::pin::Pin<Box<tokio::sync::futures::Notified<'_>>> {
        let mut idle = Box::pin(self.0.idle.notified());
        idle.as_mut().enable();
        idle
    }

    async fn reached(&self, wanted: Phase) -> Phase {
        let mut phases = self.0.phase.subscribe();
        // The sender lives in `self`, so this cannot fail; if it could, the worker would be gone.
        phases.wait_for(|phase| *phase >= wanted).await.map_or(Phase::Ended, |phase| *phase)
    }

    pub(super) async fn stopped(&self) {
        let mut stop = self.0.stop.subscribe();
        let _ = stop.wait_for(|stop| *stop != Stop::No).await;
    }

    pub(super) fn enter(&self, phase: Phase) {
        self.0.phase.send_if_modified(|now| std::mem::replace(now, phase.max(*now)) < phase);
    }

    /// A route receives from now on.
    pub(super) fn add(&self, topic: Topic, control: ConsumerControl) -> Arc<Signal> {
        let signal = Arc::new(Signal::new(self.0.idle.clone()));
        let mut routes = self.routes();
        if routes.paused {
            control.pause();
        }
        routes.controls.push((topic, control));
        routes.signals.push(signal.clone());
        // The order matters: `stop` sets the value first and then goes through the signals.
        let stop = *self.0.stop.borrow();
        if stop != Stop::No {
            signal.stop(stop);
        }
        signal
    }
}

impl fmt::Debug for WorkerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WorkerHandle({:?}, {} routes)", self.phase(), self.routes().signals.len())
    }
}
