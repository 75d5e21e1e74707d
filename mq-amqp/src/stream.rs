//! A reader of a stream: everything from a place of its choice on, as often as it likes. The broker keeps no position for
//! readers over AMQP, so a reader that attaches again goes on behind what its process took, and one that starts again starts
//! where it is told. Nothing is lost to a slow reader: the broker waits for it.

use crate::bound::Bound;
use crate::connect::{ANSWER, Role, within};
use crate::decode::decode;
use crate::driver::Amqp;
use crate::fetch::Fetch;
use crate::options::GroupOptions;
use crate::same::{Doubt, Mark, Streams};
use crate::settle::{Frame, Tags};
use crate::topology::{Declarer, Found, Place, short};
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable};
use mq_api::{Error, ErrorKind, Event, Gap, GapCause, Position, Result};
use mq_core::{End, Incoming, Lane, Plan, Run, Session, Token};
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

/// On the way at a time. A stream refuses a reader without a bound; enough to hide the round trip.
const PREFETCH: u16 = 512;

/// Opens a session.
pub(crate) async fn open(amqp: &Amqp, session: Session, options: GroupOptions) -> Result<Run> {
    let connections = amqp.connections.clone();
    let cancels = amqp.cancels.clone();
    let cancelled = cancels.take(session.consumer);
    let sub = session.subscription.clone();
    let place = Place::of(&sub.topic);
    let options = options.retain(sub.retention)?;
    options.fit(&place)?;
    let mut declarer = Declarer::new(&connections, Role::Consume, sub.provisioning);
    let found = match declarer.stream(&place, &options).await {
        Ok(found) => found,
        Err(error) => {
            if cancelled {
                // Being made by another just now: it is another stream all the same.
                cancels.note(session.consumer);
            }
            return Err(error);
        }
    };
    declarer.done().await;
    let again = session.again;
    let made_again = again && (found == Found::Made || cancelled);
    // Places begin at 0 again in a stream that was made again: so they are those of another partition.
    let (partition, mark) = amqp.streams.attached(session.consumer, made_again);
    // Behind the last that was seen, or at the first that nobody took.
    let resumed = session.resume(partition);
    let next = resumed.and_then(|r| r.unsettled.or(r.seen.map(|seen| Position::offset(seen.major + 1))));
    let from = match next {
        Some(at) => {
            // With the last that was seen, which tells whether it is the same stream.
            let first = mark.map_or(at.major, |mark| mark.offset.min(at.major));
            AMQPValue::LongLongInt(i64::try_from(first).unwrap_or(i64::MAX))
        }
        // Of one that was made again, in this session or an attempt before it, nothing was seen.
        None if partition.is_some() => AMQPValue::LongString("first".into()),
        None => options.offset(),
    };
    let gap = match next {
        _ if made_again => Some(GapCause::Deleted),
        // It begins at what comes now once more: nobody knows what came meanwhile.
        None if again && partition.is_none() && options.is_from_now() => Some(GapCause::Disconnected),
        _ => None,
    };
    if let Some(cause) = gap {
        let topic = sub.topic.clone();
        session.events.push(Event::Gap(Gap { partition, ..Gap::new(topic, cause) }));
    }
    let channel = connections.channel(Role::Consume).await?;
    within(ANSWER, "set the prefetch", channel.basic_qos(PREFETCH, BasicQosOptions { global: false })).await?;
    let stream = place.stream();
    let mut arguments = FieldTable::default();
    arguments.insert("x-stream-offset".into(), from);
    let member = short(&session.member)?;
    let consume = channel.basic_consume(short(&stream)?, member, BasicConsumeOptions::default(), arguments);
    let consumer = within(ANSWER, &format!("read stream '{stream}'"), consume).await?;
    let bound = Bound::new(&connections, &stream, &place, &options, sub.provisioning);
    let mark = mark.filter(|_| next.is_some());
    let doubt = mark.map(|_| Doubt::new(connections.clone(), stream));
    let lane = session.open_lane(partition, session.generation);
    let fetch = Fetch::new(consumer);
    let streams = amqp.streams.clone();
    let mut reader = Reader { channel, fetch, lane, from: next, fresh: true, streams, mark, doubt, bound };
    Ok(Box::pin(async move {
        let number = session.consumer;
        let end = reader.run(session).await;
        if reader.fetch.cancelled && reader.channel.status().connected() {
            cancels.note(number);
        }
        end
    }))
}

struct Reader {
    channel: Channel,
    fetch: Fetch,
    lane: Arc<Lane>,
    /// What is before was taken.
    from: Option<Position>,
    /// Nothing came yet.
    fresh: bool,
    streams: Streams,
    /// What was seen last in the session before, until it was seen again.
    mark: Option<Mark>,
    doubt: Option<Doubt>,
    bound: Option<Bound>,
}

impl Reader {
    async fn run(&mut self, session: Session) -> End {
        let mut plan = Plan::default();
        let mut tags = Tags::default();
        let mut frames = Vec::new();
        let end = loop {
            tokio::select! { biased;
                () = session.stop.cancelled() => break End::Closed,
                () = session.settles.take(&mut plan) => {
                    // Nothing to settle: whatever is asked is done.
                    plan.acks.clear();
                    plan.others.clear();
                    session.settles.confirm(plan.upto, []);
                }
                n = poll_fn(|cx| self.fetch.poll(&mut tags, &session, cx)) => {
                    if !self.push(n, &mut tags, &session) {
                        break self.another();
                    }
                    // Only makes room for more on the way.
                    tags.acks(&mut frames);
                    for frame in frames.drain(..) {
                        if let Frame::Ack { tag, multiple } = frame
                            && let Err(error) = self.channel.basic_ack(tag, BasicAckOptions { multiple }).await
                        {
                            return End::Lost(crate::fault::fault("acknowledge", error));
                        }
                    }
                    if let Some(error) = self.fetch.over() {
                        break End::Lost(error);
                    }
                }
                error = Bound::lost(&mut self.bound) => {
                    // The broker's word that the consumer is over may be on its way still. An exchange takes no stream along.
                    self.fetch.cancelled |= Bound::misses_queue(&error);
                    break End::Lost(error);
                }
                () = Doubt::confirmed(&mut self.doubt) => {
                    if self.fetch.stash.is_empty() {
                        break self.another();
                    }
                    // Something came, and there is no room for it, or a pause: what it is says whose it is.
                    self.doubt = None;
                }
            }
        };
        if matches!(end, End::Closed) {
            let close = self.channel.close(200, "OK".into());
            let _ = within(Duration::from_secs(1), "close the channel", close).await;
        }
        end
    }

    /// Hands the first `n` of the stash on; false if they are of another stream.
    fn push(&mut self, n: usize, tags: &mut Tags, session: &Session) -> bool {
        let mut batch = Vec::with_capacity(n);
        let (mut last, mut overtaken) = (None, None);
        for d in self.fetch.stash.drain(..n.min(self.fetch.stash.len())) {
            self.doubt = None;
            tags.ack(d.delivery_tag);
            let arrived = decode(d.properties, d.exchange.as_str(), d.routing_key.as_str(), d.data);
            let offset = arrived.offset.unwrap_or(0);
            if let Some(mark) = self.mark
                && offset >= mark.offset
            {
                self.mark = None;
                // It may be gone by the retention of the stream; anything else in its place is another's.
                if offset == mark.offset && Mark::new(offset, &arrived.message) != mark {
                    return false;
                }
            }
            // It begins behind the place that was asked for: retention removed what is between.
            let fresh = std::mem::take(&mut self.fresh);
            overtaken = overtaken.or(self.from.filter(|from| fresh && offset > from.major).map(|from| (from, offset)));
            // A stream hands out whole chunks, which may begin before the place that was asked for.
            let position = Position::offset(offset);
            if self.from.is_none_or(|from| position >= from) {
                batch.push(Incoming::new(Token(d.delivery_tag, 0), position, arrived.message));
                last = batch.last();
            }
        }
        if let Some((from, to)) = overtaken {
            let gap = Gap::new(session.subscription.topic.clone(), GapCause::Retention);
            let (to, count) = (Some(Position::offset(to)), Some(to - from.major));
            session.events.push(Event::Gap(Gap { partition: self.lane.source().partition, to, count, ..gap }));
        }
        if let Some(last) = last {
            self.streams.saw(session.consumer, Mark::new(last.position.major, &last.message));
        }
        self.lane.push(batch);
        true
    }

    /// The stream is another than the one that was read: the next session reads it from its beginning, and says so.
    fn another(&mut self) -> End {
        self.fetch.cancelled = true;
        End::Lost(Error::new(ErrorKind::Disconnected, "the stream was deleted and made again by somebody else"))
    }
}
