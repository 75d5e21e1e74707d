//! Waiting for a read, which is never dropped: an entry that the server handed out to nobody would wait for its lease.

use crate::answer::failure;
use crate::connect::Link;
use mq_api::{Error, ErrorKind};
use mq_core::Stop;
use redis::RedisError;
use std::pin::pin;
use std::time::Duration;

/// A read under way.
pub(crate) struct Attend<'a> {
    /// For `CLIENT UNBLOCK`.
    pub(crate) link: &'a Link,
    /// Cuts the block short.
    pub(crate) draining: &'a Stop,
    /// Number of the connection that reads.
    pub(crate) client: i64,
    /// How long the server may block; zero for a read that does not.
    pub(crate) block: Duration,
    /// How long past that an answer may take before the connection counts as lost.
    pub(crate) patience: Duration,
}

impl Attend<'_> {
    /// Waits for the answer.
    pub(crate) async fn answer<T>(self, read: impl Future<Output = Result<T, RedisError>>) -> Result<T, Error> {
        let mut read = pin!(read);
        let limit = self.block + self.patience;
        let mut late = pin!(tokio::time::sleep(limit));
        let mut stopping = pin!(self.draining.cancelled());
        let mut unblocked = self.block.is_zero();
        loop {
            tokio::select! { biased;
                reply = &mut read => return reply.map_err(|e| failure(e, "reading")),
                () = &mut stopping, if !unblocked => {
                    unblocked = true;
                    // Without the right the block runs out by itself.
                    let _ = self.link.query(redis::cmd("CLIENT").arg("UNBLOCK").arg(self.client)).await;
                }
                () = &mut late => {
                    let text = format!("no answer to a read within {limit:?}: the connection is taken for dead");
                    return Err(Error::new(ErrorKind::Disconnected, text));
                }
            }
        }
    }
}
