#![allow(unused)]
use mq_api::*;
use mq_memory::{connect, MemoryBroker, MemoryConfig};
use std::time::Duration;
use std::sync::Arc;
use tokio::time::{timeout, sleep, Instant};
const S: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
fn txt(d: &Delivery) -> String { String::from_utf8_lossy(d.payload_bytes()).into_owned() }

#[tokio::test(start_paused = true)]
async fn hand_over_wraps() {
    let br = MemoryBroker::new(MemoryConfig::default()).unwrap(); let b = br.connect();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").member("m")).await.unwrap();
    p.send(Message::new("x")).await.unwrap();
    let old = c.recv().await.unwrap().unwrap();
    br.lose_leases("m");
    for _ in 0..4095 { let d = c.recv().await.unwrap().unwrap(); d.release().await; }
    let held = c.recv().await.unwrap().unwrap();
    assert!(held.is_owned());
    let r = old.dead_letter("stale").await;
    println!("{r:?}, held is owned: {}", held.is_owned());
    assert_eq!(r, Settled::Stale);
}
#[tokio::test(start_paused = true)]
async fn suspect_then_group_deleted() {
    let br = MemoryBroker::new(MemoryConfig::default()).unwrap(); let b = br.connect();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").member("m").retry(RetryPolicy::attempts(1).delays([S]))).await.unwrap();
    p.send(Message::new("x")).await.unwrap();
    let old = c.recv().await.unwrap().unwrap(); br.lose_leases("m"); drop(old);
    let d = c.recv().await.unwrap().unwrap();
    b.admin().delete_group(&"t".into(), &"g".into()).await.unwrap();
    println!("{:?}", d.ack().await);
    p.send(Message::new("y")).await.unwrap();
    let at = Instant::now();
    let _ = timeout(1000*S, c.recv()).await;
    assert!(at.elapsed() < S, "STUCK: the suspect's gate stays shut");
}
// a suspect in one partition, always something in hand of the other
#[tokio::test]
async fn suspect_beside_a_busy_partition() {
    let br = MemoryBroker::new(MemoryConfig::default().partitions(2)).unwrap(); let b = br.connect();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").member("m").max_in_flight(10).retry(RetryPolicy::attempts(1).delays([S]))).await.unwrap();
    // find keys
    let mut keys = [None, None]; let mut i = 0;
    while keys.iter().any(|k| k.is_none()) { let k = format!("k{i}"); i += 1;
        p.send(Message::new("find").key(k.clone())).await.unwrap(); let d = c.recv().await.unwrap().unwrap(); keys[d.partition().unwrap() as usize] = Some(k); d.ack().await; }
    let (k0, k1) = (keys[0].clone().unwrap(), keys[1].clone().unwrap());
    p.send(Message::new("suspect").key(k0.clone())).await.unwrap();
    let d = c.recv().await.unwrap().unwrap(); br.lose_leases("m"); drop(d);
    p.send(Message::new("behind").key(k0.clone())).await.unwrap();
    for _ in 0..20000 { p.send(Message::new("busy").key(k1.clone())).await.unwrap(); }
    let mut held = std::collections::VecDeque::new();
    let mut n = 0;
    while n < 15000 {
        let Ok(d) = timeout(S, c.recv()).await else { panic!("nothing after {n}") };
        let d = d.unwrap().unwrap();
        if txt(&d) != "busy" { println!("{} after {n}", txt(&d)); return; }
        n += 1;
        held.push_back(d);
        if held.len() > 3 { held.pop_front().unwrap().ack().await; }
    }
    panic!("STARVED: suspect and all behind it wait while the other partition goes on ({n})");
}
#[tokio::test(start_paused = true)]
async fn idle_is_right() {
    let b = connect("memory://idle").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
    p.send(Message::new("x")).await.unwrap();
    sleep(59*S).await;
    let d = c.recv().await.unwrap().unwrap();
    let i = b.admin().pending(&"t".into(), &"g".into(), 1).await.unwrap();
    println!("{i:?}");
    assert!(i[0].idle < S, "idle {:?} of a delivery just taken", i[0].idle);
}
#[tokio::test]
async fn timed_out_early_after_a_stall() {
    let b = connect("memory://stall").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").max_processing(100*MS)).await.unwrap();
    p.send(Message::new("a")).await.unwrap(); p.send(Message::new("b")).await.unwrap();
    let a = c.recv().await.unwrap().unwrap();
    std::thread::sleep(300*MS);
    let _ = a.ack().await;
    let at = Instant::now();
    let d = c.recv().await.unwrap().unwrap();
    sleep(3*MS).await;
    assert!(d.is_owned(), "timed out after {:?} in hand; max_processing is 100 ms", at.elapsed());
}
#[tokio::test]
async fn many_dead_groups() {
    let b = connect("memory://deadgroups").await.unwrap();
    let p = b.producer("t").await.unwrap();
    async fn t(p: &Arc<dyn Producer>) -> Duration { let at = Instant::now(); for _ in 0..500 { p.send(Message::new("x")).await.unwrap(); } at.elapsed() }
    let before = t(&p).await;
    for i in 0..5000 { let g = format!("g{i}"); b.admin().create_group(&"t".into(), &g.as_str().into(), Start::Latest).await.unwrap(); b.admin().delete_group(&"t".into(), &g.as_str().into()).await.unwrap(); }
    let after = t(&p).await;
    println!("before {before:?} after {after:?}");
    assert!(after < before * 10, "sends cost {before:?} before, {after:?} after 5,000 groups came and went");
}
#[tokio::test(start_paused = true)]
async fn too_big_empties_history() {
    let b = connect("memory://big?capacity_bytes=5000").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
    for _ in 0..10 { p.send(Message::new(vec![0u8;100])).await.unwrap(); c.recv().await.unwrap().unwrap().ack().await; }
    assert!(p.send(Message::new(vec![0u8;6000])).await.is_err());
    let n = b.admin().topic(&"t".into()).await.unwrap().unwrap().messages;
    assert_eq!(n, Some(10), "a refused message drove the history out");
}
// transients: pause, acks, streak
#[tokio::test(start_paused = true)]
async fn transient_streak_resets() {
    let b = connect("memory://trans").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").retry(RetryPolicy::attempts(5).transient(S, 64*S))).await.unwrap();
    for i in 0..20 { p.send(Message::new(i.to_string())).await.unwrap(); }
    let mut pauses = vec![];
    for _ in 0..3 { let d = c.recv().await.unwrap().unwrap(); assert_eq!(d.attempt(), 1); d.nack(Failure::transient("x")).await; let at = Instant::now(); let d = c.recv().await.unwrap().unwrap(); pauses.push(at.elapsed()); d.ack().await; }
    println!("{pauses:?}");
    assert!(pauses.iter().all(|p| *p < 3*S), "{pauses:?}");
    for _ in 0..3 { let d = c.recv().await.unwrap().unwrap(); d.nack(Failure::transient("x")).await; }
    let at = Instant::now(); c.recv().await.unwrap().unwrap().ack().await; println!("after 3: {:?}", at.elapsed());
    // ack_run
    let at = Instant::now();
}
// several members, pause of one with everything woken to it
#[tokio::test(start_paused = true)]
async fn paused_member_does_not_swallow() {
    let b = connect("memory://swallow").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c1 = b.subscribe(Subscription::group("t","g")).await.unwrap();
    let mut c2 = b.subscribe(Subscription::group("t","g")).await.unwrap();
    let k1 = c1.control();
    let h1 = tokio::spawn(async move { c1.recv().await.unwrap().map(|d| d.position()) });
    let h2 = tokio::spawn(async move { let at = Instant::now(); let _ = timeout(100*S, c2.recv()).await; at.elapsed() });
    sleep(MS).await; k1.pause(); sleep(MS).await;
    p.send(Message::new("x")).await.unwrap();
    assert!(h2.await.unwrap() < S);
}
// closing with partitions: the other gets it
#[tokio::test(start_paused = true)]
async fn delayed_with_owner_change() {
    let b = connect("memory://dly?partitions=3").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c1 = b.subscribe(Subscription::group("t","g")).await.unwrap();
    for i in 0..9 { p.send(Message::new(i.to_string())).await.unwrap(); c1.recv().await.unwrap().unwrap().nack_after(5*S,"x").await; }
    let mut c2 = b.subscribe(Subscription::group("t","g")).await.unwrap();
    c1.control().close(S).await; drop(c1);
    let at = Instant::now();
    for _ in 0..9 { let d = timeout(60*S, c2.recv()).await.unwrap().unwrap().unwrap(); assert_eq!(d.attempt(), 2); d.ack().await; }
    assert!(at.elapsed() < 7*S, "{:?}", at.elapsed());
}
#[tokio::test(start_paused = true)]
async fn full_with_delayed_and_letters() {
    let b = connect("memory://fulld?capacity=5").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").retry(RetryPolicy::attempts(2).delays([S]))).await.unwrap();
    let mut sent = 0;
    for i in 0..12 { if p.send(Message::new(i.to_string())).await.is_ok() { sent += 1; } 
        if let Ok(d) = timeout(10*MS, c.recv()).await { d.unwrap().unwrap().dead_letter("x").await; } }
    println!("sent {sent} {:?}", b.admin().backlog(&"t".into(), &"g".into()).await.unwrap());
    let dl = b.admin().discard_dead_letters(&"t".into(), &"g".into(), RedriveOptions::default()).await.unwrap();
    sleep(5*S).await;
    println!("discarded {dl} {:?} {:?}", b.admin().backlog(&"t".into(), &"g".into()).await.unwrap(), c.control().health().current());
    let dl2 = b.admin().discard_dead_letters(&"t".into(), &"g".into(), RedriveOptions::default()).await.unwrap();
    sleep(5*S).await;
    let dl3 = b.admin().discard_dead_letters(&"t".into(), &"g".into(), RedriveOptions::default()).await.unwrap();
    assert_eq!(dl + dl2 + dl3, sent);
}
