//! The fault workload on the client libraries themselves: `testbed-raw redis|amqp|kafka ROLE --url U ...`.
//!
//! It shows that the faults bite and that the checker's rules can be kept at all, without a line of anymq. What anymq
//! does for its users (reconnecting, taking over from the dead, noticing what was destroyed) is done here by hand, in
//! the plainest way that keeps the promises.
mod amqp;
mod kafka;
mod redis_streams;
mod roles;

use std::process::ExitCode;

use mq_testbed::client::Order;

use crate::roles::Raw;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let mut args = std::env::args().skip(1);
    let library = args.next().unwrap_or_default();
    let order = Order::read(args)?;
    let raw: Box<dyn Raw> = match library.as_str() {
        "redis" => Box::new(redis_streams::Streams::new(&order)),
        "amqp" => Box::new(amqp::Amqp::new(&order)?),
        "kafka" => Box::new(kafka::Kafka::new(&order)?),
        other => return Err(format!("\"{other}\" is not redis, amqp or kafka")),
    };
    roles::play(raw.as_ref(), &order)
}
