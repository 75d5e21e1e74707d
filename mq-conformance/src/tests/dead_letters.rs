//! Section 5: dead letters and the way back.

use crate::case::cases;
use crate::{Check, Connection, Doing, GROUP, READERS, Stopwatch, Test, TestFailure, ensure, ensure_eq};
use mq_api::{
    BrokerExt, DeadLetterPolicy, Envelope, ErrorKind, Failure, Feature, Group, HealthState, Message, Provisioning,
    Reason, RedriveOptions, RedriveReport, RetryPolicy, Topic,
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
    "5.3" p5_3_redrive_goes_back_to_its_group_only needs [Groups Settlement DeadLetters Redrive] bugs [RedriveDiscards RedriveTwice];
    "5.3" p5_3_redrive_is_bounded_and_goes_on needs [Groups Settlement DeadLetters Redrive] bugs [RedriveLimitIgnored];
    "5.3" p5_3_redrive_has_a_rate needs [Groups Settlement DeadLetters Redrive] bugs [RedriveRateIgnored] one;
    "5.3" p5_3_redrive_guards_against_loops needs [Groups Settlement DeadLetters Redrive] bugs [LoopGuardOff] one;
    "5.3" p5_3_stopped_midway_it_loses_nothing needs [Groups Settlement DeadLetters Redrive] bugs [RedriveDiscards];
    "5.3" p5_3_foreign_letters_stay needs [Groups Settlement DeadLetters Redrive] bugs [ForeignRedriven] one;
    "5.3" p5_3_filter_and_dry_run_where_it_can_browse needs [Groups Settlement DeadLetters Redrive] bugs [DryRunActs FilterIgnored] one;
    "5.3" p5_3_peek_count_and_discard needs [Groups Settlement DeadLetters] bugs [DiscardKeeps PeekTakes] one;
}

/// Sends `n` messages and dead-letters them all, as `bad0`, `bad1`, …
async fn fail(t: &Test, on: &Connection, n: usize) -> Check<Vec<String>> {
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

async fn redrive(t: &Test, on: &Connection, options: RedriveOptions) -> Check<RedriveReport> {
    let work = on.broker.admin();
    let (topic, group) = (t.topic(), Group::new(GROUP));
    let report = t.within("redrive", t.pace().patience, work.redrive(&topic, &group, options)).await?;
    let report = report.doing("redrive")?;
    t.note(format_args!("redrive: {report:?}"));
    Ok(report)
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

async fn p5_3_redrive_goes_back_to_its_group_only(t: Test) -> Check {
    let c = t.connect().await?;
    let mut other = t.member_with(&c, "other", t.sub_to(t.topic(), "others")).await?;
    let labels = fail(&t, &c, 5).await?;
    other.ack_next(labels.len()).await?;
    let report = redrive(&t, &c, RedriveOptions::default()).await?;
    ensure_eq!((report.redriven, report.guarded, report.foreign), (5, 0, 0), "the report");
    let mut member = t.member(&c, "a").await?;
    for _ in &labels {
        let got = member.next().await?;
        ensure_eq!(got.attempt(), 1, "attempt of a redriven message");
        ensure_eq!(got.topic(), t.topic().as_str(), "topic of a redriven message");
        ensure!(got.envelope().is_none_or(|e| e.redrives == 1), "redrives are not counted");
        got.ack_ok().await?;
    }
    member.stays_quiet().await?;
    other.stays_quiet().await?;
    t.ledger().exactly_once("others", &labels)?;
    let report = redrive(&t, &c, RedriveOptions::default()).await?;
    ensure_eq!(report.redriven, 0, "redriven when nothing is left");
    t.all_settled(&c, GROUP).await
}

async fn p5_3_redrive_is_bounded_and_goes_on(t: Test) -> Check {
    let c = t.connect().await?;
    let labels = fail(&t, &c, 7).await?;
    let mut total = 0;
    for wanted in [3, 3, 1, 0] {
        let report = redrive(&t, &c, RedriveOptions::default().limit(3)).await?;
        ensure_eq!(report.redriven, wanted, "redriven by this call");
        total += report.redriven as usize;
    }
    let mut member = t.member(&c, "a").await?;
    member.ack_next(total).await?;
    member.stays_quiet().await?;
    for label in &labels {
        ensure_eq!(t.ledger().attempts(GROUP, label).len(), 2, "hand-overs of {label}");
    }
    Ok(())
}

async fn p5_3_redrive_has_a_rate(t: Test) -> Check {
    let c = t.connect().await?;
    fail(&t, &c, 9).await?;
    let watch = Stopwatch::start();
    let report = redrive(&t, &c, RedriveOptions::default().rate(4)).await?;
    ensure_eq!(report.redriven, 9, "redriven");
    // Nine at four a second: the ninth may go when two seconds have passed since the first.
    let least = Duration::from_millis(1_000);
    ensure!(watch.elapsed() >= least, "9 at 4 a second took {:?}", watch.elapsed());
    Ok(())
}

async fn p5_3_redrive_guards_against_loops(t: Test) -> Check {
    let c = t.connect().await?;
    fail(&t, &c, 1).await?;
    let mut member = t.member(&c, "a").await?;
    let mut rounds = 0;
    loop {
        let report = redrive(&t, &c, RedriveOptions::default()).await?;
        if report.redriven == 0 {
            ensure_eq!(report.guarded, 1, "guarded");
            break;
        }
        rounds += 1;
        ensure!(rounds < 10, "a message went round {rounds} times");
        member.next().await?.dead_letter("still bad").await;
    }
    ensure_eq!(rounds, 3, "redrives before the guard");
    let report = redrive(&t, &c, RedriveOptions::default().max_redrives(4)).await?;
    ensure_eq!(report.redriven, 1, "redriven with a higher guard");
    member.ack_next(1).await
}

async fn p5_3_stopped_midway_it_loses_nothing(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let labels = fail(&t, &c, 12).await?;
    let admin = c.broker.admin();
    let (topic, group) = (t.topic(), Group::new(GROUP));
    let slow = RedriveOptions::default().rate(2);
    let midway = tokio::time::timeout(Duration::from_secs(2), admin.redrive(&topic, &group, slow)).await;
    ensure!(midway.is_err(), "12 at 2 a second were over after two seconds");
    let rest = redrive(&t, &d, RedriveOptions::default()).await?;
    ensure!(rest.redriven < 12, "the first call redrove nothing in two seconds");
    let mut member = t.member(&d, "a").await?;
    member.ack_until_quiet().await?;
    for label in &labels {
        let n = t.ledger().attempts(GROUP, label).len();
        ensure!(
            (2..=3).contains(&n),
            "{label} was handed over {n} times: once before, once or twice after the redrive"
        );
    }
    t.dead_letters(&d, GROUP, 0).await?;
    t.all_settled(&d, GROUP).await
}

async fn p5_3_foreign_letters_stay(t: Test) -> Check {
    let c = t.connect().await?;
    fail(&t, &c, 1).await?;
    let letters = Topic::dead_letters(t.topic(), GROUP);
    let stranger = t.sender_with(&c, t.spec_to(letters).group(READERS)).await?;
    stranger.send("no envelope").await?;
    let envelope = Envelope::new("another-topic", "another-group", Reason::Permanent, 1);
    stranger.send_message(envelope.dead_letter(&Message::new("lost"))).await?;
    let report = redrive(&t, &c, RedriveOptions::default()).await?;
    ensure_eq!((report.redriven, report.foreign), (1, 2), "redriven, and left because they are not this group's");
    let mut member = t.member(&c, "a").await?;
    let got = member.next().await?;
    ensure_eq!(got.label, "bad0", "what was redriven");
    got.ack_ok().await?;
    member.stays_quiet().await?;
    t.dead_letters(&c, GROUP, 2).await?;
    Ok(())
}

async fn p5_3_filter_and_dry_run_where_it_can_browse(t: Test) -> Check {
    let c = t.connect().await?;
    fail(&t, &c, 6).await?;
    let even = |m: &Message, _: Option<&Envelope>| m.payload_bytes().last().is_some_and(|b| b % 2 == 0);
    let (topic, group) = (t.topic(), Group::new(GROUP));
    if !c.broker.capabilities().has(Feature::Peek) {
        for options in [RedriveOptions::default().dry_run(), RedriveOptions::default().filter(even)] {
            let kind = c.broker.admin().redrive(&topic, &group, options).await.err().map(|e| e.kind());
            ensure_eq!(kind, Some(ErrorKind::Unsupported), "dry run or filter where the broker cannot browse");
        }
        t.dead_letters(&c, GROUP, 6).await?;
        return Ok(());
    }
    let report = redrive(&t, &c, RedriveOptions::default().filter(even).dry_run()).await?;
    ensure_eq!((report.redriven, report.filtered), (3, 3), "a dry run with a filter");
    let mut member = t.member(&c, "a").await?;
    member.stays_quiet().await?;
    let report = redrive(&t, &c, RedriveOptions::default().filter(even)).await?;
    ensure_eq!((report.redriven, report.filtered), (3, 3), "a redrive with a filter");
    let mut labels = Vec::new();
    for got in member.take(3).await? {
        labels.push(got.label.clone());
        got.ack_ok().await?;
    }
    labels.sort();
    ensure_eq!(labels, ["bad0", "bad2", "bad4"], "what the filter let through");
    t.dead_letters(&c, GROUP, 3).await?;
    Ok(())
}

async fn p5_3_peek_count_and_discard(t: Test) -> Check {
    let c = t.connect().await?;
    fail(&t, &c, 4).await?;
    let (admin, topic, group) = (c.broker.admin(), t.topic(), Group::new(GROUP));
    let found = c.broker.capabilities();
    if found.has(Feature::Backlog) {
        let backlog = admin.backlog(&topic, &group).await?;
        ensure!(backlog.dead.admits(4), "{backlog:?} with four dead letters");
    }
    if found.has(Feature::Peek) {
        for _ in 0..2 {
            let seen = admin.dead_letters(&topic, &group, 3).await?;
            let labels: Vec<_> =
                seen.iter().map(|l| String::from_utf8_lossy(l.message.payload_bytes()).into_owned()).collect();
            ensure_eq!(labels, ["bad0", "bad1", "bad2"], "the oldest three, looked at");
            ensure!(seen.iter().all(|l| l.envelope.is_some()), "a dead letter without envelope");
        }
    } else {
        let kind = admin.dead_letters(&topic, &group, 3).await.err().map(|e| e.kind());
        ensure_eq!(kind, Some(ErrorKind::Unsupported), "peek where the broker cannot browse");
    }
    let gone = admin.discard_dead_letters(&topic, &group, RedriveOptions::default().limit(3)).await?;
    ensure_eq!(gone, 3, "discarded");
    if found.has(Feature::Backlog) {
        let backlog = admin.backlog(&topic, &group).await?;
        ensure!(backlog.dead.admits(1), "{backlog:?} after three of four were discarded");
    }
    let left = t.dead_letters(&c, GROUP, 1).await?;
    ensure_eq!(left[0].payload_bytes(), b"bad3", "what is left");
    Ok(())
}
