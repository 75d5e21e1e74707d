//! Waking members when an entry can be taken. Blocking reads wake for new entries only, never for entries that come back, so the
//! script that parks or releases one publishes when it is due, and every member of the group listens on the connection that it
//! reads with. A message that is lost, or a user without rights to the channel, costs half a second: members also look by the
//! clock.

use crate::answer::as_text;
use crate::answer::failure;
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// When the next entry is due, as far as somebody said.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    at: Mutex<Option<Instant>>,
    changed: Notify,
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
}

/// What a member listens to.
pub(crate) type Pushes = tokio::sync::mpsc::UnboundedReceiver<PushInfo>;

/// Listens; says whether the user may.
pub(crate) async fn listen(conn: &mut MultiplexedConnection, channel: &str) -> bool {
    match conn.subscribe(channel).await {
        Ok(()) => true,
        Err(error) => {
            let error = failure(error, "listening for entries that come back");
            tracing::debug!(%error, channel, "members look by the clock only; grant the channel to have them woken at once");
            false
        }
    }
}

/// What one message says, unless this member said it itself: `delay in ms:member`.
pub(crate) fn due_of(push: &PushInfo, me: &str) -> Option<Duration> {
    if push.kind != PushKind::Message {
        return None;
    }
    let (delay, from) = push.data.get(1).and_then(as_text)?.split_once(':')?;
    (from != me).then_some(Duration::from_millis(delay.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::{Wake, due_of};
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

    #[test]
    fn a_member_does_not_wake_itself() {
        let push = |text: &str| PushInfo {
            kind: PushKind::Message,
            data: vec![Value::BulkString(b"c".to_vec()), Value::BulkString(text.as_bytes().to_vec())],
        };
        assert_eq!(due_of(&push("15:b"), "a"), Some(Duration::from_millis(15)));
        assert_eq!(due_of(&push("15:a"), "a"), None);
        assert_eq!(due_of(&push("nonsense"), "a"), None);
    }
}
