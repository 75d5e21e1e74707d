//! Other libraries doing the work of `bench-brokers run`: send `N` messages of `SIZE` bytes to a new topic, each confirmed; then
//! receive and acknowledge all of them. `cargo xtask bench redis` runs these beside ours.
//!
//! * `bench-peers-brokers list BACKEND` names the peers.
//! * `bench-peers-brokers run BACKEND PEER URL TOPIC N SIZE` prints `ran SEND_SECONDS SEND_CPU RECEIVE_SECONDS RECEIVE_CPU`.
//!
//! A peer is one file, with one function as [`Run`] asks; each is used as its documentation says is best for at least once.

#[cfg(feature = "kafka")]
mod kafka_topic;
#[cfg(feature = "kafka")]
mod mq_bridge;
#[cfg(feature = "amqp")]
mod omniqueue_amqp;
#[cfg(feature = "redis")]
mod omniqueue_redis;
#[cfg(feature = "amqp")]
mod ruststream_amqp;
#[cfg(feature = "kafka")]
mod ruststream_kafka;
#[cfg(feature = "redis")]
mod ruststream_redis;
#[cfg(any(feature = "redis", feature = "amqp", feature = "kafka"))]
mod ruststream_send;
#[cfg(feature = "redis")]
mod sea_streamer;
#[cfg(feature = "kafka")]
mod sea_streamer_kafka;
#[cfg(any(feature = "redis", feature = "kafka"))]
mod sea_streamer_send;

use std::future::Future;
use std::pin::Pin;
use std::process::ExitCode;
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

type Failed = Box<dyn std::error::Error + Send + Sync>;
type Running<'a> = Pin<Box<dyn Future<Output = Result<Ran, Failed>> + 'a>>;
/// Runs a job.
type Run = fn(&Job) -> Running<'_>;

/// As in `bench-brokers`: messages of one batch, and messages under way at a time.
const BATCH: usize = 500;
const FLYING: usize = 4 * BATCH;
const KAFKA_FLYING: usize = 10_000;

struct Job {
    url: String,
    topic: String,
    n: usize,
    payload: Vec<u8>,
}

impl Job {
    /// Messages under way at a time.
    fn flying(&self) -> usize {
        if self.url.starts_with("kafka") { KAFKA_FLYING } else { FLYING }
    }
}

/// Seconds, and seconds of the processor, of both stretches.
struct Ran {
    send: (f64, f64),
    receive: (f64, f64),
}

struct Meter(Instant, f64);

fn cpu() -> f64 {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9
}

impl Meter {
    fn start() -> Self {
        Self(Instant::now(), cpu())
    }

    fn stop(self) -> (f64, f64) {
        (self.0.elapsed().as_secs_f64(), cpu() - self.1)
    }
}

/// Peers by backend and name.
fn peers() -> Vec<(&'static str, &'static str, Run)> {
    vec![
        #[cfg(feature = "redis")]
        ("redis", "omniqueue", |job| Box::pin(omniqueue_redis::run(job))),
        #[cfg(feature = "redis")]
        ("redis", "sea-streamer", |job| Box::pin(sea_streamer::run(job))),
        #[cfg(feature = "redis")]
        ("redis", "ruststream", |job| Box::pin(ruststream_redis::run(job))),
        #[cfg(feature = "amqp")]
        ("amqp", "omniqueue (sends unconfirmed)", |job| Box::pin(omniqueue_amqp::run(job))),
        #[cfg(feature = "amqp")]
        ("amqp", "ruststream", |job| Box::pin(ruststream_amqp::run(job))),
        #[cfg(feature = "kafka")]
        ("kafka", "sea-streamer", |job| Box::pin(sea_streamer_kafka::run(job))),
        #[cfg(feature = "kafka")]
        ("kafka", "ruststream", |job| Box::pin(ruststream_kafka::run(job))),
        #[cfg(feature = "kafka")]
        ("kafka", "mq-bridge (a commit a batch)", |job| Box::pin(mq_bridge::run(job))),
    ]
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match act(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn act(words: &[String]) -> Result<(), Failed> {
    match words {
        [word, backend] if word == "list" => {
            peers().iter().filter(|(of, ..)| of == backend).for_each(|(_, name, _)| println!("{name}"));
            Ok(())
        }
        [word, backend, peer, url, topic, n, size] if word == "run" => {
            let run = peers().into_iter().find(|(of, name, _)| of == backend && name == peer);
            let (.., run) = run.ok_or_else(|| format!("no {peer} for {backend} in this build"))?;
            let job = Job { url: url.clone(), topic: topic.clone(), n: n.parse()?, payload: vec![7; size.parse()?] };
            // On this thread alone, as ours.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let Ran { send, receive } = runtime.block_on(run(&job))?;
            println!("ran {} {} {} {}", send.0, send.1, receive.0, receive.1);
            Ok(())
        }
        _ => Err("see the head of bench-peers/brokers/src/main.rs for the words".into()),
    }
}
