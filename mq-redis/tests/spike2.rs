use mq_api::{BrokerExt, ConsumerExt, Message, Subscription};
use mq_testbed::Kind;
use std::time::Duration;

#[tokio::test]
async fn group_gone() {
    let Some(url) = mq_testbed::need(Kind::Redis) else { return };
    let broker = mq_redis::connect(&url).await.unwrap();
    let topic = format!("gone-{}", std::process::id());
    let producer = broker.producer(topic.as_str()).await.unwrap();
    let mut consumer = broker.subscribe(Subscription::group(topic.as_str(), "g")).await.unwrap();
    for i in 0..6 { producer.send(Message::new(format!("m{i}")).key("k")).await.unwrap(); }
    let mut held = Vec::new();
    for _ in 0..6 { held.push(consumer.recv().await.unwrap().unwrap()); }
    println!("{:?}", held.remove(0).ack().await);
    println!("{:?}", held.remove(1).ack().await);
    broker.admin().delete_group(&topic.as_str().into(), &"g".into()).await.unwrap();
    for _ in 0..10 {
        println!("{:?}", consumer.control().health().current());
        if let Ok(d) = tokio::time::timeout(Duration::from_millis(200), consumer.recv()).await { println!("{d:?}"); drop(d.unwrap().unwrap().ack()); }
    }
    println!("topic {topic}");
    for d in held { println!("{:?}", d.ack().await); }
    println!("{:?}", broker.close(Duration::from_secs(5)).await);
}
