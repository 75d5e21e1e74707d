//! `cargo xtask test`: everything that has to hold before a change is merged.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use mq_testbed::{Fleet, Folder, Formation, Kind, Origin, Problem, Version, Want};

use crate::run_report::{Left, Skips};
use crate::steps::{Report, Step, abreast, in_turn, side_by_side};
use crate::{Outcome, deny, faults, features, has_command, lots, second_look};

/// Arguments of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also what takes long: clusters, variants, long fault runs, each feature alone. Writes `reports/full.json`.
    #[arg(long)]
    full: bool,
    /// Only the steps whose row contains this, as "redis conformance" or "faults"; servers only if one of them needs some.
    #[arg(long)]
    only: Option<String>,
    /// Panics once the servers run, for the test of what is left behind then.
    #[arg(long, hide = true)]
    panic: bool,
}

/// The backends, by the names that `conformance` and `faults` take, and the server each needs. Those that take longest first.
const BACKENDS: [(&str, Option<Kind>); 6] = [
    ("kafka", Some(Kind::Kafka)),
    ("amqp-classic", Some(Kind::RabbitMq)),
    ("amqp", Some(Kind::RabbitMq)),
    ("redis", Some(Kind::Redis)),
    ("redis-pubsub", Some(Kind::Redis)),
    ("memory", None),
];

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
    let mut wants: Vec<Want> = Kind::ALL.into_iter().map(Want::Single).collect();
    if args.full {
        wants.extend(Version::ALL.into_iter().map(Want::Version));
    }
    let download = thread::spawn(move || mq_testbed::provide(&wants, |line| println!("{line}")));

    let mut run = Run { args, reports: Vec::new(), missing: Vec::new(), skips: Skips::new()? };
    run.builds(&everything);
    download.join().map_err(|_| "the thread that installs servers panicked")??;
    run.usual_servers(everything)?;
    if run.args.full {
        let alone = run.chosen(each_feature_alone()?);
        run.reports.extend(in_turn(alone));
        for version in Version::ALL {
            run.on_another(Want::Version(version), version.name())?;
        }
        for formation in ON_CLUSTERS {
            run.on_another(Want::Cluster(formation), formation.name())?;
        }
    }
    let Run { args, reports, missing, skips } = run;
    Left { full: args.full, only: args.only, missing, skips: skips.read(), wall: begun.elapsed() }.finish(&reports)
}

/// Steps that run at the same time on two cores, once all is built.
const AT_ONCE: usize = 4;

/// Clusters whose URL the suite of their backend can be given. Of RabbitMQ it reaches one node, and the others take part.
/// Kafka's would need a listener for the suite's proxies on each node; its crate's own tests have the cluster.
const ON_CLUSTERS: [Formation; 2] = [Formation::RedisCluster, Formation::RabbitMq];

/// What was run until now.
struct Run {
    args: Args,
    reports: Vec<Report>,
    missing: Vec<Want>,
    skips: Skips,
}

impl Run {
    /// Those of the steps that were asked for.
    fn chosen(&self, steps: Vec<Step>) -> Vec<Step> {
        steps.into_iter().filter(|step| self.wants(&step.row())).collect()
    }

    fn wants(&self, row: &str) -> bool {
        self.args.only.as_deref().is_none_or(|only| row.contains(only))
    }

    /// What needs a compiler and no server.
    fn builds(&mut self, everything: &[String]) {
        let mut quick = vec![Step::cargo("format", &["fmt", "--all", "--check"])];
        if self.wants(deny::ROW) {
            match deny::step() {
                Ok(step) => quick.push(step),
                Err(problem) => self.skips.note(&format!("{}: {problem}", deny::ROW)),
            }
        }
        let compiling = vec![
            // With the programs of the tests, which then need not be waited for while suites and tests run side by side.
            Step::cargo("build", &["build", "--all-targets"]).args(everything),
            Step::cargo("lints", &["clippy", "--all-targets"]).args(everything).args(["--", "-D", "warnings"]),
            Step::cargo("docs", &["doc", "--no-deps"]).args(everything).env("RUSTDOCFLAGS", "-D warnings"),
            // Interleavings of the engine's threads, under a scheduler that tries many.
            Step::cargo(
                "thread models",
                &["test", "-p", "mq-core", "--features", "shuttle", "--lib", "model::threads"],
            ),
        ];
        self.reports.extend(abreast(vec![self.chosen(quick), self.chosen(compiling)]));
    }

    /// Everything on the usual servers.
    fn usual_servers(&mut self, everything: Vec<String>) -> Result<(), Problem> {
        let (tests, suites, examples) = (
            self.chosen(tests(&everything, self.args.full)?),
            self.chosen(suites(self.args.full)),
            self.chosen(examples()),
        );
        if tests.is_empty() && suites.is_empty() && examples.is_empty() && !self.args.panic {
            return Ok(());
        }
        let wants: Vec<Want> = Kind::ALL.into_iter().map(Want::Single).collect();
        let fleet = Fleet::start(&wants, Folder::for_run()?);
        let mut missing = Vec::new();
        for entry in fleet.entries() {
            match &entry.origin {
                Origin::Missing(problem) => {
                    println!("missing {}: {problem}", entry.want.name());
                    self.missing.push(entry.want);
                    missing.push(entry.want.kind());
                }
                origin => {
                    println!("server {} {}: {origin:?}", entry.want.name(), entry.url.as_deref().unwrap_or_default());
                }
            }
        }
        assert!(!self.args.panic, "asked to panic while the servers run");
        let equipped = |steps: Vec<Step>| -> Vec<Step> {
            let can_run = |step: &Step| !step.needs.is_some_and(|kind| missing.contains(&kind));
            let with_urls = |step: Step| {
                let urls = fleet.variables();
                urls.into_iter().fold(self.skips.told_to(step), |step, (name, url)| step.env(name, url))
            };
            steps.into_iter().filter(can_run).map(with_urls).collect()
        };
        // Side by side: they wait for brokers and back-offs more than they compute. The longest first, so that no core is
        // without work at the end.
        let together = tests.into_iter().chain(suites).collect();
        let mut reports = side_by_side(AT_ONCE, equipped(together));
        second_look::at(&mut reports);
        self.reports.extend(reports);
        self.reports.extend(in_turn(equipped(examples)));
        Ok(())
    }

    /// The conformance of every backend of that server on another version of it, or on several nodes.
    fn on_another(&mut self, want: Want, name: &str) -> Result<(), Problem> {
        // On a Cluster `PUBLISH` counts the receivers of one node: the suite's counts are those of one server.
        let left_out = |step: &Step| want == Want::Cluster(Formation::RedisCluster) && step.backend == "redis-pubsub";
        let steps = suites_of_conformance();
        let steps = steps.into_iter().filter(|step| step.needs == Some(want.kind()) && !left_out(step));
        let renamed = steps.map(|mut step| {
            step.suite = format!("on {name}");
            step
        });
        let steps = self.chosen(renamed.collect());
        // The suite of Kafka starts its own, whose clients each have a door: it is told the version.
        if let Want::Version(version) = want
            && let Some(kafka) = version.kafka()
        {
            let steps = steps.into_iter().map(|step| step.env("MQ_TEST_KAFKA_VERSION", kafka));
            self.reports.extend(in_turn(steps.collect()));
            return Ok(());
        }
        if steps.is_empty() {
            return Ok(());
        }
        let fleet = Fleet::start(&[want], Folder::for_run()?);
        let Some((_, url)) = fleet.variables().into_iter().next() else {
            for entry in fleet.entries() {
                println!("missing {name}: {:?}", entry.origin);
            }
            self.missing.push(want);
            return Ok(());
        };
        let steps = steps.into_iter().map(|step| step.env(want.kind().variable(), url.clone()));
        self.reports.extend(in_turn(steps.collect()));
        Ok(())
    }
}

/// Unit, integration, compile-error and documentation tests, in lots.
fn tests(everything: &[String], full: bool) -> Result<Vec<Step>, Problem> {
    let mut steps = Vec::new();
    for (package, names) in lots::lots()? {
        let suite = if package.is_empty() { "tests".to_owned() } else { format!("tests of {package}") };
        let mut step = Step::cargo(&suite, &["test", "--no-fail-fast"]).args(everything.iter().cloned());
        if package.is_empty() {
            step = step.args(["--lib", "--bins", "--examples"]);
        }
        for name in names {
            step = step.args(["--test".to_owned(), name]);
        }
        steps.push(step);
    }
    steps.push(Step::cargo("doc tests", &["test", "--no-fail-fast", "--doc"]).args(everything.iter().cloned()));
    let long = |step: Step| if full { step.args(["--", "--include-ignored"]).limit(60) } else { step };
    Ok(steps.into_iter().map(long).collect())
}

/// Conformance of every backend.
fn suites_of_conformance() -> Vec<Step> {
    let stubs = features::stubs();
    let mut steps = Vec::new();
    for (backend, kind) in BACKENDS {
        let is_stub = stubs.iter().any(|stub| backend.starts_with(stub));
        if has_command("conformance") && is_stub {
            steps.push(Step::not_built(backend, "conformance").on(kind));
        } else if has_command("conformance") {
            let step = Step::xtask(backend, "conformance", &["conformance", backend]).on(kind);
            steps.push(step.limit(20));
        }
    }
    steps
}

/// Conformance, faults and whatever else other commands of this program test, as far as they exist.
fn suites(full: bool) -> Vec<Step> {
    let length = if full { "--long" } else { "--short" };
    let mut steps = suites_of_conformance();
    for (subject, kind) in faults::subjects() {
        // The raw clients prove that the faults bite; a backend's own run takes as long again, and is for `--full`.
        if full || subject.starts_with("raw-") {
            steps.push(Step::xtask(subject, "faults", &["faults", subject, length]).on(Some(kind)));
        }
    }
    for backend in ["redis", "amqp", "kafka"] {
        steps.push(Step::xtask(backend, "reports", &["reports", backend]));
    }
    for command in ["planted", "sim"] {
        if has_command(command) {
            steps.push(Step::xtask("memory", command, &[command]));
        }
    }
    steps.push(Step::xtask("workspace", "capability table", &["conformance", "--check-table"]));
    steps
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
