//! Bounds that hold on every path.

use crate::scene::{SECOND, broker_with, recv, three_letters};
use mq_api::{BrokerExt, Consumer, ConsumerExt, Guarantee, Message, Ordering, RedriveOptions, Result, Subscription};
use mq_memory::{FaultPlan, connect};
use tokio::time::{sleep, timeout};

// 5.2
#[tokio::test(start_paused = true)]
async fn dead_letters_that_were_discarded_make_room() -> Result<()> {
    let broker = connect("memory://b7?capacity=3").await?;
    let mut c = three_letters(&broker).await?;
    let (t, g) = ("t".into(), "g".into());
    let newer = RedriveOptions::default().filter(|m, _| m.payload_bytes() != b"0");
    assert_eq!(broker.admin().discard_dead_letters(&t, &g, newer).await?, 2);
    broker.producer("t").await?.send(Message::new("3")).await?;
    recv(&mut c).await.expect("comes").dead_letter("bad").await;
    sleep(60 * SECOND).await;
    assert_eq!(broker.admin().dead_letters(&t, &g, 9).await?.len(), 2, "{:?}", c.control().health().current());
    Ok(())
}

// 3.2
#[tokio::test(start_paused = true)]
async fn at_most_once_keeps_the_bound_of_what_is_in_hand() -> Result<()> {
    for faults in [Some(FaultPlan::none()), None] {
        let memory = broker_with(faults)?;
        let broker = memory.connect();
        let p = broker.producer("t").await?;
        let mut c =
            broker.subscribe(Subscription::group("t", "g").guarantee(Guarantee::AtMostOnce).max_in_flight(2)).await?;
        for _ in 0..5 {
            p.send(Message::new("x")).await?;
        }
        let _held = (recv(&mut c).await.expect("1"), recv(&mut c).await.expect("2"));
        assert!(timeout(10 * SECOND, c.recv()).await.is_err(), "a third in hand; {faults:?}");
    }
    Ok(())
}

// 3.6
#[tokio::test(start_paused = true)]
async fn a_broadcast_buffer_is_bounded_in_bytes() -> Result<()> {
    let broker = connect("memory://b18").await?;
    let p = broker.producer("t").await?;
    let mut c = broker.subscribe(Subscription::broadcast("t").max_in_flight_bytes(10_000)).await?;
    for _ in 0..200 {
        p.send(Message::new(vec![0u8; 100_000])).await?;
    }
    let mut n = 0;
    while timeout(SECOND, c.recv()).await.is_ok() {
        n += 1;
    }
    assert!(n <= 2, "{n} x 100 kB were buffered; the bound is 10 kB");
    Ok(())
}

// 3.7
#[tokio::test(start_paused = true)]
async fn per_key_at_most_once_is_one_at_a_time() -> Result<()> {
    for faults in [Some(FaultPlan::none()), None] {
        let broker = broker_with(faults)?.connect();
        let p = broker.producer("t").await?;
        let sub = Subscription::group("t", "g").ordering(Ordering::PerKey).guarantee(Guarantee::AtMostOnce);
        let mut c = broker.subscribe(sub).await?;
        p.send(Message::new("1").key("k")).await?;
        p.send(Message::new("2").key("k")).await?;
        let _first = timeout(SECOND, c.recv()).await.expect("1")?.expect("1");
        assert!(timeout(SECOND, c.recv()).await.is_err(), "two of a key at work together; {faults:?}");
    }
    Ok(())
}
