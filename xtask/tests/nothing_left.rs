//! However the servers' time ends, none of them is left: after `brokers down`, and after a test run that ended by Ctrl-C, by
//! a panic, or by `kill -9` of xtask.
//!
//! Each test has a folder for its servers' state of its own, so that `brokers status` counts its processes alone.

// A test may unwrap: its panic is the report.
#![allow(clippy::unwrap_used)]

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mq_testbed::{Kind, Knock, eventually, send, send_to_group, shortage, skip};

/// The last line of `brokers status` when nothing is there.
const NOTHING: &str = "0 up, 0 processes, 0 ports";

/// A test run: the servers that `test` starts, and one step with a server, a proxy and four clients of its own.
const RUN: [&str; 3] = ["test", "--only", "raw-redis faults"];

/// At least so many server processes are there then: Redis twice, RabbitMQ with its epmd and two helpers, Kafka, PostgreSQL
/// with a child.
const PROCESSES: usize = 9;

/// One at a time: four servers start in each test.
static TURN: Mutex<()> = Mutex::new(());

/// The commands of this repository, with a folder for servers that goes with it.
struct Place {
    folder: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Place {
    /// `None` where the servers cannot run; then the test is noted as skipped.
    fn new(name: &str) -> Option<Self> {
        if let Some(problem) = Kind::ALL.into_iter().find_map(shortage) {
            skip(&problem.to_string());
            return None;
        }
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        Some(Self { folder, _turn: TURN.lock().unwrap_or_else(PoisonError::into_inner) })
    }

    fn xtask(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.args(args).current_dir("..").stdin(Stdio::null()).env("MQ_TEST_BROKERS", &self.folder);
        // Its own servers, also where these tests were given some.
        for kind in Kind::ALL {
            command.env_remove(kind.variable());
        }
        command.env_remove("MQ_TEST_SKIPS");
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.xtask(args).output().unwrap()
    }

    fn status(&self) -> String {
        last_line(&self.run(&["brokers", "status"]))
    }

    /// Server processes, those of `up` and those of test runs.
    fn processes(&self) -> usize {
        let status = self.status();
        status.split(", ").nth(1).and_then(|part| part.split(' ').next()?.parse().ok()).unwrap()
    }

    /// A test run in the midst of its step, the leader of a process group as one at a terminal is.
    fn test_run(&self) -> Child {
        let log = PathBuf::from(format!("{}.log", self.folder.display()));
        let out = std::fs::File::create(&log).unwrap();
        let err = out.try_clone().unwrap();
        // A shell that starts these tests in the background has them ignore Ctrl-C, and so whatever they start.
        let xtask = self.xtask(&RUN);
        let mut run = Command::new("env");
        run.arg("--default-signal=INT").arg(xtask.get_program()).args(xtask.get_args()).current_dir("..");
        for (name, value) in xtask.get_envs() {
            match value {
                Some(value) => run.env(name, value),
                None => run.env_remove(name),
            };
        }
        let mut run = run.stdin(Stdio::null()).stdout(out).stderr(err).process_group(0).spawn().unwrap();
        // Long enough for a build of the client, should it be missing.
        let began = eventually(Duration::from_secs(600), || self.processes() >= PROCESSES || ended(&mut run));
        assert!(began && !ended(&mut run), "no servers: {}", std::fs::read_to_string(&log).unwrap_or_default());
        std::fs::remove_file(&log).unwrap();
        run
    }

    fn assert_nothing_left(&self) {
        // A child of PostgreSQL notices the end of its parent only when it next looks.
        let mut status = String::new();
        eventually(Duration::from_secs(30), || {
            status = self.status();
            status == NOTHING
        });
        assert_eq!(status, NOTHING, "{}", String::from_utf8_lossy(&self.run(&["brokers", "status"]).stdout));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Ends what a failed test left.
        let _ = self.xtask(&["brokers", "down"]).stdout(Stdio::null()).status();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn ended(child: &mut Child) -> bool {
    child.try_wait().unwrap().is_some()
}

fn last_line(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).lines().next_back().unwrap_or_default().to_owned()
}

#[test]
fn after_down() {
    let Some(place) = Place::new("down") else { return };
    assert_eq!(place.status(), NOTHING);
    let up = place.run(&["brokers", "up"]);
    assert_eq!(last_line(&up), "4 up, 0 missing", "{}", String::from_utf8_lossy(&up.stderr));
    assert!(up.status.success());
    let status = place.status();
    assert!(status.starts_with("4 up, "), "{status}");
    assert!(place.processes() >= PROCESSES - 1, "{status}");
    let urls = std::fs::read_to_string(place.folder.join("env")).unwrap();
    for kind in Kind::ALL {
        assert!(urls.contains(&format!("{}='", kind.variable())), "{urls}");
    }
    let down = place.run(&["brokers", "down"]);
    assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
    place.assert_nothing_left();
    assert!(!place.folder.join("env").exists(), "the URLs of servers that are gone");
}

#[test]
fn after_ctrl_c_of_a_test_run() {
    let Some(place) = Place::new("ctrl-c") else { return };
    let mut run = place.test_run();
    // A terminal sends it to the whole group in the foreground.
    send_to_group(run.id(), Knock::Interrupt);
    assert!(!run.wait().unwrap().success());
    place.assert_nothing_left();
}

#[test]
fn after_kill_9_of_xtask() {
    let Some(place) = Place::new("kill-9") else { return };
    let mut run = place.test_run();
    // Of xtask alone: what it started has to notice by itself.
    send(run.id(), Knock::Kill);
    run.wait().unwrap();
    place.assert_nothing_left();
}

#[test]
fn after_a_panic() {
    let Some(place) = Place::new("panic") else { return };
    let run = place.run(&[&RUN[..], &["--panic"]].concat());
    let words = String::from_utf8_lossy(&run.stderr).into_owned() + &String::from_utf8_lossy(&run.stdout);
    assert!(!run.status.success() && words.contains("asked to panic"), "{words}");
    assert!(words.contains("server kafka"), "it panicked before the servers ran: {words}");
    place.assert_nothing_left();
}
