use crate::{
    Batch, Broker, Consumer, Deliveries, Delivery, Encode, Json, Message, MessageSink, Producer, ProducerSpec, Result,
    SendOptions, SendResult, Sending, Subscription, Typed, TypedProducer,
};
use futures_core::Stream;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// Convenience over [`Broker`].
#[async_trait::async_trait]
pub trait BrokerExt: Broker {
    /// A producer for one topic: `broker.producer("orders")`, or with a [`ProducerSpec`].
    ///
    /// # Errors
    /// As [`Broker::open_producer`].
    async fn producer<S: Into<ProducerSpec> + Send>(&self, spec: S) -> Result<Arc<dyn Producer>> {
        self.open_producer(spec.into()).await
    }

    /// A consumer. Messages sent after this returned are seen.
    ///
    /// # Errors
    /// As [`Broker::open_consumer`].
    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Consumer>> {
        self.open_consumer(subscription).await
    }
}

impl<B: Broker + ?Sized> BrokerExt for B {}

/// Convenience over [`Producer`].
pub trait ProducerExt: Producer {
    /// Sends many, pipelined; one result per message, in order.
    fn send_all(&self, messages: Vec<Message>) -> impl Future<Output = Vec<SendResult>> + Send {
        let sending = self.send_batch(Batch::from(messages));
        async move { sending.await.take_results() }
    }

    /// Sends one within a time limit, waiting for room included.
    fn send_timeout(&self, message: Message, timeout: Duration) -> Sending {
        self.send_with(message, SendOptions::timeout(timeout))
    }

    /// A `Sink` of messages with at most `window` unconfirmed. Flushing it reports the first send that failed.
    fn sink(self: Arc<Self>, window: usize) -> MessageSink<Self> {
        MessageSink::new(self, window)
    }
}

impl<P: Producer + ?Sized> ProducerExt for P {}

impl dyn Producer {
    /// A producer that encodes values as JSON.
    pub fn json<T: serde::Serialize + ?Sized>(self: Arc<Self>) -> TypedProducer<T, Json> {
        TypedProducer::new(self, Json)
    }

    /// A producer that encodes values.
    pub fn typed<T: ?Sized, E: Encode<T>>(self: Arc<Self>, codec: E) -> TypedProducer<T, E> {
        TypedProducer::new(self, codec)
    }
}

/// Convenience over [`Consumer`].
pub trait ConsumerExt: Consumer {
    /// The next delivery; `None` after close. Cancel-safe: dropping the future loses nothing and leaves nothing stuck.
    fn recv(&mut self) -> Recv<'_, Self> {
        Recv(self)
    }

    /// Waits for at least one delivery, then appends what is there, at most `max`; 0 only after close. Cancel-safe.
    fn recv_batch<'a>(&'a mut self, max: usize, out: &'a mut Deliveries) -> RecvBatch<'a, Self> {
        RecvBatch(self, max, out)
    }

    /// The deliveries as a `Stream`, which ends after close.
    fn stream(self) -> DeliveryStream<Self>
    where
        Self: Sized,
    {
        DeliveryStream(self)
    }

    /// Decodes JSON. What cannot be decoded is dead-lettered.
    fn json<T: serde::de::DeserializeOwned>(self) -> Typed<Self, T, Json>
    where
        Self: Sized,
    {
        Typed::new(self, Json)
    }

    /// Decodes. What cannot be decoded is dead-lettered.
    fn typed<T, D: crate::Decode<T>>(self, codec: D) -> Typed<Self, T, D>
    where
        Self: Sized,
    {
        Typed::new(self, codec)
    }

    /// Drains and closes; see [`ConsumerControl::close`](crate::ConsumerControl::close).
    fn close(&self, deadline: Duration) -> futures_core::future::BoxFuture<'static, crate::CloseReport> {
        self.control().close(deadline)
    }
}

impl<C: Consumer + ?Sized> ConsumerExt for C {}

/// See [`ConsumerExt::recv`].
pub struct Recv<'a, C: ?Sized>(&'a mut C);

impl<C: Consumer + ?Sized> Future for Recv<'_, C> {
    type Output = Result<Option<Delivery>>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_next(cx)
    }
}

/// See [`ConsumerExt::recv_batch`].
pub struct RecvBatch<'a, C: ?Sized>(&'a mut C, usize, &'a mut Deliveries);

impl<C: Consumer + ?Sized> Future for RecvBatch<'_, C> {
    type Output = Result<usize>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        this.0.poll_batch(cx, this.1, this.2)
    }
}

/// See [`ConsumerExt::stream`].
pub struct DeliveryStream<C>(C);

impl<C> DeliveryStream<C> {
    /// The consumer.
    pub fn into_inner(self) -> C {
        self.0
    }
}

impl<C: Consumer + Unpin> Stream for DeliveryStream<C> {
    type Item = Result<Delivery>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_next(cx).map(Result::transpose)
    }
}

macro_rules! opaque_debug {
    ($($name:ident<$($g:tt),*>: [$($b:tt)*]),*) => { $(
        impl<$($b)*> fmt::Debug for $name<$($g),*> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str(stringify!($name)) }
        }
    )* };
}
opaque_debug!(Recv<'_, C>: [C: ?Sized], RecvBatch<'_, C>: [C: ?Sized], DeliveryStream<C>: [C]);
