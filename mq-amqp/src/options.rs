//! Native options: what only RabbitMQ has, by name, refused when unknown.

use crate::url::QueueType;
use lapin::types::{AMQPValue, FieldTable, LongString};
use mq_api::{Error, ErrorKind, Result, Retention};
use std::collections::BTreeMap;

const GROUP: &str = "routing-key, headers, headers-match, queue-type, max-priority, message-ttl, max-length, max-length-bytes, single-active";
const PRODUCER: &str = "routing-key, queue-type";

/// Options of a group's queue.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct GroupOptions {
    routing_keys: Vec<String>,
    headers: Vec<(String, String)>,
    match_any: bool,
    arguments: Vec<(&'static str, AMQPValue)>,
    pub(crate) queue_type: Option<QueueType>,
}

fn number(name: &str, value: &str) -> Result<i64> {
    value.parse().ok().filter(|n| *n > 0).ok_or_else(|| wrong(name, value, "a positive number"))
}

fn wrong(name: &str, value: &str, wanted: &str) -> Error {
    Error::new(ErrorKind::Config, format!("native option '{name}' is '{value}', but must be {wanted}"))
}

fn queue_type(name: &str, value: &str) -> Result<QueueType> {
    match value {
        "quorum" => Ok(QueueType::Quorum),
        "classic" => Ok(QueueType::Classic),
        _ => Err(wrong(name, value, "'quorum' or 'classic'")),
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
                        let (k, v) = pair.split_once('=').ok_or_else(|| wrong(name, value, "pairs like a=1,b=2"))?;
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
                "queue-type" => options.queue_type = Some(queue_type(name, value)?),
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
        Ok(options)
    }

    fn argument(&mut self, name: &'static str, value: i64) {
        self.arguments.push((name, AMQPValue::LongLongInt(value)));
    }

    /// The retention of a topic: at most so many wait for each group, then sends are refused.
    pub(crate) fn retain(mut self, retention: Option<Retention>) -> Result<Self> {
        match retention {
            None => {}
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
}

impl ProducerOptions {
    /// Reads those of a producer.
    pub(crate) fn read(native: &BTreeMap<String, String>) -> Result<Self> {
        let mut options = Self::default();
        for (name, value) in native {
            match name.as_str() {
                "routing-key" => options.routing_key = Some(value.clone()),
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
}
