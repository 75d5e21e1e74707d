//! The examples on RabbitMQ, as processes of their own: one of the members is killed, and the server too.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may: its panic is the report.

mod control;

use control::Rabbit;
use mq_testbed::{Folder, RabbitOptions, eventually};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// The program of an example: `cargo test --workspace` has built it beside this test; else it is built now.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().parent().unwrap().join("examples").join(name);
    if !path.exists() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "-p", "anymq", "--features", "amqp", "--example", name]).current_dir(root);
        assert!(build.status().unwrap().success(), "the example {name} is not built");
    }
    path
}

fn quickstart(rabbit: &Rabbit, kind: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(example("quickstart"));
    command.args(["--processes", "4", "--kill9", "1"]).args(arguments);
    command.env("MQ_URL", format!("{}?queue_type={kind}", rabbit.url()));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn balanced(output: &std::process::Output) {
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && last.contains("\"balanced\":true"), "{text}\n{errors}");
    println!("{last}");
}

#[test]
fn the_quickstart_adds_up_when_a_member_is_killed() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    for kind in ["quorum", "classic"] {
        balanced(&quickstart(&rabbit, kind, &[]).output().unwrap());
    }
}

#[test]
fn the_quickstart_adds_up_when_the_server_is_killed_too() {
    let mut rabbit = Rabbit::start(RabbitOptions::default());
    let folder = Folder::for_run().unwrap();
    let (asked, done) = (folder.path().join("asked"), folder.path().join("done"));
    // The quickstart runs this midway, and goes on when it ends.
    let restart = format!("touch {}; until [ -e {} ]; do sleep 0.05; done", asked.display(), done.display());
    let child = quickstart(&rabbit, "quorum", &["--restart", &restart]).spawn().unwrap();
    assert!(eventually(Duration::from_secs(170), || asked.exists()), "it never came to its middle");
    rabbit.kill_and_restart();
    std::fs::write(&done, "").unwrap();
    balanced(&child.wait_with_output().unwrap());
}

/// Starts an example and gives its lines as they come.
fn started(rabbit: &Rabbit, name: &str, arguments: &[&str]) -> (Child, mpsc::Receiver<String>) {
    let mut command = Command::new(example(name));
    command.args(arguments).env("MQ_URL", rabbit.url()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| tell.send(line)));
    (child, told)
}

/// The lines until one contains `word`, which is the last.
fn until(lines: &mpsc::Receiver<String>, word: &str) -> Vec<String> {
    let mut seen = Vec::new();
    loop {
        let line =
            lines.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|e| panic!("no '{word}' ({e}): {seen:?}"));
        let last = line.contains(word);
        seen.push(line);
        if last {
            return seen;
        }
    }
}

/// Ctrl-C, and a good end.
fn interrupt(mut child: Child) {
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    assert!(child.wait().unwrap().success());
}

#[test]
fn publisher_and_workers_need_only_the_url() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let workers = ["anna", "bert"].map(|name| started(&rabbit, "worker", &["--name", name]));
    for ((_, lines), name) in workers.iter().zip(["anna", "bert"]) {
        until(lines, name);
    }
    let (mut publisher, lines) = started(&rabbit, "publisher", &["300"]);
    until(&lines, "300 of 300 tasks are with the broker");
    assert!(publisher.wait().unwrap().success());
    let mut handled = BTreeSet::new();
    let both = || workers.iter().flat_map(|(_, lines)| lines.try_iter());
    let all = eventually(Duration::from_secs(60), || {
        handled.extend(both().filter_map(|line| Some(line.split_once(" handled ")?.1.to_owned())));
        handled.len() >= 300
    });
    let wanted: BTreeSet<String> = (1..=300).map(|n| format!("task-{n} attempt 1")).collect();
    assert!(all && handled == wanted, "{} handled: {handled:?}", handled.len());
    workers.into_iter().for_each(|(child, _)| interrupt(child));
}

#[test]
fn status_programs_need_only_the_url() {
    let rabbit = Rabbit::start(RabbitOptions::default());
    let subscribers = [(); 2].map(|()| started(&rabbit, "status_subscriber", &[]));
    for (_, lines) in &subscribers {
        until(lines, "listening");
    }
    let (mut publisher, lines) = started(&rabbit, "status_publisher", &["--every", "20", "--count", "10"]);
    until(&lines, "status-10");
    assert!(publisher.wait().unwrap().success());
    for (child, lines) in subscribers {
        let seen = until(&lines, "status-10 ");
        let ids: Vec<&str> = seen.iter().filter_map(|line| line.split(' ').nth(1)).collect();
        assert_eq!(ids, (1..=10).map(|n| format!("status-{n}")).collect::<Vec<_>>());
        interrupt(child);
    }
}
