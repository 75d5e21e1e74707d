//! Producers that send, members that handle, close and die, all at random; then everything is handled to the end.

use super::Run;
use super::judge::{Book, Let, Place, Told};
use super::rng::Rng;
use mq_api::{
    Broker, BrokerExt, Consumer, ConsumerExt, Delivery, Failure, Group, Message, Ordering, Outcome, Producer,
    ProducerSpec, Result, RetryPolicy, Settled, Subscription, Topic,
};
use mq_memory::{FaultPlan, MemoryBroker, MemoryConfig};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering as Atomic};
use std::time::Duration;

/// A group without order, and one with.
const GROUPS: [&str; 2] = ["plain", "keyed"];
const MESSAGES: u64 = 40;
const PRODUCERS: u64 = 2;
const MEMBERS: u64 = 2;
/// The longest that a delivery comes late for any reason: what a member has to wait for until it believes that all is done.
const QUIET: Duration = Duration::from_secs(30);

struct World {
    rng: Rng,
    broker: MemoryBroker,
    book: Mutex<Book>,
    /// Which member has something of a key in hand, by the group with order.
    hands: Mutex<HashMap<Vec<u8>, Vec<std::sync::Weak<InHand>>>>,
    over: AtomicBool,
    partitions: u32,
}

/// A delivery of the group with order while it is in the application's hands.
struct InHand(Mutex<Option<Delivery>>);

impl World {
    fn subscription(&self, group: &'static str, member: &str) -> Subscription {
        let sub = Subscription::group("t", group)
            .partitions(self.partitions)
            .retry(RetryPolicy::attempts(4).delays([Duration::from_millis(200), Duration::from_secs(1)]))
            .max_in_flight(4)
            .lease(Duration::from_secs(5))
            .member(member);
        if group == GROUPS[1] { sub.ordering(Ordering::PerKey) } else { sub }
    }
}

pub(super) async fn run(seed: u64, plan: FaultPlan) -> Result<Run> {
    let rng = Rng::new(seed);
    let mut config = MemoryConfig::recording().seed(seed).faults(plan);
    let partitions = if rng.below(2) == 0 { 1 } else { 4 };
    config.partitions = partitions;
    let broker = MemoryBroker::new(config)?;
    let world = Arc::new(World {
        rng,
        broker: broker.clone(),
        book: Mutex::default(),
        hands: Mutex::default(),
        over: AtomicBool::new(false),
        partitions,
    });
    let connection = broker.connect();
    let mut members = Vec::new();
    for group in GROUPS {
        for slot in 0..MEMBERS {
            members.push(tokio::spawn(member(world.clone(), connection.clone(), group, slot)));
        }
    }
    let mut producers = Vec::new();
    for number in 0..PRODUCERS {
        let spec = ProducerSpec::new("t").partitions(partitions).group(GROUPS[0]).group(GROUPS[1]);
        let producer = connection.producer(spec).await?;
        producers.push(tokio::spawn(produce(world.clone(), producer, number)));
    }
    for producer in producers {
        if producer.await.is_err() {
            world.book.lock().violation("a producer's task panicked".into());
        }
    }
    world.over.store(true, Atomic::SeqCst);
    for member in members {
        if member.await.is_err() {
            world.book.lock().violation("a member's task panicked".into());
        }
    }
    finish(&world, &*connection).await?;
    Ok(judge(seed, &world))
}

async fn produce(world: Arc<World>, producer: Arc<dyn Producer>, number: u64) {
    let rng = &world.rng;
    let mut sent = 0;
    while sent < MESSAGES {
        let burst = 1 + rng.below(4);
        let mut flying = Vec::new();
        for _ in 0..burst {
            let label = format!("p{number}-{sent}");
            let mut message = Message::new(label.clone());
            if rng.below(10) < 7 {
                message = message.key(format!("p{number}k{}", rng.below(3)));
            }
            flying.push((label, producer.send(message)));
            sent += 1;
        }
        for (label, sending) in flying {
            let told = match sending.await {
                Ok(_) => Told::Confirmed,
                Err(e) if e.outcome() == Some(Outcome::Unknown) => Told::Unknown,
                Err(_) => Told::Refused,
            };
            world.book.lock().sent(&label, told);
        }
        tokio::time::sleep(rng.pause(80)).await;
    }
    producer.close(Duration::from_secs(5)).await;
}

/// One place of a group, whose members come and go until the producers are done.
async fn member(world: Arc<World>, connection: Arc<dyn Broker>, group: &'static str, slot: u64) {
    let mut life = 0;
    while !world.over.load(Atomic::SeqCst) {
        let name = format!("{group}-{slot}-{life}");
        life += 1;
        match connection.subscribe(world.subscription(group, &name)).await {
            Ok(consumer) => live(&world, consumer, group, &name).await,
            Err(e) => world.book.lock().violation(format!("{name} could not subscribe: {e}")),
        }
        tokio::time::sleep(world.rng.pause(300)).await;
    }
}

async fn live(world: &Arc<World>, mut consumer: Box<dyn Consumer>, group: &'static str, name: &str) {
    let rng = &world.rng;
    let mut left = 5 + rng.below(25);
    while left > 0 && !world.over.load(Atomic::SeqCst) {
        // Cancelled often: a recv that is dropped loses nothing.
        let next = tokio::time::timeout(rng.pause(400), consumer.recv()).await;
        match next {
            Err(_) => continue,
            Ok(Ok(Some(delivery))) => {
                left -= 1;
                let held = receive(world, group, delivery);
                if rng.below(4) == 0 {
                    // Held for a while, beside the ones that come next.
                    let (world, pause) = (world.clone(), rng.pause(500));
                    tokio::spawn(async move {
                        tokio::time::sleep(pause).await;
                        settle(&world, group, held).await;
                    });
                } else {
                    settle(world, group, held).await;
                }
            }
            Ok(Ok(None)) => break,
            Ok(Err(e)) => {
                world.book.lock().violation(format!("{name} ended: {e}"));
                break;
            }
        }
    }
    match rng.below(3) {
        0 => {
            world.book.lock().lines.push(format!("{name} dies"));
            world.broker.crash(name);
        }
        1 => {
            let report = consumer.control().close(rng.pause(1_000)).await;
            world.book.lock().lines.push(format!("{name} closed: {report:?}"));
        }
        _ => world.book.lock().lines.push(format!("{name} is dropped")),
    }
}

fn receive(world: &World, group: &'static str, delivery: Delivery) -> Arc<InHand> {
    let place: Place = (delivery.partition().unwrap_or(0), delivery.position());
    let label = String::from_utf8_lossy(delivery.payload_bytes()).into_owned();
    let ordered = group == GROUPS[1];
    let mut book = world.book.lock();
    book.handed(group, place, &label, delivery.attempt(), delivery.key.as_deref(), ordered);
    let key = delivery.key.as_ref().map(|k| k.to_vec());
    let owned = delivery.is_owned();
    let held = Arc::new(InHand(Mutex::new(Some(delivery))));
    if let Some(key) = key.filter(|_| ordered) {
        let mut hands = world.hands.lock();
        let others = hands.entry(key).or_default();
        others.retain(|other| other.strong_count() > 0);
        let both = others
            .iter()
            .filter_map(std::sync::Weak::upgrade)
            .any(|other| other.0.lock().as_ref().is_some_and(Delivery::is_owned));
        if owned && both {
            book.violation(format!("{label} at {place:?} came while another of its key is owned"));
        }
        others.push(Arc::downgrade(&held));
    }
    held
}

async fn settle(world: &World, group: &'static str, held: Arc<InHand>) {
    let Some(delivery) = held.0.lock().take() else { return };
    let rng = &world.rng;
    let place: Place = (delivery.partition().unwrap_or(0), delivery.position());
    let (how, settling) = match rng.below(100) {
        0..70 => (Let::Acked, delivery.ack()),
        70..78 => (Let::Failed, delivery.nack("it failed")),
        78..83 => (Let::Failed, delivery.nack_after(rng.pause(3_000), "not yet")),
        83..88 => (Let::Released, delivery.release()),
        88..91 => (Let::Dead, delivery.dead_letter("at random")),
        91..93 => (Let::Dead, delivery.nack(Failure::permanent("never"))),
        93..95 => (Let::Released, delivery.nack(Failure::transient("down"))),
        _ => {
            drop(delivery);
            // What became of a drop is not told.
            world.book.lock().settled(group, place, Let::Dropped, Settled::Unknown);
            return;
        }
    };
    let settled = settling.await;
    world.book.lock().settled(group, place, how, settled);
}

/// Handles everything that is left, under the same faults, until the broker has nothing more.
async fn finish(world: &Arc<World>, connection: &dyn Broker) -> Result<()> {
    for group in GROUPS {
        let name = format!("{group}-last");
        let mut consumer = connection.subscribe(world.subscription(group, &name)).await?;
        while let Ok(next) = tokio::time::timeout(QUIET, consumer.recv()).await {
            let Some(delivery) = next? else { break };
            let held = receive(world, group, delivery);
            let Some(delivery) = held.0.lock().take() else { continue };
            let place: Place = (delivery.partition().unwrap_or(0), delivery.position());
            let settled = delivery.ack().await;
            world.book.lock().settled(group, place, Let::Acked, settled);
        }
        let left = connection.admin().backlog(&Topic::new("t"), &Group::new(group)).await?;
        if !(left.ready.admits(0) && left.in_flight.admits(0) && left.delayed.admits(0)) {
            world.book.lock().violation(format!("{group}: nothing comes, and the backlog is {left:?}"));
        }
        consumer.control().close(Duration::from_secs(5)).await;
    }
    let report = connection.close(Duration::from_secs(5)).await;
    let mut book = world.book.lock();
    if report.leaked > 0 || report.abandoned > 0 {
        book.violation(format!("the last close: {report:?}"));
    }
    let tasks = world.broker.tasks();
    if tasks > 0 {
        book.violation(format!("{tasks} tasks are left"));
    }
    Ok(())
}

fn judge(seed: u64, world: &World) -> Run {
    let mut book = world.book.lock();
    let Some(trace) = world.broker.trace() else {
        return Run { seed, hash: 0, events: 0, violations: vec!["no trace".into()], timeline: String::new() };
    };
    book.nothing_missing(&GROUPS, &trace);
    let mut hash = trace.hash();
    for line in &book.lines {
        for byte in line.bytes().chain([b'\n']) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    let timeline = match book.violations.is_empty() {
        true => String::new(),
        false => {
            let broker: Vec<String> = trace.events().iter().map(ToString::to_string).collect();
            format!("{}\n--- the broker\n{}", book.lines.join("\n"), broker.join("\n"))
        }
    };
    Run { seed, hash, events: trace.events().len(), violations: std::mem::take(&mut book.violations), timeline }
}
