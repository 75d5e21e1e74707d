//! A connection that makes one mistake.

use super::admin::FaultyAdmin;
use super::consumer::{FaultyConsumer, Idle};
use super::producer::FaultyProducer;
use super::{Bug, State, rewrite};
use mq_api::{
    Admin, Broker, Capabilities, CloseReport, Consumer, Error, ErrorKind, HealthWatch, Producer, ProducerSpec, Result,
    Subscription, async_trait,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(super) struct FaultyBroker {
    inner: Arc<dyn Broker>,
    state: Arc<State>,
    number: u64,
}

impl FaultyBroker {
    pub(super) fn new(inner: Arc<dyn Broker>, state: Arc<State>, number: u64) -> Self {
        Self { inner, state, number }
    }

    fn is(&self, bug: Bug) -> bool {
        self.state.bug == bug
    }

    /// Whether a subscription differs from the first of its topic and group in something that users tune.
    fn tuned(&self, sub: &Subscription) -> bool {
        let name = format!("{} {:?}", sub.topic, sub.group_name());
        let mut first = self.state.first.lock();
        let first = first.entry(name).or_insert_with(|| sub.clone());
        first.retry != sub.retry || first.max_in_flight != sub.max_in_flight
    }
}

#[async_trait]
impl Broker for FaultyBroker {
    fn capabilities(&self) -> Arc<Capabilities> {
        self.inner.capabilities()
    }

    async fn open_producer(&self, spec: ProducerSpec) -> Result<Arc<dyn Producer>> {
        let plain = spec.groups.is_empty();
        let spec = rewrite::producer(&self.state, spec);
        let opened = match self.inner.open_producer(spec.clone()).await {
            Err(e) if self.is(Bug::PartitionsUnchecked) && e.kind() == ErrorKind::Topology => {
                let mut other = spec;
                other.partitions = None;
                self.inner.open_producer(other).await
            }
            other => other,
        };
        Ok(Arc::new(FaultyProducer::new(opened?, self.state.clone(), plain, self.capabilities().send_level)))
    }

    async fn open_consumer(&self, subscription: Subscription) -> Result<Box<dyn Consumer>> {
        let sub = rewrite::subscription(&self.state, subscription);
        if self.is(Bug::TuningIsTopology) && self.tuned(&sub) {
            return Err(Error::new(ErrorKind::Topology, "the group exists with other arguments"));
        }
        let opened = match self.inner.open_consumer(sub.clone()).await {
            Err(e) if self.is(Bug::RefusesNothing) && e.kind() == ErrorKind::Unsupported => {
                return Ok(Box::new(Idle::new()));
            }
            Err(e) if self.is(Bug::NamesShared) && e.kind() == ErrorKind::Config && sub.member.is_some() => {
                let mut other = sub;
                other.member = None;
                self.inner.open_consumer(other).await
            }
            Err(e) if self.is(Bug::PartitionsUnchecked) && e.kind() == ErrorKind::Topology => {
                let mut other = sub;
                other.partitions = None;
                self.inner.open_consumer(other).await
            }
            other => other,
        };
        let opened = opened?;
        let order = self.state.consumers.fetch_add(1, Ordering::Relaxed);
        if self.is(Bug::TaskLeaks) {
            tokio::spawn(std::future::pending::<()>());
        }
        Ok(Box::new(FaultyConsumer::new(opened, self.state.clone(), self.number, order)))
    }

    fn admin(&self) -> Arc<dyn Admin> {
        Arc::new(FaultyAdmin::new(self.inner.clone(), self.state.clone()))
    }

    fn health(&self) -> HealthWatch {
        self.inner.health()
    }

    async fn close(&self, deadline: Duration) -> CloseReport {
        self.inner.close(deadline).await
    }
}

impl Drop for FaultyBroker {
    fn drop(&mut self) {
        if self.is(Bug::DroppedHandleCloses) {
            let inner = self.inner.clone();
            tokio::spawn(async move { inner.close(Duration::ZERO).await });
        }
    }
}
