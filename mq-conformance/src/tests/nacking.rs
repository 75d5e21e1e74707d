//! Section 4: what a nack does, by the class of its error.

use crate::case::cases;
use crate::{Check, GROUP, Stopwatch, Test, TestFailure, ensure, ensure_eq};
use mq_api::{Failure, HealthState, Reason, RetryPolicy};
use std::time::Duration;

cases! {
    "4.2" p4_2_a_failure_is_counted_delayed_and_in_the_end_dead_lettered needs [Groups Settlement Retry Delay DeadLetters] bugs [MaxAttemptsIgnored AttemptStuck];
    "4.2" p4_2_a_permanent_failure_is_dead_lettered_now needs [Groups Settlement Retry DeadLetters] bugs [PermanentRetried];
    "4.2" p4_2_a_transient_failure_is_not_counted_and_pauses needs [Groups Settlement Retry Delay] bugs [TransientCounts];
    "4.2" p4_2_nack_after_is_never_early_and_hardly_late needs [Groups Settlement Retry Delay] bugs [DelayIgnored DelayDoubled];
    "4.2" p4_2_a_delay_holds_back_no_neighbour needs [Groups Settlement Retry Delay] bugs [ParkedBlocks] one;
    "4.2" p4_2_the_default_policy_is_the_stated_one needs [Groups Settlement Retry Delay DeadLetters] bugs [DelayIgnored MaxAttemptsIgnored] one;
    "4.2" p4_2_jitter_only_adds needs [Groups Settlement Retry Delay] bugs [DelayIgnored] one;
}

async fn p4_2_a_failure_is_counted_delayed_and_in_the_end_dead_lettered(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send_keyed("k", "bad").await?;
    for attempt in 1..=3 {
        let got = member.next().await?;
        ensure_eq!((got.label.as_str(), got.attempt()), ("bad", attempt), "hand-over {attempt}");
        let watch = Stopwatch::start();
        got.nack("it does not work").await;
        if attempt < 3 {
            member.stays_quiet_for((t.pace().retry * 9 / 10).saturating_sub(watch.elapsed())).await?;
            ensure!(watch.elapsed() <= t.pace().latest(t.pace().retry), "the wait itself was too long");
        }
    }
    member.stays_quiet().await?;
    ensure_eq!(t.ledger().attempts(GROUP, "bad"), [1, 2, 3], "attempts");
    let letters = t.dead_letters(&c, GROUP, 1).await?;
    let Some(envelope) = mq_api::Envelope::read(&letters[0].headers) else {
        return Err(TestFailure::new("the dead letter has no envelope"));
    };
    ensure_eq!((envelope.attempts, envelope.reason), (3, Reason::MaxAttempts), "attempts and reason in the envelope");
    t.count("attempts", 3);
    t.all_settled(&c, GROUP).await
}

async fn p4_2_a_permanent_failure_is_dead_lettered_now(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("bad").await?;
    sender.send("good").await?;
    for got in member.take(2).await? {
        match got.label.as_str() {
            "bad" => drop(got.nack(Failure::permanent("no such customer")).await),
            _ => got.ack_ok().await?,
        }
    }
    member.stays_quiet().await?;
    let letters = t.dead_letters(&c, GROUP, 1).await?;
    let envelope = mq_api::Envelope::read(&letters[0].headers);
    ensure_eq!(envelope.map(|e| (e.attempts, e.reason)), Some((1, Reason::Permanent)), "the envelope");
    Ok(())
}

async fn p4_2_a_transient_failure_is_not_counted_and_pauses(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send_keyed("k", "waits").await?;
    // More often than the policy has attempts: an outage empties nothing into the dead letters.
    let mut paused: Option<Stopwatch> = None;
    for round in 0..7 {
        let got = member.next().await?;
        ensure_eq!(got.attempt(), 1, "attempt after {round} transient failures");
        if let Some(watch) = paused.take() {
            let waited = watch.elapsed();
            ensure!(waited >= t.pace().retry * 9 / 10, "'{}' came after a pause of {waited:?}", got.label);
        }
        if round == 6 {
            got.ack().await;
            break;
        }
        paused = Some(Stopwatch::start());
        // Its answer may take longer than the pause.
        let nacked = got.into_delivery().nack(Failure::transient("the database is down"));
        if round == 0 {
            member.becomes(HealthState::Paused).await?;
            ensure!(!member.control().health().current().reason.is_empty(), "a pause without reason");
            sender.send_keyed("k", "behind").await?;
        }
        nacked.await;
    }
    member.ack_next(1).await?;
    member.becomes(HealthState::Running).await?;
    t.dead_letters(&c, GROUP, 0).await?;
    t.all_settled(&c, GROUP).await
}

async fn p4_2_nack_after_is_never_early_and_hardly_late(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    for (n, delay) in [t.pace().retry, t.pace().long, t.pace().long / 3].into_iter().enumerate() {
        let label = format!("m{n}");
        sender.send(&label).await?;
        let watch = Stopwatch::start();
        member.next().await?.nack_after(delay, "later").await;
        let got = member.next().await?;
        let waited = watch.elapsed();
        ensure_eq!((got.label.clone(), got.attempt()), (label, 2), "what came back");
        ensure!(waited >= delay, "delivered {:?} early", delay - waited);
        ensure!(waited <= t.pace().latest(delay), "delivered after {waited:?} where {delay:?} were asked for");
        got.ack_ok().await?;
    }
    t.all_settled(&c, GROUP).await
}

async fn p4_2_a_delay_holds_back_no_neighbour(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("late").await?;
    let watch = Stopwatch::start();
    member.next().await?.nack_after(t.pace().long, "later").await;
    let labels = sender.send_numbered(t.pace().some).await?;
    member.ack_next(labels.len()).await?;
    ensure!(watch.elapsed() < t.pace().long, "the neighbours waited for the delayed one");
    let got = member.next().await?;
    ensure_eq!(got.label, "late", "what comes after its delay");
    got.ack_ok().await?;
    t.all_settled(&c, GROUP).await
}

async fn p4_2_the_default_policy_is_the_stated_one(t: Test) -> Check {
    let policy = RetryPolicy::default();
    let stated = [1, 5, 30, 120].map(Duration::from_secs);
    ensure_eq!(policy.max_attempts, 5, "default attempts");
    ensure_eq!(policy.delays, stated, "default delays");
    let plain = mq_api::Subscription::group(t.topic(), GROUP);
    ensure_eq!(plain.retry, policy, "the policy of a plain subscription");
    ensure_eq!(plain.max_in_flight, 256, "default in flight");
    ensure_eq!(plain.lease, Duration::from_secs(60), "default lease");
    ensure_eq!(plain.max_processing, Duration::from_secs(25 * 60), "default max_processing");
    ensure_eq!(plain.crash_trials, 2, "default crash trials");
    // The two and a half minutes are waited out on a paused clock only; on a real one a hundredth of them.
    let share = if t.clock() == crate::Clock::Real { 100 } else { 1 };
    let delays = stated.map(|delay| delay / share);
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "a", plain.retry(policy.delays(delays))).await?;
    sender.send("bad").await?;
    let mut got = member.next().await?;
    for (n, delay) in delays.into_iter().enumerate() {
        ensure_eq!(got.attempt() as usize, n + 1, "attempt");
        let watch = Stopwatch::start();
        got.nack("it does not work").await;
        got = member.next().await?;
        ensure!(watch.elapsed() >= delay, "attempt {} after {:?}, where {delay:?} are stated", n + 2, watch.elapsed());
    }
    got.nack("it does not work").await;
    member.stays_quiet().await?;
    t.dead_letters(&c, GROUP, 1).await?;
    Ok(())
}

async fn p4_2_jitter_only_adds(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let delay = t.pace().retry;
    let policy = RetryPolicy::attempts(10).delays([delay]).jitter(0.5);
    let mut member = t.member_with(&c, "a", t.sub().retry(policy)).await?;
    sender.send("m").await?;
    for _ in 0..6 {
        let got = member.next().await?;
        let watch = Stopwatch::start();
        got.nack("again").await;
        // Looked at before it is taken, so that the hand-over's own time is seen.
        // The delay began with the call, and the broker took its time to confirm it.
        member.stays_quiet_for((delay * 99 / 100).saturating_sub(watch.elapsed())).await?;
        let next = member.next().await?;
        let waited = watch.elapsed();
        ensure!(waited >= delay, "jitter made a delay shorter: {waited:?} for {delay:?}");
        ensure!(waited <= t.pace().latest(delay + delay / 2), "{waited:?} for {delay:?} and half of it");
        next.release().await;
    }
    member.ack_next(1).await
}
