mod world;
use mq_api::{BrokerExt, ConsumerExt, Message, Subscription};
use std::time::{Duration, Instant};
use world::World;
#[tokio::test(flavor = "multi_thread")]
async fn takeover_after_close() {
    let Some(w) = World::new("scr") else { return };
    let (a, b) = (w.connect().await, w.connect().await);
    let topic = w.topic("t");
    let p = a.producer(topic.as_str()).await.unwrap();
    let sub = || Subscription::group(topic.as_str(), "g").lease(Duration::from_secs(1));
    let mut one = a.subscribe(sub()).await.unwrap();
    p.send(Message::new("x").key("k")).await.unwrap();
    let held = one.recv().await.unwrap().unwrap();
    let t = Instant::now();
    let mut two = b.subscribe(sub()).await.unwrap();
    eprintln!("two subscribed after {:?}", t.elapsed());
    for n in 0..20 { p.send(Message::new(format!("m{n}")).key(format!("k{n}"))).await.unwrap(); }
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let t = Instant::now();
    eprintln!("{:?}", held.ack().await);
    let r = one.control().close(Duration::from_secs(5)).await;
    eprintln!("closed {:?} {r:?}", t.elapsed());
    let mut n = 0;
    while let Ok(d) = tokio::time::timeout(Duration::from_secs(4), two.recv()).await { let d = d.unwrap().unwrap(); n += 1; eprintln!("{:?} {n} {:?} at {:?}", t.elapsed(), String::from_utf8_lossy(d.payload_bytes()), d.partition()); d.ack().await; if n == 20 {break} }
}
