//! The example programs on Redis, each in processes of its own: what people do when they try a broker in several terminals.
//! `cargo test` has built the examples beside this test. Without the server the tests say so, and count as skipped.

#![cfg(all(feature = "redis", unix))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test's panic is its report")]

#[path = "programs/checks.rs"]
mod checks;
#[path = "programs/program.rs"]
mod program;

use mq_testbed::{RedisOptions, Server, private};

/// `max_in_flight` of the worker: what one that is killed held may be handled twice.
const HELD: usize = 16;

fn redis() -> Option<Server> {
    private(RedisOptions { durable: true, ..RedisOptions::default() }.start())
}

#[test]
fn two_equal_workers_share_the_tasks() {
    let Some(server) = redis() else { return };
    checks::two_workers_share_the_tasks(&server, checks::TASKS, 300);
}

#[test]
fn one_worker_is_killed_and_the_other_handles_the_rest() {
    let Some(server) = redis() else { return };
    checks::one_worker_is_killed(&server, |_| HELD);
}

#[test]
fn three_subscribers_print_the_same_20_ids() {
    let Some(server) = redis() else { return };
    let streams = server.url();
    checks::three_subscribers(&streams, false);
    checks::three_subscribers(&streams.replacen("redis://", "redis+pubsub://", 1), false);
}

#[test]
fn the_quickstart_survives_a_killed_member() {
    let Some(server) = redis() else { return };
    checks::quickstart_with_a_killed_member(&server);
}

#[test]
fn the_quickstart_survives_a_killed_server() {
    let Some(server) = redis() else { return };
    checks::quickstart_with_a_killed_server(server);
}
