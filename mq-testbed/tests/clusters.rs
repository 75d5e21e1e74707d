//! Three nodes of each come together, and live on without one of them. Long: `cargo xtask test --full` runs them.

// A test may unwrap: its panic is the report.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use mq_testbed::{Cluster, Formation, missing};

fn lives_on(formation: Formation) {
    if missing(formation.kind()) {
        return;
    }
    let mut cluster = Cluster::start(formation).unwrap();
    assert!(cluster.nodes().iter().all(mq_testbed::Server::answers), "{}", cluster.url());
    let first = &mut cluster.nodes()[0];
    let killed = first.kill().unwrap();
    let [_, others @ ..] = cluster.nodes() else { return };
    let answer = || others.iter().all(mq_testbed::Server::answers);
    assert!(mq_testbed::eventually(Duration::from_secs(20), answer), "the others do not answer");
    let back = cluster.nodes()[0].restart().unwrap();
    assert_ne!(back.pid, killed.pid);
    let well = || cluster.nodes().iter().all(mq_testbed::Server::answers);
    assert!(mq_testbed::eventually(Duration::from_secs(30), well), "not all answer again");
}

#[test]
#[ignore = "long"]
fn redis_with_sentinel() {
    lives_on(Formation::RedisSentinel);
}

#[test]
#[ignore = "long"]
fn redis_cluster() {
    lives_on(Formation::RedisCluster);
}

#[test]
#[ignore = "long"]
fn rabbitmq() {
    lives_on(Formation::RabbitMq);
}

#[test]
#[ignore = "long"]
fn kafka() {
    lives_on(Formation::Kafka);
}
