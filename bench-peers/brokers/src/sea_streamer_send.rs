//! How sea-streamer sends, whatever the broker: a producer that pipelines, each receipt awaited.

use std::collections::VecDeque;

use sea_streamer_types::Producer;

use crate::{Failed, Job, Meter};

/// Sends all; seconds, and seconds of the processor.
pub(crate) async fn send<P: Producer>(producer: &P, job: &Job) -> Result<(f64, f64), Failed>
where
    P::Error: Send + Sync + 'static,
{
    let meter = Meter::start();
    let mut flying = VecDeque::with_capacity(job.flying());
    for _ in 0..job.n {
        if flying.len() == job.flying()
            && let Some(receipt) = flying.pop_front()
        {
            let _ = receipt.await?;
        }
        flying.push_back(producer.send(job.payload.as_slice())?);
    }
    for receipt in flying {
        let _ = receipt.await?;
    }
    Ok(meter.stop())
}
