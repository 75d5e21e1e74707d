//! The broker's clock work: what is due at a time. Actions run one after another, in order of their time, then of their making,
//! so that a run under a paused clock can be replayed.
//!
//! Every runtime in which a client uses the broker has one task that sleeps until the next thing is due, so that the clock goes
//! on when one of several runtimes ends, or is not driven.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::runtime::Id;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

type Action = Box<dyn FnOnce() + Send>;

/// The task of one runtime.
struct Host {
    runtime: Id,
    changed: Arc<Notify>,
    /// Clients that use the broker there.
    clients: usize,
}

#[derive(Default)]
struct State {
    due: BTreeMap<(Instant, u64), Action>,
    made: u64,
    hosts: Vec<Host>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Held while actions run.
    order: Mutex<()>,
    /// A task was started.
    started: Notify,
}

enum Next {
    At(Instant),
    Never,
    End,
}

/// See the module. Runs while a client is there.
#[derive(Clone, Default)]
pub(crate) struct Timer(Arc<Shared>);

impl Timer {
    /// Runs `action` at `at` or soon after. It must not block.
    pub(crate) fn at(&self, at: Instant, action: impl FnOnce() + Send + 'static) {
        let mut st = self.0.state.lock();
        st.made += 1;
        let number = st.made;
        let earliest = st.due.first_key_value().is_none_or(|((first, _), _)| at < *first);
        st.due.insert((at, number), Box::new(action));
        if earliest {
            st.hosts.iter().for_each(|host| host.changed.notify_one());
        }
    }

    /// A client uses the broker in this runtime: gives what is to be spawned there, unless that runs already. What fell due
    /// meanwhile is done at once.
    pub(crate) fn host(&self, runtime: Id) -> Option<impl Future<Output = ()> + Send + 'static> {
        let changed = Arc::new(Notify::new());
        {
            let mut st = self.0.state.lock();
            if let Some(host) = st.hosts.iter_mut().find(|host| host.runtime == runtime) {
                host.clients += 1;
                return None;
            }
            st.hosts.push(Host { runtime, changed: changed.clone(), clients: 1 });
        }
        self.0.started.notify_waiters();
        // Made here, so that it is also dropped when the task never runs.
        let here = Here { timer: self.clone(), changed };
        Some(here.run())
    }

    /// A client leaves this runtime; the last takes the task with it. What is due stays: another client may come, and time has
    /// passed for the broker all the same. Actions hold nothing of the broker alive.
    pub(crate) fn leave(&self, runtime: Id) {
        let mut st = self.0.state.lock();
        let Some(at) = st.hosts.iter().position(|host| host.runtime == runtime) else { return };
        st.hosts[at].clients -= 1;
        if st.hosts[at].clients == 0 {
            st.hosts.swap_remove(at).changed.notify_one();
        }
    }

    /// Ready when a task is started after this call.
    pub(crate) fn started(&self) -> Notified<'_> {
        self.0.started.notified()
    }
}

/// The task of one runtime. With the runtime it is dropped, and the runtime is no host any more.
struct Here {
    timer: Timer,
    changed: Arc<Notify>,
}

impl Here {
    /// Does what is due; says when the next is.
    fn work(&self) -> Next {
        let Shared { state, order, .. } = &*self.timer.0;
        let _one_at_a_time = order.lock();
        loop {
            let mut st = state.lock();
            if !st.hosts.iter().any(|host| Arc::ptr_eq(&host.changed, &self.changed)) {
                return Next::End;
            }
            match st.due.first_key_value() {
                Some((&(at, _), _)) if at > Instant::now() => return Next::At(at),
                None => return Next::Never,
                Some(_) => {}
            }
            let action = st.due.pop_first();
            drop(st);
            if let Some((_, action)) = action {
                action();
            }
        }
    }

    async fn run(self) {
        loop {
            match self.work() {
                Next::At(at) => tokio::select! { biased;
                    () = self.changed.notified() => {}
                    () = tokio::time::sleep_until(at) => {}
                },
                Next::Never => self.changed.notified().await,
                Next::End => return,
            }
        }
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        let mut st = self.timer.0.state.lock();
        st.hosts.retain(|host| !Arc::ptr_eq(&host.changed, &self.changed));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::Timer;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;
    use tokio::runtime::Handle;
    use tokio::time::{Instant, sleep};

    #[tokio::test(start_paused = true)]
    async fn what_is_due_outlives_a_stop() {
        let (timer, done) = (Timer::default(), Arc::new(AtomicU32::new(0)));
        let here = Handle::current().id();
        let spawn = || timer.host(here).map(tokio::spawn);
        let first = spawn();
        assert!(spawn().is_none(), "one at a time");
        timer.leave(here);
        for after in [1, 60] {
            let done = done.clone();
            timer.at(Instant::now() + Duration::from_secs(after), move || {
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        sleep(Duration::from_secs(2)).await;
        assert_eq!(done.load(Ordering::Relaxed), 1);
        timer.leave(here);
        // At once again, before the first has noticed.
        let second = spawn();
        assert!(first.unwrap().await.is_ok() && second.is_some());
        timer.leave(here);
        assert!(second.unwrap().await.is_ok());
        sleep(Duration::from_secs(120)).await;
        assert_eq!(done.load(Ordering::Relaxed), 1, "nothing runs without a client");
        drop(spawn());
        sleep(Duration::from_millis(1)).await;
        assert_eq!(done.load(Ordering::Relaxed), 2, "it was due meanwhile");
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_is_dropped_makes_room_for_another() {
        let timer = Timer::default();
        let here = Handle::current().id();
        drop(timer.host(here));
        assert!(timer.host(here).is_some(), "its runtime is no host any more");
    }
}
