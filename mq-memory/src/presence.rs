//! Who is there to see the broker's clock go on: a connection, and what was made with it, since a program may keep a consumer and
//! let go of the handle that it came from.

use crate::core::{Core, Holder};
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::runtime::Id;

/// Counts as one client of the broker until it leaves, or nobody holds it any more.
pub(crate) struct Presence {
    core: Arc<Core>,
    _hold: Arc<Holder>,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// The runtimes in which it is used: the broker's clock runs in each.
    runtimes: Vec<Id>,
    /// Apart from the connection's `closed`, since a close may be dropped midway and called again.
    left: bool,
}

impl Presence {
    pub(crate) fn new(core: &Arc<Core>) -> Arc<Self> {
        core.clients.fetch_add(1, std::sync::atomic::Ordering::AcqRel);
        let presence = Arc::new(Self { core: core.clone(), _hold: core.hold(), seen: Mutex::default() });
        presence.be_here();
        presence
    }

    /// The broker's clock runs in this runtime from now on, as long as this one is there.
    pub(crate) fn be_here(&self) {
        let here = self.core.env.here().id();
        let mut seen = self.seen.lock();
        if seen.left || seen.runtimes.contains(&here) {
            return;
        }
        seen.runtimes.push(here);
        if let Some(run) = self.core.timer.host(here) {
            self.core.env.spawn(run);
        }
    }

    /// Counts as a client no more; says whether it was the last.
    pub(crate) fn leave(&self) -> bool {
        let mut seen = self.seen.lock();
        if std::mem::replace(&mut seen.left, true) {
            return false;
        }
        seen.runtimes.drain(..).for_each(|runtime| self.core.timer.leave(runtime));
        self.core.clients.fetch_sub(1, std::sync::atomic::Ordering::AcqRel) == 1
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.leave();
    }
}
