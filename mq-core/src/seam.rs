//! The seam between the engine and a backend behind a network. A driver is thin: it fetches into lanes, carries out what the
//! settlement queue holds, writes what the outbox holds, and ends when its connection does. Everything else is the engine's.

use crate::env::Env;
use crate::flow::Flow;
use crate::hold::Fenced;
use crate::lane::Lane;
use crate::mechanics::Mechanics;
use crate::outbox::Outbox;
use crate::producer::Told;
use crate::resume::{Resume, Unsettled};
use crate::settles::{SettleQueue, Tally};
use crate::shared::Shared;
use futures_core::future::BoxFuture;
use mq_api::{Capabilities, Durability, Error, EventLog, HealthState, ProducerSpec, Result, Source, Subscription};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Weak};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How a session ended: the only failure signal there is.
#[derive(Debug)]
pub enum End {
    /// The connection, channel, group or assignment was lost: fence, back off, attach again.
    Lost(Error),
    /// It was asked to stop, and did. Unasked it ends the consumer for good.
    Closed,
    /// No retry can mend it.
    Fatal(Error),
}

/// The work of one session. The engine spawns it; it runs until [`Stop`] or loss.
pub type Run = BoxFuture<'static, End>;

/// A backend behind a network.
pub trait Driver: Send + Sync + 'static {
    /// How it does what the policy decides.
    fn mechanics(&self) -> Mechanics;

    /// What it can do, as far as it is known now.
    fn capabilities(&self) -> Arc<Capabilities>;

    /// Starts a consumer's session: connects, makes or verifies topic, group and dead-letter target, and returns the loop that
    /// fetches into lanes and carries out `session.settles`. Messages sent after this returned must be seen.
    ///
    /// When `session.stop` fires, the loop carries out what is left in `session.settles`, gives back what it holds, leaves the
    /// group, disconnects and returns [`End::Closed`].
    ///
    /// # Errors
    /// Kinds `Auth`, `Permission`, `Tls`, `Topology`, `Unsupported`, `Config` and `NotFound` fail at once until the first
    /// success; everything else is tried again.
    fn attach(&self, session: Session) -> impl Future<Output = Result<Run>> + Send;

    /// Starts a producer's session, or that of a consumer's relay: returns the loop that writes `tx.outbox`.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    fn open_tx(&self, tx: TxSession) -> impl Future<Output = Result<Run>> + Send;
}

/// Fires when a session should end.
pub type Stop = CancellationToken;

/// The lanes of one session, and where a former session left off.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lanes(Arc<Mutex<LaneTable>>);

#[derive(Debug, Default)]
struct LaneTable {
    open: Vec<Arc<Lane>>,
    /// Closed lanes of which deliveries are still in the application's hands.
    strays: Vec<Weak<Lane>>,
    next: u32,
    resume: HashMap<Option<u32>, Arc<Unsettled>>,
}

impl Lanes {
    pub(crate) fn each(&self, f: impl FnMut(&Arc<Lane>)) {
        let lanes = self.0.lock().open.clone();
        lanes.iter().for_each(f);
    }

    fn keep_strays(&self, lane: &Arc<Lane>) {
        if lane.has_strays() {
            self.0.lock().strays.push(Arc::downgrade(lane));
        }
    }

    /// Forgets deliveries in hand unowned since before `limit` (all if `None`): their credit comes back.
    pub(crate) fn drop_strays(&self, limit: Option<Instant>) {
        self.each(|lane| {
            lane.drop_strays(limit);
        });
        let strays = std::mem::take(&mut self.0.lock().strays);
        let left: Vec<_> = strays.into_iter().filter(|l| l.upgrade().is_some_and(|l| l.drop_strays(limit))).collect();
        self.0.lock().strays.extend(left);
    }

    /// Closes all and ends the session's settlements; says what was open.
    pub(crate) fn fence(&self, settles: Option<&SettleQueue>) -> (Fenced, Tally) {
        let lanes = std::mem::take(&mut self.0.lock().open);
        let mut fenced = Fenced::default();
        for lane in &lanes {
            fenced += lane.fence();
            self.keep_strays(lane);
        }
        // After the lanes: a closed lane queues nothing.
        let (tally, moving) = settles.map(SettleQueue::end).unwrap_or_default();
        for (id, position) in moving {
            if let Some(lane) = lanes.iter().find(|lane| lane.id() == id) {
                lane.unsettled.add([position]);
            }
        }
        (fenced, tally)
    }
}

/// Everything a consumer's session needs.
#[derive(Debug, Clone)]
pub struct Session {
    /// What is asked for.
    pub subscription: Arc<Subscription>,
    /// The name of this member. Programs choose it: several consumers of one client may have the same.
    pub member: Arc<str>,
    /// This consumer among all of the client: the same in each of its sessions. For what is to be remembered between them.
    pub consumer: u64,
    /// Credit: wait with `poll_credit`, ask the broker for at most that.
    pub flow: Arc<Flow>,
    /// Settlements to carry out.
    pub settles: Arc<SettleQueue>,
    /// Gaps and lags.
    pub events: EventLog,
    /// Fires when the session should end.
    pub stop: Stop,
    /// Fires when a close begins: stop fetching now, and let the broker hand to others. Settlements still come until `stop`.
    pub draining: Stop,
    /// Clock, randomness, tasks.
    pub env: Env,
    /// 1 for the first attempt to start a session, rising: of two, the later fences the earlier.
    pub generation: u64,
    /// A session of this consumer ran before: what it left is known, and what was missed since is a gap. Attempts that failed do
    /// not count.
    pub again: bool,
    pub(crate) lanes: Lanes,
    pub(crate) shared: Arc<Shared>,
}

impl Session {
    /// Opens a lane: one ownership period of a partition (or of the whole topic).
    pub fn open_lane(&self, partition: Option<u32>, epoch: u64) -> Arc<Lane> {
        let sub = &self.subscription;
        let source = Source::new(sub.topic.clone(), sub.group_name().cloned()).at(partition, epoch);
        let mut table = self.lanes.0.lock();
        table.next += 1;
        let unsettled = table.resume.entry(partition).or_default().clone();
        let lane = Lane::new(table.next, self.shared.clone(), self.settles.clone(), unsettled, source);
        table.open.push(lane.clone());
        lane
    }

    /// Closes one lane (a partition was revoked) while others go on.
    pub fn close_lane(&self, lane: &Arc<Lane>) -> usize {
        self.lanes.0.lock().open.retain(|l| !Arc::ptr_eq(l, lane));
        let handed = lane.close();
        self.lanes.keep_strays(lane);
        handed
    }

    /// The open lane of this number.
    pub fn lane(&self, id: u32) -> Option<Arc<Lane>> {
        self.lanes.0.lock().open.iter().find(|l| l.id() == id).cloned()
    }

    /// Where an earlier session left this partition.
    pub fn resume(&self, partition: Option<u32>) -> Option<Resume> {
        let found = self.lanes.0.lock().resume.get(&partition).map(|unsettled| unsettled.get());
        found.filter(|resume| *resume != Resume::default())
    }

    /// Level of confirmed settlements, when it is known only now.
    pub fn set_settle_level(&self, level: Durability) {
        self.settles.set_level(level);
        self.shared.set_settle_level(level);
    }

    /// Names, or clears, something that needs attention: health shows it.
    pub fn trouble(&self, what: &str, reason: Option<String>) {
        self.shared.trouble(what, reason);
    }

    /// For drivers whose client reconnects by itself: the broker cannot be reached, or (`None`) can again. The session goes on.
    pub fn unreachable(&self, why: Option<String>) {
        match why {
            Some(why) => self.shared.session_state(HealthState::Reconnecting, why),
            None => self.shared.session_state(HealthState::Running, ""),
        }
    }

    /// Settled before the hand-over.
    pub fn at_most_once(&self) -> bool {
        self.shared.at_most_once
    }

    /// The policy: for envelopes of drivers that write dead letters themselves.
    pub fn policy(&self) -> &crate::Policy {
        &self.shared.policy
    }
}

/// Why a producer's session is opened.
#[derive(Debug, Clone)]
pub enum Purpose {
    /// For sends of the program.
    Producer,
    /// For the copies (retries, dead letters) of this subscription's consumer.
    Relay(Arc<Subscription>),
}

/// Everything a producer's session needs.
#[derive(Debug, Clone)]
pub struct TxSession {
    /// What is asked for.
    pub spec: Arc<ProducerSpec>,
    /// For whom.
    pub purpose: Purpose,
    /// Messages to write.
    pub outbox: Arc<Outbox>,
    /// Fires when the session should end.
    pub stop: Stop,
    /// Clock, randomness, tasks.
    pub env: Env,
    /// 1 for the first session, rising.
    pub generation: u64,
    pub(crate) told: Told,
}

impl TxSession {
    /// For drivers whose client reconnects by itself: the broker cannot be reached, or (`None`) can again. The session goes on.
    /// May be told as often as it is seen.
    pub fn unreachable(&self, why: Option<&str>) {
        // One that was told to end has no say in what the next one is doing.
        if !self.stop.is_cancelled() {
            let state = if why.is_some() { HealthState::Reconnecting } else { HealthState::Running };
            self.told.change(state, why.unwrap_or_default());
        }
    }
}
