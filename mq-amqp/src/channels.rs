//! Opening a channel, where its number may be one that the client cannot use any more.
//!
//! lapin 4.12 remembers why the server closed a channel by that channel's number, and forgets it never: once the numbers of a
//! connection (2,047 by RabbitMQ's default) have gone round, every channel of such a number fails at once with the error of
//! the old one, and keeps its number taken. Each question for something that is not there ends a channel so; a client of some
//! hundred topics, or one that runs for long, gets there.

use crate::connect::ANSWER;
use crate::fault::{fault, no_answer};
use crate::line::Live;
use lapin::protocol::AMQPErrorKind;
use lapin::{Channel, ErrorKind};
use mq_api::{Error, ErrorKind as Kind, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Whether a connection has numbers that no channel can have any more.
#[derive(Debug, Default)]
pub(crate) struct Spent(AtomicBool);

impl Spent {
    fn one_more(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Of a connection that was just made.
    pub(crate) fn none(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Longest wait for the end of a connection that is not used again.
const GOODBYE: Duration = Duration::from_secs(1);

const OPENING: &str = "open a channel";

/// A channel of a number that can be used. When none is left the connection is closed, so that the next attempt has another,
/// with all of its numbers.
pub(crate) async fn open(connection: &Live, spent: &Spent) -> Result<Channel> {
    match tokio::time::timeout(ANSWER, usable(connection, spent)).await {
        Ok(opened) => opened,
        Err(_) => Err(no_answer(OPENING, ANSWER)),
    }
}

async fn usable(connection: &Live, spent: &Spent) -> Result<Channel> {
    loop {
        let error = match connection.create_channel().await {
            Ok(channel) => return Ok(channel),
            Err(error) => error,
        };
        match error.kind() {
            // No server refuses a new channel so: it is what the number's former channel ended with.
            ErrorKind::ProtocolError(said) if matches!(said.kind(), AMQPErrorKind::Soft(_)) => spent.one_more(),
            ErrorKind::ChannelsLimitReached if spent.any() => {
                let text = "the numbers of this connection's channels are used up; it is made anew";
                tracing::info!("{text}");
                // Whatever becomes of it: it is not used again.
                connection.close(GOODBYE).await;
                return Err(Error::new(Kind::Disconnected, text));
            }
            _ => return Err(fault(OPENING, error)),
        }
    }
}
