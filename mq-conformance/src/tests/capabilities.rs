//! Each capability twice: what is stated works, and what is missing is refused by name.
//!
//! The first halves are in the sections that the promises belong to; here is the shortest program for each feature, so
//! that a capability which is stated and does nothing is found at once.

use crate::case::cases;
use crate::{Check, GROUP, Test, TestFailure, ensure, ensure_eq, refusal};
use mq_api::{Feature, Group, Ordering, RedriveOptions, ReplayFrom, Start, Subscription, TopicSpec};
use std::time::Duration;

cases! {
    "capabilities" cap_groups_work needs [Groups] bugs [GroupsMixed] one;
    "capabilities" cap_broadcast_works needs [Broadcast] bugs [BroadcastLoses] one;
    "capabilities" cap_settlement_works needs [Groups Settlement] bugs [AckLost] one;
    "capabilities" cap_retry_works needs [Groups Settlement Retry] bugs [NackIsAck] one;
    "capabilities" cap_delay_works needs [Groups Settlement Retry Delay] bugs [DelayIgnored] one;
    "capabilities" cap_dead_letters_work needs [Groups Settlement DeadLetters] bugs [DeadLetterIsAck] one;
    "capabilities" cap_redrive_works needs [Groups Settlement DeadLetters Redrive] bugs [RedriveDiscards] one;
    "capabilities" cap_peek_works_where_stated needs [Groups Settlement DeadLetters] bugs [PeekEmpty] one;
    "capabilities" cap_replay_works needs [Groups Settlement Replay] bugs [ReplayIgnored] one;
    "capabilities" cap_partitions_work needs [Groups Settlement Partitions] bugs [PartitionsUnmade] one;
    "capabilities" cap_per_key_works needs [Groups Settlement PerKey] bugs [PerKeyIgnored] one;
    "capabilities" cap_backlog_works needs [Groups Settlement Backlog] bugs [BacklogOff] one;
    "capabilities" cap_inspect_works_where_stated needs [Groups Settlement] bugs [ListsNothing] one;
    "capabilities" cap_provision_works_where_stated needs [] bugs [ProvisionsNothing] one;
    "capabilities" cap_reset_works_where_stated needs [Groups Settlement] bugs [ResetsNothing] one;
    "capabilities" cap_levels_are_the_receipts needs [] bugs [LevelInflated] one;
    "capabilities" cap_without_groups_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_broadcast_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_settlement_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_retry_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_delay_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_dead_letters_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_redrive_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_peek_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_replay_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_partitions_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_per_key_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_backlog_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_inspect_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_provision_refused needs [] bugs [RefusesNothing] one;
    "capabilities" cap_without_reset_refused needs [] bugs [RefusesNothing] one;
}

async fn cap_groups_work(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender_with(&c, t.spec_to(t.topic()).group("one").group("two")).await?;
    sender.send("m").await?;
    for group in ["one", "two"] {
        let mut member = t.member_with(&c, group, t.sub_to(t.topic(), group)).await?;
        member.next().await?.ack().await;
        ensure_eq!(t.ledger().labels(group), ["m"], "what {group} got");
    }
    Ok(())
}

async fn cap_broadcast_works(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender_with(&c, t.spec_to(t.topic())).await?;
    let mut receiver = t.member_with(&c, "r", Subscription::broadcast(t.topic())).await?;
    sender.send("m").await?;
    let got = receiver.next().await?;
    ensure_eq!(got.label, "m", "what came");
    Ok(())
}

async fn cap_settlement_works(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("m").await?;
    member.ack_next(1).await?;
    member.close().await;
    let mut member = t.member(&c, "b").await?;
    member.stays_quiet().await
}

async fn cap_retry_works(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("m").await?;
    member.next().await?.nack("again").await;
    let got = member.next().await?;
    ensure_eq!(got.attempt(), 2, "attempt");
    got.ack_ok().await
}

async fn cap_delay_works(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("m").await?;
    member.next().await?.nack_after(t.pace().long, "later").await;
    member.stays_quiet_for(t.pace().long * 9 / 10).await?;
    member.ack_next(1).await
}

async fn cap_dead_letters_work(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("m").await?;
    member.next().await?.dead_letter("bad").await;
    t.dead_letters(&c, GROUP, 1).await?;
    Ok(())
}

async fn cap_redrive_works(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("m").await?;
    member.next().await?.dead_letter("bad").await;
    let (topic, group) = (t.topic(), Group::new(GROUP));
    let report = c.broker.admin().redrive(&topic, &group, RedriveOptions::default()).await?;
    ensure_eq!(report.redriven, 1, "redriven");
    member.ack_next(1).await
}

async fn cap_peek_works_where_stated(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("m").await?;
    member.next().await?.dead_letter("bad").await;
    if !t.has(Feature::Peek).await? {
        return refusal::prove(&t, Feature::Peek).await;
    }
    let seen = c.broker.admin().dead_letters(&t.topic(), &Group::new(GROUP), 5).await?;
    ensure_eq!(seen.len(), 1, "dead letters, looked at");
    Ok(())
}

async fn cap_replay_works(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    sender.send("m").await?;
    let sub = t.sub_to(t.topic(), "late").start(Start::Replay(ReplayFrom::Earliest));
    let mut member = t.member_with(&c, "a", sub).await?;
    member.ack_next(1).await
}

async fn cap_partitions_work(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender_with(&c, t.spec().partitions(4)).await?;
    let mut member = t.member_with(&c, "a", t.sub().partitions(4)).await?;
    let mut seen = std::collections::BTreeSet::new();
    for n in 0..64 {
        sender.send_keyed(&format!("k{n}"), &format!("m{n}")).await?;
        let got = member.next().await?;
        seen.insert(got.partition());
        got.ack_ok().await?;
    }
    ensure_eq!(seen.len(), 4, "partitions that 64 keys fell into");
    Ok(())
}

async fn cap_per_key_works(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "a", t.sub().ordering(Ordering::PerKey)).await?;
    sender.send_keyed("k", "one").await?;
    sender.send_keyed("k", "two").await?;
    let one = member.next().await?;
    member.stays_quiet().await?;
    one.ack_ok().await?;
    member.ack_next(1).await
}

async fn cap_backlog_works(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    sender.send_numbered(3).await?;
    let backlog = c.broker.admin().backlog(&t.topic(), &Group::new(GROUP)).await?;
    ensure!(backlog.ready.admits(3) && !backlog.ready.admits(u64::MAX / 2), "{backlog:?} with three waiting");
    Ok(())
}

async fn cap_inspect_works_where_stated(t: Test) -> Check {
    if !t.has(Feature::Inspect).await? {
        return refusal::prove(&t, Feature::Inspect).await;
    }
    let c = t.connect().await?;
    let _sender = t.sender(&c).await?;
    let groups = c.broker.admin().groups(&t.topic()).await?;
    ensure_eq!(groups.len(), 1, "groups");
    Ok(())
}

async fn cap_provision_works_where_stated(t: Test) -> Check {
    if !t.has(Feature::Provision).await? {
        return refusal::prove(&t, Feature::Provision).await;
    }
    let c = t.connect().await?;
    let admin = c.broker.admin();
    admin.create_topic(TopicSpec::new(t.topic())).await?;
    ensure!(admin.topic(&t.topic()).await?.is_some(), "a topic that was made is not there");
    ensure!(admin.delete_topic(&t.topic()).await?, "the topic was not there to delete");
    Ok(())
}

async fn cap_reset_works_where_stated(t: Test) -> Check {
    if !t.has(Feature::Reset).await? {
        return refusal::prove(&t, Feature::Reset).await;
    }
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    sender.send("skipped").await?;
    c.broker.admin().reset_group(&t.topic(), &Group::new(GROUP), Start::Latest).await?;
    let mut member = t.member(&c, "a").await?;
    member.stays_quiet().await
}

async fn cap_levels_are_the_receipts(t: Test) -> Check {
    let c = t.connect().await?;
    let found = c.broker.capabilities();
    let spec = if found.has(Feature::Groups) { t.spec() } else { t.spec_to(t.topic()) };
    let receipt = t.sender_with(&c, spec).await?.send("m").await?;
    ensure_eq!(receipt.level, found.send_level, "level");
    ensure_eq!(receipt.position.is_some(), found.receipt_positions, "whether the receipt has a position");
    ensure_eq!(receipt.receivers.is_some(), found.counts_receivers, "whether the receipt counts receivers");
    let bound = found.takeover_bound(Duration::from_secs(60));
    ensure!(bound > Duration::ZERO && bound < Duration::from_secs(3600), "takeover within {bound:?}");
    Ok(())
}

/// The broker itself where it lacks the feature, else one of its kind that does.
async fn refused(t: Test, feature: Feature) -> Check {
    if !t.has(feature).await? {
        return refusal::prove(&t, feature).await;
    }
    match t.env().connect_lacking(feature).await {
        Ok(lacking) => {
            let lacking = t.adopt(lacking);
            ensure!(!lacking.broker.capabilities().has(feature), "the environment's broker without {feature} has it");
            refusal::prove_on(&t, &lacking, feature).await
        }
        Err(_) => {
            // No such broker can be made here: the check that every backend of this kind calls is what remains.
            let c = t.connect().await?;
            let without = (*c.broker.capabilities()).clone().with(feature, mq_api::Support::Unsupported("taken away"));
            match without.require(feature) {
                Err(e) if e.to_string().contains(feature.as_str()) => Ok(()),
                other => Err(TestFailure::new(format!("without {feature}: {other:?}"))),
            }
        }
    }
}

macro_rules! refusals {
    ($($name:ident $feature:ident;)*) => { $(
        async fn $name(t: Test) -> Check {
            refused(t, Feature::$feature).await
        }
    )* };
}
refusals! {
    cap_without_groups_refused Groups;
    cap_without_broadcast_refused Broadcast;
    cap_without_settlement_refused Settlement;
    cap_without_retry_refused Retry;
    cap_without_delay_refused Delay;
    cap_without_dead_letters_refused DeadLetters;
    cap_without_redrive_refused Redrive;
    cap_without_peek_refused Peek;
    cap_without_replay_refused Replay;
    cap_without_partitions_refused Partitions;
    cap_without_per_key_refused PerKey;
    cap_without_backlog_refused Backlog;
    cap_without_inspect_refused Inspect;
    cap_without_provision_refused Provision;
    cap_without_reset_refused Reset;
}
