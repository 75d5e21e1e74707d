//! What the tests share.

use mq_api::{Broker, BrokerExt, Consumer, ConsumerExt, Delivery, Message, Result, RetryPolicy, Subscription};
use mq_memory::{FaultPlan, MemoryBroker, MemoryConfig};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

pub(crate) const SECOND: Duration = Duration::from_secs(1);

pub(crate) async fn recv(c: &mut Box<dyn Consumer>) -> Option<Delivery> {
    timeout(1000 * SECOND, c.recv()).await.ok()?.expect("no error")
}

pub(crate) async fn three_letters(broker: &Arc<dyn Broker>) -> Result<Box<dyn Consumer>> {
    let p = broker.producer("t").await?;
    let mut c = broker.subscribe(Subscription::group("t", "g")).await?;
    for n in 0..3 {
        p.send(Message::new(format!("{n}"))).await?;
        recv(&mut c).await.expect("comes").dead_letter("bad").await;
    }
    Ok(c)
}

pub(crate) fn broker_with(faults: Option<FaultPlan>) -> Result<MemoryBroker> {
    let mut config = MemoryConfig::default();
    config.faults = faults;
    MemoryBroker::new(config)
}

pub(crate) fn label(d: &Delivery) -> String {
    String::from_utf8_lossy(d.payload_bytes()).into_owned()
}

pub(crate) fn trialled(member: &str) -> Subscription {
    Subscription::group("t", "g").member(member).lease(5 * SECOND).retry(RetryPolicy::attempts(1).delays([SECOND]))
}
