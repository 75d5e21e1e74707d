//! Sends over a link: the engine's producer, and a driver that hands its messages to the broker.

use super::Status;
use crate::client::Client;
use mq_api::{Broker, Capabilities, Error, ErrorKind, Outcome, Producer, ProducerSpec, Result, SendResult};
use mq_core::{Driver, End, Mechanics, MoveBy, Outgoing, ReleaseBy, RetryBy, Run, Session, TxSession};
use std::sync::Arc;
use tokio::sync::watch;

pub(super) struct Wire {
    client: Arc<Client>,
    status: watch::Receiver<Status>,
}

/// Messages written before the loop looks at the link again.
const AT_ONCE: usize = 256;

impl Wire {
    pub(super) fn new(client: Arc<Client>, status: watch::Receiver<Status>) -> Arc<Self> {
        Arc::new(Self { client, status })
    }
}

fn lost() -> Error {
    Error::new(ErrorKind::Disconnected, "the connection was lost")
}

impl Driver for Wire {
    fn mechanics(&self) -> Mechanics {
        Mechanics { retry: RetryBy::Driver, dead_letter: MoveBy::Driver, release: ReleaseBy::Driver }
    }

    fn capabilities(&self) -> Arc<Capabilities> {
        self.client.capabilities()
    }

    async fn attach(&self, _: Session) -> Result<Run> {
        Err(Error::new(ErrorKind::Other, "consumers of the in-memory broker have no session"))
    }

    async fn open_tx(&self, tx: TxSession) -> Result<Run> {
        let now = *self.status.borrow();
        if now.dead {
            return Err(Error::closed("the broker"));
        }
        if !now.up {
            return Err(Error::new(ErrorKind::Unavailable, "the broker is away").with_outcome(Outcome::NotSent));
        }
        // Checked and bounded by the engine before; the broker takes what it is given.
        let spec = ProducerSpec::clone(&tx.spec);
        let producer = self.client.open_producer(spec).await?;
        Ok(Box::pin(write(tx, producer, self.status.clone(), now.losses)))
    }
}

async fn write(tx: TxSession, producer: Arc<dyn Producer>, mut status: watch::Receiver<Status>, losses: u64) -> End {
    let mut held: Vec<(u64, SendResult)> = Vec::new();
    let mut batch: Vec<Outgoing> = Vec::new();
    loop {
        let now = *status.borrow_and_update();
        if now.losses != losses || now.dead {
            return End::Lost(lost());
        }
        if !now.hold && !now.frozen && !held.is_empty() {
            tx.outbox.complete(held.drain(..));
        }
        tokio::select! { biased;
            () = tx.stop.cancelled() => return End::Closed,
            changed = status.changed() => {
                if changed.is_err() {
                    return End::Closed;
                }
            }
            () = tx.outbox.take(AT_ONCE, usize::MAX, &mut batch), if !now.frozen => {
                for outgoing in batch.drain(..) {
                    let result = producer.send(outgoing.message).await;
                    held.push((outgoing.ticket, result));
                }
            }
        }
    }
}
