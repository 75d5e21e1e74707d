//! The environment of a planted bug: every connection it gives out is faulty.

use super::broker::FaultyBroker;
use super::{Bug, State};
use crate::{Clock, Connection, Environment, Factory, Fired, Hook, Leftovers, Pace, Record, Tally};
use mq_api::{Error, ErrorKind, Feature, MessageId, Result, Topic, async_trait};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A factory whose brokers make one mistake.
pub struct Faulty {
    inner: Arc<dyn Factory>,
    bug: Bug,
}

impl Faulty {
    /// Plants `bug` into the brokers of `inner`.
    pub fn new(inner: Arc<dyn Factory>, bug: Bug) -> Self {
        Self { inner, bug }
    }
}

impl Factory for Faulty {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn virtual_time(&self) -> bool {
        self.inner.virtual_time()
    }

    fn records(&self) -> bool {
        self.inner.records()
    }

    fn environment(&self, clock: Clock, run: &str) -> Arc<dyn Environment> {
        Arc::new(FaultyWorld {
            inner: self.inner.environment(clock, run),
            state: Arc::new(State::new(self.bug)),
            originals: Mutex::default(),
        })
    }
}

struct FaultyWorld {
    inner: Arc<dyn Environment>,
    state: Arc<State>,
    originals: Mutex<HashMap<u64, Connection>>,
}

impl FaultyWorld {
    fn is(&self, bug: Bug) -> bool {
        self.state.bug == bug
    }

    fn wrap(&self, original: Connection) -> Connection {
        let broker = FaultyBroker::new(original.broker.clone(), self.state.clone(), original.number);
        let wrapped = Connection { broker: Arc::new(broker), number: original.number };
        self.originals.lock().insert(original.number, original);
        wrapped
    }

    fn original(&self, of: &Connection) -> Connection {
        self.originals.lock().get(&of.number).cloned().unwrap_or_else(|| of.clone())
    }
}

#[async_trait]
impl Environment for FaultyWorld {
    fn pace(&self) -> Pace {
        // A bug shows in what does not come: patience is what it costs.
        let pace = self.inner.pace();
        Pace { patience: pace.patience / 4, ..pace }
    }

    fn settles_until_answered(&self) -> bool {
        self.inner.settles_until_answered()
    }

    async fn connect_with(&self, parameters: &[(&str, &str)]) -> Result<Connection> {
        if self.is(Bug::ImpatientConnect) && self.state.away.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Unavailable, "the broker is away"));
        }
        while self.is(Bug::PatientConnect) && self.state.away.load(Ordering::Relaxed) {
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        }
        let ignored = |name: &str| self.is(Bug::ParametersIgnored) || self.is(Bug::SeedIgnored) && name == "seed";
        let kept: Vec<(&str, &str)> = parameters.iter().copied().filter(|(name, _)| !ignored(name)).collect();
        Ok(self.wrap(self.inner.connect_with(&kept).await?))
    }

    fn wrong_value(&self) -> (&'static str, &'static str) {
        self.inner.wrong_value()
    }

    async fn connect_lacking(&self, feature: Feature) -> Hook<Connection> {
        Ok(self.wrap(self.inner.connect_lacking(feature).await?))
    }

    async fn crash(&self, of: &Connection) -> Hook {
        self.state.crashes.fetch_add(1, Ordering::Relaxed);
        if self.is(Bug::CrashIsNone) {
            return Ok(());
        }
        self.inner.crash(&self.original(of)).await
    }

    async fn cut(&self, of: &Connection) -> Hook {
        self.state.cut.lock().insert(of.number);
        self.inner.cut(&self.original(of)).await
    }

    async fn reachable(&self, of: &Connection, yes: bool) -> Hook {
        self.inner.reachable(&self.original(of), yes).await
    }

    async fn accepting(&self, yes: bool) -> Hook {
        self.state.away.store(!yes, Ordering::Relaxed);
        self.inner.accepting(yes).await
    }

    async fn hold_answers(&self, of: &Connection, hold: bool) -> Hook {
        self.inner.hold_answers(&self.original(of), hold).await
    }

    async fn freeze(&self, of: &Connection, frozen: bool) -> Hook {
        self.inner.freeze(&self.original(of), frozen).await
    }

    async fn refuse_dead_letters(&self, topic: &Topic, group: &str, refuse: bool) -> Hook {
        self.inner.refuse_dead_letters(topic, group, refuse).await
    }

    async fn put_foreign(&self, topic: &Topic, payload: &[u8]) -> Hook {
        self.inner.put_foreign(topic, payload).await
    }

    async fn leftovers(&self) -> Leftovers {
        self.inner.leftovers().await
    }

    fn fired(&self) -> Hook<Fired> {
        match self.is(Bug::HooksSilent) {
            true => Ok(Fired::default()),
            false => self.inner.fired(),
        }
    }

    fn record(&self, of: &Connection) -> Hook<Arc<dyn Record>> {
        let (inner, bug) = (self.inner.record(&self.original(of))?, self.state.bug);
        Ok(Arc::new(FaultyRecord { inner, bug }))
    }

    fn secret(&self) -> Option<String> {
        self.inner.secret()
    }
}

struct FaultyRecord {
    inner: Arc<dyn Record>,
    bug: Bug,
}

#[async_trait]
impl Record for FaultyRecord {
    async fn all_done(&self) {
        if self.bug != Bug::DoneTooEarly {
            self.inner.all_done().await;
        }
    }

    fn tally(&self, id: &MessageId) -> Tally {
        let tally = self.inner.tally(id);
        match self.bug {
            Bug::TimelineForgets => Tally { retried: 0, ..tally },
            _ => tally,
        }
    }

    fn lines(&self) -> Vec<String> {
        self.inner.lines()
    }
}
