//! End to end on a real server.

use mq_api::{BrokerExt, ConsumerExt, Message, Settled, Subscription};
use mq_testbed::Kind;
use std::time::Duration;

#[tokio::test]
async fn send_receive_ack_nack_and_dead_letter() {
    let Some(url) = mq_testbed::need(Kind::Redis) else { return };
    let broker = mq_redis::connect(&url).await.unwrap();
    println!("{:?}", broker.capabilities().server);
    let topic = format!("spike-{}", std::process::id());
    let producer = broker.producer(topic.as_str()).await.unwrap();
    for i in 0..10 {
        let receipt = producer.send(Message::new(format!("m{i}")).key("k").header("a", "b")).await.unwrap();
        println!("{receipt:?}");
    }
    let mut consumer = broker.subscribe(Subscription::group(topic.as_str(), "g")).await.unwrap();
    for i in 0..8 {
        let d = consumer.recv().await.unwrap().unwrap();
        assert_eq!(d.payload_bytes(), format!("m{i}").as_bytes());
        assert!(matches!(d.ack().await, Settled::Confirmed(_)));
    }
    let d = consumer.recv().await.unwrap().unwrap();
    assert!(matches!(d.nack_after(Duration::from_millis(200), "no").await, Settled::Confirmed(_)));
    let d = consumer.recv().await.unwrap().unwrap();
    assert!(matches!(d.dead_letter("bad").await, Settled::Confirmed(_)));
    let d = consumer.recv().await.unwrap().unwrap();
    assert_eq!((d.payload_bytes(), d.attempt()), (&b"m8"[..], 2));
    println!("{:?}", broker.admin().backlog(&topic.as_str().into(), &"g".into()).await);
    assert!(matches!(d.ack().await, Settled::Confirmed(_)));
    println!("{:?}", broker.admin().backlog(&topic.as_str().into(), &"g".into()).await);
    println!("{:?}", broker.admin().dead_letters(&topic.as_str().into(), &"g".into(), 5).await);
    println!("{:?}", broker.admin().groups(&topic.as_str().into()).await);
    let report = broker.close(Duration::from_secs(5)).await;
    println!("{report:?}");
    assert!(report.is_clean());
}
