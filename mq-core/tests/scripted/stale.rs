//! Handles of what is no longer owned: stale, harmless, and charged until the application lets go.

use crate::handler::{nothing_comes, take};
use crate::rig::{Rig, millis, secs, sub};
use mq_api::{Consumer, ConsumerExt, Ordering, RetryPolicy, Settled};

#[tokio::test(start_paused = true)]
async fn an_old_handle_does_not_settle_the_next_hand_over_of_the_same_slot() {
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    // `PerKey` parks in place: the slot stays.
    let sub = sub().ordering(Ordering::PerKey).max_processing(secs(10));
    let sub = sub.retry(RetryPolicy::attempts(5).delays([secs(1)]));
    let mut consumer = rig.reader(sub).await;
    let first = take(&mut consumer, 1).await.remove(0);
    let lost = first.lost();
    let second = take(&mut consumer, 1).await.remove(0);
    assert_eq!((first.attempt(), second.attempt()), (1, 2));
    tokio::time::timeout(millis(1), lost).await.expect("the first is lost");
    assert!(!first.is_owned() && second.is_owned());
    assert_eq!(first.ack().await, Settled::Stale);
    assert!(second.is_owned(), "untouched");
    assert_eq!(rig.toy.counts(), (0, 0, 1));
    assert!(matches!(second.ack().await, Settled::Confirmed(_)));
    assert_eq!((rig.toy.counts(), consumer.control().in_flight()), ((1, 0, 0), 0));
}

#[tokio::test(start_paused = true)]
async fn lost_leases_turn_handles_stale_and_the_others_go_on() {
    let rig = Rig::new();
    rig.toy.publish("m", 4, 10);
    let mut consumer = rig.reader(sub()).await;
    let mut held = take(&mut consumer, 3).await;
    let lane = rig.script.lane();
    let mut tokens = Vec::new();
    lane.held(&mut tokens);
    // One in hand, and the one still buffered.
    lane.lose(&[tokens[1], tokens[3]]);
    assert!(nothing_comes(&mut consumer).await);
    let lost = held.remove(1);
    lost.lost().await;
    assert_eq!(consumer.control().in_flight(), 3, "charged until it is let go of");
    assert_eq!(lost.nack("late").await, Settled::Stale);
    assert_eq!(consumer.control().in_flight(), 2);
    for delivery in held {
        assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    }
    rig.toy.with(|st| assert_eq!((st.acked.len(), st.retries.len(), st.foreign), (2, 0, 0)));
    assert_eq!((consumer.control().in_flight(), lane.span()), (0, (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn what_the_application_holds_is_bounded_over_lost_sessions() {
    let rig = Rig::new();
    rig.toy.publish("m", 20, 10);
    let mut consumer = rig.reader(sub().max_in_flight(4).max_processing(secs(60))).await;
    let mut held = take(&mut consumer, 4).await;
    rig.script.cut();
    tokio::time::sleep(secs(5)).await;
    assert!(nothing_comes(&mut consumer).await, "four are in its hands, owned or not");
    drop(held.pop().unwrap().ack());
    let next = take(&mut consumer, 1).await;
    assert!(nothing_comes(&mut consumer).await);
    drop(next);
    drop(held.split_off(1));
    held.append(&mut take(&mut consumer, 3).await);
    // The one that is never let go of: `max_processing` bounds what it costs.
    tokio::time::sleep(secs(50)).await;
    assert_eq!(consumer.control().in_flight(), 4);
    let stuck = held.remove(0);
    for delivery in held {
        delivery.ack().await;
    }
    tokio::time::sleep(secs(7)).await;
    assert_eq!(take(&mut consumer, 4).await.len(), 4);
    assert_eq!(stuck.ack().await, Settled::Stale);
    tokio::time::sleep(millis(1)).await;
    assert!(consumer.control().in_flight() <= 4);
}

#[tokio::test(start_paused = true)]
async fn a_batch_in_hand_over_a_lost_session_gives_its_credit_back_as_a_whole() {
    let rig = Rig::new();
    rig.toy.publish("m", 8, 10);
    let mut consumer = rig.reader(sub().max_in_flight(4)).await;
    let mut batch = mq_api::Deliveries::new();
    consumer.recv_batch(10, &mut batch).await.unwrap();
    rig.script.cut();
    tokio::time::sleep(secs(5)).await;
    assert_eq!((batch.len(), consumer.control().in_flight()), (4, 4));
    assert_eq!(batch.ack_all().await, Settled::Stale);
    assert_eq!(take(&mut consumer, 4).await.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_partition_that_drains_hands_out_no_more_and_waits_for_hands() {
    let rig = Rig::new();
    rig.toy.publish("m", 5, 10);
    let mut consumer = rig.reader(sub()).await;
    let mut held = take(&mut consumer, 3).await;
    let lane = rig.script.lane();
    // The toy would take what goes back at once again.
    consumer.control().pause();
    lane.begin_drain();
    tokio::time::sleep(millis(1)).await;
    assert!(nothing_comes(&mut consumer).await);
    let waiting = lane.clone();
    let drained = tokio::spawn(async move { std::future::poll_fn(|cx| waiting.poll_drained(cx)).await });
    tokio::time::sleep(millis(1)).await;
    held.remove(0).ack().await;
    held.remove(0).nack_after(secs(60), "later").await;
    assert!(!drained.is_finished());
    held.remove(0).release().await;
    tokio::time::timeout(millis(1), drained).await.expect("woken by whatever way the last one went").unwrap();
    assert_eq!(consumer.control().in_flight(), 0);
}
