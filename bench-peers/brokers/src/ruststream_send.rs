//! How ruststream's adapters send, whatever the broker: publishes under way side by side, each awaited.

use futures_util::stream::{self, StreamExt, TryStreamExt};
use ruststream::{OutgoingMessage, Publisher};

use crate::{Failed, Job, Meter};

/// Sends all; seconds, and seconds of the processor.
pub(crate) async fn send<P: Publisher>(publisher: &P, job: &Job) -> Result<(f64, f64), Failed>
where
    P::Error: Into<Failed>,
{
    let meter = Meter::start();
    stream::iter(0..job.n)
        .map(|_| publisher.publish(OutgoingMessage::new(job.topic.as_str(), &job.payload), None))
        .buffer_unordered(job.flying())
        .try_for_each(|_| async { Ok(()) })
        .await
        .map_err(Into::into)?;
    Ok(meter.stop())
}
