//! The test kit says what is so, and shows what happened when it is not.

#![cfg(feature = "memory")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test's panic is its report")]

use anymq::DeadLetterPolicy;
use anymq::prelude::*;
use anymq::testing::{Start, Test, start};
use futures_util::FutureExt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

fn billing() -> Subscription {
    Subscription::group("orders", "billing")
}

async fn bill(Json(card): Json<String>, Attempt(attempt): Attempt) -> Result<(), Failure> {
    match card.as_str() {
        "flaky" if attempt < 3 => Err(Failure::failed("timed out")),
        "refused" => Err(Failure::failed("refused")),
        "unknown" => Err(Failure::permanent("unknown")),
        _ => Ok(()),
    }
}

async fn billing_test() -> Test {
    start(|broker| Worker::new(broker).route(billing(), bill)).await
}

/// The text of the panic of `assertion`.
fn failure(assertion: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(AssertUnwindSafe(assertion)).expect_err("the assertion holds");
    panic.downcast_ref::<String>().cloned().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_refused_card_is_tried_five_times_and_then_dead_lettered() {
    let clock = tokio::time::Instant::now();
    let test = billing_test().await;
    test.send("orders", "refused").await;
    test.all_done().await;
    test.on("orders", "billing").handled(0).attempts(5).retried(4).dead_lettered(1).because("max-attempts", 1);
    test.nothing_else();
    assert!(clock.elapsed() >= Duration::from_secs(1 + 5 + 30 + 120));
}

#[tokio::test(start_paused = true)]
async fn numbers_that_differ_are_named_with_what_happened() {
    let test = billing_test().await;
    test.send("orders", "flaky").await;
    test.send("orders", "unknown").await;
    test.all_done().await;
    let on = || test.on("orders", "billing");
    for (text, wanted) in [
        (failure(|| drop(on().handled(2))), "orders/billing: handled is 1, expected 2"),
        (failure(|| drop(on().attempts(3))), "orders/billing: attempts is 4, expected 3"),
        (failure(|| drop(on().retried(0))), "orders/billing: retried is 2, expected 0"),
        (failure(|| drop(on().dead_lettered(0))), "orders/billing: dead_lettered is 1, expected 0"),
        (failure(|| drop(on().because("crash", 1))), "because of 'crash': 0, expected 1; reasons: {\"permanent\": 1}"),
        (
            failure(|| drop(test.on("orders", "other").handled(1))),
            "orders has no group 'other'; its groups are [billing]",
        ),
        (failure(|| test.sent("orders", 3).nothing_else()), "orders: sent is 2, expected 3"),
    ] {
        assert!(text.contains(wanted), "{wanted} is missing in: {text}");
        assert!(text.contains("what happened:") && text.contains("timed out"), "{text}");
    }
    on().handled(1).attempts(4).dead_lettered(1);
    test.nothing_else();
}

#[tokio::test(start_paused = true)]
async fn what_nobody_asserted_is_found() {
    let test = billing_test().await;
    test.send("orders", "good").await;
    test.all_done().await;
    assert!(failure(|| test.nothing_else()).contains("orders/billing: handled 1"));
    test.on("orders", "billing").handled(1);
    test.nothing_else();

    // Somebody else sends, to a topic and to the group.
    test.broker().producer("mails").await.unwrap().send(Message::new("x")).await.unwrap();
    assert!(failure(|| test.nothing_else()).contains("mails: sent 1, of which the test sent 0"));
    test.sent("mails", 1).nothing_else();
}

#[tokio::test(start_paused = true)]
async fn retries_are_not_nothing() {
    let test = billing_test().await;
    test.send("orders", "flaky").await;
    test.all_done().await;
    test.on("orders", "billing").handled(1);
    assert!(failure(|| test.nothing_else()).contains("orders/billing: retried 2"));
    test.on("orders", "billing").attempts(3);
    test.nothing_else();
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_never_ends_fails_the_test_and_does_not_hang_it() {
    let handler = async || std::future::pending::<()>().await;
    // `max_processing` ends it, as often as the message may be tried.
    let test = start(|broker| Worker::new(broker).route(billing(), handler)).await;
    test.send("orders", "x").await;
    test.all_done().await;
    test.on("orders", "billing").attempts(5).because("timeout", 1);

    // Tried for ever, it is never done.
    let forever = billing().dead_letter(DeadLetterPolicy::Forever);
    let test = start(|broker| Worker::new(broker).route(forever, handler)).await;
    test.send("orders", "x").await;
    let panic = AssertUnwindSafe(test.all_done()).catch_unwind().await.unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains("not done after"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_dead_members_messages_reach_another() {
    let slow = async |State(()): State<()>| tokio::time::sleep(Duration::from_secs(1)).await;
    let members = ["anna", "bert"].map(|name| billing().member(name).max_in_flight(1));
    let test = start(|broker| Worker::new(broker).state(()).route(members, slow)).await;
    for n in 0..4 {
        test.send("orders", &n).await;
    }
    // Both have one in hand.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(test.crash("anna") && !test.crash("nobody"));
    test.all_done().await;
    test.on("orders", "billing").handled(4).lost(1).attempts(5);
    test.nothing_else();
}

#[tokio::test(start_paused = true)]
async fn a_profile_refuses_what_its_broker_would() {
    let ordered = billing().ordering(Ordering::PerKey);
    let begin = Start::default()
        .url("memory://?profile=redis")
        .worker(async |broker: Arc<dyn Broker>| Ok(Worker::new(broker).route(ordered, bill)));
    let panic = AssertUnwindSafe(begin).catch_unwind().await.unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains("the worker does not start") && text.contains("per-key order"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_worker_ends_as_sigterm_would_end_it() {
    let test = billing_test().await;
    test.send("orders", "good").await;
    test.all_done().await;
    let report = test.shut_down().await.unwrap();
    assert_eq!((report.acked, report.close.is_clean()), (1, true));
    test.on("orders", "billing").handled(1);
    test.nothing_else();
}

// all_done is for every handler, whatever its subscription leaves to settle.
#[tokio::test(start_paused = true)]
async fn all_done_waits_for_broadcast_and_at_most_once_handlers() {
    for sub in [Subscription::broadcast("orders"), billing().guarantee(anymq::Guarantee::AtMostOnce), billing()] {
        let what = format!("{sub:?}");
        let done = Arc::new(AtomicU32::new(0));
        let handler = {
            let done = done.clone();
            move || {
                let done = done.clone();
                async move {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    done.fetch_add(1, SeqCst);
                }
            }
        };
        let test = start(move |broker| Worker::new(broker).route(sub, handler)).await;
        for _ in 0..3 {
            test.send("orders", "x").await;
        }
        test.all_done().await;
        assert_eq!(done.load(SeqCst), 3, "{what}");
    }
}

// A broadcast consumer of the test's own is looked at afterwards; all_done does not wait for it.
#[tokio::test(start_paused = true)]
async fn all_done_does_not_wait_for_what_the_test_reads_itself() {
    let test = billing_test().await;
    let mut seen = test.broker().subscribe(Subscription::broadcast("orders")).await.unwrap();
    test.send("orders", "good").await;
    test.all_done().await;
    assert_eq!(seen.recv().await.unwrap().unwrap().message().payload.as_deref(), Some(&b"\"good\""[..]));
    test.on("orders", "billing").handled(1);
    test.nothing_else();
}

#[tokio::test(start_paused = true)]
async fn another_worker_takes_over_from_a_dead_one() {
    let slow = async || tokio::time::sleep(Duration::from_secs(1)).await;
    let worker = |name: &'static str| move |broker| Worker::new(broker).route(billing().member(name), slow);
    let test = start(worker("anna")).await;
    test.send("orders", "x").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(test.crash("anna"));
    // Nobody is left who could handle it.
    let panic = AssertUnwindSafe(test.all_done()).catch_unwind().await.unwrap_err();
    assert!(panic.downcast_ref::<String>().unwrap().contains("the worker ended"));

    test.another(worker("bert")).await;
    test.all_done().await;
    test.on("orders", "billing").handled(1).lost(1).attempts(2);
    test.nothing_else();
}

#[tokio::test(start_paused = true)]
async fn what_the_deadline_cuts_off_is_for_the_next_process() {
    let slow = async || tokio::time::sleep(Duration::from_secs(60)).await;
    let test =
        start(|broker| Worker::new(broker).shutdown_deadline(Duration::from_secs(5)).route(billing(), slow)).await;
    test.send("orders", "x").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let report = test.shut_down().await.unwrap();
    assert_eq!((report.acked, report.close.given_back), (0, 1));
    test.another(|broker| Worker::new(broker).route(billing(), async || {})).await;
    test.all_done().await;
    test.on("orders", "billing").handled(1).attempts(1);
    test.nothing_else();
}

// A handler that ignores the error of a send would pass for one that sent.
#[tokio::test(start_paused = true)]
async fn a_send_that_was_refused_is_found() {
    let test = Start::default()
        .worker(async |broker| {
            let receipts = broker.producer(ProducerSpec::new("receipts").max_message(10)).await?;
            let bill = |State(receipts): State<Arc<dyn Producer>>| async move {
                let _ = receipts.send(Message::new("longer than ten bytes")).await;
                let _ = receipts.send_all(vec![Message::new("short"), Message::new("longer than ten bytes")]).await;
            };
            Ok(Worker::new(broker).state(receipts).route(billing(), bill))
        })
        .await;
    test.send("orders", "x").await;
    test.all_done().await;
    test.on("orders", "billing").handled(1);
    test.sent("receipts", 1);
    let text = failure(|| test.nothing_else());
    assert!(text.contains("receipts: refused 2, of which the test sent 0"), "{text}");
    assert!(text.contains("refused: a message of 21 bytes"), "{text}");
    assert!(failure(|| test.refused("receipts", 1).nothing_else()).contains("receipts: refused is 2, expected 1"));
    test.refused("receipts", 2).nothing_else();
}

#[tokio::test(start_paused = true)]
async fn a_send_that_a_planned_fault_refused_is_found() {
    let test = Start::default()
        .url("memory://?faults=full:1")
        .worker(async |broker| {
            let receipts = broker.producer("receipts").await?;
            let _ = receipts.send(Message::new("x")).await;
            Ok(Worker::new(broker).route(billing(), bill))
        })
        .await;
    assert!(failure(|| test.nothing_else()).contains("receipts: refused 1"));
    test.refused("receipts", 1).nothing_else();
}

#[tokio::test(start_paused = true)]
async fn what_retention_took_can_be_asserted() {
    let sub = billing().retention(anymq::Retention::log(2));
    let test = start(|broker| Worker::new(broker).route(sub, async || {})).await;
    test.worker().pause();
    for n in 0..5 {
        test.send("orders", &n).await;
    }
    test.worker().resume();
    test.all_done().await;
    test.on("orders", "billing").handled(2);
    assert!(failure(|| test.nothing_else()).contains("orders/billing: trimmed 3"));
    test.on("orders", "billing").trimmed(3);
    test.nothing_else();
}
