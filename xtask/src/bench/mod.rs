//! `cargo xtask bench`: what a message costs, beside other libraries doing the same work, and whether the bars are met.

mod brokers;
mod callgrind;
mod memory;
mod page;

use mq_testbed::Kind;

use crate::Outcome;

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// RabbitMQ: time and processor time beside the client library used by hand, latencies, flatness.
    Amqp(brokers::Args),
    /// Kafka, likewise.
    Kafka(brokers::Args),
    /// The in-memory broker: instructions and allocations by callgrind, members by the clock.
    Memory(memory::Args),
    /// Redis Streams, likewise.
    Redis(brokers::Args),
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    match args.what {
        What::Amqp(args) => brokers::run("amqp", Kind::RabbitMq, &args),
        What::Kafka(args) => brokers::run("kafka", Kind::Kafka, &args),
        What::Memory(args) => memory::run(&args),
        What::Redis(args) => brokers::run("redis", Kind::Redis, &args),
    }
}

/// One condition on the numbers.
struct Bar {
    what: String,
    value: f64,
    most: f64,
    met: bool,
}

impl Bar {
    fn at_most(what: impl Into<String>, value: f64, most: f64) -> Self {
        Self { what: what.into(), value, most, met: value <= most }
    }

    fn at_least(what: impl Into<String>, value: f64, least: f64) -> Self {
        Self { what: what.into(), value, most: least, met: value >= least }
    }
}

/// `bars: k met, m missed`.
fn summary(bars: &[Bar]) -> String {
    let met = bars.iter().filter(|bar| bar.met).count();
    format!("bars: {met} met, {} missed", bars.len() - met)
}
