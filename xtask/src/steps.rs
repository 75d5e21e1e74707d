//! One step of a longer command: a program, run in a group of its own, with a log, a time limit and a count.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use mq_testbed::{Kind, Knock, Problem};

use crate::guard::Guarded;
use crate::tally::Count;

/// What is to be run.
#[derive(Clone)]
pub(crate) struct Step {
    /// The row of the table: `workspace`, or a backend's name.
    pub(crate) backend: String,
    /// The column: what is tested.
    pub(crate) suite: String,
    program: PathBuf,
    args: Vec<String>,
    env: Vec<(String, String)>,
    limit: Duration,
    interrupt_after: Option<Duration>,
    /// The server without which there is nothing to run.
    pub(crate) needs: Option<Kind>,
}

/// What became of it.
pub(crate) struct Report {
    pub(crate) step: Step,
    pub(crate) count: Count,
    pub(crate) took: Duration,
    /// What failed, in few lines.
    pub(crate) failures: Vec<String>,
}

impl Step {
    /// A call of cargo.
    pub(crate) fn cargo(suite: &str, args: &[&str]) -> Self {
        // The one that runs us, and so the one of rust-toolchain or of `cargo +name`.
        let cargo = std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from);
        let step = Self::new("workspace", suite, cargo, args);
        // A machine that builds once gains nothing from incremental compilation and loses 9 GB of disk to it.
        if mq_testbed::in_ci() { step.env("CARGO_INCREMENTAL", "0") } else { step }
    }

    /// A call of another command of this program.
    pub(crate) fn xtask(backend: &str, suite: &str, args: &[&str]) -> Self {
        Self::new(backend, suite, crate::this_program(), args)
    }

    /// A row for something that there is no program for yet.
    pub(crate) fn not_built(backend: &str, suite: &str) -> Self {
        Self::new(backend, suite, PathBuf::from("echo"), &["not built"])
    }

    /// Any program.
    pub(crate) fn new(backend: &str, suite: &str, program: PathBuf, args: &[&str]) -> Self {
        Self {
            backend: backend.into(),
            suite: suite.into(),
            program,
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            env: Vec::new(),
            limit: Duration::from_secs(30 * 60),
            interrupt_after: None,
            needs: None,
        }
    }

    /// Adds arguments.
    pub(crate) fn args<A: Into<String>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets a variable.
    pub(crate) fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// It is left out where that server is missing.
    pub(crate) fn on(mut self, kind: Option<Kind>) -> Self {
        self.needs = kind;
        self
    }

    /// Its row of the table: backend and suite.
    pub(crate) fn row(&self) -> String {
        format!("{} {}", self.backend, self.suite)
    }

    /// After this time it is ended and has failed; 30 min unless said otherwise.
    pub(crate) fn limit(mut self, minutes: u64) -> Self {
        self.limit = Duration::from_secs(minutes * 60);
        self
    }

    /// The same in another row.
    pub(crate) fn named(mut self, suite: &str) -> Self {
        suite.clone_into(&mut self.suite);
        self
    }

    /// A call of `cargo test` that is yet to be told what to test.
    pub(crate) fn without_targets(mut self) -> Self {
        let mut args = Vec::new();
        let mut old = self.args.into_iter();
        while let Some(arg) = old.next() {
            match arg.as_str() {
                "--lib" | "--bins" | "--examples" => {}
                "--test" => drop(old.next()),
                "--" => break,
                _ => args.push(arg),
            }
        }
        self.args = args;
        self
    }

    /// What its program is called with.
    #[cfg(test)]
    pub(crate) fn arguments(&self) -> &[String] {
        &self.args
    }

    /// Sends it Ctrl-C after that time: for a program that runs until then and has to end well.
    pub(crate) fn interrupt_after(mut self, seconds: u64) -> Self {
        self.interrupt_after = Some(Duration::from_secs(seconds));
        self
    }

    fn log(&self) -> PathBuf {
        mq_testbed::records().join("xtask").join(format!("{}-{}.log", self.backend, self.suite.replace(' ', "-")))
    }

    /// Runs it to its end. Its output goes to a log, and the end of that to the screen if it fails.
    pub(crate) fn run(self) -> Report {
        let begun = Instant::now();
        let name = self.row();
        println!("   ... {name}");
        let outcome = self.execute();
        let took = begun.elapsed();
        let mut failures = Vec::new();
        let count = match outcome {
            Ok((true, text)) => Count::read(&text, true),
            Ok((false, text)) => {
                failures = crate::failures::of(&text);
                println!("FAILED {name}; {} ends:", self.log().display());
                let lines: Vec<&str> = text.lines().collect();
                println!("{}", lines[lines.len().saturating_sub(120)..].join("\n"));
                Count::read(&text, false)
            }
            Err(problem) => {
                failures.push(problem.to_string());
                println!("FAILED {name}: {problem}");
                Count::read("", false)
            }
        };
        println!(
            "{:>6} {name}: {count} ({:.1} s)",
            if count.failed == 0 { "ok" } else { "FAILED" },
            took.as_secs_f64()
        );
        Report { step: self, count, took, failures }
    }

    fn execute(&self) -> Result<(bool, String), Problem> {
        let log = self.log();
        if let Some(folder) = log.parent() {
            fs::create_dir_all(folder).map_err(Problem::during(format!("make {}", folder.display())))?;
        }
        let out = File::create(&log).map_err(Problem::during(format!("open {}", log.display())))?;
        let err = out.try_clone().map_err(Problem::during("duplicate the log's handle"))?;
        let mut command = Command::new(&self.program);
        command.args(&self.args).stdin(Stdio::null()).stdout(out).stderr(err).process_group(0);
        // What cargo told us about xtask's own package must not look like a change to the packages built below.
        for (name, _) in std::env::vars() {
            if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_NAME"].iter().any(|prefix| name.starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        let mut child = command.spawn().map_err(Problem::during(format!("start {}", self.program.display())))?;
        let _guarded = Guarded::new(child.id());
        let begun = Instant::now();
        let mut interrupt = self.interrupt_after;
        let ended = mq_testbed::until("the step's end", self.limit, || {
            if interrupt.is_some_and(|after| begun.elapsed() >= after) {
                interrupt = None;
                mq_testbed::send(child.id(), Knock::Interrupt);
            }
            child.try_wait().transpose()
        });
        let text = |log| fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        match ended {
            Ok(status) => Ok((status.is_ok_and(|status| status.success()), text(&log))),
            Err(_) => Ok((false, format!("{}\nended by xtask: it ran for {:?}", text(&log), self.limit))),
        }
    }
}

/// Runs steps one after the other, stopping nowhere: one failure should not hide the next.
pub(crate) fn in_turn(steps: Vec<Step>) -> Vec<Report> {
    steps.into_iter().map(Step::run).collect()
}

/// Runs rows of steps side by side, each in turn.
pub(crate) fn abreast(rows: Vec<Vec<Step>>) -> Vec<Report> {
    std::thread::scope(|scope| {
        let rows: Vec<_> = rows.into_iter().map(|row| scope.spawn(|| in_turn(row))).collect();
        rows.into_iter().flat_map(|row| row.join().unwrap_or_default()).collect()
    })
}

/// Runs steps side by side, at most `width` at a time: for steps that wait more than they compute.
pub(crate) fn side_by_side(width: usize, steps: Vec<Step>) -> Vec<Report> {
    let queue = std::sync::Mutex::new(steps.into_iter().enumerate());
    let mut reports: Vec<(usize, Report)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..width.max(1))
            .map(|_| {
                scope.spawn(|| {
                    let mut done = Vec::new();
                    while let Some((place, step)) = queue.lock().ok().and_then(|mut queue| queue.next()) {
                        done.push((place, step.run()));
                    }
                    done
                })
            })
            .collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
    });
    reports.sort_by_key(|(place, _)| *place);
    reports.into_iter().map(|(_, report)| report).collect()
}
