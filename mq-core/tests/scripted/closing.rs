//! Drain and close: waits for hands, gives back the rest, ends in time also when the broker is away, leaves nothing behind.

use crate::handler::take;
use crate::rig::{Rig, millis, secs, sub, until};
use mq_api::{Consumer, ConsumerExt, HealthState, Settled};
use tokio::time::Instant;

#[tokio::test(start_paused = true)]
async fn waits_for_what_is_in_hand_and_gives_back_what_is_buffered() {
    let rig = Rig::new();
    rig.toy.publish("m", 10, 10);
    let mut consumer = rig.reader(sub().max_in_flight(8)).await;
    let mut held = take(&mut consumer, 3).await;
    tokio::time::sleep(millis(10)).await;
    assert_eq!(consumer.control().in_flight(), 8);
    let closing = consumer.close(secs(10));
    let began = Instant::now();
    let last = held.split_off(1);
    tokio::time::sleep(secs(2)).await;
    assert_eq!(rig.toy.pending(), 3, "the five buffered ones went back at once");
    assert!(matches!(held.remove(0).ack().await, Settled::Confirmed(_)));
    for delivery in last {
        assert!(matches!(delivery.ack().await, Settled::Confirmed(_)));
    }
    let report = closing.await;
    assert_eq!(began.elapsed().as_secs(), 2, "it ends when the last one is settled");
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.given_back, 5);
    assert_eq!(rig.toy.counts(), (3, 0, 7));
    assert!(consumer.recv().await.unwrap().is_none(), "ends with None");
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn a_read_that_returns_after_close_began_goes_back_at_once() {
    let rig = Rig::new();
    rig.script.set_fetch_delay(millis(500));
    let consumer = rig.reader(sub()).await;
    rig.toy.publish("m", 5, 10);
    tokio::time::sleep(millis(100)).await;
    let began = Instant::now();
    let report = consumer.close(secs(30)).await;
    assert!(began.elapsed() < secs(2), "took {:?}", began.elapsed());
    assert_eq!((rig.toy.ready(), rig.toy.pending()), (5, 0));
    assert!(report.is_clean(), "{report:?}");
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_broker_pushes_after_close_began_goes_back() {
    let rig = Rig::new();
    let mut consumer = rig.pusher(sub(), 100).await;
    rig.toy.publish("a", 1, 10);
    let held = take(&mut consumer, 1).await;
    let closing = consumer.close(secs(5));
    rig.toy.publish("b", 3, 10);
    tokio::time::sleep(millis(100)).await;
    assert_eq!(consumer.control().in_flight(), 1);
    drop(held);
    let report = closing.await;
    assert!(report.is_clean(), "{report:?}");
    assert_eq!((rig.toy.ready(), rig.toy.pending()), (4, 0));
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn past_the_deadline_the_rest_goes_back_and_late_acks_are_stale() {
    let rig = Rig::new();
    rig.toy.publish("m", 3, 10);
    let mut consumer = rig.reader(sub()).await;
    let held = take(&mut consumer, 3).await;
    let began = Instant::now();
    let report = consumer.close(secs(4)).await;
    assert!(began.elapsed() >= secs(4) && began.elapsed() < millis(4600), "{:?}", began.elapsed());
    assert_eq!((report.given_back, report.unknown, report.leaked), (3, 0, 0));
    assert_eq!(rig.toy.counts(), (0, 0, 3));
    for delivery in held {
        assert_eq!(delivery.ack().await, Settled::Stale);
    }
    rig.assert_nothing_left().await;
    assert_eq!(rig.toy.with(|st| st.foreign), 0);
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_hangs_is_abandoned_and_nobody_waits_for_ever() {
    let rig = Rig::new();
    rig.toy.publish("m", 2, 10);
    rig.script.set_no_stop(true);
    rig.script.set_silent_settles(true);
    let mut consumer = rig.reader(sub()).await;
    let mut held = take(&mut consumer, 2).await;
    let settling = held.remove(0).ack();
    let report = tokio::time::timeout(secs(20), consumer.close(secs(1))).await.expect("bounded");
    assert_eq!((report.unknown, report.leaked, report.abandoned), (1, 1, 1), "{report:?}");
    let answer = tokio::time::timeout(secs(1), settling).await.expect("answered");
    assert_eq!(answer, Settled::Unknown);
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn close_while_the_broker_is_away_is_bounded_and_counts_what_leaked() {
    let rig = Rig::new();
    rig.toy.publish("m", 4, 10);
    let mut consumer = rig.reader(sub()).await;
    let held = take(&mut consumer, 2).await;
    rig.script.fail_attaches(mq_api::ErrorKind::Unavailable, 1000);
    rig.script.cut();
    until(consumer.control().health(), HealthState::Reconnecting).await;
    drop(held);
    let began = Instant::now();
    let report = consumer.close(secs(3)).await;
    assert!(began.elapsed() <= secs(4), "{:?}", began.elapsed());
    assert_eq!((report.given_back, report.leaked), (0, 4), "{report:?}");
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn an_ack_lost_during_close_is_counted_unknown() {
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    rig.script.set_silent_settles(true);
    let mut consumer = rig.reader(sub()).await;
    let settling = take(&mut consumer, 1).await.remove(0).ack();
    tokio::time::sleep(millis(10)).await;
    let closing = consumer.close(secs(5));
    rig.script.fail_attaches(mq_api::ErrorKind::Unavailable, 1000);
    rig.script.cut();
    let report = closing.await;
    assert_eq!(report.unknown, 1, "{report:?}");
    assert_eq!(settling.await, Settled::Unknown);
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn close_is_idempotent_and_dropping_its_future_does_not_stop_it() {
    let rig = Rig::new();
    rig.toy.publish("m", 3, 10);
    let mut consumer = rig.reader(sub()).await;
    let held = take(&mut consumer, 1).await;
    drop(consumer.close(secs(5)));
    let (first, second) = (consumer.close(secs(60)), consumer.control().close(secs(1)));
    drop(held);
    let (first, second) = tokio::join!(first, second);
    assert_eq!(first, second);
    assert_eq!(consumer.close(secs(1)).await, first, "also afterwards");
    assert_eq!(consumer.control().health().current().state, HealthState::Closed);
    rig.assert_nothing_left().await;
    drop(consumer);
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn a_dropped_consumer_gives_back_what_was_buffered_and_lets_hands_finish() {
    let rig = Rig::new();
    rig.toy.publish("m", 4, 10);
    let mut consumer = rig.reader(sub()).await;
    let mut held = take(&mut consumer, 2).await;
    drop(consumer);
    tokio::time::sleep(millis(10)).await;
    assert_eq!((rig.toy.ready(), rig.toy.pending()), (2, 2));
    assert!(matches!(held.remove(0).ack().await, Settled::Confirmed(_)));
    drop(held);
    rig.assert_nothing_left().await;
    assert_eq!(rig.toy.counts(), (1, 0, 3));
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_that_cannot_be_written_does_not_keep_its_waiter_over_close() {
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    rig.script.writes(|_| crate::script::Write::Reject);
    let mut consumer = rig.pusher(sub(), 10).await;
    let settling = take(&mut consumer, 1).await.remove(0).dead_letter("no");
    let waiter = tokio::spawn(settling);
    tokio::time::sleep(millis(10)).await;
    let report = consumer.close(secs(2)).await;
    assert_eq!(report.unknown, 1, "{report:?}");
    let answer = tokio::time::timeout(secs(1), waiter).await.expect("answered").unwrap();
    assert_eq!(answer, Settled::Unknown);
    assert_eq!(rig.toy.counts(), (0, 0, 1), "the original stays");
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn drops_and_nacks_while_closing() {
    let rig = Rig::new();
    rig.toy.publish("m", 3, 10);
    let mut consumer = rig.reader(sub()).await;
    let mut held = take(&mut consumer, 3).await;
    let closing = consumer.close(secs(10));
    drop(held.remove(0));
    held.remove(0).nack("failed").await;
    held.remove(0).release().await;
    closing.await;
    rig.toy.with(|st| {
        assert_eq!(st.releases, 2, "a drop after close began goes back at once");
        assert_eq!(st.retries.len(), 1);
    });
    rig.assert_nothing_left().await;
}

/// "Closes all of it within `deadline`, side by side": the deadline is for consumers and producers together.
#[tokio::test(start_paused = true)]
async fn a_roster_closes_within_its_deadline() {
    let rig = crate::rig::Rig::new();
    rig.toy.publish("m", 1, 10);
    let roster = mq_core::Roster::default();
    let mut consumer = rig.reader(crate::rig::sub()).await;
    let _held = mq_api::ConsumerExt::recv(&mut consumer).await.unwrap().unwrap();
    roster.consumer(mq_api::Consumer::control(&consumer), mq_core::Reserved::default()).await.unwrap();
    let producer = rig.producer("orders").await;
    rig.script.writes(|_| crate::script::Write::Silent);
    drop(mq_api::Producer::send(&*producer, mq_api::Message::new("x")));
    roster.producer(&producer).await.unwrap();
    let start = tokio::time::Instant::now();
    roster.close(crate::rig::secs(25), async { 0 }).await;
    assert!(start.elapsed() < crate::rig::secs(30), "close(25 s) took {:?}", start.elapsed());
}

/// As of a consumer: "bounded" by the deadline of each who asks, whoever asked first.
#[tokio::test(start_paused = true)]
async fn a_second_close_is_over_by_its_own_deadline() {
    use crate::rig::{Rig, secs};
    use mq_api::{Message, Producer};
    for roster in [false, true] {
        let rig = Rig::new();
        rig.script.writes(|_| crate::script::Write::Silent);
        let producer = rig.producer("orders").await;
        drop(producer.send(Message::new("x")));
        let all = mq_core::Roster::default();
        all.producer(&producer).await.unwrap();
        let close = async |deadline| match roster {
            false => producer.close(deadline).await,
            true => all.close(deadline, async { 0 }).await,
        };
        let start = tokio::time::Instant::now();
        let second = async {
            tokio::time::sleep(secs(1)).await;
            close(secs(1)).await
        };
        let (first, second) = tokio::join!(close(secs(20)), second);
        assert_eq!((first.unknown, second), (1, first));
        assert!(start.elapsed() < secs(5), "close(1 s) took {:?}; a roster: {roster}", start.elapsed());
        rig.assert_nothing_left().await;
    }
}
