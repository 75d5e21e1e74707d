//! ruststream's RabbitMQ adapter (`ruststream-lapin`): its confirming publisher, publishes side by side; a quorum queue, deliveries
//! as they come, acks side by side.

use std::num::NonZeroU16;
use std::pin::pin;

use futures_util::future::try_join_all;
use futures_util::stream::StreamExt;
use ruststream::{Broker, IncomingMessage, Subscriber};
use ruststream_lapin::{LapinBroker, LapinPublish, RabbitQuorumQueue};

use crate::{BATCH, Failed, Job, Meter, Ran, ruststream_send};

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    let prefetch = NonZeroU16::new(u16::try_from(2 * BATCH)?).ok_or("no prefetch")?;
    let broker = LapinBroker::new(job.url.as_str()).prefetch(prefetch).declare_topology(true).connect().await?;
    let queue = || RabbitQuorumQueue::new(job.topic.as_str());
    // Declares the queue; what it prefetches before the messages are sent is nothing.
    drop(broker.subscribe(queue()).await?);
    let publisher = broker.publisher(LapinPublish::default().persistent(true).confirms());

    let send = ruststream_send::send(&publisher, job).await?;

    let mut subscriber = broker.subscribe(queue()).await?;
    let meter = Meter::start();
    let mut deliveries = pin!(subscriber.stream().ready_chunks(BATCH));
    let mut got = 0;
    while got < job.n {
        let batch = deliveries.next().await.ok_or("the subscription ended")?;
        got += batch.len();
        let batch: Vec<_> = batch.into_iter().collect::<Result<_, _>>()?;
        try_join_all(batch.into_iter().map(IncomingMessage::ack)).await?;
    }
    let receive = meter.stop();
    Ok(Ran { send, receive })
}
