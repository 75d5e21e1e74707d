//! Reading: blocking reads on a connection of their own, never cut short by dropping them (an entry that the server handed out
//! to nobody would wait for its lease). `CLIENT UNBLOCK` ends one early.

use crate::answer::{Id, as_bytes, as_int, checked, entry, id_text, list};
use crate::member::{Known, Member, notes};
use mq_api::{Error, ErrorKind};
use redis::Value;
use redis::aio::MultiplexedConnection;
use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;

/// Most entries of one read.
const COUNT: usize = 500;
/// Longest block on the server. Short enough that a redrive's stream is noticed soon.
const BLOCK: Duration = Duration::from_secs(1);
/// With little credit left a moment passes before the next read: acknowledgements that come meanwhile are credit too, and one
/// read of 50 costs little more than one of 1.
const GATHER: Duration = Duration::from_millis(1);

type Fields = Vec<(bytes::Bytes, bytes::Bytes)>;

/// Reads until the consumer stops. The error ends the session.
pub(crate) async fn read_loop(member: &Member, mut conn: MultiplexedConnection, client: i64) -> Result<(), Error> {
    let flow = &member.session.flow;
    let few = flow.max() / 4;
    loop {
        let stopping = member.session.draining.cancelled();
        let credit = tokio::select! { biased;
            () = stopping => return Ok(()),
            credit = poll_fn(|cx| flow.poll_credit(cx)) => credit,
        };
        let credit = if credit.count < few {
            tokio::time::sleep(GATHER).await;
            flow.credit()
        } else {
            credit
        };
        if credit.count == 0 || credit.bytes == 0 {
            continue;
        }
        let mean = member.mean.load(Ordering::Relaxed).max(1);
        let fitting = usize::try_from(credit.bytes as u64 / mean).unwrap_or(COUNT).max(1);
        let count = credit.count.min(fitting).min(COUNT);
        let block = BLOCK.min(member.lease() / 4).max(Duration::from_millis(1));
        let reply = read(member, &mut conn, client, count, block).await?;
        take(member, reply).await?;
    }
}

async fn read(
    member: &Member,
    conn: &mut MultiplexedConnection,
    client: i64,
    count: usize,
    block: Duration,
) -> Result<Value, Error> {
    let sides = member.live_sides();
    let mut cmd = redis::Cmd::with_capacity(10 + 2 * sides.len(), 256);
    cmd.arg("XREADGROUP").arg("GROUP").arg(&member.group).arg(&member.me).arg("COUNT").arg(count);
    cmd.arg("BLOCK").arg(block.as_millis() as u64).arg("STREAMS");
    for side in sides {
        cmd.arg(&side.keys.stream);
    }
    for _ in sides {
        cmd.arg(">");
    }
    *member.reading_since.lock() = Some(Instant::now());
    let reply = {
        let mut reply = pin!(conn.send_packed_command(&cmd));
        let limit = block + member.hub.options.response_timeout;
        let mut late = pin!(tokio::time::sleep(limit));
        let mut stopping = pin!(member.session.draining.cancelled());
        let mut unblocked = false;
        loop {
            tokio::select! { biased;
                reply = &mut reply => break reply,
                () = &mut stopping, if !unblocked => {
                    unblocked = true;
                    // Without the right the block runs out by itself.
                    let _ = member.link.query(redis::cmd("CLIENT").arg("UNBLOCK").arg(client)).await;
                }
                () = &mut late => {
                    let text = format!("no answer to a read within {limit:?}: the connection is taken for dead");
                    return Err(Error::new(ErrorKind::Disconnected, text));
                }
            }
        }
    };
    *member.reading_since.lock() = None;
    reply.and_then(checked).map_err(|e| member.error(e, "reading"))
}

/// Sorts a reply by stream and hands it over.
async fn take(member: &Member, reply: Value) -> Result<(), Error> {
    let streams: Vec<(Value, Value)> = match reply {
        Value::Nil => return Ok(()),
        Value::Map(pairs) => pairs,
        other => list(other)
            .into_iter()
            .filter_map(|pair| {
                let mut pair = list(pair).into_iter();
                Some((pair.next()?, pair.next()?))
            })
            .collect(),
    };
    for (key, entries) in streams {
        let key = as_bytes(&key).unwrap_or_default();
        let Some(at) = member.sides.iter().position(|s| s.keys.stream.as_bytes() == key) else { continue };
        let entries: Vec<(Id, Fields)> = list(entries).into_iter().filter_map(entry).collect();
        if let (0, Some((last, _))) = (at, entries.last()) {
            member.memory.lock().last = Some(mq_api::Position::stream_id(last.0, last.1));
        }
        let noted = match member.revived.load(Ordering::Relaxed) {
            true => look_up(member, at, &entries).await?,
            false => HashMap::new(),
        };
        member.push_new(at, entries, &noted);
    }
    Ok(())
}

/// After a group was made again: attempts that were noted before.
async fn look_up(member: &Member, side: usize, entries: &[(Id, Fields)]) -> Result<HashMap<Id, Known>, Error> {
    if entries.is_empty() {
        return Ok(HashMap::new());
    }
    let mut cmd = redis::cmd("HMGET");
    cmd.arg(&member.sides[side].keys.tries);
    entries.iter().for_each(|(id, _)| {
        cmd.arg(id_text(*id));
    });
    let found = member.link.query(&cmd).await.map_err(|e| member.error(e, "reading attempts"))?;
    let found = list(found);
    let mut noted = HashMap::new();
    for ((id, _), note) in entries.iter().zip(&found) {
        if let Some(text) = as_bytes(note) {
            let (attempt, trials) = notes(text);
            noted.insert(*id, Known { count: 1, attempt, trials });
        }
    }
    Ok(noted)
}

/// The number of a connection, for `CLIENT UNBLOCK`.
pub(crate) async fn client_id(conn: &mut MultiplexedConnection) -> i64 {
    let answer = conn.send_packed_command(redis::cmd("CLIENT").arg("ID")).await;
    answer.ok().as_ref().and_then(as_int).unwrap_or(0)
}
