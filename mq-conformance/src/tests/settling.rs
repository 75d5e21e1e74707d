//! Section 4, first half: what each settlement does.

use crate::case::cases;
use crate::{Check, Doing, GROUP, Stopwatch, Test, TestFailure, ensure, ensure_eq};
use mq_api::{Durability, Failure, HealthState, Message, Reason, RetryPolicy, Settled};
use std::time::Duration;

cases! {
    "4.0" p4_0_a_settlement_takes_effect_at_the_call needs [Groups Settlement] bugs [SettlesWhenPolled];
    "4.0" p4_0_the_answer_says_what_became_of_it needs [Groups Settlement] bugs [LevelInflated];
    "4.1" p4_1_an_acked_message_is_gone_for_the_group needs [Groups Settlement] bugs [AckLost];
    "4.1" p4_1_an_awaited_ack_waits_for_no_tick needs [Groups Settlement] bugs [AckTicks];
    "4.1" p4_1_acks_out_of_order_lose_nothing needs [Groups Settlement] bugs [AckIsCumulative];
    "4.1" p4_1_whole_batches_are_acked_at_once needs [Groups Settlement] bugs [BatchAckLosesLast];
    "4.2" p4_2_a_failure_is_counted_delayed_and_in_the_end_dead_lettered needs [Groups Settlement Retry Delay DeadLetters] bugs [MaxAttemptsIgnored AttemptStuck];
    "4.2" p4_2_a_permanent_failure_is_dead_lettered_now needs [Groups Settlement Retry DeadLetters] bugs [PermanentRetried];
    "4.2" p4_2_a_transient_failure_is_not_counted_and_pauses needs [Groups Settlement Retry Delay] bugs [TransientCounts];
    "4.2" p4_2_nack_after_is_never_early_and_hardly_late needs [Groups Settlement Retry Delay] bugs [DelayIgnored DelayDoubled];
    "4.2" p4_2_a_delay_holds_back_no_neighbour needs [Groups Settlement Retry Delay] bugs [ParkedBlocks] one;
    "4.2" p4_2_the_default_policy_is_the_stated_one needs [Groups Settlement Retry Delay DeadLetters] bugs [DelayIgnored MaxAttemptsIgnored] one;
    "4.2" p4_2_jitter_only_adds needs [Groups Settlement Retry Delay] bugs [DelayIgnored] one;
    "4.3" p4_3_dead_letter_means_now needs [Groups Settlement DeadLetters] bugs [DeadLetterIsAck];
    "4.3" p4_3_a_release_goes_back_at_once_and_is_not_counted needs [Groups Settlement Retry] bugs [ReleaseCounts];
    "4.4" p4_4_a_dropped_delivery_is_a_nack needs [Groups Settlement Retry Delay] bugs [DropIsAck DropIsRelease];
    "4.4" p4_4_dropped_after_close_it_goes_back_at_once needs [Groups Settlement Retry] bugs [LateDropCounts];
    "4.4" p4_4_a_batch_dropped_is_nacked needs [Groups Settlement Retry Delay] bugs [DropIsAck];
    "4.9" p4_9_attempt_numbers_rise_by_one needs [Groups Settlement Retry] bugs [AttemptStuck AttemptTooHigh];
    "4.10" p4_10_a_paused_subscription_takes_nothing_and_says_so needs [Groups Settlement] bugs [PauseIgnored];
    "4.10" p4_10_what_is_in_hand_is_settled_while_paused needs [Groups Settlement] bugs [PauseIgnored];
}

async fn p4_0_a_settlement_takes_effect_at_the_call(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let labels = sender.send_numbered(4).await?;
    // The answers are never polled.
    for got in member.take(labels.len()).await? {
        match got.label.as_str() {
            "m0" => drop(got.into_delivery().ack()),
            "m1" => drop(got.into_delivery().nack_after(Duration::ZERO, "again")),
            "m2" => drop(got.into_delivery().release()),
            _ => drop(got.into_delivery().dead_letter("bad")),
        }
    }
    let mut back = Vec::new();
    for _ in 0..2 {
        let got = member.next().await?;
        back.push((got.label.clone(), got.attempt()));
        got.ack_ok().await?;
    }
    back.sort();
    ensure_eq!(back, [("m1".to_owned(), 2), ("m2".to_owned(), 1)], "what came back");
    member.stays_quiet().await?;
    t.all_settled(&c, GROUP).await
}

async fn p4_0_the_answer_says_what_became_of_it(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let level = c.broker.capabilities().settle_level;
    sender.send_numbered(5).await?;
    for got in member.take(5).await? {
        let label = got.label.clone();
        let answer = match label.as_str() {
            "m0" => got.ack().await,
            "m1" => got.nack("again").await,
            "m2" => got.nack_after(t.pace().retry, "again").await,
            "m3" => got.release().await,
            _ => got.dead_letter("bad").await,
        };
        let known = matches!(answer, Settled::Confirmed(l) if l <= level.max(c.broker.capabilities().send_level));
        ensure!(known, "settling {label} gave {answer:?}; settlements here have level {level}");
    }
    let rest = member.ack_until_quiet().await?;
    ensure_eq!(rest, 3, "redeliveries");
    t.all_settled(&c, GROUP).await
}

async fn p4_1_an_acked_message_is_gone_for_the_group(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut member = t.member(&c, "a").await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    let half = labels.len() / 2;
    let mut acked = Vec::new();
    for _ in 0..half {
        let got = member.next().await?;
        acked.push(got.label.clone());
        got.ack_ok().await?;
    }
    t.crash(&c).await?;
    drop(member);
    let mut other = t.member(&d, "b").await?;
    let mut again = Vec::new();
    while t.ledger().firsts(GROUP).len() < labels.len() {
        let got = other.next().await?;
        again.push(got.label.clone());
        got.ack_ok().await?;
    }
    other.ack_until_quiet().await?;
    if t.answers_settlements().await? {
        let twice: Vec<_> = acked.iter().filter(|l| again.contains(l)).collect();
        ensure!(twice.is_empty(), "{twice:?} were acknowledged, confirmed, and came again");
    }
    t.ledger().between(GROUP, &labels, 2)?;
    t.all_settled(&d, GROUP).await
}

async fn p4_1_an_awaited_ack_waits_for_no_tick(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let n = t.pace().some;
    sender.send_numbered(n).await?;
    let watch = Stopwatch::start();
    member.ack_next(n).await?;
    // One by one, each awaited: an ack that waited for a tick of a second would take as many seconds.
    let limit = Duration::from_millis(250) * n as u32;
    ensure!(watch.elapsed() < limit, "{n} awaited acks took {:?}", watch.elapsed());
    t.all_settled(&c, GROUP).await
}

async fn p4_1_acks_out_of_order_lose_nothing(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut member = t.member(&c, "a").await?;
    let labels: Vec<String> = (0..t.pace().some).map(|n| format!("m{n}")).collect();
    for label in &labels {
        sender.send_keyed("k", label).await?;
    }
    let held = member.take(labels.len()).await?;
    let mut kept = Vec::new();
    for (n, got) in held.into_iter().enumerate().rev() {
        if n % 3 == 0 {
            kept.push(got);
        } else {
            got.ack_ok().await?;
        }
    }
    let open: Vec<String> = kept.iter().map(|g| g.label.clone()).collect();
    t.crash(&c).await?;
    drop(kept);
    drop(member);
    let mut other = t.member(&d, "b").await?;
    let mut again = Vec::new();
    while let Some(got) = other.next_within(t.pace().quiet).await? {
        again.push(got.label.clone());
        got.ack_ok().await?;
    }
    let lost: Vec<_> = open.iter().filter(|l| !again.contains(l)).collect();
    ensure!(lost.is_empty(), "{lost:?} were never acknowledged and are gone");
    t.all_settled(&d, GROUP).await
}

async fn p4_1_whole_batches_are_acked_at_once(t: Test) -> Check {
    use mq_api::{ConsumerExt, Deliveries};
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let n = t.pace().many;
    sender.send_numbered(n).await?;
    let mut batch = Deliveries::new();
    let (mut seen, mut largest) = (0, 0);
    while seen < n {
        let taken = t.within("a batch", t.pace().patience, member.consumer().recv_batch(64, &mut batch)).await?;
        let taken = taken.doing("receiving a batch")?;
        ensure!(taken > 0 && taken <= 64 && batch.len() == taken, "a batch of {taken}, asked for at most 64");
        seen += taken;
        largest = largest.max(taken);
        let settled = t.within("a batch is acked", t.pace().patience, batch.ack_all()).await?;
        ensure!(settled.is_ok() && batch.is_empty(), "acking a batch gave {settled:?}");
    }
    ensure_eq!(seen, n, "messages in batches");
    ensure!(largest > 1, "every batch held one message, though {n} were there");
    member.stays_quiet().await?;
    t.all_settled(&c, GROUP).await
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
        got.nack(Failure::transient("the database is down")).await;
        if round == 0 {
            member.becomes(HealthState::Paused).await?;
            ensure!(!member.control().health().current().reason.is_empty(), "a pause without reason");
            sender.send_keyed("k", "behind").await?;
        }
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

async fn p4_3_dead_letter_means_now(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send_keyed("k", "bad").await?;
    let settled = member.next().await?.dead_letter("not a card").await;
    ensure!(settled.is_ok(), "dead-lettering gave {settled:?}");
    member.stays_quiet().await?;
    let letters = t.dead_letters(&c, GROUP, 1).await?;
    let envelope = mq_api::Envelope::read(&letters[0].headers);
    ensure_eq!(envelope.map(|e| e.reason), Some(Reason::from("not a card")), "reason");
    t.all_settled(&c, GROUP).await
}

async fn p4_3_a_release_goes_back_at_once_and_is_not_counted(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("m").await?;
    // More often than the policy has attempts.
    for round in 0..8 {
        let got = member.next().await?;
        ensure_eq!(got.attempt(), 1, "attempt after {round} releases");
        let watch = Stopwatch::start();
        got.release().await;
        let got = member.next().await?;
        ensure!(watch.elapsed() < Duration::from_secs(1), "a released message came after {:?}", watch.elapsed());
        got.release().await;
    }
    let got = member.next().await?;
    got.nack("now it counts").await;
    let got = member.next().await?;
    ensure_eq!(got.attempt(), 2, "attempt after one failure and many releases");
    got.ack_ok().await?;
    t.dead_letters(&c, GROUP, 0).await?;
    t.all_settled(&c, GROUP).await
}

async fn p4_4_a_dropped_delivery_is_a_nack(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("m").await?;
    let first = member.next().await?;
    let watch = Stopwatch::start();
    first.forget();
    let got = member.next().await?;
    ensure!(watch.elapsed() >= t.pace().retry, "it came again after {:?}", watch.elapsed());
    ensure_eq!(got.attempt(), 2, "attempt after a drop");
    got.ack_ok().await?;
    member.stays_quiet().await?;
    t.all_settled(&c, GROUP).await
}

async fn p4_4_dropped_after_close_it_goes_back_at_once(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut first =
        t.member_with(&c, "a", t.sub().retry(RetryPolicy::attempts(3).delays([t.pace().quiet * 4]))).await?;
    sender.send("m").await?;
    let held = first.next().await?;
    let control = first.control();
    let closing = t.spawn(async move { control.close(Duration::from_secs(3600)).await });
    first.has_ended().await?;
    held.forget();
    let report = t.within("close ends with the last delivery", t.pace().patience, closing).await?.doing("close")?;
    ensure_eq!(report.leaked, 0, "leaked deliveries");
    let mut second = t.member(&d, "b").await?;
    let got = second.next_within(t.pace().quiet).await?;
    let Some(got) = got else { return Err(TestFailure::new("a delivery dropped after close waits out a back-off")) };
    ensure_eq!(got.attempt(), 1, "attempt: it was given back, not tried");
    got.ack_ok().await?;
    t.all_settled(&d, GROUP).await
}

async fn p4_4_a_batch_dropped_is_nacked(t: Test) -> Check {
    use mq_api::{ConsumerExt, Deliveries};
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send_numbered(8).await?;
    let mut seen = 0;
    while seen < 8 {
        let mut batch = Deliveries::new();
        let taken = t.within("a batch", t.pace().patience, member.consumer().recv_batch(8, &mut batch)).await?;
        taken.doing("receiving a batch")?;
        while let Some(delivery) = batch.pop() {
            if delivery.attempt() == 1 {
                seen += 1;
            }
            if seen % 2 == 1 {
                delivery.ack().await;
            } else {
                drop(delivery);
            }
        }
    }
    let mut back = 0;
    while let Some(got) = member.next_within(t.pace().quiet).await? {
        ensure_eq!(got.attempt(), 2, "attempt of {} after its batch was dropped", got.label);
        got.ack_ok().await?;
        back += 1;
    }
    ensure!(back >= 4, "{back} of the 4 that were dropped came back");
    t.all_settled(&c, GROUP).await
}

async fn p4_9_attempt_numbers_rise_by_one(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let policy = RetryPolicy::attempts(8).delays([Duration::ZERO]);
    let mut member = t.member_with(&c, "a", t.sub().retry(policy)).await?;
    sender.send_message(Message::new("m").key("k")).await?;
    for attempt in 1..=7 {
        let got = member.next().await?;
        ensure_eq!(got.attempt(), attempt, "attempt");
        got.nack("again").await;
        if attempt % 3 == 0 {
            member.next().await?.release().await;
        }
    }
    member.ack_next(1).await?;
    t.all_settled(&c, GROUP).await
}

async fn p4_10_a_paused_subscription_takes_nothing_and_says_so(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("before").await?;
    member.ack_next(1).await?;
    member.control().pause();
    member.becomes(HealthState::Paused).await?;
    sender.send_numbered(5).await?;
    member.stays_quiet().await?;
    ensure!(t.capabilities().await?.settle_level >= Durability::Sent, "no level of settlement");
    member.control().resume();
    member.ack_next(5).await?;
    member.becomes(HealthState::Running).await?;
    t.all_settled(&c, GROUP).await
}

async fn p4_10_what_is_in_hand_is_settled_while_paused(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "a", t.sub().max_in_flight(3)).await?;
    sender.send_numbered(6).await?;
    let held = member.take(3).await?;
    member.control().pause();
    for got in held {
        got.ack_ok().await?;
    }
    member.stays_quiet().await?;
    member.control().resume();
    member.ack_next(3).await?;
    t.all_settled(&c, GROUP).await
}
