//! However a process ends that started servers, none of them is left.

// A test may unwrap: its panic is the report.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mq_testbed::{Kind, Knock, eventually, root, running, send, shortage, skip, sweep};

struct Holder {
    child: Child,
    runs: PathBuf,
}

impl Holder {
    fn start() -> Option<Self> {
        if let Some(problem) = Kind::ALL.into_iter().find_map(shortage) {
            skip(&problem.to_string());
            return None;
        }
        // Which server is missing, and why, is for whoever reads the failure.
        let holder = Self::of(&["redis", "rabbitmq", "kafka", "postgres"], Stdio::inherit());
        assert!(holder.left() >= 5, "four servers are at least five processes");
        Some(holder)
    }

    fn of(servers: &[&str], errors: Stdio) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_hold-servers"))
            .args(servers)
            // Its own servers, also where the tests were given some.
            .env_remove("MQ_TEST_REDIS_URL")
            .env_remove("MQ_TEST_AMQP_URL")
            .env_remove("MQ_TEST_KAFKA_URL")
            .env_remove("MQ_TEST_POSTGRES_URL")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .unwrap();
        let mut told = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut told).unwrap();
        assert_eq!(told, format!("{} up\n", servers.len()));
        let runs = root().join("runs").join(format!("{}-0", child.id()));
        Self { child, runs }
    }

    fn left(&self) -> usize {
        running().iter().filter(|process| process.folder.starts_with(&self.runs)).count()
    }

    /// Nothing runs within seconds, without anyone cleaning up; the next call takes the folder away.
    fn all_gone(mut self) {
        self.child.wait().unwrap();
        // A PostgreSQL child notices the end of its postmaster only when it next looks.
        assert!(eventually(Duration::from_secs(15), || self.left() == 0), "left: {:?}", running());
        sweep();
        assert!(!self.runs.exists());
    }

    fn send(&self, knock: Knock) {
        send(self.child.id(), knock);
    }
}

#[test]
fn after_kill_9() {
    if let Some(holder) = Holder::start() {
        holder.send(Knock::Kill);
        holder.all_gone();
    }
}

#[test]
fn after_ctrl_c() {
    if let Some(holder) = Holder::start() {
        holder.send(Knock::Interrupt);
        holder.all_gone();
    }
}

#[test]
fn after_a_panic() {
    if let Some(mut holder) = Holder::start() {
        holder.child.stdin.take().unwrap().write_all(b"!").unwrap();
        holder.all_gone();
    }
}

#[test]
fn after_a_normal_end() {
    if let Some(mut holder) = Holder::start() {
        drop(holder.child.stdin.take());
        holder.all_gone();
    }
}

#[test]
fn a_server_that_ends_by_itself_ends_what_waits_for_it() {
    if let Some(problem) = shortage(Kind::Redis) {
        skip(&problem.to_string());
        return;
    }
    let Holder { mut child, runs } = Holder::of(&["redis"], Stdio::piped());
    let server = running().into_iter().find(|process| process.folder.starts_with(&runs)).unwrap();
    send(u32::try_from(server.pid).unwrap(), Knock::Kill);
    assert!(eventually(Duration::from_secs(15), || child.try_wait().unwrap().is_some()), "it waits for a dead server");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(70));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains(&format!("(process {}) ended though nobody ended it here", server.pid)), "{said}");
}
