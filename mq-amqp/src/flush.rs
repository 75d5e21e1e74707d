//! Writing settlements. The broker never answers an acknowledgement, but it answers other requests in order: a request behind
//! the acknowledgements shows that it has read them, so that a client that dies a moment later has not lost them on the way.
//! While that answer is under way acknowledgements gather, which is what makes them few; somebody who waits for one, or a
//! quarter of the prefetch, does not.

use crate::settle::Frame;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicNackOptions, BasicQosOptions};
use std::collections::VecDeque;
use std::task::{Context, Poll};

type Step = BoxFuture<'static, lapin::Result<()>>;

/// The settlements of one channel on their way.
pub(crate) struct Flush {
    channel: Channel,
    prefetch: u16,
    writing: Option<(u64, bool, Step)>,
    /// Answers under way, by the operation that they confirm.
    answers: VecDeque<(u64, Option<Step>)>,
    started: u64,
}

impl Flush {
    pub(crate) fn new(channel: Channel, prefetch: u16) -> Self {
        Self { channel, prefetch, writing: None, answers: VecDeque::new(), started: 0 }
    }

    /// Whether to write now `frames` frames and `acks` acknowledgements, for operations up to `due`.
    pub(crate) fn wants(&self, due: u64, urgent: bool, acks: usize, frames: usize) -> bool {
        if self.writing.is_some() || (due <= self.started && acks == 0 && frames == 0) {
            return false;
        }
        urgent || frames > 0 || self.answers.is_empty() || acks >= usize::from(self.prefetch / 4)
    }

    /// Whether everything was written and answered.
    pub(crate) fn is_idle(&self) -> bool {
        self.writing.is_none() && self.answers.is_empty()
    }

    /// Begins to write; afterwards operations up to `due` are confirmed.
    pub(crate) fn start(&mut self, frames: Vec<Frame>, due: u64) {
        self.started = due;
        let channel = self.channel.clone();
        let some = !frames.is_empty();
        self.writing = Some((due, some, Box::pin(async move { write(&channel, frames).await })));
    }

    /// Ready with the operation up to which all is confirmed.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<lapin::Result<u64>> {
        if let Some((_, _, step)) = &mut self.writing
            && let Poll::Ready(written) = step.as_mut().poll(cx)
            && let Err(error) = self.written(written)
        {
            return Poll::Ready(Err(error));
        }
        let mut confirmed = None;
        while let Some((due, answer)) = self.answers.front_mut() {
            if let Some(answer) = answer {
                match answer.as_mut().poll(cx) {
                    Poll::Pending => break,
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Ready(Ok(())) => {}
                }
            }
            confirmed = Some(*due);
            self.answers.pop_front();
        }
        match confirmed {
            Some(due) => Poll::Ready(Ok(due)),
            None => Poll::Pending,
        }
    }

    /// What was begun is written: its answer is asked for.
    fn written(&mut self, written: lapin::Result<()>) -> lapin::Result<()> {
        let Some((due, some, _)) = self.writing.take() else { return Ok(()) };
        written?;
        let (channel, prefetch) = (self.channel.clone(), self.prefetch);
        let answer: Option<Step> =
            some.then(|| -> Step { Box::pin(async move { read_by_broker(&channel, prefetch).await }) });
        self.answers.push_back((due, answer));
        Ok(())
    }

    /// Writes these and waits for the answer. What was begun before goes first, though nobody may have polled it: these may
    /// acknowledge up to a tag, and what is given back there is not settled before the broker has read that.
    pub(crate) async fn now(&mut self, frames: Vec<Frame>) -> lapin::Result<()> {
        if let Some((_, _, step)) = &mut self.writing {
            let written = step.as_mut().await;
            self.written(written)?;
        }
        write(&self.channel, frames).await?;
        read_by_broker(&self.channel, self.prefetch).await
    }
}

/// Any request that is answered does; this one changes nothing.
async fn read_by_broker(channel: &Channel, prefetch: u16) -> lapin::Result<()> {
    channel.basic_qos(prefetch, BasicQosOptions { global: false }).await
}

/// Writes all at once: awaiting each would cost a turn of the client's thread per frame.
async fn write(channel: &Channel, frames: Vec<Frame>) -> lapin::Result<()> {
    let one = async |frame| match frame {
        Frame::Ack { tag, multiple } => channel.basic_ack(tag, BasicAckOptions { multiple }).await,
        Frame::Requeue(tag) => channel.basic_nack(tag, BasicNackOptions { multiple: false, requeue: true }).await,
    };
    if let [frame] = frames[..] {
        return one(frame).await;
    }
    let mut writing: FuturesUnordered<_> = frames.into_iter().map(one).collect();
    while let Some(written) = writing.next().await {
        written?;
    }
    Ok(())
}
