//! A connection to the broker: what `connect` returns.

use crate::admin::MemoryAdmin;
use crate::broadcast::BroadcastConsumer;
use crate::core::Core;
use crate::driver::{CONNECT, MemoryDriver};
use crate::faults::FaultPlan;
use crate::fetch::MemoryConsumer;
use crate::member::Member;
use crate::presence::Presence;
use crate::producer::MemoryProducer;
use async_trait::async_trait;
use futures_util::future::join_all;
use mq_api::{
    Admin, Broker, Capabilities, CloseReport, Consumer, ConsumerControl, Control, Error, ErrorKind, Feature,
    HealthSetter, HealthState, HealthWatch, Mode, Ordering as KeyOrder, Producer, ProducerSpec, Result, Start,
    Subscription,
};
use mq_core::{EngineConsumer, EngineProducer, Roster, Seat};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Tasks that were told to end have ended by then, wherever their runtime is driven: a close with a deadline of nothing waits
/// for that.
const TASKS_END: Duration = Duration::from_secs(1);

pub(crate) struct Client {
    pub(crate) core: Arc<Core>,
    /// Shared with what it makes.
    presence: Arc<Presence>,
    health: HealthSetter,
    closed: AtomicBool,
    members: Mutex<Vec<Weak<Member>>>,
    producers: Mutex<Vec<Weak<MemoryProducer>>>,
    /// For what goes through the engine: all with a fault plan, and what is settled before the hand-over.
    driver: Arc<MemoryDriver>,
    /// What went through the engine.
    roster: Roster,
}

impl Client {
    pub(crate) fn new(core: Arc<Core>) -> Arc<Self> {
        let health = HealthSetter::new(HealthState::Running, core.env.wall());
        let presence = Presence::new(&core);
        let plan = core.config.faults.unwrap_or(FaultPlan::none());
        let driver = Arc::new(MemoryDriver { core: core.clone(), plan, _presence: presence.clone() });
        Arc::new(Self {
            presence,
            core,
            health,
            closed: AtomicBool::new(false),
            members: Mutex::default(),
            producers: Mutex::default(),
            driver,
            roster: Roster::default(),
        })
    }

    /// Members that run.
    pub(crate) fn live_members(&self) -> Vec<Arc<Member>> {
        self.members.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// The program died: its producers write nothing any more.
    pub(crate) fn shut_producers(&self) {
        self.producers.lock().iter().filter_map(Weak::upgrade).for_each(|p| p.shut());
    }

    /// The program died: nobody closes this connection.
    pub(crate) fn forsake(&self) {
        self.closed.store(true, Ordering::Release);
        self.presence.leave();
    }

    pub(crate) fn open(&self) -> Result<()> {
        match self.closed.load(Ordering::Acquire) {
            true => Err(Error::closed("the broker")),
            false => {
                self.presence.be_here();
                Ok(())
            }
        }
    }

    fn no_native(&self, options: &std::collections::BTreeMap<String, String>) -> Result<()> {
        match options.keys().next() {
            Some(name) => Err(Error::new(
                ErrorKind::Config,
                format!("the in-memory broker has no native option '{name}'; it takes none"),
            )),
            None => Ok(()),
        }
    }

    fn group_consumer(&self, sub: Subscription, group: &mq_api::Group) -> Result<Box<dyn Consumer>> {
        let (member, consumer) = seat(&self.core, sub, group, true)?;
        self.members.lock().push(Arc::downgrade(&member));
        Ok(Box::new(consumer.kept_by(self.presence.clone())))
    }

    fn broadcast_consumer(&self, sub: Subscription) -> Result<Box<dyn Consumer>> {
        let core = &self.core;
        let topic = core.topic(&sub.topic, sub.partitions, sub.retention, sub.provisioning)?;
        let id = core.next_member();
        let member = Member::new(id, sub, core.clone(), topic.clone(), None, None, false);
        core.members.lock().insert(id, Arc::downgrade(&member));
        self.members.lock().push(Arc::downgrade(&member));
        let buffer = member.listen(&topic);
        let control = ConsumerControl::new(member.clone());
        Ok(Box::new(BroadcastConsumer { member, topic, buffer, control, _presence: self.presence.clone() }))
    }
}

/// Makes or verifies topic, group and dead-letter topic, and gives a member its seat. `times_out`: the broker ends what it
/// holds for longer than `max_processing`.
pub(crate) fn seat(
    core: &Arc<Core>,
    sub: Subscription,
    group: &mq_api::Group,
    times_out: bool,
) -> Result<(Arc<Member>, MemoryConsumer)> {
    let topic = core.topic(&sub.topic, sub.partitions, sub.retention, sub.provisioning)?;
    if let Start::Replay(_) = sub.start
        && topic.keep.history == 0
    {
        return Err(Error::unsupported(
            &core.capabilities.backend,
            Feature::Replay,
            "this topic trims what all groups handled; make it in log mode (Retention::Log)",
        ));
    }
    if topic.find_group(group).is_none() && sub.provisioning != mq_api::Provisioning::Create {
        let (kind, why) = match sub.provisioning {
            mq_api::Provisioning::Verify => (ErrorKind::Topology, "provisioning is Verify"),
            _ => (ErrorKind::NotFound, "provisioning is None"),
        };
        let text = format!("group '{group}' of topic '{}' does not exist and {why}; make it, or use Create", sub.topic);
        return Err(Error::new(kind, text));
    }
    let per_key = sub.ordering == KeyOrder::PerKey;
    if let Some(found) = topic.find_group(group) {
        found.refuse_other_order(per_key, &sub.topic)?;
    }
    let handle = topic.group_with_order(group, sub.start, per_key);
    // The target of dead letters is checked now, not at the first poison message.
    let dead = match sub.dead_letter_topic() {
        Some(name) if sub.guarantee == mq_api::Guarantee::AtLeastOnce => {
            Some(core.letters_topic(&name, sub.provisioning)?)
        }
        _ => None,
    };
    let id = core.next_member();
    let member = Member::new(id, sub, core.clone(), topic, Some(handle.clone()), dead, times_out);
    core.members.lock().insert(id, Arc::downgrade(&member));
    core.env.notice_pause();
    handle.join(&member);
    Ok((member.clone(), MemoryConsumer::new(member, handle)))
}

#[async_trait]
impl Broker for Client {
    fn capabilities(&self) -> Arc<Capabilities> {
        self.core.capabilities.clone()
    }

    async fn open_producer(&self, spec: ProducerSpec) -> Result<Arc<dyn Producer>> {
        self.open()?;
        self.core.capabilities.check_producer(&spec)?;
        self.no_native(&spec.native)?;
        let topic = self.core.topic(&spec.topic, spec.partitions, spec.retention, spec.provisioning)?;
        for group in &spec.groups {
            if topic.find_group(group).is_none() && spec.provisioning == mq_api::Provisioning::Verify {
                let text =
                    format!("group '{group}' of topic '{}' does not exist and provisioning is Verify", spec.topic);
                return Err(Error::new(ErrorKind::Topology, text));
            }
            if spec.provisioning == mq_api::Provisioning::Create {
                topic.group(group, Start::Oldest, false);
            }
        }
        if self.core.config.faults.is_some() {
            let (env, hooks) = (self.core.env.clone(), self.core.hooks.clone());
            let producer = EngineProducer::start(self.driver.clone(), spec, env, hooks, CONNECT).await?;
            self.roster.producer(&producer).await?;
            return Ok(producer);
        }
        let producer = MemoryProducer::new(self.core.clone(), topic, spec, Some(self.presence.clone()));
        let mut producers = self.producers.lock();
        producers.retain(|p| p.strong_count() > 0);
        producers.push(Arc::downgrade(&producer));
        drop(producers);
        if let Err(closed) = self.open() {
            producer.shut();
            return Err(closed);
        }
        Ok(producer)
    }

    async fn open_consumer(&self, subscription: Subscription) -> Result<Box<dyn Consumer>> {
        self.open()?;
        self.core.capabilities.check(&subscription)?;
        self.no_native(&subscription.native)?;
        self.members.lock().retain(|m| m.strong_count() > 0);
        let name = self.roster.admit(&subscription)?;
        if let Some(seat) = name.seat() {
            let lives =
                |m: &Arc<Member>| !m.is_stopping() && !m.is_crashed() && Seat::of(&m.sub).as_ref() == Some(seat);
            seat.refuse_if(self.live_members().iter().any(lives))?;
        }
        // What is settled before the hand-over has its bounds and its order from the engine.
        let faulty = self.core.config.faults.is_some() && subscription.group_name().is_some();
        if faulty || subscription.settles_first() {
            let (env, hooks) = (self.core.env.clone(), self.core.hooks.clone());
            let consumer = EngineConsumer::start(self.driver.clone(), subscription, env, hooks, CONNECT).await?;
            self.roster.consumer(consumer.control(), name).await?;
            return Ok(Box::new(consumer));
        }
        let consumer = match subscription.mode.clone() {
            Mode::Group(group) => self.group_consumer(subscription, &group)?,
            Mode::Broadcast => self.broadcast_consumer(subscription)?,
        };
        if self.closed.load(Ordering::Acquire) {
            // On another thread: the close may have seen no member yet.
            consumer.control().close(Duration::ZERO).await;
        }
        self.open().map(|()| consumer)
    }

    fn admin(&self) -> Arc<dyn Admin> {
        Arc::new(MemoryAdmin::new(self.core.clone()))
    }

    fn health(&self) -> HealthWatch {
        self.health.watch()
    }

    async fn close(&self, deadline: Duration) -> CloseReport {
        self.closed.store(true, Ordering::Release);
        let members: Vec<_> = self.members.lock().iter().filter_map(Weak::upgrade).collect();
        let producers: Vec<_> = self.producers.lock().iter().filter_map(Weak::upgrade).collect();
        let mut report = CloseReport::default();
        let env = &self.core.env;
        let until = env.after(deadline);
        // All drain at once: the deadline is for all of them together.
        let closing = join_all(members.iter().map(|m| m.close(deadline)));
        let (closed, engine) = tokio::join!(closing, self.roster.close(deadline, async { 0 }));
        closed.into_iter().chain([engine]).for_each(|one| report += one);
        producers.iter().for_each(|p| p.shut());
        self.health.set(HealthState::Closed, "", self.core.env.wall());
        let joined = std::pin::pin!(self.core.timer.started());
        if self.presence.leave() {
            let until = until.max(env.after(TASKS_END));
            // A client that comes meanwhile has tasks of its own, which this one does not wait for.
            tokio::select! { biased;
                () = self.core.env.no_tasks() => {}
                () = joined => {}
                // They are in a runtime that nobody drives, and end when somebody does.
                () = tokio::time::sleep_until(until) => report.abandoned += self.core.env.tasks() as u64,
            }
        }
        report
    }
}
