//! What a URL says. Strict: unknown parameters and values of the wrong type are errors that name the parameter and the allowed
//! ones.

use mq_api::{Error, ErrorKind, LONGEST, Result};
use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Streams or Pub/Sub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    Streams,
    PubSub,
}

/// A text that `Debug` does not show.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub(crate) String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Certificates, as files in PEM form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tls {
    pub(crate) ca: Option<PathBuf>,
    pub(crate) cert: Option<(PathBuf, PathBuf)>,
}

/// Where to connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// Host and port, several if there are.
    Hosts(Vec<(String, u16)>),
    /// A unix socket.
    Socket(PathBuf),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hosts(hosts) => {
                for (at, (host, port)) in hosts.iter().enumerate() {
                    write!(f, "{}{host}:{port}", if at > 0 { ", " } else { "" })?;
                }
                Ok(())
            }
            Self::Socket(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Everything that a URL says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) transport: Transport,
    pub(crate) place: Place,
    pub(crate) tls: Option<Tls>,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<Secret>,
    pub(crate) db: i64,
    /// The hosts are Sentinels of the master of this name.
    pub(crate) sentinel: Option<String>,
    pub(crate) sentinel_user: Option<String>,
    pub(crate) sentinel_password: Option<Secret>,
    /// How long a server that is down is waited for. Default 30 s: one that starts beside the program is up by then.
    pub(crate) connect_timeout: Duration,
    /// How long an answer may take before the connection counts as lost. Default 15 s: a half-open socket is noticed within
    /// 20 s, and a server that is frozen for 10 s is waited for.
    pub(crate) response_timeout: Duration,
    /// Replicas that must have a send before it is confirmed. Default 0, with Sentinel 1.
    pub(crate) wait: u32,
    /// How long they may take. Default 1 s.
    pub(crate) wait_timeout: Duration,
    /// Name of the connections in `CLIENT LIST`. Default `anymq`.
    pub(crate) name: String,
    /// Addresses as a Cluster or a Sentinel tells them, and where this program reaches them instead: servers behind a
    /// container's network tell those that only they know.
    pub(crate) address_map: Vec<(Host, Host)>,
}

/// Host and port.
pub(crate) type Host = (String, u16);

const PARAMETERS: &str = "address_map, ca, cert, connect_timeout, db, key, name, response_timeout, sentinel, sentinel_password, \
     sentinel_user, wait, wait_timeout";

fn bad(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, text)
}

/// `250ms`, `30s`, `5m`.
fn duration(key: &str, text: &str) -> Result<Duration> {
    let wrong = || bad(format!("{key}={text}: not a duration; write a number and a unit, such as 250ms, 30s or 5m"));
    let time = mq_core::written_time(text).ok_or_else(wrong)?;
    // Clocks cannot count further than some centuries.
    if time > LONGEST { Err(bad(format!("{key}={text}: at most ten years"))) } else { Ok(time) }
}

fn number<T: std::str::FromStr>(key: &str, text: &str) -> Result<T> {
    text.parse().map_err(|_| bad(format!("{key}={text}: not a number that fits")))
}

fn decoded(text: &str, what: &str) -> Result<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(b) = bytes.next() {
        if b != b'%' {
            out.push(b);
            continue;
        }
        let digit = |b: Option<u8>| b.and_then(|b| char::from(b).to_digit(16));
        match (digit(bytes.next()), digit(bytes.next())) {
            (Some(high), Some(low)) => out.push((high << 4 | low) as u8),
            _ => {
                return Err(bad(format!(
                    "{what} in the URL holds a '%' that is not followed by two hexadecimal digits"
                )));
            }
        }
    }
    String::from_utf8(out).map_err(|_| bad(format!("{what} in the URL is not UTF-8")))
}

fn host_and_port(text: &str) -> Result<(String, u16)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, after) =
                rest.split_once(']').ok_or_else(|| bad(format!("'{text}': an IPv6 address needs its ']'")))?;
            (host, after.strip_prefix(':'))
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = match port {
        None | Some("") => 6379,
        Some(port) => number("port", port)?,
    };
    let host = if host.is_empty() { "127.0.0.1" } else { host };
    Ok((host.to_owned(), port))
}

/// `10.0.0.1:6379=localhost:7001,10.0.0.2:6379=localhost:7002`.
fn address_map(text: &str) -> Result<Vec<(Host, Host)>> {
    let wrong = || bad(format!("address_map={text}: write told:port=reached:port, several with commas between them"));
    text.split(',')
        .map(|pair| {
            let (told, reached) = pair.split_once('=').ok_or_else(wrong)?;
            Ok((host_and_port(told)?, host_and_port(reached)?))
        })
        .collect()
}

impl Options {
    /// Reads `redis://`, `rediss://`, `redis+unix://`, `redis+pubsub://`, `rediss+pubsub://` and `redis+pubsub+unix://`.
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let (scheme, rest) =
            url.split_once("://").ok_or_else(|| bad("the URL has no scheme; write redis://host:6379 for example"))?;
        let (transport, tls, unix) = match scheme {
            "redis" => (Transport::Streams, false, false),
            "rediss" => (Transport::Streams, true, false),
            "redis+unix" => (Transport::Streams, false, true),
            "redis+pubsub" => (Transport::PubSub, false, false),
            "rediss+pubsub" => (Transport::PubSub, true, false),
            "redis+pubsub+unix" => (Transport::PubSub, false, true),
            other => {
                return Err(bad(format!(
                    "'{other}://' is no scheme of this backend; it takes redis, rediss, redis+unix, redis+pubsub, \
                     rediss+pubsub and redis+pubsub+unix"
                )));
            }
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        if rest.contains('#') || query.contains('#') {
            return Err(bad("the URL holds a '#'; in a password write %23"));
        }
        let (authority, path) = match rest.split_once('/') {
            Some((authority, path)) => (authority, path),
            None => (rest, ""),
        };
        let (login, hosts) = authority.rsplit_once('@').map_or((None, authority), |(l, h)| (Some(l), h));
        let (user, password) = match login {
            None => (None, None),
            Some(login) => {
                let (user, password) = login.split_once(':').map_or((login, None), |(u, p)| (u, Some(p)));
                let user = decoded(user, "the user")?;
                let password = password.map(|p| decoded(p, "the password")).transpose()?;
                (Some(user).filter(|u| !u.is_empty()), password.map(Secret))
            }
        };
        let mut db = 0;
        let place = if unix {
            if !hosts.is_empty() {
                return Err(bad(format!("a unix socket has no host: write {scheme}:///path/to/socket")));
            }
            if path.is_empty() {
                return Err(bad(format!("the path of the socket is missing: write {scheme}:///path/to/socket")));
            }
            Place::Socket(PathBuf::from(format!("/{}", decoded(path, "the path")?)))
        } else {
            if !path.is_empty() {
                db = path.parse().map_err(|_| bad(format!("'/{path}' is no database number; write /0, or nothing")))?;
            }
            Place::Hosts(hosts.split(',').map(host_and_port).collect::<Result<_>>()?)
        };
        let mut options = Self {
            transport,
            place,
            tls: tls.then(Tls::default),
            user,
            password,
            db,
            sentinel: None,
            sentinel_user: None,
            sentinel_password: None,
            connect_timeout: Duration::from_secs(30),
            response_timeout: Duration::from_secs(15),
            wait: 0,
            wait_timeout: Duration::from_secs(1),
            name: "anymq".to_owned(),
            address_map: Vec::new(),
        };
        options.read_query(query)?;
        Ok(options)
    }

    fn read_query(&mut self, query: &str) -> Result<()> {
        let (mut cert, mut key, mut ca, mut wait) = (None, None, None, None);
        let mut given = HashSet::new();
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
            let value = &*value;
            if !given.insert(name.to_string()) {
                return Err(bad(format!("URL parameter '{name}' is given twice")));
            }
            match &*name {
                "connect_timeout" => self.connect_timeout = duration(&name, value)?,
                "response_timeout" => self.response_timeout = duration(&name, value)?,
                "wait_timeout" => self.wait_timeout = duration(&name, value)?,
                "wait" => wait = Some(number(&name, value)?),
                "db" => self.db = number(&name, value)?,
                "sentinel" => self.sentinel = Some(value.to_owned()),
                "sentinel_user" => self.sentinel_user = Some(value.to_owned()),
                "sentinel_password" => self.sentinel_password = Some(Secret(value.to_owned())),
                "name" => self.name = value.to_owned(),
                "address_map" => self.address_map = address_map(value)?,
                "ca" => ca = Some(PathBuf::from(value)),
                "cert" => cert = Some(PathBuf::from(value)),
                "key" => key = Some(PathBuf::from(value)),
                other => {
                    return Err(bad(format!("URL parameter '{other}' is not known; allowed are {PARAMETERS}")));
                }
            }
        }
        if self.response_timeout < Duration::from_millis(100) {
            return Err(bad("response_timeout must be at least 100ms"));
        }
        if self.name.is_empty() || self.name.chars().any(|c| !c.is_ascii_graphic()) {
            return Err(bad("name must be printable ASCII without spaces: Redis takes no other client name"));
        }
        if self.sentinel.is_none() && (self.sentinel_user.is_some() || self.sentinel_password.is_some()) {
            return Err(bad("sentinel_user and sentinel_password need sentinel=<name of the master>"));
        }
        if self.sentinel.is_some() && matches!(self.place, Place::Socket(_)) {
            return Err(bad("sentinel needs hosts, not a unix socket"));
        }
        self.wait = wait.unwrap_or(u32::from(self.sentinel.is_some()));
        if self.wait > 0 && self.wait_timeout.is_zero() {
            return Err(bad("wait_timeout must be at least 1ms: WAIT takes 0 for waiting for ever"));
        }
        if self.wait > 0 && self.wait_timeout >= self.response_timeout {
            return Err(bad("wait_timeout must be below response_timeout, or a wait counts as a lost connection"));
        }
        if self.transport == Transport::PubSub && wait.is_some() {
            return Err(bad("wait is for streams: nothing of Pub/Sub is stored, so there is nothing to wait for"));
        }
        let cert = match (cert, key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => return Err(bad("cert and key belong together: give both or none")),
        };
        match &mut self.tls {
            Some(tls) => *tls = Tls { ca, cert },
            None if ca.is_some() || cert.is_some() => return Err(bad("ca, cert and key need rediss://")),
            None => {}
        }
        Ok(())
    }

    /// Where a server is reached that another one named so.
    pub(crate) fn reached(&self, told: Host) -> Host {
        let known = self.address_map.iter().find(|(from, _)| *from == told);
        known.map_or(told, |(_, to)| to.clone())
    }

    /// Whether a password would cross a network in clear.
    pub(crate) fn is_exposed(&self) -> bool {
        let Place::Hosts(hosts) = &self.place else { return false };
        let loopback = |host: &str| {
            host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
        };
        let secret = self.password.is_some() || self.sentinel_password.is_some();
        self.tls.is_none() && secret && hosts.iter().any(|(host, _)| !loopback(host))
    }
}

#[cfg(test)]
mod tests {
    use super::{Options, Place, Transport};
    use std::time::Duration;

    #[test]
    fn all_parts_are_read() {
        let o =
            Options::parse("rediss://app:s%40cret@h1:7000,h2/3?ca=/c.pem&cert=/a&key=/b&connect_timeout=5s").unwrap();
        assert_eq!((o.transport, o.db, o.connect_timeout), (Transport::Streams, 3, Duration::from_secs(5)));
        assert_eq!(o.place, Place::Hosts(vec![("h1".into(), 7000), ("h2".into(), 6379)]));
        assert_eq!((o.user.as_deref(), o.password.as_ref().map(|p| p.0.as_str())), (Some("app"), Some("s@cret")));
        assert!(o.tls.is_some_and(|t| t.ca.is_some() && t.cert.is_some()));
        let o = Options::parse("redis+unix:///run/redis.sock?db=2").unwrap();
        assert!(matches!(o.place, Place::Socket(p) if p.ends_with("redis.sock")) && o.db == 2);
        let o = Options::parse("redis+pubsub://[::1]:1").unwrap();
        assert_eq!((o.transport, o.place), (Transport::PubSub, Place::Hosts(vec![("::1".into(), 1)])));
        let o = Options::parse("redis://h?address_map=10.0.0.1:6379=h:7001,10.0.0.2=h:7002").unwrap();
        assert_eq!(o.reached(("10.0.0.2".into(), 6379)), ("h".into(), 7002));
        assert_eq!(o.reached(("10.0.0.3".into(), 6379)), ("10.0.0.3".into(), 6379));
        assert_eq!(
            Options::parse("redis://s1,s2/?sentinel=main").unwrap().wait,
            1,
            "a failover loses nothing confirmed"
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (url, word) in [
            ("redis://h?tiemout=3s", "tiemout"),
            ("redis://h?connect_timeout=3", "connect_timeout=3"),
            ("redis://h?wait=x", "wait=x"),
            ("redis://h?db=1&wait=1&db=2", "'db' is given twice"),
            ("redis://h?wait=1&wait_timeout=0s", "wait_timeout"),
            ("redis://h?wait=1&wait_timeout=20s", "response_timeout"),
            ("redis://h?connect_timeout=99999999999999999s", "ten years"),
            ("redis://h?response_timeout=18446744073709551615m", "ten years"),
            ("redis://h/x", "database number"),
            ("redis://h:port", "port"),
            ("redis://h?ca=/x", "rediss"),
            ("rediss://h?cert=/x", "key"),
            ("redis+unix://host/x", "no host"),
            ("redis+pubsub://h?wait=1", "stored"),
            ("kafka://h", "kafka"),
            ("redis://h?sentinel_user=x", "sentinel"),
            ("redis://h?address_map=a:1", "told:port=reached:port"),
        ] {
            let error = Options::parse(url).unwrap_err().to_string();
            assert!(error.contains(word), "{url}: {error}");
        }
        let all = Options::parse("redis://h?nonsense=1").unwrap_err().to_string();
        assert!(all.contains("response_timeout"), "names the allowed ones: {all}");
    }

    #[test]
    fn secrets_do_not_show() {
        let o = Options::parse("redis://u:hush@example.org?sentinel=m&sentinel_password=quiet").unwrap();
        let shown = format!("{o:?}");
        assert!(!shown.contains("hush") && !shown.contains("quiet"), "{shown}");
        let o2 = Options::parse("redis://example.org?sentinel=m&sentinel_password=quiet").unwrap();
        assert!(o2.is_exposed(), "a Sentinel's password is one too");
        assert!(o.is_exposed() && !Options::parse("redis://u:hush@127.0.0.1").unwrap().is_exposed());
    }
}
