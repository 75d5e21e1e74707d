//! Section 2, first half: what a send tells.

use crate::case::cases;
use crate::{Check, Doing, GROUP, Test, TestFailure, ensure, ensure_eq};
use futures_util::future::join_all;
use mq_api::{Batch, ErrorKind, HealthState, Message, Outcome, ProducerExt, Run};

cases! {
    "2.1" p2_1_ok_means_that_the_broker_has_it needs [Groups Settlement] bugs [ConfirmUnsent];
    "2.2" p2_2_nobody_to_take_it_is_told_or_stored needs [] bugs [UnroutableHidden] one;
    "2.3" p2_3_a_refused_message_was_not_sent needs [] bugs [OutcomeMissing] one;
    "2.3" p2_3_never_written_is_not_sent needs [] bugs [NotSentAsUnknown] one;
    "2.4" p2_4_a_batch_has_one_result_each_in_order needs [] bugs [BatchResultsReversed];
    "2.4" p2_4_a_large_batch_is_stored_once_and_in_order needs [] bugs [SendTwice];
    "2.5" p2_5_a_key_keeps_its_order_when_sends_run_concurrently needs [] bugs [SendsReordered];
    "2.5" p2_5_a_cut_in_the_pipeline_keeps_the_order_of_keys needs [] bugs [SendsReordered];
}

async fn p2_1_ok_means_that_the_broker_has_it(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    let mut labels = Vec::new();
    for n in 0..t.pace().some {
        let label = format!("m{n}");
        sender.send(&label).await?;
        labels.push(label);
    }
    // The sender dies at once after the last confirmation.
    t.crash(&c).await?;
    let mut member = t.member(&d, "a").await?;
    member.ack_next(labels.len()).await?;
    member.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, &labels)?;
    t.all_settled(&d, GROUP).await
}

async fn p2_2_nobody_to_take_it_is_told_or_stored(t: Test) -> Check {
    let c = t.connect().await?;
    let found = c.broker.capabilities();
    let sender = t.sender_with(&c, t.spec_to(t.topic())).await?;
    let result = sender.try_send(Message::new("early")).await;
    if found.detects_unroutable {
        let Err(e) = result else {
            return Err(TestFailure::new("a send that no queue takes was confirmed"));
        };
        ensure_eq!((e.kind(), e.outcome()), (ErrorKind::Unroutable, Some(Outcome::Rejected)), "{e}");
        return Ok(());
    }
    let receipt = result.doing("sending without a group")?;
    if found.counts_receivers {
        ensure_eq!(receipt.receivers, Some(0), "receivers of a message that nobody listens for");
        let mut listener = t.member_with(&c, "a", mq_api::Subscription::broadcast(t.topic())).await?;
        ensure_eq!(sender.send("heard").await?.receivers, Some(1), "receivers of a message with one listener");
        listener.next().await?.ack().await;
        return Ok(());
    }
    ensure!(
        found.retains_without_group,
        "a broker that neither reports nor keeps what no group takes loses it silently"
    );
    let mut member = t.member(&c, "a").await?;
    let got = member.next().await?;
    ensure_eq!(got.label, "early", "what a later group gets");
    got.ack_ok().await
}

async fn p2_3_a_refused_message_was_not_sent(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender_with(&c, t.spec().max_message(1_000)).await?;
    let mut member = t.member(&c, "a").await?;
    let Err(e) = sender.try_send(Message::new(vec![0; 1_001])).await else {
        return Err(TestFailure::new("a message over the limit was sent"));
    };
    ensure_eq!((e.kind(), e.outcome()), (ErrorKind::TooLarge, Some(Outcome::NotSent)), "{e}");
    member.stays_quiet().await
}

async fn p2_3_never_written_is_not_sent(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("first").await?;
    member.ack_next(1).await?;
    t.reachable(&c, false).await?;
    // The first send may meet the connection that is dying: its outcome is unknown. Once the producer knows, none is written.
    drop(sender.try_send_within(Message::new("probe"), t.pace().long).await);
    let Err(e) = sender.try_send_within(Message::new("never"), t.pace().retry).await else {
        return Err(TestFailure::new("a send was confirmed while the broker is away"));
    };
    ensure_eq!(e.outcome(), Some(Outcome::NotSent), "a send that waited for a connection in vain: {e}");
    t.reachable(&c, true).await?;
    member.becomes(HealthState::Running).await?;
    sender.send("last").await?;
    member.ack_until_quiet().await?;
    let labels = t.ledger().labels(GROUP);
    ensure!(!labels.contains(&"never".to_owned()), "a message that was reported as not sent arrived");
    ensure_eq!(labels.iter().filter(|l| *l == "last").count(), 1, "hand-overs of the message sent afterwards");
    Ok(())
}

async fn p2_4_a_batch_has_one_result_each_in_order(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender_with(&c, t.spec().max_message(1_000)).await?;
    let mut member = t.member(&c, "a").await?;
    let some = t.pace().some;
    let bad = |n: usize| n % 7 == 3;
    let messages = (0..some)
        .map(|n| if bad(n) { Message::new(vec![b'x'; 2_000]) } else { Message::new(format!("m{n}")) })
        .collect();
    let results = sender.producer().send_all(messages).await;
    ensure_eq!(results.len(), some, "number of results");
    for (n, result) in results.iter().enumerate() {
        match result {
            Ok(_) => ensure!(!bad(n), "message {n} of the batch is too large and was confirmed"),
            Err(e) => {
                ensure!(bad(n), "message {n} of the batch failed because of a neighbour: {e}");
                ensure_eq!((e.kind(), e.outcome()), (ErrorKind::TooLarge, Some(Outcome::NotSent)), "{e}");
            }
        }
    }
    let wanted: Vec<String> = (0..some).filter(|n| !bad(*n)).map(|n| format!("m{n}")).collect();
    member.ack_next(wanted.len()).await?;
    member.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, wanted)
}

async fn p2_4_a_large_batch_is_stored_once_and_in_order(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let n = t.pace().many * 5;
    let labels: Vec<String> = (0..n).map(|i| format!("m{i}")).collect();
    let batch = Batch::from(labels.iter().map(|l| Message::new(l.clone()).key("k")).collect::<Vec<_>>());
    let batch = sender.producer().send_batch(batch).await;
    ensure!(batch.messages.is_empty(), "sending drains the batch; {} messages are left", batch.messages.len());
    ensure_eq!(batch.confirmed(), n, "confirmed messages of the batch");
    let runs: usize = batch.runs().iter().map(|r| if let Run::Ok { n, .. } = r { *n as usize } else { 1 }).sum();
    ensure_eq!(runs, n, "outcomes in the runs of the batch");
    member.ack_next(n).await?;
    member.stays_quiet().await?;
    ensure_eq!(t.ledger().labels(GROUP), labels, "what arrived, in order");
    t.count("deliveries", n);
    t.all_settled(&c, GROUP).await
}

fn per_key(t: &Test, key: &str) -> Vec<String> {
    let mut firsts: Vec<String> = Vec::new();
    for seen in t.ledger().of(GROUP) {
        if seen.key.as_deref() == Some(key) && !firsts.contains(&seen.label) {
            firsts.push(seen.label);
        }
    }
    firsts
}

async fn p2_5_a_key_keeps_its_order_when_sends_run_concurrently(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let (keys, each) = (8, t.pace().many / 8);
    let mut flying = Vec::new();
    for n in 0..each {
        for key in 0..keys {
            let message = Message::new(format!("k{key}-{n:04}")).key(format!("k{key}"));
            flying.push(sender.producer().send(message));
        }
    }
    // Awaited backwards: call order counts, not the order of polls.
    flying.reverse();
    for result in join_all(flying).await {
        result.doing("a concurrent send")?;
    }
    member.ack_next(keys * each).await?;
    member.stays_quiet().await?;
    for key in 0..keys {
        let wanted: Vec<String> = (0..each).map(|n| format!("k{key}-{n:04}")).collect();
        ensure_eq!(per_key(&t, &format!("k{key}")), wanted, "order of key k{key}");
    }
    t.count("deliveries", keys * each);
    Ok(())
}

async fn p2_5_a_cut_in_the_pipeline_keeps_the_order_of_keys(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    let mut member = t.member(&d, "a").await?;
    let (keys, each) = (3, t.pace().some);
    t.hold_answers(&c, true).await?;
    let mut flying = Vec::new();
    for n in 0..each {
        for key in 0..keys {
            let message = Message::new(format!("k{key}-{n:04}")).key(format!("k{key}"));
            flying.push(sender.producer().send(message));
        }
    }
    let all = t.spawn(join_all(flying));
    t.elapse(t.pace().retry).await;
    t.cut(&c).await?;
    t.hold_answers(&c, false).await?;
    let results = t.within("sends end after a cut", t.pace().patience, all).await?.doing("the sends")?;
    let confirmed = results.iter().filter(|r| r.is_ok()).count();
    ensure_eq!(confirmed, keys * each, "sends confirmed within the retry limit");
    member.ack_until_quiet().await?;
    for key in 0..keys {
        let wanted: Vec<String> = (0..each).map(|n| format!("k{key}-{n:04}")).collect();
        ensure_eq!(per_key(&t, &format!("k{key}")), wanted, "first occurrences of key k{key}");
    }
    Ok(())
}
