//! Pub/Sub: one connection for all subscriptions of a client, which channels and patterns join and leave live. Messages are
//! read at once into each subscription's bounded buffer, so that a slow one loses its oldest (`Lagged`) and the server never
//! has a reason to cut the connection.

use crate::answer::{as_bytes, failure};
use crate::connect::{Hub, Link};
use crate::driver::mends;
use crate::keys::stream;
use crate::probe::capabilities;
use crate::send;
use crate::wire;
use bytes::Bytes;
use mq_api::{
    Admin, Backlog, Capabilities, DeadLetter, Error, ErrorKind, Event, Gap, GapCause, Group, GroupInfo,
    PendingDelivery, Position, RedriveOptions, RedriveReport, Result, Start, Topic, TopicInfo, TopicSpec, async_trait,
};
use mq_core::{
    Driver, End, Env, Incoming, Lane, Mechanics, MoveBy, ReleaseBy, RetryBy, Run, Session, Token, TxSession,
};
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, Value};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{Mutex, mpsc, watch};

/// How often the connection is asked whether it lives. With [`PONG`] a half-open socket is noticed within 15 s.
const PING: Duration = Duration::from_secs(10);
const PONG: Duration = Duration::from_secs(5);
/// Messages taken from the connection in one go.
const BURST: usize = 256;

/// A channel or a pattern.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Place {
    name: Vec<u8>,
    pattern: bool,
}

#[derive(Default)]
struct Listeners {
    by_place: HashMap<Place, Vec<(u64, Arc<Lane>)>>,
    /// Those that the server confirmed.
    confirmed: HashSet<Place>,
    next: u64,
}

/// The connection that receives.
struct Receiver {
    conn: MultiplexedConnection,
    listeners: parking_lot::Mutex<Listeners>,
    /// Serializes joining and leaving, so that the last listener of a channel does not leave while a new one joins.
    changes: Mutex<()>,
    ended: watch::Receiver<Option<String>>,
    token: AtomicU64,
}

/// The driver of Pub/Sub.
#[derive(Debug)]
pub(crate) struct PubSub {
    hub: Arc<Hub>,
    receiver: Mutex<Option<Arc<Receiver>>>,
}

impl PubSub {
    pub(crate) fn new(hub: Arc<Hub>) -> Self {
        Self { hub, receiver: Mutex::default() }
    }

    /// Lets go of the connection that receives; what reads it ends.
    pub(crate) async fn hang_up(&self) {
        drop(self.receiver.lock().await.take());
    }

    async fn receiver(&self, link: &Link) -> Result<Arc<Receiver>> {
        let mut receiver = self.receiver.lock().await;
        if let Some(living) = receiver.as_ref().filter(|r| r.ended.borrow().is_none()) {
            return Ok(living.clone());
        }
        let (pushes, pushed) = mpsc::unbounded_channel();
        let conn = self.hub.own_pubsub(link, pushes).await?;
        let (end, ended) = watch::channel(None);
        let made = Arc::new(Receiver {
            conn,
            listeners: parking_lot::Mutex::default(),
            changes: Mutex::default(),
            ended,
            token: AtomicU64::new(0),
        });
        self.hub.env.spawn(receive(Arc::downgrade(&made), pushed, end));
        *receiver = Some(made.clone());
        Ok(made)
    }

    async fn listen(&self, link: &Link, session: Session) -> Result<Run> {
        let place = place_of(&session)?;
        let receiver = self.receiver(link).await?;
        let lane = session.open_lane(None, session.generation);
        let listener = Listener::new(receiver, place, &lane, self.hub.env.clone());
        listener.receiver.confirm(&listener.place).await?;
        if session.generation > 1 {
            let topic = session.subscription.topic.clone();
            session.events.push(Event::Gap(Gap::new(topic, GapCause::Disconnected)));
        }
        let hub = self.hub.clone();
        let link = link.clone();
        Ok(Box::pin(async move {
            let mut ended = listener.receiver.ended.clone();
            let stopping = session.draining.cancelled();
            let why = tokio::select! { biased;
                () = stopping => None,
                () = session.stop.cancelled() => None,
                why = ended.wait_for(Option::is_some) => Some(why.ok().and_then(|w| w.clone())),
            };
            match why {
                None => {
                    listener.receiver.leave(&listener.place, listener.number).await;
                    session.stop.cancelled().await;
                    End::Closed
                }
                Some(why) => {
                    hub.lost(&link).await;
                    let text = format!("the Pub/Sub connection was lost: {}", why.unwrap_or_default());
                    End::Lost(Error::new(ErrorKind::Disconnected, text))
                }
            }
        }))
    }
}

fn place_of(session: &Session) -> Result<Place> {
    let sub = &session.subscription;
    let mut pattern = false;
    for (name, value) in &sub.native {
        pattern = match (name.as_str(), value.as_str()) {
            ("pattern", "true") => true,
            ("pattern", "false") => false,
            ("pattern", other) => {
                return Err(Error::new(ErrorKind::Config, format!("pattern={other}: it is true or false")));
            }
            (other, _) => {
                let text = format!("option '{other}' is not known to a subscription on redis-pubsub; it takes pattern");
                return Err(Error::new(ErrorKind::Config, text));
            }
        };
    }
    if pattern && !sub.topic.is_native() {
        let text = format!("a pattern needs a native topic: Topic::native(\"{}\")", sub.topic);
        return Err(Error::new(ErrorKind::Config, text));
    }
    Ok(Place { name: stream(&sub.topic).into_bytes(), pattern })
}

/// One subscription's part of the connection; leaves it when dropped, also by who was cancelled while it joined.
struct Listener {
    receiver: Arc<Receiver>,
    place: Place,
    number: u64,
    env: Env,
}

impl Listener {
    fn new(receiver: Arc<Receiver>, place: Place, lane: &Arc<Lane>, env: Env) -> Self {
        let number = {
            let mut all = receiver.listeners.lock();
            all.next += 1;
            let number = all.next;
            all.by_place.entry(place.clone()).or_default().push((number, lane.clone()));
            number
        };
        Self { receiver, place, number, env }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let here = self
            .receiver
            .listeners
            .lock()
            .by_place
            .get(&self.place)
            .is_some_and(|all| all.iter().any(|(n, _)| *n == self.number));
        if !here {
            return;
        }
        if self.receiver.ended.borrow().is_some() {
            self.receiver.forget(&self.place, self.number);
            return;
        }
        let (receiver, place, number) = (self.receiver.clone(), self.place.clone(), self.number);
        self.env.spawn(async move { receiver.leave(&place, number).await });
    }
}

impl Receiver {
    /// The server has confirmed the channel when this returns.
    async fn confirm(&self, place: &Place) -> Result<()> {
        let _order = self.changes.lock().await;
        if self.listeners.lock().confirmed.contains(place) {
            return Ok(());
        }
        let mut conn = self.conn.clone();
        let asked = match place.pattern {
            true => conn.psubscribe(place.name.as_slice()).await,
            false => conn.subscribe(place.name.as_slice()).await,
        };
        asked.map_err(|error| failure(error, "subscribing"))?;
        self.listeners.lock().confirmed.insert(place.clone());
        Ok(())
    }

    fn forget(&self, place: &Place, number: u64) -> bool {
        let mut all = self.listeners.lock();
        let Some(here) = all.by_place.get_mut(place) else { return false };
        here.retain(|(n, _)| *n != number);
        let last = here.is_empty();
        if last {
            all.by_place.remove(place);
            all.confirmed.remove(place);
        }
        last
    }

    async fn leave(&self, place: &Place, number: u64) {
        let _order = self.changes.lock().await;
        if self.forget(place, number) {
            let mut conn = self.conn.clone();
            // A connection that is lost has nothing to leave.
            let _ = match place.pattern {
                true => conn.punsubscribe(place.name.as_slice()).await,
                false => conn.unsubscribe(place.name.as_slice()).await,
            };
        }
    }

    fn lanes(&self, place: &Place) -> Vec<Arc<Lane>> {
        let all = self.listeners.lock();
        all.by_place.get(place).map(|here| here.iter().map(|(_, lane)| lane.clone()).collect()).unwrap_or_default()
    }

    fn hand_out(&self, push: PushInfo) {
        let pattern = match push.kind {
            PushKind::Message => false,
            PushKind::PMessage => true,
            _ => return,
        };
        let mut data = push.data.into_iter();
        let place = data.next().unwrap_or_default();
        let channel = if pattern { data.next() } else { None };
        let Some(Value::BulkString(payload)) = data.next() else { return };
        let Some(name) = as_bytes(&place) else { return };
        let place = Place { name: name.to_vec(), pattern };
        let mut message = wire::from_blob(Bytes::from(payload));
        if let Some(channel) = channel.as_ref().and_then(as_bytes) {
            // Which channel of the pattern.
            message.headers.push("mq-channel", Bytes::copy_from_slice(channel));
        }
        for lane in self.lanes(&place) {
            let token = self.token.fetch_add(1, Ordering::Relaxed);
            lane.push([Incoming::new(Token(token, 0), Position::offset(token), message.clone())]);
        }
    }
}

/// Hands out what arrives until the connection ends or nobody is left.
async fn receive(
    receiver: std::sync::Weak<Receiver>,
    mut pushed: mpsc::UnboundedReceiver<PushInfo>,
    end: watch::Sender<Option<String>>,
) {
    let mut burst = Vec::with_capacity(BURST);
    let mut pinging = std::pin::pin!(ping(receiver.clone()));
    let why = loop {
        // In turn, not by preference: a flood of messages must not keep the ping from noticing, nor the other way round.
        tokio::select! { biased;
            why = &mut pinging => break why,
            n = pushed.recv_many(&mut burst, BURST) => {
                let Some(receiver) = receiver.upgrade() else { return };
                let closed = n == 0 || burst.iter().any(|p| p.kind == PushKind::Disconnection);
                burst.drain(..).for_each(|push| receiver.hand_out(push));
                if closed {
                    break "the server closed it".to_owned();
                }
                tokio::task::yield_now().await;
            }
        }
    };
    end.send_replace(Some(why));
}

/// Asks again and again whether the connection lives; ends with the reason why not.
async fn ping(receiver: std::sync::Weak<Receiver>) -> String {
    loop {
        tokio::time::sleep(PING).await;
        let Some(living) = receiver.upgrade() else { return "nobody listens".to_owned() };
        let mut conn = living.conn.clone();
        drop(living);
        match tokio::time::timeout(PONG, conn.send_packed_command(&redis::cmd("PING"))).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return error.to_string(),
            Err(_) => return format!("no answer to a ping within {PONG:?}"),
        }
    }
}

impl Driver for PubSub {
    fn mechanics(&self) -> Mechanics {
        Mechanics { retry: RetryBy::Driver, dead_letter: MoveBy::Driver, release: ReleaseBy::Engine }
    }

    fn capabilities(&self) -> Arc<Capabilities> {
        Arc::new(capabilities(&self.hub.options, self.hub.facts().as_deref()))
    }

    async fn attach(&self, session: Session) -> Result<Run> {
        let link = self.hub.link(&stream(&session.subscription.topic)).await?;
        let run = self.listen(&link, session).await;
        if let Err(error) = &run
            && mends(error.kind())
        {
            self.hub.lost(&link).await;
        }
        run
    }

    async fn open_tx(&self, tx: TxSession) -> Result<Run> {
        let key = stream(&tx.spec.topic);
        let link = self.hub.link(&key).await?;
        send::open_channel(&self.hub, &link, tx, key).await
    }
}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Receiver({} places)", self.listeners.lock().by_place.len())
    }
}

/// Pub/Sub stores nothing, so there is nothing to look at.
#[derive(Debug)]
pub(crate) struct NoAdmin;

fn none<T>(what: &str) -> Result<T> {
    Err(Error::unsupported("redis-pubsub", what, "Pub/Sub stores nothing; use redis:// (Streams)"))
}

#[async_trait]
impl Admin for NoAdmin {
    async fn backlog(&self, _: &Topic, _: &Group) -> Result<Backlog> {
        none("backlog")
    }
    async fn create_topic(&self, _: TopicSpec) -> Result<()> {
        none("provision: making topics")
    }
    async fn topic(&self, _: &Topic) -> Result<Option<TopicInfo>> {
        none("provision: looking at topics")
    }
    async fn delete_topic(&self, _: &Topic) -> Result<bool> {
        none("provision: deleting topics")
    }
    async fn create_group(&self, _: &Topic, _: &Group, _: Start) -> Result<()> {
        none("provision: groups")
    }
    async fn delete_group(&self, _: &Topic, _: &Group) -> Result<bool> {
        none("provision: groups")
    }
    async fn reset_group(&self, _: &Topic, _: &Group, _: Start) -> Result<()> {
        none("reset: groups")
    }
    async fn groups(&self, _: &Topic) -> Result<Vec<GroupInfo>> {
        none("inspect: groups")
    }
    async fn pending(&self, _: &Topic, _: &Group, _: usize) -> Result<Vec<PendingDelivery>> {
        none("inspect: pending deliveries")
    }
    async fn dead_letters(&self, _: &Topic, _: &Group, _: usize) -> Result<Vec<DeadLetter>> {
        none("peek: dead letters")
    }
    async fn redrive(&self, _: &Topic, _: &Group, _: RedriveOptions) -> Result<RedriveReport> {
        none("redrive")
    }
    async fn discard_dead_letters(&self, _: &Topic, _: &Group, _: RedriveOptions) -> Result<u64> {
        none("dead letters: discarding")
    }
}
