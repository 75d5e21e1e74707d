//! No public future is forgotten: every one that the sources declare is dropped by an operation, or stands here with the
//! reason why not.

use crate::operations::OPERATIONS;
use std::collections::BTreeSet;
use std::path::Path;

/// `file: method`, and why no operation drops it here.
const ELSEWHERE: &[(&str, &str)] = &[
    ("delivery.rs: ack", "Ticket's, under that of Delivery and Deliveries"),
    ("mq-core/consumer.rs: start", "open_consumer behind the seam"),
    ("mq-core/producer.rs: start", "open_producer behind the seam"),
    ("mq-core/env.rs: no_tasks", "waits for the end of tasks only; the closes are above it"),
    ("mq-core/env.rs: shut_down", "as no_tasks"),
    ("mq-core/outbox.rs: send", "Producer::send behind the seam, and model/outbox.rs"),
    ("mq-core/outbox.rs: take", "a driver's; poll_take takes nothing unless it is ready (model/outbox.rs)"),
    ("mq-core/settles.rs: take", "a driver's; poll_take takes nothing unless it is ready (model/settles.rs)"),
    ("mq-core/settles.rs: flushed", "waits only"),
    ("mq-core/deadline.rs: within", "waits only; a part of close"),
    ("mq-core/deadline.rs: ask", "Consumer::close, whose work goes on by itself"),
    ("mq-core/roster.rs: close", "Broker::close behind the seam; dropped at each await in its own tests"),
    ("mq-core/roster.rs: consumer", "open_consumer behind the seam"),
    ("mq-core/roster.rs: producer", "open_producer behind the seam"),
    ("mq-core/redrive.rs: redrive", "Admin::redrive"),
    ("mq-core/redrive.rs: discard", "Admin::discard_dead_letters"),
];

/// Futures of the programs' side that types carry: methods that return one.
const RETURNED: [&str; 8] = [
    "-> Sending",
    "-> SendingBatch",
    "-> Settling",
    "-> Lost",
    "-> Recv",
    "-> RecvBatch",
    "BoxFuture<",
    "-> impl Future<",
];

fn declared(line: &str, only_pub: bool) -> Option<String> {
    let line = line.trim_start();
    let is_fn = line.starts_with("pub async fn ") || (!only_pub && line.starts_with("async fn "));
    let returns = (line.starts_with("fn ") && !only_pub || line.starts_with("pub fn "))
        && RETURNED.iter().any(|r| line.contains(r))
        // Constructors of those futures, for backends.
        && !line.contains("(table: ");
    if !is_fn && !returns {
        return None;
    }
    let name = line.split("fn ").nth(1)?;
    Some(name.split(['(', '<']).next()?.to_owned())
}

#[test]
fn every_public_future_is_dropped_by_an_operation() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let covered: BTreeSet<&str> = OPERATIONS.iter().map(|o| o.name.rsplit("::").next().unwrap_or(o.name)).collect();
    let mut missing = BTreeSet::new();
    let mut found = BTreeSet::new();
    for (krate, only_pub) in [("mq-api", false), ("mq-core", true), ("mq-memory", true)] {
        for file in std::fs::read_dir(here.join("..").join(krate).join("src")).unwrap() {
            let path = file.unwrap().path();
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            let file = path.file_name().unwrap().to_string_lossy().into_owned();
            let source = text.split("#[cfg(test)]").next().unwrap_or_default();
            for name in source.lines().filter_map(|line| declared(line, only_pub)) {
                let at = if krate == "mq-api" { format!("{file}: {name}") } else { format!("{krate}/{file}: {name}") };
                found.insert(at.clone());
                let elsewhere = ELSEWHERE.iter().any(|(known, _)| *known == at);
                let dropped = covered.contains(name.as_str()) && (krate != "mq-core");
                if !elsewhere && !dropped {
                    missing.insert(at);
                }
            }
        }
    }
    assert!(found.len() > 40, "the sources are read: {found:?}");
    assert!(missing.is_empty(), "no operation drops these: {missing:?}");
    let stale: Vec<_> = ELSEWHERE.iter().filter(|(known, _)| !found.contains(*known)).collect();
    assert!(stale.is_empty(), "these are gone: {stale:?}");
}
