//! Between two steps of a long delay. What its delay queue is done with, and what is not due yet, comes into a queue of its own
//! beside the group's (`…..steps`). Every member looks into it, whatever it has in hand and though it is paused, and passes on
//! what it finds by the due time that is noted: to the next delay queue, or, with less than a second left, to the group's queue.
//! The copy is confirmed before the original is acknowledged; on channels of their own, beside the loop of the session.
//!
//! The queue is made by each member that does not find it when it begins, as that of the suspects is, and not only when it is
//! needed: AMQP tells nobody that a queue was made, asking for one that is not there costs a channel each time, and what comes
//! there while no member knows of it would lie there for ever.

use crate::connect::{ANSWER, Connections, Role, within};
use crate::decode::{Arrived, decode};
use crate::delay::{Ladder, Rung, millis};
use crate::fault::fault;
use crate::send::{ConfirmChannel, Writer};
use crate::topology::{Declarer, keeping, short};
use crate::url::QueueType;
use crate::wire::Origin;
use futures_util::future::try_join_all;
use futures_util::stream::StreamExt;
use lapin::Channel;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicGetOptions, BasicQosOptions};
use lapin::types::FieldTable;
use mq_api::{Error, ErrorKind, Provisioning, Result};
use mq_core::{Session, Stop};
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// From one look to the next. What comes there has a second left at least.
const LOOK: Duration = Duration::from_millis(800);
/// Taken at a look; it goes on at once while there is more.
const BATCH: usize = 512;
/// So many are asked for one by one.
const FEW: usize = 16;
/// Another member took the rest when nothing comes for so long.
const QUIET: Duration = Duration::from_millis(20);
const BATCH_BYTES: usize = 4 << 20;
/// Until one that is gone is made again. Deleted with its group it is not: the session is told of that before. But what its delay
/// queue is done with meanwhile waits there until the broker tries again, which is after three minutes.
const GONE: Duration = Duration::from_millis(200);
/// The longest pause after failures in a row.
const PAUSE: Duration = Duration::from_secs(5);
/// The pause of a user who may not make it, or not read it: each try costs a channel for good.
const REFUSED: Duration = Duration::from_secs(300);
/// Until a delay queue that was refused is asked for again: that too costs a channel.
const REFUSED_RUNG: Duration = Duration::from_secs(30);
/// Longest wait for what is under way when the session ends: then it goes back with its channel.
const FAREWELL: Duration = Duration::from_secs(1);

/// The queue between two steps.
pub(crate) fn queue(queue: &str) -> String {
    format!("{queue}..steps")
}

/// What a look found.
enum Found {
    Nothing,
    /// All that was found is passed on.
    Some,
    /// It is not there any more.
    Gone,
}

/// See the module.
pub(crate) struct Steps {
    connections: Arc<Connections>,
    name: String,
    kind: QueueType,
    ladder: Ladder,
    session: Session,
    writer: Option<(Arc<ConfirmChannel>, Writer<Taken>)>,
    /// It was there when it was last looked for.
    known: bool,
    /// Looks in a row that failed.
    failed: u32,
    /// Delay queues that cannot be made, until when, and why.
    refused: Vec<(Rung, Instant, String)>,
}

/// One that is being passed on.
struct Taken {
    tag: u64,
    rung: Option<Rung>,
}

impl Steps {
    pub(crate) fn new(connections: &Arc<Connections>, ladder: Ladder, kind: QueueType, session: Session) -> Self {
        let (connections, name) = (connections.clone(), queue(ladder.queue()));
        Self { connections, name, kind, ladder, session, writer: None, known: false, failed: 0, refused: Vec::new() }
    }

    /// Looks until a close began, or it is dropped.
    pub(crate) async fn run(mut self) {
        let connections = self.connections.clone();
        let new = || Declarer::new(&connections, Role::Consume, Provisioning::Create);
        let (draining, stop) = (self.session.draining.clone(), self.session.stop.clone());
        let ending = async || {
            tokio::select! { biased;
                () = draining.cancelled() => {}
                () = stop.cancelled() => {}
            }
        };
        let mut declarer = new();
        let mut next = Instant::now();
        loop {
            tokio::select! { biased;
                () = ending() => break,
                () = tokio::time::sleep_until(next) => {}
            }
            let began = Instant::now();
            let looked = {
                let mut look = std::pin::pin!(self.look(&mut declarer));
                tokio::select! { biased;
                    looked = &mut look => looked,
                    // Finished, not dropped: what is written and not confirmed would be there twice.
                    () = ending() => match tokio::time::timeout(FAREWELL, look).await {
                        Ok(looked) => looked,
                        Err(_) => break,
                    },
                }
            };
            if looked.is_err() {
                // What was taken and not passed on goes back with its channel.
                std::mem::replace(&mut declarer, new()).done().await;
            }
            next = self.next(began, looked);
        }
        declarer.done().await;
        if let Some((channel, writer)) = self.writer.take() {
            drop(writer);
            // Nothing depends on it: a channel that does not answer goes with its connection.
            let close = channel.channel.close(200, "OK".into());
            let _ = within(Duration::from_millis(200), "close a channel", close).await;
        }
    }

    /// When to look again.
    fn next(&mut self, began: Instant, looked: Result<Found>) -> Instant {
        let error = match looked {
            Ok(found) => {
                self.failed = 0;
                // Also what an earlier session said.
                self.session.trouble("steps", None);
                return match found {
                    Found::Some => began,
                    Found::Nothing => began + LOOK,
                    Found::Gone => began + GONE,
                };
            }
            Err(error) => error,
        };
        self.failed = self.failed.saturating_add(1);
        let (told, pause) = match error.kind() {
            // Who may not make it delays nothing for long, and who makes it looks too.
            ErrorKind::Permission => (self.known, REFUSED),
            // All others are passed on, as in time as ever.
            ErrorKind::Rejected => (true, LOOK),
            // One failure is what the end of a session looks like from here.
            _ => (self.failed > 1, PAUSE.min(LOOK * self.failed)),
        };
        if told {
            let text = format!("messages whose delay takes several steps wait in '{}': {error}", self.name);
            self.session.trouble("steps", Some(text));
        }
        Instant::now() + pause
    }

    async fn look(&mut self, declarer: &mut Declarer<'_>) -> Result<Found> {
        // How many there are is asked first: taking one of an empty quorum queue is written to its log.
        match declarer.depth(&self.name).await? {
            Some((0, _)) => {
                self.known = true;
                Ok(Found::Nothing)
            }
            Some((waiting, _)) => {
                self.known = true;
                // One channel throughout, since tags are those of a channel.
                let channel = declarer.channel().await?.clone();
                let taken = take(&self.name, &channel, waiting, &self.session.draining).await?;
                if taken.is_empty() {
                    return Ok(Found::Nothing);
                }
                self.pass_on(&channel, taken).await?;
                Ok(Found::Some)
            }
            None if std::mem::take(&mut self.known) => Ok(Found::Gone),
            None => {
                declarer.make(&self.name, keeping(self.kind)).await?;
                self.known = true;
                Ok(Found::Nothing)
            }
        }
    }

    /// Where one goes. `Rejected` when its delay queue cannot be made, as one of other arguments is there, or this user may not.
    async fn place(&mut self, rest: Duration, declarer: &mut Declarer<'_>) -> Result<(String, Option<Rung>)> {
        let rung = Rung::of(rest);
        if let Some((_, _, why)) = self.refused.iter().find(|(refused, _, _)| Some(*refused) == rung) {
            return Err(Error::new(ErrorKind::Rejected, why.clone()));
        }
        match (self.ladder.place(rest, declarer).await, rung) {
            (Err(error), Some(rung))
                if matches!(error.kind(), ErrorKind::Topology | ErrorKind::Permission | ErrorKind::InvalidName) =>
            {
                self.refused.push((rung, Instant::now() + REFUSED_RUNG, error.to_string()));
                Err(error.of_kind(ErrorKind::Rejected))
            }
            (place, _) => place,
        }
    }

    /// Fails when one of them could not be passed on; the others are.
    async fn pass_on(&mut self, channel: &Channel, taken: Vec<(u64, Arrived)>) -> Result<()> {
        let now = millis(self.session.env.wall());
        let connections = self.connections.clone();
        let mut declarer = Declarer::new(&connections, Role::Publish, Provisioning::Create);
        let mut placed = Vec::with_capacity(taken.len());
        let mut failure = None;
        self.refused.retain(|(_, until, _)| *until > Instant::now());
        for (tag, arrived) in taken {
            let rest = arrived.notes.rest(now);
            let (queue, rung) = match self.place(rest, &mut declarer).await {
                Ok(place) => place,
                // The others do not wait for it. It goes back, and when it is due it needs no delay queue.
                Err(error) if error.kind() == ErrorKind::Rejected => {
                    failure = Some(error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            placed.push((Taken { tag, rung }, short(&queue)?, arrived));
        }
        declarer.done().await;
        // Put back only with nothing under way: a late outcome would be taken for that of a tag of another channel.
        let usable = self.writer.take().filter(|(channel, _)| channel.channel.status().connected());
        let (publishing, mut writer) = match usable {
            Some(writer) => writer,
            None => {
                let publishing = Arc::new(ConfirmChannel::open(&connections).await?);
                (publishing.clone(), Writer::new(publishing, connections.url().confirm_timeout))
            }
        };
        let mut open = placed.len();
        for (taken, queue, arrived) in placed {
            let origin = Origin::Copy(arrived.notes);
            writer.publish(taken, "".into(), Some(queue), &arrived.message, origin, self.session.env.now());
        }
        let mut tick = tokio::time::interval(Duration::from_secs(1));
        while open > 0 {
            tokio::select! { biased;
                () = poll_fn(|cx| writer.poll_done(cx)) => {}
                now = tick.tick() => match writer.check(now) {
                    Some(error) => writer.dead = Some(error),
                    None => continue,
                }
            }
            let mut acks = Vec::new();
            for (Taken { tag, rung }, result) in writer.done.drain(..) {
                open -= 1;
                match (result, rung) {
                    (Ok(()), _) => acks.push(channel.basic_ack(tag, BasicAckOptions { multiple: false })),
                    (Err(error), rung) => {
                        rung.into_iter().for_each(|rung| self.ladder.forget(rung));
                        failure = Some(error);
                    }
                }
            }
            within(ANSWER, "acknowledge", try_join_all(acks)).await?;
            if let Some(error) = writer.dead.take() {
                return Err(error);
            }
        }
        self.writer = Some((publishing, writer));
        failure.map_or(Ok(()), |error: Error| Err(error))
    }
}

/// Taken together.
#[derive(Default)]
struct Batch {
    all: Vec<(u64, Arrived)>,
    bytes: usize,
    largest: usize,
}

impl Batch {
    fn push(&mut self, d: Delivery) {
        self.bytes += d.data.len();
        self.largest = self.largest.max(d.data.len());
        let arrived = decode(d.properties, d.exchange.as_str(), d.routing_key.as_str(), d.data);
        self.all.push((d.delivery_tag, arrived));
    }

    /// How many more there is room for, if they are no larger than those before.
    fn room(&self) -> usize {
        let bytes = BATCH_BYTES.saturating_sub(self.bytes) / self.largest.max(1);
        bytes.min(BATCH.saturating_sub(self.all.len()))
    }
}

/// Takes some of those that are waiting.
async fn take(queue: &str, channel: &Channel, waiting: u64, draining: &Stop) -> Result<Vec<(u64, Arrived)>> {
    const DOING: &str = "take what is between two steps";
    let mut batch = Batch::default();
    let few = usize::try_from(waiting).map_or(FEW, |waiting| waiting.min(FEW));
    let name = short(queue)?;
    let gets = (0..few).map(|_| channel.basic_get(name.clone(), BasicGetOptions { no_ack: false }));
    let gets = within(ANSWER, DOING, try_join_all(gets)).await?;
    gets.into_iter().flatten().for_each(|got| batch.push(got.delivery));
    let more = batch.room().min(usize::try_from(waiting).unwrap_or(BATCH).saturating_sub(batch.all.len()));
    if batch.all.len() < FEW || more < FEW || draining.is_cancelled() {
        return Ok(batch.all);
    }
    // Many: a quorum queue answers each get when it has written it to its log. Consuming costs that once; but only for a moment,
    // since it would also send to a member whose machine is gone, until that is noticed.
    let prefetch = u16::try_from(more).unwrap_or(u16::MAX);
    within(ANSWER, DOING, channel.basic_qos(prefetch, BasicQosOptions { global: false })).await?;
    let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
    let mut consumer = within(ANSWER, DOING, channel.basic_consume(name, "".into(), options, arguments)).await?;
    let enough = batch.all.len() + more;
    while batch.all.len() < enough
        && let Ok(Some(got)) = tokio::time::timeout(QUIET, consumer.next()).await
    {
        batch.push(got.map_err(|e| fault(DOING, e))?);
    }
    // What was sent before the answer is ours too.
    within(ANSWER, DOING, channel.basic_cancel(consumer.tag(), BasicCancelOptions::default())).await?;
    while let Ok(Some(got)) = tokio::time::timeout(ANSWER, consumer.next()).await {
        batch.push(got.map_err(|e| fault(DOING, e))?);
    }
    Ok(batch.all)
}
