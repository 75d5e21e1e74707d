//! The broker behind the engine's seam, as one behind a network would be: for fault plans, so that a simulation covers the
//! paths that run in production.

use crate::client::seat;
use crate::core::Core;
use crate::faults::FaultPlan;
use crate::fetch::MemoryConsumer;
use crate::group::Group;
use crate::letter::carry;
use crate::member::Member;
use crate::presence::Presence;
use crate::producer::MemoryProducer;
use crate::take::Taken;
use crate::topic::Topic;
use mq_api::{
    Capabilities, Error, ErrorKind, Guarantee, Message, Mode, Outcome, Position, Receipt, Result, SendResult, Settled,
    Subscription,
};
use mq_core::{
    Carry, Driver, End, Incoming, Lane, Mechanics, MoveBy, Outgoing, Plan, ReleaseBy, RetryBy, Run, Session,
    Settlement, SlotView, Token, TxSession,
};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

pub(crate) struct MemoryDriver {
    pub(crate) core: Arc<Core>,
    pub(crate) plan: FaultPlan,
    pub(crate) _presence: Arc<Presence>,
}

fn cut() -> Error {
    Error::new(ErrorKind::Disconnected, "the connection was cut (a planned fault)")
}

impl MemoryDriver {
    /// Whether a fault with this share happens now.
    fn happens(core: &Core, share: f64) -> bool {
        // No draw for what cannot happen: plans that differ in one fault share the rest of their run.
        share > 0.0 && core.env.random_share() < share
    }

    async fn pause(core: &Core, plan: &FaultPlan) {
        if !plan.delay.is_zero() {
            tokio::time::sleep(plan.delay.mul_f64(core.env.random_share())).await;
        }
    }
}

impl Driver for MemoryDriver {
    fn mechanics(&self) -> Mechanics {
        Mechanics { retry: RetryBy::Driver, dead_letter: MoveBy::Driver, release: ReleaseBy::Driver }
    }

    fn capabilities(&self) -> Arc<Capabilities> {
        self.core.capabilities.clone()
    }

    async fn attach(&self, session: Session) -> Result<Run> {
        Self::pause(&self.core, &self.plan).await;
        let sub: Subscription = (*session.subscription).clone();
        let Mode::Group(group) = sub.mode.clone() else {
            return Err(Error::new(ErrorKind::Unsupported, "broadcast does not go through the engine in memory"));
        };
        // Settled before the hand-over is the engine's work; the broker sees an early acknowledgement.
        let sub = sub.guarantee(Guarantee::AtLeastOnce).member(session.member.to_string());
        let (member, consumer) = seat(&self.core, sub, &group, false)?;
        let (core, plan, seat) = (self.core.clone(), self.plan, member.seat());
        let serving = Serving { core, plan, session, member, consumer, lanes: BTreeMap::new(), seat };
        Ok(Box::pin(serving.run()))
    }

    async fn open_tx(&self, tx: TxSession) -> Result<Run> {
        Self::pause(&self.core, &self.plan).await;
        let topic = self.core.topic(&tx.spec.topic, tx.spec.partitions, tx.spec.retention, tx.spec.provisioning)?;
        for group in &tx.spec.groups {
            topic.group(group, mq_api::Start::Oldest, false);
        }
        let producer = MemoryProducer::new(self.core.clone(), topic, (*tx.spec).clone(), None);
        let (core, plan) = (self.core.clone(), self.plan);
        Ok(Box::pin(async move {
            let mut batch = Vec::new();
            loop {
                tokio::select! { biased;
                    () = tx.outbox.take(64, 1 << 20, &mut batch) => {}
                    () = tx.stop.cancelled() => return End::Closed,
                }
                Self::pause(&core, &plan).await;
                if Self::happens(&core, plan.cut) {
                    // Some of the batch was written, the answers are lost.
                    let written = batch.len() / 2;
                    batch.drain(..written).for_each(|out| drop(store(&core, &plan, &producer, out.message)));
                    return End::Lost(cut());
                }
                let results: Vec<(u64, SendResult)> = batch
                    .drain(..)
                    .map(|Outgoing { ticket, message, .. }| (ticket, store(&core, &plan, &producer, message)))
                    .collect();
                tx.outbox.complete(results);
            }
        }))
    }
}

/// Writes the attempt number of a message that this member holds.
fn record_attempt(member: &Arc<Member>, topic: &Topic, group: &Group, token: Token, attempt: u32) {
    let Some(part) = topic.parts.get(token.0 as usize) else { return };
    let mut part = part.lock();
    if let Some(slot) = part.groups.get_mut(group.number)
        && let Some(entry) = slot.held_by_member(member.id, token.1)
    {
        entry.set(attempt, crate::pending::HELD);
    }
}

fn store(core: &Core, plan: &FaultPlan, producer: &MemoryProducer, message: Message) -> SendResult {
    if MemoryDriver::happens(core, plan.full) {
        let error = Error::new(ErrorKind::Full, "the topic is full (a planned fault)");
        producer.trace_refused(&error, &message);
        return Err(error.with_outcome(Outcome::Rejected));
    }
    let twice = MemoryDriver::happens(core, plan.duplicate);
    let receipt: Receipt = producer.store(message.clone())?;
    if twice {
        producer.store(message)?;
    }
    if MemoryDriver::happens(core, plan.confirm_lost) {
        let error = Error::new(ErrorKind::Timeout, "the confirmation was lost (a planned fault)");
        return Err(error.with_outcome(Outcome::Unknown));
    }
    Ok(receipt)
}

/// One consumer's session.
struct Serving {
    core: Arc<Core>,
    plan: FaultPlan,
    session: Session,
    member: Arc<Member>,
    consumer: MemoryConsumer,
    lanes: BTreeMap<(usize, u64), Arc<Lane>>,
    /// Where those are: a topic that is made again has the same numbers.
    seat: (Arc<Topic>, Option<Arc<Group>>),
}

impl Serving {
    async fn run(mut self) -> End {
        let end = self.serve().await;
        if let End::Lost(_) = end {
            self.lost();
        }
        self.member.leave();
        end
    }

    async fn serve(&mut self) -> End {
        let mut plan = Plan::default();
        let mut taken = Vec::new();
        loop {
            let (flow, settles) = (self.session.flow.clone(), self.session.settles.clone());
            let stop = self.session.stop.clone();
            let consumer = &mut self.consumer;
            tokio::select! { biased;
                () = settles.take(&mut plan) => {}
                () = stop.cancelled() => return self.give_back(),
                taking = poll_fn(|cx| {
                    if let Poll::Ready(changed) = consumer.poll_changed(cx) {
                        return Poll::Ready(changed);
                    }
                    let credit = std::task::ready!(flow.poll_credit(cx));
                    consumer.poll_take(cx, credit.count.min(64), &mut taken)
                }) => if let Err(error) = taking {
                    // Somebody deleted what is not ours to make; it may come back.
                    return End::Lost(error);
                },
            }
            if self.member.is_crashed() {
                self.forget_untaken(&taken);
                return End::Closed;
            }
            MemoryDriver::pause(&self.core, &self.plan).await;
            if MemoryDriver::happens(&self.core, self.plan.cut) {
                return End::Lost(cut());
            }
            if MemoryDriver::happens(&self.core, self.plan.lose_lease) {
                self.lose_leases(&taken);
                taken.clear();
            }
            let ack_lost = !plan.is_empty() && MemoryDriver::happens(&self.core, self.plan.ack_lost);
            self.settle(&mut plan, ack_lost);
            if ack_lost {
                return End::Lost(cut());
            }
            self.deliver(&mut taken);
        }
    }

    /// When topic or group was made again, what is held of the former is gone with it.
    fn follow_seat(&mut self) {
        let seat = self.member.seat();
        let same = Arc::ptr_eq(&seat.0, &self.seat.0)
            && seat.1.as_ref().map(Arc::as_ptr) == self.seat.1.as_ref().map(Arc::as_ptr);
        if !same {
            self.seat = seat;
            self.lose_held();
            self.lanes.clear();
        }
    }

    /// What its lanes hold is no longer owned.
    fn lose_held(&self) {
        let mut held = Vec::new();
        for lane in self.lanes.values() {
            held.clear();
            lane.held(&mut held);
            lane.lose(&held);
        }
    }

    fn lane(&mut self, part: usize, epoch: u64) -> Arc<Lane> {
        let session = &self.session;
        self.lanes.entry((part, epoch)).or_insert_with(|| session.open_lane(Some(part as u32), epoch)).clone()
    }

    fn deliver(&mut self, taken: &mut Vec<Taken>) {
        self.follow_seat();
        let per_key = self.session.subscription.ordering == mq_api::Ordering::PerKey;
        if !per_key && taken.len() > 1 && MemoryDriver::happens(&self.core, self.plan.reorder) {
            taken.reverse();
        }
        for Taken { part, epoch, position, stored, attempt } in taken.drain(..) {
            let incoming = Incoming {
                token: Token(part as u64, position),
                position: Position::offset(position),
                message: stored.message.clone(),
                attempt,
                // Suspects are the broker's own work here.
                takes: 1,
                trials: 0,
            };
            self.lane(part, epoch).push([incoming]);
        }
    }

    fn settle(&mut self, plan: &mut Plan, silent: bool) {
        self.follow_seat();
        let (topic, Some(group)) = self.seat.clone() else { return };
        let ours: Vec<u32> = self.lanes.values().map(|lane| lane.id()).collect();
        let mut exceptions = Vec::new();
        let mut one = |lane: u32, token: Token, op: u64, how: Settlement| {
            if !ours.contains(&lane) {
                exceptions.push((op, Settled::Stale));
                return;
            }
            let settled = carry(&self.member, &topic, &group, token.0 as usize, token.1, how);
            if settled == Settled::Stale {
                exceptions.push((op, settled));
            }
        };
        for ack in plan.acks.drain(..) {
            one(ack.lane, ack.token, ack.op, Settlement::Ack);
        }
        for other in plan.others.drain(..) {
            match other.how {
                Carry::Settle(how) => one(other.lane, other.token, other.op, how),
                Carry::Trial(_) => self.session.settles.trial_recorded(other.lane, other.token),
            }
        }
        // Parked in the member under `PerKey`: the broker records the new attempt number, so that it does not die with it.
        for noted in plan.noted.drain(..) {
            let Some(lane) = self.session.lane(noted) else { continue };
            lane.visit(|slot| {
                if !slot.settled {
                    record_attempt(&self.member, &topic, &group, slot.token, slot.attempt);
                }
            });
        }
        if !silent && plan.upto > 0 {
            self.session.settles.confirm(plan.upto, exceptions);
        }
    }

    fn lose_leases(&mut self, taken: &[Taken]) {
        self.release_untaken(taken);
        self.release(|slot| !slot.handed);
        self.lose_held();
        self.core.lose_leases(&self.member, false);
    }

    /// It died: what nobody was handed was not attempted. It comes free with the rest, when the leases end.
    fn forget_untaken(&self, taken: &[Taken]) {
        let (topic, Some(group)) = &self.seat else { return };
        let never = |token: Token, attempt: u32| record_attempt(&self.member, topic, group, token, attempt - 1);
        for one in taken {
            never(Token(one.part as u64, one.position), one.attempt.max(1));
        }
        for lane in self.lanes.values() {
            lane.visit(|slot| {
                if !slot.settled && !slot.handed {
                    never(slot.token, slot.attempt.max(1));
                }
            });
        }
    }

    /// Taken and not pushed: was never handed over, so it does not count.
    fn release_untaken(&self, taken: &[Taken]) {
        let (topic, Some(group)) = self.member.seat() else { return };
        for one in taken {
            carry(&self.member, &topic, &group, one.part, one.position, Settlement::Release);
        }
    }

    /// Gives back, uncounted, what is unsettled and `meant`.
    fn release(&self, meant: impl Fn(&SlotView) -> bool) {
        let (topic, Some(group)) = self.member.seat() else { return };
        for lane in self.lanes.values() {
            lane.visit(|slot| {
                if !slot.settled && meant(&slot) {
                    let (part, position) = (slot.token.0 as usize, slot.token.1);
                    carry(&self.member, &topic, &group, part, position, Settlement::Release);
                }
            });
        }
    }

    /// The connection is gone: what was handed over counts as taken, what was only buffered does not.
    fn lost(&mut self) {
        self.release(|slot| !slot.handed);
        self.core.lose_leases(&self.member, true);
    }

    fn give_back(&mut self) -> End {
        let mut plan = Plan::default();
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        while self.session.settles.poll_take(&mut cx, &mut plan).is_ready() {
            self.settle(&mut plan, false);
        }
        self.release(|_| true);
        End::Closed
    }
}

/// Attempts follow closely: the broker is in this process.
pub(crate) const CONNECT: mq_core::ConnectPolicy = mq_core::ConnectPolicy {
    first: Duration::from_secs(30),
    min_pause: Duration::from_millis(20),
    max_pause: Duration::from_secs(1),
    attempt: Duration::from_secs(10),
};
