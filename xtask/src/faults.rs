//! `cargo xtask faults`: a workload under each fault, on a real server, judged by its history.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mq_testbed::checker::Promises;
use mq_testbed::trial::{Bed, Client, Fault, Load, Measure, Outcome as Trial};
use mq_testbed::{Kind, Problem, Want};

use crate::{Outcome, build_program, features};

/// Arguments of `cargo xtask faults`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// `raw` for the client libraries themselves on every server, `raw-redis`, `raw-amqp`, `raw-kafka` for one, or a
    /// backend of anymq.
    client: String,
    /// Few faults and some hundred messages for each, for every change.
    #[arg(long)]
    short: bool,
    /// All faults, and for each backend of anymq 100,000 confirmed messages a fault, which is also the default.
    #[arg(long, conflicts_with = "short")]
    long: bool,
    /// Only faults whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Confirmed messages for each fault, at least, of a client that can send many at a time.
    #[arg(long, conflicts_with = "short")]
    messages: Option<usize>,
    /// Decides the random choices of the proxy.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// A client program, where it is built, and the server it runs on.
struct Subject {
    name: &'static str,
    kind: Kind,
    /// The package's binary.
    program: &'static str,
    args: &'static [&'static str],
    promises: Promises,
    /// Seconds until all is as before, at most.
    bound: u64,
    /// Whether it can send and handle many at a time.
    many: bool,
    /// Seconds that a broker which is back waits, before it lets a group go on, for members that gave up meanwhile: beside
    /// [`FETCHING`].
    session: u64,
}

/// Seconds from a server's return until the first delivery, at most, beside a subject's `session`.
const FETCHING: u64 = 5;

/// Confirmed messages for each fault.
const MANY: usize = 100_000;

/// Everything that can be put under faults: the raw clients, then the backends of anymq.
///
/// The raw clients are tuned to notice a half-open line within 3 s; anymq runs with its defaults, which have to wait
/// longer before they call a silent broker dead.
const SUBJECTS: [Subject; 6] = [
    Subject {
        name: "raw-redis",
        kind: Kind::Redis,
        program: "testbed-raw",
        args: &["redis"],
        promises: Promises { ordered: false, one_owner: true },
        bound: 20,
        many: false,
        session: 0,
    },
    Subject {
        name: "raw-amqp",
        kind: Kind::RabbitMq,
        program: "testbed-raw",
        args: &["amqp"],
        promises: Promises { ordered: false, one_owner: true },
        bound: 20,
        many: false,
        session: 0,
    },
    Subject {
        name: "raw-kafka",
        kind: Kind::Kafka,
        program: "testbed-raw",
        args: &["kafka"],
        promises: Promises { ordered: true, one_owner: true },
        bound: 20,
        many: false,
        session: 0,
    },
    Subject {
        name: "redis",
        kind: Kind::Redis,
        program: "testbed-client",
        args: &[],
        promises: Promises { ordered: false, one_owner: true },
        bound: 45,
        many: true,
        session: 0,
    },
    Subject {
        name: "amqp",
        kind: Kind::RabbitMq,
        program: "testbed-client",
        args: &[],
        promises: Promises { ordered: false, one_owner: true },
        bound: 45,
        many: true,
        session: 0,
    },
    Subject {
        name: "kafka",
        kind: Kind::Kafka,
        program: "testbed-client",
        args: &[],
        promises: Promises { ordered: true, one_owner: true },
        bound: 45,
        many: true,
        // The lease of the workload. A member that heard nothing for that long joins anew, and the broker, back with the
        // group as it was, waits as long for the member that it knew.
        session: 5,
    },
];

/// The names of all that can be put under faults, and the server each needs.
pub(crate) fn subjects() -> Vec<(&'static str, Kind)> {
    let stubs = features::stubs();
    SUBJECTS
        .iter()
        .filter(|subject| !stubs.contains(&subject.name))
        .map(|subject| (subject.name, subject.kind))
        .collect()
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    let _ = args.long;
    let subjects: Vec<&Subject> = SUBJECTS
        .iter()
        .filter(|subject| subject.name == args.client || (args.client == "raw" && subject.name.starts_with("raw-")))
        .collect();
    if subjects.is_empty() {
        let known: Vec<&str> = SUBJECTS.iter().map(|subject| subject.name).collect();
        return Err(format!("\"{}\" is none of: raw {}", args.client, known.join(" ")));
    }
    if features::stubs().contains(&args.client.as_str()) {
        println!("not built");
        return Ok(());
    }
    let wants: Vec<Want> = subjects.iter().map(|subject| Want::Single(subject.kind)).collect();
    mq_testbed::provide(&wants, |line| println!("{line}"))?;
    let mut sum = Sum::default();
    for subject in subjects {
        if let Err(problem) = on_one(subject, &args, &mut sum) {
            println!("{}: {problem}", subject.name);
            sum.not_made += 1;
        }
    }
    let Sum { faults, lost, over_bound, broken, not_made } = sum;
    if broken + not_made > 0 {
        println!("{broken} trials broke a promise, {not_made} could not be made or did not bite");
    }
    println!("{faults} faults, {lost} lost, {over_bound} over bound");
    if lost + over_bound + broken + not_made > 0 {
        return Err("see the trials above; their histories and logs are in target/faults".into());
    }
    Ok(())
}

#[derive(Default)]
struct Sum {
    faults: usize,
    lost: usize,
    over_bound: usize,
    broken: usize,
    not_made: usize,
}

fn on_one(subject: &Subject, args: &Args, sum: &mut Sum) -> Result<(), Problem> {
    let client = Client {
        program: build_program::build(subject.program)?,
        args: subject.args.iter().map(|arg| (*arg).to_owned()).collect(),
        promises: subject.promises,
    };
    let folder: PathBuf = mq_testbed::records().join("faults").join(subject.name);
    // Those of the last run; gone is as good as removed.
    let _ = fs::remove_dir_all(&folder);
    let mut faults = if args.short { Fault::short() } else { Fault::all() };
    if let Some(part) = &args.only {
        faults.retain(|fault| fault.to_string().contains(part.as_str()));
    }
    let begun = Instant::now();
    let mut bed = Bed::new(subject.kind, args.seed)?;
    println!("\n{} on {} (server ready after {:.1} s)", subject.name, subject.kind, begun.elapsed().as_secs_f64());
    if subject.many {
        let apart =
            if subject.session > 0 { format!(", and {} s of a session", subject.session) } else { String::new() };
        println!(
            "bounds: fetching {FETCHING} s after the server is back{apart}; all as before after {} s",
            subject.bound
        );
    }
    println!(
        "{:<34} {:>9} {:>9} {:>5} {:>10} {:>9} {:>7} {:>7}  what it did",
        "fault", "confirmed", "delivered", "lost", "duplicates", "in flight", "fetch s", "back s"
    );
    for fault in faults {
        sum.faults += 1;
        let mut measure = Measure { bound: Duration::from_secs(subject.bound), ..Measure::default() };
        if subject.many {
            measure.fetching = Duration::from_secs(FETCHING + subject.session);
            measure.load = if args.short { Load::LIGHT } else { Load::heavy(args.messages.unwrap_or(MANY)) };
        }
        match bed.run(&client, fault, measure, &folder) {
            Ok(trial) => {
                row(&trial);
                sum.lost += trial.verdict.lost.len();
                sum.over_bound += usize::from(trial.is_over_bound());
                sum.broken += usize::from(!trial.complaints.is_empty());
                if trial.complaints.is_empty() && measure.load.confirmed > 0 {
                    // Some fifty megabytes of a history in which there is nothing to look for.
                    let _ = fs::remove_dir_all(&trial.folder);
                }
            }
            Err(problem) => {
                println!("{:<34} not made: {problem}", fault.to_string());
                sum.not_made += 1;
            }
        }
    }
    Ok(())
}

fn row(trial: &Trial) {
    let verdict = &trial.verdict;
    let seconds = |time: Option<Duration>| time.map_or_else(|| "never".into(), |t| format!("{:.1}", t.as_secs_f64()));
    let (fetching, back) = (seconds(trial.fetching_after), seconds(trial.back_after));
    let destroyed = match verdict.destroyed.len() {
        0 => String::new(),
        count => format!(" ({count} destroyed)"),
    };
    println!(
        "{:<34} {:>9} {:>9} {:>5} {:>10} {:>9} {fetching:>7} {back:>7}  {}{destroyed}",
        trial.fault,
        verdict.confirmed,
        verdict.delivered,
        verdict.lost.len(),
        verdict.duplicates,
        trial.in_flight,
        trial.bite,
    );
    for complaint in &trial.complaints {
        println!("    BROKEN: {complaint} (see {})", trial.folder.display());
    }
}
