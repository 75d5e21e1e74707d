//! The consumer of a backend behind a network: hands out of the inbox, supervises the session, drains at close.

use crate::deadline::{Closing, Deadline};
use crate::env::Env;
use crate::flow::Gate;
use crate::hooks::Hooks;
use crate::keeper::keep;
use crate::mechanics::{MoveBy, RetryBy};
use crate::producer::Sender;
use crate::seam::{Driver, Lanes, Purpose, Run, Session, Stop};
use crate::settles::SettleQueue;
use crate::shared::Shared;
use crate::supervise::{ConnectPolicy, Supervised, supervise};
use futures_core::future::BoxFuture;
use mq_api::{
    CloseReport, Consumer, ConsumerControl, Control, Deliveries, Delivery, Error, Events, HealthState, HealthWatch,
    Mode, ProducerSpec, Result, Subscription,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A consumer that goes on during its close looks for more at once, or when it has room; one that does not has ended.
const TAKEN_WITHIN: Duration = Duration::from_secs(1);

struct Rx<D> {
    driver: Arc<D>,
    id: u64,
    shared: Arc<Shared>,
    lanes: Lanes,
    member: Arc<str>,
    stop: Stop,
    draining: Stop,
    current: Mutex<Option<(Arc<SettleQueue>, Stop)>>,
}

impl<D: Driver> Supervised for Rx<D> {
    async fn start(&self, generation: u64) -> Result<Run> {
        let settles = SettleQueue::new(self.driver.capabilities().settle_level);
        let stop = self.stop.child_token();
        *self.current.lock() = Some((settles.clone(), stop.clone()));
        let session = Session {
            subscription: self.shared.sub.clone(),
            member: self.member.clone(),
            consumer: self.id,
            flow: self.shared.flow.clone(),
            settles,
            events: self.shared.events.clone(),
            stop,
            draining: self.draining.clone(),
            env: self.shared.env.clone(),
            generation,
            lanes: self.lanes.clone(),
            shared: self.shared.clone(),
        };
        self.driver.attach(session).await
    }

    fn running(&self) {
        self.shared.attached();
        self.shared.set_settle_level(self.driver.capabilities().settle_level);
        self.shared.session_state(HealthState::Running, "");
    }

    fn lost(&self, state: HealthState, why: &Error) {
        if self.shared.health().state() == HealthState::Running {
            tracing::warn!(topic = %self.shared.sub.topic, error = %why, "consumer session lost; attaching again");
        }
        self.fence();
        self.shared.session_state(state, why.to_string());
    }

    fn over(&self, error: Option<Error>) {
        self.fence();
        if error.is_some() || !self.shared.is_stopping() {
            if error.is_none() {
                // The driver ended it, and nobody has to close it.
                self.shared.session_state(HealthState::Closed, "");
            }
            self.shared.inbox.close(error);
        }
    }
}

impl<D> Rx<D> {
    /// Closes every lane of the session: later settlements are stale, unconfirmed ones unknown.
    fn fence(&self) {
        let current = self.current.lock().take();
        if let Some((_, stop)) = &current {
            stop.cancel();
        }
        let (fenced, tally) = self.lanes.fence(current.as_ref().map(|(settles, _)| &**settles));
        self.shared.inbox.clear();
        self.shared.fenced(fenced, tally);
    }
}

/// The session that runs now, whatever its driver.
trait CurrentSession: Send + Sync {
    fn settles(&self) -> Option<Arc<SettleQueue>>;
    fn fence(&self);
}

impl<D: Driver> CurrentSession for Rx<D> {
    fn settles(&self) -> Option<Arc<SettleQueue>> {
        self.current.lock().as_ref().map(|(settles, _)| settles.clone())
    }

    fn fence(&self) {
        Self::fence(self);
    }
}

/// What the program's handle and the close share.
struct Core {
    shared: Arc<Shared>,
    lanes: Lanes,
    stop: Stop,
    draining: Stop,
    relay: Option<Arc<Sender>>,
    session: Arc<dyn CurrentSession>,
    tasks: Mutex<Option<(JoinHandle<()>, JoinHandle<()>)>>,
    keeper_stop: Stop,
    closing: Closing,
}

/// The [`Consumer`] of a backend behind a network.
pub struct EngineConsumer {
    core: Arc<Core>,
    control: ConsumerControl,
    budget: u32,
    one: Deliveries,
}

/// Ready results in a row after which others get a turn.
const BUDGET: u32 = 128;

impl EngineConsumer {
    /// Starts one; waits for the first session, so that what is sent from now on is seen.
    ///
    /// # Errors
    /// As [`Driver::attach`]; `Unsupported` when the capabilities lack what is asked for.
    pub async fn start<D: Driver>(
        driver: Arc<D>,
        subscription: Subscription,
        env: Env,
        hooks: Arc<dyn Hooks>,
        policy: ConnectPolicy,
    ) -> Result<Self> {
        driver.capabilities().check(&subscription)?;
        let sub = Arc::new(subscription);
        let member: Arc<str> = match &sub.member {
            Some(name) => name.as_str().into(),
            None => format!("{:016x}", env.random()).into(),
        };
        let mechanics = driver.mechanics();
        let level = driver.capabilities().settle_level;
        let needs_relay = matches!(sub.mode, Mode::Group(_))
            && (mechanics.retry != RetryBy::Driver || mechanics.dead_letter == MoveBy::Publish);
        let relay = match needs_relay {
            true => {
                let mut spec = ProducerSpec::new(&sub.topic).provisioning(sub.provisioning);
                spec.native = sub.native.clone();
                // The keeper tries again, and says so; two that do would hide each other.
                spec.retry_for = Duration::ZERO;
                let purpose = Purpose::Relay(sub.clone());
                Some(Sender::start(driver.clone(), Arc::new(spec), purpose, env.clone(), hooks.clone(), policy).await?)
            }
            false => None,
        };
        let shared = Shared::new(sub, member.clone(), mechanics, level, env.clone(), hooks);
        let lanes = Lanes::default();
        let stop = Stop::new();
        let draining = Stop::new();
        let rx = Arc::new(Rx {
            driver,
            id: env.random(),
            shared: shared.clone(),
            lanes: lanes.clone(),
            member,
            stop: stop.clone(),
            draining: draining.clone(),
            current: Mutex::default(),
        });
        let keeper_stop = Stop::new();
        let outbox = relay.as_ref().map(|relay| relay.outbox.clone());
        let keeper = env.spawn(keep(shared.clone(), lanes.clone(), outbox, keeper_stop.clone()));
        let (first, started) = oneshot::channel();
        let current = rx.clone();
        let supervisor = env.spawn(supervise(rx, env.clone(), policy, stop.clone(), first));
        let core = Arc::new(Core {
            shared,
            lanes,
            stop,
            draining,
            relay,
            session: current,
            tasks: Mutex::new(Some((supervisor, keeper))),
            keeper_stop,
            closing: Closing::default(),
        });
        let consumer = Self { control: ConsumerControl::new(core.clone()), core, budget: 0, one: Deliveries::new() };
        // An error, or a cancelled call, drops the consumer, which stops its tasks.
        started.await.unwrap_or_else(|_| Err(Error::closed("the connection")))?;
        Ok(consumer)
    }
}

impl Consumer for EngineConsumer {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Delivery>>> {
        let mut one = std::mem::take(&mut self.one);
        let polled = self.poll_batch(cx, 1, &mut one);
        let delivery = one.pop();
        self.one = one;
        match ready!(polled) {
            Ok(_) => Poll::Ready(Ok(delivery)),
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    fn poll_batch(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Deliveries) -> Poll<Result<usize>> {
        self.budget += 1;
        if self.budget >= BUDGET {
            self.budget = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let now = self.core.shared.env.now();
        let polled = self.core.shared.inbox.poll_hand_out(cx, max.max(1), out, now);
        if polled.is_pending() {
            self.budget = 0;
        }
        polled
    }

    fn control(&self) -> ConsumerControl {
        self.control.clone()
    }
}

impl Drop for EngineConsumer {
    fn drop(&mut self) {
        if !self.core.closing.is_begun() {
            // Not closed: what is buffered goes back, what is in hand stays settleable until it is settled or late.
            drop(self.core.close(Duration::from_secs(5)));
        }
        if self.core.shared.at_most_once {
            // Nobody can take it any more.
            self.core.shared.inbox.forget_settled();
        }
    }
}

impl Control for Core {
    fn pause(&self) {
        self.shared.pause(true);
    }

    fn resume(&self) {
        self.shared.pause(false);
    }

    fn in_flight(&self) -> usize {
        match self.shared.health().state() {
            HealthState::Closed => 0,
            _ => self.shared.flow.in_flight(),
        }
    }

    fn health(&self) -> HealthWatch {
        self.shared.health().watch()
    }

    fn events(&self) -> Events {
        self.shared.events.reader()
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'static, CloseReport> {
        let (begun, report) = self.closing.ask(self.shared.env.after(deadline));
        if let Some(begun) = begun {
            let tasks = self.tasks.lock().take();
            self.shared.flow.shut(Gate::Stopping);
            self.draining.cancel();
            self.shared.inbox.nudge();
            // What is no longer owned cannot be settled: nobody waits for it.
            self.lanes.drop_strays(None);
            self.lanes.each(|lane| lane.begin_drain());
            let drain = Drain {
                shared: self.shared.clone(),
                lanes: self.lanes.clone(),
                stop: self.stop.clone(),
                keeper_stop: self.keeper_stop.clone(),
                relay: self.relay.clone(),
                session: self.session.clone(),
            };
            self.shared.env.spawn(async move {
                let report = drain.run(&begun.deadline, tasks).await;
                begun.tell(report);
            });
        }
        report
    }
}

struct Drain {
    shared: Arc<Shared>,
    lanes: Lanes,
    stop: Stop,
    keeper_stop: Stop,
    relay: Option<Arc<Sender>>,
    session: Arc<dyn CurrentSession>,
}

impl Drain {
    /// Of what was settled before the hand-over there is some left, and the program neither takes it nor has anything in hand.
    async fn nobody_takes(&self) {
        if !self.shared.at_most_once {
            return std::future::pending().await;
        }
        loop {
            let (looks, owed) = (self.shared.inbox.looks(), self.shared.inbox.is_owed());
            tokio::time::sleep(TAKEN_WITHIN).await;
            // All that time there was something to take, and nobody looked.
            if owed && self.shared.inbox.looks() == looks && self.shared.hands.in_flight() == 0 {
                return;
            }
        }
    }

    async fn run(self, deadline: &Deadline, tasks: Option<(JoinHandle<()>, JoinHandle<()>)>) -> CloseReport {
        let mut report = CloseReport::default();
        let drained = deadline.within(std::future::poll_fn(|cx| self.shared.flow.poll_drained(cx)));
        tokio::select! { biased;
            _ = drained => {}
            () = self.nobody_takes() => {}
        }
        if self.shared.at_most_once {
            let lost = self.shared.inbox.forget_settled();
            if lost > 0 {
                tracing::warn!(messages = lost, "settled before the hand-over and never taken, so they are lost");
            }
        }
        // The deadline passed with deliveries in hand: they go back.
        self.lanes.each(|lane| lane.give_back_handed());
        // What a lost session left at the broker in this member's name: a new session gives it back, if there can be one in time.
        deadline.within(self.shared.no_orphans()).await;
        // Also with the deadline passed, what was just given back gets a moment to reach the broker.
        if let Some(settles) = self.session.settles() {
            deadline.within_or(Duration::from_millis(500), settles.flushed()).await;
        }
        self.stop.cancel();
        if let Some((mut supervisor, keeper)) = tasks {
            if deadline.within_or(Duration::from_secs(2), &mut supervisor).await.is_none() {
                report.abandoned += 1;
                supervisor.abort();
                let _ = supervisor.await;
            }
            // The supervisor did, unless it was aborted: nobody waits for an answer that cannot come.
            self.session.fence();
            self.keeper_stop.cancel();
            let _ = keeper.await;
        }
        self.shared.keeper.end();
        let missing = self.shared.missing();
        report.given_back = self.shared.given_back().saturating_sub(missing.returned);
        report.leaked = missing.orphans + missing.returned;
        report.unknown = missing.unknown;
        if let Some(relay) = &self.relay {
            report += relay.close(Duration::from_millis(500)).await;
        }
        self.shared.inbox.close(None);
        self.shared.events.close();
        self.shared.session_state(HealthState::Closed, "");
        report
    }
}

impl std::fmt::Debug for EngineConsumer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EngineConsumer({:?})", self.core.shared)
    }
}
