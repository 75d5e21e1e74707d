//! Tending what a group holds: leases renewed, parked entries taken when they are due, dead members' entries taken over, what
//! all groups handled removed, dead members' names forgotten. On the library's own thread, so that an application that blocks its runtime loses
//! nothing.

use crate::answer::{as_int, as_text, list, write_id};
use crate::keys::meta;
use crate::member::{Member, Side};
use crate::scripts::{ADOPT, LEAVE, RENEW, TAKE, TRIM};
use crate::settle::retry_stuck;
use crate::topology::{Keep, has_group, place_of};
use crate::wake::reading;
use mq_api::{Error, GapCause};
use mq_core::Token;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;

/// Longest time until a look for what is due, where the server does not wake this member.
const LOOK: Duration = Duration::from_millis(250);
/// With nothing parked by this member, its looks are this far apart.
const IDLE_LOOK: Duration = Duration::from_millis(500);
/// Where the server tells of what comes back: soon enough all the same, should it not.
const TOLD_LOOK: Duration = Duration::from_millis(900);
/// Entries taken in one go.
const TAKE_AT_ONCE: usize = 100;
/// How often the group's place is noted and what is handled is removed.
const TRIM_EVERY: Duration = Duration::from_secs(1);
/// How often names of dead members are looked for.
const TIDY_EVERY: Duration = Duration::from_secs(60);
/// A round of renewals that ends more than this part of a lease after the last one began came late: a server, a machine or this
/// thread that stood still.
const LATE: f32 = 0.6;
/// Names that hold nothing and were idle for this many leases are forgotten.
const OLD_LEASES: u32 = 10;

/// When each chore is due.
struct Times {
    look: Instant,
    renew: Instant,
    trim: Instant,
    tidy: Instant,
    stuck: Instant,
}

/// Runs until the session is to stop, and then ends between two requests. The error ends the session.
pub(crate) async fn tend_loop(member: &Member) -> Result<(), Error> {
    let lease = member.lease();
    let env = &member.session.env;
    // A third: two renewals may fail before a lease is lost. Jitter downward, so that members do not look in step.
    let renew_every = || (lease / 3).mul_f64(1.0 - 0.2 * env.random_share()).max(Duration::from_millis(1));
    let now = Instant::now();
    let mut at = Times {
        look: now,
        renew: now,
        trim: now,
        tidy: now + TIDY_EVERY.mul_f64(env.random_share()),
        stuck: now + TRIM_EVERY,
    };
    let mut cursors = ["-".to_owned(), "-".to_owned()];
    let (mut round, mut spared) = (now, false);
    let stop = &member.session.stop;
    while !stop.is_cancelled() {
        let now = Instant::now();
        if now >= at.renew {
            renew(member).await?;
            know_time(member).await?;
            // When all stood still, every lease ran out, and the first to go on would take over what the others hold, who live and
            // are about to renew. They get until the next round, once.
            spared = round.elapsed() > lease.mul_f32(LATE) && !spared;
            round = now;
            for (side, cursor) in cursors.iter_mut().enumerate().take(member.live_sides().len()) {
                let after = if spared { Duration::ZERO } else { lease };
                take(member, side, after, cursor).await?;
            }
            at.renew = Instant::now() + renew_every();
        }
        if now >= at.look {
            if member.link.tracks && member.wake.arm() {
                // Before the look: what comes back after it is told.
                let pipe = reading(&member.sides[0].keys.wake);
                member.link.query_all(&pipe).await.map_err(|e| member.error(e, "asking to be woken"))?;
            }
            let mut next = None;
            for (side, cursor) in cursors.iter_mut().enumerate().take(member.live_sides().len()) {
                let due = take(member, side, Duration::ZERO, cursor).await?;
                next = next.into_iter().chain(due).min();
            }
            let idle = match next {
                Some(_) => LOOK,
                None if member.link.tracks => TOLD_LOOK,
                None => IDLE_LOOK,
            };
            at.look = Instant::now() + next.map_or(idle, |due| due.min(idle));
        }
        if now >= at.trim {
            stay(member).await?;
            note_place(member).await?;
            at.trim = now + TRIM_EVERY;
        }
        if now >= at.tidy {
            tidy(member).await?;
            at.tidy = now + TIDY_EVERY;
        }
        if now >= at.stuck {
            retry_stuck(member).await?;
            at.stuck = now + TRIM_EVERY;
        }
        let next = at.look.min(at.renew).min(at.trim).min(at.tidy).min(at.stuck);
        tokio::select! { biased;
            () = stop.cancelled() => {}
            due = member.wake.changed() => at.look = due.map_or(at.look, |due| due.min(at.look)),
            () = tokio::time::sleep_until(next) => {}
        }
    }
    Ok(())
}

/// Renews everything held; what is not owned any more turns stale.
pub(crate) async fn renew(member: &Member) -> Result<(), Error> {
    let began = Instant::now();
    let since = member.reading_since.lock().map_or(began, |read| read.min(began));
    for side in &member.sides {
        let mut held: Vec<Token> = Vec::new();
        side.lane.held(&mut held);
        held.extend(member.stuck.lock().iter().filter(|o| o.lane == side.lane.id()).map(|o| o.token));
        for chunk in held.chunks(500) {
            renew_some(member, side, chunk).await?;
        }
    }
    *member.fresh_since.lock() = since;
    Ok(())
}

async fn renew_some(member: &Member, side: &Side, tokens: &[Token]) -> Result<(), Error> {
    let mut call = RENEW.on(&[&side.keys.stream]).arg(&member.group).arg(&member.me);
    let mut text = Vec::with_capacity(32);
    for token in tokens {
        write_id(*token, &mut text);
        call.push(text.clone());
    }
    let answer = call.run(&member.link).await.map_err(|e| member.error(e, "renewing leases"))?;
    let mut lists = list(answer).into_iter().map(|places| {
        let places = list(places);
        let tokens = places.iter().filter_map(as_int).filter_map(|at| tokens.get(usize::try_from(at).ok()?).copied());
        tokens.collect::<Vec<_>>()
    });
    let (lost, gone) = (lists.next().unwrap_or_default(), lists.next().unwrap_or_default());
    // A settlement may be under way: what it settles is not pending any more, and its slot is done, so nothing is lost here.
    for tokens in [&lost, &gone] {
        if !tokens.is_empty() {
            side.lane.lose(tokens);
            tokens.iter().for_each(|t| side.forget(*t));
        }
    }
    member.gone(gone.len() as u64);
    Ok(())
}

/// Takes what is due, and with a lease what dead members held; says when the next is due.
async fn take(member: &Member, side: usize, lease: Duration, cursor: &mut String) -> Result<Option<Duration>, Error> {
    let keys = &member.sides[side].keys;
    loop {
        let credit = member.session.flow.credit();
        let mean = member.mean.load(Ordering::Relaxed).max(1);
        let fitting = usize::try_from(credit.bytes as u64 / mean).unwrap_or(TAKE_AT_ONCE).max(1);
        let most = credit.count.min(TAKE_AT_ONCE).min(fitting);
        if most == 0 {
            member.starved.store(true, Ordering::Relaxed);
            return Ok(None);
        }
        let call = TAKE
            .on(&[&keys.stream, &keys.due, &keys.tries])
            .arg(&member.group)
            .arg(&member.me)
            .arg(most.to_string())
            .arg(lease.as_millis().to_string())
            .arg(cursor.as_bytes())
            .arg(until(member, lease).to_string());
        let asked = Instant::now();
        let answer = call.run(&member.link).await.map_err(|e| member.error(e, "taking what is due"))?;
        let mut parts = list(answer).into_iter();
        let mut next = || parts.next().unwrap_or_default();
        let (due, from, gone, taken, now) = (next(), next(), next(), list(next()), next());
        note_time(member, as_int(&now), asked);
        as_text(&from).unwrap_or("-").clone_into(cursor);
        member.gone(as_int(&gone).and_then(|n| n.try_into().ok()).unwrap_or(0));
        let full = taken.len() >= most;
        member.push_taken(side, taken);
        if !full {
            return Ok(as_int(&due).and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis));
        }
    }
}

/// Asks for the server's time, unless it was told before.
async fn know_time(member: &Member) -> Result<(), Error> {
    if member.clock.lock().is_some() {
        return Ok(());
    }
    let asked = Instant::now();
    let told = member.link.query(&redis::cmd("TIME")).await.map_err(|e| member.error(e, "asking for the time"))?;
    let told: Vec<i64> = list(told).iter().filter_map(as_int).collect();
    if let [seconds, micros] = told[..] {
        note_time(member, Some(seconds * 1000 + micros / 1000), asked);
    }
    Ok(())
}

/// The time of the server up to which a look for dead members' entries may be carried out: a quarter of the lease from now. What
/// is sent just before the server stands still is carried out when it goes on, before the renewals of members that live.
fn until(member: &Member, lease: Duration) -> u64 {
    let told = member.clock.lock().map(|(ms, at)| Duration::from_millis(ms) + at.elapsed());
    told.map_or(0, |now| (now + lease / 4).as_millis() as u64)
}

/// From the asking on, not from the answer: the server is thought to be later than it is rather than earlier, so that a machine
/// that is slow to hear answers takes over all the same.
fn note_time(member: &Member, now: Option<i64>, asked: Instant) {
    if let Some(ms) = now.and_then(|ms| ms.try_into().ok()) {
        *member.clock.lock() = Some((ms, asked));
    }
}

/// Takes over what this name held before this session.
pub(crate) async fn adopt(member: &Member, died: bool) -> Result<(), Error> {
    for side in 0..member.live_sides().len() {
        let keys = &member.sides[side].keys;
        let mut from = "-".to_owned();
        loop {
            let call = ADOPT
                .on(&[&keys.stream, &keys.due, &keys.tries])
                .arg(&member.group)
                .arg(&member.me)
                .arg(TAKE_AT_ONCE.to_string())
                .arg(&from)
                .arg(if died { "1" } else { "0" });
            let answer =
                call.run(&member.link).await.map_err(|e| member.error(e, "taking over what it held before"))?;
            let mut parts = list(answer).into_iter();
            let mut next = || parts.next().unwrap_or_default();
            let (last, gone, taken) = (next(), next(), list(next()));
            member.gone(as_int(&gone).and_then(|n| n.try_into().ok()).unwrap_or(0));
            let looked = taken.len() + as_int(&gone).and_then(|n| n.try_into().ok()).unwrap_or(0);
            member.push_taken(side, taken);
            if looked < TAKE_AT_ONCE {
                break;
            }
            from = format!("({}", as_text(&last).unwrap_or("+"));
        }
    }
    Ok(())
}

/// Sets the server's count of what the group has read right, or says that it is not known: what others removed is counted by it.
pub(crate) async fn correct(member: &Member) -> Result<(), Error> {
    let asked = place_of(&member.sides[0].keys.stream, &member.group, true).run(&member.link).await;
    asked.map(drop).map_err(|e| member.error(e, "counting what the group has read"))
}

/// Notes what the group has settled, removes what all groups have, tells what others removed unread, and looks whether there is a stream of redrive.
pub(crate) async fn note_place(member: &Member) -> Result<(), Error> {
    let handled = matches!(member.keep, Keep::Handled { .. });
    let remove = handled && member.acked.swap(false, Ordering::Relaxed);
    let keys = &member.sides[0].keys;
    let notes = meta(&keys.stream);
    // Where entries may go unread, each read counts what went.
    let looked_at: &[&str] = if handled { &[&keys.stream, &notes] } else { &[&keys.stream] };
    let call = TRIM.on(looked_at).arg(&member.group).arg(if remove { "1" } else { "0" });
    let answer = call.run(&member.link).await.map_err(|e| member.error(e, "noting the group's place"))?;
    let parts = list(answer);
    match parts.get(3).and_then(as_int) {
        None | Some(0) => {}
        Some(lost) => member.gap(GapCause::Retention, u64::try_from(lost).ok()),
    }
    if let Some(low) = parts.get(2).and_then(as_text).filter(|low| !low.is_empty()) {
        member.memory.lock().low = Some(low.to_owned());
    }
    let again = &member.sides[1].keys;
    if member.again.load(Ordering::Relaxed) {
        let call = TRIM.on(&[&again.stream]).arg(&member.group).arg("1");
        call.run(&member.link).await.map_err(|e| member.error(e, "removing what was redriven"))?;
    } else if has_group(&member.link, &again.stream, &member.group).await? {
        member.again.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// Shows that the member lives while it reads nothing (paused, hands full): a name that the server has not heard of for a while
/// is taken for that of a dead one.
async fn stay(member: &Member) -> Result<(), Error> {
    let credit = member.session.flow.credit();
    if credit.count > 0 && credit.bytes > 0 {
        return Ok(());
    }
    // Of what it holds already, nothing: no entry comes after such an id. The very last id would mean `>`, new ones.
    let last = crate::answer::id_text((u64::MAX, 0));
    let mut look = redis::cmd("XREADGROUP");
    look.arg("GROUP").arg(&member.group).arg(&member.me).arg("COUNT").arg(1);
    look.arg("STREAMS").arg(&member.sides[0].keys.stream).arg(last);
    member.link.query(&look).await.map(drop).map_err(|e| member.error(e, "staying in the group"))
}

async fn tidy(member: &Member) -> Result<(), Error> {
    let old = member.lease() * OLD_LEASES;
    for side in member.live_sides() {
        leave_names(member, side, "", old).await?;
    }
    Ok(())
}

async fn leave_names(member: &Member, side: &Side, me: &str, old: Duration) -> Result<(), Error> {
    let call =
        LEAVE.on(&[&side.keys.stream, &side.keys.tries]).arg(&member.group).arg(me).arg(old.as_millis().to_string());
    call.run(&member.link).await.map(drop).map_err(|e| member.error(e, "forgetting names of members"))
}

/// Removes this member's name, unless it still holds something.
pub(crate) async fn leave(member: &Member) -> Result<(), Error> {
    // While nobody reads, what is removed is counted from where the group stands now.
    note_place(member).await?;
    for side in member.live_sides() {
        leave_names(member, side, &member.me, Duration::ZERO).await?;
    }
    Ok(())
}
