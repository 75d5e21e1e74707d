//! Section 3, second half: order by key.

use crate::case::cases;
use crate::{Check, GROUP, Test, TestFailure, ensure, ensure_eq};
use mq_api::{BrokerExt, ErrorKind, OnDeadLetter, Ordering, Subscription};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering as Atomic};

cases! {
    "3.7" p3_7_one_at_a_time_and_in_order_for_each_key needs [Groups Settlement PerKey] bugs [PerKeyIgnored];
    "3.7" p3_7_a_retried_message_keeps_its_place needs [Groups Settlement PerKey Retry Delay] bugs [PerKeyIgnored];
    "3.7" p3_7_different_keys_run_concurrently needs [Groups Settlement PerKey] bugs [OneInFlight];
    "3.7" p3_7_messages_without_key_have_no_order needs [Groups Settlement PerKey] bugs [OneInFlight] one;
    "3.7" p3_7_a_new_owner_takes_over_pending_and_parked_in_order needs [Groups Settlement PerKey Retry Delay] bugs [PerKeyIgnored CrashIsNone];
    "3.7" p3_7_what_waits_behind_a_delayed_key_is_bounded needs [Groups Settlement PerKey Delay] bugs [HealthAlwaysRunning] one;
    "3.7" p3_7_after_a_dead_letter_the_key_goes_on needs [Groups Settlement PerKey DeadLetters] bugs [DeadLetterIsAck];
    "3.7" p3_7_or_the_key_is_parked_as_configured needs [Groups Settlement PerKey DeadLetters] bugs [ParkKeyIgnored] one;
    "3.7" p3_7_what_waits_for_its_key_outlasts_a_change_of_order needs [Groups Settlement PerKey] bugs [LoseMessage];
    "3.7" p3_7_another_partition_count_is_refused needs [Groups Partitions] bugs [PartitionsUnchecked] one;
}

pub(super) fn ordered(t: &Test) -> Subscription {
    t.sub().ordering(Ordering::PerKey)
}

/// Labels of one key in the order of hand-over, all of them.
pub(super) fn of_key(t: &Test, key: &str) -> Vec<String> {
    t.ledger().of(GROUP).into_iter().filter(|s| s.key.as_deref() == Some(key)).map(|s| s.label).collect()
}

async fn p3_7_one_at_a_time_and_in_order_for_each_key(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    let running: Arc<Mutex<BTreeSet<String>>> = Arc::default();
    let overlaps = Arc::new(AtomicUsize::new(0));
    let mut crews = Vec::new();
    for (on, name) in [(&c, "a"), (&d, "b")] {
        let member = t.member_with(on, name, ordered(&t)).await?;
        let (running, overlaps, test) = (running.clone(), overlaps.clone(), t.clone());
        crews.push(member.work(move |got| {
            let (running, overlaps, test) = (running.clone(), overlaps.clone(), test.clone());
            // Handled in a task each, so that the handler's own loop is not what keeps the order.
            let key = got.key.as_ref().map(|k| String::from_utf8_lossy(k).into_owned()).unwrap_or_default();
            if !running.lock().insert(key.clone()) {
                overlaps.fetch_add(1, Atomic::Relaxed);
            }
            let t = test.clone();
            test.spawn(async move {
                t.elapse(t.pace().retry / 10).await;
                running.lock().remove(&key);
                got.ack().await;
            });
            async {}
        }));
    }
    let (keys, each) = (5, t.pace().some);
    for n in 0..each {
        for key in 0..keys {
            sender.send_keyed(&format!("k{key}"), &format!("k{key}-{n:04}")).await?;
        }
    }
    t.until("all handled", async || Ok((t.ledger().of(GROUP).len() >= keys * each).then_some(()))).await?;
    t.all_settled(&c, GROUP).await?;
    for crew in crews {
        crew.stop().await?;
    }
    ensure_eq!(overlaps.load(Atomic::Relaxed), 0, "times that two messages of one key were in hand together");
    for key in 0..keys {
        let wanted: Vec<String> = (0..each).map(|n| format!("k{key}-{n:04}")).collect();
        ensure_eq!(of_key(&t, &format!("k{key}")), wanted, "order of key k{key}");
    }
    t.count("deliveries", keys * each);
    Ok(())
}

async fn p3_7_a_retried_message_keeps_its_place(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "a", ordered(&t)).await?;
    for n in 0..6 {
        sender.send_keyed("k", &format!("m{n}")).await?;
    }
    let mut wanted = Vec::new();
    for n in 0..6 {
        if n % 2 == 0 {
            let got = member.next().await?;
            ensure_eq!(got.label, format!("m{n}"), "what comes next");
            got.nack("once more").await;
            wanted.push(format!("m{n}"));
        }
        let got = member.next().await?;
        ensure_eq!(got.label, format!("m{n}"), "what comes next, after a retry or not");
        ensure_eq!(got.attempt(), if n % 2 == 0 { 2 } else { 1 }, "attempt of m{n}");
        got.ack_ok().await?;
        wanted.push(format!("m{n}"));
    }
    ensure_eq!(of_key(&t, "k"), wanted, "hand-overs of key k");
    t.all_settled(&c, GROUP).await
}

async fn p3_7_different_keys_run_concurrently(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "a", ordered(&t)).await?;
    for n in 0..2 {
        for key in 0..5 {
            sender.send_keyed(&format!("k{key}"), &format!("k{key}-{n}")).await?;
        }
    }
    let held = member.take(5).await?;
    let keys: BTreeSet<_> = held.iter().map(|g| g.key.clone()).collect();
    ensure_eq!(keys.len(), 5, "keys in hand together");
    member.stays_quiet_for(t.pace().retry).await?;
    for got in held {
        got.ack_ok().await?;
    }
    member.ack_next(5).await?;
    t.all_settled(&c, GROUP).await
}

async fn p3_7_messages_without_key_have_no_order(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "a", ordered(&t)).await?;
    sender.send_numbered(5).await?;
    let held = member.take(5).await?;
    for got in held {
        got.ack_ok().await?;
    }
    t.all_settled(&c, GROUP).await
}

async fn p3_7_a_new_owner_takes_over_pending_and_parked_in_order(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut first = t.member_with(&c, "a", ordered(&t)).await?;
    for key in ["parked", "held"] {
        for n in 0..4 {
            sender.send_keyed(key, &format!("{key}{n}")).await?;
        }
    }
    let mut held = None;
    for _ in 0..2 {
        let got = first.next().await?;
        match got.label.as_str() {
            "parked0" => drop(got.nack_after(t.pace().long, "later").await),
            "held0" => held = Some(got),
            other => return Err(TestFailure::new(format!("{other} came before the first of its key was settled"))),
        }
    }
    t.crash(&c).await?;
    drop(held);
    drop(first);
    let mut second = t.member_with(&d, "b", ordered(&t)).await?;
    second.ack_next(8).await?;
    second.stays_quiet().await?;
    for key in ["parked", "held"] {
        let mut wanted = vec![format!("{key}0")];
        wanted.extend((0..4).map(|n| format!("{key}{n}")));
        ensure_eq!(of_key(&t, key), wanted, "hand-overs of key {key}, to both members");
    }
    t.all_settled(&d, GROUP).await
}

async fn p3_7_what_waits_behind_a_delayed_key_is_bounded(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut sub = ordered(&t);
    sub.max_blocked = 10;
    let mut member = t.member_with(&c, "a", sub).await?;
    sender.send_keyed("k", "first").await?;
    member.next().await?.nack_after(t.pace().long, "later").await;
    for n in 0..t.pace().some {
        sender.send_keyed("k", &format!("m{n}")).await?;
    }
    // A backend may look at its partitions only when somebody receives.
    member.stays_quiet_for(t.pace().retry).await?;
    member.becomes(mq_api::HealthState::Degraded).await?;
    ensure!(!member.control().health().current().reason.is_empty(), "health does not name the partition that waits");
    let got = member.next().await?;
    ensure_eq!((got.label.as_str(), got.attempt()), ("first", 2), "what comes after the delay");
    got.ack_ok().await?;
    member.ack_next(t.pace().some).await?;
    member.becomes(mq_api::HealthState::Running).await?;
    let mut wanted = vec!["first".to_owned(), "first".to_owned()];
    wanted.extend((0..t.pace().some).map(|n| format!("m{n}")));
    ensure_eq!(of_key(&t, "k"), wanted, "order of key k");
    Ok(())
}

async fn p3_7_after_a_dead_letter_the_key_goes_on(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "a", ordered(&t)).await?;
    for n in 0..3 {
        sender.send_keyed("k", &format!("m{n}")).await?;
    }
    member.next().await?.dead_letter("bad").await;
    member.ack_next(2).await?;
    ensure_eq!(of_key(&t, "k"), ["m0", "m1", "m2"], "hand-overs of key k");
    let letters = t.dead_letters(&c, GROUP, 1).await?;
    ensure_eq!(letters[0].payload_bytes(), b"m0", "the dead letter");
    Ok(())
}

async fn p3_7_or_the_key_is_parked_as_configured(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let sub = ordered(&t).on_dead_letter(OnDeadLetter::ParkKey);
    let mut member = t.member_with(&c, "a", sub).await?;
    for n in 0..3 {
        sender.send_keyed("k", &format!("k{n}")).await?;
        sender.send_keyed("j", &format!("j{n}")).await?;
    }
    let mut acked = Vec::new();
    while let Some(got) = member.next_within(t.pace().quiet).await? {
        match got.label.as_str() {
            "k0" => drop(got.dead_letter("bad").await),
            other => {
                acked.push(other.to_owned());
                got.ack_ok().await?;
            }
        }
    }
    acked.sort();
    ensure_eq!(acked, ["j0", "j1", "j2"], "what was handed over beside the parked key");
    let letters = t.dead_letters(&c, GROUP, 3).await?;
    let labels: Vec<_> = letters.iter().map(|l| String::from_utf8_lossy(l.payload_bytes()).into_owned()).collect();
    ensure_eq!(labels, ["k0", "k1", "k2"], "the dead letters of the parked key, in order");
    t.all_settled(&c, GROUP).await
}

async fn p3_7_what_waits_for_its_key_outlasts_a_change_of_order(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut first = t.member_with(&c, "a", ordered(&t)).await?;
    for n in 0..4 {
        sender.send_keyed("k", &format!("m{n}")).await?;
    }
    let got = first.next().await?;
    ensure_eq!(got.label, "m0", "what comes first");
    // The others are behind it when the group gives its order up.
    first.stays_quiet_for(t.pace().retry).await?;
    got.ack_ok().await?;
    first.close().await;
    let mut plain = t.member(&c, "b").await?;
    plain.ack_next(3).await?;
    plain.close().await;
    for n in 4..7 {
        sender.send_keyed("k", &format!("m{n}")).await?;
    }
    let mut again = t.member_with(&c, "c", ordered(&t)).await?;
    again.ack_next(3).await?;
    again.stays_quiet().await?;
    let wanted: Vec<String> = (0..7).map(|n| format!("m{n}")).collect();
    let mut seen = of_key(&t, "k");
    ensure_eq!(seen[4..].to_vec(), wanted[4..].to_vec(), "hand-overs since the group has order again");
    seen.sort();
    ensure_eq!(seen, wanted, "hand-overs to all three members");
    t.all_settled(&c, GROUP).await
}

async fn p3_7_another_partition_count_is_refused(t: Test) -> Check {
    let c = t.connect().await?;
    let spec = t.spec().partitions(4);
    t.sender_with(&c, spec.clone()).await?.send("m").await?;
    let d = t.connect().await?;
    let refusals = [
        d.broker.producer(spec.clone().partitions(5)).await.err(),
        d.broker.subscribe(t.sub().partitions(5)).await.err(),
    ];
    for refusal in refusals {
        let Some(e) = refusal else { return Err(TestFailure::new("5 partitions were granted where there are 4")) };
        ensure_eq!(e.kind(), ErrorKind::Topology, "{e}");
        let text = e.to_string();
        ensure!(text.contains('4') && text.contains('5'), "'{text}' does not spell out the difference");
    }
    // The same count, and none at all, are fine.
    let mut member = t.member_with(&d, "a", t.sub().partitions(4)).await?;
    member.ack_next(1).await?;
    let mut any = t.sub();
    any.partitions = None;
    t.member_with(&d, "b", any).await?.close().await;
    Ok(())
}
