//! Several servers at once: started side by side, or those that the environment names.

use std::net::{TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Folder, Kind, Problem, Result, Server, install};

/// Where a server of a [`Fleet`] comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Its variable was set: somebody else's server, used as it is.
    Given,
    /// Started here, within that time.
    Started(Duration),
    /// Not to be had, and why.
    Missing(Problem),
}

/// One line of what a [`Fleet`] consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Which server.
    pub kind: Kind,
    /// Its URL, unless it is missing.
    pub url: Option<String>,
    /// Where it comes from.
    pub origin: Origin,
}

/// Servers that end when this is dropped, and with this process at the latest.
pub struct Fleet {
    entries: Vec<Entry>,
    servers: Vec<Server>,
    // After the servers in it.
    _folder: Folder,
}

impl Fleet {
    /// Starts these kinds in the folder, side by side; a kind whose variable is set is not started.
    #[must_use]
    pub fn start(kinds: &[Kind], folder: Folder) -> Self {
        let outcomes: Vec<(Entry, Option<Server>)> = thread::scope(|scope| {
            let folder = &folder;
            let starts: Vec<_> = kinds.iter().map(|kind| (*kind, scope.spawn(move || one(*kind, folder)))).collect();
            starts
                .into_iter()
                .map(|(kind, start)| {
                    start.join().unwrap_or_else(|_| {
                        let problem = Problem::new("the thread that started it panicked");
                        (Entry { kind, url: None, origin: Origin::Missing(problem) }, None)
                    })
                })
                .collect()
        });
        let (entries, servers): (Vec<Entry>, Vec<Option<Server>>) = outcomes.into_iter().unzip();
        Self { entries, servers: servers.into_iter().flatten().collect(), _folder: folder }
    }

    /// Installs what is missing, then starts these kinds for this process alone.
    ///
    /// # Errors
    /// When the state folder cannot be made.
    pub fn for_run(kinds: &[Kind], say: impl FnMut(&str)) -> Result<Self> {
        let ours: Vec<Kind> = kinds.iter().copied().filter(|kind| given(*kind).is_none()).collect();
        install::provide(&ours, say)?;
        Ok(Self::start(kinds, Folder::for_run()?))
    }

    /// What it consists of.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The servers started here.
    pub fn servers(&mut self) -> &mut [Server] {
        &mut self.servers
    }

    /// The variables that make it known to programs.
    #[must_use]
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        self.entries.iter().filter_map(|entry| Some((entry.kind.variable(), entry.url.clone()?))).collect()
    }
}

/// The server that the environment names.
fn given(kind: Kind) -> Option<String> {
    std::env::var(kind.variable()).ok().filter(|url| !url.is_empty())
}

fn one(kind: Kind, folder: &Folder) -> (Entry, Option<Server>) {
    let begun = Instant::now();
    if let Some(url) = given(kind) {
        let entry = if reachable(kind, &url) {
            Entry { kind, url: Some(url), origin: Origin::Given }
        } else {
            let words = format!("{} names {url}, but nothing listens there; start it or unset it", kind.variable());
            Entry { kind, url: None, origin: Origin::Missing(Problem::new(words)) }
        };
        return (entry, None);
    }
    match Server::start_in(kind, folder.path()) {
        Ok(server) => {
            let entry = Entry { kind, url: Some(server.url()), origin: Origin::Started(begun.elapsed()) };
            (entry, Some(server))
        }
        Err(problem) => (Entry { kind, url: None, origin: Origin::Missing(problem) }, None),
    }
}

/// Whether something listens where the URL points. Not more: a given server may want TLS and a login.
fn reachable(kind: Kind, url: &str) -> bool {
    hosts(kind, url).into_iter().any(|host| {
        host.to_socket_addrs()
            .into_iter()
            .flatten()
            .any(|address| TcpStream::connect_timeout(&address, Duration::from_secs(3)).is_ok())
    })
}

/// The `host:port` pairs of a URL, of which Kafka's may name several.
fn hosts(kind: Kind, url: &str) -> Vec<String> {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    let hosts = authority.rsplit('@').next().unwrap_or_default();
    let usual = match kind {
        Kind::Redis => 6379,
        Kind::RabbitMq => 5672,
        Kind::Kafka => 9092,
        Kind::Postgres => 5432,
    };
    let has_port = |host: &str| host.rsplit(':').next().is_some_and(|port| port.parse::<u16>().is_ok());
    hosts.split(',').map(|host| if has_port(host) { host.to_owned() } else { format!("{host}:{usual}") }).collect()
}

/// Whether the server of that URL does its work: the protocol's first words on this machine, else a connection.
#[must_use]
pub fn url_answers(kind: Kind, url: &str) -> bool {
    match hosts(kind, url).first().and_then(|host| host.strip_prefix("127.0.0.1:")?.parse().ok()) {
        Some(port) => crate::answers(kind, port),
        None => reachable(kind, url),
    }
}
