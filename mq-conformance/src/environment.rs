//! What a backend gives to the suite: connections, and power over what goes wrong.

use mq_api::{Broker, Feature, MessageId, Result, Topic, async_trait};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Makes one [`Environment`] for each test, inside that test's own runtime. The one thing a backend has to write.
pub trait Factory: Send + Sync {
    /// The name that reports and the file of expected refusals carry, such as `memory` or `kafka`.
    fn name(&self) -> String;

    /// Whether the backend keeps all its promises on a paused clock, so that the suite may use the contract's own times.
    fn virtual_time(&self) -> bool {
        false
    }

    /// Whether its broker can write down what happens, so that the promises to users' tests hold of it (section 10).
    fn records(&self) -> bool {
        false
    }

    /// The world of one test. `clock` tells which clock the test's runtime has; `run` differs for every test and is a
    /// good part of names that must not meet.
    fn environment(&self, clock: Clock, run: &str) -> Arc<dyn Environment>;
}

/// Which clock a test runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// tokio's paused clock: it moves by itself whenever every task waits.
    Virtual,
    /// The wall.
    Real,
}

/// One connection, as a program of its own would have it.
#[derive(Clone)]
pub struct Connection {
    /// What programs use.
    pub broker: Arc<dyn Broker>,
    /// By what the environment knows it again.
    pub number: u64,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "connection {}", self.number)
    }
}

/// This environment cannot do that. A test that needs it fails and says so: it is not skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lacking(pub &'static str);

/// The answer of a hook.
pub type Hook<T = ()> = std::result::Result<T, Lacking>;

/// What is left in the broker and the process after everything was closed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leftovers {
    /// Connections that are still open.
    pub connections: u64,
    /// Members (consumer names) that the broker still lists.
    pub members: u64,
    /// Temporary queues, topics and keys.
    pub temporary: u64,
    /// Threads of the library.
    pub threads: u64,
    /// What they are, for the report.
    pub details: Vec<String>,
}

impl Leftovers {
    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.connections == 0 && self.members == 0 && self.temporary == 0 && self.threads == 0
    }
}

/// How often each hook for metrics and spans fired (promise 8.3).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fired {
    /// Sends that were confirmed.
    pub sent: u64,
    /// Deliveries handed over.
    pub delivered: u64,
    /// Deliveries acknowledged.
    pub acked: u64,
}

/// What a recording broker wrote down of one message.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Stored.
    pub sent: u64,
    /// Handed over.
    pub delivered: u64,
    /// Acknowledged.
    pub acked: u64,
    /// Failed, to come again.
    pub retried: u64,
    /// Dead-lettered.
    pub dead_lettered: u64,
    /// Anything else.
    pub other: u64,
}

/// The record of a broker that keeps one.
#[async_trait]
pub trait Record: Send + Sync {
    /// Waits until all that was caused is done: nothing is ready, in hand or delayed in any group.
    async fn all_done(&self);

    /// What happened to a message.
    fn tally(&self, id: &MessageId) -> Tally;

    /// Everything that happened, in order, a line each.
    fn lines(&self) -> Vec<String>;
}

/// The broker as one test sees it. Faults act on one connection, because that is where they happen.
#[async_trait]
pub trait Environment: Send + Sync {
    /// The times that fit this environment.
    fn pace(&self) -> Pace;

    /// Whether the driver writes a settlement again until the broker answers, so that one whose first answer was lost may
    /// still end confirmed. Then it is, and the message does not come again.
    fn settles_until_answered(&self) -> bool {
        false
    }

    /// A new connection to the same broker, as another process would make it.
    ///
    /// # Errors
    /// Those of the backend.
    async fn connect(&self) -> Result<Connection> {
        self.connect_with(&[]).await
    }

    /// The same, with parameters in the URL or configuration.
    ///
    /// # Errors
    /// Those of the backend; an unknown parameter is one.
    async fn connect_with(&self, parameters: &[(&str, &str)]) -> Result<Connection>;

    /// A parameter of the URL or configuration and a value of the wrong type for it.
    fn wrong_value(&self) -> (&'static str, &'static str) {
        ("connect_timeout", "soon")
    }

    /// A connection to a broker of this kind that lacks a feature, where such a broker can be made.
    async fn connect_lacking(&self, _feature: Feature) -> Hook<Connection> {
        Err(Lacking("a broker of this kind without a feature"))
    }

    /// The program behind this connection dies: nothing is flushed, settled or given back, and nothing of it runs on.
    async fn crash(&self, _of: &Connection) -> Hook {
        Err(Lacking("killing a member"))
    }

    /// The connection is lost now; a new one can be made at once.
    async fn cut(&self, _of: &Connection) -> Hook {
        Err(Lacking("cutting a connection"))
    }

    /// The broker cannot be reached from this connection, or can again.
    async fn reachable(&self, _of: &Connection, _yes: bool) -> Hook {
        Err(Lacking("a broker that is away"))
    }

    /// What connections to come find: a broker that is away, or there. For a program that starts before its broker.
    async fn accepting(&self, _yes: bool) -> Hook {
        Err(Lacking("a broker that is away at start"))
    }

    /// What the broker answers does not arrive, while what it is told does; ends with `false`, or with a cut.
    async fn hold_answers(&self, _of: &Connection, _hold: bool) -> Hook {
        Err(Lacking("holding back the broker's answers"))
    }

    /// Nothing passes in either direction and nobody is told: the program is frozen, as far as the broker can see.
    async fn freeze(&self, _of: &Connection, _frozen: bool) -> Hook {
        Err(Lacking("freezing a connection"))
    }

    /// Writes of dead letters fail from now on (`true`) or work again.
    async fn refuse_dead_letters(&self, _topic: &Topic, _group: &str, _refuse: bool) -> Hook {
        Err(Lacking("failing writes of dead letters"))
    }

    /// Removes a group that has members, where the library's own call is refused as long as it has (Kafka): with the broker's
    /// own means, which put the members out first.
    async fn remove_group(&self, _topic: &Topic, _group: &str) -> Hook {
        Err(Lacking("removing a group with members"))
    }

    /// Puts a message as a program would that does not know this library: payload only, none of the library's fields.
    async fn put_foreign(&self, _topic: &Topic, _payload: &[u8]) -> Hook {
        Err(Lacking("writing as another program"))
    }

    /// What is left after everything was closed.
    async fn leftovers(&self) -> Leftovers {
        Leftovers::default()
    }

    /// How often the hooks of all connections fired.
    fn fired(&self) -> Hook<Fired> {
        Err(Lacking("counting the engine's hooks"))
    }

    /// The record of the broker behind a connection that was made with `record=true`.
    fn record(&self, _of: &Connection) -> Hook<Arc<dyn Record>> {
        Err(Lacking("a broker that records"))
    }

    /// A secret that this environment connects with, to be looked for where it must not be.
    fn secret(&self) -> Option<String> {
        None
    }
}

/// The times of an environment: the contract's own on a paused clock, short ones on the wall's.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Lease of subscriptions.
    pub lease: Duration,
    /// The short delay between attempts.
    pub retry: Duration,
    /// A delay long enough to do several things meanwhile.
    pub long: Duration,
    /// How long nothing has to happen until a test believes that nothing will.
    pub quiet: Duration,
    /// How long a test waits for what has to come.
    pub patience: Duration,
    /// Deadline of a close.
    pub drain: Duration,
    /// Messages of a test that needs some.
    pub some: usize,
    /// Messages of a test that needs many.
    pub many: usize,
    /// The whole test, on its own clock.
    pub deadline: Duration,
    /// The whole test, on the wall.
    pub wall: Duration,
}

impl Pace {
    /// For a paused clock: waiting costs nothing, so the times are those of the contract.
    pub const fn paused() -> Self {
        Self {
            lease: Duration::from_secs(60),
            retry: Duration::from_secs(1),
            long: Duration::from_secs(10),
            quiet: Duration::from_secs(200),
            patience: Duration::from_secs(1_800),
            drain: Duration::from_secs(30),
            some: 20,
            many: 200,
            deadline: Duration::from_secs(24 * 3600),
            wall: Duration::from_secs(60),
        }
    }

    /// For a real broker on this machine.
    pub const fn real() -> Self {
        Self {
            lease: Duration::from_secs(1),
            retry: Duration::from_millis(200),
            long: Duration::from_secs(2),
            quiet: Duration::from_millis(1_500),
            patience: Duration::from_secs(20),
            drain: Duration::from_secs(5),
            some: 20,
            // As on a paused clock, for both are compared.
            many: 200,
            // Eight members that die one after the other take 50 s where each is missed after 6 s, and longer on a busy machine.
            deadline: Duration::from_secs(150),
            wall: Duration::from_secs(170),
        }
    }

    /// How late something may be that was promised after `delay`: the larger of a second and a tenth.
    pub fn latest(&self, delay: Duration) -> Duration {
        delay + Duration::from_secs(1).max(delay / 10)
    }
}
