//! The broker's clock work: one task that sleeps until the next thing is due. Actions run in order of their time, then of
//! their making, so that a run under a paused clock can be replayed.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::time::Instant;

type Action = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    due: BTreeMap<(Instant, u64), Action>,
    made: u64,
    stopped: bool,
}

#[derive(Clone, Default)]
pub(crate) struct Timer(Arc<(Mutex<State>, Notify)>);

impl Timer {
    /// Runs `action` at `at` or soon after. It must not block.
    pub(crate) fn at(&self, at: Instant, action: impl FnOnce() + Send + 'static) {
        let (state, changed) = &*self.0;
        let mut st = state.lock();
        if st.stopped {
            return;
        }
        st.made += 1;
        let number = st.made;
        let earliest = st.due.first_key_value().is_none_or(|((first, _), _)| at < *first);
        st.due.insert((at, number), Box::new(action));
        drop(st);
        if earliest {
            changed.notify_one();
        }
    }

    /// Ends [`run`](Self::run) and forgets what is due.
    pub(crate) fn stop(&self) {
        let (state, changed) = &*self.0;
        let due = {
            let mut st = state.lock();
            st.stopped = true;
            std::mem::take(&mut st.due)
        };
        drop(due);
        changed.notify_one();
    }

    pub(crate) async fn run(self) {
        let (state, changed) = &*self.0;
        loop {
            let next = {
                let mut st = state.lock();
                if st.stopped {
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
