//! What is asked of a broker is done or refused, and what is told of it is so.

use crate::scene::{SECOND, recv};
use mq_api::{BrokerExt, Consumer, ConsumerExt, Error, HealthState, Message, Result, Subscription};
use mq_memory::{MemoryBroker, MemoryConfig, connect};
use tokio::time::{sleep, timeout};

// 6.2
#[tokio::test(start_paused = true)]
async fn health_that_is_watched_tells_of_back_pressure_and_its_end() -> Result<()> {
    let broker = connect("memory://b10").await?;
    let p = broker.producer("t").await?;
    let mut c = broker.subscribe(Subscription::group("t", "g").max_in_flight(1)).await?;
    let watch = c.control().health();
    p.send(Message::new("x")).await?;
    let held = recv(&mut c).await.expect("x");
    assert!(timeout(10 * SECOND, c.recv()).await.is_err());
    let full = watch.current().state;
    drop(c.control().health());
    held.ack().await;
    assert!(timeout(10 * SECOND, c.recv()).await.is_err());
    sleep(10 * SECOND).await;
    assert_eq!((full, watch.current().state), (HealthState::Backpressured, HealthState::Running));
    Ok(())
}

// lib.rs: "The broker of this name, made if no handle to it lives."
#[tokio::test(start_paused = true)]
async fn two_handles_of_one_name_reach_one_broker() -> Result<()> {
    let config = || MemoryConfig::from_url("memory://b15");
    let (one, two) = (MemoryBroker::named(config()?)?, MemoryBroker::named(config()?)?);
    let (a, b) = (one.connect(), two.connect());
    let mut c = a.subscribe(Subscription::group("t", "g")).await?;
    b.producer("t").await?.send(Message::new("x")).await?;
    assert!(recv(&mut c).await.is_some(), "they never meet");
    Ok(())
}

// connect: "Config ... for options other than those of the running broker"
#[tokio::test(start_paused = true)]
async fn other_options_than_those_of_the_running_broker_are_refused() -> Result<()> {
    let _a = connect("memory://b16?partitions=2").await?;
    let mut taken = Vec::new();
    for other in [
        "partitions=4",
        "history=7",
        "capacity=7",
        "capacity_bytes=7",
        "seed=7",
        "record=true",
        "faults=cut:0.5",
        "profile=kafka",
    ] {
        if connect(&format!("memory://b16?{other}")).await.is_ok() {
            taken.push(other);
        }
    }
    assert!(taken.is_empty(), "silently ignored: {taken:?}");
    Ok(())
}

// The same of options that ask in words for what is usual.
#[tokio::test(start_paused = true)]
async fn usual_options_that_are_given_are_compared_too() -> Result<()> {
    let other = "partitions=2&history=7&capacity=7&capacity_bytes=7&record=true";
    let _a = connect(&format!("memory://usual?{other}")).await?;
    let usual = ["partitions=1", "history=100000", "capacity=10000000", "capacity_bytes=1073741824", "record=false"];
    for one in usual {
        let text = connect(&format!("memory://usual?{one}")).await.err().map(|error| error.to_string());
        let name = one.split('=').next().expect("a name");
        assert!(text.as_ref().is_some_and(|text| text.contains(name)), "{one}: {text:?}");
    }
    assert!(connect("memory://usual").await.is_ok(), "nothing is asked for");
    Ok(())
}

// 4.2, several runtimes
#[test]
fn a_consumer_outlives_the_runtime_it_was_made_in() -> Result<()> {
    let rt = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (first, second) = (rt(), rt());
    let (p, mut c) = first.block_on(async {
        let broker = connect("memory://b19").await?;
        let p = broker.producer("t").await?;
        let c = broker.subscribe(Subscription::group("t", "g")).await?;
        Ok::<_, Error>((p, c))
    })?;
    drop(first);
    second.block_on(async {
        p.send(Message::new("x")).await?;
        c.recv().await?.expect("x").nack_after(SECOND / 10, "later").await;
        assert!(timeout(5 * SECOND, c.recv()).await.is_ok(), "the broker's clock stands still");
        Ok(())
    })
}

// 7.2
#[tokio::test(start_paused = true)]
async fn nothing_in_a_url_is_ignored() -> Result<()> {
    for url in ["memory://b21#partitions=4", "memory://b21b?seed=1&seed=2"] {
        assert!(connect(url).await.is_err(), "{url}");
    }
    Ok(())
}

// 6.1/6.3: partitions
#[tokio::test(start_paused = true)]
async fn pending_is_oldest_first() -> Result<()> {
    let memory = MemoryBroker::new(MemoryConfig::default().partitions(2))?;
    let broker = memory.connect();
    let p = broker.producer("t").await?;
    let mut c = broker.subscribe(Subscription::group("t", "g")).await?;
    let mut key = [String::new(), String::new()];
    let mut n = 0;
    while key.iter().any(String::is_empty) {
        let k = format!("k{n}");
        n += 1;
        let r = p.send(Message::new("x").key(k.clone())).await?;
        key[r.partition.unwrap() as usize] = k;
        c.recv().await?.expect("x").ack().await;
    }
    for _ in 0..5 {
        p.send(Message::new("x").key(key[0].clone())).await?;
        c.recv().await?.expect("x").ack().await;
    }
    p.send(Message::new("old").key(key[0].clone())).await?;
    let _old = c.recv().await?.expect("old");
    sleep(100 * SECOND).await;
    p.send(Message::new("young").key(key[1].clone())).await?;
    let _young = c.recv().await?.expect("young");
    let first = &broker.admin().pending(&"t".into(), &"g".into(), 1).await?[0];
    assert!(first.idle >= 99 * SECOND, "{first:?}");
    Ok(())
}

// 8.2: how long nobody was there to fetch, while what the group pins grows towards the bound
#[tokio::test(start_paused = true)]
async fn an_idle_group_that_pins_messages_is_reported_before_the_topic_is_full() -> Result<()> {
    let broker = connect("memory://idle?capacity=10").await?;
    let (p, admin) = (broker.producer("t").await?, broker.admin());
    let mut busy = broker.subscribe(Subscription::group("t", "busy")).await?;
    let left = broker.subscribe(Subscription::group("t", "left")).await?;
    left.control().close(SECOND).await;
    for n in 1..=10u64 {
        p.send(Message::new("x")).await?;
        recv(&mut busy).await.expect("x").ack().await;
        sleep(60 * SECOND).await;
        let groups = admin.groups(&"t".into()).await?;
        let of = |name: &str| groups.iter().find(|g| g.group.as_str() == name).expect("listed");
        assert_eq!(of("left").backlog.ready, mq_api::Count::Exact(n), "pinned");
        assert_eq!(of("left").idle.map(|idle| idle.as_secs()), Some(n * 60));
        assert_eq!((of("busy").idle, of("busy").members.len()), (None, 1));
    }
    let full = p.send(Message::new("x")).await.expect_err("it is full");
    assert!(full.to_string().contains("delete idle groups"), "{full}");
    let back = broker.subscribe(Subscription::group("t", "left")).await?;
    assert_eq!(admin.groups(&"t".into()).await?.last().and_then(|group| group.idle), None, "somebody came");
    drop(back);
    admin.delete_group(&"t".into(), &"left".into()).await?;
    p.send(Message::new("x")).await.map(drop)
}
