//! Reading: blocking reads on a connection of their own, never cut short by dropping them (an entry that the server handed out
//! to nobody would wait for its lease). `CLIENT UNBLOCK` ends one early.

use crate::answer::{Id, as_bytes, as_int, checked, entry, failure, id_text, list};
use crate::attend::Attend;
use crate::conn::{Conn, Reply};
use crate::member::{Known, Member, notes};
use crate::resp;
use crate::scripts::READ;
use crate::wire;
use bytes::Bytes;
use mq_api::{Error, GapCause, Message};
use redis::{RedisError, Value};
use std::collections::HashMap;
use std::future::poll_fn;
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

/// Reads until the consumer stops. The error ends the session.
pub(crate) async fn read_loop(member: &Member, conn: Conn, client: i64) -> Result<(), Error> {
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
        if member.starved.swap(false, Ordering::Relaxed) {
            member.wake.due_in(Duration::ZERO);
        }
        let mean = member.mean.load(Ordering::Relaxed).max(1);
        let fitting = usize::try_from(credit.bytes as u64 / mean).unwrap_or(COUNT).max(1);
        let count = credit.count.min(fitting).min(COUNT);
        let block = BLOCK.min(member.lease() / 4).max(Duration::from_millis(1));
        if member.keep.is_log() {
            count_and_read(member, &conn, client, count, block).await?;
        } else {
            let reply = read(member, &conn, client, count, block).await?;
            take(member, reply).await?;
            // After the hand-over: what is renewed next includes it.
            *member.reading_since.lock() = None;
        }
    }
}

/// Where entries may go unread (log mode, streams of others) each read also counts what went, which only a script does in one
/// step, and no script blocks. The blocking read before it takes nothing: it only says that there is something.
async fn count_and_read(member: &Member, conn: &Conn, client: i64, count: usize, block: Duration) -> Result<(), Error> {
    let mut wait = redis::Cmd::with_capacity(12, 256);
    wait.arg("XREAD").arg("COUNT").arg(1).arg("BLOCK").arg(block.as_millis() as u64).arg("STREAMS");
    let mut from = Vec::new();
    let mut left = count;
    for (at, side) in member.live_sides().iter().enumerate() {
        let call = READ.on(&[&side.keys.stream]).arg(&member.group).arg(&member.me).arg(left.to_string());
        *member.reading_since.lock() = Some(Instant::now());
        let answer = attend(member, call.run_on(conn), client, Duration::ZERO).await?;
        let mut parts = list(answer).into_iter();
        let mut next = || parts.next().unwrap_or_default();
        let (lost, upto, entries) = (next(), next(), list(next()));
        let entries = messages(entries);
        match as_int(&lost) {
            None | Some(0) => {}
            Some(lost) => member.gap(GapCause::Retention, u64::try_from(lost).ok()),
        }
        left -= entries.len().min(left);
        hand_over(member, at, entries).await?;
        *member.reading_since.lock() = None;
        if left == 0 {
            return Ok(());
        }
        wait.arg(&side.keys.stream);
        from.push(upto);
    }
    if left < count {
        return Ok(());
    }
    from.iter().filter_map(as_bytes).for_each(|id| {
        wait.arg(id);
    });
    attend(member, conn.send_packed_command(&wait), client, block).await.map(drop)
}

async fn read(member: &Member, conn: &Conn, client: i64, count: usize, block: Duration) -> Result<Reply, Error> {
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
    let patience = member.hub.options.response_timeout;
    let attend = Attend { link: &member.link, draining: &member.session.draining, client, block, patience };
    attend.answer(conn.send_for_frame(&cmd)).await.map_err(|e| e.doing(member.place()))
}

/// Waits for the answer to a read.
async fn attend(
    member: &Member,
    read: impl Future<Output = Result<Value, RedisError>>,
    client: i64,
    block: Duration,
) -> Result<Value, Error> {
    let patience = member.hub.options.response_timeout;
    let attend = Attend { link: &member.link, draining: &member.session.draining, client, block, patience };
    let answer = attend.answer(read).await.map_err(|e| e.doing(member.place()))?;
    checked(answer).map_err(|e| failure(e, "reading").doing(member.place()))
}

/// Sorts a reply by stream and hands it over.
async fn take(member: &Member, reply: Reply) -> Result<(), Error> {
    if let Reply::Frame(frame) = &reply
        && let Some(read) = read_ours(member, frame)
    {
        for (at, entries) in (0..).zip(read) {
            hand_over(member, at, entries).await?;
        }
        return Ok(());
    }
    let reply = reply.value().and_then(checked).map_err(|e| failure(e, "reading").doing(member.place()))?;
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
        let entries = messages(list(entries));
        hand_over(member, at, entries).await?;
    }
    Ok(())
}

/// The entries of each side, if all are this library's: read where they lie, one allocation for each payload. (A slice of the
/// whole reply would need none, and keep all of it for as long as one message of it is held.)
fn read_ours(member: &Member, frame: &[u8]) -> Option<[Vec<(Id, Message)>; 2]> {
    let mut read: [Vec<(Id, Message)>; 2] = Default::default();
    resp::entries(frame, |stream, id, meta, payload| {
        let at = member.sides.iter().position(|side| side.keys.stream.as_bytes() == stream)?;
        let mut message = wire::decode(meta)?;
        message.payload = payload.map(Bytes::copy_from_slice);
        read[at].push((id, message));
        Some(())
    })?;
    Some(read)
}

/// What entries say.
fn messages(entries: Vec<Value>) -> Vec<(Id, Message)> {
    let entries = entries.into_iter().filter_map(entry);
    entries.map(|(id, fields)| (id, wire::from_fields(fields, id))).collect()
}

/// Hands what was read for the first time to the engine.
async fn hand_over(member: &Member, at: usize, entries: Vec<(Id, Message)>) -> Result<(), Error> {
    if let (0, Some((last, _))) = (at, entries.last()) {
        member.memory.lock().last = Some(mq_api::Position::stream_id(last.0, last.1));
    }
    let noted = match member.revived.load(Ordering::Relaxed) {
        true => look_up(member, at, &entries).await?,
        false => HashMap::new(),
    };
    member.push_new(at, entries, &noted);
    Ok(())
}

/// After a group was made again: attempts that were noted before.
async fn look_up(member: &Member, side: usize, entries: &[(Id, Message)]) -> Result<HashMap<Id, Known>, Error> {
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
    let mut memory = member.memory.lock();
    for ((id, _), note) in entries.iter().zip(&found) {
        let (attempt, trials) = notes(as_bytes(note).unwrap_or_default());
        let attempt = attempt.max(memory.next_attempt(side, mq_core::Token(id.0, id.1)));
        if (attempt, trials) != (1, 0) {
            noted.insert(*id, Known { count: 1, attempt, trials });
        }
    }
    drop(memory);
    Ok(noted)
}

/// The number of a connection, for `CLIENT UNBLOCK`.
pub(crate) async fn client_id(conn: &Conn) -> i64 {
    let answer = conn.send_packed_command(redis::cmd("CLIENT").arg("ID")).await;
    answer.ok().as_ref().and_then(as_int).unwrap_or(0)
}
