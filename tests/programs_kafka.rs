//! The example programs on Kafka, as on Redis in `programs.rs`.

#![cfg(all(feature = "kafka", unix))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test's panic is its report")]

#[path = "programs/checks.rs"]
mod checks;
#[path = "programs/program.rs"]
mod program;

use anymq::prelude::*;
use mq_testbed::{Kind, Server, private};
use std::collections::HashMap;
use std::time::Duration;

fn kafka() -> Option<Server> {
    private(Server::start(Kind::Kafka))
}

#[test]
fn two_equal_workers_share_the_tasks() {
    let Some(server) = kafka() else { return };
    // Each has half of the partitions, over which messages without a key are spread; but one that has just come gets its half when
    // the group has agreed, in some seconds, so there is more to do than the other alone can in that time.
    checks::two_workers_share_the_tasks(&server, 10_000, 100);
}

#[test]
fn one_worker_is_killed_and_the_other_handles_the_rest() {
    let Some(server) = kafka() else { return };
    checks::one_worker_is_killed(&server, |handled| beyond_the_last_commit(&server, handled));
}

/// How many of these tasks the group had not committed as done when this is called. The worker does not wait for the answers to
/// its acknowledgements, so commits are made once a second: what it handled after the last one may come again, and no more.
fn beyond_the_last_commit(server: &Server, handled: &[String]) -> usize {
    let committed = mq_testbed::kafka_committed(server.port(), "tasks..workers").unwrap();
    let url = server.url();
    let places: HashMap<String, (u32, u64)> = tokio::runtime::Runtime::new().unwrap().block_on(async {
        let broker = anymq::connect(&url).await.unwrap();
        let mut all = broker.subscribe(Subscription::group("tasks", "where")).await.unwrap();
        let mut places = HashMap::new();
        while places.len() < checks::TASKS {
            let task = tokio::time::timeout(Duration::from_secs(60), all.recv()).await.unwrap().unwrap().unwrap();
            let place = (task.partition().unwrap(), task.position().major);
            places.insert(task.id.to_string(), place);
            drop(task.ack());
        }
        broker.close(Duration::from_secs(5)).await;
        places
    });
    let is_beyond = |id: &&String| {
        let (partition, offset) = places[*id];
        let done = committed.get(&("tasks".to_owned(), partition as i32)).copied().unwrap_or(0);
        offset as i64 >= done
    };
    handled.iter().filter(is_beyond).count()
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
