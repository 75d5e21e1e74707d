//! Whether a queue is still bound. Nobody is told when an exchange is deleted: its queues stand, their consumers run and hear
//! nothing, also when somebody else makes it again. So what was bound is bound once more now and then, on the channel that
//! consumes: that mends the one, and ends the channel over the other, so that the session begins anew and makes it.

use crate::fault::fault;
use crate::options::GroupOptions;
use crate::topology::{Place, short};
use futures_util::future::BoxFuture;
use lapin::Channel;
use lapin::options::QueueBindOptions;
use lapin::types::{FieldTable, ShortString};
use mq_api::{Error, Provisioning, Result};
use std::time::Duration;
use tokio::time::Instant;

/// How often: a binding that exists costs the server a look, and some hundred groups of one client do not add up to much.
const EVERY: Duration = Duration::from_secs(10);

/// See the module.
pub(crate) struct Bound {
    channel: Channel,
    queue: ShortString,
    exchange: ShortString,
    bindings: Vec<(ShortString, FieldTable)>,
    next: Instant,
    asking: Option<BoxFuture<'static, lapin::Result<()>>>,
}

impl Bound {
    /// For a queue that is bound to this place by `how`; none where there is nothing that is ours to mend.
    pub(crate) fn new(
        channel: &Channel,
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
            channel: channel.clone(),
            queue,
            exchange: short(exchange)?,
            bindings: bindings.collect::<Result<_>>()?,
            next: Instant::now() + EVERY,
            asking: None,
        }))
    }

    fn ask(&self) -> BoxFuture<'static, lapin::Result<()>> {
        let (channel, queue, exchange) = (self.channel.clone(), self.queue.clone(), self.exchange.clone());
        let bindings = self.bindings.clone();
        Box::pin(async move {
            for (key, arguments) in bindings {
                let options = QueueBindOptions::default();
                channel.queue_bind(queue.clone(), exchange.clone(), key, options, arguments).await?;
            }
            Ok(())
        })
    }

    /// Ready when it cannot be bound any more: the channel is over. Cancel safe: a question under way is waited for next time.
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
                return fault(format!("bind to exchange '{}'", it.exchange), error);
            }
        }
    }
}
