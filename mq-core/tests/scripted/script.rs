//! What a test makes the toy broker do wrong, and when.

use mq_api::{Error, ErrorKind};
use mq_core::Lane;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// What becomes of one write of a producer or relay.
pub enum Write {
    /// Stored and confirmed.
    Ok,
    /// Stored, and the answer is lost: the driver says unknown.
    Unknown,
    /// Not stored, and the driver does not know.
    LostUnknown,
    /// Refused.
    Reject,
    /// Not written, the broker is away.
    NotSent,
    /// Never answered.
    Silent,
}

/// How a cut session ends.
#[derive(Debug, Clone, Copy, Default)]
pub enum Way {
    #[default]
    Lost,
    Panic,
    Closed,
    Fatal,
}

type Decide = Box<dyn FnMut(&mq_core::Outgoing) -> Write + Send>;

#[derive(Default)]
struct State {
    attach: VecDeque<Error>,
    open_tx: VecDeque<Error>,
    attach_delay: Duration,
    settle_delay: Duration,
    fetch_delay: Duration,
    write_delay: Duration,
    silent_settles: bool,
    no_stop: bool,
    decide: Option<Decide>,
    cut: CancellationToken,
    tx_cut: CancellationToken,
    attaches: u64,
    resumes: Vec<Option<mq_core::Resume>>,
    again: Vec<bool>,
    lanes: Vec<Arc<Lane>>,
    way: Way,
    tx_way: Way,
}

/// Shared by test and driver.
#[derive(Clone, Default)]
pub struct Script(Arc<Mutex<State>>);

macro_rules! knobs {
    ($($set:ident $field:ident: $type:ty,)*) => { impl Script { $(
        pub fn $set(&self, value: $type) { self.0.lock().$field = value; }
        pub fn $field(&self) -> $type { self.0.lock().$field }
    )* } };
}
knobs! {
    set_attach_delay attach_delay: Duration,
    set_settle_delay settle_delay: Duration,
    set_fetch_delay fetch_delay: Duration,
    set_write_delay write_delay: Duration,
    set_silent_settles silent_settles: bool,
    set_no_stop no_stop: bool,
}

impl Script {
    /// The next attach fails with this.
    pub fn fail_attach(&self, kind: ErrorKind) {
        self.0.lock().attach.push_back(Error::new(kind, "scripted"));
    }

    pub fn fail_attaches(&self, kind: ErrorKind, n: usize) {
        (0..n).for_each(|_| self.fail_attach(kind));
    }

    pub fn heal_attach(&self) {
        self.0.lock().attach.clear();
    }

    pub fn fail_open_tx(&self, kind: ErrorKind, n: usize) {
        self.0.lock().open_tx.extend((0..n).map(|_| Error::new(kind, "scripted")));
    }

    pub fn attach_error(&self) -> Option<Error> {
        let mut st = self.0.lock();
        st.attaches += 1;
        st.attach.pop_front()
    }

    pub fn open_tx_error(&self) -> Option<Error> {
        self.0.lock().open_tx.pop_front()
    }

    pub fn attaches(&self) -> u64 {
        self.0.lock().attaches
    }

    pub fn saw_resume(&self, resume: Option<mq_core::Resume>) {
        self.0.lock().resumes.push(resume);
    }

    pub fn saw_again(&self, again: bool) {
        self.0.lock().again.push(again);
    }

    pub fn again(&self) -> Vec<bool> {
        self.0.lock().again.clone()
    }

    pub fn resumes(&self) -> Vec<Option<mq_core::Resume>> {
        self.0.lock().resumes.clone()
    }

    pub fn saw_lane(&self, lane: &Arc<Lane>) {
        self.0.lock().lanes.push(lane.clone());
    }

    /// The lane of the last session.
    pub fn lane(&self) -> Arc<Lane> {
        self.0.lock().lanes.last().cloned().expect("a session was started")
    }

    /// How writes go.
    pub fn writes(&self, decide: impl FnMut(&mq_core::Outgoing) -> Write + Send + 'static) {
        self.0.lock().decide = Some(Box::new(decide));
    }

    pub fn decide(&self, out: &mq_core::Outgoing) -> Write {
        self.0.lock().decide.as_mut().map_or(Write::Ok, |decide| decide(out))
    }

    /// Cuts the consumer's session that runs now.
    pub fn cut(&self) {
        let cut = std::mem::take(&mut self.0.lock().cut);
        cut.cancel();
    }

    /// The next cut of a reader is of this kind.
    pub fn end_by(&self, way: Way) {
        self.0.lock().way = way;
    }

    /// How the cut session ends.
    pub fn end(&self) -> mq_core::End {
        match std::mem::take(&mut self.0.lock().way) {
            Way::Lost => lost(),
            Way::Panic => panic!("scripted panic of a driver"),
            Way::Closed => mq_core::End::Closed,
            Way::Fatal => mq_core::End::Fatal(Error::new(ErrorKind::Topology, "scripted")),
        }
    }

    /// The next cut of a producer is of this kind.
    pub fn end_tx_by(&self, way: Way) {
        self.0.lock().tx_way = way;
    }

    /// How the cut producer's session ends.
    pub fn tx_end(&self) -> mq_core::End {
        match std::mem::take(&mut self.0.lock().tx_way) {
            Way::Fatal => mq_core::End::Fatal(Error::new(ErrorKind::Topology, "scripted")),
            _ => lost(),
        }
    }

    pub fn cut_token(&self) -> CancellationToken {
        self.0.lock().cut.clone()
    }

    /// Cuts the producers' sessions that run now.
    pub fn cut_tx(&self) {
        let cut = std::mem::take(&mut self.0.lock().tx_cut);
        cut.cancel();
    }

    pub fn tx_cut_token(&self) -> CancellationToken {
        self.0.lock().tx_cut.clone()
    }
}

pub fn lost() -> mq_core::End {
    mq_core::End::Lost(Error::new(ErrorKind::Disconnected, "scripted cut"))
}
