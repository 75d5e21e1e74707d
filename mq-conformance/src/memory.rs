//! The environment of the in-memory broker: the contract's own times on a paused clock, and every fault.

use crate::{Clock, Environment, Factory, Hook, Lacking, Leftovers, Line, Lines, Pace, Site, World};
use mq_api::{Broker, Error, ErrorKind, Feature, Result, Topic, async_trait};
use mq_memory::{Link, MemoryBroker, MemoryConfig, Profile};
use parking_lot::Mutex;
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

    fn environment(&self, clock: Clock, _run: &str) -> Arc<dyn Environment> {
        Arc::new(World::new(InProcess { profile: self.profile, clock, broker: Mutex::new(None) }))
    }
}

struct InProcess {
    profile: Profile,
    clock: Clock,
    /// Made at the first connection.
    broker: Mutex<Option<MemoryBroker>>,
}

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
        let mut url = format!("memory://suite?profile={}", self.profile.as_str());
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
}
