//! A group member's session: one channel, prefetch set before it consumes, one loop that fetches into the lane and writes what
//! was settled.

use crate::alone::Alone;
use crate::bound::Bound;
use crate::connect::{ANSWER, Role, within};
use crate::copies::{self, Copy, To};
use crate::decode::{Arrived, decode};
use crate::delay::{Ladder, Rung, millis};
use crate::driver::{Amqp, Cancels};
use crate::fault::fault;
use crate::fetch::Fetch;
use crate::flush::Flush;
use crate::options::GroupOptions;
use crate::settle::{Frame, Tags};
use crate::steps::Steps;
use crate::topology::{Declarer, Found, Place, short};
use crate::url::QueueType;
use crate::wire::Notes;
use lapin::Channel;
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use mq_api::{DeadLetterPolicy, Error, ErrorKind, Event, Gap, GapCause, Position, Result, Settled};
use mq_core::{Carry, End, Incoming, Lane, Plan, Run, Session, Token};
use std::future::poll_fn;
use std::sync::Arc;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// The second half of a token: the channel of the group's queue, or that of the suspects.
pub(crate) const MAIN: u64 = 0;

const STREAM: &str = "a stream has no groups: it keeps no position for them over AMQP; read it with Subscription::broadcast and the native option queue-type=stream";

/// Opens a session.
pub(crate) async fn open(amqp: &Amqp, session: Session) -> Result<Run> {
    let connections = amqp.connections.clone();
    let sub = session.subscription.clone();
    let Some(group) = sub.group_name().cloned() else { return crate::broadcast::open(amqp, session).await };
    // Forgotten with the answer: whoever asks has to use it.
    let cancelled = amqp.cancels.take(session.consumer);
    let place = Place::of(&sub.topic);
    let options = GroupOptions::read(&sub.native)?.retain(sub.retention)?;
    options.fit(&place)?;
    if options.stream {
        return Err(Error::new(ErrorKind::Unsupported, STREAM));
    }
    let kind = options.queue_type.unwrap_or(amqp.queue_type());
    let queue = place.queue(&group);
    let mut declarer = Declarer::new(&connections, Role::Consume, sub.provisioning);
    let letters = sub.dead_letter == DeadLetterPolicy::On;
    let found = match declarer.group(&place, &group, kind, &options, letters).await {
        Ok(found) => found,
        Err(error) => {
            // A classic queue that is away comes back with what was in it; any other was deleted, and is just being made.
            if cancelled && (kind == QueueType::Quorum || error.kind() != ErrorKind::Unavailable) {
                amqp.cancels.note(session.consumer);
            }
            return Err(error);
        }
    };
    // Suspects are handed over alone only where they can end in the dead letters.
    let tracked = sub.dead_letter != DeadLetterPolicy::Forever && !session.at_most_once();
    let alone = match tracked {
        true => {
            let now = millis(session.env.wall());
            let outage = if session.again { millis(amqp.born)..now } else { now..now };
            Some(Alone::open(&connections, &mut declarer, &queue, kind, sub.provisioning, outage).await?)
        }
        false => None,
    };
    declarer.done().await;
    amqp.remember(&place, &group);
    if (found == Found::Made || cancelled) && session.again {
        session.events.push(Event::Gap(Gap::new(sub.topic.clone(), GapCause::Deleted)));
    }
    let channel = connections.channel(Role::Consume).await?;
    // Per consumer, not for the channel: quorum queues end the whole connection when asked for the latter.
    let prefetch = u16::try_from(sub.max_in_flight).unwrap_or(u16::MAX);
    let qos = channel.basic_qos(prefetch, BasicQosOptions { global: false });
    within(ANSWER, "set the prefetch", qos).await?;
    let consume = channel.basic_consume(
        short(&queue)?,
        short(&session.member)?,
        BasicConsumeOptions::default(),
        FieldTable::default(),
    );
    let consumer = within(ANSWER, &format!("consume queue '{queue}'"), consume).await?;
    let flush = Flush::new(channel.clone(), prefetch);
    let bound = Bound::new(&connections, &queue, &place, &options, sub.provisioning);
    let (jobs, todo) = unbounded_channel();
    let (told, done) = unbounded_channel();
    let copier = copies::write(connections.clone(), Ladder::new(queue.clone(), kind), todo, told, session.clone());
    let steps = Steps::new(&connections, Ladder::new(queue, kind), kind, session.clone());
    let reader = Reader {
        lane: session.open_lane(None, session.generation),
        session,
        channel,
        fetch: Fetch::new(consumer),
        tags: Tags::default(),
        frames: Vec::new(),
        flush,
        due: 0,
        urgent: false,
        jobs,
        done,
        tracked,
        classic: kind == QueueType::Classic && !matches!(place, Place::Queue(_)),
        alone,
        bound,
        copying: 0,
        cancelled: false,
        is_stream: false,
        cancels: amqp.cancels.clone(),
    };
    Ok(Box::pin(async move {
        let (reading, steps) = (
            async {
                tokio::select! { biased;
                    end = reader.run() => end,
                    // Ends only when the reader did.
                    () = copier => End::Lost(Error::closed("the copier")),
                }
            },
            steps.run(),
        );
        tokio::pin!(reading, steps);
        let end = tokio::select! { biased;
            end = &mut reading => end,
            // A close began.
            () = &mut steps => return reading.await,
        };
        if matches!(end, End::Closed) {
            steps.await;
        }
        // Any other end is told at once, for the lane is open until then; what is being passed on goes back with its channel.
        end
    }))
}

pub(crate) struct Reader {
    pub(crate) session: Session,
    pub(crate) lane: Arc<Lane>,
    pub(crate) channel: Channel,
    pub(crate) fetch: Fetch,
    pub(crate) tags: Tags,
    pub(crate) frames: Vec<Frame>,
    pub(crate) flush: Flush,
    /// The last operation taken.
    due: u64,
    /// Somebody waits.
    pub(crate) urgent: bool,
    jobs: UnboundedSender<Copy>,
    pub(crate) done: UnboundedReceiver<Copy>,
    /// Whether takes are counted.
    tracked: bool,
    /// Whether the queue is ours and classic, and so counts nothing.
    pub(crate) classic: bool,
    pub(crate) alone: Option<Alone>,
    bound: Option<Bound>,
    /// Copies that are not confirmed.
    pub(crate) copying: usize,
    pub(crate) cancelled: bool,
    /// The queue of somebody else is a stream, which forgets nothing and takes nothing back.
    is_stream: bool,
    cancels: Cancels,
}

impl Reader {
    async fn run(mut self) -> End {
        let mut plan = Plan::default();
        let mut exceptions = Vec::new();
        let end = loop {
            self.write();
            let (stop, draining) = (self.session.stop.clone(), self.session.draining.clone());
            let (settles, flow) = (self.session.settles.clone(), self.session.flow.clone());
            let drained = self.cancelled;
            let mut alone = self.alone.take();
            let event = tokio::select! { biased;
                () = stop.cancelled() => What::Stop,
                () = draining.cancelled(), if !drained => What::Drain,
                written = poll_fn(|cx| self.flush.poll(cx)) => What::Written(written),
                () = settles.take(&mut plan) => What::Plan,
                Some(copy) = self.done.recv() => What::Copied(copy),
                event = Alone::next(&mut alone, &flow, drained) => What::Alone(event),
                error = Bound::lost(&mut self.bound), if !drained => What::Unbound(error),
                arrived = poll_fn(|cx| self.fetch.poll(&mut self.tags, &self.session, cx)),
                    if !drained => What::Arrived(arrived),
            };
            self.alone = alone;
            match event {
                What::Stop => break End::Closed,
                What::Drain => self.drain().await,
                What::Unbound(error) => {
                    // Whoever makes it again meanwhile: what was sent until then went by.
                    if error.kind() == ErrorKind::NotFound {
                        self.cancels.note(self.session.consumer);
                    }
                    break End::Lost(error);
                }
                What::Written(Ok(upto)) => self.session.settles.confirm(upto, exceptions.drain(..)),
                What::Written(Err(error)) => break End::Lost(fault("acknowledge", error)),
                What::Plan => {
                    if let Err(error) = self.carry_out(&mut plan, &mut exceptions).await {
                        break End::Lost(error);
                    }
                }
                What::Copied(copy) => {
                    if let Err(error) = self.copied(copy).await {
                        break End::Lost(error);
                    }
                }
                What::Alone(event) => {
                    if let Err(error) = crate::alone::handle(&mut self, event).await {
                        break End::Lost(error);
                    }
                }
                What::Arrived(n) => {
                    self.push(n);
                    if self.is_stream {
                        break End::Fatal(Error::new(ErrorKind::Unsupported, STREAM));
                    }
                    if let Some(error) = self.fetch.over() {
                        if self.fetch.cancelled && self.channel.status().connected() {
                            self.cancels.note(self.session.consumer);
                        }
                        break End::Lost(error);
                    }
                }
            }
        };
        if matches!(end, End::Closed) {
            self.finish(&mut plan, exceptions).await;
        }
        end
    }

    /// Begins to write what is due, if it is time.
    pub(crate) fn write(&mut self) {
        let (acks, frames) = (self.tags.pending(), self.frames.len());
        if self.flush.wants(self.due, self.urgent, acks, frames) {
            let mut frames = std::mem::take(&mut self.frames);
            self.tags.acks(&mut frames);
            self.urgent = false;
            self.flush.start(frames, self.due);
        }
    }

    /// Writes what is settled now, and waits until the broker has read it.
    pub(crate) async fn flush_now(&mut self) -> Result<()> {
        let mut frames = std::mem::take(&mut self.frames);
        self.tags.acks(&mut frames);
        within(ANSWER, "acknowledge", self.flush.now(frames)).await
    }

    /// A copy is confirmed: the original may go.
    pub(crate) async fn copied(&mut self, copy: Copy) -> Result<()> {
        self.copying -= 1;
        match (copy.token, &mut self.alone) {
            (Token(tag, MAIN), _) => {
                self.tags.ack(tag);
            }
            (Token(tag, _), Some(alone)) => {
                alone.ack(tag).await?;
            }
            _ => {}
        }
        match copy.notes.armed {
            Some(number) => crate::alone::recorded(self, number).await,
            None => {
                if let (Token(_, crate::alone::ALONE), Some(alone)) = (copy.token, &mut self.alone) {
                    // It was given back, and may be tried again at once.
                    alone.look_now();
                }
                Ok(())
            }
        }
    }

    pub(crate) fn start_copy(&mut self, copy: Copy) {
        self.copying += 1;
        // The copier ends after this loop.
        let _ = self.jobs.send(copy);
    }

    pub(crate) async fn carry_out(&mut self, plan: &mut Plan, exceptions: &mut Vec<(u64, Settled)>) -> Result<()> {
        for ack in plan.acks.drain(..) {
            let known = match self.alone.as_mut().and_then(|alone| alone.place(ack.token)) {
                None => self.tags.ack(ack.token.0),
                Some(tag) => match &mut self.alone {
                    Some(alone) => alone.ack(tag).await?,
                    None => false,
                },
            };
            if !known {
                exceptions.push((ack.op, Settled::Stale));
            }
        }
        for other in plan.others.drain(..) {
            if let Carry::Trial(n) = other.how {
                match &mut self.alone {
                    Some(alone) => alone.trial(other.lane, other.token, other.message, n),
                    None => self.session.settles.trial_recorded(other.lane, other.token),
                }
                continue;
            }
            // The engine asks for nothing else of this driver than to give back.
            if self.alone.as_mut().is_some_and(|alone| alone.give_up(other.token)) {
                continue;
            }
            if self.classic
                && let (Token(tag, MAIN), Some(alone), Some(message)) = (other.token, &mut self.alone, &other.message)
                && let Some(notes) = alone.unmoved(other.token)
            {
                // Given back by the broker it would look like the victim of a crash: a copy does not.
                let copy = Copy { token: Token(tag, MAIN), to: To::Back, message: message.message.clone(), notes };
                self.start_copy(copy);
                continue;
            }
            let Some(tag) = self.alone.as_mut().and_then(|alone| alone.place(other.token)) else {
                match self.tags.requeue(other.token.0) {
                    Some(frame) => self.frames.push(frame),
                    None => exceptions.push((other.op, Settled::Stale)),
                }
                continue;
            };
            match self.alone.as_ref().and_then(|alone| alone.release(tag, other.message)) {
                Some(copy) => self.start_copy(copy),
                None => exceptions.push((other.op, Settled::Stale)),
            }
        }
        plan.noted.clear();
        self.due = plan.upto;
        self.urgent |= std::mem::take(&mut plan.urgent);
        Ok(())
    }

    /// Hands the first `n` of the stash on.
    fn push(&mut self, n: usize) {
        let now = millis(self.session.env.wall());
        let mut batch = Vec::with_capacity(n);
        for _ in 0..n {
            let Some(delivery) = self.fetch.stash.pop_front() else { break };
            let tag = delivery.delivery_tag;
            let (exchange, key) = (delivery.exchange, delivery.routing_key);
            let arrived = decode(delivery.properties, exchange.as_str(), key.as_str(), delivery.data);
            self.sort(tag, delivery.redelivered, arrived, now, &mut batch);
        }
        // Nobody may have one of a stream, though its session ends at once.
        if !self.is_stream {
            self.lane.push(batch);
        }
    }

    fn sort(&mut self, tag: u64, redelivered: bool, arrived: Arrived, now: u64, batch: &mut Vec<Incoming>) {
        let Arrived { message, mut notes, returned, offset } = arrived;
        self.is_stream |= offset.is_some();
        let rest = notes.rest(now);
        if !rest.is_zero() && (Rung::of(rest).is_some() || !self.lane.may_park()) {
            self.start_copy(Copy { token: Token(tag, MAIN), to: To::Delay, message, notes });
            return;
        }
        if redelivered && returned.is_none() && self.tracked && rest.is_zero() {
            // A classic queue only says that it was taken before: the count is written on a copy first. It comes by the
            // shortest delay queue, so that the original's acknowledgement has arrived before anybody can die of the copy:
            // else both would live on.
            notes.takes = notes.takes.saturating_add(1);
            self.start_copy(Copy { token: Token(tag, MAIN), to: To::Settle, message, notes });
            return;
        }
        let mut incoming = Incoming::new(Token(tag, MAIN), Position::default(), message);
        incoming.attempt = notes.attempt.max(1);
        incoming.takes = notes.takes.saturating_add(returned.unwrap_or(0)).saturating_add(1);
        if (incoming.takes > 1 || notes != Notes::default())
            && let Some(alone) = &mut self.alone
        {
            alone.note(incoming.token, notes);
        }
        if rest.is_zero() {
            batch.push(incoming);
        } else {
            self.lane.push_due(incoming, self.session.env.now() + rest);
        }
    }
}

enum What {
    Stop,
    Drain,
    Unbound(Error),
    Written(lapin::Result<u64>),
    Plan,
    Copied(Copy),
    Alone(crate::alone::Event),
    Arrived(usize),
}
