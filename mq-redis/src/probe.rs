//! What the server is: asked of the server itself, by command. No behaviour depends on a version's text.

use crate::answer::{as_text, failure, field};
use crate::conn::Conn;
use crate::url::{Options, Transport};
use mq_api::{Capabilities, Durability, Error, ErrorKind, Result};
use redis::Value;

/// What was found out at a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Name and version, as the server gives them.
    pub(crate) server: Option<String>,
    /// Whether it is a node of a Cluster.
    pub(crate) cluster: bool,
    /// Whether there is an append-only file; `None` if it did not say.
    pub(crate) persists: Option<bool>,
    /// Whether that file is flushed before each answer, always.
    pub(crate) flushes: bool,
    /// The server's run: another one after a restart.
    pub(crate) run: Option<String>,
    /// Whether its count of what a group has read can be trusted: it does not come from a file of commands, and not from another
    /// server, neither of which has it in Redis 7.0.
    pub(crate) counts: bool,
    /// What happens at the memory limit.
    pub(crate) eviction: Option<String>,
}

fn line<'i>(info: &'i str, name: &str) -> Option<&'i str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Asks the server what it is.
pub(crate) async fn probe(conn: &Conn) -> Result<Facts> {
    let mut pipe = redis::pipe();
    pipe.cmd("INFO").cmd("CONFIG").arg("GET").arg("appendfsync").arg("no-appendfsync-on-rewrite");
    // `EXPIRETIME` came with Redis 7.0, as did the stream commands' behaviour that this crate relies on.
    pipe.cmd("CONFIG").arg("GET").arg("maxmemory-policy").cmd("COMMAND").arg("INFO").arg("EXPIRETIME");
    let doing = "asking the server what it is";
    let answers = conn.send_packed_commands(&pipe).await.map_err(|e| failure(e, doing))?;
    let mut answers = answers.into_iter();
    let mut next = || answers.next().unwrap_or_default();
    let info = next();
    if let Value::ServerError(error) = &info
        && matches!(error.code(), "NOAUTH" | "LOADING" | "MASTERDOWN")
    {
        return Err(failure(error.clone().into(), doing));
    }
    let info = as_text(&info).unwrap_or_default();
    let (flush, policy, known) = (next(), next(), next());
    if let Value::Array(found) = &known
        && matches!(found.first(), Some(Value::Nil))
    {
        let text = "this server lacks commands of Redis 7.0; use Redis 7.0 or later, or Valkey";
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let setting = |reply: &Value, name: &str| field(reply, name).and_then(as_text).map(str::to_owned);
    let persists = line(info, "aof_enabled").map(|v| v == "1");
    // `no-appendfsync-on-rewrite` makes `always` mean never for as long as the file is rewritten.
    let at_times = setting(&flush, "no-appendfsync-on-rewrite").as_deref() == Some("yes");
    let always = setting(&flush, "appendfsync").as_deref() == Some("always");
    let flushes = persists == Some(true) && always && !at_times;
    let server = match (line(info, "valkey_version"), line(info, "redis_version")) {
        (Some(version), _) => Some(format!("Valkey {version}")),
        (None, Some(version)) => Some(format!("Redis {version}")),
        _ => None,
    };
    Ok(Facts {
        server,
        cluster: line(info, "cluster_enabled") == Some("1"),
        persists,
        flushes,
        run: line(info, "run_id").map(str::to_owned),
        counts: persists == Some(false)
            && line(info, "role") == Some("master")
            && line(info, "second_repl_offset") == Some("-1"),
        eviction: setting(&policy, "maxmemory-policy"),
    })
}

/// The capabilities of the connection.
pub(crate) fn capabilities(options: &Options, facts: Option<&Facts>) -> Capabilities {
    let mut all = match options.transport {
        Transport::Streams => Capabilities::redis(),
        Transport::PubSub => Capabilities::redis_pubsub(),
    };
    all.server = facts.and_then(|f| f.server.clone());
    if options.transport == Transport::Streams {
        let alone = if facts.is_some_and(|f| f.flushes) { Durability::Disk } else { Durability::Memory };
        all.settle_level = alone;
        all.send_level = if options.wait > 0 { Durability::Replicated } else { alone };
    }
    all
}

#[cfg(test)]
mod tests {
    use super::capabilities;
    use crate::url::Options;
    use mq_api::Feature;
    use std::fmt::Write as _;

    /// The table of the crate's documentation.
    fn table() -> String {
        let of = |url: &str| capabilities(&Options::parse(url).unwrap(), None);
        let (streams, pubsub) = (of("redis://h"), of("redis+pubsub://h"));
        let mut text = "| feature | Streams | Pub/Sub |\n|---|---|---|\n".to_owned();
        for feature in Feature::ALL.iter().copied() {
            let other = pubsub.support(feature).to_string();
            let other = other.split(':').next().unwrap_or_default();
            writeln!(text, "| {feature} | {} | {other} |", streams.support(feature)).unwrap();
        }
        text
    }

    /// `WRITE=1 cargo test -p mq-redis --lib` makes it again.
    #[test]
    fn the_documented_capabilities_are_the_stated_ones() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/capabilities.md");
        if std::env::var_os("WRITE").is_some() {
            std::fs::write(path, table()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).unwrap_or_default(), table());
    }
}
