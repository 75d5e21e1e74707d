//! Publishing: mandatory and confirmed always, pipelined, one owner per channel, so that the client's tags follow the order of
//! the calls.

use crate::connect::{ANSWER, Connections, Role, within};
use crate::decode::private_number;
use crate::fault::fault;
use crate::line::Live;
use crate::returns::{Fate, Returns};
use crate::wire::{Origin, encode};
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{Channel, Confirmation};
use mq_api::{Error, ErrorKind, Message, Outcome, Result};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;

/// Publishes without confirmation at a time. A confirmation of many scans all that are open, so that more costs more than it
/// brings; measured: 256 to 1,000 is the best there is.
const WINDOW: usize = 1_000;

/// When a channel ends, the client tells every publish at once. What has not heard of it by then never will.
const ENDED: Duration = Duration::from_secs(1);

/// A channel in confirm mode, and the connection that it lives on.
pub(crate) struct ConfirmChannel {
    pub(crate) channel: Channel,
    connection: Arc<Live>,
}

impl ConfirmChannel {
    pub(crate) async fn open(connections: &Connections) -> Result<Self> {
        let connection = connections.get(Role::Publish).await?;
        let channel = connections.channel_on(&connection, Role::Publish).await?;
        within(ANSWER, "select confirms", channel.confirm_select(ConfirmSelectOptions::default())).await?;
        Ok(Self { channel, connection })
    }

    /// Whether the broker reads nothing of this connection now (memory or disk alarm).
    pub(crate) fn is_blocked(&self) -> bool {
        self.connection.status().blocked()
    }

    pub(crate) fn frame_max(&self) -> usize {
        self.connection.configuration().frame_max() as usize
    }
}

/// A publish without an outcome.
struct Open<T> {
    tag: T,
    since: Instant,
    size: usize,
}

/// Publishes on one channel; `T` says what each was for.
pub(crate) struct Writer<T> {
    channel: Arc<ConfirmChannel>,
    flying: FuturesUnordered<BoxFuture<'static, (u64, lapin::Result<Confirmation>)>>,
    returns: Returns,
    open: HashMap<u64, Open<T>>,
    oldest: VecDeque<u64>,
    /// Outcomes that are certain.
    pub(crate) done: Vec<(T, Result<()>)>,
    /// The channel ended, and nothing of it is left without outcome.
    pub(crate) dead: Option<Error>,
    /// Why it ended, and when; the outcomes of its publishes may still be on their way.
    ending: Option<(Error, Instant)>,
    limit: Duration,
    waived: Instant,
}

impl<T> Writer<T> {
    pub(crate) fn new(channel: Arc<ConfirmChannel>, limit: Duration) -> Self {
        Self {
            channel,
            flying: FuturesUnordered::new(),
            returns: Returns::default(),
            open: HashMap::new(),
            oldest: VecDeque::new(),
            done: Vec::new(),
            dead: None,
            ending: None,
            limit,
            waived: Instant::now(),
        }
    }

    /// How many more may be published now.
    pub(crate) fn room(&self) -> usize {
        if self.ending.is_some() { 0 } else { WINDOW.saturating_sub(self.open.len()) }
    }

    /// Queues one; a message that cannot be written has its outcome at once. `routing_key` wins over the message's own.
    pub(crate) fn publish(
        &mut self,
        tag: T,
        exchange: ShortString,
        routing_key: Option<ShortString>,
        message: &Message,
        origin: Origin,
        now: Instant,
    ) {
        let number = self.returns.next();
        let out = match encode(message, origin, number, self.channel.frame_max()) {
            Ok(out) => out,
            Err(error) => {
                self.returns.gave_up(number, None);
                self.done.push((tag, Err(error)));
                return;
            }
        };
        let routing_key = routing_key.or(out.routing_key).unwrap_or_else(|| "".into());
        let body = message.payload.clone().unwrap_or_default();
        let (channel, properties) = (self.channel.clone(), out.properties);
        self.open.insert(number, Open { tag, since: now, size: body.len() });
        self.oldest.push_back(number);
        // First polled in the order of these calls, which is when the client takes its tag and queues the frames.
        self.flying.push(Box::pin(async move {
            let options = BasicPublishOptions { mandatory: true, immediate: false };
            let sent = channel.channel.basic_publish(exchange, routing_key, options, &body, properties).await;
            let outcome = match sent {
                Ok(confirm) => confirm.await,
                Err(error) => Err(error),
            };
            (number, outcome)
        }));
    }

    /// Ready when there are outcomes, or the channel ended.
    pub(crate) fn poll_done(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut any = false;
        // Twice: everything that had resolved before must be seen, and one pass may stop early for fairness.
        for _ in 0..2 {
            while let Poll::Ready(Some((number, outcome))) = self.flying.poll_next_unpin(cx) {
                any = true;
                self.resolved(number, outcome);
            }
            if !any {
                break;
            }
        }
        if any {
            let (open, done) = (&mut self.open, &mut self.done);
            self.returns.certain(|number, fate| {
                if let Some(Open { tag, .. }) = open.remove(&number) {
                    done.push((tag, if fate == Fate::Taken { Ok(()) } else { Err(unroutable()) }));
                }
            });
        }
        // The client tells them one by one: the one that the channel was closed over may be the last, and has to have its own
        // outcome, or it would be sent again as if it were a neighbour.
        if self.flying.is_empty()
            && let Some((error, _)) = self.ending.take()
        {
            self.dead = Some(error);
        }
        if self.done.is_empty() && self.dead.is_none() { Poll::Pending } else { Poll::Ready(()) }
    }

    fn resolved(&mut self, number: u64, outcome: lapin::Result<Confirmation>) {
        let attached = |m: Option<lapin::message::BasicReturnMessage>| m.and_then(|m| private_number(&m.properties));
        let error = match outcome {
            Ok(Confirmation::Ack(message)) => return self.returns.confirmed(number, attached(message)),
            Ok(Confirmation::Nack(message)) => {
                self.returns.gave_up(number, attached(message));
                let text = "the broker did not take the message in every queue: one is full, or its leader is away";
                Error::new(ErrorKind::Unavailable, text)
            }
            Ok(Confirmation::NotRequested) => {
                self.returns.gave_up(number, None);
                Error::new(ErrorKind::Other, "the channel is not in confirm mode")
            }
            Err(error) => {
                self.returns.gave_up(number, None);
                let error = fault("publish", error);
                let copy = Error::new(error.kind(), error.context().to_owned());
                self.ending.get_or_insert((error, Instant::now()));
                copy
            }
        };
        if let Some(Open { tag, size, .. }) = self.open.remove(&number) {
            let error = match refused_size(error.context()) {
                // The channel closed over this one, and not over its neighbours.
                Some(refused) if refused == size => {
                    Error::new(ErrorKind::TooLarge, error.context().to_owned()).with_outcome(Outcome::Rejected)
                }
                _ => error.with_outcome(Outcome::Unknown),
            };
            self.done.push((tag, Err(error)));
        }
    }

    /// What has no outcome: for another channel.
    pub(crate) fn abandon(&mut self) -> impl Iterator<Item = T> + '_ {
        self.flying.clear();
        let mut numbers: Vec<u64> = self.open.keys().copied().collect();
        numbers.sort_unstable();
        numbers.into_iter().filter_map(|n| self.open.remove(&n)).map(|open| open.tag)
    }

    /// A publish that was in flight when its queue's leader froze may never be answered. Silence of a blocked connection is
    /// no silence.
    pub(crate) fn check(&mut self, now: Instant) -> Option<Error> {
        if self.ending.as_ref().is_some_and(|(_, since)| now - *since > ENDED) {
            return self.ending.take().map(|(error, _)| error);
        }
        if self.channel.is_blocked() {
            self.waived = now;
        }
        while let Some(number) = self.oldest.front()
            && !self.open.contains_key(number)
        {
            self.oldest.pop_front();
        }
        let since = self.oldest.front().and_then(|n| self.open.get(n)).map(|open| open.since.max(self.waived))?;
        (now - since > self.limit).then(|| {
            Error::new(ErrorKind::Timeout, format!("the broker did not confirm a message within {:?}", self.limit))
        })
    }
}

/// The size of a message that is larger than the server allows, for which it closes the channel.
fn refused_size(words: &str) -> Option<usize> {
    let (_, rest) = words.split_once("message size ")?;
    let (size, rest) = rest.split_once(' ')?;
    rest.contains("larger than").then(|| size.parse().ok())?
}

#[cold]
fn unroutable() -> Error {
    let text = "no queue took the message: no group is there yet; name it, as in ProducerSpec::new(topic).group(name), or make it first";
    Error::new(ErrorKind::Unroutable, text).with_outcome(Outcome::Rejected)
}

#[cfg(test)]
mod tests {
    use super::refused_size;

    #[test]
    fn the_message_that_was_too_large_is_known_by_its_size() {
        let words = "publish: PRECONDITION_FAILED - message size 70000 is larger than configured max size 65536";
        assert_eq!(refused_size(words), Some(70_000));
        assert_eq!(refused_size("publish: PRECONDITION_FAILED - unknown delivery tag 7"), None);
        assert_eq!(refused_size("publish: the message size was 3"), None);
    }
}
