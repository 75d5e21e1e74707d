//! Broadcast: an exclusive queue of this session's own, gone with it. At most once: acknowledged when buffered, which only
//! bounds what is on its way.

use crate::bound::Bound;
use crate::connect::{ANSWER, Role, answer, within};
use crate::decode::decode;
use crate::driver::Amqp;
use crate::fault::fault;
use crate::options::GroupOptions;
use crate::topology::{Declarer, Place, short};
use crate::url::QueueType;
use futures_util::stream::StreamExt;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Consumer};
use mq_api::{Error, ErrorKind, Event, Gap, GapCause, Position, Provisioning, Result};
use mq_core::{End, Incoming, Lane, Run, Session, Token};
use std::sync::Arc;
use std::time::Duration;

/// On the way at a time, whatever the application takes: enough to hide the round trip.
const PREFETCH: u16 = 512;
/// A queue that nobody consumes is gone after this time: longer than the longest attempt.
const UNUSED: Duration = Duration::from_secs(20);

/// Opens a session.
pub(crate) async fn open(amqp: &Amqp, session: Session) -> Result<Run> {
    let connections = amqp.connections.clone();
    let sub = session.subscription.clone();
    let options = GroupOptions::read(&sub.native)?;
    if options.stream {
        return crate::stream::open(amqp, session, options).await;
    }
    let place = Place::of(&sub.topic);
    let (Place::Topic(exchange) | Place::Exchange(exchange)) = &place else {
        let text = "amqp cannot broadcast from a queue: each message has one receiver; subscribe to an exchange";
        return Err(Error::new(ErrorKind::Unsupported, text));
    };
    options.fit(&place)?;
    if options.queue_type == Some(QueueType::Quorum) {
        let text = "native option 'queue-type' cannot be 'quorum' for a broadcast: its queue goes with its session, which only classic ones do";
        return Err(Error::new(ErrorKind::Config, text));
    }
    // Of a topic's retention nothing concerns this queue, but what no topic here can have is refused.
    GroupOptions::default().retain(sub.retention)?;
    let mut arguments = FieldTable::default();
    options.add_to(&mut arguments);
    // One that is bound and never consumed, since this attempt ends before, would stay, and fill, as long as the connection.
    arguments.insert("x-expires".into(), AMQPValue::LongLongInt(UNUSED.as_millis() as i64));
    let mut declarer = Declarer::new(&connections, Role::Consume, sub.provisioning);
    declarer.exchange(&place).await?;
    declarer.done().await;
    let channel = connections.channel(Role::Consume).await?;
    // Named by the broker; classic, since only those may be exclusive.
    let exclusive = QueueDeclareOptions { exclusive: true, auto_delete: true, ..QueueDeclareOptions::default() };
    let made = answer("make a queue", channel.queue_declare("".into(), exclusive, arguments)).await?;
    let queue = made.map_err(|e| fault("make an exclusive queue", e))?.name().clone();
    for (key, arguments) in options.bindings() {
        let bind =
            channel.queue_bind(queue.clone(), short(exchange)?, short(&key)?, QueueBindOptions::default(), arguments);
        answer("bind", bind).await?.map_err(|e| fault(format!("bind to exchange '{exchange}'"), e))?;
    }
    within(ANSWER, "set the prefetch", channel.basic_qos(PREFETCH, BasicQosOptions { global: false })).await?;
    // Its queue is its own to bind, whoever makes the exchange.
    let bound = Bound::new(&connections, queue.as_str(), &place, &options, Provisioning::Create);
    let consume =
        channel.basic_consume(queue, short(&session.member)?, BasicConsumeOptions::default(), FieldTable::default());
    let consumer = within(ANSWER, "consume", consume).await?;
    if session.again {
        session.events.push(Event::Gap(Gap::new(sub.topic.clone(), GapCause::Disconnected)));
    }
    let lane = session.open_lane(None, session.generation);
    Ok(Box::pin(run(session, channel, consumer, lane, bound)))
}

async fn run(
    session: Session,
    channel: Channel,
    mut consumer: Consumer,
    lane: Arc<Lane>,
    mut bound: Option<Bound>,
) -> End {
    let mut batch = Vec::new();
    let mut plan = mq_core::Plan::default();
    let lost = loop {
        tokio::select! { biased;
            () = session.stop.cancelled() => break None,
            () = session.settles.take(&mut plan) => {
                // Nothing to settle: whatever is asked is done.
                plan.acks.clear();
                plan.others.clear();
                session.settles.confirm(plan.upto, []);
            }
            error = Bound::lost(&mut bound) => break Some(error),
            next = consumer.next() => {
                let mut next = Some(next);
                let mut last = None;
                let mut ended = None;
                while let Some(item) = next.take() {
                    match item {
                        Some(Ok(d)) => {
                            last = Some(d.delivery_tag);
                            let arrived = decode(d.properties, d.exchange.as_str(), d.routing_key.as_str(), d.data);
                            batch.push(Incoming::new(Token(d.delivery_tag, 0), Position::default(), arrived.message));
                        }
                        Some(Err(error)) => ended = Some(fault("consume", error)),
                        None => {
                            let text = "the broker cancelled the consumer";
                            ended = Some(Error::new(ErrorKind::Disconnected, text));
                        }
                    }
                    if ended.is_none() && batch.len() < usize::from(PREFETCH) {
                        next = futures_util::FutureExt::now_or_never(consumer.next());
                    }
                }
                lane.push(batch.drain(..));
                if let Some(tag) = last
                    && ended.is_none()
                    && let Err(error) = channel.basic_ack(tag, BasicAckOptions { multiple: true }).await
                {
                    ended = Some(fault("acknowledge", error));
                }
                if ended.is_some() {
                    break ended;
                }
            }
        }
    };
    match lost {
        Some(error) => End::Lost(error),
        None => {
            // The queue is exclusive and auto-deleting: it goes with its consumer.
            let _ = within(Duration::from_secs(1), "close the channel", channel.close(200, "OK".into())).await;
            End::Closed
        }
    }
}
