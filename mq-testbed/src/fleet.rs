//! Several servers at once: started side by side, or those that the environment names.

use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Cluster, Folder, Formation, Kind, Problem, Result, Server, Version, install};

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

/// What a [`Fleet`] may consist of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// One server of the default version.
    Single(Kind),
    /// Three nodes.
    Cluster(Formation),
    /// One server of another version.
    Version(Version),
}

impl Want {
    /// Its name, also that of its folder.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Single(kind) => kind.name(),
            Self::Cluster(formation) => formation.name(),
            Self::Version(version) => version.name(),
        }
    }

    /// The variable that names one to use, and under which ours is made known.
    #[must_use]
    pub const fn variable(self) -> &'static str {
        match self {
            Self::Single(kind) => kind.variable(),
            Self::Cluster(formation) => formation.variable(),
            Self::Version(version) => version.variable(),
        }
    }

    /// What its servers are.
    #[must_use]
    pub const fn kind(self) -> Kind {
        match self {
            Self::Single(kind) => kind,
            Self::Cluster(formation) => formation.kind(),
            Self::Version(version) => version.kind(),
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let singles = Kind::ALL.into_iter().map(Self::Single);
        let clusters = Formation::ALL.into_iter().map(Self::Cluster);
        let versions = Version::ALL.into_iter().map(Self::Version);
        singles.chain(clusters).chain(versions).find(|want| want.name() == name)
    }

    /// The one that the environment names.
    #[must_use]
    pub fn given(self) -> Option<String> {
        std::env::var(self.variable()).ok().filter(|url| !url.is_empty())
    }
}

/// One line of what a [`Fleet`] consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Which.
    pub want: Want,
    /// Its URL, unless it is missing.
    pub url: Option<String>,
    /// Where it comes from.
    pub origin: Origin,
}

/// Servers that end when this is dropped, and with this process at the latest.
pub struct Fleet {
    entries: Vec<Entry>,
    _servers: Vec<Held>,
    // After the servers in it.
    _folder: Folder,
}

/// So many start side by side. The four usual ones do; of a dozen all at once none would get far on two cores.
const AT_ONCE: usize = 4;

enum Held {
    Server { _one: Server },
    Cluster { _all: Cluster },
}

impl Fleet {
    /// Starts these in the folder, side by side; one whose variable is set is not started.
    #[must_use]
    pub fn start(wants: &[Want], folder: Folder) -> Self {
        let queue = Mutex::new(wants.iter().copied().enumerate());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let mut outcomes: Vec<(usize, Entry, Option<Held>)> = thread::scope(|scope| {
            let start_some = || {
                let mut started = Vec::new();
                while let Some((place, want)) = next() {
                    let (entry, held) = one(want, &folder);
                    started.push((place, entry, held));
                }
                started
            };
            let workers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(start_some)).collect();
            // A panic in there is a mistake in this crate; its thread's servers are then listed as nothing at all.
            workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
        });
        outcomes.sort_by_key(|(place, ..)| *place);
        let outcomes: Vec<_> = outcomes.into_iter().map(|(_, entry, held)| (entry, held)).collect();
        let (entries, servers): (Vec<Entry>, Vec<Option<Held>>) = outcomes.into_iter().unzip();
        Self { entries, _servers: servers.into_iter().flatten().collect(), _folder: folder }
    }

    /// Installs what is missing, then starts these kinds for this process alone.
    ///
    /// # Errors
    /// When the state folder cannot be made.
    pub fn for_run(kinds: &[Kind], say: impl FnMut(&str)) -> Result<Self> {
        let wants: Vec<Want> = kinds.iter().copied().map(Want::Single).collect();
        provide(&wants, say)?;
        Ok(Self::start(&wants, Folder::for_run()?))
    }

    /// What it consists of.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The variables that make it known to programs.
    #[must_use]
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        self.entries.iter().filter_map(|entry| Some((entry.want.variable(), entry.url.clone()?))).collect()
    }
}

/// Installs what these need and this machine lacks, as far as it allows.
///
/// # Errors
/// When the cache cannot be locked.
pub fn provide(wants: &[Want], mut say: impl FnMut(&str)) -> Result<()> {
    let ours: Vec<Want> = wants.iter().copied().filter(|want| want.given().is_none()).collect();
    let mut kinds: Vec<Kind> = ours.iter().map(|want| want.kind()).collect();
    kinds.sort();
    kinds.dedup();
    install::provide(&kinds, &mut say)?;
    let versions: Vec<Version> =
        ours.iter().filter_map(|want| if let Want::Version(version) = want { Some(*version) } else { None }).collect();
    if versions.is_empty() { Ok(()) } else { Version::provide(&versions, say) }
}

fn one(want: Want, folder: &Folder) -> (Entry, Option<Held>) {
    let begun = Instant::now();
    if let Some(url) = want.given() {
        let entry = if reachable(want.kind(), &url) {
            Entry { want, url: Some(url), origin: Origin::Given }
        } else {
            let words = format!("{} names {url}, but nothing listens there; start it or unset it", want.variable());
            Entry { want, url: None, origin: Origin::Missing(Problem::new(words)) }
        };
        return (entry, None);
    }
    let started = match want {
        Want::Single(kind) => Server::start_in(kind, folder.path()).map(|one| (one.url(), Held::Server { _one: one })),
        Want::Version(version) => version.start_in(folder.path()).map(|one| (one.url(), Held::Server { _one: one })),
        Want::Cluster(formation) => {
            Cluster::start_in(formation, folder.path()).map(|all| (all.url(), Held::Cluster { _all: all }))
        }
    };
    match started {
        Ok((url, held)) => (Entry { want, url: Some(url), origin: Origin::Started(begun.elapsed()) }, Some(held)),
        Err(problem) => (Entry { want, url: None, origin: Origin::Missing(problem) }, None),
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

/// The ports in a URL, one for each host it names.
#[must_use]
pub fn ports_in(kind: Kind, url: &str) -> Vec<u16> {
    hosts(kind, url).iter().filter_map(|host| host.rsplit(':').next()?.parse().ok()).collect()
}

/// Whether the server of that URL does its work: the protocol's first words on this machine, else a connection.
#[must_use]
pub fn url_answers(kind: Kind, url: &str) -> bool {
    match hosts(kind, url).first().and_then(|host| host.strip_prefix("127.0.0.1:")?.parse().ok()) {
        Some(port) => crate::answers(kind, port),
        None => reachable(kind, url),
    }
}
