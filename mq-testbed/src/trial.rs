//! One trial: a workload of separate processes, one fault in its midst, and the judgement of its history.
//!
//! The client is any program that takes the orders of [`client`](crate::client): the raw client libraries, or anymq
//! over any of its backends. It is told a URL, which leads through a proxy to a server of the trial's own.

mod crew;
mod fault;
mod tally;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use fault::Fault;

use crate::checker::{self, Promises, Verdict};
use crate::history::{Event, Historian, Reader, now};
use crate::proxy::Proxy;
use crate::{Kind, Problem, RedisOptions, Result, Server, folders, until};
use crew::Crew;
use tally::Tally;

/// The program under test.
#[derive(Debug, Clone)]
pub struct Client {
    /// Its file.
    pub program: PathBuf,
    /// Arguments before the order, as the backend's name.
    pub args: Vec<String>,
    /// What it promises beyond "at least once".
    pub promises: Promises,
}

/// What the processes of a workload do at a time.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Messages per second of one producer.
    pub rate: u32,
    /// Number of keys.
    pub keys: u64,
    /// How long a message is handled.
    pub work: Duration,
    /// Sends of one producer that are under way.
    pub window: usize,
    /// Messages that one member handles at a time.
    pub hands: usize,
    /// Messages to be confirmed, at least.
    pub confirmed: usize,
}

impl Load {
    /// One message at a time. Two producers keep two members at 10 ms a message and a commit about half busy: there is
    /// always something in flight to be hurt, and what a fault held up is worked off soon.
    pub const LIGHT: Self =
        Self { rate: 50, keys: 16, work: Duration::from_millis(10), window: 1, hands: 1, confirmed: 0 };

    /// Many at a time, as many as that in all: what a fault can hurt in a program that is in a hurry. So many keys that
    /// waiting for their turn limits nobody; a rate that a broker on two processors shared with the workload keeps up
    /// with, so that what piles up is what the fault held up.
    #[must_use]
    pub const fn heavy(confirmed: usize) -> Self {
        Self { rate: 2_500, keys: 1_000, work: Duration::ZERO, window: 500, hands: 200, confirmed }
    }
}

/// How a trial is measured.
#[derive(Debug, Clone, Copy)]
pub struct Measure {
    /// From the end of the fault until everything confirmed until then is settled and newer messages arrive.
    pub bound: Duration,
    /// From the time that a server is back until the first delivery.
    pub fetching: Duration,
    /// Messages that have to be through before the fault, and again after it.
    pub calm: usize,
    /// What the workload does.
    pub load: Load,
}

impl Default for Measure {
    fn default() -> Self {
        Self { bound: Duration::from_secs(20), fetching: Duration::from_secs(20), calm: 100, load: Load::LIGHT }
    }
}

/// What a trial showed.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The fault.
    pub fault: String,
    /// What it did, in words.
    pub bite: String,
    /// Messages sent and not yet settled when it began.
    pub in_flight: usize,
    /// The judgement.
    pub verdict: Verdict,
    /// From the end of the fault until the first delivery.
    pub fetching_after: Option<Duration>,
    /// From the end of the fault until all was as before.
    pub back_after: Option<Duration>,
    /// One of these was later than it may be.
    late: bool,
    /// Everything that is not as it should be; empty when all is well.
    pub complaints: Vec<String>,
    /// Where the histories and logs lie.
    pub folder: PathBuf,
}

impl Outcome {
    /// Whether fetching, or all, began again later than its bound.
    #[must_use]
    pub fn is_over_bound(&self) -> bool {
        self.late
    }
}

/// A server and its proxy, on which trials run one after the other.
pub struct Bed {
    server: Server,
    proxy: Proxy,
    trials: u32,
}

impl Bed {
    /// A fresh one. Redis writes each entry to disk, else a killed one would have nothing to come back with.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn new(kind: Kind, seed: u64) -> Result<Self> {
        let (server, proxy) = match kind {
            Kind::Redis => {
                let server = RedisOptions { durable: true, ..RedisOptions::default() }.start()?;
                let proxy = Proxy::before(server.port(), seed)?;
                (server, proxy)
            }
            _ => Proxy::with_server(kind, seed)?,
        };
        Ok(Self { server, proxy, trials: 0 })
    }

    /// Runs one trial, with its histories in a new folder below the one given.
    ///
    /// # Errors
    /// When the trial itself could not be made: a process did not start, the fault did not bite. A broken promise is
    /// no error but a complaint in the outcome.
    pub fn run(&mut self, client: &Client, fault: Fault, measure: Measure, parent: &Path) -> Result<Outcome> {
        self.trials += 1;
        let folder = parent.join(format!("{:02}-{}", self.trials, fault.slug()));
        folders::make(&folder)?;
        // Reset at the start of each trial, for the one before may have been given up in the middle of its fault.
        if self.server.pid().is_none() {
            self.server.restart()?;
        }
        let topic = format!("trial{}", self.trials);
        let mut crew = Crew::new(client, measure.load, self.server.url_at(self.proxy.port()), &topic, &folder);
        let mut watch = Watch { reader: Reader::new(&folder), read: 0, tally: Tally::default() };
        crew.prepare()?;
        crew.begin(&mut watch)?;
        let warm = Instant::now();
        // In the midst of them.
        let before = measure.calm.max(measure.load.confirmed / 3);
        watch.until("the first messages to be settled", Duration::from_secs(120), |tally| {
            // Two seconds: a RabbitMQ quorum queue younger than that does not survive a kill of its only node.
            tally.settled() >= before && warm.elapsed() >= Duration::from_secs(2)
        })?;
        let mut in_flight = 0;
        watch.until("messages in flight", Duration::from_secs(10), |tally| {
            in_flight = tally.in_flight();
            in_flight > 0
        })?;

        let faults = Historian::new(&folder, "faults")?;
        faults.write(Event::FaultBegins { name: fault.to_string(), destroys: fault.destroys() });
        let bite = fault.strike(&mut self.server, &mut self.proxy, &mut crew)?;
        faults.write(Event::FaultEnds { bite: bite.clone() });

        let back_after = watch.back(now(), fault.destroys(), measure)?;
        let fetching_after = watch.tally.first_delivery().map(Duration::from_micros);
        if back_after.is_some() {
            watch.until("as many messages as wanted", Duration::from_secs(300), |tally| {
                tally.confirmed >= measure.load.confirmed
            })?;
        }
        crew.stop_producers()?;
        let all_settled = watch.drain(measure.bound)?;
        crew.stop_members()?;
        if !all_settled {
            // Only then can anything be left in the broker that a look would have to find.
            crew.inspect()?;
        }
        let verdict = checker::check(&watch.reader.all()?, client.promises);
        if fault.destroys() && verdict.destroyed.is_empty() {
            return Err(Problem::new("the topic was destroyed when nothing was in it, so nothing was to be reported"));
        }
        let mut complaints = verdict.complaints();
        if back_after.is_none() {
            complaints.push(format!("not back within {:?}", measure.bound));
        }
        let fetches = fetching_after.is_some_and(|after| after <= measure.fetching) || !fault.ends_the_server();
        if !fetches {
            complaints.push(format!("no delivery within {:?} after the server was back", measure.fetching));
        }
        let late = back_after.is_none() || !fetches;
        let fault = fault.to_string();
        Ok(Outcome { fault, bite, in_flight, verdict, fetching_after, back_after, late, complaints, folder })
    }
}

/// A history, looked at while it is written.
struct Watch {
    reader: Reader,
    /// How many records the tally has.
    read: usize,
    tally: Tally,
}

impl Watch {
    fn look(&mut self) -> Result<&Tally> {
        let records = self.reader.look()?;
        for record in records.get(self.read..).unwrap_or_default() {
            self.tally.add(record);
        }
        self.read = records.len();
        Ok(&self.tally)
    }

    fn until(&mut self, what: &str, limit: Duration, mut fits: impl FnMut(&Tally) -> bool) -> Result<()> {
        until(what, limit, || match self.look() {
            Ok(tally) => fits(tally).then_some(Ok(())),
            Err(problem) => Some(Err(problem)),
        })?
    }

    /// Waits until the backlog of the fault's time is settled and what was sent later arrives; `None` past the bound.
    fn back(&mut self, end: u64, destroyed: bool, measure: Measure) -> Result<Option<Duration>> {
        let begun = Instant::now();
        self.tally.since(end);
        let waited = self.until("to be back", measure.bound, |tally| {
            tally.newer_settled() > 0 && (destroyed || tally.older_settled())
        });
        if waited.is_err() {
            // A broken history is an error, a broken client is a finding.
            self.look()?;
            return Ok(None);
        }
        let took = begun.elapsed();
        self.until("messages after the fault", Duration::from_secs(60), |tally| tally.answers_since() >= measure.calm)?;
        Ok(Some(took))
    }

    /// Waits until everything confirmed is settled, or nothing more comes; tells which.
    fn drain(&mut self, patience: Duration) -> Result<bool> {
        let mut seen = 0;
        let mut moved = Instant::now();
        let mut all = false;
        self.until("the rest", Duration::from_secs(300), |tally| {
            if tally.settled() > seen {
                seen = tally.settled();
                moved = Instant::now();
            }
            all = tally.all_settled();
            all || moved.elapsed() > patience
        })
        .map_err(|_| Problem::new("the members were still settling after 300 s"))?;
        Ok(all)
    }
}
