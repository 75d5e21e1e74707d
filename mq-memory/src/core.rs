//! The broker itself: topics, members, clock. Handles share it; it lives while one of them does.

use crate::group::Group;
use crate::letter::{Letter, give_back};
use crate::member::Member;
use crate::partition::{Keep, Part};
use crate::pending::ANYBODY;
use crate::timer::Timer;
use crate::topic::Topic;
use crate::trace::{Place, Trace, What};
use crate::url::MemoryConfig;
use mq_api::{Capabilities, Error, ErrorKind, Provisioning, Result, Retention, Support, Takeover, Topic as Name};
use mq_core::{Env, Hooks};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

pub(crate) struct Core {
    /// What it was made with.
    pub(crate) config: MemoryConfig,
    pub(crate) capabilities: Arc<Capabilities>,
    pub(crate) env: Env,
    pub(crate) hooks: Arc<dyn Hooks>,
    pub(crate) timer: Timer,
    pub(crate) trace: Option<Arc<Trace>>,
    /// Somebody wants to hear of every message, so that none takes the short way.
    pub(crate) watched: bool,
    pub(crate) topics: Mutex<BTreeMap<Arc<str>, Arc<Topic>>>,
    /// By number: no default hasher decides who is told first.
    pub(crate) members: Mutex<BTreeMap<u32, Weak<Member>>>,
    pub(crate) dying: Mutex<Vec<Arc<Member>>>,
    pub(crate) clients: AtomicUsize,
    next_member: AtomicU32,
    /// What the living handles share.
    holder: Mutex<Weak<Holder>>,
    start: tokio::time::Instant,
}

impl Core {
    pub(crate) fn new(config: MemoryConfig, env: Env, (hooks, listens): (Arc<dyn Hooks>, bool)) -> Arc<Self> {
        let mut capabilities = config.profile.capabilities();
        for feature in &config.without {
            capabilities = capabilities.with(*feature, Support::Unsupported("its configuration takes it away"));
        }
        let trace = config.record.then(Trace::new);
        Arc::new(Self {
            config,
            capabilities: Arc::new(capabilities),
            hooks,
            watched: listens || trace.is_some(),
            timer: Timer::default(),
            trace,
            topics: Mutex::default(),
            members: Mutex::default(),
            dying: Mutex::default(),
            clients: AtomicUsize::new(0),
            next_member: AtomicU32::new(1),
            holder: Mutex::default(),
            start: env.now(),
            env,
        })
    }

    /// Members that are there, by number.
    pub(crate) fn live_members(&self) -> Vec<Arc<Member>> {
        self.members.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// For a handle to keep.
    pub(crate) fn hold(self: &Arc<Self>) -> Arc<Holder> {
        let mut holder = self.holder.lock();
        if let Some(found) = holder.upgrade() {
            return found;
        }
        let made = Arc::new(Holder(self.clone()));
        *holder = Arc::downgrade(&made);
        made
    }

    /// What is still to be done changed by the operator's hand, which nobody records.
    pub(crate) fn work_changed(&self) {
        if let Some(trace) = &self.trace {
            trace.changed.notify_waiters();
        }
    }

    /// Whether somebody can reach it.
    pub(crate) fn is_held(&self) -> bool {
        self.holder.lock().strong_count() > 0
    }

    /// A number that no member has which is there. They are used again only after four billion others, so that handles of one
    /// that left settle nothing of another's.
    pub(crate) fn next_member(&self) -> u32 {
        loop {
            let id = self.next_member.fetch_add(1, Ordering::Relaxed);
            if !matches!(id, 0 | ANYBODY) && !self.members.lock().contains_key(&id) {
                return id;
            }
        }
    }

    /// How long the broker hears nothing of a member until it takes it for dead: the lease, or where leases are not what counts
    /// (heartbeats, sessions), two thirds of the stated bound.
    pub(crate) fn silence(&self, lease: Duration) -> Duration {
        match self.capabilities.takeover {
            Takeover { lease_tenths: 0, fixed } => fixed * 2 / 3,
            _ => lease,
        }
    }

    /// Tenths of a second since the start.
    pub(crate) fn tenths(&self) -> u32 {
        ((self.env.now() - self.start).as_millis() / 100) as u32
    }

    fn keep(&self, retention: Option<Retention>) -> Keep {
        let MemoryConfig { history, capacity, capacity_bytes: bytes, .. } = self.config;
        let retention = retention.or(self.config.profile.retention());
        match retention {
            Some(Retention::Handled { max }) => Keep::handled(0, max, bytes),
            Some(Retention::Log { max, age }) => Keep::log(max, age, bytes),
            // `Some`: a retention of a later version of the API; keep what can be kept.
            None | Some(_) => Keep::handled(history, capacity, bytes),
        }
    }

    pub(crate) fn find_topic(&self, name: &Name) -> Option<Arc<Topic>> {
        self.topics.lock().get(name.as_str()).cloned()
    }

    /// The topic of dead letters. Where nothing is made or checked it is made too: a program cannot be asked to make what only
    /// this library names.
    pub(crate) fn letters_topic(&self, name: &Name, provisioning: Provisioning) -> Result<Arc<Topic>> {
        let provisioning = match provisioning {
            Provisioning::None => Provisioning::Create,
            other => other,
        };
        self.topic(name, None, None, provisioning)
    }

    /// The topic, made or verified as `provisioning` says.
    pub(crate) fn topic(
        &self,
        name: &Name,
        partitions: Option<u32>,
        retention: Option<Retention>,
        provisioning: Provisioning,
    ) -> Result<Arc<Topic>> {
        let mut topics = self.topics.lock();
        if let Some(found) = topics.get(name.as_str()) {
            if provisioning != Provisioning::None {
                found.same_partitions(partitions)?;
                if let Some(retention) = retention
                    && self.keep(Some(retention)) != found.keep
                {
                    let text = format!(
                        "topic '{name}' keeps messages by {:?}, {retention:?} was asked for; use what it has, or make it anew",
                        found.keep
                    );
                    return Err(Error::new(ErrorKind::Topology, text));
                }
            }
            return Ok(found.clone());
        }
        if provisioning != Provisioning::Create {
            let text =
                format!("topic '{name}' does not exist and provisioning is {provisioning:?}; make it, or use Create");
            return Err(Error::new(ErrorKind::Topology, text));
        }
        let count = partitions.unwrap_or(if name.dead_letters_of().is_some() { 1 } else { self.config.partitions });
        let exclusive = count > 1 || self.config.profile.always_exclusive();
        let first = self.env.random() % u64::from(count);
        let topic = Topic::new(name.clone(), count, self.keep(retention), exclusive, first);
        topics.insert(name.shared_name(), topic.clone());
        drop(topics);
        // Those who listened to one of this name that was deleted hear the new one from its first message.
        self.live_members().iter().for_each(|member| member.listen_again(&topic));
        tracing::info!(broker = self.config.name, topic = %name, partitions = count, "topic made");
        Ok(topic)
    }

    /// A member that held `position` died or lost its lease: it comes free, alone if it is suspected, and goes to the dead
    /// letters when its consumers died with it alone often enough. `lives`: the member lost its connection and is known to live.
    pub(crate) fn lost_by(
        &self,
        member: &Member,
        topic: &Arc<Topic>,
        group: &Arc<Group>,
        number: usize,
        position: u64,
        lives: bool,
    ) {
        let Some(shared) = topic.parts.get(number) else { return };
        let mut guard = shared.lock();
        let part: &mut Part = &mut guard;
        let Some(slot) = part.groups.get_mut(group.number) else { return };
        let Some(entry) = slot.held_by_member(member.id, position).copied() else { return };
        let attempt = entry.attempt();
        let history = slot.history.entry(position).or_default();
        history.takes = history.takes.max(attempt);
        if lives {
            history.untried();
        }
        let crashed = history.trials >= member.policy.crash_trials && member.suspect_at() != u32::MAX;
        if let Some(trace) = &self.trace {
            let id = part.log.get(position).and_then(|c| c.stored.as_ref()).map(|s| s.message.id.clone());
            let place = Place {
                topic: &topic.name,
                group: Some(&group.name),
                partition: number as u32,
                position,
                member: Some(&member.name),
            };
            trace.push(What::Lost, place, &id.unwrap_or_default());
        }
        slot.wake_lost(position);
        if crashed {
            let letter = Letter { topic, group, part: number, position, attempt, member };
            letter.settle_crashed(self, part);
        } else {
            give_back(self, (topic, number), group, part, (position, attempt + 1), member.suspect_at());
        }
        part.waiting = true;
        part.wake();
        drop(guard);
        member.end_suspect(number, position);
        member.flow.give(1, entry.size as usize);
        group.assign_free();
    }

    /// Takes away the lease of everything a member holds: it did not renew in time, or, when it `lives`, lost its connection.
    pub(crate) fn lose_leases(&self, member: &Member, lives: bool) -> usize {
        let (topic, Some(group)) = member.seat() else { return 0 };
        let mut n = 0;
        for (number, part) in topic.parts.iter().enumerate() {
            let held = part.lock().groups.get(group.number).map(|g| g.held_positions(member.id)).unwrap_or_default();
            for position in held {
                self.lost_by(member, &topic, &group, number, position, lives);
                n += 1;
            }
        }
        n
    }
}

/// Lives while somebody can reach the broker: through a client, or as its operator. Members that died keep the broker until
/// their leases end; when nobody is there to see that, it does not happen.
pub(crate) struct Holder(Arc<Core>);

impl Drop for Holder {
    fn drop(&mut self) {
        let dying = std::mem::take(&mut *self.0.dying.lock());
        drop(dying);
    }
}

impl std::fmt::Debug for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "memory://{} ({} topics)", self.config.name, self.topics.lock().len())
    }
}

#[cfg(test)]
#[allow(clippy::expect_used)]
mod tests {
    use crate::{MemoryBroker, MemoryConfig};
    use mq_api::{BrokerExt, ConsumerExt, Message, Result, Subscription};
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    /// However many members there were before it, what a member held is given back.
    #[tokio::test(start_paused = true)]
    async fn members_are_told_apart_after_very_many() -> Result<()> {
        for before in [1 << 20, u32::MAX - 1, u32::MAX] {
            let memory = MemoryBroker::new(MemoryConfig::default())?;
            let broker = memory.connect();
            let producer = broker.producer("t").await?;
            let mut kept = broker.subscribe(Subscription::group("t", "other").member("first")).await?;
            memory.core.next_member.store(before, Ordering::Relaxed);
            producer.send(Message::new("x")).await?;
            for _ in 0..4 {
                let mut consumer = broker.subscribe(Subscription::group("t", "g")).await?;
                let held = consumer.recv().await?.expect("open");
                assert_eq!(consumer.control().close(Duration::ZERO).await.given_back, 1);
                assert!(!held.is_owned());
            }
            kept.recv().await?.expect("open").ack().await;
        }
        Ok(())
    }
}
