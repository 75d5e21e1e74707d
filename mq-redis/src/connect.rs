//! Connections: one for all commands of a client (one a node on a Cluster), and one of its own for every subscription, whose
//! blocking reads would hold up everything else.

use crate::answer::{checked, failure};
use crate::conn::Conn;
use crate::dial::{certificates, dial, keepalive};
use crate::probe::{Facts, probe};
use crate::url::{Options, Secret};
use crate::wake::{Wakes, track};
use mq_api::{Error, ErrorKind, HealthSetter, HealthState, Result};
use mq_core::{Env, HostTurns, Stop};
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, Pipeline, ProtocolVersion,
    PushInfo, RedisConnectionInfo, RedisError, Value,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::sync::mpsc::UnboundedSender;
use tokio_util::task::AbortOnDropHandle;

/// Longest wait for one TCP connection and greeting. Below the engine's 10 s an attempt, so that the next host gets its turn.
const CONNECT: Duration = Duration::from_secs(3);
/// A connection for commands, shared.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) conn: Conn,
    pub(crate) node: ConnectionAddr,
    pub(crate) facts: Arc<Facts>,
    /// Members that are woken through this connection.
    pub(crate) wakes: Arc<Wakes>,
    /// Whether the server tells of changes.
    pub(crate) tracks: bool,
    number: u64,
}

impl Link {
    /// Sends one command; an error of the server is an error.
    pub(crate) async fn query(&self, cmd: &Cmd) -> Result<Value, RedisError> {
        checked(self.conn.send_packed_command(cmd).await?)
    }

    /// Sends commands together; one answer each, errors among them.
    pub(crate) async fn query_all(&self, pipe: &Pipeline) -> Result<Vec<Value>, RedisError> {
        self.conn.send_packed_commands(pipe).await
    }
}

/// All connections of one client.
pub(crate) struct Hub {
    pub(crate) options: Options,
    pub(crate) env: Env,
    pub(crate) health: HealthSetter,
    pub(crate) links: Mutex<HashMap<String, Link>>,
    /// Where a key lives, on a Cluster.
    pub(crate) routes: Mutex<HashMap<String, ConnectionAddr>>,
    /// The node for everything else.
    pub(crate) main: Mutex<Option<ConnectionAddr>>,
    /// Which host of the URL is tried next.
    pub(crate) turns: HostTurns,
    number: AtomicU64,
    /// Ends what waits for a connection.
    closing: Stop,
    warned: AtomicBool,
    facts: parking_lot::Mutex<Option<Arc<Facts>>>,
    /// Where broadcast subscriptions go on after a lost session: last id, and the number of entries up to it.
    pub(crate) places: parking_lot::Mutex<HashMap<String, (crate::answer::Id, i64)>>,
}

impl Hub {
    pub(crate) fn new(options: Options, env: Env) -> Arc<Self> {
        // Two providers in one build (a program that uses aws-lc-rs) must not make the first connection panic. An error means
        // that there is one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Arc::new(Self {
            health: HealthSetter::new(HealthState::Connecting, env.wall()),
            options,
            env,
            links: Mutex::default(),
            routes: Mutex::default(),
            main: Mutex::default(),
            turns: HostTurns::default(),
            number: AtomicU64::new(0),
            closing: Stop::new(),
            warned: AtomicBool::new(false),
            facts: parking_lot::Mutex::new(None),
            places: parking_lot::Mutex::default(),
        })
    }

    /// What the server said of itself at the last connection.
    pub(crate) fn facts(&self) -> Option<Arc<Facts>> {
        self.facts.lock().clone()
    }

    /// The connection for commands on `key`.
    pub(crate) async fn link(self: &Arc<Self>, key: &str) -> Result<Link> {
        let hub = self.clone();
        let key = key.to_owned();
        // On the library's own runtime: the connection's task must live there. It ends with a caller that gives up: of hosts that
        // say nothing, attempts would pile up behind each other.
        let made = AbortOnDropHandle::new(self.env.spawn(async move {
            let closed = || Error::new(ErrorKind::Closed, "the broker was closed");
            tokio::select! { biased;
                () = hub.closing.cancelled() => Err(closed()),
                made = hub.link_here(&key) => made,
            }
        }));
        made.await.unwrap_or_else(|e| Err(Error::new(ErrorKind::Closed, "the broker was closed").with_source(e)))
    }

    /// The address of a server that another one named.
    pub(crate) fn told(&self, host: String, port: u16) -> ConnectionAddr {
        let (host, port) = self.options.reached((host, port));
        self.address(host, port)
    }

    pub(crate) fn address(&self, host: String, port: u16) -> ConnectionAddr {
        match &self.options.tls {
            Some(_) => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
            None => ConnectionAddr::Tcp(host, port),
        }
    }

    pub(crate) async fn link_to(&self, node: &ConnectionAddr) -> Result<Link> {
        // Held while connecting: sessions that start together share one connection.
        let mut links = self.links.lock().await;
        // Of a client that only looks now and then, nobody else notices that its connection is lost.
        if let Some(link) = links.get(&node.to_string()).filter(|link| !link.conn.is_lost()) {
            return Ok(link.clone());
        }
        let timeout = self.options.response_timeout;
        let streams = self.options.transport == crate::url::Transport::Streams;
        let (pushes, pushed) = tokio::sync::mpsc::unbounded_channel();
        let plain = || self.line(node, self.settings(), Some(timeout), None);
        let (conn, streams) = match streams {
            true => {
                let settings = self.settings().set_protocol(ProtocolVersion::RESP3);
                match self.line(node, settings, Some(timeout), Some(pushes)).await {
                    Ok(conn) => (conn, true),
                    // Some service does not know `HELLO`: then the server cannot speak unasked.
                    Err(e) if matches!(e.kind(), ErrorKind::Other | ErrorKind::Permission) => (plain().await?, false),
                    Err(error) => return Err(error),
                }
            }
            false => (plain().await?, false),
        };
        let facts = Arc::new(probe(&conn).await?);
        *self.facts.lock() = Some(facts.clone());
        if !self.warned.swap(true, Ordering::Relaxed) {
            self.warn(&facts);
        }
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let tracks = streams && track(&conn).await;
        let wakes = Arc::new(Wakes::default());
        if tracks {
            self.env.spawn(wakes.clone().listen(pushed));
        }
        let link = Link { conn, node: node.clone(), facts, wakes, tracks, number };
        links.insert(node.to_string(), link.clone());
        Ok(link)
    }

    /// Once a client.
    fn warn(&self, facts: &Facts) {
        if self.options.is_exposed() {
            tracing::warn!("the Redis password crosses the network in clear; use rediss://");
        }
        if facts.persists == Some(false) && self.options.transport == crate::url::Transport::Streams {
            tracing::warn!(
                "this Redis has no append-only file: what it confirmed is lost when it is killed; set appendonly yes and \
                 appendfsync always, or ask for replicas with ?wait=1"
            );
        }
        if let Some(policy) = facts.eviction.as_deref().filter(|p| p.starts_with("allkeys")) {
            tracing::warn!(
                policy,
                "this Redis may evict whole streams with their groups; set maxmemory-policy noeviction"
            );
        }
    }

    /// A connection of the caller's own to the node of `link`, without a time limit for answers: for blocking reads.
    pub(crate) async fn own(&self, link: &Link) -> Result<Conn> {
        self.line(&link.node, self.settings(), None, None).await
    }

    /// As [`own`](Self::own), with the time limit of commands: for `WAIT`, which blocks what is behind it.
    pub(crate) async fn own_timed(&self, link: &Link) -> Result<Conn> {
        self.line(&link.node, self.settings(), Some(self.options.response_timeout), None).await
    }

    /// A connection for Pub/Sub: messages go to `pushes`.
    pub(crate) async fn own_pubsub(
        &self,
        link: &Link,
        pushes: UnboundedSender<PushInfo>,
    ) -> Result<MultiplexedConnection> {
        let settings = self.settings().set_protocol(ProtocolVersion::RESP3);
        self.open(&link.node, settings, Some(self.options.response_timeout), Some(pushes)).await
    }

    fn settings(&self) -> RedisConnectionInfo {
        let settings =
            RedisConnectionInfo::default().set_db(self.options.db).set_lib_name("anymq", env!("CARGO_PKG_VERSION"));
        login(settings, self.options.user.as_deref(), self.options.password.as_ref())
    }

    /// Longest wait for one connection and its greeting: no longer than a server that is down is waited for.
    pub(crate) fn patience(&self) -> Duration {
        CONNECT.min(self.options.connect_timeout)
    }

    /// A connection of our own.
    async fn line(
        &self,
        node: &ConnectionAddr,
        settings: RedisConnectionInfo,
        timeout: Option<Duration>,
        pushes: Option<UnboundedSender<PushInfo>>,
    ) -> Result<Conn> {
        let doing = format!("connecting to Redis at {node}");
        let late = || Error::new(ErrorKind::Unavailable, format!("{doing}: no greeting in time"));
        let dialled = dial(node, &settings, self.options.tls.as_ref(), self.options.response_timeout);
        let io = tokio::time::timeout(self.patience(), dialled).await.map_err(|_| late())?;
        let conn = Conn::start(&self.env, io.map_err(|e| unreachable(e.doing(&doing)))?, timeout, pushes);
        // Refused to users without the right; the name is for people only.
        let name = redis::cmd("CLIENT").arg("SETNAME").arg(&self.options.name).take();
        let _ = tokio::time::timeout(self.patience(), conn.send_packed_command(&name)).await.map_err(|_| late())?;
        Ok(conn)
    }

    /// A connection of the client library's: for Pub/Sub, and to ask a Sentinel.
    pub(crate) async fn open(
        &self,
        node: &ConnectionAddr,
        settings: RedisConnectionInfo,
        timeout: Option<Duration>,
        pushes: Option<UnboundedSender<PushInfo>>,
    ) -> Result<MultiplexedConnection> {
        let doing = format!("connecting to Redis at {node}");
        let client = self.client(node, settings).map_err(|e| e.doing(&doing))?;
        let mut config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(self.patience())).set_response_timeout(timeout);
        if let Some(pushes) = pushes {
            config = config.set_push_sender(pushes);
        }
        let opened =
            tokio::time::timeout(self.patience(), client.get_multiplexed_async_connection_with_config(&config));
        let mut conn = match opened.await {
            Ok(opened) => opened.map_err(|e| unreachable(failure(e, &doing)))?,
            Err(_) => return Err(Error::new(ErrorKind::Unavailable, format!("{doing}: no greeting in time"))),
        };
        // Refused to users without the right; the name is for people only.
        let _ = conn.send_packed_command(redis::cmd("CLIENT").arg("SETNAME").arg(&self.options.name)).await;
        Ok(conn)
    }

    fn client(&self, node: &ConnectionAddr, settings: RedisConnectionInfo) -> Result<Client> {
        // The crate leaves Nagle's algorithm on, and half-open sockets to the system's defaults.
        let tcp = TcpSettings::default()
            .set_nodelay(true)
            .set_keepalive(keepalive())
            .set_user_timeout(self.options.response_timeout);
        let bad = |e: RedisError| failure(e, "reading the connection's settings");
        let info: ConnectionInfo =
            node.clone().into_connection_info().map_err(bad)?.set_redis_settings(settings).set_tcp_settings(tcp);
        match (&self.options.tls, node) {
            (Some(tls), ConnectionAddr::TcpTls { .. }) => Client::build_with_tls(info, certificates(tls)?).map_err(bad),
            _ => Client::open(info).map_err(bad),
        }
    }

    /// The connection of this link failed: the next caller makes another, and looks for the master again.
    pub(crate) async fn lost(&self, link: &Link) {
        let mut links = self.links.lock().await;
        if links.get(&link.node.to_string()).is_some_and(|l| l.number == link.number) {
            links.remove(&link.node.to_string());
            drop(links);
            self.routes.lock().await.retain(|_, node| *node != link.node);
            let mut main = self.main.lock().await;
            if main.as_ref() == Some(&link.node) {
                *main = None;
                self.health.set(HealthState::Reconnecting, "the connection was lost", self.env.wall());
            }
        }
    }

    /// Lets go of every connection, also of one that is being made: nobody waits for its server.
    pub(crate) async fn close(&self) {
        self.closing.cancel();
        self.links.lock().await.clear();
        self.routes.lock().await.clear();
        *self.main.lock().await = None;
        self.health.set(HealthState::Closed, "", self.env.wall());
    }
}

/// Before there is a connection none was lost.
fn unreachable(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Disconnected | ErrorKind::Timeout => error.of_kind(ErrorKind::Unavailable),
        _ => error,
    }
}

/// Settings with a user and a password, if there are.
pub(crate) fn login(
    settings: RedisConnectionInfo,
    user: Option<&str>,
    password: Option<&Secret>,
) -> RedisConnectionInfo {
    let settings = match user {
        Some(user) => settings.set_username(user),
        None => settings,
    };
    match password {
        Some(password) => settings.set_password(&password.0),
        None => settings,
    }
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hub({:?})", self.options)
    }
}
