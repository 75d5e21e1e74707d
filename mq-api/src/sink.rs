use crate::{Error, Message, Producer, Sending};
use futures_sink::Sink;
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// A `Sink` of messages: at most `window` are unconfirmed at a time, and flushing waits for all confirmations.
///
/// The first failed send is reported by the next call; the others go on.
pub struct MessageSink<P: ?Sized> {
    producer: Arc<P>,
    window: usize,
    flying: VecDeque<Sending>,
}

impl<P: Producer + ?Sized> MessageSink<P> {
    /// At most `window` unconfirmed (at least 1).
    pub fn new(producer: Arc<P>, window: usize) -> Self {
        Self { producer, window: window.max(1), flying: VecDeque::new() }
    }

    fn poll_down_to(&mut self, left: usize, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        while self.flying.len() > left {
            let Some(oldest) = self.flying.front_mut() else { break };
            let result = ready!(Pin::new(oldest).poll(cx));
            self.flying.pop_front();
            result?;
        }
        Poll::Ready(Ok(()))
    }
}

impl<P: Producer + ?Sized> Sink<Message> for MessageSink<P> {
    type Error = Error;

    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let room = self.window - 1;
        self.poll_down_to(room, cx)
    }

    fn start_send(mut self: Pin<&mut Self>, message: Message) -> Result<(), Error> {
        let sending = self.producer.send(message);
        self.flying.push_back(sending);
        Ok(())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.poll_down_to(0, cx)
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.poll_flush(cx)
    }
}

impl<P: Producer + ?Sized> fmt::Debug for MessageSink<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MessageSink({}, {} of {} flying)", self.producer.topic(), self.flying.len(), self.window)
    }
}
