//! Native options: what only RabbitMQ has, by name, refused when unknown.

use crate::topology::Place;
use crate::url::QueueType;
use lapin::types::{AMQPValue, FieldTable, LongString};
use mq_api::{Error, ErrorKind, Result, Retention};
use std::collections::BTreeMap;

const GROUP: &str = "routing-key, headers, headers-match, queue-type, max-priority, message-ttl, max-length, max-length-bytes, max-age, single-active, stream-offset";
const PRODUCER: &str = "routing-key, queue-type";

/// Options of a group's queue.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct GroupOptions {
    routing_keys: Vec<String>,
    headers: Vec<(String, String)>,
    match_any: bool,
    arguments: Vec<(&'static str, AMQPValue)>,
    pub(crate) queue_type: Option<QueueType>,
    /// A stream is read instead of a queue.
    pub(crate) stream: bool,
    /// Where its reader starts.
    offset: Option<AMQPValue>,
}

fn number(name: &str, value: &str) -> Result<i64> {
    value.parse().ok().filter(|n| *n > 0).ok_or_else(|| wrong(name, value, "a positive number"))
}

fn wrong(name: &str, value: &str, wanted: &str) -> Error {
    Error::new(ErrorKind::Config, format!("native option '{name}' is '{value}', but must be {wanted}"))
}

/// `first`, `last`, `next`, an offset, `@` and a time in seconds since 1970, or an age like `30m`.
fn offset(name: &str, value: &str) -> Result<AMQPValue> {
    let wanted = "first, last, next, an offset like 17, a time like @1700000000, or an age like 30m";
    if matches!(value, "first" | "last" | "next") {
        return Ok(AMQPValue::LongString(LongString::from(value)));
    }
    if let Some(seconds) = value.strip_prefix('@') {
        return seconds.parse().map(AMQPValue::Timestamp).map_err(|_| wrong(name, value, wanted));
    }
    match value.parse::<i64>() {
        Ok(at) if at >= 0 => Ok(AMQPValue::LongLongInt(at)),
        _ => age(name, value)
            .map(|text| AMQPValue::LongString(LongString::from(text)))
            .map_err(|_| wrong(name, value, wanted)),
    }
}

/// An age as RabbitMQ writes it: a number and Y, M, D, h, m or s.
fn age<'a>(name: &str, value: &'a str) -> Result<&'a str> {
    let (number, unit) = value.split_at_checked(value.len().saturating_sub(1)).unwrap_or((value, ""));
    let fits = matches!(unit, "Y" | "M" | "D" | "h" | "m" | "s") && number.parse::<u32>().is_ok_and(|n| n > 0);
    if fits { Ok(value) } else { Err(wrong(name, value, "an age like 30m, 12h or 7D")) }
}

fn queue_type(name: &str, value: &str) -> Result<QueueType> {
    match value {
        "quorum" => Ok(QueueType::Quorum),
        "classic" => Ok(QueueType::Classic),
        _ => Err(wrong(name, value, "'quorum', 'classic' or 'stream'")),
    }
}

impl GroupOptions {
    /// Reads those of a subscription.
    pub(crate) fn read(native: &BTreeMap<String, String>) -> Result<Self> {
        let mut options = Self::default();
        for (name, value) in native {
            match name.as_str() {
                "routing-key" => options.routing_keys = value.split(',').map(|k| k.trim().to_owned()).collect(),
                "headers" => {
                    for pair in value.split(',') {
                        let pair = pair.split_once('=').filter(|(k, _)| k.trim().len() <= 255);
                        let (k, v) = pair.ok_or_else(|| wrong(name, value, "pairs like a=1,b=2"))?;
                        options.headers.push((k.trim().to_owned(), v.trim().to_owned()));
                    }
                }
                "headers-match" => {
                    options.match_any = match value.as_str() {
                        "any" => true,
                        "all" => false,
                        _ => return Err(wrong(name, value, "'any' or 'all'")),
                    }
                }
                "queue-type" if value == "stream" => options.stream = true,
                "queue-type" => options.queue_type = Some(queue_type(name, value)?),
                "stream-offset" => options.offset = Some(offset(name, value)?),
                "max-age" => {
                    options.arguments.push(("x-max-age", AMQPValue::LongString(LongString::from(age(name, value)?))));
                }
                "max-priority" => {
                    let n = number(name, value)?;
                    if n > 255 {
                        return Err(wrong(name, value, "between 1 and 255"));
                    }
                    options.arguments.push(("x-max-priority", AMQPValue::LongInt(n as i32)));
                }
                "message-ttl" => options.argument("x-message-ttl", number(name, value)?),
                "max-length" => options.argument("x-max-length", number(name, value)?),
                "max-length-bytes" => options.argument("x-max-length-bytes", number(name, value)?),
                "single-active" => {
                    let on = value.parse().map_err(|_| wrong(name, value, "'true' or 'false'"))?;
                    if on {
                        options.arguments.push(("x-single-active-consumer", AMQPValue::Boolean(true)));
                    }
                }
                other => {
                    let text = format!("native option '{other}' is not known to RabbitMQ; allowed are {GROUP}");
                    return Err(Error::new(ErrorKind::Config, text));
                }
            }
        }
        options.consistent()?;
        Ok(options)
    }

    /// None, for a queue or a stream.
    pub(crate) fn for_stream(stream: bool) -> Self {
        Self { stream, ..Self::default() }
    }

    /// What only streams have needs one, and streams have nothing of what changes when a queue hands out.
    fn consistent(&self) -> Result<()> {
        if self.match_any && self.headers.is_empty() {
            return Err(Error::new(ErrorKind::Config, "native option 'headers-match' needs 'headers'"));
        }
        let has = |names: &[&str]| self.arguments.iter().map(|(name, _)| *name).find(|name| names.contains(name));
        let wrong = match self.stream {
            true => has(&["x-max-priority", "x-message-ttl", "x-max-length", "x-single-active-consumer"]),
            false => self.offset.as_ref().map(|_| "stream-offset").or(has(&["x-max-age"])),
        };
        let Some(name) = wrong else { return Ok(()) };
        let name = name.trim_start_matches("x-");
        let which = if self.stream { "is not for streams" } else { "needs queue-type=stream" };
        Err(Error::new(ErrorKind::Config, format!("native option '{name}' {which}")))
    }

    /// What means nothing at this place is refused, or the program would get something else than it asks for.
    pub(crate) fn fit(&self, place: &Place) -> Result<()> {
        let refused = |name: &str, why: &str| {
            Err(Error::new(
                ErrorKind::Config,
                format!("native option '{name}' means nothing for '{}': {why}", place.name()),
            ))
        };
        match place {
            Place::Topic(_) if !self.headers.is_empty() => refused(
                "headers",
                "topics are exchanges of type topic, which do not look at headers; use native(\"exchange://…\")",
            ),
            Place::Topic(_) | Place::Exchange(_) => Ok(()),
            Place::Queue(_) | Place::DeadLetters(_) => {
                let name = match self.arguments.first() {
                    _ if !self.routing_keys.is_empty() => "routing-key",
                    _ if !self.headers.is_empty() => "headers",
                    Some((name, _)) => name.trim_start_matches("x-"),
                    None => return Ok(()),
                };
                refused(name, "that queue is there already, and is neither made nor bound for this")
            }
        }
    }

    /// The argument of a stream's reader: what comes from now on, unless it says otherwise.
    pub(crate) fn offset(&self) -> AMQPValue {
        self.offset.clone().unwrap_or_else(|| AMQPValue::LongString(LongString::from("next")))
    }

    /// Whether a reader starts at the end of a stream.
    pub(crate) fn is_from_now(&self) -> bool {
        let end =
            |at: &AMQPValue| matches!(at, AMQPValue::LongString(word) if matches!(word.as_bytes(), b"next" | b"last"));
        self.offset.as_ref().is_none_or(end)
    }

    fn argument(&mut self, name: &'static str, value: i64) {
        self.arguments.push((name, AMQPValue::LongLongInt(value)));
    }

    /// The retention of a topic: at most so many wait for each group, then sends are refused. A stream is a log by age.
    pub(crate) fn retain(mut self, retention: Option<Retention>) -> Result<Self> {
        match retention {
            None => {}
            Some(Retention::Log { max: None, age: Some(age) }) if self.stream => {
                let text = format!("{}s", age.as_secs().max(1));
                self.arguments.push(("x-max-age", AMQPValue::LongString(LongString::from(text))));
            }
            Some(_) if self.stream => {
                let text =
                    "a stream keeps by age or bytes: use Retention::log_for, or the native option max-length-bytes";
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            Some(Retention::Handled { max }) => {
                self.argument("x-max-length", i64::try_from(max).unwrap_or(i64::MAX));
                self.arguments.push(("x-overflow", AMQPValue::LongString(LongString::from("reject-publish"))));
            }
            Some(_) => {
                let text =
                    "amqp cannot do log retention: a queue forgets what was handled; use streams, Kafka or Redis";
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
        }
        Ok(self)
    }

    pub(crate) fn add_to(&self, table: &mut FieldTable) {
        for (name, value) in &self.arguments {
            table.insert((*name).into(), value.clone());
        }
    }

    /// Routing key and arguments of each binding.
    pub(crate) fn bindings(&self) -> Vec<(String, FieldTable)> {
        let mut table = FieldTable::default();
        if !self.headers.is_empty() {
            let how = if self.match_any { "any" } else { "all" };
            table.insert("x-match".into(), AMQPValue::LongString(LongString::from(how)));
            for (name, value) in &self.headers {
                if let Ok(name) = lapin::types::ShortString::try_new(name.as_str()) {
                    table.insert(name, AMQPValue::LongString(LongString::from(value.as_str())));
                }
            }
        }
        match self.routing_keys.is_empty() {
            true => vec![("#".to_owned(), table)],
            false => self.routing_keys.iter().map(|key| (key.clone(), table.clone())).collect(),
        }
    }
}

/// Options of a producer.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ProducerOptions {
    /// Of messages that name none themselves.
    pub(crate) routing_key: Option<String>,
    /// Of the groups it provisions.
    pub(crate) queue_type: Option<QueueType>,
    /// It makes the topic's stream, so that nothing sent is missing there.
    pub(crate) stream: bool,
}

impl ProducerOptions {
    /// Reads those of a producer.
    pub(crate) fn read(native: &BTreeMap<String, String>) -> Result<Self> {
        let mut options = Self::default();
        for (name, value) in native {
            match name.as_str() {
                "routing-key" => options.routing_key = Some(value.clone()),
                "queue-type" if value == "stream" => options.stream = true,
                "queue-type" => options.queue_type = Some(queue_type(name, value)?),
                other => {
                    let text = format!("native option '{other}' is not known to RabbitMQ; allowed are {PRODUCER}");
                    return Err(Error::new(ErrorKind::Config, text));
                }
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::GroupOptions;
    use lapin::types::{AMQPValue, LongString};
    use std::collections::BTreeMap;

    #[test]
    fn unknown_and_wrong_options_are_named() {
        for (name, value) in [("prefetch", "1"), ("max-priority", "many"), ("max-priority", "300"), ("headers", "a")] {
            let error = GroupOptions::read(&BTreeMap::from([(name.into(), value.into())])).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
        let keys = BTreeMap::from([("routing-key".to_owned(), "a.*, b.#".to_owned())]);
        let options = GroupOptions::read(&keys).unwrap();
        assert_eq!(options.bindings().into_iter().map(|b| b.0).collect::<Vec<_>>(), ["a.*", "b.#"]);
    }

    fn read(options: &[(&str, &str)]) -> Result<GroupOptions, String> {
        let options = options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        GroupOptions::read(&options).map_err(|e| e.to_string())
    }

    #[test]
    fn a_stream_starts_where_it_is_told_and_mixes_with_nothing_else() {
        let offset = |text| read(&[("queue-type", "stream"), ("stream-offset", text)]).map(|o| o.offset());
        let text = |text: &str| AMQPValue::LongString(LongString::from(text));
        assert_eq!(read(&[("queue-type", "stream")]).unwrap().offset(), text("next"));
        assert_eq!(offset("first"), Ok(text("first")));
        assert!(read(&[("queue-type", "stream")]).unwrap().is_from_now());
        assert!(!read(&[("queue-type", "stream"), ("stream-offset", "first")]).unwrap().is_from_now());
        assert_eq!(offset("17"), Ok(AMQPValue::LongLongInt(17)));
        assert_eq!(offset("@1700000000"), Ok(AMQPValue::Timestamp(1_700_000_000)));
        assert_eq!(offset("30m"), Ok(text("30m")));
        for wrong in ["soon", "", "-1", "0m", "m", "@noon"] {
            assert!(offset(wrong).unwrap_err().contains("stream-offset"), "{wrong}");
        }
        assert!(read(&[("stream-offset", "first")]).unwrap_err().contains("queue-type=stream"));
        assert!(read(&[("queue-type", "stream"), ("max-priority", "3")]).unwrap_err().contains("max-priority"));
        assert!(read(&[("max-age", "1h")]).unwrap_err().contains("queue-type=stream"));
    }
}
