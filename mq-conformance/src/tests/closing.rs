//! Section 6, second half: closing, blocking nothing, and leaving nothing.

use crate::case::cases;
use crate::{Check, Doing, GROUP, Stopwatch, Test, TestFailure, ensure, ensure_eq};
use mq_api::{BrokerExt, ErrorKind, Feature, Message, Settled};
use std::time::Duration;

cases! {
    "6.4" p6_4_close_waits_for_what_is_in_hand needs [Groups Settlement] bugs [DrainHurries];
    "6.4" p6_4_close_waits_for_what_a_broadcast_handed_out needs [Broadcast] bugs [DrainHurries];
    "6.4" p6_4_close_gives_back_the_rest_at_once needs [Groups Settlement] bugs [CloseLeaks];
    "6.4" p6_4_close_gives_back_what_is_still_in_hand needs [Groups Settlement] bugs [CloseLeaks];
    "6.4" p6_4_close_is_idempotent needs [] bugs [CloseLeaks];
    "6.4" p6_4_close_is_bounded_while_the_broker_is_away needs [Groups Settlement] bugs [CloseHangs] one;
    "6.4" p6_4_a_settlement_just_before_close_is_flushed needs [Groups Settlement] bugs [AckLost];
    "6.4" p6_4_what_a_connection_made_outlives_its_handle needs [Groups Settlement] bugs [DroppedHandleCloses];
    "6.5" p6_5_nothing_blocks_the_runtime needs [] bugs [BlocksRuntime] one real alone;
    "6.6" p6_6_nothing_is_left_after_close needs [] bugs [TaskLeaks] one alone;
    "6.6" p6_6_nothing_is_left_after_a_broken_connection needs [] bugs [TaskLeaks] one alone;
}

async fn p6_4_close_waits_for_what_is_in_hand(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut first = t.member(&c, "a").await?;
    sender.send("m").await?;
    let held = first.next().await?;
    let control = first.control();
    // Far more than is waited for below: on a busy machine the second member takes its time to join.
    let limit = t.pace().long;
    let closing = t.spawn(async move { control.close(limit * 10).await });
    let mut second = t.member(&d, "b").await?;
    second.stays_quiet_for(limit / 2).await?;
    ensure!(!closing.is_finished(), "close did not wait for the delivery in hand");
    held.ack_ok().await?;
    let report = t.within("close", t.pace().patience, closing).await?.doing("close")?;
    ensure!(report.is_clean() && report.given_back == 0, "{report:?}");
    first.has_ended().await?;
    second.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, ["m"])
}

async fn p6_4_close_waits_for_what_a_broadcast_handed_out(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut receiver = t.member_with(&c, "a", mq_api::Subscription::broadcast(t.topic())).await?;
    sender.send("m").await?;
    let held = receiver.next().await?;
    let control = receiver.control();
    ensure_eq!(control.in_flight(), 1, "deliveries in hand");
    let limit = t.pace().long;
    let mut closing = t.spawn(async move { control.close(limit).await });
    let early = tokio::time::timeout(limit / 2, &mut closing).await;
    ensure!(early.is_err(), "close did not wait for the delivery in hand: {early:?}");
    // There is nothing to settle; this only says that the program is done with it.
    drop(held);
    let report = t.within("close", t.pace().patience, closing).await?.doing("close")?;
    ensure!(report.is_clean(), "{report:?}");
    receiver.has_ended().await
}

async fn p6_4_close_gives_back_the_rest_at_once(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut first = t.member(&c, "a").await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    let got = first.next().await?;
    got.ack_ok().await?;
    let report = first.close().await;
    ensure!(report.is_clean(), "{report:?}");
    first.has_ended().await?;
    let watch = Stopwatch::start();
    let mut second = t.member(&d, "b").await?;
    for _ in 1..labels.len() {
        let got = second.next().await?;
        ensure_eq!(got.attempt(), 1, "attempt of {}, which was prefetched and given back", got.label);
        got.ack_ok().await?;
    }
    // Sooner than what a member that died leaves.
    let limit = Duration::from_secs(15).min(d.broker.capabilities().takeover_bound(t.pace().lease));
    ensure!(watch.elapsed() < limit, "what close gave back came after {:?}", watch.elapsed());
    second.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, &labels)
}

async fn p6_4_close_gives_back_what_is_still_in_hand(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut first = t.member(&c, "a").await?;
    let labels = sender.send_numbered(3).await?;
    let held = first.take(3).await?;
    let watch = Stopwatch::start();
    let limit = t.pace().retry;
    let report = first.close_within(limit).await;
    ensure!(watch.elapsed() >= limit, "close did not wait until its deadline");
    ensure!(watch.elapsed() <= t.pace().latest(limit), "close took {:?}", watch.elapsed());
    ensure_eq!((report.given_back, report.leaked), (3, 0), "given back and leaked, of three in hand");
    let mut second = t.member(&d, "b").await?;
    second.ack_next(3).await?;
    for got in held {
        ensure_eq!(got.ack().await, Settled::Stale, "settling what close gave back");
    }
    second.stays_quiet().await?;
    t.ledger().between(GROUP, &labels, 2)?;
    t.all_settled(&d, GROUP).await
}

async fn p6_4_close_is_idempotent(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("m").await?;
    member.ack_next(1).await?;
    let (control, also) = (member.control(), member.control());
    let limit = t.pace().drain;
    let (one, two) = tokio::join!(control.close(limit), also.close(limit));
    ensure!(one.is_clean() && two.is_clean(), "two closes at once: {one:?}, {two:?}");
    member.has_ended().await?;
    let again = member.close().await;
    ensure!(again.is_clean(), "a third close: {again:?}");
    for _ in 0..2 {
        let report = c.broker.close(t.pace().drain).await;
        ensure!(report.is_clean(), "closing the connection: {report:?}");
    }
    let kind = c.broker.subscribe(t.sub()).await.err().map(|e| e.kind());
    ensure_eq!(kind, Some(ErrorKind::Closed), "subscribing after close");
    let kind = c.broker.producer(t.spec()).await.err().map(|e| e.kind());
    ensure_eq!(kind, Some(ErrorKind::Closed), "making a producer after close");
    let kind = sender.try_send(Message::new("late")).await.err().map(|e| e.kind());
    ensure_eq!(kind, Some(ErrorKind::Closed), "sending after the connection was closed");
    Ok(())
}

async fn p6_4_close_is_bounded_while_the_broker_is_away(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut first = t.member(&c, "a").await?;
    let labels = sender.send_numbered(3).await?;
    let held = first.take(3).await?;
    t.reachable(&c, false).await?;
    let limit = t.pace().retry * 2;
    let watch = Stopwatch::start();
    let report = first.close_within(limit).await;
    ensure!(watch.elapsed() <= t.pace().latest(limit) + limit, "close took {:?}", watch.elapsed());
    t.note(format_args!("closed while away: {report:?}"));
    drop(held);
    t.reachable(&c, true).await?;
    let mut second = t.member(&d, "b").await?;
    second.ack_until_quiet().await?;
    while t.ledger().of(GROUP).len() < labels.len() * 2 {
        second.next().await?.ack_ok().await?;
    }
    t.ledger().between(GROUP, &labels, 2)?;
    t.all_settled(&d, GROUP).await
}

async fn p6_4_a_settlement_just_before_close_is_flushed(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut first = t.member(&c, "a").await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    for got in first.take(labels.len()).await? {
        drop(got.into_delivery().ack());
    }
    let report = first.close().await;
    ensure!(report.is_clean(), "{report:?}");
    let mut second = t.member(&d, "b").await?;
    second.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, &labels)?;
    t.all_settled(&d, GROUP).await
}

/// Programs keep what they use, and let go of the handle it came from; only `close` ends what it made.
async fn p6_4_what_a_connection_made_outlives_its_handle(t: Test) -> Check {
    let c = t.connect_and_own().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    drop(c);
    sender.send("m").await?;
    // Once with a delay: the clocks go on too.
    let delay = t.pace().retry;
    member.next().await?.nack_after(delay, "later").await;
    let again = member.next().await?;
    ensure_eq!(again.attempt(), 2, "attempt after a delay of {delay:?}");
    again.ack_ok().await?;
    member.stays_quiet().await?;
    let report = member.close().await;
    ensure!(report.is_clean(), "{report:?}");
    member.has_ended().await?;
    let report = sender.producer().close(t.pace().drain).await;
    ensure!(report.is_clean(), "{report:?}");
    drop((member, sender));
    // Looking lets go of what the environment has of a connection that nobody has.
    let left = t.env().leftovers().await;
    ensure!(left.is_empty(), "left after all was closed and dropped: {left:?}");
    t.ledger().between(GROUP, &["m".to_owned()], 2)
}

async fn p6_5_nothing_blocks_the_runtime(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    // A clock that ticks in the same thread: whoever blocks the runtime makes a tick late. So does a busy machine, which makes
    // one late that ticks in a thread of its own, too.
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let beside = std::thread::spawn(move || {
        let mut worst = Duration::ZERO;
        loop {
            let watch = std::time::Instant::now();
            let over = stopped.recv_timeout(Duration::from_millis(10));
            worst = worst.max(watch.elapsed());
            if over != Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                return worst;
            }
        }
    });
    let ticker = t.spawn(async move {
        let mut worst = Duration::ZERO;
        for _ in 0..60 {
            let watch = Stopwatch::start();
            tokio::time::sleep(Duration::from_millis(10)).await;
            worst = worst.max(watch.elapsed());
        }
        worst
    });
    let labels = sender.send_numbered(t.pace().many).await?;
    member.ack_next(labels.len()).await?;
    member.close().await;
    let worst = ticker.await.doing("the ticker")?;
    drop(stop);
    let busy = beside.join().unwrap_or_default();
    let limit = Duration::from_millis(200) + 3 * busy;
    ensure!(worst < limit, "something blocked the runtime for {worst:?}; a thread beside it was late by {busy:?}");
    Ok(())
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

async fn use_and_close(t: &Test, cut: bool) -> Check {
    let c = t.connect().await?;
    let found = c.broker.capabilities();
    let grouped = found.has(Feature::Groups) && found.has(Feature::Settlement);
    let spec = if grouped { t.spec() } else { t.spec_to(t.topic()) };
    let sender = t.sender_with(&c, spec).await?;
    let sub = if grouped { t.sub() } else { mq_api::Subscription::broadcast(t.topic()) };
    let mut member = t.member_with(&c, "a", sub).await?;
    sender.send("m").await?;
    let got = member.next().await?;
    if cut {
        t.cut(&c).await?;
    }
    got.ack().await;
    if found.has(Feature::Broadcast) {
        let receiver = t.member_with(&c, "r", mq_api::Subscription::broadcast(t.topic())).await?;
        drop(receiver);
    }
    let report = c.broker.close(t.pace().drain).await;
    // What was in hand over the cut may go back by takeover, when the close comes before the next session.
    ensure!((cut || report.leaked == 0) && report.abandoned == 0, "closing the connection: {report:?}");
    member.has_ended().await
}

async fn nothing_left(t: &Test, cut: bool) -> Check {
    let tasks = tokio::runtime::Handle::current().metrics();
    // The first use may start what a process has once.
    use_and_close(t, cut).await?;
    // Looking lets go of what the environment held for connections that are closed: it has threads too.
    t.env().leftovers().await;
    let (before, tasks_before) = (threads(), tasks.num_alive_tasks());
    for _ in 0..5 {
        use_and_close(t, cut).await?;
    }
    let left = t.env().leftovers().await;
    let what = "threads and tasks end";
    t.until(what, async || Ok((threads() <= before && tasks.num_alive_tasks() <= tasks_before).then_some(())))
        .await
        .map_err(|e| {
            let (now, alive) = (threads(), tasks.num_alive_tasks());
            TestFailure::new(format!("{}: {before} threads before, {now} after, {alive} tasks", e.text()))
        })?;
    ensure!(left.is_empty(), "left after close: {left:?}");
    Ok(())
}

async fn p6_6_nothing_is_left_after_close(t: Test) -> Check {
    nothing_left(&t, false).await
}

async fn p6_6_nothing_is_left_after_a_broken_connection(t: Test) -> Check {
    nothing_left(&t, true).await
}
