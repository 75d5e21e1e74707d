//! Section 4, second half: ownership in time, and what comes too late.

use crate::case::cases;
use crate::{Check, Clock, Connection, GROUP, Got, Member, Stopwatch, Test, TestFailure, ensure, ensure_eq};
use mq_api::{Disposition, Envelope, Reason, Settled, Subscription};
use std::time::Duration;

cases! {
    "4.5" p4_5_a_stale_ack_touches_nothing needs [Groups Settlement Retry] bugs [StaleConfirmed] one;
    "4.5" p4_5_a_stale_nack_or_dead_letter_does_nothing needs [Groups Settlement Retry DeadLetters] bugs [StaleConfirmed] one;
    "4.6" p4_6_a_held_delivery_stays_owned needs [Groups Settlement] bugs [LeaseNotRenewed];
    "4.6" p4_6_past_max_processing_it_is_a_nack needs [Groups Settlement Retry] bugs [MaxProcessingIgnored];
    "4.6" p4_6_timeouts_end_in_the_dead_letters needs [Groups Settlement Retry DeadLetters] bugs [MaxProcessingIgnored] one;
    "4.6" p4_6_a_broadcast_held_too_long_counts_no_more needs [Broadcast] bugs [MaxProcessingIgnored] one;
    "4.6" p4_6_lost_ownership_fires_the_token needs [Groups Settlement Retry] bugs [LostSilent] one;
    "4.7" p4_7_a_dead_members_deliveries_reach_another_in_time needs [Groups Settlement] bugs [CrashIsNone];
    "4.7" p4_7_and_not_before_its_lease_ran_out needs [Groups Settlement] bugs [LeaseNotRenewed] one;
}

/// A delivery of a frozen member that another member has by now.
pub(super) async fn lose_to_another(t: &Test, c: &Connection, old: Got, second: &mut Member) -> Check<(Got, Got)> {
    t.freeze(c, true).await?;
    let new = second.next().await?;
    ensure_eq!(new.label, old.label, "what the other member takes over");
    t.freeze(c, false).await?;
    t.until("the first member notices", async || Ok((!old.is_owned()).then_some(()))).await?;
    Ok((old, new))
}

async fn p4_5_a_stale_ack_touches_nothing(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut first = t.member_with(&c, "a", t.sub().max_in_flight(1)).await?;
    sender.send("m").await?;
    // In hand before the other comes: a partition that nobody holds anything of may move to it at once.
    let old = first.next().await?;
    let mut second = t.member(&d, "b").await?;
    let (old, new) = lose_to_another(&t, &c, old, &mut second).await?;
    ensure_eq!(old.ack().await, Settled::Stale, "a stale ack");
    // The new owner still owns it and may still fail it.
    ensure!(new.is_owned(), "a stale ack took the delivery from its owner");
    new.nack("once more").await;
    first.close().await;
    let again = second.next().await?;
    ensure_eq!(again.label, "m", "what comes after the owner's nack");
    again.ack_ok().await?;
    second.stays_quiet().await?;
    t.all_settled(&d, GROUP).await
}

/// A way to settle, by name.
type Way = (&'static str, fn() -> Disposition);

async fn p4_5_a_stale_nack_or_dead_letter_does_nothing(t: Test) -> Check {
    let ways: [Way; 4] = [
        ("nack", || Disposition::Nack { failure: None, after: Some(Duration::ZERO) }),
        ("dead letter", || Disposition::DeadLetter { reason: Reason::from("stale"), error: None }),
        ("release", || Disposition::Release),
        ("drop", || Disposition::Dropped),
    ];
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    for (n, (name, how)) in ways.into_iter().enumerate() {
        let mut first = t.member_with(&c, &format!("a{n}"), t.sub().max_in_flight(1)).await?;
        let label = format!("m{n}");
        sender.send(&label).await?;
        let old = first.next().await?;
        let mut second = t.member(&d, &format!("b{n}")).await?;
        let (old, new) = lose_to_another(&t, &c, old, &mut second).await?;
        let settled = old.settle(how()).await;
        ensure_eq!(settled, Settled::Stale, "a stale {name}");
        first.close().await;
        second.stays_quiet_for(t.pace().retry * 2).await?;
        new.ack_ok().await?;
        second.stays_quiet().await?;
        second.close().await;
    }
    t.dead_letters(&d, GROUP, 0).await?;
    t.all_settled(&d, GROUP).await
}

async fn p4_6_a_held_delivery_stays_owned(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    let mut first = t.member(&c, "a").await?;
    sender.send("m").await?;
    let held = first.next().await?;
    let mut second = t.member(&d, "b").await?;
    second.stays_quiet_for(t.pace().lease * 7 / 2).await?;
    ensure!(held.is_owned(), "a held delivery lost its owner");
    held.ack_ok().await?;
    second.stays_quiet().await?;
    ensure_eq!(t.ledger().labels(GROUP), ["m"], "hand-overs of a message held for several leases");
    t.all_settled(&c, GROUP).await
}

fn hurried(t: &Test) -> Subscription {
    let mut sub = t.sub();
    sub.max_processing = t.pace().long;
    sub
}

async fn p4_6_past_max_processing_it_is_a_nack(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "a", hurried(&t)).await?;
    sender.send("m").await?;
    let held = member.next().await?;
    let watch = Stopwatch::start();
    t.within("the token fires", t.pace().patience, held.lost()).await?;
    let limit = t.pace().long;
    ensure!(watch.elapsed() >= limit, "ownership ended after {:?}, before {limit:?}", watch.elapsed());
    let latest = match t.clock() {
        Clock::Virtual => limit + (limit / 100).max(Duration::from_millis(10)),
        Clock::Real => t.pace().latest(limit),
    };
    ensure!(watch.elapsed() <= latest, "ownership ended after {:?} only", watch.elapsed());
    ensure!(!held.is_owned(), "it is still owned");
    ensure_eq!(held.ack().await, Settled::Stale, "an ack after max_processing");
    let again = member.next().await?;
    ensure_eq!((again.label.as_str(), again.attempt()), ("m", 2), "what comes after a time-out");
    again.ack_ok().await?;
    t.all_settled(&c, GROUP).await
}

async fn p4_6_a_broadcast_held_too_long_counts_no_more(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender_with(&c, t.spec_to(t.topic())).await?;
    let mut sub = t.paced(Subscription::broadcast(t.topic())).max_in_flight(1);
    sub.max_processing = t.pace().long;
    let mut receiver = t.member_with(&c, "a", sub).await?;
    sender.send("held").await?;
    let held = receiver.next().await?;
    let watch = Stopwatch::start();
    sender.send("next").await?;
    ensure!(held.is_owned(), "what is in hand is not owned");
    // The bound is one: the next comes when the first counts no more, which is told to whoever handles it.
    let mut lost = held.lost();
    tokio::select! { biased;
        () = &mut lost => {}
        came = receiver.next() => return Err(TestFailure::new(format!("{} came beside one in hand", came?.label))),
    }
    let limit = t.pace().long;
    ensure!(watch.elapsed() >= limit, "it counted no more after {:?}, before {limit:?}", watch.elapsed());
    ensure!(!held.is_owned(), "it is still owned");
    let next = receiver.next().await?;
    ensure_eq!(next.label, "next", "what comes after a time-out");
    ensure_eq!(held.ack().await, Settled::Untracked, "an ack after max_processing");
    // A settlement that came too late gives no room a second time.
    sender.send("last").await?;
    receiver.stays_quiet_for(limit / 4).await?;
    ensure!(next.is_owned(), "a late settlement of another took it away");
    next.ack().await;
    let last = receiver.next().await?;
    ensure_eq!((last.label.as_str(), last.attempt()), ("last", 1), "what comes last, and nothing twice");
    last.ack().await;
    receiver.stays_quiet().await
}

async fn p4_6_timeouts_end_in_the_dead_letters(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "a", hurried(&t)).await?;
    sender.send("m").await?;
    for attempt in 1..=3 {
        let held = member.next().await?;
        ensure_eq!(held.attempt(), attempt, "attempt");
        t.within("the token fires", t.pace().patience, held.lost()).await?;
        held.forget();
    }
    member.stays_quiet().await?;
    let letters = t.dead_letters(&c, GROUP, 1).await?;
    let envelope = Envelope::read(&letters[0].headers);
    ensure_eq!(envelope.map(|e| e.reason), Some(Reason::Timeout), "reason");
    t.all_settled(&c, GROUP).await
}

async fn p4_6_lost_ownership_fires_the_token(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut first = t.member_with(&c, "a", t.sub().max_in_flight(1)).await?;
    sender.send("m").await?;
    let old = first.next().await?;
    let mut lost = old.lost();
    ensure!(tokio::time::timeout(t.pace().lease * 2, &mut lost).await.is_err(), "the token of an owned delivery fires");
    let mut second = t.member(&d, "b").await?;
    t.freeze(&c, true).await?;
    let new = second.next().await?;
    t.freeze(&c, false).await?;
    t.within("the token fires", t.pace().patience, lost).await?;
    ensure!(!old.is_owned(), "the delivery is still owned after its token fired");
    old.forget();
    first.close().await;
    new.ack_ok().await?;
    second.stays_quiet().await?;
    t.all_settled(&d, GROUP).await
}

async fn p4_7_a_dead_members_deliveries_reach_another_in_time(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut first = t.member(&c, "a").await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    let held = first.take(5).await?;
    let mut second = t.member(&d, "b").await?;
    t.crash(&c).await?;
    let bound = d.broker.capabilities().takeover_bound(t.pace().lease);
    let watch = Stopwatch::start();
    drop(held);
    drop(first);
    while t.ledger().of(GROUP).len() < labels.len() + 5 {
        second.next().await?.ack_ok().await?;
    }
    ensure!(watch.elapsed() <= bound, "taken over after {:?}, stated are {bound:?}", watch.elapsed());
    second.stays_quiet().await?;
    t.ledger().between(GROUP, &labels, 2)?;
    t.all_settled(&d, GROUP).await
}

async fn p4_7_and_not_before_its_lease_ran_out(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut first = t.member_with(&c, "a", t.sub().max_in_flight(1)).await?;
    sender.send("m").await?;
    let held = first.next().await?;
    let mut second = t.member(&d, "b").await?;
    // A short silence is no death: the broker cannot know, and must not hand it to two. Where no lease but a heartbeat tells
    // of a death, its bound may be shorter than a lease.
    let bound = c.broker.capabilities().takeover_bound(t.pace().lease);
    t.freeze(&c, true).await?;
    second.stays_quiet_for(t.pace().lease.min(bound) / 3).await?;
    t.freeze(&c, false).await?;
    second.stays_quiet_for(t.pace().lease * 2).await?;
    ensure!(held.is_owned(), "a short silence cost the delivery its owner");
    held.ack_ok().await?;
    second.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, ["m"])
}
