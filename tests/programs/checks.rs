//! What is asked of the example programs on any broker that other programs can reach.

use crate::program::{Program, wait};
use mq_testbed::{Knock, Server};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(crate) const TASKS: usize = 1000;
/// Debug builds on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

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

fn publish(url: &str, tasks: usize) {
    let publisher = Program::start("publisher", &[&tasks.to_string()], url);
    assert!(publisher.ends(PATIENCE).success(), "{:?}", publisher.lines());
    assert_eq!(publisher.lines(), [format!("{tasks} of {tasks} tasks are with the broker")]);
}

/// Each of two workers handles at least `least` of the tasks, and none is handled twice.
pub(crate) fn two_workers_share_the_tasks(server: &Server, tasks: usize, least: usize) {
    let [anna, ben] = workers(&server.url());
    publish(&server.url(), tasks);
    wait(PATIENCE, "all tasks", || counts(&[&anna, &ben]).len() == tasks);
    for worker in [&anna, &ben] {
        worker.knock(Knock::Interrupt);
        assert!(worker.ends(PATIENCE).success());
        let n = handled(worker).len();
        assert!(n >= least, "{n} of {tasks}");
        assert!(
            worker.lines().last().unwrap().ends_with(&format!("ended: {n} handled")),
            "{:?}",
            worker.lines().last()
        );
    }
    let counts = counts(&[&anna, &ben]);
    assert!(counts.values().all(|n| *n == 1), "{counts:?}");
}

/// One of two workers is killed, and the other handles the rest, at most `again` of them a second time: asked when it is dead,
/// of all that it handled.
pub(crate) fn one_worker_is_killed(server: &Server, again: impl FnOnce(&[String]) -> usize) {
    let [anna, ben] = workers(&server.url());
    publish(&server.url(), TASKS);
    wait(PATIENCE, "a part of the tasks", || handled(&anna).len() >= 100);
    anna.knock(Knock::Kill);
    let _ = anna.ends(PATIENCE);
    let again = again(&handled(&anna));
    wait(PATIENCE, "all tasks", || counts(&[&anna, &ben]).len() == TASKS);
    ben.knock(Knock::Interrupt);
    assert!(ben.ends(PATIENCE).success());
    assert!(handled(&anna).len() < TASKS, "it was killed too late to prove anything");
    let counts = counts(&[&anna, &ben]);
    let twice = counts.values().map(|n| n - 1).sum::<usize>();
    eprintln!("{twice} more than once, where {again} may be");
    assert!(twice <= again);
    let ids: BTreeSet<_> = (1..=TASKS).map(|n| format!("task-{n}")).collect();
    assert!(counts.into_keys().collect::<BTreeSet<_>>() == ids);
}

/// Three subscribers print the same 20 ids; in order, unless the topic has several partitions.
pub(crate) fn three_subscribers(url: &str, partitioned: bool) {
    let subscribers = [0, 1, 2].map(|_| Program::start("status_subscriber", &[], url));
    subscribers.iter().for_each(|s| s.has("listening", PATIENCE));
    let publisher = Program::start("status_publisher", &["--every", "20", "--count", "20"], url);
    assert!(publisher.ends(PATIENCE).success(), "{:?}", publisher.lines());
    let expected: Vec<String> = (1..=20).map(|n| format!("status-{n}")).collect();
    for subscriber in &subscribers {
        let ids = || -> Vec<String> {
            let id = |l: &String| Some(l.strip_prefix("received ")?.split(' ').next()?.to_owned());
            subscriber.lines().iter().filter_map(id).collect()
        };
        wait(PATIENCE, "20 ids", || ids().len() >= 20);
        let mut ids = ids();
        if partitioned {
            ids.sort_by_key(|id| (id.len(), id.clone()));
        }
        assert_eq!(ids, expected, "{url}");
        subscriber.knock(Knock::Interrupt);
        assert!(subscriber.ends(PATIENCE).success());
    }
}

/// The quickstart ends within this on a busy machine too.
const LIMIT: Duration = Duration::from_secs(180);

fn balanced(quickstart: &Program) {
    let status = quickstart.ends(LIMIT);
    let lines = quickstart.lines();
    let last: serde_json::Value = serde_json::from_str(lines.last().unwrap()).unwrap_or_default();
    assert!(status.success() && last["balanced"] == true, "{lines:#?}");
    assert_eq!(last["sent"], 10_000);
}

/// The quickstart, and one of its four processes is killed.
pub(crate) fn quickstart_with_a_killed_member(server: &Server) {
    balanced(&Program::start("quickstart", &["--processes", "4", "--kill9", "1"], &server.url()));
}

/// The same, and the server is killed midway and comes back.
pub(crate) fn quickstart_with_a_killed_server(mut server: Server) {
    // The command asks this test to restart the server, and waits until it did.
    let flag = server.folder().join("restart-me");
    let command = format!("touch '{0}'; while [ -e '{0}' ]; do sleep 0.05; done", flag.display());
    let quickstart =
        Program::start("quickstart", &["--processes", "4", "--kill9", "1", "--restart", &command], &server.url());
    wait(PATIENCE, "the middle of the run", || flag.exists());
    server.kill().unwrap();
    server.restart().unwrap();
    std::fs::remove_file(&flag).unwrap();
    balanced(&quickstart);
}
