//! What the broker sent and nobody has taken yet: at most the prefetch.

use crate::fault::fault;
use crate::settle::Tags;
use futures_util::stream::StreamExt;
use lapin::Consumer;
use lapin::message::Delivery;
use mq_api::{Error, ErrorKind};
use mq_core::Session;
use std::collections::VecDeque;
use std::task::{Context, Poll, ready};

pub(crate) struct Fetch {
    pub(crate) consumer: Consumer,
    /// Fetched beyond the credit.
    pub(crate) stash: VecDeque<Delivery>,
    ended: Option<Error>,
    /// The broker ended the consumer, and not a channel or a connection.
    pub(crate) cancelled: bool,
}

impl Fetch {
    pub(crate) fn new(consumer: Consumer) -> Self {
        Self { consumer, stash: VecDeque::new(), ended: None, cancelled: false }
    }

    /// Why no more will come, once everything that came was taken.
    pub(crate) fn over(&mut self) -> Option<Error> {
        match self.stash.is_empty() {
            true => self.ended.take(),
            false => None,
        }
    }

    /// Ready with how many of the stash may be handed on, or when the consumer ended.
    pub(crate) fn poll(&mut self, tags: &mut Tags, session: &Session, cx: &mut Context<'_>) -> Poll<usize> {
        while self.ended.is_none() {
            match self.consumer.poll_next_unpin(cx) {
                Poll::Pending => break,
                Poll::Ready(Some(Ok(delivery))) => {
                    tags.arrived(delivery.delivery_tag);
                    self.stash.push_back(delivery);
                }
                Poll::Ready(Some(Err(error))) => self.ended = Some(fault("consume", error)),
                Poll::Ready(None) => {
                    let text = "the broker cancelled the consumer: its queue was deleted, or its leader moved";
                    self.ended = Some(Error::new(ErrorKind::Disconnected, text));
                    self.cancelled = true;
                }
            }
        }
        if self.ended.is_some() {
            // Nothing of this channel can be settled any more.
            self.stash.clear();
            return Poll::Ready(0);
        }
        if self.stash.is_empty() {
            return Poll::Pending;
        }
        let credit = ready!(session.flow.poll_credit(cx));
        let (mut n, mut bytes) = (0, 0);
        for delivery in &self.stash {
            let size = delivery.data.len();
            if n >= credit.count || (n > 0 && bytes + size > credit.bytes) {
                break;
            }
            n += 1;
            bytes += size;
        }
        Poll::Ready(n)
    }
}
