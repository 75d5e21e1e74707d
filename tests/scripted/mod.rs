//! A broker that says what the test tells it to and writes down how each delivery was settled. For what no real broker does
//! on request: losing one delivery, ending with an error, refusing to close in time.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, reason = "each test uses a part")]

use anymq::{
    Admin, Broker, Capabilities, CloseReport, Consumer, ConsumerControl, Deliveries, Delivery, Disposition, Durability,
    Error, Events, HealthState, HealthWatch, Message, Position, Producer, ProducerSpec, Result, Settled, Source,
    Subscription, Topic,
};
use mq_api::{Control, EventLog, HealthSetter, Settle, SettleStart, Stored, Ticket};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};
use tokio::sync::Notify;

/// How a delivery was settled: its slot and a word.
pub type Settlement = (u64, String);

#[derive(Default)]
struct State {
    queue: VecDeque<Message>,
    next: u64,
    held: HashSet<u64>,
    most_held: usize,
    lost: HashSet<u64>,
    lost_wakers: HashMap<u64, Vec<Waker>>,
    settled: Vec<Settlement>,
    error: Option<Error>,
    closing: bool,
    paused: bool,
    reader: Option<Waker>,
}

/// One subscription's script. Cheap to clone.
#[derive(Clone)]
pub struct Script {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
    source: Arc<Source>,
    health: HealthSetter,
}

impl Script {
    pub fn new() -> Self {
        Self {
            state: Arc::default(),
            changed: Arc::default(),
            source: Arc::new(Source::new(Topic::new("orders"), Some("billing".into()))),
            health: HealthSetter::new(HealthState::Running, SystemTime::UNIX_EPOCH),
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock().unwrap();
        let result = change(&mut state);
        let reader = state.reader.take();
        drop(state);
        reader.into_iter().for_each(Waker::wake);
        self.changed.notify_waiters();
        result
    }

    pub fn send(&self, payload: impl ToString) {
        self.change(|s| s.queue.push_back(Message::new(payload.to_string())));
    }

    /// The delivery in this slot is no longer ours.
    pub fn lose(&self, slot: u64) {
        let wakers = self.change(|s| {
            s.lost.insert(slot);
            s.lost_wakers.remove(&slot)
        });
        wakers.into_iter().flatten().for_each(Waker::wake);
    }

    /// The next receive fails.
    pub fn fail(&self, error: Error) {
        self.change(|s| s.error = Some(error));
    }

    pub fn settled(&self) -> Vec<Settlement> {
        self.state.lock().unwrap().settled.clone()
    }

    pub fn most_held(&self) -> usize {
        self.state.lock().unwrap().most_held
    }

    pub fn paused(&self) -> bool {
        self.state.lock().unwrap().paused
    }

    /// Waits until this many are settled.
    pub async fn settle_count(&self, n: usize) -> Vec<Settlement> {
        self.until(|s| s.settled.len() >= n).await;
        self.settled()
    }

    /// Waits until this many are in the program's hands.
    pub async fn held(&self, n: usize) {
        self.until(|s| s.held.len() == n).await;
    }

    async fn until(&self, wanted: impl Fn(&State) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if wanted(&self.state.lock().unwrap()) {
                return;
            }
            changed.await;
        }
    }

    fn write(&self, slot: u64, word: String) -> SettleStart {
        self.change(|s| {
            s.held.remove(&slot);
            let stale = s.lost.contains(&slot);
            s.settled.push((slot, if stale { format!("stale {word}") } else { word }));
            SettleStart::Done(if stale { Settled::Stale } else { Settled::Confirmed(Durability::Memory) })
        })
    }
}

impl Settle for Script {
    fn ack(&self, slot: u64) -> SettleStart {
        self.write(slot, "ack".to_owned())
    }
    fn ack_run(&self, first: u64, n: u32) -> SettleStart {
        let mut start = SettleStart::Done(Settled::Untracked);
        for slot in first..first + u64::from(n) {
            start = self.write(slot, "ack".to_owned());
        }
        start
    }
    fn settle(&self, slot: u64, how: Disposition) -> SettleStart {
        let word = match how {
            Disposition::Ack => "ack".to_owned(),
            Disposition::Nack { failure, after } => {
                let failure = failure.expect("the worker always says why");
                let after = after.map(|d| format!(" after {d:?}")).unwrap_or_default();
                format!("nack {:?}{after}: {}", failure.class(), failure.chain())
            }
            Disposition::DeadLetter { reason, .. } => format!("dead letter: {reason}"),
            Disposition::Release => "release".to_owned(),
            Disposition::Dropped => "dropped".to_owned(),
        };
        self.write(slot, word)
    }
    fn poll_settled(&self, _: u64, _: &mut Context<'_>) -> Poll<Settled> {
        Poll::Ready(Settled::Untracked)
    }
    fn poll_lost(&self, slot: u64, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.lock().unwrap();
        if state.lost.contains(&slot) {
            return Poll::Ready(());
        }
        state.lost_wakers.entry(slot).or_default().push(cx.waker().clone());
        Poll::Pending
    }
    fn is_owned(&self, slot: u64) -> bool {
        self.state.lock().unwrap().held.contains(&slot)
    }
    fn source(&self) -> &Source {
        &self.source
    }
}

pub struct ScriptedConsumer(Script);

impl Consumer for ScriptedConsumer {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Delivery>>> {
        let mut one = Deliveries::new();
        self.poll_batch(cx, 1, &mut one).map(|result| result.map(|_| one.pop()))
    }
    fn poll_batch(&mut self, cx: &mut Context<'_>, max: usize, out: &mut Deliveries) -> Poll<Result<usize>> {
        let mut state = self.0.state.lock().unwrap();
        if let Some(error) = state.error.take() {
            return Poll::Ready(Err(error));
        }
        if state.closing {
            return Poll::Ready(Ok(0));
        }
        if state.queue.is_empty() || state.paused {
            state.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let n = max.min(state.queue.len());
        let lane = Arc::new(self.0.clone());
        for _ in 0..n {
            let message = state.queue.pop_front().unwrap();
            let slot = state.next;
            state.next += 1;
            state.held.insert(slot);
            out.push(Delivery::new(
                Arc::new(Stored::new(message)),
                Position::offset(slot),
                1,
                Ticket::new(lane.clone(), slot),
            ));
        }
        state.most_held = state.most_held.max(state.held.len());
        drop(state);
        self.0.changed.notify_waiters();
        Poll::Ready(Ok(n))
    }
    fn control(&self) -> ConsumerControl {
        ConsumerControl::new(Arc::new(self.0.clone()))
    }
}

impl Control for Script {
    fn pause(&self) {
        self.change(|s| s.paused = true);
    }
    fn resume(&self) {
        self.change(|s| s.paused = false);
    }
    fn in_flight(&self) -> usize {
        self.state.lock().unwrap().held.len()
    }
    fn health(&self) -> HealthWatch {
        self.health.watch()
    }
    fn events(&self) -> Events {
        EventLog::default().reader()
    }
    fn close(&self, deadline: Duration) -> futures_core::future::BoxFuture<'static, CloseReport> {
        let script = self.clone();
        script.change(|s| s.closing = true);
        Box::pin(async move {
            let _ = tokio::time::timeout(deadline, script.until(|s| s.held.is_empty())).await;
            let mut report = CloseReport::default();
            report.given_back = script.in_flight() as u64;
            report
        })
    }
}

/// Gives out its scripts in the order of subscriptions.
pub struct ScriptedBroker(Mutex<VecDeque<Result<Script>>>);

impl ScriptedBroker {
    pub fn broker(scripts: impl IntoIterator<Item = Result<Script>>) -> Arc<dyn Broker> {
        Arc::new(Self(Mutex::new(scripts.into_iter().collect())))
    }
}

#[mq_api::async_trait]
impl Broker for ScriptedBroker {
    fn capabilities(&self) -> Arc<Capabilities> {
        Arc::new(Capabilities::new("scripted"))
    }
    async fn open_producer(&self, _: ProducerSpec) -> Result<Arc<dyn Producer>> {
        Err(Error::unsupported("scripted", "sending", "tests send by the script"))
    }
    async fn open_consumer(&self, _: Subscription) -> Result<Box<dyn Consumer>> {
        let script = self.0.lock().unwrap().pop_front().expect("a script for each subscription")?;
        Ok(Box::new(ScriptedConsumer(script)))
    }
    fn admin(&self) -> Arc<dyn Admin> {
        unimplemented!("no test asks")
    }
    fn health(&self) -> HealthWatch {
        HealthSetter::new(HealthState::Running, SystemTime::UNIX_EPOCH).watch()
    }
    async fn close(&self, _: Duration) -> CloseReport {
        CloseReport::default()
    }
}
