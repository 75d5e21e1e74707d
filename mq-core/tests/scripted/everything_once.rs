//! Every message is settled exactly once although sessions are lost midway and `recv` is cancelled all the time.

use crate::handler::{Seen, recv_cancelled};
use crate::rig::{Rig, millis, secs, sub};
use mq_api::{Consumer, ConsumerExt, Settled};
use mq_core::EngineConsumer;

const N: usize = 3000;

/// Acks everything; cuts the session after every 500th delivery, holding that one over the cut.
async fn run(rig: &Rig, mut consumer: EngineConsumer, unsettled: impl Fn() -> usize) {
    let (mut seen, mut acked, mut stale, mut unknown, mut cuts) = (Seen::default(), 0, 0, 0, 0);
    while unsettled() > 0 {
        let next = tokio::time::timeout(secs(60), recv_cancelled(&mut consumer)).await;
        let delivery = next.expect("something comes as long as there is something").expect("open");
        seen.note(&delivery);
        assert!(consumer.control().in_flight() <= 64, "the bound holds");
        if seen.hand_overs() % 500 == 0 && cuts < 5 {
            cuts += 1;
            let attaches = rig.script.attaches();
            rig.script.cut();
            delivery.lost().await;
            assert_eq!(delivery.ack().await, Settled::Stale, "a late ack is stale");
            stale += 1;
            while rig.script.attaches() == attaches {
                tokio::time::sleep(millis(1)).await;
            }
            continue;
        }
        match delivery.ack().await {
            Settled::Confirmed(_) => acked += 1,
            Settled::Stale => stale += 1,
            Settled::Unknown => unknown += 1,
            Settled::Untracked => unreachable!(),
        }
    }
    assert_eq!((acked, cuts), (N, 5), "stale {stale}, unknown {unknown}");
    rig.toy.with(|st| {
        st.acked.sort();
        st.acked.dedup();
        assert_eq!((st.acked.len(), st.foreign), (N, 0), "each acked once");
    });
    seen.assert_rising();
    let report = consumer.close(secs(5)).await;
    assert!(report.is_clean() && report.given_back == 0, "{report:?}");
    assert_eq!(consumer.control().in_flight(), 0);
    rig.assert_nothing_left().await;
}

#[tokio::test(start_paused = true)]
async fn blocking_reader() {
    let rig = Rig::new();
    rig.toy.publish("m", N, 10);
    let consumer = rig.reader(sub().max_in_flight(64)).await;
    let toy = rig.toy.clone();
    run(&rig, consumer, move || toy.counts().2).await;
}

#[tokio::test(start_paused = true)]
async fn pusher() {
    let rig = Rig::new();
    rig.toy.publish("m", N, 10);
    let consumer = rig.pusher(sub().max_in_flight(64), 64).await;
    let toy = rig.toy.clone();
    run(&rig, consumer, move || toy.counts().2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn os_thread() {
    let rig = Rig::new();
    rig.toy.publish("m", N, 10);
    let consumer = rig.threaded(sub().max_in_flight(64), secs(30)).await;
    let toy = rig.toy.clone();
    run(&rig, consumer, move || toy.unsettled_in_log()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocking_reader_on_two_threads() {
    let rig = Rig::new();
    rig.toy.publish("m", N, 10);
    let consumer = rig.reader(sub().max_in_flight(64)).await;
    let toy = rig.toy.clone();
    run(&rig, consumer, move || toy.counts().2).await;
}
