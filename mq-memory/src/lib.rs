//! The in-memory broker: a broker, not a mock.
//!
//! It keeps every promise of the library (groups, leases, delays, retries, dead letters, order per key, replay, bounds), works
//! under tokio's paused clock, can be told to misbehave, and can take the capabilities of another broker
//! (`memory://test?profile=kafka`), so that a unit test refuses what production refuses.
//!
//! # URL
//! `memory://name?profile=&partitions=&history=&capacity=&capacity_bytes=&seed=&record=`. Handles of one process that use the
//! same name reach the same broker while one of them lives; different names never meet. See [`MemoryConfig`].
//!
//! # Mapping
//! A topic is a set of partitioned logs; a group is a cursor and a list of pending entries with owners in each.
//!
//! # Delivery
//! In the caller's own task: send, receive and settle take one lock each.
//!
//! # Ordering
//! Per key by a gate in the partition. Topics of several partitions give each partition to one member at a time.
//!
//! # Redelivery
//! Delayed entries wait at the broker; a dead member's entries come free when its leases end.
//!
//! # Reconnect
//! There is no connection to lose. A topic or group deleted by somebody else is made again, with a `Gap`.
//!
//! # Native access
//! [`MemoryBroker`] gives crash and lease faults, the timeline, and the number of tasks.
//!
//! # Limits
//! Messages live in memory only ([`Durability::Memory`](mq_api::Durability)). A deleted group leaves a number behind, some
//! hundred bytes in each partition, until its topic is deleted too.

mod admin;
mod broadcast;
mod client;
mod clock;
mod core;
mod driver;
mod faults;
mod fetch;
mod group;
mod lane;
mod letter;
mod lines;
mod link;
mod member;
mod partition;
mod pending;
mod presence;
mod producer;
mod profile;
mod take;
mod timer;
mod topic;
mod trace;
mod untracked;
mod url;

pub use faults::FaultPlan;
pub use link::Link;
pub use profile::Profile;
pub use trace::{Happened, Trace, What};
pub use url::MemoryConfig;

use mq_api::{Broker, Error, ErrorKind, Result};
use mq_core::{Env, Hooks, NoHooks};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

type Registry = Mutex<HashMap<String, Weak<core::Core>>>;

fn registry() -> &'static Registry {
    static REGISTRY: OnceLock<Registry> = OnceLock::new();
    REGISTRY.get_or_init(Mutex::default)
}

/// Connects to the broker of this name, made if no handle to it lives.
///
/// # Errors
/// [`ErrorKind::Config`] for a bad URL, outside a tokio runtime, or for options other than those of the running broker.
pub async fn connect(url: &str) -> Result<Arc<dyn Broker>> {
    Ok(MemoryBroker::named(MemoryConfig::from_url(url)?)?.connect())
}

/// An in-memory broker, from the operator's side: connections, faults, and what happened.
#[derive(Clone, Debug)]
pub struct MemoryBroker {
    core: Arc<core::Core>,
    _hold: Arc<core::Holder>,
}

impl MemoryBroker {
    /// A broker of its own, which no URL reaches.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] outside a tokio runtime.
    pub fn new(config: MemoryConfig) -> Result<Self> {
        Self::make(config, Arc::new(NoHooks), false)
    }

    /// Like [`new`](Self::new), with a listener.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_hooks(config: MemoryConfig, hooks: Arc<dyn Hooks>) -> Result<Self> {
        Self::make(config, hooks, true)
    }

    /// With a listener that wants to hear of every message, or without.
    fn make(config: MemoryConfig, hooks: Arc<dyn Hooks>, listens: bool) -> Result<Self> {
        let env = Env::current(config.seed)?;
        if let Some(seed) = config.seed {
            mq_api::MessageId::seed_thread(seed);
        }
        Ok(Self::of(core::Core::new(config, env, (hooks, listens))))
    }

    fn of(core: Arc<core::Core>) -> Self {
        Self { _hold: core.hold(), core }
    }

    /// The broker of this name, made if no handle to it lives.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when it runs with another profile.
    pub fn named(config: MemoryConfig) -> Result<Self> {
        let mut registry = registry().lock();
        registry.retain(|_, core| core.strong_count() > 0);
        if let Some(core) = registry.get(&config.name).and_then(Weak::upgrade)
            && core.is_held()
        {
            if let Some(option) = config.differs_from(&core.config) {
                let text = format!("memory://{} runs with another {option}; use another name", config.name);
                return Err(Error::new(ErrorKind::Config, text));
            }
            return Ok(Self::of(core));
        }
        let name = config.name.clone();
        let broker = Self::new(config)?;
        registry.insert(name, Arc::downgrade(&broker.core));
        Ok(broker)
    }

    /// A connection.
    pub fn connect(&self) -> Arc<dyn Broker> {
        client::Client::new(self.core.clone())
    }

    /// A connection that can be hurt, and the power to do it.
    pub fn connect_linked(&self) -> (Arc<dyn Broker>, Link) {
        link::connect(self.core.clone())
    }

    /// Writes to this topic fail as if it were full, until told otherwise.
    pub fn refuse_writes(&self, topic: &mq_api::Topic, refuse: bool) {
        if let Some(topic) = self.core.find_topic(topic) {
            topic.refuse.store(refuse, std::sync::atomic::Ordering::Release);
        }
    }

    /// Appends what a program would write that does not know this library: no id, no timestamp, no headers.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no such topic.
    pub fn put_foreign(&self, topic: &mq_api::Topic, payload: Vec<u8>) -> Result<()> {
        let missing = || Error::new(ErrorKind::NotFound, format!("there is no topic '{topic}'"));
        let topic = self.core.find_topic(topic).ok_or_else(missing)?;
        let mut message = mq_api::Message::new(payload);
        message.id = mq_api::MessageId::NIL;
        let (number, part) = topic.pick(&message);
        let mut part = part.lock();
        let size = message.size() as u32;
        let spent = part.spent(&topic.keep);
        part.append(message, size, 0, spent);
        topic.after_append(&self.core, &mut part, number);
        part.wake();
        Ok(())
    }

    /// The process of the member of this name dies, with all consumers that go by it: nothing of them is heard again; what they
    /// held comes free when their leases end. False if there is no such member.
    pub fn crash(&self, member: &str) -> bool {
        let members = self.of_name(member);
        members.iter().for_each(|m| m.crash());
        !members.is_empty()
    }

    /// The consumers of this name lose the leases of everything they hold, as if they had not renewed them in time; says how many.
    pub fn lose_leases(&self, member: &str) -> usize {
        self.of_name(member).iter().map(|m| self.core.lose_leases(m, false)).sum()
    }

    /// Names of the members that run.
    pub fn members(&self) -> Vec<String> {
        self.alive().map(|m| m.name.to_string()).collect()
    }

    /// Those that receive; if there are none, those that are closing.
    fn of_name(&self, name: &str) -> Vec<Arc<member::Member>> {
        let (closing, living): (Vec<_>, Vec<_>) =
            self.alive().filter(|m| &*m.name == name).partition(|m| m.is_stopping());
        if living.is_empty() { closing } else { living }
    }

    fn alive(&self) -> impl Iterator<Item = Arc<member::Member>> {
        self.core.live_members().into_iter().filter(|m| !m.is_crashed())
    }

    /// Groups of this topic; none if there is no such topic.
    pub fn groups(&self, topic: &mq_api::Topic) -> Vec<mq_api::Group> {
        let groups = self.core.find_topic(topic).map(|topic| topic.live_groups()).unwrap_or_default();
        groups.iter().map(|group| group.name.clone()).collect()
    }

    /// What happened so far, if the broker records.
    pub fn trace(&self) -> Option<Arc<Trace>> {
        self.core.trace.clone()
    }

    /// Tasks of the broker that run. Zero after every connection was closed.
    pub fn tasks(&self) -> usize {
        self.core.env.tasks()
    }

    /// Waits until no group of any topic has anything ready, in hand or delayed. The broker must record.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if it does not record.
    pub async fn all_done(&self) -> Result<()> {
        let Some(trace) = &self.core.trace else {
            return Err(Error::new(ErrorKind::Config, "all_done needs a broker that records; set record"));
        };
        loop {
            let changed = trace.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.open_work() == 0 {
                return Ok(());
            }
            changed.await;
        }
    }

    /// Messages that some group still has to handle.
    pub fn open_work(&self) -> u64 {
        let topics: Vec<_> = self.core.topics.lock().values().cloned().collect();
        let mut open = 0;
        for topic in topics {
            for group in topic.live_groups() {
                let (ready, in_flight, delayed, _) = admin::count(&self.core, &topic, &group);
                open += ready + in_flight + delayed;
            }
        }
        open
    }
}
