//! Sending: pipelines of at most 500 `XADD` (or `PUBLISH`), a few in flight. What piles up while they fly is the next pipeline, so no timer
//! gathers messages.

use crate::answer::{as_int, checked, ends_session, failure, refused};
use crate::conn::{Answers, Asked, Reply};
use crate::connect::{Hub, Link};
use crate::driver::mends;
use crate::entry::{Beginning, Form};
use crate::keys::GroupKeys;
use crate::room::Room;
use crate::topology::{Keep, make_group, prepare_topic};
use futures_util::stream::{FuturesOrdered, StreamExt};
use mq_api::{Durability, Error, ErrorKind, Outcome, Position, Provisioning, Receipt, Result, SendResult};
use mq_core::{End, Outgoing, Run, TxSession};
use redis::{RedisError, Value};
use std::sync::Arc;

/// Messages of one pipeline: twice as many bring nothing more.
const BATCH: usize = 500;
/// Bytes of one pipeline: larger ones would hold up commands of others on the connection.
const BATCH_BYTES: usize = 1 << 20;
/// Pipelines in flight: while one is answered the next is on its way and another is being written.
const FLYING: usize = 4;

struct Writer {
    hub: Arc<Hub>,
    link: Link,
    tx: TxSession,
    key: String,
    form: Form,
    /// Whether a stream that is not there is made.
    make: bool,
    room: Room,
    level: Durability,
}

/// Starts a producer's session on a stream.
pub(crate) async fn open(hub: &Arc<Hub>, link: &Link, tx: TxSession, key: String) -> Result<Run> {
    let spec = tx.spec.clone();
    let form = Form::of(&spec, false)?;
    let keep = prepare_topic(link, &spec.topic, spec.retention, spec.partitions, spec.provisioning).await?;
    for group in &spec.groups {
        let keys = GroupKeys::new(&spec.topic, group);
        if spec.provisioning == Provisioning::Create {
            make_group(link, &keys, group, "0-0", None).await?;
        } else if spec.provisioning == Provisioning::Verify
            && !crate::topology::has_group(link, &keys.stream, group.as_str()).await?
        {
            let text = format!("group '{group}' of topic '{}' does not exist", spec.topic);
            return Err(Error::new(ErrorKind::Topology, text));
        }
    }
    let mut link = link.clone();
    let mut level = if link.facts.flushes { Durability::Disk } else { Durability::Memory };
    if hub.options.wait > 0 {
        // `WAIT` blocks its connection: not that of everybody.
        link.conn = hub.own_timed(&link).await?;
        level = Durability::Replicated;
    }
    let make = spec.provisioning == Provisioning::Create;
    let mut room = Room::new(keep);
    room.ask_length(&link, &key).await?;
    Ok(Box::pin(Writer { hub: hub.clone(), link, tx, key, form, make, room, level }.run()))
}

/// Starts a producer's session on a channel.
pub(crate) async fn open_channel(hub: &Arc<Hub>, link: &Link, tx: TxSession, key: String) -> Result<Run> {
    let form = Form::of(&tx.spec, true)?;
    let (hub, link, room) = (hub.clone(), link.clone(), Room::new(Keep::All));
    Ok(Box::pin(Writer { hub, link, tx, key, form, make: true, room, level: Durability::Sent }.run()))
}

impl Writer {
    async fn lost(&self, error: Error) -> End {
        if mends(error.kind()) {
            self.hub.lost(&self.link).await;
        }
        End::Lost(error)
    }

    async fn run(mut self) -> End {
        let outbox = self.tx.outbox.clone();
        let stop = self.tx.stop.clone();
        let mut flying = FuturesOrdered::new();
        let mut batch = Vec::new();
        loop {
            tokio::select! { biased;
                () = stop.cancelled() => return End::Closed,
                Some(answer) = flying.next(), if !flying.is_empty() => {
                    let (sent, answers): (Vec<Outgoing>, Answers) = answer;
                    if let Some(error) = self.tell(sent, answers) {
                        return self.lost(error).await;
                    }
                }
                () = outbox.take(BATCH, BATCH_BYTES, &mut batch), if flying.len() < FLYING => {
                    let admitted = tokio::select! { biased;
                        () = stop.cancelled() => return End::Closed,
                        admitted = self.admit(&mut batch, flying.is_empty()) => admitted,
                    };
                    if let Err(error) = admitted {
                        return self.lost(error).await;
                    }
                    if batch.is_empty() {
                        continue;
                    }
                    let answers = self.write_all(&batch);
                    let sent = std::mem::take(&mut batch);
                    flying.push_back(async move { (sent, answers.answers().await) });
                }
            }
        }
    }

    /// Refuses what is beyond the bound of the topic.
    async fn admit(&mut self, batch: &mut Vec<Outgoing>, idle: bool) -> Result<()> {
        let room = self.room.admit(&self.link, &self.key, batch.len(), idle).await?;
        if room < batch.len() {
            let topic = self.tx.spec.topic.as_str();
            let refused = batch.split_off(room);
            self.tx.outbox.complete(refused.into_iter().map(|item| (item.ticket, Err(self.room.full(topic)))));
        }
        Ok(())
    }

    /// Writes one command for each message into the connection's buffer.
    fn write_all(&self, batch: &[Outgoing]) -> Asked {
        let replicas = self.hub.options.wait > 0 && self.level == Durability::Replicated;
        let trims = self.room.trims();
        self.link.conn.send_for_ids(usize::from(trims) + batch.len() + usize::from(replicas), |out| {
            if trims {
                let oldest = self.room.oldest().unwrap_or(0);
                redis::cmd("XTRIM").arg(&self.key).arg("MINID").arg("~").arg(oldest).write_packed_command(out);
            }
            let beginning = Beginning::new(self.form, &self.key, self.make, &self.room);
            let mut meta = Vec::with_capacity(128);
            for item in batch {
                beginning.write(&item.message, &mut meta, out);
            }
            if replicas {
                let options = &self.hub.options;
                let timeout = options.wait_timeout.as_millis() as u64;
                redis::cmd("WAIT").arg(options.wait).arg(timeout).write_packed_command(out);
            }
        })
    }

    /// Tells the outbox what became of a pipeline; an error ends the session.
    fn tell(&self, sent: Vec<Outgoing>, answers: Answers) -> Option<Error> {
        let mut answers = match answers {
            Ok(answers) => answers,
            Err(error) => {
                // What was written and what not is not known.
                let lost = failure(error.clone(), "sending");
                let results = sent
                    .into_iter()
                    .map(|item| (item.ticket, Err(failure(error.clone(), "sending").with_outcome(Outcome::Unknown))));
                self.tx.outbox.complete(results);
                return Some(lost);
            }
        };
        let mut ended = None;
        let mut short = None;
        if self.room.trims() && answers.len() > sent.len() {
            let trimmed = answers.remove(0).value().and_then(checked);
            if let Err(error) = trimmed {
                tracing::warn!(topic = %self.tx.spec.topic, %error, "what is too old could not be removed");
            }
        }
        if answers.len() > sent.len()
            && let Some(reached) = answers.pop()
        {
            let reached = reached.value();
            short = match reached.as_ref().ok().and_then(as_int) {
                Some(n) if n >= i64::from(self.hub.options.wait) => None,
                Some(n) => Some(format!("{n} of {} replicas have it", self.hub.options.wait)),
                None => Some(format!("the replicas could not be asked: {reached:?}")),
            };
        }
        let results = sent.into_iter().zip(answers).map(|(item, answer)| {
            let result = self.result(answer, &mut ended);
            let result = match (&short, result) {
                (Some(why), Ok(_)) => {
                    let text = format!("not enough replicas: {why} after {:?}", self.hub.options.wait_timeout);
                    Err(Error::new(ErrorKind::Timeout, text).with_outcome(Outcome::Unknown))
                }
                (_, result) => result,
            };
            (item.ticket, result)
        });
        self.tx.outbox.complete(results);
        ended
    }

    fn result(&self, answer: Reply, ended: &mut Option<Error>) -> SendResult {
        let answer = match answer {
            Reply::Id((ms, seq)) => return Ok(Receipt::new(self.level).at(None, Position::stream_id(ms, seq))),
            other => other.value().map_err(refused)?,
        };
        match answer {
            Value::ServerError(error) => {
                let error: RedisError = error.into();
                if ends_session(&error) {
                    ended.get_or_insert_with(|| failure(error.clone(), "sending"));
                }
                Err(refused(error))
            }
            Value::Nil => {
                let text =
                    format!("topic '{}' does not exist, and the provisioning is not `create`", self.tx.spec.topic);
                Err(Error::new(ErrorKind::NotFound, text).with_outcome(Outcome::Rejected))
            }
            Value::Int(receivers) if self.form.is_published() => {
                Ok(Receipt::new(self.level).received_by(receivers.try_into().unwrap_or(0)))
            }
            other => {
                let text = format!("the server answered a send with {other:?}; is there something else on this port?");
                Err(Error::new(ErrorKind::Other, text).with_outcome(Outcome::Unknown))
            }
        }
    }
}
