//! Broadcast on a stream: read from its end on, without a group. What was trimmed before it was read is a `Gap`: every entry that
//! was ever added was either handed over or reported, whenever the reader is at the end.

use crate::answer::{Id, as_id, as_int, checked, entry, failure, field, id_text, list};
use crate::attend::Attend;
use crate::conn::Conn;
use crate::connect::{Hub, Link};
use crate::driver::mends;
use crate::read::client_id;
use crate::scripts::LOOK;
use crate::topology::prepare_topic;
use crate::wire;
use mq_api::{Event, Gap, GapCause, Position, Result};
use mq_core::{End, Gate, Incoming, Lane, Run, Session, Token};
use redis::{RedisError, Value};
use std::sync::Arc;
use std::time::Duration;

const COUNT: usize = 500;
const BLOCK: Duration = Duration::from_secs(1);

struct Reader {
    hub: Arc<Hub>,
    link: Link,
    session: Session,
    lane: Arc<Lane>,
    key: String,
    /// Read up to here.
    at: Id,
    /// How many entries the stream had ever had at that place: those before the start, handed over, and reported as missed.
    index: i64,
}

/// Starts a session.
pub(crate) async fn attach(hub: &Arc<Hub>, link: &Link, session: Session, key: String) -> Result<Run> {
    let sub = session.subscription.clone();
    prepare_topic(link, &sub.topic, sub.retention, sub.partitions, sub.provisioning).await?;
    let conn = hub.own(link).await?;
    let client = client_id(&conn).await;
    let lane = session.open_lane(None, session.generation);
    let mut reader = Reader { hub: hub.clone(), link: link.clone(), lane, key, at: (0, 0), index: 0, session };
    let name = reader.name();
    let before = hub.places.lock().remove(&name);
    let (last, added) = reader.stream().await?;
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
        format!("{} {:x}", self.key, self.session.consumer)
    }

    /// Last id, entries ever added.
    async fn stream(&self) -> Result<(Id, i64)> {
        match self.link.query(redis::cmd("XINFO").arg("STREAM").arg(&self.key)).await {
            Ok(info) => {
                let last = field(&info, "last-generated-id").and_then(as_id).unwrap_or((0, 0));
                Ok((last, field(&info, "entries-added").and_then(as_int).unwrap_or(0)))
            }
            Err(error) if error.code() == Some("ERR") => Ok(((0, 0), 0)),
            Err(error) => Err(failure(error, &format!("looking at topic '{}'", self.session.subscription.topic))),
        }
    }

    fn gap(&self, cause: GapCause, count: Option<u64>) {
        let from = (self.at != (0, 0)).then(|| Position::stream_id(self.at.0, self.at.1));
        let topic = self.session.subscription.topic.clone();
        self.session.events.push(Event::Gap(Gap { from, count, ..Gap::new(topic, cause) }));
    }

    /// Entries up to the number `upto` are gone, or were handed over.
    fn find_gap(&mut self, upto: i64) {
        if upto > self.index {
            self.gap(GapCause::Retention, u64::try_from(upto - self.index).ok());
            self.index = upto;
        }
    }

    async fn run(mut self, conn: Conn, client: i64, name: String) -> End {
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

    async fn read_all(&mut self, conn: Conn, client: i64) -> Result<()> {
        loop {
            if self.session.flow.is_shut(Gate::Stopping) {
                self.session.stop.cancelled().await;
                return Ok(());
            }
            let look = LOOK.on(&[&self.key]).arg(id_text(self.at)).arg(COUNT.to_string());
            let answer = self.attend(look.run_on(&conn), client, Duration::ZERO).await?;
            let mut parts = list(answer).into_iter();
            let mut next = || parts.next().unwrap_or_default();
            let (added, gone, ended, entries) = (next(), next(), next(), list(next()));
            let last = as_id(&next()).unwrap_or(self.at);
            if last < self.at {
                // Another stream, or what is left of it. What comes now has lower ids than what was read.
                self.gap(GapCause::Deleted, None);
                (self.at, self.index) = (last, as_int(&added).unwrap_or(0));
                continue;
            }
            self.find_gap(as_int(&gone).unwrap_or(-1));
            self.hand_over(entries);
            if as_int(&ended) != Some(1) {
                continue;
            }
            let added = as_int(&added).unwrap_or(0);
            self.find_gap(added);
            if added < self.index {
                self.gap(GapCause::Deleted, None);
                self.index = added;
            }
            // What comes now comes one by one, so that nothing is missed before it; if it is, the next look finds it.
            let mut cmd = redis::Cmd::with_capacity(8, 128);
            cmd.arg("XREAD").arg("COUNT").arg(COUNT).arg("BLOCK").arg(BLOCK.as_millis() as u64);
            cmd.arg("STREAMS").arg(&self.key).arg(id_text(self.at));
            let reply = self.attend(conn.send_packed_command(&cmd), client, BLOCK).await?;
            let entries: Vec<_> = match reply {
                Value::Map(pairs) => pairs.into_iter().flat_map(|(_, entries)| list(entries)).collect(),
                other => list(other)
                    .into_iter()
                    .flat_map(|pair| list(pair).into_iter().nth(1).map(list).unwrap_or_default())
                    .collect(),
            };
            self.hand_over(entries);
        }
    }

    fn hand_over(&mut self, entries: Vec<Value>) {
        let entries: Vec<_> = entries.into_iter().filter_map(entry).collect();
        let Some((last, _)) = entries.last() else { return };
        self.at = *last;
        self.index += entries.len() as i64;
        self.lane.push(entries.into_iter().map(|(id, fields)| {
            let position = Position::stream_id(id.0, id.1);
            Incoming::new(Token(id.0, id.1), position, wire::from_fields(fields, id))
        }));
    }

    async fn attend(
        &self,
        read: impl Future<Output = std::result::Result<Value, RedisError>>,
        client: i64,
        block: Duration,
    ) -> Result<Value> {
        let patience = self.hub.options.response_timeout;
        let attend = Attend { link: &self.link, draining: &self.session.draining, client, block, patience };
        let answer = attend.answer(read).await.and_then(|answer| checked(answer).map_err(|e| failure(e, "reading")));
        answer.map_err(|e| e.doing(format_args!("topic '{}'", self.session.subscription.topic)))
    }
}
