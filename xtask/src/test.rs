//! `cargo xtask test`: everything that has to hold before a change is merged.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Instant;

use mq_testbed::{Fleet, Folder, Kind, Origin, Problem, Version, Want};
use serde_json::json;

use crate::steps::{Report, Step, in_turn, side_by_side};
use crate::tally::{self, Count};
use crate::{Outcome, faults, features, has_command};

/// Arguments of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also what takes long: clusters, variants, long fault runs, each feature alone. Writes `reports/full.json`.
    #[arg(long)]
    full: bool,
}

/// The backends, by the names that `conformance` and `faults` take, and the server each needs.
const BACKENDS: [(&str, Option<Kind>); 6] = [
    ("memory", None),
    ("redis", Some(Kind::Redis)),
    ("redis-pubsub", Some(Kind::Redis)),
    ("amqp", Some(Kind::RabbitMq)),
    ("amqp-classic", Some(Kind::RabbitMq)),
    ("kafka", Some(Kind::Kafka)),
];

/// Backends whose own issue is still open. Their tests and their suite run and are shown, with what fails; they do not decide
/// the verdict yet. A backend leaves this list when its issue is resolved.
const OPEN: [&str; 5] = ["redis", "redis-pubsub", "amqp", "amqp-classic", "kafka"];

/// The crates of those.
const OPEN_CRATES: [&str; 3] = ["mq-redis", "mq-amqp", "mq-kafka"];

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    let begun = Instant::now();
    let everything = features::everything()?;
    mq_testbed::sweep();
    if let Err(problem) = mq_testbed::provide_for_build(|line| println!("{line}")) {
        // The build may still pass, with an OpenSSL that pkg-config does not know.
        println!("{problem}");
    }
    // Downloading waits for the network, building for the processor.
    let wants: Vec<Want> = Kind::ALL.into_iter().map(Want::Single).collect();
    let mut wanted = wants.clone();
    if args.full {
        wanted.extend(Version::ALL.into_iter().map(Want::Version));
    }
    let download = thread::spawn(move || mq_testbed::provide(&wanted, |line| println!("{line}")));

    let mut reports = in_turn(vec![
        Step::cargo("format", &["fmt", "--all", "--check"]),
        Step::cargo("build", &["build"]).args(everything.clone()),
        Step::cargo("lints", &["clippy", "--all-targets"]).args(everything.clone()).args(["--", "-D", "warnings"]),
        Step::cargo("docs", &["doc", "--no-deps"]).args(everything.clone()).env("RUSTDOCFLAGS", "-D warnings"),
    ]);

    download.join().map_err(|_| "the thread that installs servers panicked")??;
    let fleet = Fleet::start(&wants, Folder::for_run()?);
    let mut missing = Vec::new();
    for entry in fleet.entries() {
        match &entry.origin {
            Origin::Missing(problem) => {
                println!("missing {}: {problem}", entry.want.name());
                missing.push(entry.want);
            }
            origin => println!("server {} {}: {origin:?}", entry.want.name(), entry.url.as_deref().unwrap_or_default()),
        }
    }
    let skips = SkipFile::new()?;
    let with_servers = |mut step: Step| {
        for (name, value) in fleet.variables() {
            step = step.env(name, value);
        }
        step.env("MQ_TEST_SKIPS", skips.0.display().to_string())
    };

    let mut tests = Step::cargo("tests", &["test", "--no-fail-fast"]).args(everything).open(&OPEN_CRATES);
    if args.full {
        tests = tests.args(["--", "--include-ignored"]);
    }
    reports.push(with_servers(tests).run());
    // Interleavings of the engine's threads, under a scheduler that tries many.
    let models = ["test", "-p", "mq-core", "--features", "shuttle", "--lib", "model::threads"];
    reports.push(Step::cargo("thread models", &models).run());
    // Side by side: they wait for brokers and back-offs more than they compute.
    reports.extend(side_by_side(2, suites(&args, &missing).into_iter().map(&with_servers).collect()));
    reports.extend(in_turn(examples().into_iter().map(&with_servers).collect()));
    if args.full {
        reports.extend(in_turn(each_feature_alone()?));
    }
    drop(fleet);
    if args.full {
        for version in Version::ALL {
            reports.extend(on_version(version, &mut missing)?);
        }
    }
    finish(&args, reports, &missing, &skips.read(), begun)
}

/// Conformance of every backend whose server is there, with the server it needs.
fn suites_of_conformance(missing: &[Want]) -> Vec<(Option<Kind>, Step)> {
    let stubs = features::stubs();
    let mut steps = Vec::new();
    for (backend, kind) in BACKENDS {
        let is_stub = stubs.iter().any(|stub| backend.starts_with(stub));
        if has_command("conformance") && is_stub {
            steps.push((kind, Step::not_built(backend, "conformance")));
        } else if has_command("conformance") && !kind.is_some_and(|kind| missing.contains(&Want::Single(kind))) {
            let step = Step::xtask(backend, "conformance", &["conformance", backend]);
            steps.push((kind, if OPEN.contains(&backend) { step.limit(8).open(&[]) } else { step }));
        }
    }
    steps
}

/// Conformance, faults and whatever else other commands of this program test, as far as they exist.
fn suites(args: &Args, missing: &[Want]) -> Vec<Step> {
    let length = if args.full { "--long" } else { "--short" };
    let mut steps: Vec<Step> = suites_of_conformance(missing).into_iter().map(|(_, step)| step).collect();
    for backend in ["redis", "amqp", "kafka"] {
        steps.push(Step::xtask(backend, "reports", &["reports", backend]));
    }
    for command in ["planted", "sim"] {
        if has_command(command) {
            steps.push(Step::xtask("memory", command, &[command]));
        }
    }
    steps.push(Step::xtask("workspace", "capability table", &["conformance", "--check-table"]));
    for (subject, kind) in faults::subjects() {
        // The raw clients prove that the faults bite; a backend's own run takes as long again, and is for `--full`.
        let now = args.full || subject.starts_with("raw-");
        if now && !missing.contains(&Want::Single(kind)) {
            steps.push(Step::xtask(subject, "faults", &["faults", subject, length]));
        }
    }
    steps
}

/// The conformance of every backend of that server on another version of it.
fn on_version(version: Version, missing: &mut Vec<Want>) -> Result<Vec<Report>, Problem> {
    let want = Want::Version(version);
    let fleet = Fleet::start(&[want], Folder::for_run()?);
    let Some((_, url)) = fleet.variables().into_iter().next() else {
        missing.push(want);
        return Ok(Vec::new());
    };
    let steps = suites_of_conformance(&[]).into_iter().filter(|(kind, _)| *kind == Some(version.kind()));
    Ok(in_turn(
        steps
            .map(|(_, mut step)| {
                step.suite = format!("on {}", version.name());
                step.env(version.kind().variable(), url.clone())
            })
            .collect(),
    ))
}

/// Runs every example of the facade, as `cargo test` built it. One that says that it runs "until Ctrl-C" gets that, and
/// has to end well. All on memory here, where those that need another process to talk to at least start and end.
fn examples() -> Vec<Step> {
    let mut files: Vec<PathBuf> =
        fs::read_dir("examples").into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    files.sort();
    let mut steps = Vec::new();
    for file in files {
        let source = if file.is_dir() { file.join("main.rs") } else { file.clone() };
        let Some(name) = file.file_stem().and_then(|stem| stem.to_str()) else { continue };
        let Ok(text) = fs::read_to_string(&source) else { continue };
        if source.extension().is_none_or(|end| end != "rs") {
            continue;
        }
        let program = mq_testbed::target().join("debug").join("examples").join(name);
        let step = Step::new("examples", name, program, &[]).limit(3).env("MQ_URL", "memory://");
        let endless = text.lines().take_while(|line| line.starts_with("//!")).any(|line| line.contains("until Ctrl-C"));
        steps.push(if endless { step.interrupt_after(3) } else { step });
    }
    steps
}

/// A crate has to build with any one of its features, not only with all of them.
fn each_feature_alone() -> Result<Vec<Step>, Problem> {
    let mut steps = Vec::new();
    for (package, feature) in features::all()? {
        let suite = format!("only {feature}");
        let mut step = Step::cargo(&suite, &["check", "--no-default-features", "--package", &package, "--features"]);
        step.backend.clone_from(&package);
        steps.push(step.args([feature]));
    }
    Ok(steps)
}

/// Where tests write the names of those that lacked a server, see `mq_testbed::need`.
struct SkipFile(PathBuf);

impl SkipFile {
    fn new() -> Result<Self, Problem> {
        let file = mq_testbed::target().join("xtask").join("skips");
        fs::write(&file, "").map_err(Problem::during(format!("write {}", file.display())))?;
        Ok(Self(file))
    }

    fn read(&self) -> Vec<String> {
        fs::read_to_string(&self.0).unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

fn finish(args: &Args, reports: Vec<Report>, missing: &[Want], skips: &[String], begun: Instant) -> Outcome {
    let mut sum = tally::table(&reports);
    println!("wall time {:.0} s", begun.elapsed().as_secs_f64());
    for skip in skips {
        println!("skipped: {skip}");
    }
    for want in missing {
        println!("skipped: everything on {}, which is missing", want.name());
    }
    let skipped = skips.len() + missing.len();
    sum.skipped += u64::try_from(skipped).unwrap_or(u64::MAX);
    if sum.open > 0 {
        println!(
            "{} failures in backends whose issue is still open (shown above, not judged): {}",
            sum.open,
            OPEN.join(", ")
        );
    }
    if sum.left_for_full > 0 {
        println!("{} tests are marked as long and run with --full", sum.left_for_full);
    }
    if sum.unsupported > 0 {
        println!("{} refusals that the contract lists (unsupported, not skipped)", sum.unsupported);
    }
    let problem = if args.full { write_report(&reports, sum).err() } else { None };
    let Count { passed, failed, skipped, .. } = sum;
    let skips_fail = std::env::var("CI").is_ok_and(|value| value == "true");
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if let Some(problem) = problem {
        return Err(problem.into());
    }
    match (failed, skipped) {
        (0, 0) => Ok(()),
        (0, _) if !skips_fail => Ok(()),
        (0, _) => Err("with CI=true a skip is a failure; what is missing stands above".into()),
        _ => Err("see the FAILED steps above; their logs are in target/xtask".into()),
    }
}

/// `reports/full.json`: what was run on which commit.
fn write_report(reports: &[Report], sum: Count) -> Result<(), Problem> {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
    };
    let rows: Vec<_> = reports
        .iter()
        .map(|Report { step, count, took }| {
            json!({
                "backend": step.backend,
                "suite": step.suite,
                "passed": count.passed,
                "failed": count.failed,
                "skipped": count.skipped,
                "open": count.open,
                "unsupported": count.unsupported,
                "not_built": count.not_built,
                "seconds": took.as_secs_f64(),
            })
        })
        .collect();
    let report = json!({
        "commit": git(&["rev-parse", "HEAD"]),
        "uncommitted_changes": !git(&["status", "--porcelain"]).is_empty(),
        "passed": sum.passed,
        "failed": sum.failed,
        "skipped": sum.skipped,
        "steps": rows,
    });
    fs::create_dir_all("reports").map_err(Problem::during("make the folder reports"))?;
    fs::write("reports/full.json", format!("{report:#}\n")).map_err(Problem::during("write reports/full.json"))
}
