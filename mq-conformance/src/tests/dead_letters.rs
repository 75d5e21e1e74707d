//! Section 5: dead letters and the way back.

use crate::case::cases;
use crate::{Check, Connection, GROUP, Test, TestFailure, ensure, ensure_eq};
use mq_api::{
    BrokerExt, DeadLetterPolicy, Envelope, ErrorKind, Failure, Feature, Group, HealthState, Message, Provisioning,
    Reason, RetryPolicy, Topic,
};
use std::time::Duration;

cases! {
    "5.1" p5_1_the_envelope_tells_what_happened needs [Groups Settlement DeadLetters] bugs [EnvelopeLacks];
    "5.1" p5_1_a_dead_letter_is_the_same_message needs [Groups Settlement DeadLetters] bugs [HeadersReversed IdReplaced];
    "5.1" p5_1_each_group_has_its_own needs [Groups Settlement DeadLetters] bugs [GroupsMixed];
    "5.1" p5_1_dead_letters_have_no_dead_letters needs [Groups Settlement DeadLetters Delay] bugs [NackIsAck] one;
    "5.1" p5_1_the_error_chain_is_cut_to_a_bound needs [Groups Settlement DeadLetters] bugs [EnvelopeLacks] one;
    "5.1" p5_1_a_missing_target_is_found_at_subscribe needs [Groups Settlement DeadLetters] bugs [ProvisioningIgnored] one;
    "5.1" p5_1_off_may_mean_for_ever needs [Groups Settlement Retry] bugs [PolicyIgnored];
    "5.1" p5_1_off_may_mean_discard needs [Groups Settlement Retry] bugs [PolicyIgnored];
    "5.2" p5_2_if_the_write_fails_the_original_stays needs [Groups Settlement DeadLetters] bugs [DeadLetterIsAck] one;
}

/// Sends `n` messages and dead-letters them all, as `bad0`, `bad1`, …
pub(super) async fn fail(t: &Test, on: &Connection, n: usize) -> Check<Vec<String>> {
    let sender = t.sender(on).await?;
    let mut member = t.member(on, "failing").await?;
    let labels: Vec<String> = (0..n).map(|i| format!("bad{i}")).collect();
    for label in &labels {
        sender.send_keyed("k", label).await?;
    }
    for _ in 0..n {
        let settled = member.next().await?.dead_letter("on purpose").await;
        ensure!(settled.is_ok(), "dead-lettering gave {settled:?}");
    }
    member.close().await;
    Ok(labels)
}

async fn p5_1_the_envelope_tells_what_happened(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "the-member").await?;
    sender.send_keyed("k", "bad").await?;
    let got = member.next().await?;
    let (partition, position) = (got.partition(), got.position());
    got.nack("first").await;
    member.next().await?.nack(Failure::permanent("second")).await;
    let letters = t.dead_letters(&c, GROUP, 1).await?;
    let Some(e) = Envelope::read(&letters[0].headers) else { return Err(TestFailure::new("no envelope")) };
    ensure_eq!((&*e.topic, &*e.group), (t.topic().as_str(), GROUP), "source");
    ensure_eq!(e.partition, partition, "source partition");
    if c.broker.capabilities().receipt_positions {
        ensure_eq!(e.position, Some(position), "source position");
    }
    ensure_eq!((e.attempts, e.reason), (2, Reason::Permanent), "attempts and reason");
    ensure!(e.error.as_deref().is_some_and(|x| x.contains("second")), "error {:?}", e.error);
    ensure!(e.consumer.as_deref().is_some_and(|x| x.contains("the-member")), "consumer {:?}", e.consumer);
    ensure_eq!(e.redrives, 0, "redrives");
    let Some(failed) = e.failed_at else { return Err(TestFailure::new("no failed_at")) };
    if let Some(first) = e.first_seen {
        let waited = failed.duration_since(first).unwrap_or_default();
        ensure!(waited + Duration::from_millis(50) >= t.pace().retry, "first seen {waited:?} before it failed");
    }
    Ok(())
}

async fn p5_1_a_dead_letter_is_the_same_message(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let sent = Message::new("bad").key("k").header("b", "1").header("a", "2").header("b", "3").content_type("text/x");
    sender.send_message(sent.clone()).await?;
    member.next().await?.dead_letter("bad").await;
    let letters = t.dead_letters(&c, GROUP, 1).await?;
    let mut headers = letters[0].headers.clone();
    Envelope::strip(&mut headers);
    ensure_eq!(letters[0].id, sent.id, "id");
    ensure_eq!(letters[0].key, sent.key, "key");
    ensure_eq!(letters[0].payload, sent.payload, "payload");
    ensure_eq!(letters[0].content_type, sent.content_type, "content type");
    let list = |h: &mq_api::Headers| h.iter().map(|(n, v)| (n.to_owned(), v.to_vec())).collect::<Vec<_>>();
    ensure_eq!(list(&headers), list(&sent.headers), "headers beside the envelope");
    Ok(())
}

async fn p5_1_each_group_has_its_own(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender_with(&c, t.spec_to(t.topic()).group("one").group("two")).await?;
    let mut one = t.member_with(&c, "a", t.sub_to(t.topic(), "one")).await?;
    let mut two = t.member_with(&c, "b", t.sub_to(t.topic(), "two")).await?;
    sender.send("m").await?;
    one.next().await?.dead_letter("bad for one").await;
    two.ack_next(1).await?;
    t.dead_letters(&c, "one", 1).await?;
    t.dead_letters(&c, "two", 0).await?;
    one.stays_quiet().await?;
    two.stays_quiet().await
}

async fn p5_1_dead_letters_have_no_dead_letters(t: Test) -> Check {
    let c = t.connect().await?;
    fail(&t, &c, 1).await?;
    let letters = Topic::dead_letters(t.topic(), GROUP);
    let refused = c.broker.subscribe(t.sub_to(letters.clone(), "x").dead_letter(DeadLetterPolicy::On)).await.err();
    ensure_eq!(refused.map(|e| e.kind()), Some(ErrorKind::Config), "dead letters of dead letters");
    let mut reader = t.member_with(&c, "reader", t.sub_to(letters, "readers")).await?;
    // Past every limit of the policy it is still there.
    for round in 0..5 {
        let got = reader.next().await?;
        ensure_eq!(got.label, "bad0", "round {round}");
        got.nack("still bad").await;
    }
    reader.ack_next(1).await
}

async fn p5_1_the_error_chain_is_cut_to_a_bound(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("bad").await?;
    let inner = mq_api::Error::new(ErrorKind::Other, "the cause");
    let outer = mq_api::Error::new(ErrorKind::Other, "x".repeat(20_000)).with_source(inner);
    let failure = Failure::permanent(outer);
    member.next().await?.nack(failure).await;
    let letters = t.dead_letters(&c, GROUP, 1).await?;
    let error = Envelope::read(&letters[0].headers).and_then(|e| e.error).unwrap_or_default();
    ensure!(error.starts_with("xxxx") && error.len() <= 2_048, "an error of {} bytes", error.len());
    Ok(())
}

async fn p5_1_a_missing_target_is_found_at_subscribe(t: Test) -> Check {
    let c = t.connect().await?;
    // The topic and the group exist, the dead-letter topic does not.
    let sender = t.sender(&c).await?;
    let without = t.sub().dead_letter(DeadLetterPolicy::Forever);
    t.member_with(&c, "a", without).await?.close().await;
    sender.send("m").await?;
    let Some(e) = c.broker.subscribe(t.sub().provisioning(Provisioning::Verify)).await.err() else {
        return Err(TestFailure::new("a missing dead-letter topic was not noticed"));
    };
    ensure_eq!(e.kind(), ErrorKind::Topology, "{e}");
    let name = Topic::dead_letters(t.topic(), GROUP);
    ensure!(e.to_string().contains(GROUP), "'{e}' does not name {name}");
    Ok(())
}

async fn p5_1_off_may_mean_for_ever(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let policy = RetryPolicy::attempts(2).delays([Duration::ZERO]);
    let sub = t.sub().retry(policy).dead_letter(DeadLetterPolicy::Forever);
    let mut member = t.member_with(&c, "a", sub).await?;
    sender.send("m").await?;
    for attempt in 1..=6 {
        let got = member.next().await?;
        ensure_eq!(got.attempt(), attempt, "attempt");
        got.nack("again").await;
    }
    member.ack_next(1).await?;
    t.all_settled(&c, GROUP).await
}

async fn p5_1_off_may_mean_discard(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let policy = RetryPolicy::attempts(2).delays([Duration::ZERO]);
    let sub = t.sub().retry(policy).dead_letter(DeadLetterPolicy::Discard);
    let mut member = t.member_with(&c, "a", sub).await?;
    sender.send("bad").await?;
    sender.send("good").await?;
    while let Some(got) = member.next_within(t.pace().quiet).await? {
        match got.label.as_str() {
            "bad" => drop(got.nack("again").await),
            _ => got.ack_ok().await?,
        }
    }
    ensure_eq!(t.ledger().attempts(GROUP, "bad"), [1, 2], "attempts before it is discarded");
    t.all_settled(&c, GROUP).await?;
    if c.broker.capabilities().has(Feature::Backlog) {
        let backlog = c.broker.admin().backlog(&t.topic(), &Group::new(GROUP)).await?;
        ensure!(backlog.dead.admits(0), "a discarded message is among the dead letters: {backlog:?}");
    }
    Ok(())
}

async fn p5_2_if_the_write_fails_the_original_stays(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("bad").await?;
    let got = member.next().await?;
    let refuse = t.env().refuse_dead_letters(&t.topic(), GROUP, true).await;
    t.hook(refuse)?;
    drop(got.into_delivery().dead_letter("bad"));
    member.becomes(HealthState::Degraded).await?;
    ensure!(!member.control().health().current().reason.is_empty(), "degraded without a reason");
    // The others flow meanwhile, and the original is neither gone nor handed out again.
    sender.send("good").await?;
    member.ack_next(1).await?;
    member.stays_quiet_for(t.pace().long).await?;
    let backlog = c.broker.admin().backlog(&t.topic(), &Group::new(GROUP)).await?;
    let held = backlog.in_flight.exact().unwrap_or(1) + backlog.delayed.exact().unwrap_or(0);
    ensure!(held >= 1 && backlog.dead.admits(0), "the original is not there any more: {backlog:?}");
    let refuse = t.env().refuse_dead_letters(&t.topic(), GROUP, false).await;
    t.hook(refuse)?;
    member.becomes(HealthState::Running).await?;
    t.all_settled(&c, GROUP).await?;
    t.dead_letters(&c, GROUP, 1).await?;
    Ok(())
}
