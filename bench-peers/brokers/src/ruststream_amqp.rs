//! ruststream's RabbitMQ adapter (`ruststream-lapin`): its confirming publisher, publishes side by side; a quorum queue, deliveries
//! as they come, acks side by side.

use std::num::NonZeroU16;
use std::pin::pin;

use futures_util::future::try_join_all;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use ruststream::{Broker, IncomingMessage, OutgoingMessage, Publisher, Subscriber};
use ruststream_lapin::{LapinBroker, LapinPublish, RabbitQuorumQueue};

use crate::{BATCH, FLYING, Failed, Job, Meter, Ran};

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    let prefetch = NonZeroU16::new(u16::try_from(2 * BATCH)?).ok_or("no prefetch")?;
    let broker = LapinBroker::new(job.url.as_str()).prefetch(prefetch).declare_topology(true).connect().await?;
    let queue = || RabbitQuorumQueue::new(job.topic.as_str());
    // Declares the queue; what it prefetches before the messages are sent is nothing.
    drop(broker.subscribe(queue()).await?);
    let publisher = broker.publisher(LapinPublish::default().persistent(true).confirms());

    let meter = Meter::start();
    stream::iter(0..job.n)
        .map(|_| publisher.publish(OutgoingMessage::new(job.topic.as_str(), &job.payload), None))
        .buffer_unordered(FLYING)
        .try_for_each(|_| async { Ok(()) })
        .await?;
    let send = meter.stop();

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
