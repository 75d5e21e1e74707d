//! The producer: appends in the caller's own task. The broker is in this process, so every send is confirmed when it returns.

use crate::core::Core;
use crate::partition::Part;
use crate::presence::Presence;
use crate::topic::Topic;
use crate::trace::{Place, What};
use futures_core::future::BoxFuture;
use mq_api::{
    Batch, CloseReport, Durability, Error, HealthSetter, HealthState, HealthWatch, Message, Position, Producer,
    ProducerSpec, Receipt, SendOptions, SendResult, Sending, SendingBatch,
};
use mq_core::stamp;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

pub(crate) struct MemoryProducer {
    pub(crate) core: Arc<Core>,
    /// The topic that it was opened on.
    topic: Arc<Topic>,
    /// The topic that was made after somebody deleted that one.
    again: Mutex<Option<Arc<Topic>>>,
    spec: ProducerSpec,
    level: Durability,
    /// It is open, nobody wants to hear of every message, and messages need no group to be kept: sending is appending.
    short: AtomicBool,
    closed: AtomicBool,
    /// Sends since one yielded.
    streak: AtomicU32,
    health: HealthSetter,
    /// Behind the engine's seam the driver has it.
    _presence: Option<Arc<Presence>>,
}

/// Ready results in a row after which others get a turn.
const BUDGET: u32 = 128;

impl MemoryProducer {
    pub(crate) fn new(
        core: Arc<Core>,
        topic: Arc<Topic>,
        spec: ProducerSpec,
        presence: Option<Arc<Presence>>,
    ) -> Arc<Self> {
        core.env.notice_pause();
        let health = HealthSetter::new(HealthState::Running, core.env.wall());
        let capabilities = &core.capabilities;
        let short = !core.watched && capabilities.retains_without_group && capabilities.receipt_positions;
        Arc::new(Self {
            level: capabilities.send_level,
            short: AtomicBool::new(short),
            core,
            topic,
            again: Mutex::default(),
            spec,
            closed: AtomicBool::new(false),
            streak: AtomicU32::new(0),
            health,
            _presence: presence,
        })
    }

    pub(crate) fn shut(&self) {
        self.closed.store(true, Ordering::Release);
        self.short.store(false, Ordering::Release);
        self.health.set(HealthState::Closed, "", self.core.env.wall());
    }

    /// The topic; made again if somebody deleted it and this producer makes what is missing.
    fn live_topic(&self) -> Result<Arc<Topic>, Error> {
        if !self.topic.deleted.load(Ordering::Acquire) {
            return Ok(self.topic.clone());
        }
        let mut again = self.again.lock();
        if let Some(topic) = &*again
            && !topic.deleted.load(Ordering::Acquire)
        {
            return Ok(topic.clone());
        }
        let spec = &self.spec;
        let fresh = self.core.topic(&spec.topic, spec.partitions, spec.retention, spec.provisioning);
        let fresh = fresh.map_err(|error| error.with_outcome(mq_api::Outcome::NotSent))?;
        // Its groups went with it.
        if spec.provisioning == mq_api::Provisioning::Create {
            for group in &spec.groups {
                fresh.group(group, mq_api::Start::Oldest, false);
            }
        }
        Ok(again.insert(fresh).clone())
    }

    /// The topic, if sending to it is no more than appending.
    #[inline(always)]
    fn short(&self) -> Option<&Topic> {
        let short = self.short.load(Ordering::Acquire) && !self.topic.deleted.load(Ordering::Acquire);
        short.then_some(&*self.topic)
    }

    /// The hot path of one message, up to the moment where it is certain that it is taken: the locked partition, its number,
    /// the size. `None` when there is anything to look at or to say; [`one`](Self::one) looks and says it.
    #[inline(always)]
    fn make_way(&self, message: &mut Message) -> Option<(MutexGuard<'_, Part>, usize, u32)> {
        let topic = self.short()?;
        let size = stamp(message, &self.spec, || self.core.env.wall()).ok()?;
        let (number, shared) = topic.pick(message);
        let mut part = shared.lock();
        part.admits(size, &topic.keep).then_some((part, number, size))
    }

    #[cold]
    #[inline(never)]
    fn send_long(&self, mut message: Message) -> Sending {
        match self.one(&mut message) {
            Ok(receipt) => Sending::confirmed(receipt, self.turn_ends()),
            Err(error) => Sending::failed(error, self.turn_ends()),
        }
    }

    /// Whether so many sends were ready at once that others must have a turn.
    #[inline(always)]
    fn turn_ends(&self) -> bool {
        self.streak.fetch_add(1, Ordering::Relaxed) % BUDGET == BUDGET - 1
    }

    fn append(&self, topic: &Topic, message: &mut Message, size: u32) -> SendResult {
        let (number, shared) = topic.pick(message);
        let core = &*self.core;
        let mut part = shared.lock();
        if !core.capabilities.retains_without_group && !topic.has_takers_in(&part) {
            drop(part);
            return self.without_takers(topic);
        }
        if !part.admits(size, &topic.keep) {
            return Err(topic.full());
        }
        if core.watched {
            self.trace(topic, number, part.log.tail(), message);
        }
        let spent = part.spent(&topic.keep);
        let position = part.append(std::mem::take(message), size, 0, spent);
        topic.after_append(core, &mut part, number);
        part.wake();
        drop(part);
        Ok(self.receipt(topic, number, position))
    }

    fn receipt(&self, topic: &Topic, number: usize, position: u64) -> Receipt {
        let receipt = Receipt::new(self.level);
        match self.core.capabilities.receipt_positions {
            true => receipt.at(Some(number as u32), Position::offset(position)),
            false if self.core.capabilities.counts_receivers => {
                receipt.received_by(topic.parts[number].lock().broadcast.len() as u32)
            }
            false => receipt,
        }
    }

    #[cold]
    fn without_takers(&self, topic: &Topic) -> SendResult {
        match self.core.capabilities.detects_unroutable {
            true => Err(topic.unroutable()),
            // Pub/Sub: nobody listens, which is no error.
            false => Ok(Receipt::new(self.level).received_by(0)),
        }
    }

    #[cold]
    fn trace(&self, topic: &Topic, number: usize, position: u64, message: &Message) {
        self.core.hooks.sent(&topic.name, 1);
        if let Some(trace) = &self.core.trace {
            let place = Place { topic: &topic.name, group: None, partition: number as u32, position, member: None };
            trace.push(What::Sent, place, &message.id);
        }
    }

    fn closed(&self) -> Option<Error> {
        self.closed.load(Ordering::Acquire).then(|| Error::closed("the producer"))
    }

    /// For the engine's driver: the message is stamped already.
    pub(crate) fn store(&self, mut message: Message) -> SendResult {
        self.one(&mut message)
    }

    fn one(&self, message: &mut Message) -> SendResult {
        let sent = self.try_one(message);
        if let Err(error) = &sent {
            self.trace_refused(error, message);
        }
        sent
    }

    pub(crate) fn trace_refused(&self, error: &Error, message: &Message) {
        if let Some(trace) = &self.core.trace {
            let place = Place { topic: &self.spec.topic, group: None, partition: 0, position: 0, member: None };
            trace.push(What::Refused(error.to_string()), place, &message.id);
        }
    }

    fn try_one(&self, message: &mut Message) -> SendResult {
        if let Some(error) = self.closed() {
            return Err(error);
        }
        let size = stamp(message, &self.spec, || self.core.env.wall())?;
        let topic = self.live_topic()?;
        self.append(&topic, message, size)
    }
}

impl Producer for MemoryProducer {
    #[inline]
    fn send(&self, mut message: Message) -> Sending {
        let Some((mut part, number, size)) = self.make_way(&mut message) else { return self.send_long(message) };
        let spent = part.spent(&self.topic.keep);
        let position = part.append(message, size, 0, spent);
        self.topic.after_append(&self.core, &mut part, number);
        part.wake();
        drop(part);
        let receipt = Receipt::new(self.level).at(Some(number as u32), Position::offset(position));
        Sending::confirmed(receipt, self.turn_ends())
    }

    fn send_with(&self, message: Message, _: SendOptions) -> Sending {
        // Nothing waits here, so no time limit can pass.
        self.send(message)
    }

    fn send_batch(&self, mut batch: Batch) -> SendingBatch {
        batch.clear_outcomes();
        let mut messages = std::mem::take(&mut batch.messages);
        if let Some(topic) = self.short()
            && topic.parts.len() == 1
        {
            self.append_run(topic, &mut messages, &mut batch);
        }
        for mut message in messages.drain(..) {
            batch.push(self.one(&mut message));
        }
        batch.messages = messages;
        SendingBatch::ready(batch)
    }

    fn flush(&self, _: Duration) -> BoxFuture<'_, bool> {
        Box::pin(std::future::ready(true))
    }

    fn close(&self, _: Duration) -> BoxFuture<'_, CloseReport> {
        self.shut();
        Box::pin(std::future::ready(CloseReport::default()))
    }

    fn health(&self) -> HealthWatch {
        self.health.watch()
    }

    fn topic(&self) -> &mq_api::Topic {
        &self.spec.topic
    }
}

impl MemoryProducer {
    /// The hot path of a batch: one lock, one pass, one run of outcomes. Leaves nothing in `messages`.
    fn append_run(&self, topic: &Topic, messages: &mut Vec<Message>, batch: &mut Batch) {
        let now = self.core.env.wall();
        let mut part = topic.parts[0].lock();
        let mut first = part.log.tail();
        let spent = part.spent(&topic.keep);
        for mut message in messages.drain(..) {
            let refused = match stamp(&mut message, &self.spec, || now) {
                Ok(size) if part.admits(size, &topic.keep) => {
                    part.append(message, size, 0, spent);
                    continue;
                }
                Ok(_) => topic.full(),
                Err(error) => error,
            };
            batch.push_run(self.receipt(topic, 0, first), (part.log.tail() - first) as u32);
            batch.push(Err(refused));
            first = part.log.tail();
        }
        let n = (part.log.tail() - first) as u32;
        topic.after_append(&self.core, &mut part, 0);
        part.wake();
        drop(part);
        batch.push_run(self.receipt(topic, 0, first), n);
    }
}
