//! The environment of the in-memory broker: the contract's own times on a paused clock, and every fault.

use crate::{Clock, Environment, Factory, Hook, Lacking, Leftovers, Line, Lines, Pace, Record, Site, Tally, World};
use mq_api::{Broker, Error, ErrorKind, Feature, MessageId, Result, Topic, async_trait};
use mq_memory::{Link, MemoryBroker, MemoryConfig, Profile, Trace, What};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
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

    fn records(&self) -> bool {
        // There is nothing to settle on Pub/Sub, and so nothing to wait for.
        self.profile != Profile::RedisPubSub
    }

    fn environment(&self, clock: Clock, _run: &str) -> Arc<dyn Environment> {
        let (broker, apart) = (Mutex::default(), Mutex::default());
        Arc::new(World::new(InProcess { profile: self.profile, clock, broker, apart }))
    }
}

struct InProcess {
    profile: Profile,
    clock: Clock,
    /// Made at the first connection.
    broker: Mutex<Option<MemoryBroker>>,
    /// Brokers of one connection alone, by its number: those made with parameters that a broker has from its start.
    apart: Mutex<BTreeMap<u64, MemoryBroker>>,
}

/// Parameters that a broker has from its start.
const FROM_THE_START: [&str; 3] = ["profile", "record", "seed"];

/// How long a broker that is down at start is waited for, unless the parameter says otherwise.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

impl InProcess {
    fn broker(&self, config: MemoryConfig, lines: &Lines<Link>) -> Result<MemoryBroker> {
        let mut broker = self.broker.lock();
        match &*broker {
            Some(broker) => Ok(broker.clone()),
            None => {
                let made = MemoryBroker::with_hooks(config, lines.hooks())?;
                *broker = Some(made.clone());
                Ok(made)
            }
        }
    }

    fn existing(&self) -> Hook<MemoryBroker> {
        self.broker.lock().clone().ok_or(Lacking("a broker before the first connection"))
    }
}

fn linked(lines: &Lines<Link>, number: u64, to: &MemoryBroker) -> Arc<dyn Broker> {
    let (broker, link) = to.connect_linked();
    lines.lay(number, link);
    broker
}

impl Line for Link {
    fn crash(&self) -> Hook {
        Link::crash(self);
        Ok(())
    }

    fn cut(&self) -> Hook {
        Link::cut(self);
        Ok(())
    }

    fn reachable(&self, yes: bool) -> Hook {
        Link::reachable(self, yes);
        Ok(())
    }

    fn hold_answers(&self, hold: bool) -> Hook {
        Link::hold_answers(self, hold);
        Ok(())
    }

    fn freeze(&self, frozen: bool) -> Hook {
        Link::freeze(self, frozen);
        Ok(())
    }

    fn open(&self) -> usize {
        // There are none in a process.
        0
    }
}

#[async_trait]
impl Site for InProcess {
    type Line = Link;

    fn pace(&self) -> Pace {
        match self.clock {
            Clock::Virtual => Pace::paused(),
            Clock::Real => Pace::real(),
        }
    }

    fn wrong_value(&self) -> (&'static str, &'static str) {
        ("history", "many")
    }

    async fn connect(&self, lines: &Lines<Link>, number: u64, parameters: &[(&str, &str)]) -> Result<Arc<dyn Broker>> {
        let mut limit = CONNECT_TIMEOUT;
        let mut url = "memory://suite?".to_owned();
        if !parameters.iter().any(|(name, _)| *name == "profile") {
            url.push_str(&format!("profile={}", self.profile.as_str()));
        }
        for (name, value) in parameters {
            // Waiting for a broker is the environment's part here: this broker is in the process and never down.
            match value.strip_suffix('s').map(str::parse) {
                Some(Ok(seconds)) if *name == "connect_timeout" => limit = Duration::from_secs(seconds),
                _ => url.push_str(&format!("&{name}={value}")),
            }
        }
        let config = MemoryConfig::from_url(&url)?;
        let mut accepting = lines.accepting();
        if tokio::time::timeout(limit, accepting.wait_for(|yes| *yes)).await.is_err() {
            return Err(Error::new(ErrorKind::Unavailable, format!("the broker was not up within {limit:?}")));
        }
        if parameters.iter().any(|(name, _)| FROM_THE_START.contains(name)) {
            let apart = MemoryBroker::new(config)?;
            self.apart.lock().insert(number, apart.clone());
            return Ok(linked(lines, number, &apart));
        }
        Ok(linked(lines, number, &self.broker(config, lines)?))
    }

    async fn connect_lacking(&self, lines: &Lines<Link>, number: u64, feature: Feature) -> Result<Arc<dyn Broker>> {
        let mut config = MemoryConfig::default();
        config.profile = self.profile;
        config.without = vec![feature];
        Ok(linked(lines, number, &MemoryBroker::new(config)?))
    }

    async fn refuse_dead_letters(&self, topic: &Topic, group: &str, refuse: bool) -> Hook {
        let letters = Topic::dead_letters(topic.clone(), group);
        self.existing()?.refuse_writes(&letters, refuse);
        Ok(())
    }

    async fn put_foreign(&self, topic: &Topic, payload: &[u8]) -> Hook {
        self.existing()?.put_foreign(topic, payload.to_vec()).map_err(|_| Lacking("that topic"))
    }

    async fn leftovers(&self, _died: bool) -> Leftovers {
        let mut left = Leftovers::default();
        let broker = self.broker.lock().clone();
        if let Some(broker) = broker {
            let members = broker.members();
            left.members = members.len() as u64;
            left.details = members;
        }
        left
    }

    fn record(&self, number: u64) -> Hook<Arc<dyn Record>> {
        let broker = self.apart.lock().get(&number).cloned();
        let found = broker.and_then(|broker| Some(Recorded { trace: broker.trace()?, broker }));
        found.map(|r| Arc::new(r) as Arc<dyn Record>).ok_or(Lacking("a connection that was made with record=true"))
    }
}

struct Recorded {
    broker: MemoryBroker,
    trace: Arc<Trace>,
}

#[async_trait]
impl Record for Recorded {
    async fn all_done(&self) {
        // Its only error is that the broker does not record, and this one does.
        let _ = self.broker.all_done().await;
    }

    fn tally(&self, id: &MessageId) -> Tally {
        let mut tally = Tally::default();
        for event in self.trace.events().iter().filter(|event| event.id == *id) {
            let count = match (&event.what, event.topic.dead_letters_of()) {
                // The copy of a dead letter is stored under the same id.
                (What::Sent, Some(_)) => continue,
                (What::Sent, None) => &mut tally.sent,
                (What::Delivered { .. }, _) => &mut tally.delivered,
                (What::Acked, _) => &mut tally.acked,
                (What::Retried { .. }, _) => &mut tally.retried,
                (What::DeadLettered { .. }, _) => &mut tally.dead_lettered,
                _ => &mut tally.other,
            };
            *count += 1;
        }
        tally
    }

    fn lines(&self) -> Vec<String> {
        self.trace.events().iter().map(ToString::to_string).collect()
    }
}
