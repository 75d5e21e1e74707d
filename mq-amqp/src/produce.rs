//! A producer's session: what the outbox holds, to the topic; and a consumer's relay: retries to its delay queues, dead
//! letters to theirs.

use crate::connect::{Connections, Role, within};
use crate::delay::{Ladder, Rung, millis};
use crate::driver::Amqp;
use crate::options::{GroupOptions, ProducerOptions};
use crate::send::{ConfirmChannel, Writer};
use crate::topology::{Declarer, Place, short};
use crate::url::QueueType;
use crate::wire::{Notes, Origin};
use lapin::types::ShortString;
use mq_api::{Error, ErrorKind, Provisioning, Result};
use mq_core::{End, Outgoing, Purpose, Run, Target, TxSession};
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

/// Taken from the outbox at a time.
const BATCH: usize = 256;
const BATCH_BYTES: usize = 4 << 20;
/// Time limits are looked at this often.
const TICK: Duration = Duration::from_secs(1);

/// What a publish was for.
struct Sent {
    ticket: u64,
    step: Option<Rung>,
    letter: bool,
}

/// Where a session writes.
struct Route {
    exchange: ShortString,
    routing_key: Option<ShortString>,
    /// Only of a relay.
    relay: Option<Relay>,
}

struct Relay {
    ladder: Ladder,
    dead_letters: String,
    kind: QueueType,
    provisioning: Provisioning,
    checked: bool,
}

/// Opens a session.
pub(crate) async fn open(amqp: &Amqp, tx: TxSession) -> Result<Run> {
    let connections = amqp.connections.clone();
    let place = Place::of(&tx.spec.topic);
    let (exchange, key) = place.target()?;
    let mut declarer = Declarer::new(&connections, Role::Publish, tx.spec.provisioning);
    let route = match &tx.purpose {
        Purpose::Producer => {
            let native = ProducerOptions::read(&tx.spec.native)?;
            let kind = native.queue_type.unwrap_or(amqp.queue_type());
            let options = GroupOptions::for_stream(native.stream).retain(tx.spec.retention)?;
            match native.stream {
                true if !tx.spec.groups.is_empty() => {
                    let text = "a stream has no groups: it keeps no position for them over AMQP";
                    return Err(Error::new(ErrorKind::Unsupported, text));
                }
                true => declarer.stream(&place, &options).await?,
                false => declarer.exchange(&place).await?,
            };
            for group in &tx.spec.groups {
                declarer.group(&place, group, kind, &options, false).await?;
                amqp.remember(&place, group);
            }
            if let Place::Queue(name) | Place::DeadLetters(name) = &place
                && tx.spec.provisioning != Provisioning::None
                && declarer.depth(name).await?.is_none()
            {
                let text =
                    format!("queue '{name}' is not there; make it first: this library does not make native queues");
                return Err(Error::new(ErrorKind::NotFound, text));
            }
            let default = native.routing_key.as_deref().map(short).transpose()?;
            if default.is_some() && matches!(place, Place::Queue(_) | Place::DeadLetters(_)) {
                let text = "native option 'routing-key' means nothing for a queue, which is sent to by its name";
                return Err(Error::new(ErrorKind::Config, text));
            }
            let fixed = matches!(place, Place::Queue(_) | Place::DeadLetters(_)).then_some(key);
            Route { exchange, routing_key: fixed.or(default), relay: None }
        }
        Purpose::Relay(sub) => {
            let group = sub.group_name().cloned().unwrap_or_else(|| "".into());
            let kind = GroupOptions::read(&sub.native)?.queue_type.unwrap_or(amqp.queue_type());
            let relay = Relay {
                ladder: Ladder::new(place.queue(&group), kind),
                dead_letters: place.dead_letters(&group),
                kind,
                provisioning: sub.provisioning,
                // Made or verified by the consumer's session.
                checked: true,
            };
            Route { exchange: "".into(), routing_key: None, relay: Some(relay) }
        }
    };
    declarer.done().await;
    let channel = ConfirmChannel::open(&connections).await?;
    let limit = connections.url().confirm_timeout;
    Ok(Box::pin(run(connections, channel, route, limit, tx)))
}

async fn run(
    connections: Arc<Connections>,
    channel: ConfirmChannel,
    mut route: Route,
    limit: Duration,
    tx: TxSession,
) -> End {
    let channel = Arc::new(channel);
    let mut writer = Writer::new(channel.clone(), limit);
    let mut batch = Vec::new();
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let end = loop {
        let room = writer.room().min(BATCH);
        tokio::select! { biased;
            () = tx.stop.cancelled() => break End::Closed,
            () = poll_fn(|cx| writer.poll_done(cx)) => {
                let results = writer.done.drain(..).map(|(sent, result)| {
                    if result.is_err() {
                        route.failed(&sent);
                    }
                    (sent.ticket, result.map(|()| mq_api::Receipt::new(mq_api::Durability::Disk)))
                });
                tx.outbox.complete(results);
                if let Some(error) = writer.dead.take() {
                    break End::Lost(error);
                }
            }
            () = tx.outbox.take(room, BATCH_BYTES, &mut batch), if room > 0 => {
                for outgoing in batch.drain(..) {
                    let ticket = outgoing.ticket;
                    if let Err(error) = route.publish(&connections, outgoing, &mut writer, &tx).await {
                        tx.outbox.complete([(ticket, Err(error.with_outcome(mq_api::Outcome::NotSent)))]);
                    }
                }
            }
            now = tick.tick() => {
                if let Some(error) = writer.check(now) {
                    break End::Lost(error);
                }
            }
        }
    };
    drop(writer);
    if channel.channel.status().connected() {
        let close = channel.channel.close(200, "OK".into());
        // Nothing depends on it: a channel that does not answer goes with its connection.
        let _ = within(Duration::from_millis(200), "close a channel", close).await;
    }
    end
}

impl Route {
    async fn publish(
        &mut self,
        connections: &Connections,
        outgoing: Outgoing,
        writer: &mut Writer<Sent>,
        tx: &TxSession,
    ) -> Result<()> {
        let Outgoing { ticket, message, target, .. } = outgoing;
        let now = tx.env.now();
        let mut sent = Sent { ticket, step: None, letter: false };
        match (target, &mut self.relay) {
            (Target::Topic, _) => {
                let key = match &self.routing_key {
                    // The message's own wins over the producer's default, a queue's name over both.
                    Some(_) if !self.exchange.as_str().is_empty() && has_own_key(&message) => None,
                    key => key.clone(),
                };
                writer.publish(sent, self.exchange.clone(), key, &message, Origin::Program, now);
            }
            (Target::Retry { after, attempt, .. }, Some(relay)) => {
                let mut declarer = Declarer::new(connections, Role::Publish, relay.provisioning);
                let (queue, step) = relay.ladder.place(after, &mut declarer).await?;
                // A part of a millisecond that is left out must not make it early.
                let due = (!after.is_zero()).then(|| millis(tx.env.wall() + after) + 1);
                let notes = Notes { attempt, due, ..Notes::default() };
                sent.step = step;
                writer.publish(sent, "".into(), Some(short(&queue)?), &message, Origin::Copy(notes), now);
            }
            (Target::DeadLetter(envelope), Some(relay)) => {
                if !relay.checked {
                    let mut declarer = Declarer::new(connections, Role::Publish, relay.provisioning);
                    declarer.dead_letters(&relay.dead_letters, relay.kind).await?;
                    relay.checked = true;
                }
                sent.letter = true;
                let letter = envelope.dead_letter(&message);
                let key = short(&relay.dead_letters)?;
                writer.publish(sent, "".into(), Some(key), &letter, Origin::Copy(Notes::default()), now);
            }
            (_, None) => return Err(Error::new(ErrorKind::Other, "a producer has no retries and no dead letters")),
        }
        Ok(())
    }

    /// Its queue may be gone: looked at again before the next.
    fn failed(&mut self, sent: &Sent) {
        if let Some(relay) = &mut self.relay {
            if let Some(step) = sent.step {
                relay.ladder.forget(step);
            }
            if sent.letter {
                relay.checked = false;
            }
        }
    }
}

fn has_own_key(message: &mq_api::Message) -> bool {
    message.headers.get(crate::wire::ROUTING_KEY).is_some()
}
