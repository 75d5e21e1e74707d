//! Section 8: numbers, looking and tidying.

use crate::case::cases;
use crate::{Check, Doing, Fired, GROUP, Test, TestFailure, ensure, ensure_eq};
use mq_api::{Count, ErrorKind, Feature, Group, Message, Start, TopicSpec};

cases! {
    "8.1" p8_1_the_backlog_is_never_wrong needs [Groups Settlement Retry Delay DeadLetters Backlog] bugs [BacklogOff];
    "8.1" p8_1_ready_is_due_and_in_nobodys_hands needs [Groups Settlement Backlog] bugs [BacklogOff];
    "8.1" p8_1_every_group_has_its_own needs [Groups Settlement Backlog] bugs [GroupsMixed];
    "8.2" p8_2_groups_and_members_are_listed needs [Groups Settlement] bugs [ListsNothing] one;
    "8.2" p8_2_pending_deliveries_are_listed needs [Groups Settlement] bugs [ListsNothing] one;
    "8.2" p8_2_topics_are_made_found_and_deleted needs [Groups Settlement] bugs [DeletesNothing] one;
    "8.2" p8_2_groups_are_made_and_deleted needs [Groups Settlement] bugs [DeletesNothing] one;
    "8.2" p8_2_a_group_is_reset needs [Groups Settlement] bugs [ResetsNothing] one;
    "8.2" p8_2_an_idle_group_is_reported needs [Groups Settlement] bugs [ListsNothing] one;
    "8.3" p8_3_the_hooks_fire needs [] bugs [HooksSilent] one;
    "8.3" p8_3_trace_context_passes_through needs [] bugs [HeaderLost] one;
}

async fn p8_1_the_backlog_is_never_wrong(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "a", t.sub().max_in_flight(4)).await?;
    let n = 10_u64;
    sender.send_numbered(n as usize).await?;
    let mut held = member.take(4).await?;
    let at = |what: &str, b: mq_api::Backlog, ready: u64, in_flight: u64, delayed: u64, dead: u64| {
        let right =
            b.ready.admits(ready) && b.in_flight.admits(in_flight) && b.delayed.admits(delayed) && b.dead.admits(dead);
        ensure!(right, "{what}: {b:?}, right are ready {ready}, in flight {in_flight}, delayed {delayed}, dead {dead}");
        Ok::<(), TestFailure>(())
    };
    let admin = c.broker.admin();
    let (topic, group) = (t.topic(), Group::new(GROUP));
    at("four in hand", admin.backlog(&topic, &group).await?, 6, 4, 0, 0)?;
    // Paused, so that what is settled does not let the next one in.
    member.control().pause();
    let mut take = || held.pop().ok_or_else(|| TestFailure::new("nothing in hand"));
    take()?.ack_ok().await?;
    at("one acked", admin.backlog(&topic, &group).await?, 6, 3, 0, 0)?;
    take()?.nack_after(t.pace().long * 6, "later").await;
    at("one delayed", admin.backlog(&topic, &group).await?, 6, 2, 1, 0)?;
    take()?.dead_letter("bad").await;
    at("one dead", admin.backlog(&topic, &group).await?, 6, 1, 1, 1)?;
    take()?.release().await;
    at("one released", admin.backlog(&topic, &group).await?, 7, 0, 1, 1)?;
    member.control().resume();
    for _ in 0..7 {
        member.next().await?.ack_ok().await?;
    }
    at("all but the delayed", admin.backlog(&topic, &group).await?, 0, 0, 1, 1)?;
    t.elapse(t.pace().latest(t.pace().long * 6)).await;
    member.next().await?.ack_ok().await?;
    at("all", admin.backlog(&topic, &group).await?, 0, 0, 0, 1)
}

async fn p8_1_ready_is_due_and_in_nobodys_hands(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let n = t.pace().some as u64;
    sender.send_numbered(t.pace().some).await?;
    let (admin, topic, group) = (c.broker.admin(), t.topic(), Group::new(GROUP));
    let before = admin.backlog(&topic, &group).await?;
    ensure!(before.ready.admits(n) && before.ready != Count::Unknown, "{before:?} with {n} waiting and no member");
    ensure!(before.in_flight.admits(0) && before.dead.admits(0), "{before:?} without any member");
    let mut member = t.member(&c, "a").await?;
    member.ack_next(t.pace().some).await?;
    t.all_settled(&c, GROUP).await
}

async fn p8_1_every_group_has_its_own(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender_with(&c, t.spec_to(t.topic()).group("one").group("two")).await?;
    sender.send_numbered(3).await?;
    let mut one = t.member_with(&c, "a", t.sub_to(t.topic(), "one")).await?;
    one.ack_next(3).await?;
    let (admin, topic) = (c.broker.admin(), t.topic());
    t.all_settled(&c, "one").await?;
    let two = admin.backlog(&topic, &Group::new("two")).await?;
    ensure!(two.ready.admits(3), "{two:?} for a group that handled none of three");
    let none = admin.backlog(&topic, &Group::new("nobody")).await;
    let kind = none.err().map(|e| e.kind());
    ensure_eq!(kind, Some(ErrorKind::NotFound), "backlog of a group that does not exist");
    Ok(())
}

/// Where the broker cannot, the call says so; that is a stated value, not a failure.
async fn where_it_can<T>(
    t: &Test,
    feature: Feature,
    call: impl Future<Output = mq_api::Result<T>>,
) -> Check<Option<T>> {
    let has = t.has(feature).await?;
    match (has, call.await) {
        (true, answer) => Ok(Some(answer.doing(feature)?)),
        (false, Ok(_)) => Err(TestFailure::new(format!("{feature} is missing and answered"))),
        (false, Err(e)) => {
            ensure_eq!(e.kind(), ErrorKind::Unsupported, "{feature}: {e}");
            ensure!(e.to_string().contains(feature.as_str()), "'{e}' does not name {feature}");
            Ok(None)
        }
    }
}

async fn p8_2_groups_and_members_are_listed(t: Test) -> Check {
    let c = t.connect().await?;
    let _sender = t.sender_with(&c, t.spec_to(t.topic()).group("one").group("two")).await?;
    let member = t.member_with(&c, "the-member", t.sub_to(t.topic(), "one")).await?;
    member.becomes(mq_api::HealthState::Running).await?;
    let (admin, topic) = (c.broker.admin(), t.topic());
    let Some(groups) = where_it_can(&t, Feature::Inspect, admin.groups(&topic)).await? else { return Ok(()) };
    let mut names: Vec<_> = groups.iter().map(|g| g.group.as_str()).collect();
    names.sort_unstable();
    ensure_eq!(names, ["one", "two"], "groups");
    for info in &groups {
        let wanted = if info.group.as_str() == "one" { 1 } else { 0 };
        ensure_eq!(info.members.len(), wanted, "members of {:?}: {:?}", info.group, info.members);
    }
    let listed = groups.iter().flat_map(|g| &g.members).any(|m| m.contains("the-member"));
    ensure!(listed, "the member is not listed by its name");
    Ok(())
}

async fn p8_2_pending_deliveries_are_listed(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "the-member", t.sub().max_in_flight(3)).await?;
    sender.send_numbered(5).await?;
    let held = member.take(3).await?;
    t.elapse(t.pace().retry).await;
    let (admin, topic, group) = (c.broker.admin(), t.topic(), Group::new(GROUP));
    let Some(pending) = where_it_can(&t, Feature::Inspect, admin.pending(&topic, &group, 10)).await? else {
        return Ok(());
    };
    ensure_eq!(pending.len(), 3, "pending deliveries");
    for (one, got) in pending.iter().zip(&held) {
        ensure_eq!(one.position, got.position(), "position, oldest first");
        ensure!(one.owner.as_deref().is_some_and(|o| o.contains("the-member")), "owner {:?}", one.owner);
        ensure_eq!(one.takes, 1, "takes");
    }
    ensure_eq!(admin.pending(&topic, &group, 2).await?.len(), 2, "pending deliveries, two asked for");
    for got in held {
        got.ack_ok().await?;
    }
    member.ack_next(2).await?;
    ensure_eq!(admin.pending(&topic, &group, 10).await?.len(), 0, "pending deliveries after all were acked");
    Ok(())
}

async fn p8_2_topics_are_made_found_and_deleted(t: Test) -> Check {
    let c = t.connect().await?;
    let (admin, topic) = (c.broker.admin(), t.topic());
    let spec = TopicSpec::new(topic.clone()).partitions(1).group(GROUP);
    if where_it_can(&t, Feature::Provision, admin.create_topic(spec.clone())).await?.is_none() {
        return Ok(());
    }
    admin.create_topic(spec).await.doing("making the same topic twice")?;
    let sender = t.sender_with(&c, t.spec_to(topic.clone()).provisioning(mq_api::Provisioning::Verify)).await?;
    sender.send("m").await?;
    let info = admin.topic(&topic).await?;
    let Some(info) = info else { return Err(TestFailure::new("a topic that was made is not found")) };
    ensure_eq!((&info.topic, info.partitions), (&topic, 1), "what is found");
    ensure!(info.messages.is_none_or(|n| n == 1), "messages: {:?}", info.messages);
    sender.producer().close(t.pace().drain).await;
    ensure!(admin.delete_topic(&topic).await?, "the topic was not there to delete");
    ensure!(admin.topic(&topic).await?.is_none(), "a deleted topic is found");
    ensure!(!admin.delete_topic(&topic).await?, "a topic was deleted twice");
    Ok(())
}

async fn p8_2_groups_are_made_and_deleted(t: Test) -> Check {
    let c = t.connect().await?;
    let (admin, topic, group) = (c.broker.admin(), t.topic(), Group::new("made"));
    let sender = t.sender(&c).await?;
    let made = admin.create_group(&topic, &group, Start::Oldest);
    if where_it_can(&t, Feature::Provision, made).await?.is_none() {
        return Ok(());
    }
    sender.send("m").await?;
    // There already: its position stays.
    admin.create_group(&topic, &group, Start::Latest).await?;
    let mut member = t.member_with(&c, "a", t.sub_to(topic.clone(), "made")).await?;
    member.ack_next(1).await?;
    member.close().await;
    ensure!(admin.delete_group(&topic, &group).await?, "the group was not there to delete");
    ensure!(!admin.delete_group(&topic, &group).await?, "a group was deleted twice");
    Ok(())
}

async fn p8_2_a_group_is_reset(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let labels = sender.send_numbered(4).await?;
    let mut member = t.member(&c, "a").await?;
    member.ack_next(4).await?;
    member.close().await;
    let (admin, topic, group) = (c.broker.admin(), t.topic(), Group::new(GROUP));
    if where_it_can(&t, Feature::Reset, admin.reset_group(&topic, &group, Start::Oldest)).await?.is_none() {
        return Ok(());
    }
    let replay = t.has(Feature::Replay).await?;
    let mut member = t.member(&c, "b").await?;
    let again = member.ack_until_quiet().await?;
    member.close().await;
    ensure!(!replay || again == labels.len(), "{again} of {} came again after a reset to the oldest", labels.len());
    sender.send("skipped").await?;
    admin.reset_group(&topic, &group, Start::Latest).await?;
    let mut member = t.member(&c, "c").await?;
    member.stays_quiet().await?;
    sender.send("after").await?;
    let got = member.next().await?;
    ensure_eq!(got.label, "after", "what comes after a reset to the latest");
    got.ack_ok().await
}

async fn p8_2_an_idle_group_is_reported(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    sender.send("pinned").await?;
    let member = t.member(&c, "a").await?;
    member.close().await;
    t.elapse(t.pace().long).await;
    let (admin, topic) = (c.broker.admin(), t.topic());
    let Some(groups) = where_it_can(&t, Feature::Inspect, admin.groups(&topic)).await? else { return Ok(()) };
    let Some(info) = groups.iter().find(|g| g.group.as_str() == GROUP) else {
        return Err(TestFailure::new("an idle group is not listed"));
    };
    ensure!(info.members.is_empty(), "members that left are listed: {:?}", info.members);
    ensure!(info.backlog.ready.admits(1), "{:?} with one waiting", info.backlog);
    if let Some(idle) = info.idle {
        ensure!(idle >= t.pace().long / 2, "a group that nobody fetched for long is idle since {idle:?}");
    }
    Ok(())
}

async fn p8_3_the_hooks_fire(t: Test) -> Check {
    let c = t.connect().await?;
    let before = t.hook(t.env().fired())?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let n = 7;
    sender.send_numbered(n).await?;
    member.ack_next(n).await?;
    let now = t.hook(t.env().fired())?;
    let more = Fired {
        sent: now.sent - before.sent,
        delivered: now.delivered - before.delivered,
        acked: now.acked - before.acked,
    };
    let wanted = Fired { sent: 7, delivered: 7, acked: if t.grouped() { 7 } else { 0 } };
    ensure_eq!(more, wanted, "hooks that fired for {n} messages");
    Ok(())
}

async fn p8_3_trace_context_passes_through(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let message = Message::new("m").header("traceparent", parent).header("tracestate", "vendor=1");
    sender.send_message(message).await?;
    let got = member.next().await?;
    ensure_eq!(got.headers.get_str("traceparent"), Some(parent), "traceparent");
    ensure_eq!(got.headers.get_str("tracestate"), Some("vendor=1"), "tracestate");
    got.ack_ok().await
}
