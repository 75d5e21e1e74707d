//! Clock, randomness and tasks: everything that a run depends on besides its input, in one place, so that a simulation can
//! replay a run and close can prove that nothing is left.

use mq_api::{Error, ErrorKind, LONGEST, Result};
use parking_lot::Mutex;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

/// Cheap to clone.
#[derive(Clone)]
pub struct Env(Arc<Inner>);

struct Inner {
    handle: Handle,
    rng: Mutex<fastrand::Rng>,
    tasks: TaskTracker,
    /// Wall clock at the start.
    start: (SystemTime, Instant),
    /// Whether wall time is the start plus what tokio's clock says: in a seeded run, and once that clock was seen paused.
    /// Else it is the system's, which costs half as much.
    virtual_time: AtomicBool,
    own: Option<OwnThread>,
}

struct OwnThread {
    stop: tokio::sync::watch::Sender<bool>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
    ended: Arc<AtomicBool>,
}

impl Env {
    /// On the caller's runtime: for the in-memory broker, whose time may be paused.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] outside a tokio runtime.
    pub fn current(seed: Option<u64>) -> Result<Self> {
        let handle = Handle::try_current().map_err(|e| {
            Error::new(ErrorKind::Config, "anymq needs a tokio runtime; call it from #[tokio::main] or block_on")
                .with_source(e)
        })?;
        Ok(Self::make(handle, seed, None))
    }

    /// On a thread of the library's own: for brokers behind a network, so that an application that blocks its runtime loses
    /// no lease, heartbeat or acknowledgement. [`shut_down`](Self::shut_down) ends it.
    ///
    /// # Errors
    /// [`ErrorKind::Other`] when the operating system gives no thread.
    pub fn own_thread(name: &str, seed: Option<u64>) -> Result<Self> {
        let no_thread = |e: std::io::Error| Error::new(ErrorKind::Other, "no thread for the connection").with_source(e);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(no_thread)?;
        let handle = runtime.handle().clone();
        let (stop, mut stopped) = tokio::sync::watch::channel(false);
        let ended = Arc::new(AtomicBool::new(false));
        let end = ended.clone();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                // An error means that every `Env` is gone.
                runtime.block_on(async { while !*stopped.borrow_and_update() && stopped.changed().await.is_ok() {} });
                runtime.shutdown_timeout(Duration::from_millis(100));
                end.store(true, Ordering::Release);
            })
            .map_err(no_thread)?;
        Ok(Self::make(handle, seed, Some(OwnThread { stop, thread: Mutex::new(Some(thread)), ended })))
    }

    fn make(handle: Handle, seed: Option<u64>, own: Option<OwnThread>) -> Self {
        let rng = seed.map_or_else(fastrand::Rng::new, fastrand::Rng::with_seed);
        // A seeded run must not depend on the day it runs: 2026-01-01.
        let wall = match seed {
            Some(_) => SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600),
            None => SystemTime::now(),
        };
        let start = (wall, Instant::now());
        let virtual_time = AtomicBool::new(seed.is_some() || is_paused());
        Self(Arc::new(Inner { handle, rng: Mutex::new(rng), tasks: TaskTracker::new(), start, virtual_time, own }))
    }

    /// Looks whether tokio's clock was paused since. Every handle that is opened looks, since a test may pause the clock after
    /// it connected.
    pub fn notice_pause(&self) {
        if !self.0.virtual_time.load(Ordering::Relaxed) && is_paused() {
            self.0.virtual_time.store(true, Ordering::Relaxed);
        }
    }

    /// Tokio's clock.
    #[inline]
    pub fn now(&self) -> Instant {
        Instant::now()
    }

    /// Wall clock; follows tokio's clock where that is paused, so that paused time moves it too.
    #[inline]
    pub fn wall(&self) -> SystemTime {
        match self.0.virtual_time.load(Ordering::Relaxed) {
            false => SystemTime::now(),
            true => self.virtual_wall(),
        }
    }

    #[cold]
    #[inline(never)]
    fn virtual_wall(&self) -> SystemTime {
        self.0.start.0 + self.0.start.1.elapsed()
    }

    /// That much later, or as late as can be.
    pub fn after(&self, time: Duration) -> Instant {
        later(self.now(), time)
    }

    /// A random number.
    pub fn random(&self) -> u64 {
        self.0.rng.lock().u64(..)
    }

    /// This pause or up to a quarter more, so that a fleet does not come back in step.
    pub fn jittered(&self, pause: Duration) -> Duration {
        pause + pause.mul_f64(0.25 * self.random_share())
    }

    /// A random number in 0..1.
    pub fn random_share(&self) -> f64 {
        self.0.rng.lock().f64()
    }

    /// Spawns a task that is counted until it ends.
    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.0.tasks.spawn_on(task, &self.here())
    }

    /// The runtime that tasks are spawned on now: the own one, or the caller's. Handles of one broker may be used in several
    /// runtimes, of which the first may end, or rest, while the others go on.
    pub fn here(&self) -> Handle {
        let callers = if self.0.own.is_none() { Handle::try_current().ok() } else { None };
        callers.unwrap_or_else(|| self.0.handle.clone())
    }

    /// Tasks that run now. Zero after close.
    pub fn tasks(&self) -> usize {
        self.0.tasks.len()
    }

    /// Waits until no task is left.
    pub async fn no_tasks(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
        self.0.tasks.reopen();
    }

    /// The runtime that tasks are spawned on.
    pub fn handle(&self) -> &Handle {
        &self.0.handle
    }

    /// Ends the own thread, if there is one, within `deadline`. True if it ended.
    pub async fn shut_down(&self, deadline: Duration) -> bool {
        let Some(own) = &self.0.own else { return true };
        own.stop.send_replace(true);
        let until = std::time::Instant::now() + deadline.min(LONGEST);
        // The thread cannot signal through the runtime that it is taking down, so its flag is looked at.
        while !own.ended.load(Ordering::Acquire) {
            if std::time::Instant::now() >= until {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let thread = own.thread.lock().take();
        if let Some(thread) = thread {
            // It has set its flag as its last act.
            return thread.join().is_ok();
        }
        true
    }
}

/// That much later, cut to what a clock can show: `Duration::MAX` means for ever, and must not panic.
pub(crate) fn later(now: Instant, time: Duration) -> Instant {
    now + time.min(LONGEST)
}

/// Whether tokio's clock stands still while the system's runs. Takes a microsecond.
fn is_paused() -> bool {
    let (tokios, systems) = (Instant::now(), std::time::Instant::now());
    while systems.elapsed() < Duration::from_micros(1) {}
    Instant::now() == tokios
}

impl Drop for OwnThread {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

impl std::fmt::Debug for Env {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Env({} tasks)", self.tasks())
    }
}

#[cfg(test)]
mod tests {
    use super::Env;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn paused_time_moves_the_wall_clock() {
        let env = Env::current(None).unwrap();
        let before = env.wall();
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!(env.wall().duration_since(before).unwrap(), Duration::from_secs(3600));
    }

    #[tokio::test]
    async fn a_pause_after_the_start_is_noticed() {
        let env = Env::current(None).unwrap();
        tokio::time::pause();
        env.notice_pause();
        let before = env.wall();
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(env.wall().duration_since(before).unwrap(), Duration::from_secs(60));
    }
}
