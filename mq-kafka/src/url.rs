//! The connection URL: strict parsing, and what of librdkafka may be passed through.

use mq_api::{Error, ErrorKind, LONGEST, Result};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

/// Prefix of parameters that are passed to librdkafka as they are.
pub(crate) const NATIVE: &str = "librdkafka.";

/// What `connect` was given.
#[derive(Clone)]
pub(crate) struct Settings {
    /// `host:port`, separated by commas.
    pub(crate) brokers: String,
    pub(crate) tls: bool,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) mechanism: String,
    pub(crate) connect_timeout: Duration,
    /// Partitions of topics that have to be made.
    pub(crate) partitions: u32,
    /// Copies of topics that have to be made; -1 = the cluster's default.
    pub(crate) replication: i32,
    /// Shortest session that the cluster allows (`group.min.session.timeout.ms`), if the URL says so.
    pub(crate) min_session: Option<Duration>,
    /// The same, as the brokers told it.
    pub(crate) told_session: OnceLock<Duration>,
    /// Properties of librdkafka made from the other parameters, and those passed through.
    pub(crate) native: BTreeMap<String, String>,
}

/// librdkafka's own bounds.
const LONGEST_SESSION: Duration = Duration::from_secs(3600);
const MOST_PARTITIONS: u32 = 100_000;

const ALLOWED: &str = "connect_timeout, partitions, replication, min_session, sasl, ca, cert, key, key_password, \
    client_id, rack, instance_id, group_protocol, compression, address_family, and librdkafka.<property>";

/// Properties that keep a promise of the contract, and what they would break.
const REFUSED: &[(&str, &str)] = &[
    ("bootstrap.servers", "the hosts of the URL are used"),
    ("metadata.broker.list", "the hosts of the URL are used"),
    ("group.id", "the group of the subscription is used"),
    ("enable.auto.commit", "a message would leave the group without an ack"),
    ("auto.commit.enable", "a message would leave the group without an ack"),
    ("enable.auto.offset.store", "a message would leave the group without an ack"),
    ("auto.offset.reset", "the start of the subscription is used"),
    ("partition.assignment.strategy", "partitions move cooperatively, one by one"),
    ("enable.idempotence", "retries would duplicate and reorder"),
    ("acks", "Ok would no longer mean that the broker has the message"),
    ("request.required.acks", "Ok would no longer mean that the broker has the message"),
    ("enable.gapless.guarantee", "one failed message would stop the producer"),
    ("partitioner", "keys would go to other partitions than those of other clients of the topic"),
    ("enable.partition.eof", "it is no message"),
    ("transactional.id", "transactions are not built"),
    ("delivery.report.only.error", "a send that is stored would never be answered"),
    ("queuing.strategy", "sends of one key would overtake each other"),
    ("api.version.request", "the protocol would be too old for headers, and so for ids"),
    ("message.max.bytes", "`max_message` of the producer is used"),
    ("retries", "`retry_for` of the producer is used"),
    ("message.send.max.retries", "`retry_for` of the producer is used"),
    ("message.timeout.ms", "`retry_for` of the producer is used"),
    ("delivery.timeout.ms", "`retry_for` of the producer is used"),
    ("session.timeout.ms", "the lease of the subscription is used"),
    ("max.poll.interval.ms", "it is the longest time that a partition may take to move"),
    ("test.mock.num.brokers", "it replaces the brokers of the URL"),
    ("allow.auto.create.topics", "topics are made by provisioning, with the partitions asked for"),
    ("isolation.level", "messages of aborted transactions would be delivered"),
];

/// Whether a property of librdkafka may be passed through.
pub(crate) fn check_native(name: &str) -> Result<()> {
    match REFUSED.iter().find(|(refused, _)| *refused == name) {
        Some((_, why)) => {
            Err(bad(format!("librdkafka property '{name}' cannot be set, it would break the contract: {why}")))
        }
        None => Ok(()),
    }
}

/// The native options of a subscription or producer.
pub(crate) fn native_options(options: &BTreeMap<String, String>) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for (name, value) in options {
        let Some(property) = name.strip_prefix(NATIVE) else {
            return Err(bad(format!("native option '{name}' is not known; Kafka takes librdkafka.<property>")));
        };
        check_native(property)?;
        found.push((property.to_owned(), value.clone()));
    }
    Ok(found)
}

fn bad(text: String) -> Error {
    Error::new(ErrorKind::Config, text)
}

fn duration(name: &str, text: &str, longest: Duration) -> Result<Duration> {
    let wrong = || bad(format!("URL parameter {name}={text} is not a duration; write 500ms, 30s or 2m"));
    let time = mq_core::written_time(text).ok_or_else(wrong)?;
    if time > longest {
        Err(bad(format!("URL parameter {name}={text} is too long; at most {longest:?}")))
    } else {
        Ok(time)
    }
}

/// Whether a topic can have so many partitions.
pub(crate) fn check_partitions(n: u32) -> Result<()> {
    match n > MOST_PARTITIONS {
        true => Err(bad(format!("{n} partitions are asked for, and librdkafka makes at most {MOST_PARTITIONS}"))),
        false => Ok(()),
    }
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T> {
    text.parse().map_err(|_| bad(format!("URL parameter {name}={text} is not a number that fits")))
}

fn one_of(name: &str, text: &str, allowed: &[&str]) -> Result<()> {
    match allowed.contains(&text) {
        true => Ok(()),
        false => Err(bad(format!("URL parameter {name}={text} is not known; allowed: {}", allowed.join(", ")))),
    }
}

/// Undoes %-escapes of a user name or password, where a plus is a plus.
fn unescape(text: &str) -> String {
    let pair = format!("v={}", text.replace('+', "%2B").replace('&', "%26"));
    url::form_urlencoded::parse(pair.as_bytes()).next().map(|(_, v)| v.into_owned()).unwrap_or_default()
}

fn broker(text: &str) -> Result<String> {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !text.ends_with(']') => (host, port),
        _ => (text, "9092"),
    };
    if host.is_empty() || (host.contains(':') && !host.starts_with('[')) {
        return Err(bad(format!("'{text}' in the URL is not a host; write host:port, an IPv6 address in brackets")));
    }
    match port.parse::<u16>() {
        Ok(p) if p > 0 => Ok(format!("{host}:{port}")),
        _ => Err(bad(format!("'{port}' in the URL is not a port"))),
    }
}

impl Settings {
    /// Reads `kafka://[user:password@]host[:port][,host[:port]…][?parameters]`; `kafkas://` is TLS.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let (tls, rest) = match (text.strip_prefix("kafka://"), text.strip_prefix("kafkas://")) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => return Err(bad("a Kafka URL starts with kafka:// or, for TLS, kafkas://".to_owned())),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (login, hosts) = match rest.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, rest),
        };
        let hosts = hosts.strip_suffix('/').unwrap_or(hosts);
        if hosts.contains('/') {
            return Err(bad("a Kafka URL has no path; topics are named where they are used".to_owned()));
        }
        let brokers = hosts.split(',').map(broker).collect::<Result<Vec<_>>>()?.join(",");
        let (user, password) = match login.map(|l| l.split_once(':').unwrap_or((l, ""))) {
            Some((user, password)) => (Some(unescape(user)), Some(unescape(password))),
            None => (None, None),
        };
        let mut settings = Self {
            brokers,
            tls,
            user,
            password,
            mechanism: "PLAIN".to_owned(),
            // A broker that starts beside the program is up by then.
            connect_timeout: Duration::from_secs(30),
            // Adding partitions later moves keys, so there are enough for a dozen members from the start.
            partitions: 12,
            // The cluster's own default: it knows how many brokers it has.
            replication: -1,
            min_session: None,
            told_session: OnceLock::new(),
            native: BTreeMap::new(),
        };
        let mut given = HashSet::new();
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
            if !given.insert(name.to_string()) {
                return Err(bad(format!("URL parameter '{name}' is given twice")));
            }
            settings.set(&name, &value)?;
        }
        if settings.user.is_none() && settings.native.contains_key("sasl.mechanisms") {
            return Err(bad("the URL has sasl= and no user; write kafka://user:password@host".to_owned()));
        }
        Ok(settings)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let mut native = |property: &str| self.native.insert(property.to_owned(), value.to_owned());
        match name {
            "connect_timeout" => self.connect_timeout = duration(name, value, LONGEST)?,
            "partitions" => {
                self.partitions = number(name, value)?;
                if self.partitions == 0 {
                    return Err(bad("URL parameter partitions=0 makes no topic; use 1 or more".to_owned()));
                }
                check_partitions(self.partitions)?;
            }
            "replication" => {
                self.replication = number(name, value)?;
                if self.replication < 1 && self.replication != -1 {
                    let text = format!("URL parameter replication={value} is no number of copies; 1 or more, or -1");
                    return Err(bad(text));
                }
            }
            "min_session" => self.min_session = Some(duration(name, value, LONGEST_SESSION)?),
            "sasl" => {
                one_of(name, value, &["plain", "scram-sha-256", "scram-sha-512", "oauthbearer"])?;
                self.mechanism = value.to_ascii_uppercase();
                self.native.insert("sasl.mechanisms".to_owned(), self.mechanism.clone());
            }
            "ca" => drop(native("ssl.ca.location")),
            "cert" => drop(native("ssl.certificate.location")),
            "key" => drop(native("ssl.key.location")),
            "key_password" => drop(native("ssl.key.password")),
            "client_id" => drop(native("client.id")),
            "rack" => drop(native("client.rack")),
            "instance_id" => drop(native("group.instance.id")),
            "group_protocol" => {
                one_of(name, value, &["classic", "consumer"])?;
                native("group.protocol");
            }
            "compression" => {
                one_of(name, value, &["none", "lz4", "snappy", "gzip", "zstd"])?;
                native("compression.type");
            }
            "address_family" => {
                one_of(name, value, &["any", "v4", "v6"])?;
                native("broker.address.family");
            }
            other => match other.strip_prefix(NATIVE) {
                Some(property) => {
                    check_native(property)?;
                    native(property);
                }
                None => return Err(bad(format!("URL parameter '{other}' is not known; allowed: {ALLOWED}"))),
            },
        }
        Ok(())
    }

    /// Shortest session that the cluster allows: by the URL, else as the brokers told, else their own default.
    pub(crate) fn shortest_session(&self) -> Duration {
        // After a cut the coordinator is looked for anew, which takes a second: shorter sessions would be lost by it.
        let told = self.told_session.get().map(|told| Duration::from_secs(2).max(*told));
        self.min_session.or(told).unwrap_or(Duration::from_secs(6))
    }

    /// Whether a password goes in clear to a host that is not this one.
    pub(crate) fn exposes_password(&self) -> bool {
        let local = |b: &str| b.starts_with("localhost:") || b.starts_with("127.") || b.starts_with("[::1]");
        !self.tls && self.mechanism == "PLAIN" && self.user.is_some() && !self.brokers.split(',').all(local)
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("brokers", &self.brokers)
            .field("tls", &self.tls)
            .field("login", &self.user.is_some())
            .field("properties", &self.native.keys().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{Settings, native_options};
    use std::time::Duration;

    #[test]
    fn hosts_logins_and_parameters() {
        let s = Settings::parse("kafkas://al%40ice:p%3Aw+d@a:1,b,[::1]:3?sasl=scram-sha-256&connect_timeout=500ms")
            .unwrap();
        assert_eq!(s.brokers, "a:1,b:9092,[::1]:3");
        assert_eq!((s.user.as_deref(), s.password.as_deref()), (Some("al@ice"), Some("p:w+d")));
        assert_eq!((s.tls, s.mechanism.as_str()), (true, "SCRAM-SHA-256"));
        assert_eq!(s.connect_timeout, Duration::from_millis(500));
        assert_eq!((s.partitions, s.replication), (12, -1));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (url, word) in [
            ("amqp://x", "kafka://"),
            ("kafka://h?colour=red", "colour"),
            ("kafka://h?partitions=1&connect_timeout=1s&partitions=2", "'partitions' is given twice"),
            ("kafka://h?connect_timeout=30", "connect_timeout"),
            ("kafka://h?partitions=0", "partitions"),
            ("kafka://h?partitions=x", "partitions"),
            ("kafka://h?partitions=4294967295", "partitions"),
            ("kafka://h?replication=0", "replication"),
            ("kafka://h?replication=-2", "replication"),
            ("kafka://h?connect_timeout=18446744073709551615m", "connect_timeout"),
            ("kafka://h?min_session=61m", "min_session"),
            ("kafka://h?compression=rar", "compression"),
            ("kafka://h?librdkafka.acks=1", "acks"),
            ("kafka://h?librdkafka.enable.auto.commit=true", "enable.auto.commit"),
            ("kafka://h?sasl=plain", "user"),
            ("kafka://h:0", "port"),
            ("kafka://", "host"),
            ("kafka://h/topic", "path"),
        ] {
            let error = Settings::parse(url).unwrap_err();
            assert!(error.to_string().contains(word), "{url}: {error}");
        }
        assert!(Settings::parse("kafka://h?librdkafka.socket.keepalive.enable=true").is_ok());
    }

    #[test]
    fn secrets_do_not_show() {
        let s = Settings::parse("kafkas://u:hunter2@h?key_password=swordfish").unwrap();
        let shown = format!("{s:?}");
        assert!(!shown.contains("hunter2") && !shown.contains("swordfish"), "{shown}");
        assert!(!s.exposes_password());
        assert!(Settings::parse("kafka://u:p@example.org").unwrap().exposes_password());
        assert!(!Settings::parse("kafka://u:p@127.0.0.1:9").unwrap().exposes_password());
    }

    #[test]
    fn options_of_subscriptions_are_checked_too() {
        let options = |name: &str| [(name.to_owned(), "1".to_owned())].into();
        assert!(native_options(&options("librdkafka.fetch.min.bytes")).is_ok());
        assert!(native_options(&options("librdkafka.acks")).is_err());
        assert!(native_options(&options("x-max-length")).is_err());
    }
}
