//! The driver of Streams: how a session starts, runs and ends.

use crate::answer::failure;
use crate::broadcast;
use crate::conn::Conn;
use crate::connect::{Hub, Link};
use crate::keys::{GroupKeys, stream};
use crate::member::{Member, Memory, Side};
use crate::probe::capabilities;
use crate::read::{client_id, read_loop};
use crate::scripts::LEAVE;
use crate::send;
use crate::settle::{level, settle_loop};
use crate::tend::{adopt, correct, leave, note_place, tend_loop};
use crate::topology::{check_dead_letters, has_group, make_group, prepare_topic, start_id};
use mq_api::{Capabilities, Error, ErrorKind, Feature, GapCause, Group, Provisioning, Result, Subscription, Support};
use mq_core::{Driver, End, Mechanics, MoveBy, ReleaseBy, RetryBy, Run, Session, TxSession};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;
use tokio::time::Instant;

/// See the module.
#[derive(Debug)]
pub(crate) struct Streams {
    pub(crate) hub: Arc<Hub>,
    memories: Arc<Mutex<HashMap<Name, Arc<Mutex<Memory>>>>>,
    /// Names that were joined and not left yet.
    names: Arc<Mutex<HashSet<Name>>>,
}

/// How large entries are taken to be before the first was read: as large as a message may be unless told otherwise, so that the
/// first read keeps to the bytes that may be in hand.
const LARGE: u64 = 1_000_000;

/// A member's name in a group, by the keys that leaving needs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Name {
    stream: String,
    tries: String,
    group: String,
    member: String,
}

impl Streams {
    pub(crate) fn new(hub: Arc<Hub>) -> Self {
        Self { hub, memories: Arc::default(), names: Arc::default() }
    }

    /// Leaves what members could not leave themselves, because their connection was lost when they closed.
    pub(crate) async fn leave_names(&self) {
        let names = std::mem::take(&mut *self.names.lock());
        for name in names {
            // A connection that broke unnoticed is found out by the first try.
            for _ in 0..2 {
                let Ok(link) = self.hub.link(&name.stream).await else { return };
                // What is still pending keeps its name until it is taken over; the janitor removes it then.
                let call = LEAVE.on(&[&name.stream, &name.tries]).arg(&name.group).arg(&name.member).arg("0");
                match call.run(&link).await {
                    Ok(_) => break,
                    Err(error) => self.let_go(&link, &failure(error, "leaving a group")).await,
                }
            }
        }
    }

    fn memory(&self, name: &Name) -> Arc<Mutex<Memory>> {
        self.memories.lock().entry(name.clone()).or_default().clone()
    }

    async fn join(&self, session: Session, group: Group) -> Result<Run> {
        let keys = GroupKeys::new(&session.subscription.topic, &group);
        let link = self.hub.link(&keys.stream).await?;
        match self.join_on(&link, session, group, keys).await {
            Err(error) => {
                self.let_go(&link, &error).await;
                Err(error)
            }
            run => run,
        }
    }

    /// After an error that a new connection may mend.
    async fn let_go(&self, link: &Link, error: &Error) {
        if mends(error.kind()) {
            self.hub.lost(link).await;
        }
    }

    async fn join_on(&self, link: &Link, session: Session, group: Group, keys: GroupKeys) -> Result<Run> {
        let sub = session.subscription.clone();
        refuse_unknown(&sub)?;
        let name = Name {
            stream: keys.stream.clone(),
            tries: keys.tries.clone(),
            group: group.as_str().to_owned(),
            member: session.member.to_string(),
        };
        let memory = self.memory(&name);
        if session.generation == 1 {
            // Another consumer had the name before, and its group was not this one's.
            memory.lock().begin();
        }
        let keep = prepare_topic(link, &sub.topic, sub.retention, sub.partitions, sub.provisioning).await?;
        let start = start_id(sub.start, keep, &sub.topic)?;
        let lost = self.provide_group(link, &session, &keys, &group, &start, &memory).await?;
        if sub.dead_letter_topic().is_some() {
            check_dead_letters(link, &keys, sub.provisioning).await?;
        }
        let conn = self.hub.own(link).await?;
        let client = client_id(&conn).await;
        // Listed from now on, not from the first message on.
        let join = redis::cmd("XGROUP")
            .arg("CREATECONSUMER")
            .arg(&keys.stream)
            .arg(group.as_str())
            .arg(&*session.member)
            .take();
        link.query(&join).await.map_err(|e| failure(e, "joining the group"))?;
        self.names.lock().insert(name.clone());
        let sides = [keys.clone(), keys.again(group.as_str())].map(|keys| Side {
            keys,
            lane: session.open_lane(None, session.generation),
            known: Mutex::default(),
        });
        let again = has_group(link, &sides[1].keys.stream, group.as_str()).await?;
        let generation = session.generation;
        let named = sub.member.is_some();
        let member = Member {
            hub: self.hub.clone(),
            link: link.clone(),
            group: group.as_str().to_owned(),
            me: session.member.to_string(),
            sides,
            again: AtomicBool::new(again),
            keep,
            memory,
            fresh_since: Mutex::new(Instant::now()),
            reading_since: Mutex::new(None),
            wake: link.wakes.join(&keys.wake),
            clock: Mutex::default(),
            starved: AtomicBool::new(false),
            revived: AtomicBool::new(lost),
            mean: AtomicU64::new(LARGE),
            acked: AtomicBool::new(true),
            stuck: Mutex::default(),
            session,
        };
        member.session.set_settle_level(level(&member));
        if lost {
            let cause = match &link.facts.run {
                run if *run == member.memory.lock().run => GapCause::Deleted,
                _ => GapCause::BrokerLoss,
            };
            member.gap(cause, None);
        }
        let another = member.memory.lock().run != link.facts.run;
        member.memory.lock().run.clone_from(&link.facts.run);
        if another && !link.facts.counts {
            correct(&member).await?;
        }
        member.memory.lock().seen = true;
        note_place(&member).await?;
        if generation > 1 || named {
            // Handles of the session before are fenced. A new process under an old name: its predecessor died.
            adopt(&member, generation == 1).await?;
        }
        let (names, memories) = (self.names.clone(), self.memories.clone());
        Ok(Box::pin(async move {
            let end = run(member, conn, client).await;
            if let End::Closed = &end {
                names.lock().remove(&name);
                memories.lock().remove(&name);
            }
            end
        }))
    }

    /// Makes or verifies the group; says whether it had been lost.
    async fn provide_group(
        &self,
        link: &Link,
        session: &Session,
        keys: &GroupKeys,
        group: &Group,
        start: &str,
        memory: &Arc<Mutex<Memory>>,
    ) -> Result<bool> {
        let sub = &session.subscription;
        let (seen, missed, low) = {
            let memory = memory.lock();
            (memory.seen, memory.group_lost, memory.low.clone())
        };
        match sub.provisioning {
            // Also if another member made it again meanwhile: this one's knowledge may reach further back.
            Provisioning::Create if seen && (missed || !has_group(link, &keys.stream, group.as_str()).await?) => {
                make_group(link, keys, group, start, Some(low)).await?;
                memory.lock().group_lost = false;
                Ok(true)
            }
            Provisioning::Create => {
                make_group(link, keys, group, start, None).await?;
                Ok(false)
            }
            Provisioning::Verify | Provisioning::None => {
                if has_group(link, &keys.stream, group.as_str()).await? {
                    return Ok(false);
                }
                let text = format!(
                    "group '{group}' of topic '{}' does not exist; make it, or use the provisioning `create`",
                    sub.topic
                );
                Err(Error::new(ErrorKind::Topology, text))
            }
        }
    }
}

fn refuse_unknown(sub: &Subscription) -> Result<()> {
    match sub.native.keys().next() {
        None => Ok(()),
        Some(name) => {
            let text = format!("option '{name}' is not known to a subscription on redis; it has none");
            Err(Error::new(ErrorKind::Config, text))
        }
    }
}

/// Whether a new connection may help.
pub(crate) fn mends(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Disconnected | ErrorKind::Timeout | ErrorKind::Unavailable | ErrorKind::Auth)
}

/// Runs a session to its end.
async fn run(member: Member, conn: Conn, client: i64) -> End {
    let end = run_loops(&member, conn, client).await;
    member.remember();
    if end.is_err() {
        // What was settled and not taken up yet.
        let mut plan = mq_core::Plan::default();
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        let _ = member.session.settles.poll_take(&mut cx, &mut plan);
        drop(crate::settle::Doubt::of(&member, &plan));
    }
    match end {
        Ok(()) => End::Closed,
        Err(error) => {
            match error.kind() {
                ErrorKind::NotFound if only_redrive_is_lost(&member).await => member.gap(GapCause::Deleted, None),
                ErrorKind::NotFound => member.memory.lock().group_lost = true,
                kind if mends(kind) => member.hub.lost(&member.link).await,
                _ => {}
            }
            End::Lost(error)
        }
    }
}

/// Whether the group is where it was, and only the stream that redrive writes to is gone.
async fn only_redrive_is_lost(member: &Member) -> bool {
    let [main, again] = &member.sides;
    let has = async |side: &Side| has_group(&member.link, &side.keys.stream, &member.group).await;
    member.again.load(std::sync::atomic::Ordering::Relaxed)
        && matches!(has(main).await, Ok(true))
        && matches!(has(again).await, Ok(false))
}

/// What is left at the end gets this long: the engine waits 2 s for the whole.
const FAREWELL: Duration = Duration::from_millis(1500);

async fn run_loops(member: &Member, conn: Conn, client: i64) -> Result<(), Error> {
    let mut reading = pin!(read_loop(member, conn, client));
    let mut settling = pin!(settle_loop(member));
    let mut tending = pin!(tend_loop(member));
    let (mut read, mut settled, mut tended) = (false, false, false);
    while !settled {
        tokio::select! { biased;
            end = &mut settling => { end?; settled = true; }
            end = &mut reading, if !read => { end?; read = true; }
            end = &mut tending, if !tended => { end?; tended = true; }
        }
    }
    let farewell = async {
        // A request under way is never dropped: what it takes over would stay with a member that has left.
        if !tended {
            tending.await?;
        }
        if !read {
            reading.await?;
        }
        // What the last read brought was given back.
        let mut plan = mq_core::Plan::default();
        while std::future::poll_fn(|cx| {
            std::task::Poll::Ready(member.session.settles.poll_take(cx, &mut plan).is_ready())
        })
        .await
        {
            crate::settle::flush(member, &mut plan).await?;
        }
        leave(member).await
    };
    match tokio::time::timeout(FAREWELL, farewell).await {
        Ok(end) => end,
        Err(_) => Err(Error::new(ErrorKind::Timeout, "the server did not answer while the member left")),
    }
}

impl Driver for Streams {
    fn mechanics(&self) -> Mechanics {
        Mechanics { retry: RetryBy::Driver, dead_letter: MoveBy::Driver, release: ReleaseBy::Driver }
    }

    fn capabilities(&self) -> Arc<Capabilities> {
        let all = capabilities(&self.hub.options, self.hub.facts().as_deref());
        // It depends on the topic, so it is refused, or not, when that is known.
        Arc::new(all.with(Feature::Replay, Support::Native))
    }

    async fn attach(&self, session: Session) -> Result<Run> {
        match session.subscription.group_name().cloned() {
            Some(group) => self.join(session, group).await,
            None => {
                let key = stream(&session.subscription.topic);
                let link = self.hub.link(&key).await?;
                let run = broadcast::attach(&self.hub, &link, session, key).await;
                if let Err(error) = &run {
                    self.let_go(&link, error).await;
                }
                run
            }
        }
    }

    async fn open_tx(&self, tx: TxSession) -> Result<Run> {
        let key = stream(&tx.spec.topic);
        let link = self.hub.link(&key).await?;
        let run = send::open(&self.hub, &link, tx, key).await;
        if let Err(error) = &run {
            self.let_go(&link, error).await;
        }
        run
    }
}
