//! Section 2, second half: what was accepted: retries, bounds, sizes, drops, close.

use crate::case::cases;
use crate::{Check, Doing, GROUP, Stopwatch, Test, TestFailure, ensure, ensure_eq};
use futures_util::future::join_all;
use mq_api::{ErrorKind, Feature, Message, Outcome, ProducerExt};
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

cases! {
    "2.6" p2_6_an_unknown_send_is_tried_again_with_the_same_id needs [] bugs [NoSendRetry] one;
    "2.6" p2_6_a_retry_limit_of_zero_is_allowed needs [] bugs [SendRetryForced] one;
    "2.6" p2_6_at_its_bound_a_producer_waits needs [] bugs [SendBoundIgnored] one;
    "2.7" p2_7_too_large_is_refused_and_the_producer_goes_on needs [] bugs [MaxMessageIgnored] one;
    "2.7" p2_7_a_message_at_the_limit_can_be_dead_lettered needs [Groups Settlement DeadLetters] bugs [DeadLetterIsAck] one;
    "2.8" p2_8_a_dropped_send_is_not_sent_or_counted needs [] bugs [SendTwice];
    "2.8" p2_8_close_flushes_what_was_accepted needs [] bugs [CloseForgetsSends];
    "2.8" p2_8_close_counts_what_is_unknown needs [] bugs [CloseHidesUnknown] one;
    "2.8" p2_8_a_closed_producer_refuses needs [] bugs [ClosedAccepts] one;
}

async fn p2_6_an_unknown_send_is_tried_again_with_the_same_id(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    let mut member = t.member(&d, "a").await?;
    t.hold_answers(&c, true).await?;
    let message = Message::new("again");
    let id = message.id.clone();
    let flying = t.spawn(sender.producer().send(message));
    t.elapse(t.pace().retry).await;
    ensure!(!flying.is_finished(), "a send was answered while all answers are held back");
    t.cut(&c).await?;
    t.hold_answers(&c, false).await?;
    let result = t.within("the send is tried again", t.pace().patience, flying).await?.doing("the send")?;
    result.doing("a send whose first try is unknown")?;
    let mut copies = 0;
    while let Some(got) = member.next_within(t.pace().quiet).await? {
        ensure_eq!(got.id, id, "id of copy {copies}");
        got.ack().await;
        copies += 1;
    }
    ensure!((1..=2).contains(&copies), "{copies} copies of a send that was tried twice");
    Ok(())
}

async fn p2_6_a_retry_limit_of_zero_is_allowed(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender_with(&c, t.spec().retry_for(Duration::ZERO)).await?;
    let mut member = t.member(&d, "a").await?;
    t.hold_answers(&c, true).await?;
    let flying = t.spawn(sender.producer().send(Message::new("once")));
    t.elapse(t.pace().retry).await;
    t.cut(&c).await?;
    t.hold_answers(&c, false).await?;
    let result = t.within("the send ends", t.pace().patience, flying).await?.doing("the send")?;
    let Err(e) = result else { return Err(TestFailure::new("a send was tried again in spite of retry_for = 0")) };
    ensure_eq!(e.outcome(), Some(Outcome::Unknown), "a send whose answer was lost: {e}");
    let n = member.ack_until_quiet().await?;
    ensure_eq!(n, 1, "copies of a message that the broker took and whose answer was lost");
    Ok(())
}

async fn p2_6_at_its_bound_a_producer_waits(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let bounded = [t.spec().max_in_flight(2, 1 << 20), t.spec().max_in_flight(1_000, 2_000)];
    let mut member = t.member(&d, "a").await?;
    for (round, spec) in bounded.into_iter().enumerate() {
        let sender = t.sender_with(&c, spec).await?;
        t.hold_answers(&c, true).await?;
        let big = |name: &str| Message::new(format!("{name}{round}")).header("fill", vec![0; 900]);
        let flying = [t.spawn(sender.producer().send(big("a"))), t.spawn(sender.producer().send(big("b")))];
        let watch = Stopwatch::start();
        let Err(e) = sender.try_send_within(big("c"), t.pace().retry).await else {
            return Err(TestFailure::new("a third send was confirmed at a bound of two"));
        };
        ensure_eq!((e.kind(), e.outcome()), (ErrorKind::Timeout, Some(Outcome::NotSent)), "a send at the bound: {e}");
        ensure!(watch.elapsed() >= t.pace().retry, "a send at the bound did not wait for its time-out");
        t.hold_answers(&c, false).await?;
        for send in flying {
            let result = t.within("held sends end", t.pace().patience, send).await?.doing("the send")?;
            result.doing("a send within the bound")?;
        }
        sender.send_message(big("d")).await?;
        member.ack_next(3).await?;
        sender.producer().close(t.pace().drain).await;
    }
    member.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, ["a0", "b0", "d0", "a1", "b1", "d1"])
}

async fn p2_7_too_large_is_refused_and_the_producer_goes_on(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    ensure_eq!(t.spec().max_message, 1_000_000, "the default limit");
    let at_limit = Message::new(vec![7_u8; 999_990]).key("0123456789");
    ensure_eq!(at_limit.size(), 1_000_000, "size of the message at the limit");
    sender.send_message(at_limit.clone()).await?;
    let over = [
        Message::new(vec![7_u8; 1_000_001]),
        at_limit.clone().header("h", ""),
        Message::new("small").header("large", vec![0; 1_000_000]),
    ];
    for message in over {
        let size = message.size();
        let Err(e) = sender.try_send(message).await else {
            return Err(TestFailure::new(format!("{size} bytes were accepted")));
        };
        ensure_eq!((e.kind(), e.outcome()), (ErrorKind::TooLarge, Some(Outcome::NotSent)), "{e}");
        ensure!(e.to_string().contains(&size.to_string()), "'{e}' does not say how large the message is");
    }
    sender.send("after").await?;
    let got = member.next().await?;
    ensure_eq!(got.size(), 1_000_000, "size of what arrived");
    got.ack_ok().await?;
    let got = member.next().await?;
    ensure_eq!(got.label, "after", "what the producer sent afterwards");
    got.ack_ok().await?;
    member.stays_quiet().await
}

async fn p2_7_a_message_at_the_limit_can_be_dead_lettered(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send_message(Message::new(vec![b'x'; 1_000_000])).await?;
    let long = "because ".repeat(10_000);
    let mut failure = Some(Box::new(mq_api::Failure::permanent(long)));
    let how = mq_api::Disposition::Nack { failure: failure.take(), after: None };
    let settled = member.next().await?.settle(how).await;
    ensure!(settled.is_ok(), "dead-lettering a message at the limit gave {settled:?}");
    let letters = t.dead_letters(&c, GROUP, 1).await?;
    ensure_eq!(letters[0].payload_bytes().len(), 1_000_000, "payload of the dead letter");
    t.all_settled(&c, GROUP).await
}

async fn p2_8_a_dropped_send_is_not_sent_or_counted(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let mut cx = Context::from_waker(Waker::noop());
    for n in 0..t.pace().some {
        let mut sending = pin!(sender.producer().send(Message::new(format!("m{n}"))));
        if n % 2 == 0 {
            let _ready: Poll<_> = sending.as_mut().poll(&mut cx);
        }
    }
    ensure!(sender.producer().flush(t.pace().drain).await, "flush did not end");
    sender.send("last").await?;
    member.ack_until_quiet().await?;
    for (label, n) in t.ledger().counts(GROUP) {
        ensure_eq!(n, 1, "hand-overs of {label}, whose send was dropped");
    }
    ensure!(t.ledger().counts(GROUP).contains_key("last"), "the send after dropped sends is lost");
    t.all_settled(&c, GROUP).await
}

async fn p2_8_close_flushes_what_was_accepted(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    let mut member = t.member(&d, "a").await?;
    let n = t.pace().many;
    let flying: Vec<_> = (0..n).map(|i| sender.producer().send(Message::new(format!("m{i}")))).collect();
    let report = sender.producer().close(t.pace().drain).await;
    ensure_eq!(report.unknown, 0, "sends of unknown fate after a close with time to flush");
    for result in join_all(flying).await {
        result.doing("a send accepted before close")?;
    }
    member.ack_next(n).await?;
    member.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, (0..n).map(|i| format!("m{i}")))
}

async fn p2_8_close_counts_what_is_unknown(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    t.hold_answers(&c, true).await?;
    let flying: Vec<_> = (0..3).map(|i| sender.producer().send(Message::new(format!("m{i}")))).collect();
    let all = t.spawn(join_all(flying));
    t.elapse(t.pace().retry).await;
    let watch = Stopwatch::start();
    let limit = t.pace().long;
    let report = t.within("close is bounded", t.pace().latest(limit), sender.producer().close(limit)).await?;
    t.note(format_args!("closed after {:?}: {report:?}", watch.elapsed()));
    ensure_eq!(report.unknown, 3, "sends of unknown fate");
    let results = t.within("the sends end with the producer", t.pace().patience, all).await?.doing("the sends")?;
    for result in results {
        let outcome = result.err().and_then(|e| e.outcome());
        ensure_eq!(outcome, Some(Outcome::Unknown), "a send that close gave up");
    }
    t.hold_answers(&c, false).await
}

async fn p2_8_a_closed_producer_refuses(t: Test) -> Check {
    let c = t.connect().await?;
    let grouped = c.broker.capabilities().has(Feature::Groups);
    let sender = t.sender_with(&c, if grouped { t.spec() } else { t.spec_to(t.topic()) }).await?;
    sender.send("before").await?;
    for _ in 0..2 {
        let report = sender.producer().close(t.pace().drain).await;
        ensure!(report.is_clean(), "closing an idle producer: {report:?}");
    }
    let Err(e) = sender.try_send(Message::new("after")).await else {
        return Err(TestFailure::new("a closed producer accepted a message"));
    };
    ensure_eq!((e.kind(), e.outcome()), (ErrorKind::Closed, Some(Outcome::NotSent)), "{e}");
    for result in sender.producer().send_all(vec![Message::new("x"), Message::new("y")]).await {
        let kind = result.err().map(|e| e.kind());
        ensure_eq!(kind, Some(ErrorKind::Closed), "a batch on a closed producer");
    }
    Ok(())
}
