//! Members as processes of their own, so that they can be killed, and what each tells of every message it has in hand.

use mq_api::{BrokerExt, ConsumerExt, Message, ProducerSpec, RetryPolicy, Subscription};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

pub(crate) const TOPIC: &str = "work";
pub(crate) const GROUP: &str = "crew";
pub(crate) const PARTITIONS: u32 = 8;
/// Long enough for a machine that is busy with six processes to keep its sessions.
pub(crate) const LEASE: Duration = Duration::from_secs(10);
const KEYS: u64 = 64;
/// How long a handler takes: long enough that something is in hand at any moment.
const WORK: Duration = Duration::from_millis(5);
/// The URL, in the environment of a member process.
const URL: &str = "MQ_KAFKA_MEMBER_URL";

fn now() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos()
}

/// One time that a member had a message in hand.
#[derive(Debug, Clone)]
pub(crate) struct Hold {
    pub(crate) member: usize,
    pub(crate) key: u64,
    pub(crate) seq: u64,
    pub(crate) attempt: u32,
    pub(crate) from: u128,
    /// When it was settled, or its member was killed.
    pub(crate) to: Option<u128>,
    /// Its acknowledgement was confirmed.
    pub(crate) done: bool,
}

struct Member {
    child: Child,
    reader: std::thread::JoinHandle<()>,
    ready: Arc<AtomicBool>,
}

/// What a test program does when it is a member: works until its input ends.
pub(crate) async fn be_a_member() {
    let Ok(url) = std::env::var(URL) else { return };
    let broker = mq_kafka::connect(&url).await.unwrap();
    let sub = Subscription::group(TOPIC, GROUP)
        .lease(LEASE)
        .partitions(PARTITIONS)
        .ordering(mq_api::Ordering::PerKey)
        .retry(RetryPolicy::attempts(2).delays([Duration::from_millis(100)]));
    let mut consumer = broker.subscribe(sub).await.unwrap();
    let control = consumer.control();
    println!("@ready");
    std::thread::spawn(move || {
        // Ends with the parent, too.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(control.close(Duration::from_secs(10)));
    });
    while let Some(delivery) = consumer.recv().await.unwrap() {
        tokio::spawn(async move {
            let text = String::from_utf8(delivery.payload_bytes().to_vec()).unwrap();
            println!("@in {text} {} {}", delivery.attempt(), now());
            tokio::time::sleep(WORK).await;
            // Before it is settled: from then on another may have it.
            println!("@out {text} {}", now());
            if delivery.ack().await.is_ok() {
                println!("@done {text}");
            }
        });
    }
    let report = broker.close(Duration::from_secs(10)).await;
    println!("@left {report:?}");
}

/// The members, and all that they held.
pub(crate) struct Crew {
    url: String,
    members: BTreeMap<usize, Member>,
    born: usize,
    pub(crate) holds: Arc<Mutex<Vec<Hold>>>,
}

impl Crew {
    pub(crate) fn new(url: &str) -> Self {
        Self { url: url.to_owned(), members: BTreeMap::new(), born: 0, holds: Arc::default() }
    }

    /// Starts a member; `test` is the name of the test that calls [`be_a_member`].
    pub(crate) fn add(&mut self, test: &str) -> usize {
        self.born += 1;
        let number = self.born;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env(URL, &self.url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (holds, ready) = (self.holds.clone(), Arc::new(AtomicBool::new(false)));
        let (out, is_ready) = (child.stdout.take().unwrap(), ready.clone());
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                // libtest may write a line's beginning.
                let Some((_, line)) = line.split_once('@') else { continue };
                let words: Vec<&str> = line.split(' ').collect();
                let number_at = |n: usize| words[n].parse::<u128>().unwrap();
                match words[0] {
                    "ready" => is_ready.store(true, Ordering::Release),
                    "in" => holds.lock().unwrap().push(Hold {
                        member: number,
                        key: number_at(1) as u64,
                        seq: number_at(2) as u64,
                        attempt: number_at(3) as u32,
                        from: number_at(4),
                        to: None,
                        done: false,
                    }),
                    word @ ("out" | "done") => {
                        let (key, seq) = (number_at(1) as u64, number_at(2) as u64);
                        let mut holds = holds.lock().unwrap();
                        let held = |h: &&mut Hold| h.member == number && h.key == key && h.seq == seq;
                        let hold = holds.iter_mut().rev().find(held).unwrap();
                        match word {
                            "out" => hold.to = Some(number_at(3)),
                            _ => hold.done = true,
                        }
                    }
                    _ => {}
                }
            }
        });
        self.members.insert(number, Member { child, reader, ready });
        number
    }

    pub(crate) fn is_ready(&self, number: usize) -> bool {
        self.members[&number].ready.load(Ordering::Acquire)
    }

    pub(crate) fn numbers(&self) -> Vec<usize> {
        self.members.keys().copied().collect()
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self, number: usize) {
        let mut member = self.members.remove(&number).unwrap();
        member.child.kill().unwrap();
        let at = now();
        member.child.wait().unwrap();
        member.reader.join().unwrap();
        for hold in self.holds.lock().unwrap().iter_mut().filter(|h| h.member == number && h.to.is_none()) {
            hold.to = Some(at);
        }
    }

    /// Lets a member finish and leave.
    pub(crate) fn stop(&mut self, number: usize) {
        let mut member = self.members.remove(&number).unwrap();
        drop(member.child.stdin.take());
        assert!(member.child.wait().unwrap().success(), "member {number} did not end well");
        member.reader.join().unwrap();
    }

    /// How many messages were held at least once, and their number by key in the order of their first hand-over.
    pub(crate) fn seen(&self) -> BTreeSet<(u64, u64)> {
        self.holds.lock().unwrap().iter().filter(|h| h.to.is_some()).map(|h| (h.key, h.seq)).collect()
    }

    /// No key was held twice at a time, first hand-overs were in order, and nothing came again whose acknowledgement was
    /// confirmed. How often something else did.
    pub(crate) fn judge(&self) -> usize {
        let mut holds = self.holds.lock().unwrap().clone();
        holds.sort_by_key(|h| (h.key, h.from));
        let mut again = 0;
        for pair in holds.windows(2).filter(|p| p[0].key == p[1].key) {
            let end = pair[0].to.unwrap_or(u128::MAX);
            assert!(end <= pair[1].from, "key {} was held twice: {pair:?}", pair[0].key);
        }
        let mut next: BTreeMap<u64, u64> = BTreeMap::new();
        for hold in &holds {
            let next = next.entry(hold.key).or_default();
            assert!(hold.seq <= *next, "key {} jumped from {next} to {}", hold.key, hold.seq);
            if hold.seq < *next {
                let before = |h: &&Hold| h.key == hold.key && h.seq == hold.seq && h.from < hold.from;
                let done = holds.iter().filter(before).find(|h| h.done);
                assert!(done.is_none(), "it was acknowledged, and came again: {done:?}, {hold:?}");
                again += 1;
            }
            *next = (*next).max(hold.seq + 1);
        }
        again
    }
}

/// Sends numbered messages of each key until told to stop; all that were confirmed.
pub(crate) async fn send(url: String, stop: Arc<AtomicBool>) -> BTreeSet<(u64, u64)> {
    let broker = mq_kafka::connect(&url).await.unwrap();
    let spec = ProducerSpec::new(TOPIC).partitions(PARTITIONS).group(GROUP);
    let producer = broker.producer(spec).await.unwrap();
    let mut confirmed = BTreeSet::new();
    for seq in 0.. {
        if stop.load(Ordering::Acquire) {
            break;
        }
        let round: Vec<_> =
            (0..KEYS).map(|k| producer.send(Message::new(format!("{k} {seq}")).key(format!("key {k}")))).collect();
        for (k, sending) in (0u64..).zip(round) {
            sending.await.unwrap();
            confirmed.insert((k, seq));
        }
        // The rate of the workload: about 400 messages a second, a third of what two members can do.
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    broker.close(Duration::from_secs(5)).await;
    confirmed
}

/// How many partitions each member has, by the group's coordinator.
pub(crate) fn spread(looker: &BaseConsumer) -> Vec<usize> {
    let group = format!("{TOPIC}..{GROUP}");
    let Ok(found) = looker.fetch_group_list(Some(&group), Duration::from_secs(5)) else { return Vec::new() };
    let mut counts: Vec<usize> =
        found.groups().iter().flat_map(|g| g.members()).map(|m| m.assignment().map_or(0, partitions_in)).collect();
    counts.sort_unstable();
    counts
}

/// The consumers' own form: version, then topics with their partitions.
fn partitions_in(assignment: &[u8]) -> usize {
    let int = |at: usize| assignment.get(at..at + 4).map_or(0, |b| i32::from_be_bytes(b.try_into().unwrap()) as usize);
    let mut at = 6;
    let mut n = 0;
    for _ in 0..int(2) {
        let name = assignment.get(at..at + 2).map_or(0, |b| u16::from_be_bytes(b.try_into().unwrap()) as usize);
        at += 2 + name;
        n += int(at);
        at += 4 + 4 * int(at);
    }
    n
}

pub(crate) fn looker(url: &str) -> BaseConsumer {
    let brokers = url.trim_start_matches("kafka://").split('?').next().unwrap();
    ClientConfig::new().set("bootstrap.servers", brokers).create().unwrap()
}

/// Waits until the partitions are spread like this; how long it took.
pub(crate) fn becomes(looker: &BaseConsumer, wanted: &[usize], limit: Duration) -> Duration {
    let began = Instant::now();
    let even = mq_testbed::eventually(limit, || spread(looker) == wanted);
    assert!(even, "not spread as {wanted:?} within {limit:?} but {:?}", spread(looker));
    began.elapsed()
}
