//! Subscriptions with nothing to settle: at most once, and broadcast.

use crate::handler::{nothing_comes, take};
use crate::rig::{Rig, millis, secs, sub};
use mq_api::{Consumer, ConsumerExt, Event, Failure, Guarantee, Message, Ordering, Settled, Subscription};

#[tokio::test(start_paused = true)]
async fn settled_before_the_hand_over() {
    let rig = Rig::new();
    rig.script.set_settle_delay(secs(1));
    rig.toy.publish("m", 5, 10);
    let mut consumer = rig.reader(sub().guarantee(Guarantee::AtMostOnce)).await;
    assert!(nothing_comes(&mut consumer).await, "the broker has not confirmed");
    let held = take(&mut consumer, 5).await;
    assert_eq!(rig.toy.counts(), (5, 0, 0), "acknowledged before any was handed out");
    for delivery in held {
        assert_eq!(delivery.nack(Failure::failed("x")).await, Settled::Untracked);
    }
    assert!(nothing_comes(&mut consumer).await);
    assert_eq!(consumer.control().in_flight(), 0);
    assert!(consumer.close(secs(1)).await.is_clean());
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn with_keys_those_that_wait_are_settled_when_they_go_out() {
    let rig = Rig::new();
    for i in 0..6 {
        rig.toy.store(Message::new("x").key(["a", "b"][i % 2]).id(format!("m-{i}")), 1);
    }
    let sub = sub().guarantee(Guarantee::AtMostOnce).ordering(Ordering::PerKey);
    let mut consumer = rig.reader(sub).await;
    let mut order = Vec::new();
    for left in (0..6).rev() {
        let delivery = take(&mut consumer, 1).await.remove(0);
        order.push(delivery.id.to_string());
        assert!(rig.toy.counts().0 >= 6 - left, "settled before");
        delivery.ack().await;
    }
    assert_eq!(order, ["m-0", "m-1", "m-2", "m-3", "m-4", "m-5"]);
    assert_eq!(rig.toy.counts(), (6, 0, 0));
    assert_eq!(consumer.control().in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn not_handed_out_if_the_broker_did_not_confirm() {
    let rig = Rig::new();
    rig.script.set_silent_settles(true);
    rig.toy.publish("m", 2, 10);
    let mut consumer = rig.reader(sub().guarantee(Guarantee::AtMostOnce)).await;
    assert!(nothing_comes(&mut consumer).await);
    rig.script.cut();
    tokio::time::sleep(secs(5)).await;
    assert!(nothing_comes(&mut consumer).await, "unknown: it must not be handed out");
    assert_eq!(consumer.control().in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn held_too_long_is_not_redelivered() {
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    let mut consumer = rig.reader(sub().guarantee(Guarantee::AtMostOnce).max_processing(secs(5))).await;
    let held = take(&mut consumer, 1).await;
    tokio::time::sleep(secs(10)).await;
    assert!(nothing_comes(&mut consumer).await);
    rig.toy.with(|st| assert!(st.retries.is_empty() && st.dead.is_empty()));
    assert_eq!(consumer.control().in_flight(), 0, "its credit came back");
    drop(held);
    assert_eq!(consumer.control().in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn close_does_not_give_back_what_was_settled() {
    let rig = Rig::new();
    rig.toy.publish("m", 4, 10);
    let mut consumer = rig.reader(sub().guarantee(Guarantee::AtMostOnce)).await;
    let held = take(&mut consumer, 1).await;
    let report = consumer.close(secs(1)).await;
    assert_eq!((report.given_back, report.leaked, report.unknown), (0, 0, 0));
    rig.toy.with(|st| assert_eq!(st.releases, 0));
    drop(held);
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn a_thread_that_commits_sees_them_settled() {
    // The lane, without the thread: what it would commit.
    let rig = Rig::new();
    rig.toy.publish("m", 3, 10);
    let mut consumer = rig.reader(sub().guarantee(Guarantee::AtMostOnce)).await;
    let held = take(&mut consumer, 1).await;
    let lane = rig.script.lane();
    assert_eq!(lane.first_unsettled(), None);
    lane.visit(|slot| assert!(slot.settled));
    let mut leases = Vec::new();
    lane.held(&mut leases);
    assert!(leases.is_empty(), "nothing has a lease");
    drop(held);
}

fn broadcast() -> Subscription {
    Subscription::broadcast("orders")
}

#[tokio::test(start_paused = true)]
async fn a_slow_broadcast_subscriber_lags_and_memory_is_bounded() {
    let rig = Rig::new();
    let mut consumer = rig.pusher(broadcast().max_in_flight(10), 1_000_000).await;
    let mut events = consumer.control().events();
    for round in 0..100 {
        rig.toy.publish(&format!("r{round}"), 100, 10);
        tokio::time::sleep(millis(1)).await;
        assert!(consumer.control().in_flight() <= 10);
    }
    let lagged: u64 = events.drain().iter().map(|e| if let Event::Lagged(n) = e { *n } else { 0 }).sum();
    assert_eq!(lagged, 10_000 - 10);
    let last = take(&mut consumer, 10).await;
    assert_eq!(last[9].id.to_string(), "r99-99", "the oldest were dropped");
    assert_eq!(rig.script.lane().span(), (10, 10));
    for delivery in last {
        assert_eq!(delivery.ack().await, Settled::Untracked);
    }
    rig.toy.publish("after", 1, 10);
    assert_eq!(take(&mut consumer, 1).await.len(), 1);
    let report = consumer.close(secs(1)).await;
    assert!(report.is_clean() && report.given_back == 0, "{report:?}");
    rig.toy.with(|st| assert_eq!((st.releases, st.acked.len()), (0, 0), "nothing to settle at the broker"));
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn the_bytes_of_a_broadcast_subscriber_are_bounded_too() {
    let rig = Rig::new();
    let mut consumer = rig.pusher(broadcast().max_in_flight_bytes(1000), 1_000_000).await;
    rig.toy.publish("m", 50, 100);
    tokio::time::sleep(millis(1)).await;
    let mut events = consumer.control().events();
    assert_eq!(events.drain(), [Event::Lagged(40)]);
    assert_eq!(take(&mut consumer, 10).await.len(), 10);
}

#[tokio::test(start_paused = true)]
async fn a_close_waits_for_a_broker_that_is_slow_to_confirm() {
    // Somebody waits for what is settled on the broker's side: it is not his fault that it takes longer than a second.
    let rig = Rig::new();
    let mut consumer = rig.reader(sub().guarantee(Guarantee::AtMostOnce)).await;
    rig.script.set_settle_delay(secs(5));
    rig.toy.publish("m", 3, 10);
    assert!(tokio::time::timeout(secs(2), consumer.recv()).await.is_err(), "the broker has not confirmed");
    let closing = tokio::spawn(consumer.close(secs(25)));
    let mut got = 0;
    while let Ok(Some(delivery)) = consumer.recv().await {
        delivery.ack().await;
        got += 1;
    }
    assert_eq!((got, rig.toy.counts()), (3, (3, 0, 0)), "handed out, settled");
    assert!(closing.await.expect("closes").is_clean());
    rig.assert_nothing_left().await;
}
