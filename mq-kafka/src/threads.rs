//! Threads of a connection that are no tasks of its runtime: counted, so that its close waits for them, and tells of those that
//! it had to leave to themselves.

use mq_api::{Error, ErrorKind, Result};
use std::sync::Arc;
use tokio::sync::watch;

/// How many there are.
#[derive(Debug, Clone, Default)]
pub(crate) struct Threads(Arc<watch::Sender<u64>>);

struct Alive(Threads);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.0.send_modify(|n| *n -= 1);
    }
}

impl Threads {
    /// Starts one.
    pub(crate) fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<std::thread::Thread> {
        self.0.send_modify(|n| *n += 1);
        let alive = Alive(self.clone());
        let started = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            // First in, so that it is the last to go: also after a panic.
            let _alive = alive;
            work();
        });
        let started =
            started.map_err(|e| Error::new(ErrorKind::Other, format!("no thread '{name}'")).with_source(e))?;
        Ok(started.thread().clone())
    }

    /// How many there are.
    pub(crate) fn alive(&self) -> u64 {
        *self.0.borrow()
    }

    /// Waits until there is none.
    pub(crate) async fn none(&self) {
        // It fails only when the other end is gone, which is this one.
        let _ = self.0.subscribe().wait_for(|n| *n == 0).await;
    }
}

#[cfg(test)]
mod tests {
    use super::Threads;
    use std::sync::mpsc;

    #[tokio::test]
    async fn they_are_counted_until_they_end() {
        let threads = Threads::default();
        threads.none().await;
        let (end, wait) = mpsc::channel::<()>();
        let work = move || {
            let _ = wait.recv();
        };
        threads.spawn("one", work).unwrap();
        threads.spawn("two", || ()).unwrap();
        assert!((1..=2).contains(&threads.alive()));
        drop(end);
        threads.none().await;
        assert_eq!(threads.alive(), 0);
    }
}
