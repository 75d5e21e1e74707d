//! Waking members when an entry can be taken. Blocking reads wake for new entries only, never for entries that come back. So the
//! script that parks or releases one also writes a small key, and the server tells those who read that key that it changed
//! (`CLIENT TRACKING`, on the connection for commands): no polling, and no connection more. Pub/Sub would do the same, but
//! turns its connection into one whose large replies the server cuts. Where the server or the user's rights do not allow it,
//! members see what comes back within half a second: they also look by the clock.

use crate::answer::{as_text, list};
use crate::conn::Conn;
use parking_lot::Mutex;
use redis::{PushInfo, PushKind, Value};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// When a member should look.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    at: Mutex<Option<Instant>>,
    changed: Notify,
    /// The server will say when the key changes.
    armed: std::sync::atomic::AtomicBool,
}

impl Wake {
    /// An entry is due after this time.
    pub(crate) fn due_in(&self, delay: Duration) {
        let due = Instant::now() + delay;
        let mut at = self.at.lock();
        if at.is_none_or(|at| due < at) {
            *at = Some(due);
            drop(at);
            self.changed.notify_one();
        }
    }

    /// Waits until an entry is due earlier than was known; says when.
    pub(crate) async fn changed(&self) -> Option<Instant> {
        self.changed.notified().await;
        self.at.lock().take()
    }

    /// Whether the server must be asked, before the next look, to tell of the next change.
    pub(crate) fn arm(&self) -> bool {
        !self.armed.swap(true, std::sync::atomic::Ordering::Relaxed)
    }

    fn fire(&self) {
        self.armed.store(false, std::sync::atomic::Ordering::Relaxed);
        self.due_in(Duration::ZERO);
    }
}

/// All members that one connection wakes, by the key that they read.
#[derive(Debug, Default)]
pub(crate) struct Wakes {
    members: Mutex<HashMap<String, Vec<Weak<Wake>>>>,
}

impl Wakes {
    /// A member whose key this is.
    pub(crate) fn join(&self, key: &str) -> Arc<Wake> {
        let wake = Arc::new(Wake::default());
        let mut members = self.members.lock();
        members.retain(|_, all| {
            all.retain(|w| w.strong_count() > 0);
            !all.is_empty()
        });
        members.entry(key.to_owned()).or_default().push(Arc::downgrade(&wake));
        wake
    }

    /// Hands on one message of the server.
    fn tell(&self, push: PushInfo) {
        if push.kind != PushKind::Invalidate {
            return;
        }
        let keys = push.data.into_iter().next().unwrap_or_default();
        let fire = |all: &Vec<Weak<Wake>>| all.iter().filter_map(Weak::upgrade).for_each(|w| w.fire());
        let members = self.members.lock();
        match keys {
            // Everything was deleted.
            Value::Nil => members.values().for_each(fire),
            keys => list(keys).iter().filter_map(as_text).filter_map(|key| members.get(key)).for_each(fire),
        }
    }

    /// Hands on what the server says until the connection ends.
    pub(crate) async fn listen(self: Arc<Self>, mut pushed: tokio::sync::mpsc::UnboundedReceiver<PushInfo>) {
        while let Some(push) = pushed.recv().await {
            self.tell(push);
        }
    }
}

/// Asks the server to tell of changes to keys that are read on request; says whether it will.
pub(crate) async fn track(conn: &Conn) -> bool {
    let cmd = redis::cmd("CLIENT").arg("TRACKING").arg("ON").arg("OPTIN").take();
    match conn.send_packed_command(&cmd).await {
        Ok(Value::Okay) => true,
        other => {
            tracing::debug!(answer = ?other.err(), "the server does not tell of changes; members look by the clock only");
            false
        }
    }
}

/// Asks to be told of the next change of a key.
pub(crate) fn reading(key: &str) -> redis::Pipeline {
    let mut pipe = redis::pipe();
    pipe.cmd("CLIENT").arg("CACHING").arg("YES").cmd("GET").arg(key);
    pipe
}

#[cfg(test)]
mod tests {
    use super::{Wake, Wakes};
    use redis::{PushInfo, PushKind, Value};
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn the_earliest_counts() {
        let wake = Wake::default();
        let now = tokio::time::Instant::now();
        for ms in [70, 20, 50] {
            wake.due_in(Duration::from_millis(ms));
        }
        assert_eq!(wake.changed().await, Some(now + Duration::from_millis(20)));
        let more = tokio::time::timeout(Duration::from_secs(1), wake.changed()).await;
        assert!(more.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn only_members_of_the_key_are_woken() {
        let wakes = Wakes::default();
        let (one, other) = (wakes.join("a"), wakes.join("b"));
        assert!(one.arm() && other.arm() && !one.arm());
        let key = Value::Array(vec![Value::BulkString(b"a".to_vec())]);
        wakes.tell(PushInfo { kind: PushKind::Invalidate, data: vec![key] });
        assert!(one.arm() && !other.arm());
        wakes.tell(PushInfo { kind: PushKind::Invalidate, data: vec![Value::Nil] });
        assert!(other.arm());
    }
}
