//! The example programs on Kafka, as on Redis in `programs.rs`.

#![cfg(all(feature = "kafka", unix))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test's panic is its report")]

#[path = "programs/checks.rs"]
mod checks;
#[path = "programs/program.rs"]
mod program;

use mq_testbed::{Kind, Server, private};

fn kafka() -> Option<Server> {
    private(Server::start(Kind::Kafka))
}

#[test]
fn two_equal_workers_share_the_tasks() {
    let Some(server) = kafka() else { return };
    // Each has half of the partitions; messages without a key are spread over them in batches.
    checks::two_workers_share_the_tasks(&server, 100);
}

#[test]
fn one_worker_is_killed_and_the_other_handles_the_rest() {
    let Some(server) = kafka() else { return };
    // Beside what it held, what it had acknowledged in the last second without waiting for an answer: commits are made once
    // a second then.
    checks::one_worker_is_killed(&server, checks::HELD + 400);
}

#[test]
fn three_subscribers_print_the_same_20_ids() {
    let Some(server) = kafka() else { return };
    checks::three_subscribers(&server.url(), true);
}

#[test]
fn the_quickstart_survives_a_killed_member() {
    let Some(server) = kafka() else { return };
    checks::quickstart_with_a_killed_member(&server);
}

#[test]
fn the_quickstart_survives_a_killed_server() {
    let Some(server) = kafka() else { return };
    checks::quickstart_with_a_killed_server(server);
}
