//! Topics that have to exist: what they have to be, and how they are made or verified.

use super::{Cluster, REQUEST, options, patient};
use crate::client;
use crate::fault;
use crate::url::{Settings, check_partitions};
use mq_api::{Error, ErrorKind, Provisioning, Result, Retention};
use rdkafka::admin::{NewTopic, TopicReplication};
use rdkafka::error::RDKafkaErrorCode as Code;
use std::time::{Duration, Instant};

/// Dead letters are kept this long: two weeks, a holiday.
const KEPT: &str = "1209600000";
/// Largest record batch of a topic we make: the largest message of the contract, its envelope and room. The brokers' default
/// is 1,048,588.
const MAX_BATCH: usize = 1_200_000;

/// Retries and dead letters are as large as what their topic takes, whatever that is; just below what a client takes in one
/// answer (`receive.message.max.bytes`), and a broker in one request (`socket.request.max.bytes`).
pub(crate) const LARGEST: usize = 99_000_000;

/// A topic that must exist.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) name: String,
    /// This count and no other.
    pub(crate) asked: Option<u32>,
    /// This many if it has to be made and none was asked for.
    pub(crate) otherwise: u32,
    pub(crate) config: Vec<(&'static str, String)>,
}

impl Wanted {
    /// A topic of the program's.
    pub(crate) fn topic(
        settings: &Settings,
        name: &str,
        asked: Option<u32>,
        retention: Option<Retention>,
        max_message: usize,
    ) -> Result<Self> {
        asked.map_or(Ok(()), check_partitions)?;
        let largest = max_message.saturating_add(client::ENVELOPE).max(MAX_BATCH);
        let mut config = vec![("max.message.bytes", largest.to_string())];
        let refuse = |what: &str, instead: &str| Err(Error::unsupported("kafka", what, instead));
        match retention {
            None => {}
            Some(Retention::Log { max: None, age: Some(age) }) => {
                config.push(("retention.ms", age.as_millis().to_string()));
            }
            Some(Retention::Log { max: None, age: None }) => config.push(("retention.ms", "-1".to_owned())),
            Some(Retention::Log { max: Some(_), .. }) => {
                return refuse(
                    "retention by number of messages",
                    "a Kafka topic keeps by age; use Retention::Log { age }",
                );
            }
            Some(_) => {
                return refuse(
                    "retention of what is unhandled only",
                    "a Kafka topic is a log; use Retention::Log { age }",
                );
            }
        }
        Ok(Self { name: name.to_owned(), asked, otherwise: settings.partitions, config })
    }

    /// Dead letters: one partition, so that they list in order.
    pub(crate) fn letters(name: String) -> Self {
        let config = vec![
            ("cleanup.policy", "delete".to_owned()),
            ("retention.ms", KEPT.to_owned()),
            // Whatever its topic took, which is its own affair.
            ("max.message.bytes", LARGEST.to_string()),
        ];
        Self { name, asked: None, otherwise: 1, config }
    }

    /// Retries: a few partitions, so that members share them. `for_good`: whatever it takes is kept.
    pub(crate) fn retries(name: String, for_good: bool) -> Self {
        let mut wanted = Self { otherwise: 4, ..Self::letters(name) };
        if for_good {
            wanted.config.retain(|(name, _)| *name != "retention.ms");
            wanted.config.push(("retention.ms", "-1".to_owned()));
        }
        wanted
    }
}

impl Cluster {
    /// Makes or verifies topics; their partition counts, in order (0 where nothing was looked at). Blocks.
    pub(crate) fn provision(&self, wanted: &[Wanted], how: Provisioning) -> Result<Vec<u32>> {
        if how == Provisioning::None {
            return Ok(vec![0; wanted.len()]);
        }
        let mut counts = Vec::with_capacity(wanted.len());
        let mut missing = Vec::new();
        for topic in wanted {
            match self.partitions(&topic.name)? {
                Some(n) => {
                    check_count(topic, n)?;
                    counts.push(n);
                }
                None if how == Provisioning::Verify => {
                    let text = format!("topic '{}' does not exist; create it, or use Provisioning::Create", topic.name);
                    return Err(Error::new(ErrorKind::Topology, text));
                }
                None => {
                    counts.push(topic.asked.unwrap_or(topic.otherwise));
                    missing.push(topic);
                }
            }
        }
        if !missing.is_empty() {
            patient(|| self.create(&missing))?;
            for topic in missing {
                self.await_topic(topic)?;
            }
        }
        Ok(counts)
    }

    fn create(&self, missing: &[&Wanted]) -> Result<()> {
        let replication = self.settings.replication;
        let topics: Vec<NewTopic<'_>> = missing
            .iter()
            .map(|t| {
                let count = t.asked.unwrap_or(t.otherwise) as i32;
                let new = NewTopic::new(&t.name, count, TopicReplication::Fixed(replication));
                t.config.iter().fold(new, |new, (key, value)| new.set(key, value))
            })
            .collect();
        let admin = self.admin()?;
        let made = self.env.handle().block_on(admin.create_topics(&topics, &options()));
        for (result, topic) in made.map_err(|e| fault::error("creating topics", e))?.into_iter().zip(missing) {
            match result {
                Ok(name) => {
                    tracing::warn!(topic = name, partitions = topic.asked.unwrap_or(topic.otherwise), "topic created");
                }
                Err((_, Code::TopicAlreadyExists)) => {}
                // With the cluster's own default it means that brokers are missing just now.
                Err((name, code @ Code::InvalidReplicationFactor)) if replication < 0 => {
                    let error = fault::coded(format_args!("creating topic '{name}'"), code);
                    return Err(error.of_kind(ErrorKind::Unavailable));
                }
                Err((name, code)) => return Err(fault::coded(format_args!("creating topic '{name}'"), code)),
            }
        }
        Ok(())
    }

    /// Made, but not yet known everywhere.
    fn await_topic(&self, topic: &Wanted) -> Result<()> {
        let until = Instant::now() + REQUEST;
        loop {
            match self.describe(&topic.name)? {
                Some((n, true, _)) => return check_count(topic, n),
                _ if Instant::now() >= until => {
                    let text = format!("topic '{}' was created, and has no leader after {REQUEST:?}", topic.name);
                    return Err(Error::new(ErrorKind::Unavailable, text));
                }
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

fn check_count(topic: &Wanted, n: u32) -> Result<()> {
    match topic.asked {
        Some(asked) if asked != n => Err(Error::new(
            ErrorKind::Topology,
            format!(
                "topic '{}' has {n} partitions, and {asked} were asked for; keys would move: ask for {n}, or leave the number out",
                topic.name
            ),
        )),
        _ => Ok(()),
    }
}
