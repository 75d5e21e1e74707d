#![allow(unused)]
use mq_api::*;
use mq_memory::{connect, MemoryBroker, MemoryConfig};
use std::time::Duration;
use std::sync::{Arc, Mutex};
use tokio::time::{timeout, sleep, Instant};
const S: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
fn txt(d: &Delivery) -> String { String::from_utf8_lossy(d.payload_bytes()).into_owned() }
async fn drain(c: &mut Box<dyn Consumer>) -> Vec<String> { let mut got = vec![]; while let Ok(d) = timeout(100*S, c.recv()).await { let d = d.unwrap().unwrap(); got.push(txt(&d)); d.ack().await; } got }
#[tokio::test(start_paused = true)]
async fn order_taken_off() {
    let b = connect("memory://o1").await.unwrap();
    let p = b.producer("t").await.unwrap();
    for i in 0..4 { p.send(Message::new(i.to_string()).key("k")).await.unwrap(); }
    let mut c = b.subscribe(Subscription::group("t","g").ordering(Ordering::PerKey)).await.unwrap();
    let d = c.recv().await.unwrap().unwrap();
    assert!(timeout(MS, c.recv()).await.is_err());
    d.ack().await;
    c.control().close(S).await; drop(c);
    let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
    let got = drain(&mut c).await;
    println!("{:?}", b.admin().backlog(&"t".into(), &"g".into()).await);
    assert_eq!(got, ["1","2","3"]);
}
#[tokio::test(start_paused = true)]
async fn order_taken_off_and_on() {
    let b = connect("memory://o2").await.unwrap();
    let p = b.producer("t").await.unwrap();
    for i in 0..4 { p.send(Message::new(i.to_string()).key("k")).await.unwrap(); }
    let mut c = b.subscribe(Subscription::group("t","g").ordering(Ordering::PerKey)).await.unwrap();
    let d = c.recv().await.unwrap().unwrap();
    assert!(timeout(MS, c.recv()).await.is_err());
    c.control().close(MS).await; drop(d); drop(c);
    let mut c = b.subscribe(Subscription::group("t","g")).await.unwrap();
    c.recv().await.unwrap().unwrap().ack().await;
    c.control().close(S).await; drop(c);
    let mut c = b.subscribe(Subscription::group("t","g").ordering(Ordering::PerKey)).await.unwrap();
    let got = drain(&mut c).await;
    assert_eq!(got, ["1","2","3"]);
}
async fn bytes(name: &str) {
    let b = connect(name).await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").max_in_flight_bytes(1000)).await.unwrap();
    for _ in 0..2 { p.send(Message::new(vec![0u8;600])).await.unwrap(); }
    let a = c.recv().await.unwrap().unwrap();
    let h = tokio::spawn(async move { let at = Instant::now(); let _ = timeout(3600*S, c.recv()).await; at.elapsed() });
    sleep(100*MS).await;
    println!("{:?}", a.ack().await);
    let took = h.await.unwrap();
    assert!(took < 2*S, "STUCK {took:?}");
}
#[tokio::test(start_paused = true)] async fn bytes_engine() { bytes("memory://o3?faults=delay:0ms").await }
#[tokio::test(start_paused = true)] async fn bytes_watched() { bytes("memory://o3w?record=true").await }
// small in hand, a larger one next, partitions 2
#[tokio::test(start_paused = true)] async fn bytes_parts() { bytes("memory://o3p?partitions=2").await }
// two members find the group gone at once
#[tokio::test(flavor="multi_thread", worker_threads=4)]
async fn two_members_make_again() {
    let b = connect("memory://o4").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let seen: Arc<Mutex<std::collections::HashSet<String>>> = Default::default();
    let mut hs = vec![];
    for _ in 0..3 { let mut c = b.subscribe(Subscription::group("t","g").max_in_flight(10000)).await.unwrap(); let seen = seen.clone();
        hs.push(tokio::spawn(async move { while let Ok(Ok(Some(d))) = timeout(2*S, c.recv()).await { seen.lock().unwrap().insert(txt(&d)); d.ack().await; } })); }
    for i in 0..5000 { p.send(Message::new(i.to_string())).await.unwrap(); if i % 25 == 24 { b.admin().delete_group(&"t".into(), &"g".into()).await.unwrap(); sleep(Duration::from_micros(300)).await } }
    for h in hs { h.await.unwrap(); }
    println!("{:?}", b.admin().backlog(&"t".into(), &"g".into()).await);
    assert_eq!(seen.lock().unwrap().len(), 5000);
}
// ParkKey with Log / crash of the parked
#[tokio::test(start_paused = true)]
async fn park_key() {
    let b = connect("memory://o5").await.unwrap();
    let p = b.producer("t").await.unwrap();
    let mut c = b.subscribe(Subscription::group("t","g").ordering(Ordering::PerKey).on_dead_letter(OnDeadLetter::ParkKey)).await.unwrap();
    for i in 0..4 { p.send(Message::new(i.to_string()).key("k")).await.unwrap(); p.send(Message::new(format!("o{i}")).key("o")).await.unwrap(); }
    loop { let d = timeout(100*S, c.recv()).await; let Ok(d) = d else { break }; let d = d.unwrap().unwrap(); if txt(&d) == "0" { d.dead_letter("x").await; } else { assert!(txt(&d).starts_with('o'), "{}", txt(&d)); d.ack().await; } }
    let l = b.admin().dead_letters(&"t".into(), &"g".into(), 10).await.unwrap();
    assert_eq!(l.len(), 4);
    println!("{:?} in flight {}", b.admin().backlog(&"t".into(), &"g".into()).await, c.control().in_flight());
}
