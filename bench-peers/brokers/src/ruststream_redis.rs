//! ruststream's Redis adapter (`ruststream-fred`): publishes under way side by side over its pipelining client, batches of one
//! `XREADGROUP` each, their acks side by side.

use std::num::NonZeroUsize;
use std::pin::pin;

use futures_util::future::try_join_all;
use futures_util::stream::StreamExt;
use ruststream::{BatchSubscriber, Broker, IncomingMessage};
use ruststream_fred::{RedisBroker, RedisStream, StreamStart};

use crate::{BATCH, Failed, Job, Meter, Ran, ruststream_send};

pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    let broker = RedisBroker::standalone(job.url.as_str()).connect().await?;
    let from = RedisStream::new(job.topic.as_str()).group("bench").start_id(StreamStart::Beginning);
    let mut subscriber = broker.subscribe(from).await?;
    let publisher = broker.publisher();

    let send = ruststream_send::send(&publisher, job).await?;

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
