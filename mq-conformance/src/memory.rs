//! The environment of the in-memory broker: the contract's own times on a paused clock, and every fault.

use crate::{Clock, Connection, Environment, Factory, Fired, Hook, Leftovers, Pace};
use mq_api::{Error, ErrorKind, Feature, Result, Source, Topic, async_trait};
use mq_core::Hooks;
use mq_memory::{Link, MemoryBroker, MemoryConfig, Profile};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The in-memory broker, with the capabilities of any broker.
#[derive(Debug, Clone, Copy, Default)]
pub struct Memory {
    /// Whose capabilities it has.
    pub profile: Profile,
}

impl Factory for Memory {
    fn name(&self) -> String {
        self.profile.as_str().to_owned()
    }

    fn virtual_time(&self) -> bool {
        true
    }

    fn environment(&self, clock: Clock, _run: &str) -> Arc<dyn Environment> {
        Arc::new(World {
            profile: self.profile,
            clock,
            broker: Mutex::new(None),
            hooks: Arc::default(),
            links: Mutex::default(),
            numbers: AtomicU64::new(0),
            accepting: tokio::sync::watch::Sender::new(true),
        })
    }
}

/// Counts what the engine's hooks are told.
#[derive(Default)]
struct Counts {
    sent: AtomicU64,
    delivered: AtomicU64,
    acked: AtomicU64,
}

impl Hooks for Counts {
    fn sent(&self, _: &Topic, n: usize) {
        self.sent.fetch_add(n as u64, Ordering::Relaxed);
    }

    fn delivered(&self, _: &Source, n: usize) {
        self.delivered.fetch_add(n as u64, Ordering::Relaxed);
    }

    fn acked(&self, _: &Source, n: usize) {
        self.acked.fetch_add(n as u64, Ordering::Relaxed);
    }
}

struct World {
    profile: Profile,
    clock: Clock,
    /// Made at the first connection.
    broker: Mutex<Option<MemoryBroker>>,
    hooks: Arc<Counts>,
    links: Mutex<HashMap<u64, Link>>,
    numbers: AtomicU64,
    accepting: tokio::sync::watch::Sender<bool>,
}

/// How long a broker that is down at start is waited for, unless the parameter says otherwise.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

impl World {
    fn broker(&self, config: MemoryConfig) -> Result<MemoryBroker> {
        let mut broker = self.broker.lock();
        match &*broker {
            Some(broker) => Ok(broker.clone()),
            None => {
                let made = MemoryBroker::with_hooks(config, self.hooks.clone())?;
                *broker = Some(made.clone());
                Ok(made)
            }
        }
    }

    fn connection(&self, broker: &MemoryBroker) -> Connection {
        let (broker, link) = broker.connect_linked();
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        self.links.lock().insert(number, link);
        Connection { broker, number }
    }

    fn with<T>(&self, of: &Connection, act: impl FnOnce(&Link) -> T) -> Hook<T> {
        match self.links.lock().get(&of.number) {
            Some(link) => Ok(act(link)),
            None => Err(crate::Lacking("a link of that number")),
        }
    }

    fn existing(&self) -> Hook<MemoryBroker> {
        self.broker.lock().clone().ok_or(crate::Lacking("a broker before the first connection"))
    }
}

#[async_trait]
impl Environment for World {
    fn pace(&self) -> Pace {
        match self.clock {
            Clock::Virtual => Pace::paused(),
            Clock::Real => Pace::real(),
        }
    }

    async fn connect_with(&self, parameters: &[(&str, &str)]) -> Result<Connection> {
        let mut limit = CONNECT_TIMEOUT;
        let mut url = format!("memory://suite?profile={}", self.profile.as_str());
        for (name, value) in parameters {
            // Waiting for a broker is the environment's part here: this broker is in the process and never down.
            match value.strip_suffix('s').map(str::parse) {
                Some(Ok(seconds)) if *name == "connect_timeout" => limit = Duration::from_secs(seconds),
                _ => url.push_str(&format!("&{name}={value}")),
            }
        }
        let config = MemoryConfig::from_url(&url)?;
        let mut accepting = self.accepting.subscribe();
        if tokio::time::timeout(limit, accepting.wait_for(|yes| *yes)).await.is_err() {
            return Err(Error::new(ErrorKind::Unavailable, format!("the broker was not up within {limit:?}")));
        }
        Ok(self.connection(&self.broker(config)?))
    }

    fn wrong_value(&self) -> (&'static str, &'static str) {
        ("history", "many")
    }

    async fn connect_lacking(&self, feature: Feature) -> Hook<Connection> {
        let mut config = MemoryConfig::default();
        config.profile = self.profile;
        config.without = vec![feature];
        let broker = MemoryBroker::new(config).map_err(|_| crate::Lacking("a runtime"))?;
        Ok(self.connection(&broker))
    }

    async fn crash(&self, of: &Connection) -> Hook {
        self.with(of, Link::crash)
    }

    async fn cut(&self, of: &Connection) -> Hook {
        self.with(of, Link::cut)
    }

    async fn reachable(&self, of: &Connection, yes: bool) -> Hook {
        self.with(of, |link| link.reachable(yes))
    }

    async fn accepting(&self, yes: bool) -> Hook {
        self.accepting.send_replace(yes);
        Ok(())
    }

    async fn hold_answers(&self, of: &Connection, hold: bool) -> Hook {
        self.with(of, |link| link.hold_answers(hold))
    }

    async fn freeze(&self, of: &Connection, frozen: bool) -> Hook {
        self.with(of, |link| link.freeze(frozen))
    }

    async fn refuse_dead_letters(&self, topic: &Topic, group: &str, refuse: bool) -> Hook {
        let letters = Topic::dead_letters(topic.clone(), group);
        self.existing()?.refuse_writes(&letters, refuse);
        Ok(())
    }

    async fn put_foreign(&self, topic: &Topic, payload: &[u8]) -> Hook {
        self.existing()?.put_foreign(topic, payload.to_vec()).map_err(|_| crate::Lacking("that topic"))
    }

    async fn leftovers(&self) -> Leftovers {
        let mut left = Leftovers::default();
        let broker = self.broker.lock().clone();
        if let Some(broker) = broker {
            let members = broker.members();
            left.members = members.len() as u64;
            left.details = members;
        }
        left
    }

    fn fired(&self) -> Hook<Fired> {
        let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
        Ok(Fired {
            sent: read(&self.hooks.sent),
            delivered: read(&self.hooks.delivered),
            acked: read(&self.hooks.acked),
        })
    }
}
