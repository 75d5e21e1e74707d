//! What the peers on Kafka expect to be there: the topic, with as many partitions as ours.

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;

use crate::{Failed, Job};

const PARTITIONS: i32 = 12;

/// Host and port of the URL.
pub(crate) fn servers(job: &Job) -> Result<&str, Failed> {
    job.url.strip_prefix("kafka://").map(|rest| rest.trim_end_matches('/')).ok_or_else(|| "not a kafka:// URL".into())
}

pub(crate) async fn make(job: &Job) -> Result<(), Failed> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", servers(job)?);
    let admin: AdminClient<DefaultClientContext> = config.create()?;
    let topic = NewTopic::new(&job.topic, PARTITIONS, TopicReplication::Fixed(1));
    for made in admin.create_topics([&topic], &AdminOptions::new()).await? {
        made.map_err(|(topic, code)| format!("{topic}: {code}"))?;
    }
    Ok(())
}
