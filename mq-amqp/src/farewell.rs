//! The end of a group member's session: nothing more is taken, what nobody holds goes back, what was settled is written.

use crate::connect::within;
use crate::copies::{Copy, To};
use crate::decode::decode;
use crate::read::{MAIN, Reader};
use futures_util::stream::StreamExt;
use lapin::options::BasicCancelOptions;
use mq_api::Settled;
use mq_core::{Plan, Token};
use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

/// Longest wait while it ends: close has its own deadline, and a broker that is away gives everything back by itself.
const FAREWELL: Duration = Duration::from_secs(1);

impl Reader {
    /// A close began: the broker is to give nothing more, and what nobody holds goes back, in order.
    pub(crate) async fn drain(&mut self) {
        self.cancelled = true;
        let cancel = self.channel.basic_cancel(self.fetch.consumer.tag(), BasicCancelOptions::default());
        // A broker that does not answer keeps what it sent until the channel ends.
        if within(FAREWELL, "cancel the consumer", cancel).await.is_ok() {
            while let Ok(Some(Ok(delivery))) = tokio::time::timeout(FAREWELL, self.fetch.consumer.next()).await {
                self.tags.arrived(delivery.delivery_tag);
                self.fetch.stash.push_back(delivery);
            }
        }
        for delivery in std::mem::take(&mut self.fetch.stash) {
            let tag = delivery.delivery_tag;
            if self.classic && self.alone.is_some() && !delivery.redelivered {
                // As a release: given back by the broker it would look like the victim of a crash.
                let (exchange, key) = (delivery.exchange, delivery.routing_key);
                let arrived = decode(delivery.properties, exchange.as_str(), key.as_str(), delivery.data);
                let (message, notes) = (arrived.message, arrived.notes);
                self.start_copy(Copy { token: Token(tag, MAIN), to: To::Back, message, notes });
                continue;
            }
            self.frames.extend(self.tags.requeue(tag));
        }
    }

    pub(crate) async fn finish(mut self, plan: &mut Plan, mut exceptions: Vec<(u64, Settled)>) {
        if !self.cancelled {
            self.drain().await;
        }
        let limit = tokio::time::sleep(FAREWELL);
        tokio::pin!(limit);
        loop {
            let more = poll_fn(|cx| Poll::Ready(self.session.settles.poll_take(cx, plan).is_ready())).await;
            if more && self.carry_out(plan, &mut exceptions).await.is_err() {
                break;
            }
            self.urgent = true;
            self.write();
            if self.flush.is_idle() && self.copying == 0 && !more {
                break;
            }
            tokio::select! { biased;
                () = &mut limit => break,
                Some(copy) = self.done.recv() => if self.copied(copy).await.is_err() {
                    break;
                },
                written = poll_fn(|cx| self.flush.poll(cx)) => match written {
                    Ok(upto) => self.session.settles.confirm(upto, exceptions.drain(..)),
                    Err(_) => break,
                }
            }
        }
        if let Some(alone) = self.alone.take() {
            alone.close().await;
        }
        // Whatever is left unsettled goes back with the channel.
        let _ = within(FAREWELL, "close the channel", self.channel.close(200, "OK".into())).await;
    }
}
