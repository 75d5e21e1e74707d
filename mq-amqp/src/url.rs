//! The URL: `amqp[s]://user:password@host[:port][,host2[:port2]]/vhost?parameters`, strictly.

use mq_api::{Error, ErrorKind, LONGEST, Result};
use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// What kind of queue a group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueType {
    Quorum,
    Classic,
}

impl QueueType {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Quorum => "quorum",
            Self::Classic => "classic",
        }
    }
}

/// A parsed URL.
#[derive(Clone)]
pub(crate) struct AmqpUrl {
    pub(crate) tls: bool,
    pub(crate) user: String,
    pub(crate) password: String,
    pub(crate) hosts: Vec<(String, u16)>,
    pub(crate) vhost: String,
    pub(crate) queue_type: QueueType,
    /// Silence after which a connection counts as dead is twice this. Default 5 s: a network that is away for a moment
    /// survives, a half-open one is noticed in 10 s. Shorter ones are known to take a busy server for a dead one.
    pub(crate) heartbeat: Duration,
    /// Longest wait for a broker that is down at start. Default 30 s: one that starts beside the program is up by then.
    pub(crate) connect_timeout: Duration,
    /// Longest wait for a confirmation. Default 20 s: a leader that is frozen may never answer for what was in flight there,
    /// and a second try still fits into the producer's 30 s.
    pub(crate) confirm_timeout: Duration,
    pub(crate) name: Option<String>,
    pub(crate) ca: Option<PathBuf>,
    pub(crate) cert: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
}

const KEYS: &str = "queue_type, heartbeat, connect_timeout, confirm_timeout, name, ca, cert, key";

impl AmqpUrl {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let bad = |what: String| Error::new(ErrorKind::Config, format!("the URL is not understood: {what}"));
        let (scheme, rest) =
            text.split_once("://").ok_or_else(|| bad("it has no scheme; write amqp://host or amqps://host".into()))?;
        let tls = match scheme {
            "amqp" => false,
            "amqps" => true,
            other => return Err(bad(format!("scheme '{other}' is not 'amqp' or 'amqps'"))),
        };
        if rest.contains('#') {
            return Err(bad("it has a '#' part, which means nothing here; write %23 in names and passwords".into()));
        }
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(r, q)| (r, Some(q)));
        let (authority, path) = rest.split_once('/').map_or((rest, None), |(a, p)| (a, Some(p)));
        let (login, hosts) = authority.rsplit_once('@').map_or((None, authority), |(l, h)| (Some(l), h));
        let (user, password) = match login {
            None => ("guest".to_owned(), "guest".to_owned()),
            Some(login) => {
                let (user, password) = login.split_once(':').unwrap_or((login, ""));
                (decode(user).map_err(bad)?, decode(password).map_err(|_| bad("the password has a bad %xx".into()))?)
            }
        };
        // The default virtual host also for a path of `/` alone, which people write without thinking of the virtual host "".
        let vhost = match path {
            None | Some("") => "/".to_owned(),
            Some(path) if path.contains('/') => return Err(bad("a '/' in the virtual host is written %2f".into())),
            Some(path) => decode(path).map_err(bad)?,
        };
        let port = if tls { 5671 } else { 5672 };
        let hosts = hosts.split(',').map(|h| host(h, port)).collect::<Result<Vec<_>, _>>().map_err(bad)?;
        let mut url = Self {
            tls,
            user,
            password,
            hosts,
            vhost,
            queue_type: QueueType::Quorum,
            heartbeat: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(30),
            confirm_timeout: Duration::from_secs(20),
            name: None,
            ca: None,
            cert: None,
            key: None,
        };
        let mut given = HashSet::new();
        for pair in query.into_iter().flat_map(|q| q.split('&')).filter(|p| !p.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if !given.insert(name) {
                return Err(bad(format!("URL parameter '{name}' is given twice")));
            }
            let value = decode(value).map_err(bad)?;
            url.set(name, &value)?;
        }
        if !tls && (url.ca.is_some() || url.cert.is_some() || url.key.is_some()) {
            return Err(bad("ca, cert and key need the scheme amqps".into()));
        }
        if url.cert.is_some() != url.key.is_some() {
            return Err(bad("cert and key go together".into()));
        }
        Ok(url)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        match name {
            "queue_type" => {
                self.queue_type = match value {
                    "quorum" => QueueType::Quorum,
                    "classic" => QueueType::Classic,
                    other => return Err(wrong(name, other, "'quorum' or 'classic'")),
                }
            }
            "heartbeat" => {
                self.heartbeat = duration(name, value)?;
                if self.heartbeat < Duration::from_secs(1) || self.heartbeat > Duration::from_secs(3600) {
                    return Err(wrong(name, value, "a time between 1s and 3600s"));
                }
            }
            "connect_timeout" => self.connect_timeout = duration(name, value)?,
            "confirm_timeout" => {
                self.confirm_timeout = duration(name, value)?;
                // It is looked at each second, and a channel that is made again each time confirms nothing.
                if self.confirm_timeout < Duration::from_secs(1) {
                    return Err(wrong(name, value, "a time from 1s on"));
                }
            }
            "name" => self.name = Some(value.to_owned()),
            "ca" => self.ca = Some(value.into()),
            "cert" => self.cert = Some(value.into()),
            "key" => self.key = Some(value.into()),
            other => {
                let text = format!("URL parameter '{other}' is not known; allowed are {KEYS}");
                return Err(Error::new(ErrorKind::Config, text));
            }
        }
        Ok(())
    }

    /// Whether a password goes over the network in clear.
    pub(crate) fn password_in_clear(&self) -> bool {
        let loopback = |host: &str| {
            host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
        };
        !self.tls && !self.password.is_empty() && !self.hosts.iter().all(|(host, _)| loopback(host))
    }
}

fn wrong(name: &str, value: &str, wanted: &str) -> Error {
    Error::new(ErrorKind::Config, format!("URL parameter '{name}' is '{value}', but must be {wanted}"))
}

/// `500ms`, `30s`, `5m`. In no time nothing is reached, and clocks cannot count further than some centuries.
fn duration(name: &str, text: &str) -> Result<Duration> {
    let value = mq_core::written_time(text).ok_or_else(|| wrong(name, text, "a time like 500ms, 30s or 5m"))?;
    match value {
        Duration::ZERO => Err(wrong(name, text, "longer than nothing")),
        value if value > LONGEST => Err(wrong(name, text, "at most ten years")),
        value => Ok(value),
    }
}

fn host(text: &str, port: u16) -> Result<(String, u16), String> {
    let split = match text.rfind(']') {
        // [::1]:5672
        Some(end) => text[end..].find(':').map(|at| end + at),
        None => text.rfind(':'),
    };
    let (name, port) = match split {
        None => (text, port),
        Some(at) => {
            let number = text[at + 1..].parse().map_err(|_| format!("'{}' is not a port", &text[at + 1..]))?;
            (&text[..at], number)
        }
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    match name {
        "" => Err("a host is empty; write amqp://localhost".to_owned()),
        name => Ok((decode(name)?, port)),
    }
}

fn decode(text: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = tail.get(..2).and_then(|d| std::str::from_utf8(d).ok());
        let byte =
            digits.and_then(|d| u8::from_str_radix(d, 16).ok()).ok_or("a '%' is not followed by two hex digits")?;
        bytes.push(byte);
        rest = &tail[2..];
    }
    String::from_utf8(bytes).map_err(|_| "a part is not UTF-8".to_owned())
}

impl fmt::Debug for AmqpUrl {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmqpUrl")
            .field("tls", &self.tls)
            .field("user", &self.user)
            .field("hosts", &self.hosts)
            .field("vhost", &self.vhost)
            .field("queue_type", &self.queue_type)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{AmqpUrl, QueueType};
    use std::time::Duration;

    #[test]
    fn every_part_is_read() {
        let url = AmqpUrl::parse(
            "amqps://app:p%40ss@one,two:5000,[::1]:6000/%2fshop?queue_type=classic&heartbeat=5s&connect_timeout=500ms",
        )
        .unwrap();
        assert!(url.tls);
        assert_eq!((url.user.as_str(), url.password.as_str(), url.vhost.as_str()), ("app", "p@ss", "/shop"));
        assert_eq!(url.hosts, [("one".into(), 5671), ("two".into(), 5000), ("::1".into(), 6000)]);
        assert_eq!(url.queue_type, QueueType::Classic);
        assert_eq!((url.heartbeat, url.connect_timeout), (Duration::from_secs(5), Duration::from_millis(500)));
        assert!(!format!("{url:?}").contains("p@ss"));
    }

    #[test]
    fn defaults() {
        let url = AmqpUrl::parse("amqp://localhost").unwrap();
        assert_eq!((url.user.as_str(), url.vhost.as_str(), url.hosts[0].1), ("guest", "/", 5672));
        assert!(!url.password_in_clear() && AmqpUrl::parse("amqp://u:p@broker.example").unwrap().password_in_clear());
    }

    #[test]
    fn mistakes_are_named() {
        for (url, word) in [
            ("localhost", "scheme"),
            ("http://x", "http"),
            ("amqp://x?prefetch=3", "prefetch"),
            ("amqp://x?heartbeat=fast", "heartbeat"),
            ("amqp://x?queue_type=stream", "quorum"),
            ("amqp://x:port", "port"),
            ("amqp://", "host"),
            ("amqp://x/a/b", "%2f"),
            ("amqp://x?ca=/ca.pem", "amqps"),
            ("amqps://x?cert=/c.pem", "together"),
            ("amqp://x?connect_timeout=18446744073709551615s", "connect_timeout"),
            ("amqp://x?connect_timeout=0s", "connect_timeout"),
            ("amqp://x?confirm_timeout=18446744073709551615ms", "ten years"),
            ("amqp://x?confirm_timeout=999ms", "1s"),
            ("amqp://x?heartbeat=5s&name=a&heartbeat=9s", "'heartbeat' is given twice"),
        ] {
            let error = AmqpUrl::parse(url).unwrap_err();
            assert!(error.to_string().contains(word), "{url}: {error}");
        }
    }
}
