//! Section 3, first half: what a subscription gets.

use crate::case::cases;
use crate::{Check, Doing, GROUP, Test, TestFailure, ensure, ensure_eq};
use mq_api::{
    BrokerExt, ConsumerExt, ErrorKind, Event, GapCause, Guarantee, Message, Retention, Settled, Subscription,
};
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

cases! {
    "3.1" p3_1_a_message_stays_until_it_is_acked needs [Groups Settlement Retry] bugs [DropIsAck LoseMessage];
    "3.1" p3_1_at_most_once_is_never_redelivered needs [Groups] bugs [AtMostOnceIgnored];
    "3.1" p3_1_what_retention_took_is_a_gap needs [Groups Settlement] bugs [GapHidden] one;
    "3.2" p3_2_no_more_in_hand_than_asked_for needs [Groups Settlement] bugs [InFlightIgnored];
    "3.2" p3_2_no_more_bytes_in_hand_than_asked_for needs [Groups Settlement] bugs [BytesIgnored] one;
    "3.2" p3_2_a_message_over_the_byte_bound_comes_alone needs [Groups Settlement] bugs [BytesIgnored] one;
    "3.2" p3_2_what_is_prefetched_is_bounded needs [Groups Settlement] bugs [InFlightIgnored];
    "3.2" p3_2_parked_messages_have_a_bound_of_their_own needs [Groups Settlement Retry Delay] bugs [DelayIgnored] one;
    "3.4" p3_4_a_cancelled_recv_loses_nothing needs [] bugs [CancelLoses];
    "3.4" p3_4_a_dropped_consumer_leaves_nothing_stuck needs [Groups Settlement] bugs [DropIsAck];
    "3.5" p3_5_a_foreign_message_is_delivered_raw needs [] bugs [ForeignLost] one;
    "3.5" p3_5_an_undecodable_message_is_dead_lettered_and_blocks_nothing needs [Groups Settlement DeadLetters] bugs [DeadLetterIsAck];
    "3.5" p3_5_a_typed_tombstone_is_none needs [] bugs [TombstoneIsEmpty] one;
    "3.6" p3_6_a_broadcast_receiver_that_falls_behind_is_told needs [Broadcast] bugs [LagHidden] one;
    "3.6" p3_6_a_broadcast_receiver_that_was_away_is_told needs [Broadcast] bugs [GapHidden] one;
}

async fn p3_1_a_message_stays_until_it_is_acked(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    // Every way in which an application may let go of a delivery, short of an ack.
    for (n, got) in member.take(labels.len()).await?.into_iter().enumerate() {
        match n % 4 {
            0 => got.forget(),
            1 => drop(got.nack("not now").await),
            2 => drop(got.release().await),
            _ => drop(got.into_delivery().nack("and nobody waits")),
        }
    }
    member.ack_next(labels.len()).await?;
    member.stays_quiet().await?;
    for (label, n) in t.ledger().counts(GROUP) {
        ensure_eq!(n, 2, "hand-overs of {label}");
    }
    t.count("deliveries", t.ledger().of(GROUP).len());
    t.all_settled(&c, GROUP).await
}

async fn p3_1_at_most_once_is_never_redelivered(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let sub = || t.sub().guarantee(Guarantee::AtMostOnce).max_in_flight(1);
    let mut member = t.member_with(&c, "a", sub()).await?;
    let labels = sender.send_numbered(4).await?;
    let got = member.next().await?;
    ensure_eq!(got.nack("ignored").await, Settled::Untracked, "settling an at-most-once delivery");
    let held = member.next().await?;
    held.forget();
    let held = member.next().await?;
    t.crash(&c).await?;
    drop(held);
    drop(member);
    let mut other = t.member_with(&d, "b", sub()).await?;
    let rest = other.ack_taken_over().await?.len();
    // One in hand at a time, so that at most the one behind it was taken and lost with its member.
    ensure!(rest <= 1, "{rest} came after three of four were handed over");
    for (label, n) in t.ledger().counts(GROUP) {
        ensure_eq!(n, 1, "hand-overs of {label}");
    }
    ensure!(labels.len() >= t.ledger().of(GROUP).len(), "more was handed over than was sent");
    Ok(())
}

async fn p3_1_what_retention_took_is_a_gap(t: Test) -> Check {
    let c = t.connect().await?;
    let log = Retention::Log { max: Some(10), age: None };
    let sender = match c.broker.producer(t.spec().retention(log)).await {
        Ok(_) => t.sender_with(&c, t.spec().retention(log)).await?,
        Err(e) => {
            // A broker without logs refuses by name; then nothing can be taken from a group, and that is as good.
            ensure_eq!(e.kind(), ErrorKind::Unsupported, "asking for a log: {e}");
            return Ok(());
        }
    };
    let mut member = t.member_with(&c, "a", t.sub().max_in_flight(1).retention(log)).await?;
    let mut events = member.events();
    sender.send("first").await?;
    let held = member.next().await?;
    let many = t.pace().many;
    sender.send_numbered(many).await?;
    held.ack().await;
    let n = member.ack_until_quiet().await?;
    ensure!(n < many, "a log of 10 handed over all of {many}: nothing was lost, so nothing can be told");
    let gaps: Vec<_> =
        events.drain().into_iter().filter_map(|e| if let Event::Gap(g) = e { Some(g) } else { None }).collect();
    ensure!(!gaps.is_empty(), "retention took {} messages and no gap was reported", many - n);
    ensure!(gaps.iter().all(|g| g.cause == GapCause::Retention), "cause of {gaps:?}");
    ensure!(gaps.iter().all(|g| g.topic == t.topic()), "topic of {gaps:?}");
    if gaps.iter().all(|g| g.count.is_some()) {
        let lost: u64 = gaps.iter().filter_map(|g| g.count).sum();
        ensure_eq!(lost as usize, many - n, "messages that the gaps speak of");
    }
    Ok(())
}

async fn p3_2_no_more_in_hand_than_asked_for(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member_with(&c, "a", t.sub().max_in_flight(5)).await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    let mut held = member.take(5).await?;
    member.stays_quiet().await?;
    ensure_eq!(member.control().in_flight(), 5, "in_flight() with five in hand");
    let state = member.control().health().current().state;
    ensure_eq!(state, mq_api::HealthState::Backpressured, "health at the bound");
    while t.ledger().of(GROUP).len() < labels.len() {
        let Some(got) = held.pop() else { break };
        got.ack_ok().await?;
        held.push(member.next().await?);
        ensure!(held.len() <= 5, "more than five in hand");
    }
    for got in held {
        got.ack_ok().await?;
    }
    t.ledger().exactly_once(GROUP, &labels)?;
    t.all_settled(&c, GROUP).await
}

async fn p3_2_no_more_bytes_in_hand_than_asked_for(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut sub = t.sub();
    sub.max_in_flight_bytes = 10_000;
    let mut member = t.member_with(&c, "a", sub).await?;
    for _ in 0..20 {
        sender.send_message(Message::new(vec![b'x'; 1_000])).await?;
    }
    let mut held = Vec::new();
    while let Some(got) = member.next_within(t.pace().quiet).await? {
        held.push(got);
        ensure!(held.len() <= 10, "more than 10,000 bytes in hand");
    }
    ensure_eq!(held.len(), 10, "deliveries of 1,000 bytes within 10,000");
    for got in held {
        got.ack_ok().await?;
    }
    member.ack_next(10).await
}

async fn p3_2_a_message_over_the_byte_bound_comes_alone(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut sub = t.sub();
    sub.max_in_flight_bytes = 10_000;
    let mut member = t.member_with(&c, "a", sub).await?;
    for size in [100, 50_000, 100] {
        sender.send_message(Message::new(vec![b'x'; size])).await?;
    }
    let small = member.next().await?;
    member.stays_quiet().await?;
    small.ack_ok().await?;
    let large = member.next().await?;
    ensure_eq!(large.payload_bytes().len(), 50_000, "size of what came");
    member.stays_quiet().await?;
    large.ack_ok().await?;
    member.ack_next(1).await
}

async fn p3_2_what_is_prefetched_is_bounded(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    // A member that settles nothing holds at most its bound; another gets all the rest, unless the first owns a partition.
    let mut slow = t.member_with(&c, "slow", t.sub().max_in_flight(5)).await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    let mut held = Vec::new();
    while let Some(got) = slow.next_within(t.pace().retry).await? {
        held.push(got);
        ensure!(held.len() <= 5, "more than five in hand");
    }
    let owned = t.has(mq_api::Feature::Partitions).await?;
    let mut quick = t.member_with(&d, "quick", t.sub()).await?;
    let n = quick.ack_until_quiet().await?;
    ensure!(
        owned || n >= labels.len() - 5,
        "{n} of {} reached the other member; the first holds the rest",
        labels.len()
    );
    ensure!(slow.control().in_flight() <= 5, "a member holds {}", slow.control().in_flight());
    for got in held {
        got.ack_ok().await?;
    }
    slow.close().await;
    while t.ledger().firsts(GROUP).len() < labels.len() {
        quick.next().await?.ack_ok().await?;
    }
    quick.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, &labels)?;
    t.all_settled(&d, GROUP).await
}

async fn p3_2_parked_messages_have_a_bound_of_their_own(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut sub = t.sub().max_in_flight(2);
    sub.max_parked = 4;
    let mut member = t.member_with(&c, "a", sub).await?;
    let labels = sender.send_numbered(10).await?;
    for _ in 0..10 {
        let got = member.next().await?;
        ensure_eq!(got.attempt(), 1, "attempt of {} before any delay has passed", got.label);
        got.nack_after(t.pace().long, "later").await;
        ensure!(member.control().in_flight() <= 2, "delayed messages count as in flight");
    }
    for _ in 0..10 {
        let got = member.next().await?;
        ensure_eq!(got.attempt(), 2, "attempt of {} after its delay", got.label);
        got.ack_ok().await?;
    }
    member.stays_quiet().await?;
    ensure_eq!(t.ledger().of(GROUP).len(), labels.len() * 2, "hand-overs");
    t.all_settled(&c, GROUP).await
}

async fn p3_4_a_cancelled_recv_loses_nothing(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let labels: Vec<String> = (0..t.pace().many).map(|n| format!("m{n}")).collect();
    let feeder = {
        let (sender, labels) = (sender.clone(), labels.clone());
        t.spawn(async move {
            for label in &labels {
                sender.send(label).await?;
                tokio::task::yield_now().await;
            }
            Ok::<(), TestFailure>(())
        })
    };
    while t.ledger().of(GROUP).len() < labels.len() {
        // A future that is polled once and dropped, as a `select!` does with the branch that loses.
        let polled = {
            let mut recv = pin!(member.consumer().recv());
            recv.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        };
        let got = match polled {
            Poll::Ready(Ok(Some(delivery))) => member.record(delivery),
            Poll::Ready(other) => return Err(TestFailure::new(format!("recv gave {other:?}"))),
            Poll::Pending => member.next().await?,
        };
        got.ack_ok().await?;
    }
    feeder.await.doing("the feeder")??;
    member.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, &labels)?;
    t.all_settled(&c, GROUP).await
}

async fn p3_4_a_dropped_consumer_leaves_nothing_stuck(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    let mut first = t.member(&c, "a").await?;
    let held = first.next().await?;
    // Not closed: dropped, with one delivery in hand that outlives it.
    drop(first);
    let mut second = t.member(&d, "b").await?;
    held.forget();
    second.ack_next(labels.len()).await?;
    second.stays_quiet().await?;
    t.ledger().between(GROUP, &labels, 2)?;
    t.all_settled(&d, GROUP).await
}

async fn p3_5_a_foreign_message_is_delivered_raw(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("before").await?;
    let answer = t.env().put_foreign(&t.topic(), b"\xff\x00 not ours").await;
    t.hook(answer)?;
    sender.send("after").await?;
    let mut seen = Vec::new();
    for _ in 0..3 {
        let got = member.next().await?;
        seen.push(got.payload_bytes().to_vec());
        got.ack_ok().await?;
    }
    ensure!(seen.contains(&b"\xff\x00 not ours".to_vec()), "the foreign message came as {seen:?}");
    member.stays_quiet().await?;
    t.all_settled(&c, GROUP).await
}

async fn p3_5_an_undecodable_message_is_dead_lettered_and_blocks_nothing(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = c.broker.subscribe(t.sub()).await?.json::<u32>();
    for text in ["1", "not json", "2", "{}", "3"] {
        sender.send(text).await?;
    }
    let mut values = Vec::new();
    for _ in 0..3 {
        let next = t.within("what can be decoded", t.pace().patience, member.recv()).await?;
        let Some(got) = next? else { return Err(TestFailure::new("the stream ended")) };
        values.push(*got.value());
        got.ack().await;
    }
    values.sort_unstable();
    ensure_eq!(values, [1, 2, 3], "values");
    let more = tokio::time::timeout(t.pace().quiet, member.recv()).await;
    ensure!(more.is_err(), "more came than can be decoded: {more:?}");
    let letters = t.dead_letters(&c, GROUP, 2).await?;
    for letter in &letters {
        let envelope = mq_api::Envelope::read(&letter.headers);
        let reason = envelope.as_ref().map(|e| e.reason.clone());
        ensure_eq!(reason, Some(mq_api::Reason::Undecodable), "reason of a dead letter");
    }
    t.all_settled(&c, GROUP).await
}

async fn p3_5_a_typed_tombstone_is_none(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = c.broker.subscribe(t.sub()).await?.json::<Option<u32>>();
    sender.send_message(Message::tombstone("k")).await?;
    sender.send_message(Message::json(&7_u32)?.key("k")).await?;
    for wanted in [None, Some(7)] {
        let next = t.within("a typed delivery", t.pace().patience, member.recv()).await?;
        let Some(got) = next? else { return Err(TestFailure::new("the stream ended")) };
        ensure_eq!(*got.value(), wanted, "value");
        got.ack().await;
    }
    Ok(())
}

async fn p3_6_a_broadcast_receiver_that_falls_behind_is_told(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender_with(&c, t.spec_to(t.topic())).await?;
    let sub = Subscription::broadcast(t.topic()).max_in_flight(10);
    let mut receiver = t.member_with(&c, "slow", sub).await?;
    let mut events = receiver.events();
    let n = t.pace().many * 5;
    sender.send_numbered(n).await?;
    t.elapse(t.pace().retry).await;
    let mut got = 0;
    while let Some(delivery) = receiver.next_within(t.pace().quiet).await? {
        delivery.ack().await;
        got += 1;
    }
    let lagged: u64 = events.drain().iter().map(|e| if let Event::Lagged(n) = e { *n } else { 0 }).sum();
    ensure_eq!(got as u64 + lagged, n as u64, "received ({got}) and reported as dropped ({lagged})");
    ensure!(got < n, "a receiver that holds at most 10 was given all of {n}: its memory is not bounded");
    sender.send("next").await?;
    let next = receiver.next().await?;
    ensure_eq!(next.label, "next", "what comes after a lag");
    Ok(())
}

async fn p3_6_a_broadcast_receiver_that_was_away_is_told(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender_with(&d, t.spec_to(t.topic())).await?;
    let mut receiver = t.member_with(&c, "a", Subscription::broadcast(t.topic())).await?;
    let mut events = receiver.events();
    sender.send("before").await?;
    receiver.next().await?.ack().await;
    t.reachable(&c, false).await?;
    t.until("the receiver notices", async || {
        let state = receiver.control().health().current().state;
        Ok((state == mq_api::HealthState::Reconnecting).then_some(()))
    })
    .await?;
    let _ = sender.try_send(Message::new("meanwhile")).await;
    t.reachable(&c, true).await?;
    let gap = t
        .until("a gap", async || {
            Ok(events.drain().into_iter().find_map(|e| if let Event::Gap(g) = e { Some(g) } else { None }))
        })
        .await?;
    ensure_eq!(gap.cause, GapCause::Disconnected, "cause of the gap");
    receiver.becomes(mq_api::HealthState::Running).await?;
    sender.send("after").await?;
    let got = receiver.next().await?;
    ensure_eq!(got.label, "after", "what comes after the gap");
    Ok(())
}
