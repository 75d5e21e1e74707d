//! Nothing that a step started outlives xtask, also not when xtask is killed.
//!
//! Each step runs in a process group of its own. A guard, this program once more in a session of its own, is told of
//! each group through a pipe; when the pipe closes, for whatever reason, it ends the groups that are still there.

use std::collections::BTreeSet;
use std::io::{BufRead, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use mq_testbed::Knock;

use crate::Outcome;

/// Arguments of the hidden `cargo xtask guard`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// The guard itself: reads `+GROUP` and `-GROUP`, and at the end kills what is left.
pub(crate) fn run(_: Args) -> Outcome {
    let mut groups = BTreeSet::new();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match line.split_at_checked(1) {
            Some(("+", group)) => groups.insert(group.to_owned()),
            Some(("-", group)) => groups.remove(group),
            _ => false,
        };
    }
    for group in groups.iter().filter_map(|group| group.parse().ok()) {
        mq_testbed::send_to_group(group, Knock::Kill);
    }
    // The servers ended with their parents; this removes their folders.
    mq_testbed::sweep();
    Ok(())
}

static PIPE: Mutex<Option<ChildStdin>> = Mutex::new(None);

fn tell(sign: char, group: u32) {
    let mut pipe = PIPE.lock().unwrap_or_else(PoisonError::into_inner);
    if pipe.is_none() {
        // setsid: Ctrl-C is for us, and the guard has to see us end.
        let guard = Command::new("setsid").arg(crate::this_program()).arg("guard").stdin(Stdio::piped()).spawn();
        *pipe = guard.ok().and_then(|mut guard| guard.stdin.take());
    }
    if let Some(pipe) = pipe.as_mut() {
        // A guard that is gone cannot be told; the step is still worth running.
        let _ = writeln!(pipe, "{sign}{group}");
    }
}

/// A process group under guard; ended when dropped.
pub(crate) struct Guarded(u32);

impl Guarded {
    /// Puts the group that this process leads under guard.
    pub(crate) fn new(leader: u32) -> Self {
        tell('+', leader);
        Self(leader)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        mq_testbed::send_to_group(self.0, Knock::Kill);
        tell('-', self.0);
    }
}
