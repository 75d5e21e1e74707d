//! Starts consumers and producers on a toy broker.

use crate::broker::Toy;
use crate::pusher::Pusher;
use crate::reader::Reader;
use crate::script::Script;
use crate::thread::Threaded;
use mq_api::{HealthState, HealthWatch, ProducerSpec, Result, Subscription};
use mq_core::{ConnectPolicy, EngineConsumer, EngineProducer, Env, NoHooks};
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone)]
pub struct Rig {
    pub toy: Toy,
    pub script: Script,
    pub env: Env,
    pub policy: ConnectPolicy,
}

pub fn sub() -> Subscription {
    Subscription::group("orders", "billing")
}

pub fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

pub fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

impl Rig {
    pub fn new() -> Self {
        let env = Env::current(Some(7)).expect("in a runtime");
        Self { toy: Toy::default(), script: Script::default(), env, policy: ConnectPolicy::default() }
    }

    pub async fn reader(&self, sub: Subscription) -> EngineConsumer {
        self.try_reader(sub).await.expect("starts")
    }

    pub async fn try_reader(&self, sub: Subscription) -> Result<EngineConsumer> {
        let driver = Reader { toy: self.toy.clone(), script: self.script.clone() };
        EngineConsumer::start(Arc::new(driver), sub, self.env.clone(), Arc::new(NoHooks), self.policy).await
    }

    pub async fn pusher(&self, sub: Subscription, prefetch: usize) -> EngineConsumer {
        let driver = Pusher { toy: self.toy.clone(), script: self.script.clone(), prefetch };
        let start = EngineConsumer::start(Arc::new(driver), sub, self.env.clone(), Arc::new(NoHooks), self.policy);
        start.await.expect("starts")
    }

    pub async fn threaded(&self, sub: Subscription, park: Duration) -> EngineConsumer {
        let driver = Threaded { toy: self.toy.clone(), script: self.script.clone(), park };
        let start = EngineConsumer::start(Arc::new(driver), sub, self.env.clone(), Arc::new(NoHooks), self.policy);
        start.await.expect("starts")
    }

    pub async fn producer(&self, spec: impl Into<ProducerSpec>) -> Arc<EngineProducer> {
        let driver = Reader { toy: self.toy.clone(), script: self.script.clone() };
        let start =
            EngineProducer::start(Arc::new(driver), spec.into(), self.env.clone(), Arc::new(NoHooks), self.policy);
        start.await.expect("starts")
    }

    /// Nothing of the library runs any more.
    pub async fn assert_nothing_left(&self) {
        tokio::time::timeout(secs(30), self.env.no_tasks()).await.expect("every task ends");
        assert_eq!(self.env.tasks(), 0);
    }
}

/// Waits for a state of health.
pub async fn until(mut health: HealthWatch, state: HealthState) {
    let seen = health.clone();
    let reached = health.wait_for(|h| h.state == state);
    if tokio::time::timeout(secs(120), reached).await.is_err() {
        panic!("health is {:?}, not {state:?}", seen.current());
    }
}
