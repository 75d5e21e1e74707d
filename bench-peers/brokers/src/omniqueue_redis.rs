//! omniqueue over Redis Streams. It has no call for many messages, so sends run side by side over its pool of connections, and
//! so do acks; it reads many at once (`receive_all`).

use std::time::Duration;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use omniqueue::backends::{RedisBackend, RedisConfig};

use crate::{BATCH, Failed, Job, Meter, Ran};

/// Connections of the pool, and calls at a time: more were slower.
const AT_ONCE: u16 = 16;

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    let config = RedisConfig {
        dsn: job.url.clone(),
        max_connections: AT_ONCE,
        reinsert_on_nack: false,
        queue_key: job.topic.clone(),
        delayed_queue_key: format!("{}-delayed", job.topic),
        delayed_lock_key: format!("{}-lock", job.topic),
        consumer_group: "bench".into(),
        consumer_name: "c".into(),
        payload_key: "payload".into(),
        ack_deadline_ms: 60_000,
        dlq_config: None,
        sentinel_config: None,
    };
    // It expects the group to be there.
    let client = redis::Client::open(job.url.as_str())?;
    let mut connection = client.get_multiplexed_async_connection().await?;
    let make = ["CREATE", &job.topic, "bench", "0", "MKSTREAM"];
    redis::cmd("XGROUP").arg(&make).query_async::<()>(&mut connection).await?;
    let (producer, mut consumer) = RedisBackend::builder(config).build_pair().await?;

    let meter = Meter::start();
    stream::iter(0..job.n)
        .map(|_| producer.send_raw(&job.payload))
        .buffer_unordered(AT_ONCE.into())
        .try_for_each(|()| async { Ok(()) })
        .await?;
    let send = meter.stop();

    let meter = Meter::start();
    let mut got = 0;
    while got < job.n {
        let batch = consumer.receive_all(BATCH, Duration::from_secs(1)).await?;
        got += batch.len();
        stream::iter(batch)
            .map(|delivery| async move { delivery.ack().await.map_err(|(error, _)| error) })
            .buffer_unordered(AT_ONCE.into())
            .try_for_each(|()| async { Ok(()) })
            .await?;
    }
    let receive = meter.stop();
    Ok(Ran { send, receive })
}
