//! Which of our servers run, read from `/proc`: the truth, whatever the state files say.
//!
//! A server of ours is a process with the name of a server program whose working folder lies under one of our roots.
//! That mark cannot be lost: Redis overwrites its environment and PostgreSQL's children theirs, but all of them keep
//! the working folder they were started in.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::folders;

/// Names of the processes that the servers consist of, as `/proc/PID/comm` spells them.
const PROGRAMS: [&str; 11] = [
    "redis-server",
    "redis-sentinel",
    "valkey-server",
    "beam.smp",
    "epmd",
    "erl_child_setup",
    "inet_gethost",
    "java",
    "postgres",
    "rabbitmq-server",
    // How a program of another release is started, by its own loader.
    "ld-linux-x86-64",
];

/// A running process of one of our servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    /// The process id.
    pub pid: i32,
    /// The program's name.
    pub program: String,
    /// Its working folder: the server's own folder, or one within it.
    pub folder: PathBuf,
    /// The TCP ports it listens on.
    pub ports: Vec<u16>,
}

/// All processes of servers started by this checkout, by whichever command or test.
#[must_use]
pub fn running() -> Vec<Running> {
    let roots = folders::roots();
    let listening = listening_sockets();
    let mut found: Vec<Running> = pids()
        .filter_map(|pid| {
            let program = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim().to_owned();
            if !PROGRAMS.contains(&program.as_str()) || !is_alive(pid) {
                return None;
            }
            let folder = fs::read_link(format!("/proc/{pid}/cwd")).ok()?;
            if !roots.iter().any(|root| folder.starts_with(root)) {
                return None;
            }
            Some(Running { pid, program, folder, ports: ports_of(pid, &listening) })
        })
        .collect();
    found.sort_by_key(|process| process.pid);
    found
}

/// A process id together with its start time, so that a number used again is not taken for the same process.
#[must_use]
pub fn identity(pid: i32) -> Option<String> {
    let fields = stat(pid)?;
    // Field 22 of the line is the start time; `stat` begins with field 3.
    Some(format!("{pid}@{}", fields.get(19)?))
}

/// Whether the process of that [`identity`] is still there.
#[must_use]
pub fn is_same(known: &str) -> bool {
    let pid = known.split('@').next().and_then(|pid| pid.parse().ok());
    pid.is_some_and(|pid| is_alive(pid) && identity(pid).as_deref() == Some(known))
}

/// Whether a process is there and not a zombie: an orphan killed here can stay a zombie under process 1 for a while,
/// and signal 0 calls that alive.
pub(crate) fn is_alive(pid: i32) -> bool {
    stat(pid).is_some_and(|fields| !matches!(fields.first().map(String::as_str), Some("Z" | "X") | None))
}

/// Whether every thread of a process stands still after SIGSTOP, or the process is gone. The signal is on its way
/// for a moment: until then a thread that is at work goes on, and answers.
pub(crate) fn stands_still(pid: i32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.map(|thread| thread.path().join("stat")).all(|thread| {
        let line = fs::read_to_string(thread).unwrap_or_default();
        let state = line.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        // Running, asleep or waiting for a disk; else stopped, ended, or gone.
        !matches!(state, Some('R' | 'S' | 'D'))
    })
}

/// Ids of the direct children.
pub(crate) fn children(parent: i32) -> Vec<i32> {
    let parent = parent.to_string();
    pids().filter(|pid| stat(*pid).is_some_and(|fields| fields.get(1) == Some(&parent))).collect()
}

/// Processes whose working folder is this one or below it.
pub(crate) fn inside(folder: &Path) -> Vec<i32> {
    running().into_iter().filter(|process| process.folder.starts_with(folder)).map(|process| process.pid).collect()
}

fn pids() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The fields of `/proc/PID/stat` from the third (state) on; the second may hold spaces, so count from its bracket.
fn stat(pid: i32) -> Option<Vec<String>> {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = line.rsplit_once(") ")?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

/// Socket inode to port, for every listening TCP socket of this network namespace.
fn listening_sockets() -> HashMap<String, u16> {
    let mut sockets = HashMap::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        for line in fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // 0A is LISTEN.
            if let [_, local, _, "0A", ..] = fields[..]
                && let Some(port) = local.rsplit(':').next().and_then(|hex| u16::from_str_radix(hex, 16).ok())
                && let Some(inode) = fields.get(9)
            {
                sockets.insert((*inode).to_owned(), port);
            }
        }
    }
    sockets
}

fn ports_of(pid: i32, listening: &HashMap<String, u16>) -> Vec<u16> {
    let mut ports = HashSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
        if let Ok(target) = fs::read_link(entry.path())
            && let Some(inode) = target.to_str().and_then(|name| name.strip_prefix("socket:[")?.strip_suffix(']'))
            && let Some(port) = listening.get(inode)
        {
            ports.insert(*port);
        }
    }
    let mut ports: Vec<u16> = ports.into_iter().collect();
    ports.sort_unstable();
    ports
}
