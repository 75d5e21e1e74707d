//! The producer of a backend behind a network: checks, stamps, the outbox, and the supervision of the loop that writes it.

use crate::deadline::{Closing, Deadline};
use crate::env::Env;
use crate::hooks::Hooks;
use crate::keeper::Target;
use crate::outbox::Outbox;
use crate::seam::{Driver, Purpose, Run, Stop, TxSession};
use crate::stamp::stamp;
use crate::supervise::{ConnectPolicy, Supervised, supervise};
use futures_core::future::BoxFuture;
use mq_api::{
    Batch, CloseReport, Error, HealthSetter, HealthState, HealthWatch, Message, Producer, ProducerSpec, Result,
    SendOptions, Sending, SendingBatch, Topic,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Looks at time limits this often while something is open.
const TICK: Duration = Duration::from_millis(20);

/// Where a producer's health is told.
#[derive(Clone)]
pub(crate) struct Told {
    topic: Topic,
    health: HealthSetter,
    hooks: Arc<dyn Hooks>,
    env: Env,
}

impl Told {
    pub(crate) fn tell(&self, state: HealthState, why: &str) {
        self.health.set(state, why, self.env.wall());
        self.hooks.health(&self.topic, state, why);
    }

    /// The same, unless it is told already.
    pub(crate) fn change(&self, state: HealthState, why: &str) {
        if self.health.state() != state {
            self.tell(state, why);
        }
    }
}

impl std::fmt::Debug for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Told({}, {:?})", self.topic, self.health)
    }
}

struct Tx<D> {
    driver: Arc<D>,
    spec: Arc<ProducerSpec>,
    purpose: Purpose,
    outbox: Arc<Outbox>,
    told: Told,
    env: Env,
    session: Mutex<Stop>,
    stop: Stop,
}

impl<D: Driver> Supervised for Tx<D> {
    async fn start(&self, generation: u64, _: bool) -> Result<Run> {
        let stop = self.stop.child_token();
        *self.session.lock() = stop.clone();
        let tx = TxSession {
            spec: self.spec.clone(),
            purpose: self.purpose.clone(),
            outbox: self.outbox.clone(),
            stop,
            env: self.env.clone(),
            generation,
            told: self.told.clone(),
        };
        self.driver.open_tx(tx).await
    }

    fn running(&self) {
        self.outbox.session_begun();
        self.told.tell(HealthState::Running, "");
    }

    fn lost(&self, state: HealthState, why: &Error) {
        self.session.lock().cancel();
        tracing::debug!(topic = %self.spec.topic, error = %why, "producer session ended");
        self.outbox.session_lost(&why.to_string());
        self.told.tell(state, &why.to_string());
    }

    fn over(&self, error: Option<Error>) {
        self.outbox.session_lost("closed");
        if error.is_some() {
            // No session will come: what is open, and what would be sent, must not wait for its time limit.
            self.outbox.end();
        }
    }
}

/// A running outbox: the supervisor, the clock of its time limits.
pub(crate) struct Sender {
    pub(crate) outbox: Arc<Outbox>,
    health: HealthSetter,
    env: Env,
    stop: Stop,
    tasks: Mutex<Option<(JoinHandle<()>, JoinHandle<()>)>>,
    closing: Closing,
}

impl Sender {
    pub(crate) async fn start<D: Driver>(
        driver: Arc<D>,
        spec: Arc<ProducerSpec>,
        purpose: Purpose,
        env: Env,
        hooks: Arc<dyn Hooks>,
        policy: ConnectPolicy,
    ) -> Result<Arc<Self>> {
        let outbox = Outbox::new(&spec, hooks.clone());
        let health = HealthSetter::new(HealthState::Connecting, env.wall());
        let stop = Stop::new();
        let tx = Arc::new(Tx {
            driver,
            told: Told { topic: spec.topic.clone(), health: health.clone(), hooks, env: env.clone() },
            spec,
            purpose,
            outbox: outbox.clone(),
            env: env.clone(),
            session: Mutex::new(stop.child_token()),
            stop: stop.clone(),
        });
        let (first, started) = oneshot::channel();
        let supervisor = env.spawn(supervise(tx, env.clone(), policy, stop.clone(), first));
        let clock = env.spawn(run_clock(outbox.clone(), env.clone(), stop.clone()));
        let sender = Arc::new(Self {
            outbox,
            health,
            env,
            stop,
            tasks: Mutex::new(Some((supervisor, clock))),
            closing: Closing::default(),
        });
        // Dropping the sender (an error, or a cancelled call) stops both tasks.
        let started = started.await.unwrap_or_else(|_| Err(Error::closed("the connection")));
        started.map(|()| sender)
    }

    /// Flushes within `deadline`, then ends the session. Takes effect at the call; dropping the future does not stop it. A call
    /// that comes meanwhile may bring the deadline forward.
    pub(crate) fn close(self: &Arc<Self>, deadline: Duration) -> BoxFuture<'static, CloseReport> {
        let (begun, report) = self.closing.ask(self.env.after(deadline));
        if let Some(begun) = begun {
            self.outbox.shut();
            let sender = self.clone();
            self.env.spawn(async move {
                let report = sender.end(&begun.deadline, deadline).await;
                begun.tell(report);
            });
        }
        report
    }

    async fn end(&self, by: &Deadline, deadline: Duration) -> CloseReport {
        by.within(std::future::poll_fn(|cx| self.outbox.poll_flushed(cx))).await;
        let mut report = CloseReport::default();
        // Counted before the session ends: its end would complete what is flying, uncounted.
        report.unknown = self.outbox.end();
        self.stop.cancel();
        let tasks = self.tasks.lock().take();
        if let Some((mut supervisor, clock)) = tasks {
            // The loop was told to stop and has nothing to write: what takes longer is a client that hangs.
            let grace = deadline.min(Duration::from_secs(2)).max(Duration::from_millis(200));
            if tokio::time::timeout(grace, &mut supervisor).await.is_err() {
                report.abandoned += 1;
                supervisor.abort();
                let _ = supervisor.await;
            }
            let _ = clock.await;
        }
        self.health.set(HealthState::Closed, "", self.env.wall());
        report
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.stop.cancel();
        self.outbox.end();
    }
}

async fn run_clock(outbox: Arc<Outbox>, env: Env, stop: Stop) {
    let mut interval = TICK;
    loop {
        tokio::select! { biased;
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
        // Nothing open: look less often. A send that comes meanwhile is late by at most that.
        interval = if outbox.tick(env.now()) { TICK } else { TICK * 5 };
    }
}

/// The [`Producer`] of a backend behind a network.
pub struct EngineProducer {
    sender: Arc<Sender>,
    spec: Arc<ProducerSpec>,
}

impl EngineProducer {
    /// Starts one; waits for the first session.
    ///
    /// # Errors
    /// As [`Driver::open_tx`].
    pub async fn start<D: Driver>(
        driver: Arc<D>,
        spec: ProducerSpec,
        env: Env,
        hooks: Arc<dyn Hooks>,
        policy: ConnectPolicy,
    ) -> Result<Arc<Self>> {
        driver.capabilities().check_producer(&spec)?;
        let spec = Arc::new(spec);
        let sender = Sender::start(driver, spec.clone(), Purpose::Producer, env, hooks, policy).await?;
        Ok(Arc::new(Self { sender, spec }))
    }

    /// Failures of sends that nobody awaited.
    pub fn unobserved_failures(&self) -> u64 {
        self.sender.outbox.unobserved_failures()
    }
}

impl Producer for EngineProducer {
    fn send_with(&self, mut message: Message, options: SendOptions) -> Sending {
        match stamp(&mut message, &self.spec, || self.sender.env.wall()) {
            Ok(_) => self.sender.outbox.send(message, Target::Topic, options.timeout),
            Err(error) => Sending::ready(Err(error)),
        }
    }

    fn send_batch(&self, mut batch: Batch) -> SendingBatch {
        batch.clear_outcomes();
        let now = self.sender.env.wall();
        let messages = batch.messages.drain(..).map(|mut message| {
            let size = stamp(&mut message, &self.spec, || now)?;
            Ok((message, size))
        });
        let tickets = self.sender.outbox.send_many(messages);
        SendingBatch::wait(batch, self.sender.outbox.clone(), tickets)
    }

    fn flush(&self, deadline: Duration) -> BoxFuture<'_, bool> {
        Box::pin(async move {
            let mark = self.sender.outbox.mark();
            let flushed = std::future::poll_fn(|cx| self.sender.outbox.poll_flushed_to(mark, cx));
            tokio::time::timeout(deadline, flushed).await.is_ok()
        })
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, CloseReport> {
        self.sender.close(deadline)
    }

    fn health(&self) -> HealthWatch {
        self.sender.health.watch()
    }

    fn topic(&self) -> &Topic {
        &self.spec.topic
    }
}

impl std::fmt::Debug for EngineProducer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EngineProducer({}, {:?})", self.spec.topic, self.sender.outbox)
    }
}
