//! Like Redis: a loop that asks for as much as there is credit, and one that carries out settlements by the broker.

use crate::broker::{Item, Toy};
use crate::script::Script;
use crate::tx;
use mq_api::{Capabilities, Position, Result, Settled};
use mq_core::{
    Carry, Driver, End, Incoming, Lane, Mechanics, MoveBy, Plan, ReleaseBy, RetryBy, Run, Session, Settlement, Token,
    TxSession,
};
use std::future::poll_fn;
use std::sync::Arc;

pub struct Reader {
    pub toy: Toy,
    pub script: Script,
}

pub fn incoming((token, item): (Token, Item)) -> Incoming {
    let mut incoming = Incoming::new(token, Position::offset(item.position), item.message);
    (incoming.attempt, incoming.takes, incoming.trials) = (item.attempt, item.takes, item.trials);
    incoming
}

/// Waits for messages, also for delayed ones that come due.
pub async fn fetch(toy: &Toy, session: u64, n: usize, bytes: usize, by_tag: bool) -> Vec<(Token, Item)> {
    loop {
        let due = toy.next_due();
        let sleep = async {
            match due {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let mut looked = false;
        // Looks again when something changed: a delayed message may have been added.
        let changed = poll_fn(|cx| match toy.poll_fetch(cx, session, n, bytes, by_tag) {
            std::task::Poll::Ready(got) => std::task::Poll::Ready(Some(got)),
            std::task::Poll::Pending if std::mem::replace(&mut looked, true) => std::task::Poll::Ready(None),
            std::task::Poll::Pending => std::task::Poll::Pending,
        });
        tokio::select! { biased;
            got = changed => if let Some(got) = got { return got },
            () = sleep => {}
        }
    }
}

/// Tokens in the application's hands.
pub fn handed(lane: &Lane) -> Vec<Token> {
    let mut tokens = Vec::new();
    lane.visit(|slot| {
        if slot.handed && !slot.settled {
            tokens.push(slot.token);
        }
    });
    tokens
}

impl Reader {
    fn carry_out(toy: &Toy, session: &Session, plan: &mut Plan) -> Vec<(u64, Settled)> {
        let mut bad = Vec::new();
        let me = session.generation;
        for ack in plan.acks.drain(..) {
            if !toy.ack(me, ack.token) {
                bad.push((ack.op, Settled::Stale));
            }
        }
        for other in plan.others.drain(..) {
            let done = match other.how {
                Carry::Trial(n) => {
                    toy.trial(me, other.token, n);
                    session.settles.trial_recorded(other.lane, other.token);
                    true
                }
                Carry::Settle(Settlement::Retry { after, attempt, .. }) => toy.retry(me, other.token, after, attempt),
                Carry::Settle(Settlement::DeadLetter { reason, error, attempts }) => {
                    toy.kill(me, other.token, reason.as_str(), attempts, error.as_deref())
                }
                Carry::Settle(Settlement::Release) => toy.release(me, other.token),
                Carry::Settle(Settlement::Ack | Settlement::Discard { .. }) => unreachable!("the engine acks these"),
            };
            if !done {
                bad.push((other.op, Settled::Stale));
            }
        }
        bad
    }
}

async fn settle(toy: &Toy, script: &Script, session: &Session) {
    let mut plan = Plan::default();
    loop {
        session.settles.take(&mut plan).await;
        if !script.settle_delay().is_zero() {
            tokio::time::sleep(script.settle_delay()).await;
        }
        let upto = plan.upto;
        let bad = Reader::carry_out(toy, session, &mut plan);
        if !script.silent_settles() {
            session.settles.confirm(upto, bad);
        }
    }
}

impl Driver for Reader {
    fn mechanics(&self) -> Mechanics {
        Mechanics { retry: RetryBy::Driver, dead_letter: MoveBy::Driver, release: ReleaseBy::Driver }
    }

    fn capabilities(&self) -> Arc<Capabilities> {
        Arc::new(Capabilities::new("toy-reader"))
    }

    async fn attach(&self, session: Session) -> Result<Run> {
        tokio::time::sleep(self.script.attach_delay()).await;
        if let Some(error) = self.script.attach_error() {
            return Err(error);
        }
        self.script.saw_resume(session.resume(None));
        self.script.saw_again(session.again);
        let (toy, script, cut) = (self.toy.clone(), self.script.clone(), self.script.cut_token());
        let lane = session.open_lane(None, session.generation);
        self.script.saw_lane(&lane);
        Ok(Box::pin(async move {
            let me = session.generation;
            let read = async {
                loop {
                    let credit = tokio::select! { biased;
                        () = session.stop.cancelled() => return,
                        credit = poll_fn(|cx| session.flow.poll_credit(cx)) => credit,
                    };
                    let got = tokio::select! { biased;
                        () = session.stop.cancelled() => return,
                        // A close cuts a waiting read short, so that it does not take what is just given back.
                        () = session.draining.cancelled() => continue,
                        got = fetch(&toy, me, credit.count, credit.bytes, false) => got,
                    };
                    // The read is on its way; it is awaited to its end.
                    tokio::time::sleep(script.fetch_delay()).await;
                    lane.push(got.into_iter().map(incoming));
                }
            };
            // What is left to settle is carried out before the end.
            let rest = async {
                read.await;
                if script.no_stop() {
                    std::future::pending::<()>().await;
                }
                session.settles.flushed().await;
            };
            let stopped = async {
                tokio::select! { biased;
                    () = settle(&toy, &script, &session) => {}
                    () = rest => {}
                }
            };
            let end = tokio::select! { biased;
                () = cut.cancelled() => None,
                () = stopped => Some(End::Closed),
            };
            toy.end_session(me, &handed(&lane));
            end.unwrap_or_else(|| script.end())
        }))
    }

    async fn open_tx(&self, tx: TxSession) -> Result<Run> {
        match self.script.open_tx_error() {
            Some(error) => Err(error),
            None => Ok(tx::run(self.toy.clone(), self.script.clone(), tx)),
        }
    }
}
