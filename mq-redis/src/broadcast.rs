//! Broadcast on a stream: read from its end on, without a group. What was trimmed before it was read is a `Gap`.

use crate::answer::{Id, as_id, as_int, checked, entry, failure, field, id_text, list};
use crate::connect::{Hub, Link};
use crate::driver::mends;
use crate::read::client_id;
use crate::topology::prepare_topic;
use crate::wire;
use mq_api::{Error, ErrorKind, Event, Gap, GapCause, Position, Result};
use mq_core::{End, Gate, Incoming, Lane, Run, Session, Token};
use redis::Value;
use redis::aio::MultiplexedConnection;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

const COUNT: usize = 500;
const BLOCK: Duration = Duration::from_secs(1);
/// Longest time between two looks for what was trimmed unread.
const LOOK: Duration = Duration::from_millis(500);

struct Reader {
    hub: Arc<Hub>,
    link: Link,
    session: Session,
    lane: Arc<Lane>,
    key: String,
    /// Read up to here.
    at: Id,
    /// How many entries the stream had ever had at that place.
    index: i64,
    looked: Instant,
}

/// Starts a session.
pub(crate) async fn attach(hub: &Arc<Hub>, link: &Link, session: Session, key: String) -> Result<Run> {
    let sub = session.subscription.clone();
    prepare_topic(link, &sub.topic, sub.retention, sub.partitions, sub.provisioning).await?;
    let mut conn = hub.own(link).await?;
    let client = client_id(&mut conn).await;
    let lane = session.open_lane(None, session.generation);
    let mut reader = Reader {
        hub: hub.clone(),
        link: link.clone(),
        lane,
        key,
        at: (0, 0),
        index: 0,
        looked: Instant::now(),
        session,
    };
    let name = reader.name();
    let before = hub.places.lock().remove(&name);
    let (last, added, _) = reader.stream().await?;
    if let Some((at, index)) = before.filter(|_| reader.session.generation > 1) {
        // What was sent meanwhile is not for a broadcast subscription; how much that was is known if the stream is the same.
        reader.at = at;
        reader.gap(GapCause::Disconnected, if at <= last { u64::try_from(added - index).ok() } else { None });
    }
    (reader.at, reader.index) = (last, added);
    Ok(Box::pin(reader.run(conn, client, name)))
}

impl Reader {
    fn name(&self) -> String {
        format!("{} {}", self.key, self.session.member)
    }

    /// Last id, entries ever added, entries now.
    async fn stream(&self) -> Result<(Id, i64, i64)> {
        match self.link.query(redis::cmd("XINFO").arg("STREAM").arg(&self.key)).await {
            Ok(info) => {
                let number = |name| field(&info, name).and_then(as_int).unwrap_or(0);
                let last = field(&info, "last-generated-id").and_then(as_id).unwrap_or((0, 0));
                Ok((last, number("entries-added"), number("length")))
            }
            Err(error) if error.code() == Some("ERR") => Ok(((0, 0), 0, 0)),
            Err(error) => Err(failure(error, &format!("looking at topic '{}'", self.session.subscription.topic))),
        }
    }

    fn gap(&self, cause: GapCause, count: Option<u64>) {
        let from = (self.at != (0, 0)).then(|| Position::stream_id(self.at.0, self.at.1));
        let topic = self.session.subscription.topic.clone();
        self.session.events.push(Event::Gap(Gap { topic, partition: None, from, to: None, count, cause }));
    }

    /// `removed` entries are gone from the front.
    fn find_gap(&mut self, removed: i64) {
        if removed > self.index {
            self.gap(GapCause::Retention, u64::try_from(removed - self.index).ok());
            self.index = removed;
        }
    }

    async fn run(mut self, conn: MultiplexedConnection, client: i64, name: String) -> End {
        let end = self.read_all(conn, client).await;
        if self.session.stop.is_cancelled() || self.session.flow.is_shut(Gate::Stopping) {
            return End::Closed;
        }
        self.hub.places.lock().insert(name, (self.at, self.index));
        match end {
            Ok(()) => End::Closed,
            Err(error) => {
                if mends(error.kind()) {
                    self.hub.lost(&self.link).await;
                }
                End::Lost(error)
            }
        }
    }

    async fn read_all(&mut self, mut conn: MultiplexedConnection, client: i64) -> Result<()> {
        let mut behind = false;
        loop {
            if self.session.flow.is_shut(Gate::Stopping) {
                self.session.stop.cancelled().await;
                return Ok(());
            }
            if behind || self.looked.elapsed() > LOOK {
                let (_, added, length) = self.stream().await?;
                self.find_gap(added - length);
                self.looked = Instant::now();
            }
            let mut cmd = redis::Cmd::with_capacity(8, 128);
            cmd.arg("XREAD").arg("COUNT").arg(COUNT).arg("BLOCK").arg(BLOCK.as_millis() as u64);
            cmd.arg("STREAMS").arg(&self.key).arg(id_text(self.at));
            let reply = self.read(&mut conn, &cmd, client).await?;
            let entries: Vec<_> = match reply {
                Value::Map(pairs) => pairs.into_iter().flat_map(|(_, entries)| list(entries)).collect(),
                other => list(other)
                    .into_iter()
                    .flat_map(|pair| list(pair).into_iter().nth(1).map(list).unwrap_or_default())
                    .collect(),
            };
            behind = entries.len() == COUNT;
            let entries: Vec<_> = entries.into_iter().filter_map(entry).collect();
            let Some((last, _)) = entries.last() else { continue };
            self.at = *last;
            self.index += entries.len() as i64;
            self.lane.push(entries.into_iter().map(|(id, fields)| {
                let position = Position::stream_id(id.0, id.1);
                Incoming::new(Token(id.0, id.1), position, wire::from_fields(fields, id))
            }));
        }
    }

    async fn read(&self, conn: &mut MultiplexedConnection, cmd: &redis::Cmd, client: i64) -> Result<Value> {
        let mut reply = pin!(conn.send_packed_command(cmd));
        let limit = BLOCK + self.hub.options.response_timeout;
        let mut late = pin!(tokio::time::sleep(limit));
        let mut stopping = pin!(self.session.draining.cancelled());
        let mut unblocked = false;
        loop {
            tokio::select! { biased;
                reply = &mut reply => {
                    return reply.and_then(checked).map_err(|e| failure(e, "reading"));
                }
                () = &mut stopping, if !unblocked => {
                    unblocked = true;
                    // Without the right the block runs out by itself.
                    let _ = self.link.query(redis::cmd("CLIENT").arg("UNBLOCK").arg(client)).await;
                }
                () = &mut late => {
                    let text = format!("no answer to a read within {limit:?}: the connection is taken for dead");
                    return Err(Error::new(ErrorKind::Disconnected, text));
                }
            }
        }
    }
}
