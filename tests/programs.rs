//! The example programs, each in processes of its own, on a real server: what people do when they try a broker in several
//! terminals. `cargo test` has built the examples beside this test. Without the server the tests say so, and count as skipped.

#![cfg(all(feature = "redis", unix))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test's panic is its report")]

#[path = "programs/program.rs"]
mod program;

use mq_testbed::{Knock, RedisOptions, Server};
use program::Program;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const TASKS: usize = 1000;
/// `max_in_flight` of the worker: what one that is killed held may be handled twice.
const HELD: usize = 16;
/// Debug builds on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn redis() -> Option<Server> {
    match (RedisOptions { durable: true, ..RedisOptions::default() }).start() {
        Ok(server) => Some(server),
        Err(problem) => {
            mq_testbed::skip(&problem.to_string());
            None
        }
    }
}

/// Every task that a worker says it handled, in order.
fn handled(worker: &Program) -> Vec<String> {
    let id = |line: &String| Some(line.split_once(" handled ")?.1.split(' ').next()?.to_owned());
    worker.lines().iter().filter_map(id).collect()
}

fn counts(workers: &[&Program]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for id in workers.iter().flat_map(|w| handled(w)) {
        *counts.entry(id).or_default() += 1;
    }
    counts
}

fn workers(url: &str) -> [Program; 2] {
    ["anna", "ben"].map(|name| {
        let worker = Program::start("worker", &["--name", name, "--group", "workers"], url);
        worker.has(&format!("{name} is ready"), PATIENCE);
        worker
    })
}

fn publish(url: &str) {
    let publisher = Program::start("publisher", &[&TASKS.to_string()], url);
    assert!(publisher.ends(PATIENCE).success(), "{:?}", publisher.lines());
    assert_eq!(publisher.lines(), [format!("{TASKS} of {TASKS} tasks are with the broker")]);
}

#[test]
fn two_equal_workers_share_the_tasks() {
    let Some(server) = redis() else { return };
    let [anna, ben] = workers(&server.url());
    publish(&server.url());
    program::wait(PATIENCE, "all tasks", || counts(&[&anna, &ben]).len() == TASKS);
    for worker in [&anna, &ben] {
        worker.knock(Knock::Interrupt);
        assert!(worker.ends(PATIENCE).success());
        let n = handled(worker).len();
        assert!(n >= 300, "{n} of {TASKS}");
        assert!(
            worker.lines().last().unwrap().ends_with(&format!("ended: {n} handled")),
            "{:?}",
            worker.lines().last()
        );
    }
    let counts = counts(&[&anna, &ben]);
    assert!(counts.values().all(|n| *n == 1), "{counts:?}");
}

#[test]
fn one_worker_is_killed_and_the_other_handles_the_rest() {
    let Some(server) = redis() else { return };
    let [anna, ben] = workers(&server.url());
    publish(&server.url());
    program::wait(PATIENCE, "a part of the tasks", || handled(&anna).len() >= 100);
    anna.knock(Knock::Kill);
    let _ = anna.ends(PATIENCE);
    program::wait(PATIENCE, "all tasks", || counts(&[&anna, &ben]).len() == TASKS);
    ben.knock(Knock::Interrupt);
    assert!(ben.ends(PATIENCE).success());
    assert!(handled(&anna).len() < TASKS, "it was killed too late to prove anything");
    let counts = counts(&[&anna, &ben]);
    let twice = counts.values().map(|n| n - 1).sum::<usize>();
    assert!(twice <= HELD, "{twice} more than once");
    let ids: BTreeSet<_> = (1..=TASKS).map(|n| format!("task-{n}")).collect();
    assert!(counts.into_keys().collect::<BTreeSet<_>>() == ids);
}

#[test]
fn three_subscribers_print_the_same_20_ids() {
    let Some(server) = redis() else { return };
    let streams = server.url();
    let pubsub = streams.replacen("redis://", "redis+pubsub://", 1);
    for url in [streams, pubsub] {
        let subscribers = [0, 1, 2].map(|_| Program::start("status_subscriber", &[], &url));
        subscribers.iter().for_each(|s| s.has("listening", PATIENCE));
        let publisher = Program::start("status_publisher", &["--every", "20", "--count", "20"], &url);
        assert!(publisher.ends(PATIENCE).success(), "{:?}", publisher.lines());
        let expected: Vec<String> = (1..=20).map(|n| format!("status-{n}")).collect();
        for subscriber in &subscribers {
            let ids = || -> Vec<String> {
                let id = |l: &String| Some(l.strip_prefix("received ")?.split(' ').next()?.to_owned());
                subscriber.lines().iter().filter_map(id).collect()
            };
            program::wait(PATIENCE, "20 ids", || ids().len() >= 20);
            assert_eq!(ids(), expected, "{url}");
            subscriber.knock(Knock::Interrupt);
            assert!(subscriber.ends(PATIENCE).success());
        }
    }
}

fn balanced(quickstart: &Program) {
    let status = quickstart.ends(Duration::from_secs(240));
    let lines = quickstart.lines();
    let last: serde_json::Value = serde_json::from_str(lines.last().unwrap()).unwrap_or_default();
    assert!(status.success() && last["balanced"] == true, "{lines:#?}");
    assert_eq!(last["sent"], 10_000);
}

#[test]
fn the_quickstart_survives_a_killed_member() {
    let Some(server) = redis() else { return };
    balanced(&Program::start("quickstart", &["--processes", "4", "--kill9", "1"], &server.url()));
}

#[test]
fn the_quickstart_survives_a_killed_server() {
    let Some(mut server) = redis() else { return };
    // The command asks this test to restart the server, and waits until it did.
    let flag = server.folder().join("restart-me");
    let command = format!("touch '{0}'; while [ -e '{0}' ]; do sleep 0.05; done", flag.display());
    let quickstart =
        Program::start("quickstart", &["--processes", "4", "--kill9", "1", "--restart", &command], &server.url());
    program::wait(PATIENCE, "the middle of the run", || flag.exists());
    server.kill().unwrap();
    server.restart().unwrap();
    std::fs::remove_file(&flag).unwrap();
    balanced(&quickstart);
}
