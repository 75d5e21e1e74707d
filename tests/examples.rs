//! The examples run and end as they say. `cargo test` has built them beside this test.

#![cfg(feature = "memory")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's panic is its report")]

use std::path::PathBuf;
use std::process::{Command, Output};

fn run(example: &str, args: &[&str]) -> Output {
    let folder = std::env::current_exe().unwrap();
    let path: PathBuf = folder.parent().unwrap().parent().unwrap().join("examples").join(example);
    assert!(path.exists(), "{} is not built; run `cargo test -p anymq` or `cargo build --examples`", path.display());
    Command::new(path).args(args).env("MQ_URL", "memory://").output().unwrap()
}

fn last_line(output: &Output) -> serde_json::Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {text}\n{}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn the_quickstart_adds_up() {
    let output = run("quickstart", &[]);
    let line = last_line(&output);
    assert!(output.status.success() && line["balanced"] == true, "{line}");
    assert_eq!(line["billing"]["dead_letters"]["crash"], 1, "{line}");
}

#[test]
fn the_quickstart_notices_each_sabotage() {
    for sabotage in ["ack-early", "drop", "double"] {
        let output = run("quickstart", &["--sabotage", sabotage]);
        let line = last_line(&output);
        assert_eq!((output.status.code(), &line["balanced"]), (Some(1), &false.into()), "{sabotage}: {line}");
    }
}

#[test]
fn replay_rebuilds_the_balances() {
    let output = run("replay", &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_tests_of_the_testing_example_pass() {
    let output = run("testing", &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("test 3 passed"), "{text}");
}

#[test]
fn a_wrong_flag_is_named() {
    let output = run("quickstart", &["--sabotage", "gently"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("gently"));
}

/// From URL to handler in at most 15 lines, as the README promises to show. That it compiles is a doc test of its own.
#[test]
fn the_readme_goes_from_url_to_handler_in_15_lines() {
    let readme = include_str!("../README.md");
    let first = readme.split("```rust,no_run\n").nth(1).unwrap().split("```").next().unwrap();
    assert!(first.contains("anymq::connect(") && first.contains(".route("));
    assert!(first.lines().count() <= 15, "{} lines", first.lines().count());
}
