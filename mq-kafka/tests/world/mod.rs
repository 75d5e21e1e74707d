//! What the tests of this crate share: a server, names that do not meet, a bound for every wait.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

pub(crate) mod bed;

use mq_api::Broker;
use rdkafka::admin::AdminClient;
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use std::sync::Arc;
use std::time::Duration;

pub(crate) struct World {
    pub(crate) url: String,
    run: String,
}

impl World {
    /// `None` when there is no server: the test is noted as skipped.
    pub(crate) fn new(name: &str) -> Option<Self> {
        let url = mq_testbed::need(mq_testbed::Kind::Kafka)?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        Some(Self { url, run: format!("{name}-{:x}", now.as_micros()) })
    }

    pub(crate) fn topic(&self, name: &str) -> String {
        format!("{name}.{}", self.run)
    }

    /// What an operator does.
    pub(crate) fn admin(&self) -> AdminClient<DefaultClientContext> {
        ClientConfig::new().set("bootstrap.servers", self.url.trim_start_matches("kafka://")).create().unwrap()
    }

    pub(crate) async fn connect(&self) -> Arc<dyn Broker> {
        within(mq_kafka::connect(&format!("{}?min_session=1s", self.url))).await.unwrap()
    }
}

/// No test waits for ever.
pub(crate) async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("in time")
}
