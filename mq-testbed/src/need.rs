//! What a test asks for when it needs a server.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use crate::{Kind, Result, Server, shortage};

/// The URL of a server of that kind, shared by all tests of this process; use names of your own on it.
///
/// The one that `MQ_TEST_*_URL` names, else one started now, which ends with this process. `None` when it is not to be
/// had: return then, for the test is noted as skipped, under its name.
#[must_use]
pub fn need(kind: Kind) -> Option<String> {
    static SHARED: Mutex<BTreeMap<Kind, Result<Server>>> = Mutex::new(BTreeMap::new());
    if let Ok(url) = std::env::var(kind.variable())
        && !url.is_empty()
    {
        return Some(url);
    }
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let server = shared.entry(kind).or_insert_with(|| Server::start(kind));
    match server {
        Ok(server) => Some(server.url()),
        Err(problem) => {
            skip(&problem.to_string());
            None
        }
    }
}

/// What was started for this test alone, which may hurt it. `None` when it is not to be had: return then, for the test is noted
/// as skipped, under its name.
#[must_use]
pub fn private<S>(started: Result<S>) -> Option<S> {
    started.inspect_err(|problem| skip(&problem.to_string())).ok()
}

/// Whether this machine lacks what servers of that kind need: return then, for the running test is noted as skipped.
#[must_use]
pub fn missing(kind: Kind) -> bool {
    shortage(kind).inspect(|problem| skip(&problem.to_string())).is_some()
}

/// Notes that the running test is skipped, where `cargo xtask test` finds it.
///
/// # Panics
/// In continuous integration (`CI` is set), where nothing may be skipped.
pub fn skip(reason: &str) {
    // libtest names each test's thread after the test.
    let thread = std::thread::current();
    let line = format!("{}: {reason}", thread.name().unwrap_or("a test")).replace('\n', " ");
    eprintln!("skipped {line}");
    if let Some(file) = std::env::var_os("MQ_TEST_SKIPS")
        && let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(file)
    {
        // A note that cannot be written is still on the test's output.
        let _ = writeln!(file, "{line}");
    }
    assert!(!in_ci(), "skipped in continuous integration: {line}");
}

/// Whether this is a run of continuous integration, as its systems say by `CI`.
#[must_use]
pub fn in_ci() -> bool {
    std::env::var_os("CI").is_some()
}
