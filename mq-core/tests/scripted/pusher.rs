//! Like RabbitMQ: the broker pushes up to a prefetch, acks have no answer, retries and dead letters are copies.

use crate::broker::Toy;
use crate::reader::{fetch, handed, incoming};
use crate::script::{Script, lost};
use crate::tx;
use mq_api::{Capabilities, Durability, Result};
use mq_core::{
    Carry, Driver, End, Gate, Mechanics, MoveBy, Plan, ReleaseBy, RetryBy, Run, Session, Settlement, TxSession,
};
use std::sync::Arc;

pub struct Pusher {
    pub toy: Toy,
    pub script: Script,
    /// Beyond what the flow allows: the engine's own bounds must hold.
    pub prefetch: usize,
}

fn carry_out(toy: &Toy, session: &Session, plan: &mut Plan) {
    let me = session.generation;
    for ack in plan.acks.drain(..) {
        toy.ack(me, ack.token);
    }
    for other in plan.others.drain(..) {
        match other.how {
            Carry::Trial(n) => {
                toy.trial(me, other.token, n);
                session.settles.trial_recorded(other.lane, other.token);
            }
            Carry::Settle(Settlement::Release) => drop(toy.release(me, other.token)),
            Carry::Settle(how) => unreachable!("retries and dead letters are published: {how:?}"),
        }
    }
}

impl Driver for Pusher {
    fn mechanics(&self) -> Mechanics {
        Mechanics { retry: RetryBy::Publish, dead_letter: MoveBy::Publish, release: ReleaseBy::Driver }
    }

    fn capabilities(&self) -> Arc<Capabilities> {
        let mut capabilities = Capabilities::new("toy-pusher");
        capabilities.settle_level = Durability::Sent;
        Arc::new(capabilities)
    }

    async fn attach(&self, session: Session) -> Result<Run> {
        if let Some(error) = self.script.attach_error() {
            return Err(error);
        }
        let (toy, script, cut) = (self.toy.clone(), self.script.clone(), self.script.cut_token());
        let lane = session.open_lane(None, session.generation);
        self.script.saw_lane(&lane);
        let prefetch = self.prefetch;
        Ok(Box::pin(async move {
            let me = session.generation;
            let push = async {
                let mut late = false;
                loop {
                    // What was on its way when the consumer was cancelled still comes.
                    if session.flow.is_shut(Gate::Stopping) && std::mem::replace(&mut late, true) {
                        return std::future::pending().await;
                    }
                    let room = prefetch.saturating_sub(toy.pending());
                    if room == 0 {
                        let mut first = true;
                        std::future::poll_fn(|cx| {
                            toy.watch(cx);
                            match std::mem::take(&mut first) {
                                true => std::task::Poll::Pending,
                                false => std::task::Poll::Ready(()),
                            }
                        })
                        .await;
                        continue;
                    }
                    let got = fetch(&toy, me, room, usize::MAX, true).await;
                    lane.push(got.into_iter().map(incoming));
                }
            };
            let settle = async {
                let mut plan = Plan::default();
                loop {
                    session.settles.take(&mut plan).await;
                    if !script.settle_delay().is_zero() {
                        tokio::time::sleep(script.settle_delay()).await;
                    }
                    let upto = plan.upto;
                    carry_out(&toy, &session, &mut plan);
                    session.settles.confirm(upto, []);
                }
            };
            let end = tokio::select! { biased;
                () = cut.cancelled() => lost(),
                // The broker pushes until the very end.
                () = async {
                    tokio::select! { biased;
                        () = settle => {}
                        () = push => {}
                        () = async { session.stop.cancelled().await; session.settles.flushed().await } => {}
                    }
                } => End::Closed,
            };
            toy.end_session(me, &handed(&lane));
            end
        }))
    }

    async fn open_tx(&self, tx: TxSession) -> Result<Run> {
        match self.script.open_tx_error() {
            Some(error) => Err(error),
            None => Ok(tx::run(self.toy.clone(), self.script.clone(), tx)),
        }
    }
}
