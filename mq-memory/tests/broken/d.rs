#![allow(unused)]
use mq_api::*;
use mq_memory::{connect, MemoryBroker, MemoryConfig};
use std::time::Duration;
use std::sync::{Arc, Mutex, atomic::{AtomicU64, AtomicBool, Ordering as O}};
use std::collections::*;
use tokio::time::{timeout, sleep, Instant};
const S: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
fn txt(d: &Delivery) -> String { String::from_utf8_lossy(d.payload_bytes()).into_owned() }

#[tokio::test(start_paused = true)]
async fn suspect_beside_busy() {
    let br = MemoryBroker::new(MemoryConfig::default().partitions(2)).unwrap(); let b = br.connect();
    let p = b.producer("t").await.unwrap();
    let sub = |m: &str| Subscription::group("t","g").member(m).lease(5*S).retry(RetryPolicy::attempts(1).delays([S]));
    let mut c1 = b.subscribe(sub("m1")).await.unwrap();
    let mut c2 = b.subscribe(sub("m2")).await.unwrap();
    let (mut k1, mut k2) = (None, None); let mut i = 0;
    while k1.is_none() || k2.is_none() {
        let k = format!("k{i}"); i += 1; p.send(Message::new("find").key(k.clone())).await.unwrap();
        tokio::select! { d = c1.recv() => { d.unwrap().unwrap().ack().await; k1 = Some(k) } d = c2.recv() => { d.unwrap().unwrap().ack().await; k2 = Some(k) } }
    }
    let (k1, k2) = (k1.unwrap(), k2.unwrap());
    p.send(Message::new("suspect").key(k2.clone())).await.unwrap();
    let d = c2.recv().await.unwrap().unwrap(); br.crash("m2");
    p.send(Message::new("behind").key(k2.clone())).await.unwrap();
    let mut held = VecDeque::new();
    let at = Instant::now();
    while at.elapsed() < 600*S {
        p.send(Message::new("busy").key(k1.clone())).await.unwrap();
        let d = c1.recv().await.unwrap().unwrap();
        if txt(&d) != "busy" { println!("{} after {:?}", txt(&d), at.elapsed()); return; }
        held.push_back(d);
        if held.len() > 2 { held.pop_front().unwrap().ack().await; }
        sleep(50*MS).await;
    }
    println!("{:?}", b.admin().backlog(&"t".into(), &"g".into()).await.unwrap());
    panic!("STARVED for ten minutes: the suspect, and all of its partition behind it");
}
async fn engine(url: &str, perkey: bool) {
    let b = connect(url).await.unwrap();
    let n = 1500u64;
    let mk = || { let s = Subscription::group("t","g").retry(RetryPolicy::attempts(1000).delays([2*MS])).max_in_flight(20); if perkey { s.ordering(Ordering::PerKey) } else { s } };
    let seen: Arc<Mutex<HashMap<u64, Vec<u64>>>> = Default::default();
    let acked: Arc<Mutex<HashSet<u64>>> = Default::default();
    let stop = Arc::new(AtomicBool::new(false));
    let mut hs = vec![];
    for i in 0..2 { let mut c = b.subscribe(mk()).await.unwrap(); let (seen, acked, stop) = (seen.clone(), acked.clone(), stop.clone());
        hs.push(tokio::spawn(async move { let mut m = 0u64; while !stop.load(O::SeqCst) {
            let Ok(d) = timeout(50*MS, c.recv()).await else { continue }; let Some(d) = d.unwrap() else { break };
            let id: u64 = txt(&d).parse().unwrap(); m += 1;
            { let mut g = seen.lock().unwrap(); let l = g.entry(id % 20).or_default(); if !l.contains(&id) { l.push(id) } }
            if m % 50 == 0 { d.nack("x").await; continue }
            let acked = acked.clone();
            if m % 3 == 0 { if let Settled::Confirmed(_) = d.ack().await { acked.lock().unwrap().insert(id); } }
            else { tokio::spawn(async move { if let Settled::Confirmed(_) = d.ack().await { acked.lock().unwrap().insert(id); } }); } } c }));
    }
    let p = b.producer("t").await.unwrap();
    let mut sends = vec![]; let mut oks = HashSet::new();
    for id in 0..n { sends.push((id, p.send(Message::new(id.to_string()).key((id % 20).to_string())))); if id % 100 == 99 { for (id, s) in sends.drain(..) { if s.await.is_ok() { oks.insert(id); } } } }
    println!("{url}: sent");
    let at = Instant::now();
    loop { let bl = b.admin().backlog(&"t".into(), &"g".into()).await.unwrap();
        if (bl.ready, bl.in_flight, bl.delayed) == (Count::Exact(0), Count::Exact(0), Count::Exact(0)) { break }
        if at.elapsed() > 15*S { panic!("{url} STUCK {bl:?}") } sleep(20*MS).await; }
    stop.store(true, O::SeqCst);
    for h in hs { h.await.unwrap(); }
    let seen = seen.lock().unwrap();
    println!("{url} ok {}", oks.len()); for id in &oks { assert!(seen[&(id%20)].contains(id), "lost {id}"); }
    if perkey { for (k, v) in seen.iter() { let v: Vec<u64> = v.iter().copied().filter(|i| oks.contains(i)).collect(); assert!(v.windows(2).all(|w| w[0] < w[1]), "key {k}: {v:?}") } }
    let at = Instant::now(); b.close(2*S).await; assert!(at.elapsed() < 5*S);
}
#[tokio::test(flavor="multi_thread", worker_threads=4)] async fn engine_plain() { engine("memory://e1?faults=cut:0.01,delay:3ms,confirm_lost:0.01,ack_lost:0.01,lose_lease:0.002", false).await }
#[tokio::test(flavor="multi_thread", worker_threads=4)] async fn engine_key() { engine("memory://e2?partitions=3&faults=cut:0.01,delay:3ms,confirm_lost:0.01,ack_lost:0.01", true).await }
#[tokio::test(flavor="multi_thread", worker_threads=4)] async fn engine_key_1() { engine("memory://e3?faults=delay:3ms", true).await }

#[tokio::test(flavor="multi_thread", worker_threads=4)]
async fn log_counts() {
    let b = connect("memory://l1").await.unwrap();
    let log = Retention::log(50);
    let p = b.open_producer(ProducerSpec::new("t").retention(log)).await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").retention(log)).await.unwrap();
    let mut ev = c.control().events();
    let ctl = c.control();
    let evs = tokio::spawn(async move { let (mut lost, mut lag) = (0, 0); loop { match timeout(1500*MS, std::future::poll_fn(|cx| ev.poll_event(cx))).await { Ok(Some(Event::Gap(g))) => lost += g.count.unwrap(), Ok(Some(o)) => { println!("{o:?}"); lag += 1 } _ => return (lost, lag) } } });
    let w = tokio::spawn(async move { let mut got = HashSet::new(); let mut held = vec![]; loop { match timeout(S, c.recv()).await { Ok(Ok(Some(d))) => { got.insert(txt(&d)); held.push(d); if held.len() > 20 { sleep(MS).await; for d in held.drain(..) { d.ack().await; } } } _ => break } } for d in held { d.ack().await; } got.len() as u64 });
    for i in 0..5000u64 { p.send(Message::new(i.to_string())).await.unwrap(); if i % 10 == 0 { sleep(Duration::from_micros(100)).await } }
    let (got, (lost, lag)) = (w.await.unwrap(), evs.await.unwrap());
    println!("got {got} lost {lost} lag {lag}");
    if lag == 0 { assert_eq!(got + lost, 5000); }
}
#[tokio::test] async fn log_zero() {
    let b = connect("memory://l0").await.unwrap();
    for (t, r) in [("a", Retention::log(0)), ("b", Retention::handled(0)), ("c", Retention::handled(u64::MAX))] {
        let p = b.open_producer(ProducerSpec::new(t).retention(r)).await.unwrap();
        let mut c = b.subscribe(Subscription::group(t,"g").retention(r)).await.unwrap();
        println!("{t} {:?}", p.send(Message::new("x")).await.is_ok());
        println!("{:?}", timeout(50*MS, c.recv()).await.is_ok());
        println!("{:?}", b.admin().backlog(&t.into(), &"g".into()).await);
    }
}
#[tokio::test(start_paused = true)] async fn faults_delay_max() {
    let b = connect("memory://l2?faults=delay:18446744073709551615ms").await.unwrap();
    let p = timeout(100*S, b.producer("t")).await;
    if let Ok(Ok(p)) = p { println!("{:?}", timeout(100*S, p.send(Message::new("x"))).await.map(|r| r.is_ok())); }
}
#[tokio::test(start_paused = true)] async fn hundred_transients() {
    let b = connect("memory://l3").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").retry(RetryPolicy::attempts(5).transient(MS, LONGEST))).await.unwrap();
    p.send(Message::new("x")).await.unwrap();
    for i in 0..100 { let Ok(d) = timeout(LONGEST, c.recv()).await else { println!("paused ten years at {i}"); break }; let d = d.unwrap().unwrap(); assert_eq!(d.attempt(), 1); d.nack(Failure::transient("x")).await; }
}
// batch: does the turn go round with little credit?
#[tokio::test] async fn batch_turns() {
    let b = connect("memory://l4?partitions=2").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").max_in_flight(10)).await.unwrap();
    for i in 0..2000 { p.send(Message::new("x").key(format!("k{i}"))).await.unwrap(); }
    let mut n = [0, 0]; let mut out = Deliveries::new();
    for _ in 0..20 { c.recv_batch(10, &mut out).await.unwrap(); while let Some(d) = out.pop() { n[d.partition().unwrap() as usize] += 1; d.ack().await; } }
    assert!(n.iter().all(|n| *n > 50), "{n:?}");
}
// one at a time in sequence, max_in_flight 1: recv, ack, recv
#[tokio::test] async fn in_sequence_turns() {
    let b = connect("memory://l5?partitions=2").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").max_in_flight(1)).await.unwrap();
    for i in 0..4000 { p.send(Message::new("x").key(format!("k{i}"))).await.unwrap(); }
    let mut n = [0, 0];
    for _ in 0..1000 { let d = c.recv().await.unwrap().unwrap(); n[d.partition().unwrap() as usize] += 1; d.ack().await; }
    assert!(n.iter().all(|n| *n > 100), "{n:?}");
}
// deletion of the group under load
#[tokio::test(flavor="multi_thread", worker_threads=4)]
async fn delete_under_load() {
    let b = connect("memory://l6?partitions=2").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").max_in_flight(50)).await.unwrap();
    let seen: Arc<Mutex<HashSet<u64>>> = Default::default();
    let s2 = seen.clone(); let ctl = c.control();
    let h = tokio::spawn(async move { loop { match timeout(2*S, c.recv()).await { Ok(Ok(Some(d))) => { s2.lock().unwrap().insert(txt(&d).parse().unwrap()); tokio::spawn(async move { tokio::task::yield_now().await; d.ack().await; }); } _ => break } } });
    for i in 0..20000u64 { p.send(Message::new(i.to_string())).await.unwrap(); if i % 500 == 499 { b.admin().delete_group(&"t".into(), &"g".into()).await.unwrap(); sleep(MS).await; } }
    h.await.unwrap();
    println!("in flight {}", ctl.in_flight());
    assert_eq!(seen.lock().unwrap().len(), 20000, "in flight for ever: {}", ctl.in_flight());
}

#[tokio::test(flavor="multi_thread", worker_threads=4)] async fn engine_loop() { for i in 0..6 { engine(&format!("memory://f{i}?partitions=2&faults=cut:0.02,delay:2ms"), true).await; engine(&format!("memory://ff{i}?faults=cut:0.01,delay:2ms,confirm_lost:0.02,ack_lost:0.02,full:0.01"), i % 2 == 0).await; } }
