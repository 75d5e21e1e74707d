//! Connections: one that publishes and one that consumes, since a memory alarm stops everything on a connection that
//! publishes, acknowledgements included. The client's own recovery is off: our supervisor attaches again, with generations.

use crate::channels::Spent;
use crate::fault::{fault, no_answer};
use crate::line::Live;
use crate::url::AmqpUrl;
use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo};
use lapin::{Channel, ConnectionProperties};
use mq_api::{Error, ErrorKind, HealthSetter, HealthState, Result};
use mq_core::{Env, HostTurns};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Longest wait for one host. A frozen one accepts and says nothing.
const HOST: Duration = Duration::from_secs(5);
/// Longest wait for an answer of a live connection, below the engine's limit of an attempt.
pub(crate) const ANSWER: Duration = Duration::from_secs(8);

/// Longest wait for what the server says of itself: once per client, while it connects.
const GREETING: Duration = Duration::from_secs(2);

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Publish,
    Consume,
}

/// The two connections of one client.
pub(crate) struct Connections {
    url: AmqpUrl,
    tls: OwnedTLSConfig,
    env: Env,
    publish: tokio::sync::Mutex<Option<Arc<Live>>>,
    consume: tokio::sync::Mutex<Option<Arc<Live>>>,
    /// Which host is tried next.
    turns: HostTurns,
    closed: AtomicBool,
    health: HealthSetter,
    /// Of the two connections.
    spent: [Spent; 2],
}

impl Connections {
    pub(crate) fn new(url: AmqpUrl, env: Env) -> Result<Self> {
        let tls = tls_config(&url)?;
        let health = HealthSetter::new(HealthState::Connecting, env.wall());
        let (publish, consume) = Default::default();
        Ok(Self {
            url,
            tls,
            env,
            publish,
            consume,
            turns: HostTurns::default(),
            closed: false.into(),
            health,
            spent: Default::default(),
        })
    }

    pub(crate) fn url(&self) -> &AmqpUrl {
        &self.url
    }

    pub(crate) fn health(&self) -> &HealthSetter {
        &self.health
    }

    /// The live connection of that role; makes one if there is none. Call on the library's own thread: the client's
    /// heartbeats run where a connection is made.
    pub(crate) async fn get(&self, role: Role) -> Result<Arc<Live>> {
        // Whoever asks has a limit of its own, and finds the next host when it asks again.
        self.get_within(role, Duration::MAX).await
    }

    /// As [`get`](Self::get), within `limit` for all hosts together.
    pub(crate) async fn get_within(&self, role: Role, limit: Duration) -> Result<Arc<Live>> {
        let mut slot = match role {
            Role::Publish => self.publish.lock().await,
            Role::Consume => self.consume.lock().await,
        };
        if let Some(connection) = &*slot
            && connection.status().connected()
        {
            return Ok(connection.clone());
        }
        *slot = None;
        // Whoever comes late must not make one that nobody closes.
        if self.closed.load(Ordering::SeqCst) {
            return Err(Error::closed("the connection"));
        }
        match self.open(role, limit).await {
            Ok(connection) if self.closed.load(Ordering::SeqCst) => {
                connection.close(HOST).await;
                Err(Error::closed("the connection"))
            }
            Ok(connection) => {
                self.health.set(HealthState::Running, "", self.env.wall());
                let connection = Arc::new(connection);
                self.spent(role).none();
                *slot = Some(connection.clone());
                Ok(connection)
            }
            Err(error) => {
                if self.health.state() != HealthState::Connecting {
                    self.health.set(HealthState::Reconnecting, error.to_string(), self.env.wall());
                }
                Err(error)
            }
        }
    }

    /// A new channel on the connection of that role.
    pub(crate) async fn channel(&self, role: Role) -> Result<Channel> {
        let connection = self.get(role).await?;
        self.channel_on(&connection, role).await
    }

    /// A new channel on a connection of that role.
    pub(crate) async fn channel_on(&self, connection: &Live, role: Role) -> Result<Channel> {
        crate::channels::open(connection, self.spent(role)).await
    }

    fn spent(&self, role: Role) -> &Spent {
        &self.spent[usize::from(role == Role::Consume)]
    }

    /// Tries every host, beginning with the one that worked last, or behind the one that was tried last and did not.
    async fn open(&self, role: Role, limit: Duration) -> Result<Live> {
        let began = self.env.now();
        let (mut left, mut last) = (limit, None);
        for at in self.turns.of(self.url.hosts.len()) {
            let (host, port) = &self.url.hosts[at];
            let what = format!("connect to {host}:{port}");
            let patience = left.min(HOST);
            let error = match tokio::time::timeout(patience, self.open_at(role, host, *port)).await {
                Ok(Ok(connection)) => {
                    self.turns.worked(at);
                    return Ok(connection);
                }
                Ok(Err(error)) => not_there(login(fault(what, error))),
                Err(_) => not_there(no_answer(&what, patience)),
            };
            // Credentials are the same for every host.
            let is_refused = error.kind() == ErrorKind::Auth;
            last = Some(error);
            left = limit.saturating_sub(self.env.now() - began);
            // Looked at here, and not when it is the next one's turn: that would count as tried.
            if is_refused || left.is_zero() || self.closed.load(Ordering::SeqCst) {
                break;
            }
        }
        Err(last.unwrap_or_else(|| Error::new(ErrorKind::Config, "the URL has no host")))
    }

    fn uri(&self, host: &str, port: u16) -> AMQPUri {
        let url = &self.url;
        AMQPUri {
            scheme: if url.tls { AMQPScheme::AMQPS } else { AMQPScheme::AMQP },
            authority: AMQPAuthority {
                userinfo: AMQPUserInfo { username: url.user.clone(), password: url.password.clone() },
                host: host.to_owned(),
                port,
            },
            vhost: url.vhost.clone(),
            query: AMQPQueryString {
                heartbeat: u16::try_from(url.heartbeat.as_secs()).ok(),
                // Login by the client certificate, when there is one and no password.
                auth_mechanism: (url.cert.is_some() && url.password.is_empty())
                    .then_some(lapin::uri::SASLMechanism::External),
                ..AMQPQueryString::default()
            },
        }
    }

    /// Product and version, as the server that worked last says; `None` when it does not say it in time.
    pub(crate) async fn server(&self) -> Option<String> {
        let (host, port) = self.url.hosts.get(self.turns.next())?;
        let uri = self.uri(host, *port);
        // Nothing depends on it but what listings show: a connection is not refused for it.
        tokio::time::timeout(GREETING, crate::greeting::server(&uri, &self.tls)).await.ok()?.ok()?
    }

    async fn open_at(&self, role: Role, host: &str, port: u16) -> lapin::Result<Live> {
        let uri = self.uri(host, port);
        let role = match role {
            Role::Publish => "publish",
            Role::Consume => "consume",
        };
        let name = format!("{} {role}", self.url.name.as_deref().unwrap_or("anymq"));
        let properties = ConnectionProperties::default().with_connection_name(name.into());
        Live::open(uri, properties, self.tls.clone()).await
    }

    /// Closes both, each within `limit`.
    pub(crate) async fn close(&self, limit: Duration) {
        self.closed.store(true, Ordering::SeqCst);
        let one = async |slot: &tokio::sync::Mutex<Option<Arc<Live>>>| {
            // One that is being made just now is closed by who makes it.
            let Ok(mut slot) = tokio::time::timeout(limit, slot.lock()).await else { return };
            if let Some(connection) = slot.take()
                && connection.status().connected()
            {
                connection.close(limit).await;
            }
        };
        tokio::join!(one(&self.publish), one(&self.consume));
        self.health.set(HealthState::Closed, "", self.env.wall());
    }
}

/// During a login RabbitMQ says 403 for a wrong password, and closes the socket of what it does not let in otherwise.
fn login(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Permission if error.context().contains("ACCESS_REFUSED") && !error.context().contains("vhost") => {
            error.of_kind(ErrorKind::Auth)
        }
        _ => error,
    }
}

/// A socket that is closed while it is being made, or says nothing, is a broker that is not there.
fn not_there(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Disconnected | ErrorKind::Timeout => error.of_kind(ErrorKind::Unavailable),
        _ => error,
    }
}

/// An answer of the client within a limit.
pub(crate) async fn within<T>(limit: Duration, doing: &str, call: impl Future<Output = lapin::Result<T>>) -> Result<T> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map_err(|e| fault(doing, e)),
        Err(_) => Err(no_answer(doing, limit)),
    }
}

/// As [`within`], with the client's own error for a closer look.
pub(crate) async fn answer<T>(doing: &str, call: impl Future<Output = lapin::Result<T>>) -> Result<lapin::Result<T>> {
    tokio::time::timeout(ANSWER, call).await.map_err(|_| no_answer(doing, ANSWER))
}

fn tls_config(url: &AmqpUrl) -> Result<OwnedTLSConfig> {
    let read = |what: &str, path: &std::path::Path| {
        std::fs::read(path).map_err(|e| {
            Error::new(ErrorKind::Config, format!("URL parameter '{what}': cannot read {}", path.display()))
                .with_source(e)
        })
    };
    let mut config = OwnedTLSConfig::default();
    if let Some(path) = &url.ca {
        let text = String::from_utf8(read("ca", path)?)
            .map_err(|e| Error::new(ErrorKind::Config, "URL parameter 'ca' must name a PEM file").with_source(e))?;
        config.cert_chain = Some(text);
    }
    if let (Some(cert), Some(key)) = (&url.cert, &url.key) {
        config.identity = Some(OwnedIdentity::PKCS8 { pem: read("cert", cert)?, key: read("key", key)? });
    }
    Ok(config)
}

impl std::fmt::Debug for Connections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Connections({:?})", self.url)
    }
}
