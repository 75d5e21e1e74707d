//! Runs the tests: each in a thread and runtime of its own, under one deadline, with its leftovers counted.

use crate::{
    Case, Check, Clock, Entry, Factory, History, Outcome, Report, Spread, Stated, Test, TestFailure, ensure, refusal,
};
use mq_api::{Capabilities, Feature};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime};

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Only tests whose name holds this.
    pub filter: Option<String>,
    /// Only with this many partitions.
    pub partitions: Option<u32>,
    /// Tests at a time.
    pub parallel: usize,
    /// The whole test on the wall, if shorter than what its clock allows.
    pub wall: Option<Duration>,
    /// Prints each result as it comes.
    pub verbose: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { filter: None, partitions: None, parallel: 2, wall: None, verbose: false }
    }
}

/// How a failure begins that is nothing but a test that never came back.
pub(crate) const HANGS: &str = "it hangs";
/// Lines of history that a report keeps of a failed test.
const SHOWN: usize = 120;
/// The larger number of partitions that tests run on.
const MANY_PARTITIONS: u32 = 8;

#[derive(Clone)]
struct Job {
    index: usize,
    case: Case,
    partitions: u32,
    name: String,
}

/// Runs `cases` against the broker of `factory`.
pub fn run(factory: &Arc<dyn Factory>, cases: &[Case], options: &Options) -> Report {
    let found = probe(factory);
    let partitioned = found.as_ref().is_some_and(|f| f.has(Feature::Partitions));
    let mut jobs = VecDeque::new();
    let mut lonely = VecDeque::new();
    for case in cases.iter().filter(|case| !case.recorded || factory.records()) {
        let counts: &[u32] = match case.spread {
            Spread::Both if partitioned => &[1, MANY_PARTITIONS],
            _ => &[1],
        };
        for &partitions in counts {
            let name = if partitions > 1 { format!("{}@{partitions}", case.name) } else { case.name.to_owned() };
            let wanted = options.filter.as_ref().is_none_or(|f| name.contains(f.as_str()))
                && options.partitions.is_none_or(|n| n == partitions);
            if wanted {
                let job = Job { index: jobs.len() + lonely.len(), case: *case, partitions, name };
                if case.alone { lonely.push_back(job) } else { jobs.push_back(job) }
            }
        }
    }
    let done = Mutex::new(Vec::new());
    let work = |queue: &Mutex<VecDeque<Job>>| {
        loop {
            let Some(job) = queue.lock().pop_front() else { return };
            let entry = run_one(factory, &job, options.wall);
            if options.verbose {
                let word = match &entry.outcome {
                    Outcome::Passed => "passed".to_owned(),
                    Outcome::Unsupported { missing } => format!("unsupported ({})", missing.join(", ")),
                    Outcome::Failed { text, .. } => format!("FAILED: {text}"),
                };
                println!("{:<64} {:>6} ms  {word}", entry.name, entry.took.as_millis());
            }
            done.lock().push((job.index, entry));
        }
    };
    let queue = Mutex::new(jobs);
    std::thread::scope(|scope| {
        for _ in 0..options.parallel.max(1) {
            scope.spawn(|| work(&queue));
        }
    });
    work(&Mutex::new(lonely));
    let mut done = done.into_inner();
    done.sort_by_key(|(index, _)| *index);
    Report {
        backend: factory.name(),
        capabilities: found.as_deref().map(Stated::all).unwrap_or_default(),
        levels: found.map(|f| (f.send_level.to_string(), f.settle_level.to_string())).unwrap_or_default(),
        entries: done.into_iter().map(|(_, entry)| entry).collect(),
    }
}

/// What the backend can do; `None` when no connection can be made, which then fails every test.
fn probe(factory: &Arc<dyn Factory>) -> Option<Arc<Capabilities>> {
    let found = Arc::new(Mutex::new(None));
    let body = {
        let found = found.clone();
        move |t: Test| {
            let work: futures_util::future::LocalBoxFuture<'static, Check> = Box::pin(async move {
                *found.lock() = Some(t.capabilities().await?);
                Ok(())
            });
            work
        }
    };
    let (outcome, _) = in_own_runtime(factory, "probe", 1, (None, None), body);
    drop(outcome);
    found.lock().take()
}

fn run_one(factory: &Arc<dyn Factory>, job: &Job, wall: Option<Duration>) -> Entry {
    let began = Instant::now();
    let case = job.case;
    let (outcome, counts) = in_own_runtime(factory, &job.name, job.partitions, (case.clock, wall), move |t| {
        Box::pin(async move {
            let found = t.capabilities().await?;
            t.shared().grouped.store(found.has(Feature::Groups), Ordering::Relaxed);
            let missing: Vec<Feature> = case.needs.iter().copied().filter(|f| !found.has(*f)).collect();
            if missing.is_empty() {
                return (case.run)(t).await;
            }
            for feature in &missing {
                refusal::prove(&t, *feature).await?;
            }
            Err(TestFailure::new(refusal::mark(&missing)))
        })
    });
    let outcome = match outcome {
        Outcome::Failed { text, history } => match refusal::unmark(&text) {
            Some(missing) => Outcome::Unsupported { missing },
            None => Outcome::Failed { text, history },
        },
        other => other,
    };
    Entry {
        name: job.name.clone(),
        promise: case.promise.to_owned(),
        needs: case.needs.iter().map(ToString::to_string).collect(),
        outcome,
        counts,
        took: began.elapsed(),
    }
}

type Counts = BTreeMap<String, u64>;

/// Runs one test to its end or its deadline. A test that never comes back is left to its thread and reported.
fn in_own_runtime<F>(
    factory: &Arc<dyn Factory>,
    name: &str,
    partitions: u32,
    (clock, limit): (Option<Clock>, Option<Duration>),
    body: F,
) -> (Outcome, Counts)
where
    F: FnOnce(Test) -> futures_util::future::LocalBoxFuture<'static, Check> + Send + 'static,
{
    let clock = match factory.virtual_time() {
        true => clock.unwrap_or(Clock::Virtual),
        false => Clock::Real,
    };
    let history = History::new();
    let counts = Arc::new(Mutex::new(Counts::new()));
    let (send, receive) = channel();
    let run = run_name(name);
    let job = {
        let (factory, history, counts) = (factory.clone(), history.clone(), counts.clone());
        move || {
            let result = catch_unwind(AssertUnwindSafe(|| {
                let mut builder = tokio::runtime::Builder::new_current_thread();
                builder.enable_all();
                if clock == Clock::Virtual {
                    builder.start_paused(true);
                }
                let runtime = builder.build().map_err(|e| TestFailure::new(format!("no runtime: {e}")))?;
                let result = runtime.block_on(async {
                    let environment = factory.environment(clock, &run);
                    let test = Test::new(environment, history.clone(), clock, run.clone(), partitions);
                    let result = whole(test.clone(), body).await;
                    counts.lock().append(&mut test.shared().counts.lock());
                    result
                });
                runtime.shutdown_background();
                result
            }));
            let result = match result {
                Ok(result) => result,
                Err(panic) => Err(TestFailure::new(format!("it panicked: {}", words_of(&*panic)))),
            };
            // The receiver is gone only when the test was given up.
            let _ = send.send(result);
        }
    };
    let wall = match clock {
        Clock::Virtual => crate::Pace::paused().wall,
        Clock::Real => crate::Pace::real().wall,
    };
    let wall = limit.map_or(wall, |limit| limit.min(wall));
    let thread = std::thread::Builder::new().name(format!("test {name}")).spawn(job);
    let result = match thread {
        Err(e) => Err(TestFailure::new(format!("no thread for the test: {e}"))),
        Ok(_) => match receive.recv_timeout(wall) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(TestFailure::new(format!("{HANGS}: not over after {wall:?}"))),
            Err(RecvTimeoutError::Disconnected) => Err(TestFailure::new("its thread died")),
        },
    };
    let counts = std::mem::take(&mut *counts.lock());
    match result {
        Ok(()) => (Outcome::Passed, counts),
        Err(e) if refusal::unmark(e.text()).is_some() => {
            (Outcome::Failed { text: e.text().to_owned(), history: String::new() }, counts)
        }
        Err(e) => (Outcome::Failed { text: e.to_string(), history: history.render(SHOWN) }, counts),
    }
}

/// The test, and after it the promise that every test makes: nothing is left.
async fn whole<F>(test: Test, body: F) -> Check
where
    F: FnOnce(Test) -> futures_util::future::LocalBoxFuture<'static, Check>,
{
    let deadline = test.pace().deadline;
    let result = match tokio::time::timeout(deadline, body(test.clone())).await {
        Ok(result) => result,
        Err(_) => Err(TestFailure::new(format!("not over at its deadline of {deadline:?}"))),
    };
    for task in test.shared().tasks.lock().drain(..) {
        task.abort();
    }
    let left = leave(&test).await;
    result.and(left)
}

async fn leave(test: &Test) -> Check {
    let pace = test.pace();
    let open: Vec<_> = std::mem::take(&mut *test.shared().connections.lock());
    for (connection, open) in &open {
        if *open {
            let limit = pace.drain * 4;
            let report = tokio::time::timeout(limit, connection.broker.close(pace.drain)).await;
            ensure!(report.is_ok(), "closing {connection:?} at the end took longer than {limit:?}");
        }
    }
    drop(open);
    let tasks = tokio::runtime::Handle::current().metrics();
    let mut alive = 0;
    // Tasks end by themselves once they are told; a few turns of the runtime, no fixed time.
    for turn in 0..50_u32 {
        alive = tasks.num_alive_tasks();
        if alive == 0 {
            break;
        }
        let pause = if turn < 25 { Duration::ZERO } else { pace.retry / 4 };
        tokio::time::sleep(pause).await;
    }
    ensure!(alive == 0, "{alive} tasks are left after everything was closed");
    let left = test.env().leftovers().await;
    ensure!(left.is_empty(), "left after everything was closed: {left:?}");
    Ok(())
}

/// A part of names that no other run and no other test has, and that a topic may hold.
fn run_name(test: &str) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let short: String =
        test.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' }).take(50).collect();
    format!("{short}-{:x}", (now.as_nanos() & 0xff_ffff_ffff) as u64)
}

fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "without words".to_owned(),
    }
}
