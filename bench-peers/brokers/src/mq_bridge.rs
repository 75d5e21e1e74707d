//! mq-bridge over Kafka: its publisher as it comes (idempotent, all replicas) in batches, each awaited; its consumer in batches, each
//! committed up to its end, which is less than a result for each message. The receiving is timed from the first batch on: until then
//! the group forms.

use mq_bridge::CanonicalMessage;
use mq_bridge::endpoints::kafka::{KafkaConsumer, KafkaPublisher};
use mq_bridge::models::KafkaConfig;
use mq_bridge::traits::{MessageConsumer, MessageDisposition, MessagePublisher, SentBatch};

use crate::{Failed, Job, Meter, Ran, kafka_topic};

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    kafka_topic::make(job).await?;
    let config = KafkaConfig {
        url: kafka_topic::servers(job)?.to_owned(),
        topic: Some(job.topic.clone()),
        group_id: Some(format!("{}-bench", job.topic)),
        ..KafkaConfig::default()
    };
    let publisher = KafkaPublisher::new(&config).await?;

    let meter = Meter::start();
    let mut left = job.n;
    while left > 0 {
        let size = left.min(job.flying());
        let batch = (0..size).map(|_| CanonicalMessage::from_vec(job.payload.clone())).collect();
        match publisher.send_batch(batch).await? {
            SentBatch::Ack => left -= size,
            SentBatch::Partial { .. } => return Err("not all were sent".into()),
        }
    }
    let send = meter.stop();

    let mut consumer = KafkaConsumer::new(&config).await?;
    let (mut meter, mut got) = (None, 0);
    while got < job.n {
        let batch = consumer.receive_batch(job.flying()).await?;
        meter.get_or_insert_with(Meter::start);
        got += batch.messages.len();
        let dispositions = batch.messages.iter().map(|_| MessageDisposition::Ack).collect();
        (batch.commit)(dispositions).await?;
    }
    let receive = meter.ok_or("no message")?.stop();
    Ok(Ran { send, receive })
}
