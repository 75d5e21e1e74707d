//! Of those mistakes, the ones about what is known: of a handle, a settlement, a send.

use super::leases::lose_to_another;
use crate::case::cases;
use crate::{Check, Doing, GROUP, Test, TestFailure, ensure, ensure_eq};
use mq_api::{
    AttemptCounts, Durability, ErrorKind, Feature, Group, Message, Outcome, ProducerExt, Retention, Settled, Topic,
};
use std::time::Duration;

cases! {
    "4.5" bug_04_an_old_handle_settles_a_new_delivery needs [Groups Settlement Retry] bugs [StaleConfirmed] one;
    "4.0" bug_05_a_lost_ack_is_reported_as_done needs [Groups Settlement] bugs [UnknownConfirmed] one;
    "2.3" bug_06_a_timed_out_send_is_called_not_sent needs [] bugs [UnknownAsNotSent] one;
    "2.3" bug_07_a_partial_fan_out_is_called_rejected needs [Groups Settlement] bugs [FullHidden] one;
    "2.3" bug_08_results_are_matched_by_id needs [] bugs [ResultsById] one;
    "2.6" bug_16_a_producer_outside_loses_what_nobody_awaits needs [] bugs [LoseMessage] one;
    "5.1" bug_17_a_send_inside_a_handler_is_confirmed_first needs [Groups Settlement] bugs [ConfirmUnsent] one;
}

async fn bug_04_an_old_handle_settles_a_new_delivery(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    // Two: the old handle is in hand until it is settled.
    let mut first = t.member_with(&c, "a", t.sub().max_in_flight(2)).await?;
    sender.send("m").await?;
    let old = first.next().await?;
    let mut second = t.member(&d, "b").await?;
    let (old, other) = lose_to_another(&t, &c, old, &mut second).await?;
    // Back to the first: the same member owns the same message again, by another delivery.
    second.control().pause();
    other.nack_after(t.pace().retry, "not here").await;
    second.close().await;
    let again = first.next().await?;
    ensure_eq!(again.label, "m", "what came back to the first member");
    ensure_eq!(old.ack().await, Settled::Stale, "the old handle");
    ensure!(again.is_owned(), "the old handle settled the new delivery");
    if d.broker.capabilities().has(Feature::Backlog) {
        let backlog = d.broker.admin().backlog(&t.topic(), &Group::new(GROUP)).await?;
        ensure!(backlog.in_flight.admits(1), "{backlog:?} after an old handle was acked");
    }
    again.ack_ok().await?;
    first.stays_quiet().await?;
    t.all_settled(&d, GROUP).await
}

async fn bug_05_a_lost_ack_is_reported_as_done(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut member = t.member(&c, "a").await?;
    let rounds = t.pace().some;
    for round in 0..rounds {
        sender.send(&format!("m{round}")).await?;
        let got = member.next().await?;
        t.hold_answers(&c, true).await?;
        let acking = t.spawn(async move { (got.label.clone(), got.ack().await) });
        t.elapse(t.pace().retry / 4).await;
        t.cut(&c).await?;
        t.hold_answers(&c, false).await?;
        let (label, settled) = t.within("the ack is answered", t.pace().patience, acking).await?.doing("the ack")?;
        t.note(format_args!("ack of {label} across a cut: {settled:?}"));
        if t.answers_settlements().await? {
            // A driver that writes it again until it is answered can also say that it is done, and then it is.
            let again = t.settles_until_answered() && matches!(settled, Settled::Confirmed(_));
            // One that had to wait behind another's answer was not written; then it comes again, see below.
            let honest = again || matches!(settled, Settled::Unknown | Settled::Stale);
            ensure!(honest, "an ack that was written and whose answer was lost: {settled:?}");
        }
        let mut again = 0;
        while let Some(got) = member.next_within(t.pace().retry * 2).await? {
            // What an earlier round left unknown may come again only now, and hold back this round's.
            again += u32::from(got.label == label);
            let handed = t.ledger().attempts(GROUP, &got.label).len();
            if t.capabilities().await?.attempts == AttemptCounts::Exact {
                ensure_eq!(got.attempt() as usize, handed, "attempt of hand-over {handed} of {}", got.label);
            }
            got.ack().await;
        }
        ensure!(again <= 1, "{again} copies after one lost ack");
        if settled == Settled::Stale {
            ensure_eq!(again, 1, "copies of a message of whose ack nothing was written");
        }
        if matches!(settled, Settled::Confirmed(level) if level > Durability::Sent) {
            ensure_eq!(again, 0, "copies of a message whose ack was confirmed");
        }
    }
    member.ack_until_settled(&d, GROUP).await?;
    Ok(())
}

async fn bug_06_a_timed_out_send_is_called_not_sent(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    let mut member = t.member(&d, "a").await?;
    sender.send("warm").await?;
    member.ack_next(1).await?;
    t.hold_answers(&c, true).await?;
    let Err(e) = sender.try_send_within(Message::new("late"), t.pace().retry).await else {
        return Err(TestFailure::new("a send was confirmed while no answer passes"));
    };
    ensure_eq!(e.outcome(), Some(Outcome::Unknown), "a send that timed out after it was written: {e}");
    t.hold_answers(&c, false).await?;
    let n = member.ack_until_quiet().await?;
    ensure_eq!(n, 1, "copies of it");
    sender.send("next").await?;
    member.ack_next(1).await
}

async fn bug_07_a_partial_fan_out_is_called_rejected(t: Test) -> Check {
    let c = t.connect().await?;
    let full = Retention::Handled { max: 5 };
    let spec = t.spec_to(t.topic()).group("quick").group("full").retention(full).retry_for(Duration::ZERO);
    let sender = match mq_api::BrokerExt::producer(&*c.broker, spec.clone()).await {
        Ok(_) => t.sender_with(&c, spec).await?,
        Err(e) => {
            ensure_eq!(e.kind(), ErrorKind::Unsupported, "asking for a bounded topic: {e}");
            return Ok(());
        }
    };
    let quick = t.member_with(&c, "quick", t.sub_to(t.topic(), "quick").retention(full)).await?;
    let crew = quick.work(|got| async {
        got.ack().await;
    });
    let mut refused = None;
    for n in 0..20 {
        let label = format!("m{n}");
        if let Err(e) = sender.try_send(Message::new(label.clone())).await {
            refused = Some((label, e));
            break;
        }
        t.until("the quick group has it", async || Ok(t.ledger().labels("quick").contains(&label).then_some(())))
            .await?;
    }
    let Some((label, e)) = refused else { return Err(TestFailure::new("20 sends fit into a topic of 5")) };
    t.elapse(t.pace().quiet).await;
    let quick_has = t.ledger().labels("quick").contains(&label);
    crew.stop().await?;
    match e.outcome() {
        Some(Outcome::Rejected) => {
            ensure_eq!(e.kind(), ErrorKind::Full, "{e}");
            ensure!(!quick_has, "a message that was rejected, stored nowhere, reached a group");
        }
        // Some queue may have it.
        Some(Outcome::Unknown) => {}
        other => return Err(TestFailure::new(format!("a send to a full topic is {other:?}: {e}"))),
    }
    let mut slow = t.member_with(&c, "slow", t.sub_to(t.topic(), "full").retention(full)).await?;
    slow.ack_until_quiet().await?;
    if !quick_has {
        ensure!(!t.ledger().labels("full").contains(&label), "a message that was rejected was stored");
    }
    sender.send("room again").await?;
    slow.ack_next(1).await
}

async fn bug_08_results_are_matched_by_id(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender_with(&c, t.spec().max_message(1_000)).await?;
    let mut member = t.member(&c, "a").await?;
    let rounds = t.pace().many;
    for round in 0..rounds {
        let good = Message::new(format!("m{round}")).id("twin");
        let bad = Message::new(vec![0; 2_000]).id("twin");
        let (first, second) = if round % 2 == 0 { (good, bad) } else { (bad, good) };
        let flying = (sender.producer().send(first), sender.producer().send(second));
        let (one, two) = futures_util::future::join(flying.0, flying.1).await;
        let (good, bad) = if round % 2 == 0 { (one, two) } else { (two, one) };
        good.doing(format_args!("the good twin of round {round}"))?;
        let outcome = bad.err().and_then(|e| e.outcome());
        ensure_eq!(outcome, Some(Outcome::NotSent), "the bad twin of round {round}");
    }
    member.ack_next(rounds).await?;
    member.stays_quiet().await?;
    t.count("deliveries", rounds);
    t.ledger().exactly_once(GROUP, (0..rounds).map(|n| format!("m{n}")))
}

async fn bug_16_a_producer_outside_loses_what_nobody_awaits(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let n = t.pace().some;
    let mut sink = sender.producer().clone().sink(4);
    for i in 0..n {
        let message = Message::new(format!("m{i}"));
        futures_util::SinkExt::feed(&mut sink, message).await?;
    }
    drop(sink);
    ensure!(sender.producer().flush(t.pace().drain).await, "flush did not end");
    member.ack_next(n).await?;
    member.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, (0..n).map(|i| format!("m{i}")))
}

async fn bug_17_a_send_inside_a_handler_is_confirmed_first(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    let next: Topic = t.topic_named("next");
    let onward = t.sender_with(&c, t.spec_to(next.clone()).group("after")).await?;
    let member = t.member(&c, "a").await?;
    let crew = {
        let onward = onward.clone();
        member.work(move |got| {
            let onward = onward.clone();
            async move {
                match onward.send_message(Message::new(got.label.clone())).await {
                    Ok(_) => drop(got.ack().await),
                    Err(e) => drop(got.nack(e).await),
                }
            }
        })
    };
    let labels = sender.send_numbered(t.pace().some).await?;
    t.until("all passed on", async || Ok((t.ledger().of(GROUP).len() >= labels.len()).then_some(()))).await?;
    t.all_settled(&c, GROUP).await?;
    t.crash(&c).await?;
    crew.abort();
    let mut after = t.member_with(&d, "b", t.sub_to(next, "after")).await?;
    after.ack_next(labels.len()).await?;
    after.stays_quiet().await?;
    t.ledger().exactly_once("after", &labels)
}
