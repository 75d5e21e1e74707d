//! One trial: a workload of separate processes, one fault in its midst, and the judgement of its history.
//!
//! The client is any program that takes the orders of [`client`](crate::client): the raw client libraries, or anymq
//! over any of its backends. It is told a URL, which leads through a proxy to a server of the trial's own.

mod crew;
mod fault;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use fault::Fault;

use crate::checker::{self, Promises, Verdict};
use crate::history::{Event, Historian, How, Reader, Record, Sent, Settled, now};
use crate::proxy::Proxy;
use crate::{Kind, Problem, RedisOptions, Result, Server, folders, until};
use crew::Crew;

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

/// How a trial is measured.
#[derive(Debug, Clone, Copy)]
pub struct Measure {
    /// From the end of the fault until everything confirmed until then is settled and newer messages arrive.
    pub bound: Duration,
    /// Messages that have to be through before the fault, and again after it.
    pub calm: usize,
}

impl Default for Measure {
    fn default() -> Self {
        Self { bound: Duration::from_secs(20), calm: 100 }
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
    /// From the end of the fault until fetching again.
    pub back_after: Option<Duration>,
    /// Everything that is not as it should be; empty when all is well.
    pub complaints: Vec<String>,
    /// Where the histories and logs lie.
    pub folder: PathBuf,
}

impl Outcome {
    /// Whether fetching began again within the bound.
    #[must_use]
    pub fn is_over_bound(&self) -> bool {
        self.back_after.is_none()
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
        let mut crew = Crew::new(client, self.server.url_at(self.proxy.port()), &topic, &folder);
        let mut reader = Reader::new(&folder);
        crew.prepare()?;
        crew.begin(&mut reader)?;
        let warm = Instant::now();
        await_records(&mut reader, "the first messages to be settled", Duration::from_secs(60), |records| {
            // Two seconds: a RabbitMQ quorum queue younger than that does not survive a kill of its only node.
            Tally::of(records).settled.len() >= measure.calm && warm.elapsed() >= Duration::from_secs(2)
        })?;
        let in_flight = {
            let mut count = 0;
            await_records(&mut reader, "messages in flight", Duration::from_secs(10), |records| {
                count = Tally::of(records).in_flight();
                count > 0
            })?;
            count
        };

        let faults = Historian::new(&folder, "faults")?;
        faults.write(Event::FaultBegins { name: fault.to_string(), destroys: fault.destroys() });
        let bite = fault.strike(&mut self.server, &mut self.proxy, &mut crew)?;
        faults.write(Event::FaultEnds { bite: bite.clone() });

        let back_after = back(&mut reader, now(), fault.destroys(), measure)?;
        crew.stop_producers()?;
        let all_settled = drain(&mut reader, measure.bound)?;
        crew.stop_members()?;
        if !all_settled {
            // Only then can anything be left in the broker that a look would have to find.
            crew.inspect()?;
        }
        let verdict = checker::check(&reader.all()?, client.promises);
        if fault.destroys() && verdict.destroyed.is_empty() {
            return Err(Problem::new("the topic was destroyed when nothing was in it, so nothing was to be reported"));
        }
        let mut complaints = verdict.complaints();
        if back_after.is_none() {
            complaints.push(format!("not back within {:?}", measure.bound));
        }
        Ok(Outcome { fault: fault.to_string(), bite, in_flight, verdict, back_after, complaints, folder })
    }
}

/// What is where, from the events until now.
#[derive(Default)]
struct Tally<'a> {
    tried: BTreeSet<&'a str>,
    confirmed: BTreeSet<&'a str>,
    settled: BTreeSet<&'a str>,
}

impl<'a> Tally<'a> {
    fn of(records: &'a [Record]) -> Self {
        let mut tally = Self { settled: checker::handled(records), ..Self::default() };
        for record in records {
            match &record.event {
                Event::Sending { id, .. } => {
                    tally.tried.insert(id);
                }
                Event::Sent { id, outcome: Sent::Confirmed } => {
                    tally.confirmed.insert(id);
                }
                Event::Settled { id, how: How::DeadLetter, outcome: Settled::Confirmed | Settled::Sent, .. } => {
                    tally.settled.insert(id);
                }
                _ => {}
            }
        }
        tally
    }

    fn in_flight(&self) -> usize {
        self.tried.difference(&self.settled).count()
    }
}

fn await_records(
    reader: &mut Reader,
    what: &str,
    limit: Duration,
    mut fits: impl FnMut(&[Record]) -> bool,
) -> Result<()> {
    until(what, limit, || match reader.look() {
        Ok(records) => fits(records).then_some(Ok(())),
        Err(problem) => Some(Err(problem)),
    })?
}

/// Waits until the backlog of the fault's time is settled and what was sent later arrives; `None` past the bound.
fn back(reader: &mut Reader, end: u64, destroyed: bool, measure: Measure) -> Result<Option<Duration>> {
    let begun = Instant::now();
    let waited = await_records(reader, "to be back", measure.bound, |records| {
        let sent_later: BTreeSet<&str> = records
            .iter()
            .filter(|record| record.at > end)
            .filter_map(|record| if let Event::Sending { id, .. } = &record.event { Some(id.as_str()) } else { None })
            .collect();
        let tally = Tally::of(records);
        let newer = tally.settled.intersection(&sent_later).count();
        let older_left = tally.confirmed.iter().any(|id| !sent_later.contains(id) && !tally.settled.contains(id));
        newer > 0 && (destroyed || !older_left)
    });
    if waited.is_err() {
        // A broken history is an error, a broken client is a finding.
        reader.look()?;
        return Ok(None);
    }
    let took = begun.elapsed();
    let calm_again = |records: &[Record]| {
        records.iter().filter(|record| record.at > end && matches!(record.event, Event::Settled { .. })).count()
            >= measure.calm
    };
    await_records(reader, "messages after the fault", Duration::from_secs(60), calm_again)?;
    Ok(Some(took))
}

/// Waits until everything confirmed is settled, or nothing more comes; tells which.
fn drain(reader: &mut Reader, patience: Duration) -> Result<bool> {
    let mut seen = 0;
    let mut moved = Instant::now();
    let mut all = false;
    await_records(reader, "the rest", Duration::from_secs(300), |records| {
        let tally = Tally::of(records);
        if tally.settled.len() > seen {
            seen = tally.settled.len();
            moved = Instant::now();
        }
        all = tally.confirmed.is_subset(&tally.settled);
        all || moved.elapsed() > patience
    })
    .map_err(|_| Problem::new("the members were still settling after 300 s"))?;
    Ok(all)
}
