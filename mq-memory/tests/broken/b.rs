#![allow(unused)]
use mq_api::*;
use mq_memory::{connect, MemoryBroker, MemoryConfig};
use std::time::Duration;
use std::sync::{Arc, atomic::{AtomicBool, AtomicUsize, AtomicU64, Ordering as O}};
use std::collections::*;
use tokio::time::{timeout, sleep, Instant};
const S: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
fn txt(d: &Delivery) -> String { String::from_utf8_lossy(d.payload_bytes()).into_owned() }

async fn bytes(name: &str, batch: bool, n: usize) {
    let b = connect(name).await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").max_in_flight_bytes(1000)).await.unwrap();
    p.send(Message::new(vec![0u8;600])).await.unwrap();
    for _ in 0..n { p.send(Message::new(vec![0u8;600])).await.unwrap(); }
    let a = c.recv().await.unwrap().unwrap();
    let h = tokio::spawn(async move {
        let at = Instant::now();
        let mut out = Deliveries::new();
        if batch { let _ = timeout(Duration::from_secs(3600), c.recv_batch(10, &mut out)).await; }
        else { let _ = timeout(Duration::from_secs(3600), c.recv()).await; }
        at.elapsed() });
    sleep(10*MS).await;
    a.ack().await;
    let took = h.await.unwrap();
    assert!(took < S, "STUCK: nobody woke for {took:?}");
}
#[tokio::test(start_paused = true)] async fn bytes_one() { bytes("memory://c1", false, 1).await }
#[tokio::test(start_paused = true)] async fn bytes_batch() { bytes("memory://c2", true, 1).await }

// discard of a dead letter that a PerKey reader has in line
#[tokio::test(start_paused = true)]
async fn removed_from_a_line() {
    let b = connect("memory://c3").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
    for i in 0..4 { p.send(Message::new(i.to_string()).key("k")).await.unwrap(); c.recv().await.unwrap().unwrap().dead_letter("bad").await; }
    let mut r = b.subscribe(Subscription::group(Topic::dead_letters("t","g"),"r").ordering(Ordering::PerKey).dead_letter(DeadLetterPolicy::Forever)).await.unwrap();
    let d = r.recv().await.unwrap().unwrap();
    assert!(timeout(S, r.recv()).await.is_err());
    let n = b.admin().discard_dead_letters(&"t".into(), &"g".into(), RedriveOptions::default().limit(2)).await.unwrap();
    println!("discarded {n}; ack of held {:?}", d.ack().await);
    let mut got = vec![];
    while let Ok(d) = timeout(S, r.recv()).await { let d = d.unwrap().unwrap(); got.push(txt(&d)); d.ack().await; }
    println!("backlog {:?}", b.admin().backlog(&Topic::dead_letters("t","g"), &"r".into()).await);
    assert_eq!(got, ["2","3"]);
}

struct W(AtomicUsize);
impl std::task::Wake for W { fn wake(self: Arc<Self>) { self.0.fetch_add(1, O::SeqCst); } }
#[tokio::test]
async fn wakers_pile_up() {
    let b = connect("memory://c4").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
    let mut live = vec![];
    for _ in 0..5000 {
        let w = Arc::new(W(AtomicUsize::new(0)));
        live.push(Arc::downgrade(&w));
        let wk = std::task::Waker::from(w);
        let mut cx = std::task::Context::from_waker(&wk);
        assert!(c.poll_next(&mut cx).is_pending());
    }
    let n = live.iter().filter(|w| w.strong_count() > 0).count();
    assert!(n < 10, "{n} wakers of polls that ended are kept");
}

struct Flag(Arc<AtomicUsize>, Vec<u8>);
impl AsRef<[u8]> for Flag { fn as_ref(&self) -> &[u8] { &self.1 } }
impl Drop for Flag { fn drop(&mut self) { self.0.fetch_add(1, O::SeqCst); } }
async fn leak(name: &str, how: u32) {
    let n = Arc::new(AtomicUsize::new(0));
    {
        let br = MemoryBroker::new(MemoryConfig::default()).unwrap();
        let b = br.connect();
        let p = b.producer("t").await.unwrap();
        let mut c = b.subscribe(Subscription::group("t","g").member("m")).await.unwrap();
        for _ in 0..5 { p.send(Message::new(bytes::Bytes::from_owner(Flag(n.clone(), vec![1])))).await.unwrap(); }
        let d = c.recv().await.unwrap().unwrap();
        match how { 0 => { d.ack().await; } 1 => { br.crash("m"); drop(d); } 2 => { d.nack_after(60*S, "x").await; }
            3 => { d.nack(Failure::transient("x")).await; } 4 => { br.refuse_writes(&Topic::dead_letters("t","g"), true); d.dead_letter("x").await; }
            _ => { let l = d.lost(); tokio::spawn(l); sleep(MS).await; d.ack().await; } }
        b.close(S).await;
        drop(c); drop(p); drop(b); drop(br);
    }
    sleep(200*S).await;
    assert_eq!(n.load(O::SeqCst), 5, "{name}: payloads that were dropped");
}
#[tokio::test(start_paused = true)] async fn leak_ack() { leak("ack", 0).await }
#[tokio::test(start_paused = true)] async fn leak_crash() { leak("crash", 1).await }
#[tokio::test(start_paused = true)] async fn leak_delay() { leak("delay", 2).await }
#[tokio::test(start_paused = true)] async fn leak_transient() { leak("transient", 3).await }
#[tokio::test(start_paused = true)] async fn leak_refused() { leak("refused", 4).await }
#[tokio::test(start_paused = true)] async fn leak_lost() { leak("lost", 5).await }

// stress: all are delivered, order per key by first successes, nothing twice without cause
async fn stress(url: &str, members: usize, perkey: bool, chaos: bool, tx_total: u64) {
    let b = connect(url).await.unwrap();
    let sub = move |i: usize| { let s = Subscription::group("t","g").member(format!("m{i}")).max_in_flight(7 + i*50)
        .retry(RetryPolicy::attempts(1000).delays([2*MS]).transient(MS, 5*MS));
        if perkey { s.ordering(Ordering::PerKey) } else { s } };
    let done: Arc<std::sync::Mutex<HashMap<u64, u32>>> = Default::default();
    let order: Arc<std::sync::Mutex<HashMap<u64, Vec<u64>>>> = Default::default();
    let n_done = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let mut hs = vec![];
    for i in 0..members {
        let (b, done, order, n_done, stop) = (b.clone(), done.clone(), order.clone(), n_done.clone(), stop.clone());
        hs.push(tokio::spawn(async move {
            let mut x = i as u64 * 77 + 1;
            'out: loop {
                let mut c = b.subscribe(sub(i)).await.unwrap();
                let ctl = c.control();
                let mut k = 0u64;
                loop {
                    if stop.load(O::SeqCst) { ctl.close(S).await; break 'out; }
                    x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let r = (x >> 33) % 1000; k += 1;
                    if chaos && r == 0 { ctl.pause(); tokio::task::yield_now().await; let ctl = ctl.clone(); tokio::spawn(async move { sleep(2*MS).await; ctl.resume(); }); }
                    if chaos && r == 1 && k > 500 { let rep = ctl.close(S).await; break; }
                    let d = match timeout(20*MS, c.recv()).await { Err(_) => continue, Ok(r) => match r.unwrap() { Some(d) => d, None => break } };
                    let (done, order, n_done) = (done.clone(), order.clone(), n_done.clone());
                    let work = async move {
                        let id: u64 = txt(&d).parse().unwrap();
                        let r = (x >> 21) % 200;
                        if chaos && r < 3 { d.nack("x").await; return }
                        if chaos && r == 3 { d.nack(Failure::transient("x")).await; return }
                        if chaos && r == 4 { d.release().await; return }
                        if chaos && r == 5 { drop(d); return }
                        if r % 16 == 6 { sleep(MS).await; }
                        let key = id % 50;
                        let mut g = order.lock().unwrap();
                        // under the lock so that order of acks is what is written down
                        let mut s = d.ack();
                        let ok = futures_util::FutureExt::now_or_never(s);
                        match ok { Some(Settled::Confirmed(_)) => { g.entry(key).or_default().push(id); drop(g); *done.lock().unwrap().entry(id).or_default() += 1; n_done.fetch_add(1, O::SeqCst); } other => { assert!(matches!(other, Some(Settled::Stale)), "{other:?}"); } }
                    };
                    if r % 2 == 0 { tokio::spawn(work); } else { work.await }
                }
            }
        }));
    }
    sleep(10*MS).await;
    let mut ps = vec![];
    for w in 0..2u64 {
        let b = b.clone();
        ps.push(tokio::spawn(async move {
            let p = b.producer("t").await.unwrap();
            for i in 0..tx_total/2 { let id = i*2 + w; 
                let m = Message::new(id.to_string()).key((id % 50).to_string());
                p.send(m).await.unwrap();
                if i % 997 == 0 { sleep(MS).await } }
        }));
    }
    for p in ps { p.await.unwrap(); }
    let mut last = (0, Instant::now());
    loop {
        let n = n_done.load(O::SeqCst);
        if n >= tx_total { break }
        if n != last.0 { last = (n, Instant::now()) }
        if last.1.elapsed() > 8*S { println!("{:?}", b.admin().backlog(&"t".into(), &"g".into()).await); println!("{:?}", b.admin().pending(&"t".into(), &"g".into(), 5).await); panic!("{url}: STUCK at {n} of {tx_total}"); }
        sleep(20*MS).await;
    }
    sleep(50*MS).await;
    stop.store(true, O::SeqCst);
    for h in hs { timeout(10*S, h).await.expect("member ends").unwrap(); }
    let bl = b.admin().backlog(&"t".into(), &"g".into()).await.unwrap();
    println!("{url} {bl:?}");
    let done = done.lock().unwrap();
    assert_eq!(done.len() as u64, tx_total);
    assert!(done.values().all(|n| *n == 1), "acked twice");
    if perkey { for (k, ids) in order.lock().unwrap().iter() { assert!(ids.windows(2).all(|w| w[0] < w[1]), "order of key {k} broken"); } }
    assert_eq!((bl.ready, bl.in_flight, bl.delayed), (Count::Exact(0), Count::Exact(0), Count::Exact(0)));
}
#[tokio::test(flavor="multi_thread", worker_threads=4)] async fn stress_plain_1() { stress("memory://x1", 3, false, false, 60000).await }
#[tokio::test(flavor="multi_thread", worker_threads=4)] async fn stress_plain_4() { stress("memory://x2?partitions=4", 3, false, false, 60000).await }
#[tokio::test(flavor="multi_thread", worker_threads=4)] async fn stress_chaos_1() { stress("memory://x3", 3, false, true, 40000).await }
#[tokio::test(flavor="multi_thread", worker_threads=4)] async fn stress_chaos_4() { stress("memory://x4?partitions=4", 3, false, true, 40000).await }
#[tokio::test(flavor="multi_thread", worker_threads=4)] async fn stress_key_1() { stress("memory://x5", 2, true, true, 20000).await }
#[tokio::test(flavor="multi_thread", worker_threads=4)] async fn stress_key_4() { stress("memory://x6?partitions=4", 3, true, true, 40000).await }
#[tokio::test(flavor="multi_thread", worker_threads=4)] async fn stress_small_history() { stress("memory://x7?partitions=2&history=3", 2, false, true, 40000).await }

// subscribe beside a producer that lists the group
#[tokio::test(flavor="multi_thread", worker_threads=4)]
async fn group_made_twice() {
    let at = Instant::now(); let mut i = 0;
    let b = connect("memory://y1").await.unwrap();
    while at.elapsed() < 6*S {
        i += 1;
        let name = format!("t{i}");
        let (b1, n1) = (b.clone(), name.clone());
        let (b2, n2) = (b.clone(), name.clone());
        b.admin().create_topic(TopicSpec::new(name.as_str()).partitions(if i % 2 == 0 { 1 } else { 3 })).await.unwrap();
        let h = tokio::spawn(async move { b1.open_producer(ProducerSpec::new(n1.as_str()).group("g")).await.unwrap() });
        let g = tokio::spawn(async move { let mut c = b2.subscribe(Subscription::group(n2.as_str(),"g")).await.unwrap(); 
            // polls at once
            let _ = timeout(MS, c.recv()).await; c });
        let p = h.await.unwrap(); let mut c = g.await.unwrap();
        for _ in 0..6 { p.send(Message::new("x")).await.unwrap(); }
        for k in 0..6 { let d = timeout(2*S, c.recv()).await.unwrap_or_else(|_| panic!("STUCK: round {i}, message {k}")).unwrap().unwrap(); d.ack().await; }
        drop(c); b.admin().delete_topic(&name.as_str().into()).await.unwrap();
    }
    println!("{i} rounds");
}
