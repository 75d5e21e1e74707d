//! Whether a queue is still bound. Nobody is told when an exchange is deleted: its queues stand, their consumers run and hear
//! nothing, also when somebody else makes it again. So what was bound is bound once more now and then: that mends the one, and is
//! refused over the other, so that the session begins anew and makes it. On a channel of its own, which such a refusal closes:
//! what the broker has to say of the consumer, as that its queue was deleted, must not go with it.

use crate::connect::{ANSWER, Connections, Role, within};
use crate::fault::fault;
use crate::options::GroupOptions;
use crate::topology::{Place, short};
use futures_util::future::BoxFuture;
use lapin::options::QueueBindOptions;
use lapin::types::{FieldTable, ShortString};
use mq_api::{Error, ErrorKind, Provisioning, Result};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How often: a binding that exists costs the server a look, and some hundred groups of one client do not add up to much.
const EVERY: Duration = Duration::from_secs(10);

/// See the module.
pub(crate) struct Bound {
    connections: Arc<Connections>,
    queue: ShortString,
    exchange: ShortString,
    bindings: Vec<(ShortString, FieldTable)>,
    next: Instant,
    asking: Option<BoxFuture<'static, Result<()>>>,
}

impl Bound {
    /// For a queue that is bound to this place by `how`; none where there is nothing that is ours to mend.
    pub(crate) fn new(
        connections: &Arc<Connections>,
        queue: ShortString,
        place: &Place,
        options: &GroupOptions,
        how: Provisioning,
    ) -> Result<Option<Self>> {
        let (Place::Topic(exchange) | Place::Exchange(exchange)) = place else { return Ok(None) };
        if how != Provisioning::Create {
            return Ok(None);
        }
        let bindings = options.bindings().into_iter().map(|(key, arguments)| Ok((short(&key)?, arguments)));
        Ok(Some(Self {
            connections: connections.clone(),
            queue,
            exchange: short(exchange)?,
            bindings: bindings.collect::<Result<_>>()?,
            next: Instant::now() + EVERY,
            asking: None,
        }))
    }

    fn ask(&self) -> BoxFuture<'static, Result<()>> {
        let (connections, queue, exchange) = (self.connections.clone(), self.queue.clone(), self.exchange.clone());
        let bindings = self.bindings.clone();
        Box::pin(async move {
            let channel = connections.channel(Role::Consume).await?;
            for (key, arguments) in bindings {
                let options = QueueBindOptions::default();
                let bind = channel.queue_bind(queue.clone(), exchange.clone(), key, options, arguments);
                bind.await.map_err(|error| fault(format!("bind to exchange '{exchange}'"), error))?;
            }
            // A channel that cannot be closed in time goes with its connection.
            let _ = within(ANSWER, "close a channel", channel.close(200, "OK".into())).await;
            Ok(())
        })
    }

    /// Ready when it cannot be bound any more: of kind `NotFound` when the queue or its exchange is gone. Cancel safe: a question under way is waited for next time.
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
            if let Err(error) = answer {
                return error;
            }
        }
    }

    /// Whether it is the queue that is not there, and not the exchange: the broker says which in its words only.
    pub(crate) fn misses_queue(error: &Error) -> bool {
        error.kind() == ErrorKind::NotFound && error.to_string().contains("no queue")
    }
}
