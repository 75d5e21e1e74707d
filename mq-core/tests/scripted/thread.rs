//! Like Kafka: a thread reads a log by offset and commits a prefix; retries are parked or published, dead letters published.

use crate::broker::Toy;
use crate::script::{Script, lost};
use crate::tx;
use mq_api::{Capabilities, Position, Result};
use mq_core::{
    Carry, Driver, End, Incoming, Lane, Mechanics, MoveBy, Plan, ReleaseBy, RetryBy, Run, Session, Token, TxSession,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

pub struct Threaded {
    pub toy: Toy,
    pub script: Script,
    pub park: Duration,
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// What the thread works on.
struct Loop {
    toy: Toy,
    session: Session,
    lane: Arc<Lane>,
    next: u64,
    cut: Arc<AtomicBool>,
}

impl Loop {
    fn run(mut self) -> bool {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let cx = &mut Context::from_waker(&waker);
        let mut plan = Plan::default();
        loop {
            self.toy.watch(cx);
            if self.cut.load(Ordering::SeqCst) {
                self.remember();
                return false;
            }
            let mut idle = true;
            if !self.session.stop.is_cancelled() {
                idle &= !self.read(cx);
            }
            if self.session.settles.poll_take(cx, &mut plan).is_ready() {
                idle = false;
                self.commit(&mut plan);
            }
            if idle && self.session.stop.is_cancelled() && self.session.settles.is_flushed() {
                self.remember();
                return true;
            }
            if idle {
                // A bound only for delayed copies of the toy, which nobody announces.
                std::thread::park_timeout(Duration::from_millis(5));
            }
        }
    }

    fn read(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(credit) = self.session.flow.poll_credit(cx) else { return false };
        if !self.lane.has_room() {
            return false;
        }
        let items = self.toy.with_log(self.next, credit.count, credit.bytes);
        let Some(last) = items.last() else { return false };
        self.next = last.position + 1;
        self.lane.push(items.into_iter().filter(|i| !i.settled).map(|i| {
            let mut incoming = Incoming::new(Token(i.position, 0), Position::offset(i.position), i.message);
            incoming.attempt = i.attempt;
            incoming
        }));
        true
    }

    fn commit(&mut self, plan: &mut Plan) {
        for other in plan.others.drain(..) {
            match other.how {
                Carry::Trial(_) => self.session.settles.trial_recorded(other.lane, other.token),
                Carry::Settle(how) => unreachable!("nothing else is the driver's: {how:?}"),
            }
        }
        for ack in plan.acks.drain(..) {
            self.toy.settle_offset(ack.token.0);
        }
        self.session.settles.confirm(plan.upto, []);
    }

    /// Attempts go into the metadata of the commit.
    fn remember(&self) {
        self.lane.visit(|slot| {
            if !slot.settled {
                self.toy.note_attempt(slot.token.0, slot.attempt + u32::from(slot.handed));
            }
        });
    }
}

impl Driver for Threaded {
    fn mechanics(&self) -> Mechanics {
        Mechanics {
            retry: RetryBy::ParkThenPublish { park: self.park },
            dead_letter: MoveBy::Publish,
            release: ReleaseBy::Engine,
        }
    }

    fn capabilities(&self) -> Arc<Capabilities> {
        Arc::new(Capabilities::new("toy-thread"))
    }

    async fn attach(&self, session: Session) -> Result<Run> {
        if let Some(error) = self.script.attach_error() {
            return Err(error);
        }
        let lane = session.open_lane(Some(0), session.generation);
        self.script.saw_lane(&lane);
        let cut = Arc::new(AtomicBool::new(false));
        let (cut_token, stop) = (self.script.cut_token(), session.stop.clone());
        let next = self.toy.committed();
        let work = Loop { toy: self.toy.clone(), session, lane, next, cut: cut.clone() };
        let (done, ended) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || done.send(work.run()));
        Ok(Box::pin(async move {
            let mut ended = ended;
            let ended = tokio::select! { biased;
                () = cut_token.cancelled() => {
                    cut.store(true, Ordering::SeqCst);
                    thread.thread().unpark();
                    ended.await
                }
                () = stop.cancelled() => {
                    thread.thread().unpark();
                    ended.await
                }
                ended = &mut ended => ended,
            };
            match ended {
                Ok(true) => End::Closed,
                _ => lost(),
            }
        }))
    }

    async fn open_tx(&self, tx: TxSession) -> Result<Run> {
        match self.script.open_tx_error() {
            Some(error) => Err(error),
            None => Ok(tx::run(self.toy.clone(), self.script.clone(), tx)),
        }
    }
}
