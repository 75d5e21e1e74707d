#![allow(unused)]
use mq_api::*;
use mq_memory::{connect, MemoryBroker, MemoryConfig};
use std::time::Duration;
use std::sync::Arc;
use tokio::time::{timeout, sleep};
const S: Duration = Duration::from_secs(1);
fn txt(d: &Delivery) -> String { String::from_utf8_lossy(d.payload_bytes()).into_owned() }

// 1: byte bound: receiver pending while one in hand, ack on the short path
#[tokio::test(start_paused = true)]
async fn bytes_bound_wakes() {
    let b = connect("memory://b1").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").max_in_flight_bytes(1000)).await.unwrap();
    p.send(Message::new(vec![0u8;600])).await.unwrap();
    p.send(Message::new(vec![0u8;600])).await.unwrap();
    let a = c.recv().await.unwrap().unwrap();
    let h = tokio::spawn(async move { let d = timeout(Duration::from_secs(60), c.recv()).await; d.map(|d| d.unwrap().unwrap().position()) });
    sleep(Duration::from_millis(10)).await;
    a.ack().await;
    assert!(h.await.unwrap().is_ok(), "STUCK: room for bytes came, nobody woke");
}
#[tokio::test(start_paused = true)]
async fn bytes_bound_wakes_batch() {
    let b = connect("memory://b1b").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").max_in_flight_bytes(1000)).await.unwrap();
    p.send(Message::new(vec![0u8;600])).await.unwrap();
    p.send(Message::new(vec![0u8;600])).await.unwrap();
    let a = c.recv().await.unwrap().unwrap();
    let h = tokio::spawn(async move { let mut out = Deliveries::new(); timeout(Duration::from_secs(60), c.recv_batch(10,&mut out)).await.is_ok() });
    sleep(Duration::from_millis(10)).await;
    let mut d = a.ack(); d.await;
    assert!(h.await.unwrap(), "STUCK");
}

// 2: keyless sends when partitions hold history up to the byte bound
#[tokio::test]
async fn keyless_spread_when_full_of_history() {
    let b = connect("memory://b2?partitions=4&capacity=100").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
    for _ in 0..2000 { p.send(Message::new("x")).await.unwrap(); c.recv().await.unwrap().unwrap().ack().await; }
    let mut n = [0;4];
    for _ in 0..1000 { let r = p.send(Message::new("x")).await.unwrap(); let d = c.recv().await.unwrap().unwrap(); n[d.partition().unwrap() as usize]+=1; d.ack().await; }
    println!("spread {n:?}");
    assert!(n.iter().all(|n| *n > 100), "{n:?}");
}

// 3: starvation with max_in_flight below the budget
async fn starve(name: &str, max: usize, batch: bool, key: Ordering) -> u32 {
    let b = connect(name).await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").max_in_flight(max).ordering(key)).await.unwrap();
    for i in 0..20000 { p.send(Message::new("x").key(format!("k{i}"))).await.unwrap(); }
    let mut first = None; let mut n = 0u32; let mut other = 0;
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel::<Delivery>();
    // handlers: ack later
    let h = tokio::spawn(async move { while let Some(d) = rx.recv().await { tokio::task::yield_now().await; d.ack().await; } });
    while n < 8000 {
        let d = c.recv().await.unwrap().unwrap();
        let part = d.partition().unwrap();
        if first.is_none() { first = Some(part); }
        if Some(part) != first { return n; }
        n += 1;
        tx.send(d).unwrap();
    }
    n
}
#[tokio::test] async fn starve_10() { let n = starve("memory://s10?partitions=2", 10, false, Ordering::None).await; assert!(n < 1000, "{n} in a row from one partition"); }
#[tokio::test] async fn starve_1() { let n = starve("memory://s1?partitions=2", 1, false, Ordering::None).await; assert!(n < 1000, "{n} in a row from one partition"); }
#[tokio::test] async fn starve_key() { let n = starve("memory://s1k?partitions=2", 10, false, Ordering::PerKey).await; assert!(n < 1000, "{n} in a row from one partition"); }
#[tokio::test] async fn starve_big() { let n = starve("memory://s1b?partitions=2", 1000, false, Ordering::None).await; assert!(n < 1000, "{n} in a row from one partition"); }

// 4: group deleted with everything in hand
#[tokio::test(start_paused = true)]
async fn deleted_group_gives_credit_back() {
    let b = connect("memory://b4").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").max_in_flight(2)).await.unwrap();
    for i in 0..4 { p.send(Message::new(i.to_string())).await.unwrap(); }
    let x = c.recv().await.unwrap().unwrap(); let y = c.recv().await.unwrap().unwrap();
    b.admin().delete_group(&"t".into(), &"g".into()).await.unwrap();
    println!("{:?} {:?}", x.ack().await, y.ack().await);
    println!("in flight {}", c.control().in_flight());
    let r = timeout(Duration::from_secs(60), c.recv()).await;
    assert!(r.is_ok(), "STUCK after group deleted: in_flight {}", c.control().in_flight());
}
#[tokio::test(start_paused = true)]
async fn deleted_topic_gives_credit_back() {
    let b = connect("memory://b4t").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").max_in_flight(2)).await.unwrap();
    for i in 0..4 { p.send(Message::new(i.to_string())).await.unwrap(); }
    let x = c.recv().await.unwrap().unwrap(); let y = c.recv().await.unwrap().unwrap();
    b.admin().delete_topic(&"t".into()).await.unwrap();
    println!("{:?} {:?}", x.ack().await, y.ack().await);
    p.send(Message::new("n")).await.unwrap();
    let r = timeout(Duration::from_secs(60), c.recv()).await;
    assert!(r.is_ok(), "STUCK after topic deleted: in_flight {}", c.control().in_flight());
}

// 5: PerKey + Log
#[tokio::test(start_paused = true)]
async fn perkey_log_held_then_trimmed() {
    let b = connect("memory://b5").await.unwrap();
    let log = Retention::log(3);
    let p = b.open_producer(ProducerSpec::new("t").retention(log)).await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").retention(log).ordering(Ordering::PerKey)).await.unwrap();
    p.send(Message::new("0").key("k")).await.unwrap();
    let d = c.recv().await.unwrap().unwrap();
    for i in 1..6 { p.send(Message::new(i.to_string()).key("k")).await.unwrap(); }
    // consumer looks: 3.. blocked
    assert!(timeout(S, c.recv()).await.is_err());
    d.ack().await;
    let mut got = vec![];
    while let Ok(d) = timeout(S, c.recv()).await { let d = d.unwrap().unwrap(); got.push(txt(&d)); d.ack().await; }
    println!("backlog {:?}", b.admin().backlog(&"t".into(), &"g".into()).await);
    assert_eq!(got, ["3","4","5"], "STUCK key");
}
#[tokio::test(start_paused = true)]
async fn perkey_log_blocked_trimmed() {
    let b = connect("memory://b5b").await.unwrap();
    let log = Retention::log(3);
    let p = b.open_producer(ProducerSpec::new("t").retention(log)).await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").retention(log).ordering(Ordering::PerKey)).await.unwrap();
    for i in 0..3 { p.send(Message::new(i.to_string()).key("k")).await.unwrap(); }
    let d = c.recv().await.unwrap().unwrap();
    assert!(timeout(S, c.recv()).await.is_err()); // 1, 2 blocked
    d.ack().await; 
    let d = c.recv().await.unwrap().unwrap(); assert_eq!(txt(&d), "1");
    for i in 3..5 { p.send(Message::new(i.to_string()).key("k")).await.unwrap(); } // drops 0,1: 2,3,4 left
    assert!(timeout(S, c.recv()).await.is_err());
    for i in 5..6 { p.send(Message::new(i.to_string()).key("k")).await.unwrap(); } // drops 2 (blocked)
    d.ack().await;
    let mut got = vec![];
    while let Ok(d) = timeout(S, c.recv()).await { let d = d.unwrap().unwrap(); got.push(txt(&d)); d.ack().await; }
    assert_eq!(got, ["3","4","5"], "STUCK key");
}
// delayed head of key trimmed
#[tokio::test(start_paused = true)]
async fn perkey_log_delayed_trimmed() {
    let b = connect("memory://b5c").await.unwrap();
    let log = Retention::log(3);
    let p = b.open_producer(ProducerSpec::new("t").retention(log)).await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").retention(log).ordering(Ordering::PerKey)).await.unwrap();
    p.send(Message::new("0").key("k")).await.unwrap();
    c.recv().await.unwrap().unwrap().nack_after(10*S, "later").await;
    for i in 1..6 { p.send(Message::new(i.to_string()).key("k")).await.unwrap(); }
    let mut got = vec![];
    while let Ok(d) = timeout(100*S, c.recv()).await { let d = d.unwrap().unwrap(); got.push(txt(&d)); d.ack().await; }
    assert_eq!(got, ["3","4","5"], "STUCK key");
}

// 6: held, trimmed, nacked: reported?
#[tokio::test(start_paused = true)]
async fn log_held_nacked_is_reported() {
    let b = connect("memory://b6").await.unwrap();
    let log = Retention::log(2);
    let p = b.open_producer(ProducerSpec::new("t").retention(log)).await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").retention(log)).await.unwrap();
    let mut ev = c.control().events();
    p.send(Message::new("0")).await.unwrap();
    let d = c.recv().await.unwrap().unwrap();
    for i in 1..3 { p.send(Message::new(i.to_string())).await.unwrap(); }
    println!("nack: {:?}", d.nack("x").await);
    let mut got = vec![];
    while let Ok(d) = timeout(100*S, c.recv()).await { let d = d.unwrap().unwrap(); got.push(txt(&d)); d.ack().await; }
    let e = ev.drain();
    println!("{got:?} {e:?}");
    assert!(got.contains(&"0".to_string()) || e.iter().any(|e| matches!(e, Event::Gap(_))), "lost without a Gap");
}

// 7 panics
#[tokio::test] async fn history_max() {
    let b = connect("memory://b7?history=18446744073709551615").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
    for _ in 0..3000 { p.send(Message::new("x")).await.unwrap(); c.recv().await.unwrap().unwrap().ack().await; }
}
#[tokio::test] async fn log_age_max() {
    let b = connect("memory://b7a").await.unwrap();
    let log = Retention::log_for(Duration::MAX);
    let p = b.open_producer(ProducerSpec::new("t").retention(log)).await.unwrap();
    p.send(Message::new("x")).await.unwrap();
}
#[tokio::test] async fn log_age_future_stamp() {
    let b = connect("memory://b7f").await.unwrap();
    let log = Retention::log_for(Duration::from_secs(3600));
    let p = b.open_producer(ProducerSpec::new("t").retention(log)).await.unwrap();
    let far = std::time::UNIX_EPOCH + Duration::from_secs(i64::MAX as u64);
    p.send(Message::new("x").timestamp(far)).await.unwrap();
}
#[tokio::test(start_paused = true)] async fn delays_max() {
    let b = connect("memory://b7d").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").lease(LONGEST).max_processing(LONGEST)).await.unwrap();
    for _ in 0..3 { p.send(Message::new("x")).await.unwrap(); }
    c.recv().await.unwrap().unwrap().nack_after(Duration::MAX, "x").await;
    c.recv().await.unwrap().unwrap().nack(Failure::transient("x")).await;
    timeout(Duration::MAX, c.control().close(Duration::MAX)).await.unwrap();
    b.close(Duration::MAX).await;
}

// 8: dead letter topic deleted under a member
#[tokio::test(start_paused = true)]
async fn dlq_deleted() {
    let b = connect("memory://b8").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
    let dl = Topic::dead_letters("t","g");
    b.admin().delete_topic(&dl).await.unwrap();
    p.send(Message::new("x")).await.unwrap();
    println!("{:?}", c.recv().await.unwrap().unwrap().dead_letter("bad").await);
    let bl = b.admin().backlog(&"t".into(), &"g".into()).await.unwrap();
    let l = b.admin().dead_letters(&"t".into(), &"g".into(), 10).await.unwrap();
    println!("{bl:?} letters {}", l.len());
    let again = timeout(100*S, c.recv()).await.is_ok();
    assert!(l.len() == 1 || again, "LOST: in no dead letters and not redelivered");
}

// 9: redriven message, group re-made
#[tokio::test(start_paused = true)]
async fn redriven_then_group_remade() {
    let b = connect("memory://b9").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
    let mut ev = c.control().events();
    p.send(Message::new("x")).await.unwrap();
    c.recv().await.unwrap().unwrap().dead_letter("bad").await;
    let r = b.admin().redrive(&"t".into(), &"g".into(), RedriveOptions::default()).await.unwrap();
    println!("{r:?}");
    b.admin().delete_group(&"t".into(), &"g".into()).await.unwrap();
    let got = timeout(100*S, c.recv()).await;
    println!("{:?}", ev.drain());
    assert!(got.is_ok(), "LOST: redriven message is nobody's after the group was made again");
}
// 10: group remade after trimming: the gap's count
#[tokio::test(start_paused = true)]
async fn gap_count_after_remake() {
    let b = connect("memory://b10").await.unwrap();
    let r = Retention::handled(100);
    let p = b.open_producer(ProducerSpec::new("t").retention(r)).await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").retention(r)).await.unwrap();
    let mut o = b.subscribe(Subscription::group("t","o").retention(r)).await.unwrap();
    let mut ev = c.control().events();
    for i in 0..5 { p.send(Message::new(i.to_string())).await.unwrap(); o.recv().await.unwrap().unwrap().ack().await; }
    b.admin().delete_group(&"t".into(), &"g".into()).await.unwrap();
    let mut got = 0;
    while let Ok(d) = timeout(S, c.recv()).await { d.unwrap().unwrap().ack().await; got += 1; }
    let e = ev.drain();
    println!("got {got} {e:?}");
    assert!(got == 5 || !e.iter().any(|e| matches!(e, Event::Gap(g) if g.count == Some(0))), "5 lost, the gap says 0");
}
// 11: broker of two runtimes
#[test]
fn two_runtimes() {
    let rt1 = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let rt2 = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let a = rt1.block_on(async { connect("memory://b11").await.unwrap() });
    let b = rt2.block_on(async { connect("memory://b11").await.unwrap() });
    rt1.block_on(async { a.close(S).await }); drop(a);
    drop(rt1);
    rt2.block_on(async {
        let p = b.producer("t").await.unwrap();
        let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
        p.send(Message::new("x")).await.unwrap();
        c.recv().await.unwrap().unwrap().nack_after(Duration::from_millis(100), "x").await;
        let r = timeout(3*S, c.recv()).await;
        assert!(r.is_ok(), "STUCK: the clock died with the runtime of the first client");
    });
}
#[test]
fn idle_runtime_close() {
    let rt1 = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let a = rt1.block_on(async { connect("memory://b12").await.unwrap() });
    let rt2 = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    rt2.block_on(async { assert!(timeout(3*S, a.close(S)).await.is_ok(), "close hangs past its deadline"); });
}
// 12: member ids beyond 2^20
#[tokio::test]
async fn million_members() {
    let b = connect("memory://b13").await.unwrap();
    let p = b.producer("t").await.unwrap();
    for _ in 0..(1<<20) { let c = b.subscribe(Subscription::broadcast("o")).await.unwrap(); c.control().close(Duration::ZERO).await; }
    let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
    p.send(Message::new("x")).await.unwrap();
    let d = c.recv().await.unwrap().unwrap();
    println!("{:?}", c.control().close(Duration::ZERO).await);
    let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
    assert!(timeout(3*S, c.recv()).await.is_ok(), "STUCK: never given back");
}
