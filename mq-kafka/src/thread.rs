//! The driver thread of a subscription: it polls, hands messages to the lanes, takes settlements, commits, and answers changes
//! of the assignment. Nothing it calls blocks; what would is on the committer's thread.

use crate::answers::Answers;
use crate::member::{Member, News, Role};
use crate::partition::Partition;
use mq_api::{Error, ErrorKind};
use mq_core::{Carry, End, Plan, Session};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Without anything to do it looks again after this: a wake-up that was missed costs no more.
const NAP: Duration = Duration::from_millis(50);
/// Settlements that nobody awaits are committed at least this often…
const TICK: Duration = Duration::from_secs(1);
/// … or when this many have piled up: what a crash brings again is bounded by both.
const PILE: usize = 5_000;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// See the module.
pub(crate) struct Driver {
    session: Session,
    members: Vec<Member>,
    joined: Option<oneshot::Sender<()>>,
    answers: Answers,
    upto: u64,
    /// Operations that the round under way confirms.
    round: Option<u64>,
    confirmed: u64,
    piled: usize,
    urgent: bool,
    last_round: Instant,
    end: Option<Error>,
}

impl Driver {
    pub(crate) fn new(session: Session, members: Vec<Member>, joined: oneshot::Sender<()>) -> Self {
        Self {
            session,
            members,
            joined: Some(joined),
            answers: Answers::default(),
            upto: 0,
            round: None,
            confirmed: 0,
            piled: 0,
            urgent: false,
            last_round: Instant::now(),
            end: None,
        }
    }

    /// Runs until it is stopped, or cannot go on.
    pub(crate) fn run(mut self) -> End {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut cx = Context::from_waker(&waker);
        let mut plan = Plan::default();
        loop {
            if self.session.stop.is_cancelled() {
                self.take(&mut cx, &mut plan);
                return self.finish();
            }
            let mut busy = self.take(&mut cx, &mut plan);
            for i in 0..self.members.len() {
                busy |= self.members[i].serve(&mut cx);
                self.hear(i);
            }
            if let Some(error) = self.end.take() {
                for member in self.members.drain(..) {
                    member.close(false, Duration::ZERO);
                }
                return End::Lost(error);
            }
            busy |= self.fetch(&mut cx);
            busy |= self.settle();
            if !busy {
                std::thread::park_timeout(NAP);
            }
        }
    }

    /// Takes what was settled.
    fn take(&mut self, cx: &mut Context<'_>, plan: &mut Plan) -> bool {
        if self.session.settles.poll_take(cx, plan).is_pending() {
            self.answers.all_taken();
            return false;
        }
        let mut lane = None;
        for ack in plan.acks.drain(..) {
            if lane != Some(ack.lane) {
                lane = Some(ack.lane);
                self.touch(ack.lane);
            }
            self.answers.taken(ack.lane, ack.op, ack.token.0);
            self.piled += 1;
        }
        self.answers.all_taken();
        for lane in plan.noted.drain(..) {
            self.touch(lane);
        }
        for other in plan.others.drain(..) {
            if let Carry::Trial(n) = other.how {
                for member in &mut self.members {
                    if let Some(partition) = member.by_lane(other.lane) {
                        partition.trial(other.token, n);
                    }
                }
            }
        }
        self.upto = plan.upto;
        self.urgent |= std::mem::take(&mut plan.urgent);
        true
    }

    /// Something of this lane is to be committed, if it is owned still.
    fn touch(&mut self, lane: u32) {
        if let Some(partition) = self.members.iter_mut().find_map(|member| member.by_lane(lane)) {
            partition.dirty = true;
        }
    }

    fn hear(&mut self, i: usize) {
        for news in std::mem::take(&mut self.members[i].news) {
            match news {
                News::Joined => {
                    if self.members[i].role == Role::Main
                        && let Some(joined) = self.joined.take()
                    {
                        // Nobody waits for long.
                        let _ = joined.send(());
                    }
                }
                News::Over(lane, ending) => self.answers.end(lane, ending),
                News::Unsure(lanes) => self.answers.unsure(&lanes),
                News::Gone(error) => self.end = Some(error),
            }
        }
    }

    fn partitions(&self) -> impl Iterator<Item = &Partition> {
        self.members.iter().flat_map(|member| &member.partitions)
    }

    fn fetch(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(credit) = self.session.flow.poll_credit(cx) else { return false };
        let (mut count, mut bytes) = (0, 0);
        // Retries first: they are older.
        for member in self.members.iter_mut().rev() {
            if count >= credit.count || bytes >= credit.bytes {
                break;
            }
            let (n, size) = member.fetch(credit.count - count, credit.bytes - bytes);
            count += n;
            bytes += size;
        }
        count > 0
    }

    /// Commits when it is time, and confirms what was committed.
    fn settle(&mut self) -> bool {
        let mut busy = false;
        if let Some(upto) = self.round
            && self.members.iter().all(|m| !m.is_committing())
        {
            if self.members.iter().all(Member::round_is_done) {
                let unsaid: Vec<_> = self.partitions().filter_map(Partition::unsaid).collect();
                self.confirm(upto, &unsaid);
                self.round = None;
                busy = true;
            } else {
                // It failed: again, after its pause.
                self.members.iter_mut().for_each(Member::commit_round);
            }
        }
        let open = self.upto > self.confirmed;
        let late = open && self.last_round.elapsed() >= TICK;
        let wanted = self.members.iter().any(Member::wants_commit);
        let due = wanted || late || (self.urgent && open) || self.piled >= PILE;
        if self.round.is_none() && due {
            self.urgent = false;
            self.piled = 0;
            self.last_round = Instant::now();
            self.round = Some(self.upto);
            self.members.iter_mut().for_each(Member::begin_round);
            busy = true;
        }
        busy
    }

    fn confirm(&mut self, upto: u64, unsaid: &[(u32, u64)]) {
        let exceptions = self.answers.confirm(upto, unsaid);
        self.confirmed = self.confirmed.max(upto);
        self.session.settles.confirm(upto, exceptions);
    }

    /// Commits, gives back and leaves.
    fn finish(mut self) -> End {
        // What the engine flushed is confirmed; this is for what came after, and to say that the end was a good one.
        let unsaid: Vec<_> = self.partitions().filter_map(Partition::to_be_unsaid).collect();
        let members: Vec<Member> = self.members.drain(..).collect();
        let all = std::thread::scope(|scope| {
            let closing: Vec<_> = members
                .into_iter()
                .map(|member| scope.spawn(|| member.close(true, Duration::from_millis(1_500))))
                .collect();
            let ends: Vec<bool> = closing.into_iter().map(|one| one.join().unwrap_or(false)).collect();
            ends.into_iter().all(|confirmed| confirmed)
        });
        if all {
            self.confirm(self.upto, &unsaid);
            return End::Closed;
        }
        End::Lost(Error::new(ErrorKind::Disconnected, "the last commit was not confirmed: what it held comes again"))
    }
}
