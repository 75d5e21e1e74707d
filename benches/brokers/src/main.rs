//! What a message costs over a real broker: anymq beside the client library used by hand, as `cargo xtask bench redis`,
//! `amqp` and `kafka` run it.
//!
//! * `bench-brokers all BACKEND URL PAIRS [PEERS]` runs everything, each run in a process of its own, and prints the table;
//!   `PEERS` is the program of other libraries, `bench-peers/brokers`.
//! * `bench-brokers run BACKEND CONTESTANT URL TOPIC N SIZE` is such a run: `ran SEND_SECONDS SEND_CPU RECEIVE_SECONDS RECEIVE_CPU`.
//! * `bench-brokers through URL TOPIC N SIZE TOPICS BACKLOG` prints messages a second, sent and received at once.
//! * `bench-brokers in-hand URL TOPIC N SIZE MOST` prints messages a second, received with so many in hand.
//! * `bench-brokers tidy URL TOPIC` deletes what such a run left.
//! * `bench-brokers latency URL TOPIC N SIZE RATE` prints milliseconds at 50, 90, 99 and 99.9 of 100.

#[cfg(feature = "amqp")]
mod amqp_bare;
#[cfg(feature = "amqp")]
mod amqp_same;
mod contest;
mod job;
#[cfg(feature = "kafka")]
mod kafka_bare;
#[cfg(feature = "kafka")]
mod kafka_same;
mod meter;
mod ours;
#[cfg(feature = "redis")]
mod redis_bare;
#[cfg(feature = "redis")]
mod redis_same;
mod stats;
mod whole;

use std::process::ExitCode;

use job::{Failed, Job};

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
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let job = |url: &str, topic: &str, n: &str, size: &str| -> Result<Job, Failed> {
        Ok(Job { url: url.into(), topic: topic.into(), n: n.parse()?, size: size.parse()? })
    };
    match words[..] {
        ["all", backend, url, pairs] => whole::run(backend, url, pairs.parse()?, None),
        ["all", backend, url, pairs, peers] => whole::run(backend, url, pairs.parse()?, Some(peers)),
        ["run", backend, contestant, url, topic, n, size] => {
            let job = job(url, topic, n, size)?;
            println!("{}", job::runtime()?.block_on(contest::run(backend, contestant, &job))?.line());
            Ok(())
        }
        ["through", url, topic, n, size, topics, backlog] => {
            let job = job(url, topic, n, size)?;
            let rate = job::runtime()?.block_on(ours::through(&job, topics.parse()?, backlog.parse()?))?;
            println!("rate {rate}");
            Ok(())
        }
        ["in-hand", url, topic, n, size, most] => {
            let job = job(url, topic, n, size)?;
            println!("rate {}", job::runtime()?.block_on(ours::in_hand(&job, most.parse()?))?);
            Ok(())
        }
        ["tidy", url, topic] => job::runtime()?.block_on(ours::tidy(url, topic)),
        ["latency", url, topic, n, size, rate] => {
            let job = job(url, topic, n, size)?;
            let waits = job::runtime()?.block_on(ours::latencies(&job, rate.parse()?))?;
            let at = |part: f64| waits.get(((waits.len() as f64 * part) as usize).min(waits.len() - 1)).copied();
            let shown: Vec<String> =
                [0.5, 0.9, 0.99, 0.999].into_iter().filter_map(at).map(|wait| format!("{wait:.2}")).collect();
            println!("waits {}", shown.join(" "));
            Ok(())
        }
        _ => {
            Err("see the head of benches/brokers/src/main.rs for the words; `cargo xtask bench redis` knows them"
                .into())
        }
    }
}
