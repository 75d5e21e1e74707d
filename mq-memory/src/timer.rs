//! The broker's clock work: one task that sleeps until the next thing is due. Actions run in order of their time, then of
//! their making, so that a run under a paused clock can be replayed.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

type Action = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    due: BTreeMap<(Instant, u64), Action>,
    made: u64,
    /// Counts the stops and starts: even while it runs.
    turn: u64,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
    /// It was started again.
    started: Notify,
}

/// See the module. Runs from the making of the broker until its last client goes, and again from the next that comes.
#[derive(Clone, Default)]
pub(crate) struct Timer(Arc<Shared>);

impl Timer {
    /// Runs `action` at `at` or soon after. It must not block.
    pub(crate) fn at(&self, at: Instant, action: impl FnOnce() + Send + 'static) {
        let Shared { state, changed, .. } = &*self.0;
        let mut st = state.lock();
        st.made += 1;
        let number = st.made;
        let earliest = st.due.first_key_value().is_none_or(|((first, _), _)| at < *first);
        st.due.insert((at, number), Box::new(action));
        drop(st);
        if earliest {
            changed.notify_one();
        }
    }

    /// Starts it again, unless it runs: gives what is to be spawned. What fell due meanwhile is done at once.
    pub(crate) fn start(&self) -> Option<impl Future<Output = ()> + Send + 'static> {
        {
            let mut st = self.0.state.lock();
            if st.turn.is_multiple_of(2) {
                return None;
            }
            st.turn += 1;
        }
        self.0.started.notify_waiters();
        Some(self.clone().run())
    }

    /// Ready when it is started again after this call.
    pub(crate) fn started(&self) -> Notified<'_> {
        self.0.started.notified()
    }

    /// Ends it. What is due stays: another client may come, and time has passed for the broker all the same. Actions hold
    /// nothing of the broker alive.
    pub(crate) fn stop(&self) {
        let Shared { state, changed, .. } = &*self.0;
        let mut st = state.lock();
        st.turn += 1 - st.turn % 2;
        drop(st);
        changed.notify_one();
    }

    /// Does what is due until it is stopped.
    pub(crate) fn run(self) -> impl Future<Output = ()> + Send + 'static {
        let turn = self.0.state.lock().turn;
        self.turn(turn)
    }

    async fn turn(self, turn: u64) {
        let Shared { state, changed, .. } = &*self.0;
        loop {
            let next = {
                let mut st = state.lock();
                if st.turn != turn {
                    // It may have been meant for the one that runs now.
                    changed.notify_one();
                    return;
                }
                match st.due.first_key_value() {
                    Some((&(at, _), _)) if at <= Instant::now() => st.due.pop_first().map(|(_, action)| Ok(action)),
                    Some((&(at, _), _)) => Some(Err(at)),
                    None => None,
                }
            };
            match next {
                Some(Ok(action)) => action(),
                Some(Err(at)) => tokio::select! { biased;
                    () = changed.notified() => {}
                    () = tokio::time::sleep_until(at) => {}
                },
                None => changed.notified().await,
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::Timer;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;
    use tokio::time::{Instant, sleep};

    #[tokio::test(start_paused = true)]
    async fn what_is_due_outlives_a_stop() {
        let (timer, done) = (Timer::default(), Arc::new(AtomicU32::new(0)));
        let spawn = || timer.start().map(tokio::spawn);
        let first = tokio::spawn(timer.clone().run());
        assert!(spawn().is_none(), "one at a time");
        for after in [1, 60] {
            let done = done.clone();
            timer.at(Instant::now() + Duration::from_secs(after), move || {
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        sleep(Duration::from_secs(2)).await;
        assert_eq!(done.load(Ordering::Relaxed), 1);
        timer.stop();
        // At once again, before the first has noticed.
        let second = spawn();
        assert!(first.await.is_ok() && second.is_some());
        timer.stop();
        assert!(second.unwrap().await.is_ok());
        sleep(Duration::from_secs(120)).await;
        assert_eq!(done.load(Ordering::Relaxed), 1, "nothing runs without a client");
        drop(spawn());
        sleep(Duration::from_millis(1)).await;
        assert_eq!(done.load(Ordering::Relaxed), 2, "it was due meanwhile");
    }
}
