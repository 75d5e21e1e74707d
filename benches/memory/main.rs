//! Scenarios of the in-memory benchmark, through the handles that `anymq::connect` gives. `cargo xtask bench memory` runs them
//! under callgrind with N and 2N messages; the difference is what a message costs in steady state.
//!
//!     memory SCENARIO N     runs one, prints `allocs/msg X`
//!     memory --list         names them

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench's panic is its report")]

mod allocations;
mod members;
mod plain;
mod worker;

use bytes::Bytes;

/// Messages before the counting begins: a partition keeps 100,000 handled ones for replays, so from here on each new one takes
/// the place of an old one, and all buffers have their size.
const WARM: usize = 64 * 1720;

static PAYLOAD: [u8; 256] = [7; 256];
/// Three fields, as a small event has.
static JSON: &[u8] = br#"{"id":12345,"qty":3,"price":19.5}"#;

#[derive(serde::Serialize, serde::Deserialize)]
struct Order {
    id: u64,
    qty: u32,
    price: f64,
}

impl Order {
    const EXAMPLE: Self = Self { id: 12345, qty: 3, price: 19.5 };
}

fn message() -> anymq::Message {
    anymq::Message::new(Bytes::from_static(&PAYLOAD))
}

const SCENARIOS: &[&str] = &[
    "batch64",
    "single",
    "two-tasks-batch64",
    "two-tasks-single",
    "queued-1000",
    "queued-1000000",
    "topics-1",
    "topics-1000",
    "worker-empty",
    "worker-empty-16",
    "worker-state",
    "worker-layers-1",
    "worker-layers-4",
    "worker-yields",
    "worker-json",
    "json-batch64",
    "json-bare",
];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let (scenario, n) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--list"] => return SCENARIOS.iter().for_each(|name| println!("{name}")),
        ["members", count, seconds] => return members::run(count.parse().unwrap(), seconds.parse().unwrap()),
        [scenario, n] => (scenario.to_owned(), n.parse::<usize>().unwrap()),
        // `cargo bench` and `cargo test --benches` call without arguments: one quick pass over everything.
        _ => return SCENARIOS.iter().for_each(|name| run(name, 1280)),
    };
    run(&scenario, n);
}

fn run(scenario: &str, n: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let allocated = runtime.block_on(async {
        match scenario {
            "batch64" => plain::batches(n, 0).await,
            "single" => plain::single(n).await,
            "two-tasks-batch64" => plain::two_tasks(n, true).await,
            "two-tasks-single" => plain::two_tasks(n, false).await,
            "queued-1000" => plain::batches(n, 1000).await,
            "queued-1000000" => plain::batches(n, 1_000_000).await,
            "topics-1" => plain::topics(n, 1).await,
            "topics-1000" => plain::topics(n, 1000).await,
            "json-batch64" => plain::json_batches(n).await,
            "json-bare" => worker::json_bare(n),
            other => worker::run(other, n).await,
        }
    });
    println!("{scenario} allocs/msg {:.5}", allocated as f64 / n as f64);
}
