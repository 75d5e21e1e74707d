//! Whether a queue is still bound. Nobody is told when an exchange is deleted: its queues stand, their consumers run and hear
//! nothing, also when somebody else makes it again. So what was bound is bound once more now and then: that mends the one, and is
//! refused over the other, so that the session begins anew and makes it. On a channel of its own, which such a refusal closes:
//! what the broker has to say of the consumer, as that its queue was deleted, must not go with it.

use crate::connect::{Connections, Role};
use crate::options::GroupOptions;
use crate::topology::{Declarer, Place};
use futures_util::future::BoxFuture;
use mq_api::{Error, ErrorKind, Provisioning, Result};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How often: a binding that exists costs the server a look, and some hundred groups of one client do not add up to much.
const EVERY: Duration = Duration::from_secs(10);

/// See the module.
pub(crate) struct Bound {
    connections: Arc<Connections>,
    queue: String,
    exchange: String,
    options: GroupOptions,
    next: Instant,
    asking: Option<BoxFuture<'static, Result<()>>>,
}

impl Bound {
    /// For a queue that is bound to this place by `how`; none where there is nothing that is ours to mend.
    pub(crate) fn new(
        connections: &Arc<Connections>,
        queue: &str,
        place: &Place,
        options: &GroupOptions,
        how: Provisioning,
    ) -> Option<Self> {
        let (Place::Topic(exchange) | Place::Exchange(exchange)) = place else { return None };
        (how == Provisioning::Create).then(|| Self {
            connections: connections.clone(),
            queue: queue.to_owned(),
            exchange: exchange.clone(),
            options: options.clone(),
            next: Instant::now() + EVERY,
            asking: None,
        })
    }

    fn ask(&self) -> BoxFuture<'static, Result<()>> {
        let (connections, queue, exchange) = (self.connections.clone(), self.queue.clone(), self.exchange.clone());
        let options = self.options.clone();
        Box::pin(async move {
            let mut declarer = Declarer::new(&connections, Role::Consume, Provisioning::Create);
            declarer.bind(&queue, &exchange, &options).await?;
            declarer.done().await;
            Ok(())
        })
    }

    /// Ready when it cannot be bound any more: of kind `NotFound` when the queue or its exchange is gone. A broker that does not
    /// answer has refused nothing, and is asked again. Cancel safe: a question under way is waited for next time.
    pub(crate) async fn lost(bound: &mut Option<Self>) -> Error {
        let Some(it) = bound else { return std::future::pending().await };
        loop {
            if it.asking.is_none() {
                tokio::time::sleep_until(it.next).await;
                it.next = Instant::now() + EVERY;
                it.asking = Some(it.ask());
            }
            let Some(asking) = &mut it.asking else { continue };
            let answer = asking.await;
            it.asking = None;
            match answer {
                Err(error) if error.kind() != ErrorKind::Timeout => return error,
                _ => {}
            }
        }
    }

    /// Whether it is the queue that is not there, and not the exchange: the broker says which in its words only.
    pub(crate) fn misses_queue(error: &Error) -> bool {
        error.kind() == ErrorKind::NotFound && error.to_string().contains("no queue")
    }
}
