//! Section 3: where a group starts to read.

use crate::case::cases;
use crate::{Check, GROUP, Member, Test, TestFailure, ensure_eq};
use mq_api::{ReplayFrom, Start};

cases! {
    "3.3" p3_3_by_default_a_group_gets_the_oldest needs [Groups Settlement] bugs [StartIgnored];
    "3.3" p3_3_latest_gets_what_is_sent_from_now_on needs [Groups Settlement] bugs [LatestIsOldest];
    "3.3" p3_3_replay_from_the_earliest needs [Groups Settlement Replay] bugs [ReplayIgnored];
    "3.3" p3_3_replay_from_a_time needs [Groups Settlement Replay] bugs [ReplayIgnored];
    "3.3" p3_3_replay_from_a_position needs [Groups Settlement Replay] bugs [ReplayIgnored] one;
    "3.3" p3_3_start_applies_at_creation_only needs [Groups Settlement] bugs [AckLost];
    "3.3" p3_3_a_send_right_after_subscribe_is_seen needs [Groups Settlement] bugs [FirstMissed];
    "3.3" p3_3_a_producer_provisions_its_groups needs [Groups Settlement] bugs [GroupsNotMade];
}

async fn p3_3_by_default_a_group_gets_the_oldest(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    let mut member = t.member(&c, "a").await?;
    member.ack_next(labels.len()).await?;
    member.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, &labels)
}

async fn p3_3_latest_gets_what_is_sent_from_now_on(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    sender.send("before").await?;
    let mut member = t.member_with(&c, "a", t.sub_to(t.topic(), "late").start(Start::Latest)).await?;
    for n in 0..t.pace().some {
        sender.send_keyed(&format!("k{n}"), &format!("m{n}")).await?;
    }
    member.ack_next(t.pace().some).await?;
    member.stays_quiet().await?;
    t.ledger().exactly_once("late", (0..t.pace().some).map(|n| format!("m{n}")))
}

/// A topic with `n` handled messages: something to replay.
async fn handled(t: &Test, c: &crate::Connection, n: usize) -> Check {
    let mut member = t.member(c, "before").await?;
    member.ack_next(n).await?;
    member.close().await;
    Ok(())
}

async fn replayed(t: &Test, c: &crate::Connection, from: ReplayFrom) -> Check<Member> {
    t.member_with(c, "replayer", t.sub_to(t.topic(), "replay").start(Start::Replay(from))).await
}

async fn p3_3_replay_from_the_earliest(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    handled(&t, &c, labels.len()).await?;
    let mut member = replayed(&t, &c, ReplayFrom::Earliest).await?;
    member.ack_next(labels.len()).await?;
    member.stays_quiet().await?;
    t.ledger().exactly_once("replay", &labels)
}

async fn p3_3_replay_from_a_time(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut mark = t.member_with(&c, "mark", t.sub_to(t.topic(), "mark").start(Start::Latest)).await?;
    for n in 0..5 {
        sender.send(&format!("old{n}")).await?;
    }
    mark.ack_next(5).await?;
    t.elapse(t.pace().long).await;
    sender.send("mark").await?;
    let got = mark.next().await?;
    let Some(at) = got.timestamp else { return Err(TestFailure::new("a delivery without timestamp")) };
    got.ack().await;
    mark.close().await;
    for n in 0..5 {
        sender.send(&format!("new{n}")).await?;
    }
    // Half the pause before the mark: clocks of client and broker need not agree to the millisecond.
    let mut member = replayed(&t, &c, ReplayFrom::Time(at - t.pace().long / 2)).await?;
    member.ack_next(6).await?;
    member.stays_quiet().await?;
    t.ledger().exactly_once("replay", ["mark", "new0", "new1", "new2", "new3", "new4"])
}

async fn p3_3_replay_from_a_position(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut at = None;
    for n in 0..10 {
        let receipt = sender.send_keyed("k", &format!("m{n}")).await?;
        if n == 6 {
            at = receipt.position;
        }
    }
    let Some(at) = at else { return Err(TestFailure::new("a broker with replay gives no position in its receipts")) };
    let mut member = replayed(&t, &c, ReplayFrom::Position(at)).await?;
    member.ack_next(4).await?;
    member.stays_quiet().await?;
    ensure_eq!(t.ledger().labels("replay"), ["m6", "m7", "m8", "m9"], "what is replayed from position {at}");
    Ok(())
}

async fn p3_3_start_applies_at_creation_only(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("one").await?;
    sender.send("two").await?;
    member.ack_next(1).await?;
    member.next().await?.release().await;
    member.close().await;
    // `Latest` would skip what is left, `Oldest` would repeat what was acknowledged; an existing group goes on where it was.
    let mut member = t.member_with(&c, "b", t.sub().start(Start::Latest)).await?;
    member.ack_next(1).await?;
    member.stays_quiet().await?;
    member.close().await;
    let mut member = t.member(&c, "c").await?;
    member.stays_quiet().await?;
    let counts = t.ledger().counts(GROUP);
    ensure_eq!(counts.values().sum::<usize>(), 3, "hand-overs in all: {counts:?}");
    t.all_settled(&c, GROUP).await
}

async fn p3_3_a_send_right_after_subscribe_is_seen(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    for round in 0..5 {
        let group = format!("g{round}");
        let sub = t.sub_to(t.topic(), &group).start(Start::Latest);
        let mut member = t.member_with(&c, &group, sub).await?;
        let label = format!("m{round}");
        sender.send(&label).await?;
        let got = member.next().await?;
        ensure_eq!(got.label, label, "the first message of {group}");
        got.ack_ok().await?;
        member.close().await;
    }
    Ok(())
}

async fn p3_3_a_producer_provisions_its_groups(t: Test) -> Check {
    let c = t.connect().await?;
    let spec = t.spec_to(t.topic()).group("early").group("bird");
    let sender = t.sender_with(&c, spec).await?;
    let labels = sender.send_numbered(5).await?;
    for group in ["early", "bird"] {
        // Were the group made only now, `Latest` would skip what was sent before.
        let sub = t.sub_to(t.topic(), group).start(Start::Latest);
        let mut member = t.member_with(&c, group, sub).await?;
        member.ack_next(labels.len()).await?;
        member.stays_quiet().await?;
        t.ledger().exactly_once(group, &labels)?;
        member.close().await;
    }
    Ok(())
}
