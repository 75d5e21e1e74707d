//! ruststream's Redis adapter (`ruststream-fred`): publishes under way side by side over its pipelining client, batches of one
//! `XREADGROUP` each, their acks side by side.

use std::num::NonZeroUsize;
use std::pin::pin;

use futures_util::future::try_join_all;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use ruststream::{BatchSubscriber, Broker, IncomingMessage, OutgoingMessage, Publisher};
use ruststream_fred::{RedisBroker, RedisStream, StreamStart};

use crate::{BATCH, FLYING, Failed, Job, Meter, Ran};

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    let broker = RedisBroker::standalone(job.url.as_str()).connect().await?;
    let from = RedisStream::new(job.topic.as_str()).group("bench").start_id(StreamStart::Beginning);
    let mut subscriber = broker.subscribe(from).await?;
    let publisher = broker.publisher();

    let meter = Meter::start();
    stream::iter(0..job.n)
        .map(|_| publisher.publish(OutgoingMessage::new(job.topic.as_str(), &job.payload), None))
        .buffer_unordered(FLYING)
        .try_for_each(|_| async { Ok(()) })
        .await?;
    let send = meter.stop();

    let meter = Meter::start();
    let mut got = 0;
    let most = NonZeroUsize::new(BATCH).ok_or("no batch")?;
    let mut batches = pin!(subscriber.batches(most));
    while got < job.n {
        let batch = batches.next().await.ok_or("the subscription ended")??;
        got += batch.len();
        try_join_all(batch.into_iter().map(IncomingMessage::ack)).await?;
    }
    let receive = meter.stop();
    Ok(Ran { send, receive })
}
