//! Section 4, first half: what each settlement does.

use crate::case::cases;
use crate::{Check, Doing, GROUP, Stopwatch, Test, TestFailure, ensure, ensure_eq};
use mq_api::{Durability, HealthState, Message, Reason, RetryPolicy, Settled};
use std::time::Duration;

cases! {
    "4.0" p4_0_a_settlement_takes_effect_at_the_call needs [Groups Settlement] bugs [SettlesWhenPolled];
    "4.0" p4_0_the_answer_says_what_became_of_it needs [Groups Settlement] bugs [LevelInflated];
    "4.1" p4_1_an_acked_message_is_gone_for_the_group needs [Groups Settlement] bugs [AckLost];
    "4.1" p4_1_an_awaited_ack_waits_for_no_tick needs [Groups Settlement] bugs [AckTicks];
    "4.1" p4_1_acks_out_of_order_lose_nothing needs [Groups Settlement] bugs [AckIsCumulative];
    "4.1" p4_1_whole_batches_are_acked_at_once needs [Groups Settlement] bugs [BatchAckLosesLast];
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
    let again = other.ack_taken_over().await?;
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
