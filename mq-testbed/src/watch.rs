//! A server that ends although nobody ended it: said at once, since what waits for it waits for many minutes.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

use crate::process::tail;
use crate::{Kind, table};

/// Between two looks at all servers of this process.
const LOOK: Duration = Duration::from_secs(1);
/// What [`end_with_a_server`] ends with: `EX_SOFTWARE` of sysexits.h.
const ENDED: i32 = 70;

static ALL: Mutex<Vec<One>> = Mutex::new(Vec::new());
static FATAL: AtomicBool = AtomicBool::new(false);

struct One {
    number: u64,
    kind: Kind,
    pid: i32,
    log: PathBuf,
}

/// A server that is expected to run until this is dropped.
pub(crate) struct Watched {
    number: u64,
}

impl Watched {
    pub(crate) fn new(kind: Kind, pid: i32, log: PathBuf) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        static BEGUN: Once = Once::new();
        BEGUN.call_once(|| drop(thread::spawn(watch)));
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        all().push(One { number, kind, pid, log });
        Self { number }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        all().retain(|one| one.number != self.number);
    }
}

/// From now on this process ends, with exit code 70, when one of its servers ends that it did not stop or kill itself. For a
/// suite, whose every further test would wait for its full time.
pub fn end_with_a_server() {
    FATAL.store(true, Ordering::Relaxed);
}

fn all() -> MutexGuard<'static, Vec<One>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watch() {
    loop {
        thread::park_timeout(LOOK);
        let mut all = all();
        all.retain(|One { kind, pid, log, .. }| {
            let lives = table::is_alive(*pid);
            if !lives {
                eprintln!(
                    "\n{kind} (process {pid}) ended though nobody ended it here; the end of {}:\n{}",
                    log.display(),
                    tail(log)
                );
                if FATAL.load(Ordering::Relaxed) {
                    std::process::exit(ENDED);
                }
            }
            lives
        });
    }
}
