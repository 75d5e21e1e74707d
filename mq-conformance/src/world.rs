//! One environment for every backend. A backend says how its broker is reached ([`Site`]) and what stands in the way
//! ([`Line`]: the in-memory broker's link, a proxy before a server); connections by number, faults by number, the hooks'
//! counts and what is left open are the same for all.

use crate::{Connection, Environment, Fired, Hook, Lacking, Leftovers, Pace, Record};
use mq_api::{Broker, Feature, HealthState, HealthWatch, Result, Source, Topic, async_trait};
use mq_core::Hooks;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// What stands between one connection and the broker. A fault ends when its opposite, or another one, is asked for.
pub trait Line: Send + Sync + 'static {
    /// As [`Environment::crash`].
    fn crash(&self) -> Hook;
    /// As [`Environment::cut`].
    fn cut(&self) -> Hook;
    /// As [`Environment::reachable`].
    fn reachable(&self, yes: bool) -> Hook;
    /// As [`Environment::hold_answers`].
    fn hold_answers(&self, hold: bool) -> Hook;
    /// As [`Environment::freeze`].
    fn freeze(&self, frozen: bool) -> Hook;
    /// Sockets that are open on it.
    fn open(&self) -> usize;
}

/// How a backend's broker is reached, and what only its own tools can do.
#[async_trait]
pub trait Site: Send + Sync + 'static {
    /// What its connections go through.
    type Line: Line;

    /// As [`Environment::pace`].
    fn pace(&self) -> Pace {
        Pace::real()
    }

    /// As [`Environment::settles_until_answered`].
    fn settles_until_answered(&self) -> bool {
        false
    }

    /// As [`Environment::wrong_value`].
    fn wrong_value(&self) -> (&'static str, &'static str) {
        ("connect_timeout", "soon")
    }

    /// Connects: lays a line with [`Lines::lay`] when it is known, and hands the engine [`Lines::hooks`].
    ///
    /// # Errors
    /// Those of the backend.
    async fn connect(
        &self,
        lines: &Lines<Self::Line>,
        number: u64,
        parameters: &[(&str, &str)],
    ) -> Result<Arc<dyn Broker>>;

    /// A broker of this kind that lacks a feature, where one can be made; by default the ordinary one, which may lack it.
    async fn connect_lacking(
        &self,
        lines: &Lines<Self::Line>,
        number: u64,
        _feature: Feature,
    ) -> Result<Arc<dyn Broker>> {
        self.connect(lines, number, &[]).await
    }

    /// As [`Environment::refuse_dead_letters`].
    async fn refuse_dead_letters(&self, topic: &Topic, group: &str, refuse: bool) -> Hook;

    /// As [`Environment::remove_group`].
    async fn remove_group(&self, _topic: &Topic, _group: &str) -> Hook {
        Err(Lacking("removing a group with members"))
    }

    /// As [`Environment::put_foreign`].
    async fn put_foreign(&self, topic: &Topic, payload: &[u8]) -> Hook;

    /// What the broker still has, beside sockets. `died`: a connection was ended from outside, so that its member could not
    /// leave.
    async fn leftovers(&self, _died: bool) -> Leftovers {
        Leftovers::default()
    }

    /// As [`Environment::record`], by the number of the connection.
    fn record(&self, _number: u64) -> Hook<Arc<dyn Record>> {
        Err(Lacking("a broker that records"))
    }

    /// As [`Environment::secret`].
    fn secret(&self) -> Option<String> {
        None
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

struct Laid<L> {
    line: Arc<L>,
    /// Laid while the broker was away for newcomers.
    late: bool,
    broker: Option<(Weak<dyn Broker>, HealthWatch)>,
}

impl<L: Line> Laid<L> {
    /// It was closed, or nobody has its handle any more.
    fn is_closed(&self) -> bool {
        self.broker
            .as_ref()
            .is_some_and(|(broker, health)| broker.strong_count() == 0 || health.current().state == HealthState::Closed)
    }
}

/// The lines of one test, by the number of their connection.
pub struct Lines<L> {
    laid: Mutex<BTreeMap<u64, Laid<L>>>,
    numbers: AtomicU64,
    counts: Arc<Counts>,
    accepting: tokio::sync::watch::Sender<bool>,
    died: AtomicBool,
}

impl<L: Line> Lines<L> {
    fn new() -> Self {
        Self {
            laid: Mutex::default(),
            numbers: AtomicU64::new(0),
            counts: Arc::default(),
            accepting: tokio::sync::watch::Sender::new(true),
            died: AtomicBool::new(false),
        }
    }

    /// What counts for promise 8.3.
    pub fn hooks(&self) -> Arc<dyn Hooks> {
        self.counts.clone()
    }

    /// Whether newcomers find the broker; changes.
    pub fn accepting(&self) -> tokio::sync::watch::Receiver<bool> {
        self.accepting.subscribe()
    }

    /// Lays the line of a connection. While newcomers find no broker, this one does not either.
    pub fn lay(&self, number: u64, line: L) {
        let late = !*self.accepting.borrow();
        if late {
            // It was laid a moment ago and carries nothing: there is nothing to fail.
            let _ = line.reachable(false);
        }
        self.laid.lock().insert(number, Laid { line: Arc::new(line), late, broker: None });
    }

    /// Forgets the lines of connections that are closed and left no socket: a proxy has threads, which a test would count.
    fn tidy(&self) {
        self.laid.lock().retain(|_, laid| !laid.is_closed() || laid.line.open() > 0);
    }

    fn on(&self, of: &Connection, act: impl FnOnce(&L) -> Hook) -> Hook {
        let line = self.laid.lock().get(&of.number).map(|laid| laid.line.clone());
        match line {
            Some(line) => act(&line),
            // It was closed, and there is nothing left to befall it.
            None if of.number < self.numbers.load(Ordering::Relaxed) => Ok(()),
            None => Err(Lacking("a connection of that number")),
        }
    }

    /// Sockets of closed connections; ten seconds are granted, since a proxy sees the end of a socket after both sides do, and on
    /// a busy machine long after.
    async fn left_open(&self) -> Leftovers {
        let mut left = Leftovers::default();
        for _ in 0..1_000 {
            self.tidy();
            if !self.laid.lock().values().any(Laid::is_closed) {
                return left;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        for (number, laid) in self.laid.lock().iter().filter(|(_, laid)| laid.is_closed()) {
            left.connections += laid.line.open() as u64;
            left.details.push(format!("{} sockets of connection {number}", laid.line.open()));
        }
        left
    }
}

/// The environment of one test on a [`Site`].
pub struct World<S: Site> {
    site: S,
    lines: Lines<S::Line>,
}

impl<S: Site> World<S> {
    /// Without connections yet.
    pub fn new(site: S) -> Self {
        Self { site, lines: Lines::new() }
    }

    fn number(&self) -> u64 {
        self.lines.tidy();
        self.lines.numbers.fetch_add(1, Ordering::Relaxed)
    }

    fn made(&self, number: u64, made: Result<Arc<dyn Broker>>) -> Result<Connection> {
        let mut laid = self.lines.laid.lock();
        match made {
            Ok(broker) => {
                if let Some(laid) = laid.get_mut(&number) {
                    laid.broker = Some((Arc::downgrade(&broker), broker.health()));
                }
                Ok(Connection { broker, number })
            }
            Err(error) => {
                let gone = laid.remove(&number);
                drop(laid);
                drop(gone);
                Err(error)
            }
        }
    }
}

#[async_trait]
impl<S: Site> Environment for World<S> {
    fn pace(&self) -> Pace {
        self.site.pace()
    }

    fn settles_until_answered(&self) -> bool {
        self.site.settles_until_answered()
    }

    async fn connect_with(&self, parameters: &[(&str, &str)]) -> Result<Connection> {
        let number = self.number();
        self.made(number, self.site.connect(&self.lines, number, parameters).await)
    }

    fn wrong_value(&self) -> (&'static str, &'static str) {
        self.site.wrong_value()
    }

    async fn connect_lacking(&self, feature: Feature) -> Hook<Connection> {
        let number = self.number();
        let made = self.site.connect_lacking(&self.lines, number, feature).await;
        let connection = self.made(number, made).map_err(|_| Lacking("a connection"))?;
        match connection.broker.capabilities().has(feature) {
            false => Ok(connection),
            true => Err(Lacking("a broker of this kind without that feature")),
        }
    }

    async fn crash(&self, of: &Connection) -> Hook {
        self.lines.died.store(true, Ordering::Relaxed);
        self.lines.on(of, Line::crash)
    }

    async fn cut(&self, of: &Connection) -> Hook {
        self.lines.on(of, Line::cut)
    }

    async fn reachable(&self, of: &Connection, yes: bool) -> Hook {
        self.lines.died.fetch_or(!yes, Ordering::Relaxed);
        self.lines.on(of, |line| line.reachable(yes))
    }

    async fn accepting(&self, yes: bool) -> Hook {
        self.lines.accepting.send_replace(yes);
        if yes {
            for laid in self.lines.laid.lock().values_mut().filter(|laid| laid.late) {
                laid.late = false;
                laid.line.reachable(true)?;
            }
        }
        Ok(())
    }

    async fn hold_answers(&self, of: &Connection, hold: bool) -> Hook {
        self.lines.on(of, |line| line.hold_answers(hold))
    }

    async fn freeze(&self, of: &Connection, frozen: bool) -> Hook {
        self.lines.on(of, |line| line.freeze(frozen))
    }

    async fn refuse_dead_letters(&self, topic: &Topic, group: &str, refuse: bool) -> Hook {
        self.site.refuse_dead_letters(topic, group, refuse).await
    }

    async fn remove_group(&self, topic: &Topic, group: &str) -> Hook {
        self.site.remove_group(topic, group).await
    }

    async fn put_foreign(&self, topic: &Topic, payload: &[u8]) -> Hook {
        self.site.put_foreign(topic, payload).await
    }

    async fn leftovers(&self) -> Leftovers {
        let open = self.lines.left_open().await;
        let mut left = self.site.leftovers(self.lines.died.load(Ordering::Relaxed)).await;
        left.connections += open.connections;
        left.details.extend(open.details);
        left
    }

    fn fired(&self) -> Hook<Fired> {
        let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let counts = &self.lines.counts;
        Ok(Fired { sent: read(&counts.sent), delivered: read(&counts.delivered), acked: read(&counts.acked) })
    }

    fn record(&self, of: &Connection) -> Hook<Arc<dyn Record>> {
        self.site.record(of.number)
    }

    fn secret(&self) -> Option<String> {
        self.site.secret()
    }
}
