//! A broker of this crate over librdkafka's mock cluster. No server is needed.
#![allow(dead_code, clippy::unwrap_used)]

use super::within;
use mq_api::{Broker, BrokerExt, Consumer, Subscription};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::BaseConsumer;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const TOPIC: &str = "work";

pub(crate) struct Bed {
    pub(crate) cluster: MockCluster<'static, DefaultProducerContext>,
    pub(crate) broker: Arc<dyn Broker>,
}

impl Bed {
    /// A cluster of one broker. It makes no topics by its protocol, so they are made here.
    pub(crate) async fn start() -> Self {
        Self::of(1).await
    }

    /// One of several brokers.
    pub(crate) async fn of(brokers: i32) -> Self {
        let cluster = MockCluster::new(brokers).unwrap();
        for topic in [TOPIC, "work..crew..dlq", "work..crew..retry"] {
            cluster.create_topic(topic, 1, 1).unwrap();
        }
        let url = format!("kafka://{}?min_session=1s", cluster.bootstrap_servers());
        let broker = within(mq_kafka::connect(&url)).await.unwrap();
        Self { cluster, broker }
    }

    pub(crate) fn sub() -> Subscription {
        // The mock answers an empty fetch only after its whole wait.
        Subscription::group(TOPIC, "crew").lease(Duration::from_secs(6)).native("librdkafka.fetch.wait.max.ms", "20")
    }

    pub(crate) async fn consumer(&self, sub: Subscription) -> Box<dyn Consumer> {
        within(self.broker.subscribe(sub)).await.unwrap()
    }

    /// A client of the group that is none of ours.
    pub(crate) fn client(&self) -> BaseConsumer {
        self.client_of("work..crew")
    }

    /// The same of another group.
    pub(crate) fn client_of(&self, group: &str) -> BaseConsumer {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.cluster.bootstrap_servers()).set("group.id", group);
        config.create().unwrap()
    }

    pub(crate) async fn close(self) {
        within(self.broker.close(Duration::from_secs(5))).await;
    }
}
