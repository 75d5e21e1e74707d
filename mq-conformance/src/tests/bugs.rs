//! Twelve mistakes that a good team will still make, and five more. Each was found by an experiment on a real broker.

use super::crashes::die_with;
use crate::case::cases;
use crate::{Check, Doing, GROUP, Stopwatch, Test, TestFailure, ensure, ensure_eq};
use mq_api::{Envelope, Group, Ordering, RetryPolicy, Settled};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering as Atomic};
use std::time::Duration;

cases! {
    "4.8" bug_01_neighbours_share_the_poisons_count needs [Groups Settlement Retry DeadLetters] bugs [NeighboursBlamed] one;
    "6.4" bug_02_drain_overlaps_owners needs [Groups Settlement PerKey] bugs [DrainHurries] one;
    "6.3" bug_03_a_remade_group_skips_what_was_pending needs [Groups Settlement Retry Delay Provision] bugs [UnsettledForgotten] one;
    "3.2" bug_09_parked_messages_fill_the_window needs [Groups Settlement Retry Delay] bugs [ParkedBlocks] one;
    "4.6" bug_10_a_blocked_runtime_starves_renewal needs [Groups Settlement] bugs [LeaseNotRenewed] one real alone;
    "4.8" bug_11_the_retry_state_dies_with_its_holder needs [Groups Settlement Retry Delay DeadLetters] bugs [AttemptStuck MaxAttemptsIgnored] one;
    "7.4" bug_12_a_configuration_edit_is_an_outage needs [Groups Settlement Retry Delay DeadLetters] bugs [TuningIsTopology MaxAttemptsIgnored] one;
    "4.8" bug_13_rolling_restarts_make_dead_letters needs [Groups Settlement Retry DeadLetters] bugs [DrainHurries];
    "3.2" bug_14_a_delayed_key_blocks_the_others needs [Groups Settlement PerKey Delay] bugs [ParkedBlocks] one;
    "3.1" bug_15_a_slow_group_slows_the_others needs [Groups Settlement] bugs [GroupsMixed];
}

async fn bug_01_neighbours_share_the_poisons_count(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let labels = sender.send_numbered(100).await?;
    // A large prefetch, one at a time in hand, and the process dies with one of them.
    die_with(&t, "m50", &t.sub().max_in_flight(64), 12, true).await?;
    let letters = t.dead_letters(&c, GROUP, 1).await?;
    ensure_eq!(letters[0].payload_bytes(), b"m50", "the one dead letter");
    for label in labels.iter().filter(|l| *l != "m50") {
        let n = t.ledger().attempts(GROUP, label).len();
        ensure!((1..=2).contains(&n), "{label}, which harmed nobody, was handed over {n} times");
    }
    t.all_settled(&c, GROUP).await
}

async fn bug_02_drain_overlaps_owners(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let sub = || t.sub().ordering(Ordering::PerKey);
    let mut first = t.member_with(&c, "a", sub()).await?;
    for n in 0..40 {
        sender.send_keyed("k", &format!("m{n:02}")).await?;
    }
    let latched = first.next().await?;
    let mut second = t.member_with(&d, "b", sub()).await?;
    let control = first.control();
    let limit = t.pace().long;
    let closing = t.spawn(async move { control.close(limit).await });
    second.stays_quiet_for(limit / 2).await?;
    latched.ack_ok().await?;
    t.within("close", t.pace().patience, closing).await?.doing("close")?;
    second.ack_next(39).await?;
    second.stays_quiet().await?;
    let wanted: Vec<String> = (0..40).map(|n| format!("m{n:02}")).collect();
    ensure_eq!(t.ledger().labels(GROUP), wanted, "hand-overs to both, in order");
    Ok(())
}

async fn bug_03_a_remade_group_skips_what_was_pending(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut first = t.member(&c, "a").await?;
    let labels = sender.send_numbered(10).await?;
    let mut held = first.take(10).await?;
    for _ in 0..3 {
        held.remove(0).ack_ok().await?;
    }
    for _ in 0..2 {
        held.remove(0).nack_after(t.pace().long / 2, "later").await;
    }
    t.delete_group_in_use(&d).await?;
    let mut second = t.member(&d, "b").await?;
    if !d.broker.capabilities().retains_without_group {
        return Ok(());
    }
    let before = t.ledger().of(GROUP).len();
    let wanted: Vec<String> = labels[3..].to_vec();
    t.until("all that was unsettled comes again", async || {
        for member in [&mut first, &mut second] {
            while let Some(got) = member.next_within(t.pace().retry).await? {
                got.ack().await;
            }
        }
        let again: Vec<String> = t.ledger().of(GROUP).into_iter().skip(before).map(|s| s.label).collect();
        Ok(wanted.iter().all(|l| again.contains(l)).then_some(()))
    })
    .await?;
    for got in held {
        ensure_eq!(got.ack().await, Settled::Stale, "an old handle");
    }
    // The member that comes back later may know of an earlier place than the one that was first: what it has come again is
    // handled too, whenever that is.
    let what = "nothing left for either";
    t.until(what, async || {
        for member in [&mut first, &mut second] {
            while let Some(got) = member.next_within(t.pace().retry).await? {
                got.ack().await;
            }
        }
        let left = t.admin(&d).backlog(&t.topic(), &Group::new(GROUP)).await.doing(what)?;
        Ok([left.ready, left.in_flight, left.delayed].iter().all(|count| count.admits(0)).then_some(()))
    })
    .await
}

async fn bug_09_parked_messages_fill_the_window(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "a", t.sub().max_in_flight(1)).await?;
    sender.send("parked").await?;
    member.next().await?.nack_after(t.pace().long, "later").await;
    let watch = Stopwatch::start();
    sender.send("flows").await?;
    let got = member.next().await?;
    ensure_eq!(got.label, "flows", "what comes while another is parked");
    ensure!(watch.elapsed() < Duration::from_secs(1), "it came after {:?}", watch.elapsed());
    got.ack_ok().await?;
    member.ack_next(1).await?;
    t.all_settled(&c, GROUP).await
}

async fn bug_10_a_blocked_runtime_starves_renewal(t: Test) -> Check {
    let lease = Duration::from_millis(500);
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut first = t.member_with(&c, "a", t.sub().lease(lease)).await?;
    sender.send("m").await?;
    let held = first.next().await?;
    // The second member is another process, as far as this runtime is concerned: it has a thread and a runtime of its own.
    let count = Arc::new(AtomicUsize::new(0));
    let other = {
        let (t, count, sub) = (t.clone(), count.clone(), t.sub().lease(lease).member("b"));
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let Ok(runtime) = runtime else { return Err("no runtime".to_owned()) };
            let done = runtime.block_on(async {
                let d = t.env().connect().await.map_err(|e| e.to_string())?;
                let mut consumer = d.broker.open_consumer(sub).await.map_err(|e| e.to_string())?;
                let until = tokio::time::sleep(lease * 6);
                tokio::pin!(until);
                loop {
                    tokio::select! {
                        biased;
                        got = mq_api::ConsumerExt::recv(&mut consumer) => {
                            if let Ok(Some(delivery)) = got {
                                count.fetch_add(1, Atomic::Relaxed);
                                drop(delivery.ack());
                            }
                        }
                        () = &mut until => break,
                    }
                }
                d.broker.close(Duration::from_secs(5)).await;
                Ok(())
            });
            runtime.shutdown_background();
            done
        })
    };
    // The handler blocks its thread, as handlers do.
    std::thread::sleep(lease * 3);
    // And goes on for a while without blocking.
    t.elapse(lease * 2).await;
    let settled = held.ack().await;
    let finished = tokio::time::timeout(Duration::from_secs(20), async {
        while !other.is_finished() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    ensure!(finished.is_ok(), "the second member does not end");
    if let Ok(Err(e)) = other.join() {
        return Err(TestFailure::new(format!("the second member: {e}")));
    }
    ensure!(settled.is_ok(), "the ack after a blocked runtime gave {settled:?}");
    ensure_eq!(count.load(Atomic::Relaxed), 0, "hand-overs to the second member");
    Ok(())
}

async fn bug_11_the_retry_state_dies_with_its_holder(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    sender.send("m").await?;
    let policy = RetryPolicy::attempts(3).delays([t.pace().long]);
    let sub = t.sub().retry(policy).crash_trials(10);
    let mut seen = Vec::new();
    for life in 0..10 {
        let d = t.connect().await?;
        let mut member = t.member_with(&d, &format!("life{life}"), sub.clone()).await?;
        let limit =
            d.broker.capabilities().takeover_bound(t.pace().lease) + t.pace().latest(t.pace().long) + t.pace().quiet;
        let Some(got) = member.next_within(limit).await? else {
            member.close().await;
            break;
        };
        seen.push(got.attempt());
        got.nack_after(t.pace().long, "later").await;
        t.elapse(t.pace().retry / 2).await;
        t.crash(&d).await?;
        drop(member);
    }
    ensure!(seen.is_sorted_by(|a, b| a < b), "attempts have to rise, in spite of dead holders: {seen:?}");
    ensure!(seen.len() <= 4, "handed over {} times, though 3 are allowed", seen.len());
    t.dead_letters(&c, GROUP, 1).await?;
    t.all_settled(&c, GROUP).await
}

async fn bug_12_a_configuration_edit_is_an_outage(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let before = t.sub().retry(RetryPolicy::attempts(3).delays([t.pace().retry])).max_in_flight(10);
    let mut member = t.member_with(&c, "a", before).await?;
    sender.send("m").await?;
    member.next().await?.nack("first").await;
    member.close().await;
    let after = t.sub().retry(RetryPolicy::attempts(5).delays([t.pace().retry * 2])).max_in_flight(20);
    let mut member = t.member_with(&c, "b", after).await?;
    let mut attempts = vec![1];
    while attempts.len() < 5
        && let Some(got) = member.next_within(t.pace().patience).await?
    {
        attempts.push(got.attempt());
        got.nack("again").await;
    }
    member.stays_quiet().await?;
    ensure_eq!(attempts, [1, 2, 3, 4, 5], "attempts across the edit from 3 to 5");
    let letters = t.dead_letters(&c, GROUP, 1).await?;
    let attempts = Envelope::read(&letters[0].headers).map(|e| e.attempts);
    ensure_eq!(attempts, Some(5), "attempts in the envelope");
    Ok(())
}

async fn bug_13_rolling_restarts_make_dead_letters(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let n = t.pace().many;
    let labels: Vec<String> = (0..n).map(|i| format!("m{i}")).collect();
    let feeder = {
        let (t, sender, labels) = (t.clone(), sender.clone(), labels.clone());
        t.clone().spawn(async move {
            for (n, label) in labels.iter().enumerate() {
                sender.send_keyed(&format!("k{}", n % 16), label).await?;
                t.elapse(t.pace().retry / 20).await;
            }
            Ok::<(), TestFailure>(())
        })
    };
    let mut crews = std::collections::VecDeque::new();
    for round in 0..20 {
        let member = t.member(&c, &format!("r{round}")).await?;
        let test = t.clone();
        crews.push_back(member.work(move |got| {
            let t = test.clone();
            async move {
                t.elapse(t.pace().retry / 10).await;
                got.ack().await;
            }
        }));
        t.elapse(t.pace().retry / 2).await;
        if crews.len() > 2
            && let Some(oldest) = crews.pop_front()
        {
            oldest.stop().await?;
        }
    }
    t.within("the feeder", t.pace().patience, feeder).await?.doing("the feeder")??;
    t.until("all handled", async || Ok((t.ledger().of(GROUP).len() >= n).then_some(()))).await?;
    t.all_settled(&c, GROUP).await?;
    for crew in crews {
        crew.stop().await?;
    }
    t.ledger().exactly_once(GROUP, &labels)?;
    let tried: Vec<_> = t.ledger().of(GROUP).into_iter().filter(|s| s.attempt != 1).collect();
    ensure!(tried.is_empty(), "clean restarts were counted: {tried:?}");
    t.dead_letters(&c, GROUP, 0).await?;
    Ok(())
}

async fn bug_14_a_delayed_key_blocks_the_others(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut sub = t.sub().ordering(Ordering::PerKey).max_in_flight(4);
    sub.max_blocked = 1_000;
    let mut member = t.member_with(&c, "a", sub).await?;
    sender.send_keyed("k", "k0").await?;
    let first = member.next().await?;
    let n = t.pace().many;
    for i in 1..=n {
        sender.send_keyed("k", &format!("k{i}")).await?;
    }
    // Not before all others are sent: how long that takes is no part of the delay.
    first.nack_after(t.pace().long * 3, "later").await;
    sender.send_keyed("j", "j").await?;
    let watch = Stopwatch::start();
    let got = member.next().await?;
    ensure_eq!(got.label, "j", "what comes while key k waits");
    ensure!(watch.elapsed() < t.pace().long, "key j waited {:?} for key k", watch.elapsed());
    got.ack_ok().await?;
    member.ack_next(n + 1).await?;
    t.all_settled(&c, GROUP).await
}

async fn bug_15_a_slow_group_slows_the_others(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender_with(&c, t.spec_to(t.topic()).group("slow").group("quick")).await?;
    let mut slow = t.member_with(&c, "slow", t.sub_to(t.topic(), "slow").max_in_flight(1)).await?;
    let mut quick = t.member_with(&c, "quick", t.sub_to(t.topic(), "quick").max_in_flight(1)).await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    let held = slow.next().await?;
    quick.ack_next(labels.len()).await?;
    held.ack_ok().await?;
    slow.ack_next(labels.len() - 1).await?;
    for group in ["slow", "quick"] {
        t.ledger().exactly_once(group, &labels)?;
        t.all_settled(&c, group).await?;
    }
    Ok(())
}
