//! Sending: pipelines of at most 500 `XADD` (or `PUBLISH`), a few in flight. What piles up while they fly is the next pipeline, so no timer
//! gathers messages.

use crate::answer::{as_int, as_text, checked, ends_session, failure, list, refused};
use crate::conn::{Answers, Asked, Reply};
use crate::connect::{Hub, Link};
use crate::driver::mends;
use crate::keys::{GroupKeys, meta};
use crate::resp::{put_arg, put_head};
use crate::scripts::{SWEEP, TRIM};
use crate::topology::{Keep, make_group, prepare_topic};
use crate::wire;
use futures_util::stream::{FuturesOrdered, StreamExt};
use mq_api::{
    Durability, Error, ErrorKind, Message, Outcome, Position, ProducerSpec, Provisioning, Receipt, Result, SendResult,
};
use mq_core::{End, Outgoing, Run, TxSession};
use redis::{RedisError, Value};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Messages of one pipeline: twice as many bring nothing more.
const BATCH: usize = 500;
/// Bytes of one pipeline: larger ones would hold up commands of others on the connection.
const BATCH_BYTES: usize = 1 << 20;
/// Pipelines in flight: while one is answered the next is on its way and another is being written.
const FLYING: usize = 4;
/// How often the length of the topic is asked for, with a bound far away.
const LOOK: Duration = Duration::from_secs(1);
/// How often the server's time is asked for: clocks of servers are set, too.
const CLOCK: Duration = Duration::from_secs(60);
/// Entries that one call of a sweep looks at, and calls before a send is told that the topic is full: enough for a pipeline at a
/// time, also where only one entry of forty can go.
const SWEPT: usize = 1000;
const SWEEPS: usize = 20;

/// What a producer writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Two fields.
    Packed,
    /// One field per part, for other programs.
    Plain,
    /// A Pub/Sub payload.
    Blob,
    /// A Pub/Sub payload without this library's parts.
    Raw,
}

struct Writer {
    hub: Arc<Hub>,
    link: Link,
    tx: TxSession,
    key: String,
    form: Form,
    keep: Keep,
    make: bool,
    level: Durability,
    /// The length when it was asked for, and what was written since.
    length: u64,
    asked: Instant,
    /// Where the next sweep of a full topic goes on.
    swept: String,
    /// When a sweep last found nothing.
    vain: Option<Instant>,
    /// The server's time in milliseconds, and when it was told: ids are made of it, and a program's own clock may be ahead.
    clock: Option<(u64, Instant)>,
}

fn form(spec: &ProducerSpec, pubsub: bool) -> Result<Form> {
    let mut form = if pubsub { Form::Blob } else { Form::Packed };
    for (name, value) in &spec.native {
        form = match (name.as_str(), value.as_str(), pubsub) {
            ("fields", "packed", _) => form,
            ("fields", "plain", false) => Form::Plain,
            ("fields", "plain", true) => Form::Raw,
            ("fields", other, _) => {
                let text = format!("fields={other}: a producer on redis takes packed or plain");
                return Err(Error::new(ErrorKind::Config, text));
            }
            (other, ..) => {
                let text = format!("option '{other}' is not known to a producer on redis; it takes fields");
                return Err(Error::new(ErrorKind::Config, text));
            }
        };
    }
    Ok(form)
}

/// Starts a producer's session on a stream.
pub(crate) async fn open(hub: &Arc<Hub>, link: &Link, tx: TxSession, key: String) -> Result<Run> {
    let spec = tx.spec.clone();
    let form = form(&spec, false)?;
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
    let mut writer = Writer { keep, make, ..Writer::new(hub, link, tx, key, form, level) };
    writer.ask_length().await?;
    Ok(Box::pin(writer.run()))
}

/// Starts a producer's session on a channel.
pub(crate) async fn open_channel(hub: &Arc<Hub>, link: &Link, tx: TxSession, key: String) -> Result<Run> {
    let form = form(&tx.spec, true)?;
    Ok(Box::pin(Writer::new(hub, link.clone(), tx, key, form, Durability::Sent).run()))
}

impl Writer {
    /// For a key that keeps everything.
    fn new(hub: &Arc<Hub>, link: Link, tx: TxSession, key: String, form: Form, level: Durability) -> Self {
        Self {
            hub: hub.clone(),
            link,
            tx,
            key,
            form,
            keep: Keep::All,
            make: true,
            level,
            length: 0,
            asked: Instant::now(),
            swept: "-".to_owned(),
            vain: None,
            clock: None,
        }
    }

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

    /// Writes one command for each message into the connection's buffer.
    fn write_all(&self, batch: &[Outgoing]) -> Asked {
        let replicas = self.hub.options.wait > 0 && self.level == Durability::Replicated;
        let trims = self.trims();
        self.link.conn.send_for_ids(usize::from(trims) + batch.len() + usize::from(replicas), |out| {
            if trims {
                let oldest = self.oldest().unwrap_or(0);
                redis::cmd("XTRIM").arg(&self.key).arg("MINID").arg("~").arg(oldest).write_packed_command(out);
            }
            let (arguments, before) = self.before();
            let mut meta = Vec::with_capacity(128);
            for item in batch {
                self.write(&item.message, arguments, &before, &mut meta, out);
            }
            if replicas {
                let options = &self.hub.options;
                let timeout = options.wait_timeout.as_millis() as u64;
                redis::cmd("WAIT").arg(options.wait).arg(timeout).write_packed_command(out);
            }
        })
    }

    /// Whether a pipeline begins with a command that removes what is too old: `XADD` removes by count or by age, not by both.
    fn trims(&self) -> bool {
        matches!(self.keep, Keep::Log { max: Some(_), age: Some(_) })
    }

    /// The oldest time that is kept, in milliseconds, if the topic is kept by age.
    fn oldest(&self) -> Option<u64> {
        let Keep::Log { age: Some(age), .. } = self.keep else { return None };
        let (told, at) = self.clock?;
        let now = u128::from(told) + at.elapsed().as_millis();
        Some(now.saturating_sub(age.as_millis()).try_into().unwrap_or(0))
    }

    /// Asks for the server's time, for a topic that is kept by age.
    async fn ask_time(&mut self) -> Result<()> {
        let recent = self.clock.is_some_and(|(_, at)| at.elapsed() < CLOCK);
        if recent || !matches!(self.keep, Keep::Log { age: Some(_), .. }) {
            return Ok(());
        }
        let asked = Instant::now();
        let told = self.link.query(&redis::cmd("TIME")).await.map_err(|e| failure(e, "asking for the time"))?;
        let told: Vec<u64> = list(told).iter().filter_map(as_int).filter_map(|n| n.try_into().ok()).collect();
        if let [seconds, micros] = told[..] {
            self.clock = Some((seconds * 1000 + micros / 1000, asked));
        }
        Ok(())
    }

    /// What every command of a pipeline begins with, and how many arguments that is.
    fn before(&self) -> (usize, Vec<u8>) {
        let mut out = Vec::with_capacity(self.key.len() + 64);
        let mut n = 0;
        let mut arg = |arg: &str| {
            put_arg(arg.as_bytes(), &mut out);
            n += 1;
        };
        if let Form::Blob | Form::Raw = self.form {
            arg("PUBLISH");
            arg(&self.key);
            return (n, out);
        }
        arg("XADD");
        arg(&self.key);
        if !self.make {
            arg("NOMKSTREAM");
        }
        match self.keep {
            Keep::Log { max: Some(max), .. } => {
                // Whole blocks are cheap to remove; a small bound is meant exactly.
                let how = if max < 1000 { "=" } else { "~" };
                ["MAXLEN", how, &max.to_string()].iter().for_each(|part| arg(part));
            }
            _ => {
                if let Some(oldest) = self.oldest() {
                    ["MINID", "~", &oldest.to_string()].iter().for_each(|part| arg(part));
                }
            }
        }
        arg("*");
        (n, out)
    }

    fn write(&self, message: &Message, arguments: usize, before: &[u8], meta: &mut Vec<u8>, out: &mut Vec<u8>) {
        let begin = |more: usize, out: &mut Vec<u8>| {
            put_head(b'*', arguments + more, out);
            out.extend_from_slice(before);
        };
        match self.form {
            Form::Blob => {
                begin(1, out);
                put_arg(&wire::to_blob(message), out);
            }
            Form::Raw => {
                begin(1, out);
                put_arg(message.payload_bytes(), out);
            }
            Form::Plain => {
                let fields = wire::to_plain(message);
                begin(2 * fields.len(), out);
                for (name, value) in fields {
                    put_arg(&name, out);
                    put_arg(&value, out);
                }
            }
            Form::Packed => {
                begin(if message.payload.is_some() { 4 } else { 2 }, out);
                put_arg(wire::META.as_bytes(), out);
                wire::encode(message, meta);
                put_arg(meta, out);
                if let Some(payload) = &message.payload {
                    put_arg(wire::PAYLOAD.as_bytes(), out);
                    put_arg(payload, out);
                }
            }
        }
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
        if self.trims() && answers.len() > sent.len() {
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
            Value::Int(receivers) if matches!(self.form, Form::Blob | Form::Raw) => {
                Ok(Receipt::new(self.level).received_by(receivers.try_into().unwrap_or(0)))
            }
            other => {
                let text = format!("the server answered a send with {other:?}; is there something else on this port?");
                Err(Error::new(ErrorKind::Other, text).with_outcome(Outcome::Unknown))
            }
        }
    }

    async fn ask_length(&mut self) -> Result<()> {
        if !matches!(self.keep, Keep::Handled { .. }) {
            return Ok(());
        }
        let answer = self
            .link
            .query(redis::cmd("XLEN").arg(&self.key))
            .await
            .map_err(|e| failure(e, "asking for the length"))?;
        self.length = as_int(&answer).and_then(|n| n.try_into().ok()).unwrap_or(0);
        self.asked = Instant::now();
        Ok(())
    }

    /// Refuses what is beyond the bound of the topic. The length is counted along, and asked for again each second and when the
    /// bound is near.
    async fn admit(&mut self, batch: &mut Vec<Outgoing>, idle: bool) -> Result<()> {
        self.ask_time().await?;
        let Keep::Handled { max } = self.keep else { return Ok(()) };
        let n = batch.len() as u64;
        if self.length + n > max || self.asked.elapsed() > LOOK {
            // What is in flight would be counted or not: with pipelines in flight the count along is kept, which is upward.
            let before = self.length;
            self.ask_length().await?;
            if !idle {
                self.length = self.length.max(before);
            }
            if self.length + n > max {
                let call = TRIM.on(&[&self.key, &meta(&self.key)]).arg("").arg("1");
                call.run(&self.link).await.map_err(|e| failure(e, "removing what was handled"))?;
                self.ask_length().await?;
                self.sweep(n, max).await?;
            }
        }
        let room = usize::try_from(max.saturating_sub(self.length)).unwrap_or(usize::MAX);
        if room < batch.len() {
            let refused = batch.split_off(room);
            let results = refused.into_iter().map(|item| (item.ticket, Err(self.full(max))));
            self.tx.outbox.complete(results);
        }
        self.length += batch.len() as u64;
        Ok(())
    }

    /// Makes room for `n` messages behind an entry that is not handled yet.
    async fn sweep(&mut self, n: u64, max: u64) -> Result<()> {
        let mut all = 0;
        let most = if self.vain.is_some_and(|at| at.elapsed() < LOOK / 10) { 1 } else { SWEEPS };
        for _ in 0..most {
            if self.length + n <= max {
                return Ok(());
            }
            let call = SWEEP.on(&[&self.key, &meta(&self.key)]).arg(&self.swept).arg(SWEPT.to_string());
            let answer = call.run(&self.link).await.map_err(|e| failure(e, "removing what was handled"))?;
            let parts = list(answer);
            let removed = parts.first().and_then(as_int).and_then(|n| n.try_into().ok()).unwrap_or(0);
            self.length = self.length.saturating_sub(removed);
            all += removed;
            match parts.get(1).and_then(as_text).filter(|next| !next.is_empty()) {
                Some(next) => next.clone_into(&mut self.swept),
                None => {
                    self.swept.replace_range(.., "-");
                    break;
                }
            }
        }
        self.vain = (all == 0).then(Instant::now);
        Ok(())
    }

    fn full(&self, max: u64) -> Error {
        let text = format!(
            "topic '{}' holds {} messages that not every group handled, {max} are allowed; let its groups catch up, delete a \
             group that nobody uses, or make the topic with a larger Retention::Handled",
            self.tx.spec.topic, self.length
        );
        Error::new(ErrorKind::Full, text).with_outcome(Outcome::Rejected)
    }
}
