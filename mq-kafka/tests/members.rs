//! Members that come, go, die and are rolled over, as processes of their own on a real server.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "world/crew.rs"]
mod crew;

use crew::{Crew, GROUP, LEASE, PARTITIONS, TOPIC, becomes, looker, send};
use mq_testbed::{Kind, Server, eventually, private};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What the contract allows after a member came or left.
const EVEN: Duration = Duration::from_secs(15);

/// A member, when another test starts this program as one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_process() {
    crew::be_a_member().await;
}

fn server() -> Option<Server> {
    private(Server::start(Kind::Kafka))
}

struct Sending {
    runtime: tokio::runtime::Runtime,
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<BTreeSet<(u64, u64)>>,
}

impl Sending {
    fn begin(url: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let task = runtime.spawn(send(url.to_owned(), stop.clone()));
        Self { runtime, stop, task }
    }

    /// What was confirmed.
    fn end(self) -> BTreeSet<(u64, u64)> {
        self.stop.store(true, Ordering::Release);
        self.runtime.block_on(self.task).unwrap()
    }
}

fn start(crew: &mut Crew) -> usize {
    let number = crew.add("member_process");
    assert!(eventually(Duration::from_secs(30), || crew.is_ready(number)), "member {number} is not ready");
    number
}

/// Everything that was confirmed was handled, each key by one at a time and in order.
fn settle(crew: &mut Crew, sent: &BTreeSet<(u64, u64)>) {
    let all = eventually(Duration::from_secs(60), || sent.is_subset(&crew.seen()));
    let seen = crew.seen();
    assert!(all, "{} of {} were lost: {:?}", sent.difference(&seen).count(), sent.len(), sent.difference(&seen).next());
    for number in crew.numbers() {
        crew.stop(number);
    }
    let again = crew.judge();
    eprintln!("{} confirmed, 0 lost, {again} came again", sent.len());
}

#[test]
fn partitions_are_spread_evenly_and_no_two_hold_one_key() {
    let Some(server) = server() else { return };
    let url = format!("{}?min_session=1s", server.url());
    let looker = looker(&url);
    let sending = Sending::begin(&url);
    let mut crew = Crew::new(&url);
    start(&mut crew);
    eprintln!("1 member after {:?}", becomes(&looker, &[8], EVEN));
    start(&mut crew);
    eprintln!("2 members after {:?}", becomes(&looker, &[4, 4], EVEN));
    let three: Vec<usize> = (0..3).map(|_| crew.add("member_process")).collect();
    eprintln!("5 members after {:?}", becomes(&looker, &[1, 1, 2, 2, 2], EVEN));
    assert!(eventually(EVEN, || three.iter().all(|n| crew.is_ready(*n))));
    crew.kill(crew.numbers()[0]);
    eprintln!("4 members after {:?}", becomes(&looker, &[2, 2, 2, 2], EVEN + LEASE));
    assert_eq!(PARTITIONS, 8);
    let sent = sending.end();
    settle(&mut crew, &sent);
}

#[test]
#[ignore = "long: takes a minute; run with --ignored"]
fn twenty_clean_restarts_make_no_dead_letter() {
    let Some(server) = server() else { return };
    let url = format!("{}?min_session=1s", server.url());
    let sending = Sending::begin(&url);
    let mut crew = Crew::new(&url);
    let mut present = vec![start(&mut crew), start(&mut crew)];
    for _ in 0..20 {
        // The new one is there before the old one leaves, as in a rolling update.
        present.push(start(&mut crew));
        crew.stop(present.remove(0));
    }
    let sent = sending.end();
    settle(&mut crew, &sent);
    let tries: BTreeSet<u32> = crew.holds.lock().unwrap().iter().map(|h| h.attempt).collect();
    assert_eq!(tries, BTreeSet::from([1]), "a restart counted as an attempt");
    let dead = tokio::runtime::Runtime::new().unwrap().block_on(async {
        let broker = mq_kafka::connect(&url).await.unwrap();
        let dead = broker.admin().dead_letters(&TOPIC.into(), &GROUP.into(), 10).await.unwrap();
        broker.close(Duration::from_secs(5)).await;
        dead
    });
    assert_eq!(dead.len(), 0, "{dead:?}");
}
