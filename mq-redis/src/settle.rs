//! Settling: one plain `XACK` for everything that is certainly still owned and was never tried before, one script for the rest.

use crate::answer::{as_int, as_text, checked, list, write_id};
use crate::member::{Known, Member, Side};
use crate::scripts::SETTLE;
use crate::wire;
use mq_api::{Durability, Envelope, Error, Settled};
use mq_core::{Carry, LetterFacts, Other, Plan, Settlement, Token};
use redis::{RedisError, Value};
use std::time::{Duration, SystemTime};

/// Ids of one `XACK`. More would hold up the server's other clients.
const ACKS: usize = 1000;
/// Operations of one script call.
const OPERATIONS: usize = 200;
/// Dead letters are kept this long: two weeks cover a holiday.
const KEPT: Duration = Duration::from_secs(14 * 24 * 3600);

/// Carries out what piles up until the session stops and nothing is left. The error ends the session.
pub(crate) async fn settle_loop(member: &Member) -> Result<(), Error> {
    let session = &member.session;
    let mut plan = Plan::default();
    loop {
        tokio::select! { biased;
            () = session.settles.take(&mut plan) => {}
            () = session.stop.cancelled() => return Ok(()),
        }
        flush(member, &mut plan).await?;
    }
}

/// Settlements whose outcome is not known yet. Dropped so, each that comes again comes as the hand-over after that one.
pub(crate) struct Doubt<'m> {
    member: &'m Member,
    /// Acknowledged at the first hand-over.
    first: Vec<(u32, Token)>,
    /// With the number of the next hand-over.
    others: Vec<(u32, Token, u32)>,
}

impl<'m> Doubt<'m> {
    pub(crate) fn of(member: &'m Member, plan: &Plan) -> Self {
        let (mut first, mut others) = (Vec::with_capacity(plan.acks.len()), Vec::new());
        let later = member.sides.iter().any(|side| !side.known.lock().is_empty());
        let attempt = |lane, token| member.side_of(lane).map_or(1, |side| side.known(token).attempt);
        for ack in &plan.acks {
            match if later { attempt(ack.lane, ack.token) } else { 1 } {
                1 => first.push((ack.lane, ack.token)),
                n => others.push((ack.lane, ack.token, n + 1)),
            }
        }
        for other in &plan.others {
            let next = match &other.how {
                Carry::Settle(Settlement::Retry { attempt, .. }) => *attempt,
                Carry::Settle(Settlement::Release) | Carry::Trial(_) => continue,
                Carry::Settle(_) => attempt(other.lane, other.token) + 1,
            };
            others.push((other.lane, other.token, next));
        }
        Self { member, first, others }
    }

    fn settle(mut self) {
        (self.first, self.others) = Default::default();
    }
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        let first = self.first.drain(..).map(|(lane, token)| (lane, token, 2));
        let mut memory = self.member.memory.lock();
        for (lane, token, next) in first.chain(self.others.drain(..)) {
            if let Some(side) = self.member.side_of(lane) {
                memory.comes_as(self.member.number_of(side), token, next);
            }
        }
    }
}

/// Carries out one plan and tells.
pub(crate) async fn flush(member: &Member, plan: &mut Plan) -> Result<(), Error> {
    let doubt = Doubt::of(member, plan);
    let exceptions = carry_out(member, plan).await?;
    doubt.settle();
    member.session.settles.confirm(plan.upto, exceptions);
    plan.acks.clear();
    plan.urgent = false;
    Ok(())
}

/// One operation of the script, and whom to answer.
struct Operation {
    kind: u8,
    token: Token,
    op: u64,
    count: u32,
    delay: Duration,
    attempt: u32,
    trials: u32,
    meta: Vec<u8>,
    payload: Option<bytes::Bytes>,
    /// To be tried again if a dead letter cannot be written.
    again: Option<Other>,
}

impl Operation {
    fn new(kind: u8, token: Token, op: u64, known: Known) -> Self {
        Self {
            kind,
            token,
            op,
            count: known.count,
            delay: Duration::ZERO,
            attempt: known.attempt,
            trials: known.trials,
            meta: Vec::new(),
            payload: None,
            again: None,
        }
    }
}

async fn carry_out(member: &Member, plan: &mut Plan) -> Result<Vec<(u64, Settled)>, Error> {
    let mut exceptions = Vec::new();
    let certain = member.is_certain();
    for side in &member.sides {
        let lane = side.lane.id();
        let mut plain: Vec<(Token, u64)> = Vec::new();
        let mut script = Vec::new();
        {
            let mut known = side.known.lock();
            for ack in plan.acks.iter().filter(|a| a.lane == lane) {
                match known.remove(&ack.token) {
                    None if certain => plain.push((ack.token, ack.op)),
                    found => script.push(Operation::new(b'A', ack.token, ack.op, found.unwrap_or(Known::FIRST))),
                }
            }
        }
        let mut rest = Vec::new();
        for other in plan.others.drain(..) {
            match other.lane == lane {
                true => script.push(operation(member, side, other)),
                false => rest.push(other),
            }
        }
        plan.others = rest;
        let (acked, ran) =
            tokio::join!(plain_acks(member, side, &plain, &mut exceptions), run_script(member, side, script));
        acked?;
        exceptions.extend(ran?);
    }
    // Of a lane that is closed: nothing is owned any more.
    exceptions.extend(plan.others.drain(..).map(|other| (other.op, Settled::Stale)));
    Ok(exceptions)
}

async fn plain_acks(
    member: &Member,
    side: &Side,
    acks: &[(Token, u64)],
    exceptions: &mut Vec<(u64, Settled)>,
) -> Result<(), Error> {
    let mut text = Vec::with_capacity(32);
    for chunk in acks.chunks(ACKS) {
        let mut cmd = redis::Cmd::with_capacity(chunk.len() + 3, chunk.len() * 20 + 100);
        cmd.arg("XACK").arg(&side.keys.stream).arg(&member.group);
        for (token, _) in chunk {
            write_id(*token, &mut text);
            cmd.arg(text.as_slice());
        }
        let answer = member.link.query(&cmd).await.map_err(|e| member.error(e, "acknowledging"))?;
        let done = as_int(&answer).unwrap_or(0);
        if done != chunk.len() as i64 {
            // The group or its pending list is not what it was. Which of them counted is not known, except for none.
            let fate = if done == 0 { Settled::Stale } else { Settled::Unknown };
            exceptions.extend(chunk.iter().map(|(_, op)| (*op, fate)));
        }
        member.acked.store(true, std::sync::atomic::Ordering::Relaxed);
    }
    Ok(())
}

fn operation(member: &Member, side: &Side, other: Other) -> Operation {
    let known = side.known(other.token);
    let mut op = Operation::new(b'R', other.token, other.op, known);
    match &other.how {
        Carry::Trial(n) => {
            op.kind = b'T';
            op.trials = *n;
            side.known.lock().insert(other.token, Known { trials: *n, ..known });
            member.tried(side, other.token, *n);
            return op;
        }
        Carry::Settle(Settlement::Retry { after, attempt, .. }) => {
            // Settled in an orderly way: it does not always kill its consumer.
            (op.delay, op.attempt, op.trials) = (*after, *attempt, 0);
        }
        Carry::Settle(Settlement::Release) => op.trials = member.deaths(side, other.token),
        Carry::Settle(Settlement::DeadLetter { .. }) => {
            op.kind = b'D';
            letter(member, &other, &mut op);
            op.again = Some(other);
            return op;
        }
        // The engine turns both into acknowledgements.
        Carry::Settle(Settlement::Ack | Settlement::Discard { .. }) => op.kind = b'A',
    }
    side.forget(other.token);
    op
}

fn letter(member: &Member, other: &Other, op: &mut Operation) {
    let (Carry::Settle(Settlement::DeadLetter { reason, error, attempts }), Some(kept)) = (&other.how, &other.message)
    else {
        return;
    };
    let session = &member.session;
    let before = Envelope::read(&kept.message.headers).map_or(0, |e| e.redrives);
    let facts = LetterFacts {
        reason: reason.clone(),
        error: error.as_deref(),
        attempts: *attempts,
        position: other.position,
        first_seen: None,
        now: SystemTime::now(),
        redrives: mq_core::redrive::redrives(&kept.message.headers).max(before),
    };
    let source = member.sides[0].lane.source();
    let copy = session.policy().envelope(source, &facts).dead_letter(&kept.message);
    wire::encode(&copy, &mut op.meta);
    op.payload = copy.payload;
}

async fn run_script(member: &Member, side: &Side, operations: Vec<Operation>) -> Result<Vec<(u64, Settled)>, Error> {
    let mut exceptions = Vec::new();
    let mut operations = operations.into_iter().peekable();
    let mut gone = 0;
    while operations.peek().is_some() {
        let chunk: Vec<Operation> = operations.by_ref().take(OPERATIONS).collect();
        let answer = call(member, side, &chunk).await.map_err(|e| member.error(e, "settling"))?;
        let answers = list(answer);
        for (operation, answer) in chunk.into_iter().zip(answers.into_iter().chain(std::iter::repeat(Value::Nil))) {
            let answer = match checked(answer) {
                Ok(answer) => answer,
                Err(error) => Value::SimpleString(error.to_string()),
            };
            finish(member, side, operation, &answer, &mut gone, &mut exceptions);
        }
    }
    member.gone(gone);
    Ok(exceptions)
}

fn finish(
    member: &Member,
    side: &Side,
    operation: Operation,
    answer: &Value,
    gone: &mut u64,
    exceptions: &mut Vec<(u64, Settled)>,
) {
    let settles = &member.session.settles;
    let done = match answer {
        Value::Int(n) => Some(*n),
        _ => None,
    };
    if operation.kind == b'T' {
        if done != Some(1) {
            side.lane.lose(&[operation.token]);
        }
        settles.trial_recorded(side.lane.id(), operation.token);
        return;
    }
    match (done, operation.again) {
        (Some(1), again) => {
            if again.is_some() {
                side.forget(operation.token);
                member.session.trouble("dead letters", None);
            }
            if operation.kind == b'R' && !member.link.tracks {
                member.wake.due_in(operation.delay);
            }
            member.acked.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        (Some(2), _) => *gone += 1,
        (Some(_), _) => exceptions.push((operation.op, Settled::Stale)),
        (None, Some(other)) => {
            // The original stays pending and owned; written again by `retry_stuck`.
            let why = as_text(answer).unwrap_or("no answer");
            let text = format!("dead letters cannot be written to '{}', so originals wait: {why}", side.keys.dead);
            member.session.trouble("dead letters", Some(text));
            exceptions.push((operation.op, Settled::Unknown));
            member.stuck.lock().push(other);
        }
        (None, None) => exceptions.push((operation.op, Settled::Unknown)),
    }
}

async fn call(member: &Member, side: &Side, operations: &[Operation]) -> Result<Value, RedisError> {
    let keys = &side.keys;
    let oldest = SystemTime::now().checked_sub(KEPT).and_then(|t| t.duration_since(SystemTime::UNIX_EPOCH).ok());
    let oldest = oldest.map_or(0, |d| d.as_millis());
    let mut call = SETTLE
        .on(&[&keys.stream, &keys.due, &keys.tries, &keys.dead, &keys.wake])
        .arg(&member.group)
        .arg(&member.me)
        .arg(oldest.to_string())
        .arg(if member.link.tracks { "1" } else { "0" });
    let mut text = Vec::with_capacity(32);
    for o in operations {
        write_id(o.token, &mut text);
        call.push([o.kind]);
        call.push(text.clone());
        call.push(o.count.to_string());
        // Upward: a delay is never early.
        call.push(o.delay.as_nanos().div_ceil(1_000_000).to_string());
        call.push(o.attempt.to_string());
        call.push(o.trials.to_string());
        call.push(o.meta.clone());
        let mut payload = Vec::new();
        if let Some(bytes) = &o.payload {
            payload.reserve(bytes.len() + 1);
            payload.push(b'+');
            payload.extend_from_slice(bytes);
        }
        call.push(payload);
    }
    call.run(&member.link).await
}

/// Writes dead letters again that could not be written.
pub(crate) async fn retry_stuck(member: &Member) -> Result<(), Error> {
    let stuck = std::mem::take(&mut *member.stuck.lock());
    for other in stuck {
        let Some(side) = member.side_of(other.lane) else { continue };
        let op = operation(member, side, other);
        run_script(member, side, vec![op]).await?;
    }
    Ok(())
}

/// The level of what this connection confirms.
pub(crate) fn level(member: &Member) -> Durability {
    if member.link.facts.flushes { Durability::Disk } else { Durability::Memory }
}
