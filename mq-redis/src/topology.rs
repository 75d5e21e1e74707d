//! Topics, groups and their arguments: made, or verified, at each connection.

use crate::answer::{as_bytes, as_int, as_text, before, failure, field, id_text, list};
use crate::connect::Link;
use crate::keys::{GroupKeys, meta, stream};
use crate::scripts::{Call, PLACE, REVIVE};
use mq_api::{Error, ErrorKind, Group, Provisioning, ReplayFrom, Result, Retention, Start, Topic};
use redis::Value;
use std::fmt;
use std::time::{Duration, SystemTime};

/// Entries of a topic at most, unless its retention says otherwise. A stream without bound ends in an out-of-memory error for
/// every user of the server.
const MAX_ENTRIES: u64 = 1_000_000;

/// What a topic keeps, as it is noted beside the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// What not every group handled, at most so many entries.
    Handled { max: u64 },
    /// The last entries, or the younger ones.
    Log { max: Option<u64>, age: Option<Duration> },
    /// Somebody else's stream: nothing is removed and nothing refused.
    All,
}

impl Keep {
    fn from(retention: Retention) -> Self {
        match retention {
            Retention::Handled { max } => Self::Handled { max },
            Retention::Log { max, age } => Self::Log { max, age },
            _ => Self::All,
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        match (parts.next()?, parts.next(), parts.next()) {
            ("handled", Some(max), None) => Some(Self::Handled { max: max.parse().ok()? }),
            ("log", Some(max), Some(age)) => {
                Some(Self::Log { max: max.parse().ok(), age: age.parse().ok().map(Duration::from_millis) })
            }
            _ => None,
        }
    }

    /// Whether what was handled is still there.
    pub(crate) fn is_log(self) -> bool {
        !matches!(self, Self::Handled { .. })
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Handled { max } => write!(f, "handled:{max}"),
            Self::Log { max, age } => {
                let max = max.map_or(String::new(), |n| n.to_string());
                write!(f, "log:{max}:{}", age.map_or(String::new(), |a| a.as_millis().to_string()))
            }
            Self::All => f.write_str("all"),
        }
    }
}

fn topology(text: String) -> Error {
    Error::new(ErrorKind::Topology, text)
}

/// What is known of a topic.
pub(crate) struct Known {
    pub(crate) keep: Keep,
    pub(crate) exists: bool,
}

/// Entries counted one by one, from either end, where the server does not know how many there are.
const COUNTED: usize = 10_000;

/// Asks how many entries are ahead of a group, and corrects the server's counter of what it has read, or not.
pub(crate) fn place_of(stream: &str, group: &str, correct: bool) -> Call {
    PLACE.on(&[stream]).arg(group).arg(COUNTED.to_string()).arg(if correct { "1" } else { "0" })
}

/// Looks at a topic without changing it.
pub(crate) async fn look(link: &Link, topic: &Topic) -> Result<Known> {
    let key = stream(topic);
    let mut pipe = redis::pipe();
    pipe.cmd("TYPE").arg(&key).cmd("HGET").arg(meta(&key)).arg("keep");
    let answers = link.query_all(&pipe).await.map_err(|e| failure(e, "looking at the topic"))?;
    let [kind, note]: [Value; 2] = answers.try_into().unwrap_or_default();
    for answer in [&kind, &note] {
        if let Value::ServerError(error) = answer {
            return Err(failure(error.clone().into(), &format!("looking at topic '{topic}'")));
        }
    }
    let exists = match as_bytes(&kind) {
        Some(b"stream") => true,
        Some(b"none") => false,
        other => {
            let kind = String::from_utf8_lossy(other.unwrap_or_default()).into_owned();
            return Err(topology(format!(
                "topic '{topic}': the key '{key}' holds a {kind}, not a stream; use another topic name, or delete the key"
            )));
        }
    };
    let keep = as_text(&note).and_then(Keep::parse);
    Ok(Known { keep: keep.unwrap_or(Keep::All), exists: exists || keep.is_some() })
}

/// Makes or verifies a topic; says what it keeps.
pub(crate) async fn prepare_topic(
    link: &Link,
    topic: &Topic,
    retention: Option<Retention>,
    partitions: Option<u32>,
    provisioning: Provisioning,
) -> Result<Keep> {
    let asked = retention.map(Keep::from);
    if let Some(n) = partitions.filter(|n| *n != 1) {
        return Err(topology(format!("topic '{topic}' is a stream: it has 1 partition, {n} were asked for")));
    }
    let mut known = look(link, topic).await?;
    match provisioning {
        Provisioning::None => return Ok(known.keep),
        Provisioning::Verify if !known.exists => {
            let text = format!("topic '{topic}' does not exist; make it, or use the provisioning `create`");
            return Err(topology(text));
        }
        Provisioning::Verify => {}
        Provisioning::Create if known.keep != Keep::All || (topic.is_native() && asked.is_none()) => {}
        Provisioning::Create => {
            let keep = asked.unwrap_or(Keep::Handled { max: MAX_ENTRIES });
            let note = redis::cmd("HSETNX").arg(meta(&stream(topic))).arg("keep").arg(keep.to_string()).take();
            let made = link.query(&note).await.map_err(|e| failure(e, &format!("making topic '{topic}'")))?;
            if as_int(&made) == Some(1) {
                tracing::warn!(%topic, %keep, "topic made");
            }
            known = look(link, topic).await?;
        }
    }
    match asked {
        Some(asked) if asked != known.keep => Err(topology(format!(
            "topic '{topic}' keeps {}, asked for was {asked}; ask for what it keeps, or delete the topic first",
            known.keep
        ))),
        _ => Ok(known.keep),
    }
}

/// The id after which a new group begins.
pub(crate) fn start_id(start: Start, keep: Keep, topic: &Topic) -> Result<String> {
    let from = match start {
        Start::Oldest => return Ok("0-0".to_owned()),
        Start::Latest => return Ok("$".to_owned()),
        Start::Replay(from) => from,
    };
    if !keep.is_log() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "replay of topic '{topic}' on redis: it removes what all groups handled; make it in log mode \
                 (Retention::Log, by count or age)"
            ),
        ));
    }
    Ok(match from {
        ReplayFrom::Earliest => "0-0".to_owned(),
        ReplayFrom::Time(at) => {
            let ms = at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
            id_text(before((ms, 0)))
        }
        ReplayFrom::Position(position) => id_text(before(position.as_stream_id())),
    })
}

/// What became of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Made {
    /// It was there.
    There,
    /// It is new.
    New,
    /// It had been lost; the stream too, if true.
    Again(bool),
}

/// Makes a group, or makes it again at the lowest id not known settled.
pub(crate) async fn make_group(
    link: &Link,
    keys: &GroupKeys,
    group: &Group,
    start: &str,
    lost: Option<Option<String>>,
) -> Result<Made> {
    let again = if lost.is_some() { "1" } else { "0" };
    let call = REVIVE
        .on(&[&keys.stream, &keys.due, &meta(&keys.stream)])
        .arg(group.as_str())
        .arg(start)
        .arg(again)
        .arg(lost.flatten().unwrap_or_default());
    let answer = call.run(link).await.map_err(|e| failure(e, &format!("making group '{group}'")))?;
    let parts = list(answer);
    let fresh = parts.get(1).and_then(as_int) == Some(1);
    Ok(match parts.first().and_then(as_int) {
        Some(1) => {
            tracing::warn!(topic = %keys.stream, %group, start, "group made");
            Made::New
        }
        Some(2 | 3) => {
            tracing::warn!(topic = %keys.stream, %group, stream_is_new = fresh, "group was gone and is made again");
            Made::Again(fresh)
        }
        _ => Made::There,
    })
}

/// Whether a group exists.
pub(crate) async fn has_group(link: &Link, key: &str, group: &str) -> Result<bool> {
    match link.query(redis::cmd("XINFO").arg("GROUPS").arg(key)).await {
        Ok(found) => Ok(list(found).iter().any(|g| field(g, "name").and_then(as_text) == Some(group))),
        Err(error) if error.code() == Some("ERR") => Ok(false),
        Err(error) => Err(failure(error, "looking for the group")),
    }
}

/// Checks that dead letters can be written, before there is one.
pub(crate) async fn check_dead_letters(link: &Link, keys: &GroupKeys, provisioning: Provisioning) -> Result<()> {
    let doing = format!("checking the dead-letter stream '{}'", keys.dead);
    // Changes nothing, and needs the right to write: a stream that is missing is made by the first dead letter.
    let probe = redis::cmd("XTRIM").arg(&keys.dead).arg("MAXLEN").arg("~").arg(i64::MAX).take();
    link.query(&probe).await.map_err(|e| failure(e, &doing))?;
    let note = meta(&keys.dead);
    match provisioning {
        Provisioning::None => Ok(()),
        Provisioning::Create => {
            // Noted, so that `verify` finds it before there is a dead letter.
            let keep = Keep::Handled { max: MAX_ENTRIES }.to_string();
            let made = redis::cmd("HSETNX").arg(&note).arg("keep").arg(keep).take();
            link.query(&made).await.map(drop).map_err(|e| failure(e, &doing))
        }
        Provisioning::Verify => {
            let found = redis::cmd("EXISTS").arg(&keys.dead).arg(&note).take();
            match as_int(&link.query(&found).await.map_err(|e| failure(e, &doing))?) {
                Some(0) => Err(topology(format!(
                    "the dead-letter stream '{}' does not exist; make it, or use the provisioning `create`",
                    keys.dead
                ))),
                _ => Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Keep, start_id};
    use mq_api::{Position, ReplayFrom, Start};
    use std::time::{Duration, SystemTime};

    #[test]
    fn retention_is_noted_as_text() {
        let log = |max, age| Keep::Log { max, age };
        for keep in [
            Keep::Handled { max: 7 },
            log(Some(3), None),
            log(None, Some(Duration::from_secs(60))),
            log(Some(1), Some(Duration::from_millis(5))),
        ] {
            assert_eq!(Keep::parse(&keep.to_string()), Some(keep));
        }
        assert_eq!(Keep::parse("nonsense"), None);
    }

    #[test]
    fn starts_include_what_they_name() {
        let log = Keep::Log { max: None, age: None };
        let at = |from| start_id(Start::Replay(from), log, &"t".into()).unwrap();
        assert_eq!(at(ReplayFrom::Position(Position::stream_id(5, 3))), "5-2");
        assert_eq!(at(ReplayFrom::Time(SystemTime::UNIX_EPOCH + Duration::from_millis(9))), format!("8-{}", u64::MAX));
        let refused = start_id(Start::Replay(ReplayFrom::Earliest), Keep::Handled { max: 1 }, &"t".into());
        assert!(refused.unwrap_err().to_string().contains("log mode"));
    }
}
