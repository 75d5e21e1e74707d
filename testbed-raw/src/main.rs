//! The fault workload on the client libraries themselves: `testbed-raw redis|amqp|kafka ROLE --url U ...`.
//!
//! It shows that the faults bite and that the checker's rules can be kept at all, without a line of anymq. What anymq
//! does for its users (reconnecting, taking over from the dead, noticing what was destroyed) is done here by hand, in
//! the plainest way that keeps the promises.

#[cfg(feature = "amqp")]
mod amqp;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(feature = "redis")]
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
        #[cfg(feature = "redis")]
        "redis" => Box::new(redis_streams::Streams::new(&order)),
        #[cfg(feature = "amqp")]
        "amqp" => Box::new(amqp::Amqp::new(&order)?),
        #[cfg(feature = "kafka")]
        "kafka" => Box::new(kafka::Kafka::new(&order)?),
        other => return Err(format!("\"{other}\" is not redis, amqp or kafka, or this program was built without it")),
    };
    roles::play(raw.as_ref(), &order)
}
