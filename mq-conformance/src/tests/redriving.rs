//! Section 5: dead letters looked at, sent back, and dropped.

use super::dead_letters::fail;
use crate::case::cases;
use crate::{Check, Connection, Doing, GROUP, READERS, Stopwatch, Test, ensure, ensure_eq};
use mq_api::{Envelope, ErrorKind, Feature, Group, Message, Reason, RedriveOptions, RedriveReport, Topic};
use std::time::Duration;

cases! {
    "5.3" p5_3_redrive_goes_back_to_its_group_only needs [Groups Settlement DeadLetters Redrive] bugs [RedriveDiscards RedriveTwice];
    "5.3" p5_3_redrive_is_bounded_and_goes_on needs [Groups Settlement DeadLetters Redrive] bugs [RedriveLimitIgnored];
    "5.3" p5_3_redrive_has_a_rate needs [Groups Settlement DeadLetters Redrive] bugs [RedriveRateIgnored] one;
    "5.3" p5_3_redrive_guards_against_loops needs [Groups Settlement DeadLetters Redrive] bugs [LoopGuardOff] one;
    "5.3" p5_3_stopped_midway_it_loses_nothing needs [Groups Settlement DeadLetters Redrive] bugs [RedriveDiscards];
    "5.3" p5_3_foreign_letters_stay needs [Groups Settlement DeadLetters Redrive] bugs [ForeignRedriven] one;
    "5.3" p5_3_filter_and_dry_run_where_it_can_browse needs [Groups Settlement DeadLetters Redrive] bugs [DryRunActs FilterIgnored] one;
    "5.3" p5_3_peek_count_and_discard needs [Groups Settlement DeadLetters] bugs [DiscardKeeps PeekTakes] one;
}

async fn redrive(t: &Test, on: &Connection, options: RedriveOptions) -> Check<RedriveReport> {
    let work = on.broker.admin();
    let (topic, group) = (t.topic(), Group::new(GROUP));
    let report = t.within("redrive", t.pace().patience, work.redrive(&topic, &group, options)).await?;
    let report = report.doing("redrive")?;
    t.note(format_args!("redrive: {report:?}"));
    Ok(report)
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
    let midway = tokio::time::timeout(Duration::from_secs(4), admin.redrive(&topic, &group, slow)).await;
    ensure!(midway.is_err(), "12 at 2 a second were over after four seconds");
    let rest = redrive(&t, &d, RedriveOptions::default()).await?;
    ensure!(rest.redriven < 12, "the first call redrove nothing in four seconds");
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
    // A name that is misspelt is no group without dead letters.
    let nobody = Group::new("nobody");
    let discarded = admin.discard_dead_letters(&topic, &nobody, RedriveOptions::default()).await.err();
    ensure_eq!(discarded.map(|e| e.kind()), Some(ErrorKind::NotFound), "discard of a group that does not exist");
    let redriven = admin.redrive(&topic, &nobody, RedriveOptions::default()).await.err();
    ensure_eq!(redriven.map(|e| e.kind()), Some(ErrorKind::NotFound), "redrive of a group that does not exist");
    if found.has(Feature::Peek) {
        let listed = admin.dead_letters(&topic, &nobody, 3).await.err();
        ensure_eq!(listed.map(|e| e.kind()), Some(ErrorKind::NotFound), "dead letters of a group that does not exist");
    }
    Ok(())
}
