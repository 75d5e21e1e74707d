//! Promises of section 10, to the tests that users write: one seed gives one run, a profile refuses what production refuses,
//! and a test can wait for the end and assert exactly what happened.

use crate::case::cases;
use crate::{Check, Connection, Doing, GROUP, Record, Tally, Test, ensure, ensure_eq, refusal};
use mq_api::{Feature, Message, MessageId, RetryPolicy, Subscription, TopicSpec};
use std::sync::Arc;
use std::time::Duration;

cases! {
    "10.1" p10_1_one_seed_gives_one_run needs [Groups Settlement Retry Delay] bugs [SeedIgnored] one recorded;
    "10.2" p10_2_a_profile_refuses_what_its_broker_refuses needs [] bugs [RefusesNothing] one recorded;
    "10.3" p10_3_a_test_waits_until_all_caused_work_is_done needs [Groups Settlement Retry Delay DeadLetters] bugs [DoneTooEarly] recorded;
    "10.3" p10_3_exactly_what_happened_is_on_record needs [Groups Settlement Retry Delay DeadLetters] bugs [TimelineForgets] recorded;
    "10.3" p10_3_and_nothing_else_happened needs [Groups Settlement] bugs [SendTwice DeliverTwice] recorded;
}

/// A connection to a broker of its own, that records.
async fn recording(t: &Test, more: &[(&str, &str)]) -> Check<(Connection, Arc<dyn Record>)> {
    let parameters = [&[("record", "true")], more].concat();
    let c = t.adopt(t.env().connect_with(&parameters).await.doing("connecting to a broker that records")?);
    let record = t.hook(t.env().record(&c))?;
    Ok((c, record))
}

fn sub(t: &Test) -> Subscription {
    t.sub().retry(RetryPolicy::attempts(3).delays([Duration::from_secs(600)]).jitter(0.5))
}

/// Starts a member that does what each message says: `ok`, `twice` (fails two times), `later` (an hour), `bad`.
async fn handler(t: &Test, c: &Connection) -> Check {
    let mut member = t.member_with(c, "worker", sub(t)).await?;
    t.spawn(async move {
        while let Ok(Some(got)) = member.next_within(LONGEST).await {
            let (label, attempt, delivery) = (got.label.clone(), got.attempt(), got.into_delivery());
            match (label.as_str(), attempt) {
                ("twice", 1 | 2) => drop(delivery.nack("not yet")),
                ("later", 1) => drop(delivery.nack_after(Duration::from_secs(3600), "not yet")),
                ("bad", _) => drop(delivery.dead_letter("bad")),
                _ => drop(delivery.ack()),
            }
        }
    });
    Ok(())
}

async fn send(t: &Test, c: &Connection, labels: &[&str]) -> Check<Vec<MessageId>> {
    let sender = t.sender(c).await?;
    let mut ids = Vec::new();
    for label in labels {
        let message = Message::new(label.as_bytes().to_vec());
        ids.push(message.id.clone());
        sender.producer().send(message).await.doing("sending")?;
    }
    Ok(ids)
}

/// Longer than all delays together, which take no time on a paused clock.
const LONGEST: Duration = Duration::from_secs(6 * 3600);

async fn done(t: &Test, record: &Arc<dyn Record>) -> Check {
    t.within("all is done", LONGEST, record.all_done()).await
}

async fn one_run(t: &Test, seed: &str) -> Check<Vec<String>> {
    let (c, record) = recording(t, &[("seed", seed)]).await?;
    handler(t, &c).await?;
    send(t, &c, &["ok", "twice", "later", "bad", "twice", "ok"]).await?;
    done(t, &record).await?;
    c.broker.close(t.pace().drain).await;
    Ok(record.lines())
}

async fn p10_1_one_seed_gives_one_run(t: Test) -> Check {
    let (first, second, other) = (one_run(&t, "7").await?, one_run(&t, "7").await?, one_run(&t, "8").await?);
    ensure!(first.len() > 20, "a run of {} events", first.len());
    ensure_eq!(first, second, "two runs of one seed");
    ensure!(first != other, "another seed gives the same run");
    Ok(())
}

async fn p10_2_a_profile_refuses_what_its_broker_refuses(t: Test) -> Check {
    let mut proven = 0;
    for profile in ["memory", "kafka", "amqp", "amqp-classic", "redis", "redis-pubsub"] {
        let connected = t.env().connect_with(&[("profile", profile)]).await;
        let c = t.adopt(connected.doing(format_args!("connecting with profile {profile}"))?);
        let found = c.broker.capabilities();
        ensure_eq!(found.backend, profile, "the backend of the profile");
        for feature in Feature::ALL.iter().copied().filter(|f| !found.has(*f)) {
            refusal::prove_on(&t, &c, feature).await?;
            proven += 1;
        }
        if found.has(Feature::Provision) {
            let asked = TopicSpec::new(t.topic_named(profile)).partitions(1);
            c.broker.admin().create_topic(asked).await.doing(format_args!("making a topic on {profile}"))?;
        }
    }
    // Pub/Sub alone lacks all but broadcast.
    ensure!(proven > Feature::ALL.len(), "{proven} refusals");
    Ok(())
}

async fn p10_3_a_test_waits_until_all_caused_work_is_done(t: Test) -> Check {
    let (c, record) = recording(&t, &[]).await?;
    handler(&t, &c).await?;
    let began = tokio::time::Instant::now();
    let ids = send(&t, &c, &["later"]).await?;
    done(&t, &record).await?;
    ensure!(began.elapsed() >= Duration::from_secs(3600), "done after {:?}, before the delay passed", began.elapsed());
    ensure_eq!(record.tally(&ids[0]).acked, 1, "acks of what was delayed for an hour, when all is done");
    // With nothing to do it is done at once.
    t.within("all is done, again", Duration::from_millis(1), record.all_done()).await
}

async fn p10_3_exactly_what_happened_is_on_record(t: Test) -> Check {
    let (c, record) = recording(&t, &[]).await?;
    handler(&t, &c).await?;
    let ids = send(&t, &c, &["ok", "twice", "later", "bad"]).await?;
    done(&t, &record).await?;
    let once = Tally { sent: 1, delivered: 1, ..Tally::default() };
    let wanted = [
        Tally { acked: 1, ..once },
        Tally { delivered: 3, retried: 2, acked: 1, ..once },
        Tally { delivered: 2, retried: 1, acked: 1, ..once },
        Tally { dead_lettered: 1, ..once },
    ];
    for (id, wanted) in ids.iter().zip(wanted) {
        ensure_eq!(record.tally(id), wanted, "the record of {id}");
    }
    Ok(())
}

async fn p10_3_and_nothing_else_happened(t: Test) -> Check {
    let (c, record) = recording(&t, &[]).await?;
    handler(&t, &c).await?;
    let ids = send(&t, &c, &["ok", "ok", "ok"]).await?;
    done(&t, &record).await?;
    for id in &ids {
        let wanted = Tally { sent: 1, delivered: 1, acked: 1, ..Tally::default() };
        ensure_eq!(record.tally(id), wanted, "the record of {id}");
    }
    let lines = record.lines();
    ensure_eq!(lines.len(), 3 * 3, "events of three messages that were sent, handed over and acked: {lines:#?}");
    ensure_eq!(t.ledger().labels(GROUP), ["ok", "ok", "ok"], "what the handler saw");
    Ok(())
}
