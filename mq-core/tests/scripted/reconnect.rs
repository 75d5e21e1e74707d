//! After a loss: fenced, attached again with the next generation and the place to start from, unconfirmed settlements unknown.

use crate::handler::take;
use crate::rig::{Rig, millis, secs, sub, until};
use mq_api::{Consumer, ErrorKind, Failure, HealthState, Position, Settled};
use mq_core::Resume;

async fn cut(rig: &Rig) {
    let attaches = rig.script.attaches();
    rig.script.cut();
    while rig.script.attaches() == attaches {
        tokio::time::sleep(millis(1)).await;
    }
}

fn resume(rig: &Rig) -> Option<Resume> {
    rig.script.resumes().pop().expect("attached")
}

fn at(unsettled: Option<u64>, seen: u64) -> Option<Resume> {
    Some(Resume { unsettled: unsettled.map(Position::offset), seen: Some(Position::offset(seen)) })
}

#[tokio::test(start_paused = true)]
async fn written_and_unanswered_is_unknown_and_later_settlements_are_stale() {
    let rig = Rig::new();
    rig.toy.publish("m", 2, 10);
    rig.script.set_silent_settles(true);
    let mut consumer = rig.reader(sub()).await;
    let mut held = take(&mut consumer, 2).await;
    let (first, second) = (held.remove(0).ack(), held.remove(0));
    tokio::time::sleep(millis(1)).await;
    cut(&rig).await;
    assert_eq!(first.await, Settled::Unknown);
    assert_eq!(second.ack().await, Settled::Stale);
    assert_eq!(rig.toy.with(|st| st.acked.len()), 1);
}

#[tokio::test(start_paused = true)]
async fn the_place_to_start_from_is_the_lowest_not_known_settled() {
    let rig = Rig::new();
    rig.toy.publish("m", 10, 10);
    let mut consumer = rig.reader(sub()).await;
    assert_eq!(rig.script.resumes(), [None], "nothing before the first session");
    let mut held = take(&mut consumer, 10).await;
    // 0 and 1 acknowledged, 2 to come again later, the rest in hand.
    held.remove(0).ack().await;
    held.remove(0).ack().await;
    held.remove(0).nack_after(secs(3600), "later").await;
    cut(&rig).await;
    assert_eq!(resume(&rig), at(Some(2), 9));
    // A session that dies before it sees anything forgets nothing.
    cut(&rig).await;
    assert_eq!(resume(&rig), at(Some(2), 9));
    drop(held);
    for delivery in take(&mut consumer, 7).await {
        delivery.ack().await;
    }
    cut(&rig).await;
    assert_eq!(resume(&rig), at(Some(2), 9), "it is parked at the broker, and would be lost with the group");
    tokio::time::sleep(secs(3600)).await;
    take(&mut consumer, 1).await.remove(0).ack().await;
    cut(&rig).await;
    assert_eq!(resume(&rig), at(None, 9), "everything is settled");
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_that_was_not_confirmed_is_not_known_settled() {
    let rig = Rig::new();
    rig.toy.publish("m", 2, 10);
    let mut consumer = rig.reader(sub()).await;
    let mut held = take(&mut consumer, 2).await;
    held.remove(0).nack(Failure::permanent("never")).await;
    rig.script.set_silent_settles(true);
    let settling = held.remove(0).nack(Failure::permanent("never"));
    cut(&rig).await;
    assert_eq!(settling.await, Settled::Unknown);
    assert_eq!(resume(&rig), at(Some(1), 1));
}

#[tokio::test(start_paused = true)]
async fn released_and_lost_deliveries_are_not_known_settled_until_they_come_back() {
    let rig = Rig::new();
    rig.toy.publish("m", 3, 10);
    let mut consumer = rig.reader(sub()).await;
    let mut held = take(&mut consumer, 3).await;
    let lane = rig.script.lane();
    let mut tokens = Vec::new();
    lane.held(&mut tokens);
    lane.lose(&tokens[..1]);
    held.remove(0).ack().await;
    held.remove(0).release().await;
    held.remove(0).ack().await;
    take(&mut consumer, 1).await.remove(0).ack().await;
    cut(&rig).await;
    assert_eq!(resume(&rig), at(Some(0), 2));
}

#[tokio::test(start_paused = true)]
async fn buffered_deliveries_of_a_lost_session_are_not_handed_out() {
    let rig = Rig::new();
    rig.toy.publish("m", 5, 10);
    let mut consumer = rig.reader(sub()).await;
    tokio::time::sleep(millis(1)).await;
    rig.script.fail_attaches(ErrorKind::Unavailable, 1000);
    rig.script.cut();
    until(consumer.control().health(), HealthState::Reconnecting).await;
    assert!(crate::handler::nothing_comes(&mut consumer).await);
    assert_eq!(consumer.control().in_flight(), 0);
    rig.script.heal_attach();
    let again = tokio::time::timeout(secs(3), take(&mut consumer, 5)).await.expect("fetching within the longest pause");
    assert!(again.iter().all(|d| d.epoch() > 1 && d.attempt() == 1));
}

#[tokio::test(start_paused = true)]
async fn a_parked_retry_of_a_lost_session_is_the_brokers() {
    let rig = Rig::new();
    rig.toy.publish("m", 1, 10);
    let mut consumer = rig.reader(sub().ordering(mq_api::Ordering::PerKey)).await;
    take(&mut consumer, 1).await.remove(0).nack_after(secs(10), "later").await;
    cut(&rig).await;
    let again = take(&mut consumer, 1).await.remove(0);
    again.ack().await;
    tokio::time::sleep(secs(20)).await;
    assert!(crate::handler::nothing_comes(&mut consumer).await, "the timer of the old slot touches nothing");
    assert_eq!((rig.toy.counts(), consumer.control().in_flight()), ((1, 0, 0), 0));
}
