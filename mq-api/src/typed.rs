use crate::{
    BoxError, Consumer, ConsumerControl, ConsumerExt, Decode, Delivery, Disposition, Encode, Failure, Message,
    Producer, ProducerExt, Reason, Result, SendResult, Settling,
};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

/// A consumer that decodes. What cannot be decoded is dead-lettered with the reason `undecodable`, and the next one comes.
pub struct Typed<C, T, D> {
    consumer: C,
    codec: D,
    value: PhantomData<fn() -> T>,
}

impl<C: Consumer, T, D: Decode<T>> Typed<C, T, D> {
    /// Decodes with `codec`.
    pub fn new(consumer: C, codec: D) -> Self {
        Self { consumer, codec, value: PhantomData }
    }

    /// The next delivery that can be decoded; `None` after close. Cancel-safe.
    ///
    /// # Errors
    /// As [`Consumer::poll_next`].
    pub async fn recv(&mut self) -> Result<Option<TypedDelivery<T>>> {
        while let Some(delivery) = self.consumer.recv().await? {
            match self.codec.decode(delivery.payload.as_ref()) {
                Ok(value) => return Ok(Some(TypedDelivery { value, delivery })),
                Err(e) => {
                    let error = Some(Box::new(Failure::permanent(e)));
                    drop(delivery.settle(Disposition::DeadLetter { reason: Reason::Undecodable, error }));
                }
            }
        }
        Ok(None)
    }

    /// Controls the consumer.
    pub fn control(&self) -> ConsumerControl {
        self.consumer.control()
    }

    /// The consumer without the codec.
    pub fn into_inner(self) -> C {
        self.consumer
    }
}

impl<C, T, D> fmt::Debug for Typed<C, T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Typed<{}>", std::any::type_name::<T>())
    }
}

/// A delivery with its value. Reads as its [`Delivery`].
#[must_use = "dropping a delivery is a nack: it will come again"]
pub struct TypedDelivery<T> {
    value: T,
    delivery: Delivery,
}

impl<T> TypedDelivery<T> {
    /// The decoded payload.
    pub fn value(&self) -> &T {
        &self.value
    }

    /// Value and delivery apart.
    pub fn into_parts(self) -> (T, Delivery) {
        (self.value, self.delivery)
    }

    /// See [`Delivery::ack`].
    pub fn ack(self) -> Settling {
        self.delivery.ack()
    }

    /// See [`Delivery::nack`].
    pub fn nack(self, error: impl Into<BoxError>) -> Settling {
        self.delivery.nack(error)
    }

    /// See [`Delivery::nack_after`].
    pub fn nack_after(self, after: Duration, error: impl Into<BoxError>) -> Settling {
        self.delivery.nack_after(after, error)
    }

    /// See [`Delivery::dead_letter`].
    pub fn dead_letter(self, reason: impl Into<Reason>) -> Settling {
        self.delivery.dead_letter(reason)
    }

    /// See [`Delivery::release`].
    pub fn release(self) -> Settling {
        self.delivery.release()
    }
}

impl<T> Deref for TypedDelivery<T> {
    type Target = Delivery;

    fn deref(&self) -> &Delivery {
        &self.delivery
    }
}

impl<T: fmt::Debug> fmt::Debug for TypedDelivery<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.delivery, f)
    }
}

/// A producer that encodes.
pub struct TypedProducer<T: ?Sized, E> {
    producer: Arc<dyn Producer>,
    codec: E,
    value: PhantomData<fn(&T)>,
}

impl<T: ?Sized, E: Encode<T>> TypedProducer<T, E> {
    /// Encodes with `codec`.
    pub fn new(producer: Arc<dyn Producer>, codec: E) -> Self {
        Self { producer, codec, value: PhantomData }
    }

    /// The message of a value, to add key or headers to.
    ///
    /// # Errors
    /// [`ErrorKind::Encode`](crate::ErrorKind::Encode).
    pub fn message(&self, value: &T) -> Result<Message> {
        let mut message = Message::new(bytes::Bytes::new());
        message.payload = self.codec.encode(value)?;
        message.content_type = self.codec.content_type();
        Ok(message)
    }

    /// Encodes and sends.
    ///
    /// # Errors
    /// As [`Producer::send`], and [`ErrorKind::Encode`](crate::ErrorKind::Encode) with the outcome not sent.
    pub async fn send(&self, value: &T) -> SendResult {
        self.producer.send(self.message(value)?).await
    }

    /// The producer without the codec.
    pub fn producer(&self) -> &Arc<dyn Producer> {
        &self.producer
    }

    /// Encodes and sends many; one result per value, in order.
    pub async fn send_all<'a>(&self, values: impl IntoIterator<Item = &'a T>) -> Result<Vec<SendResult>>
    where
        T: 'a,
    {
        let messages = values.into_iter().map(|v| self.message(v)).collect::<Result<Vec<_>>>()?;
        Ok(self.producer.send_all(messages).await)
    }
}

impl<T: ?Sized, E> fmt::Debug for TypedProducer<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TypedProducer<{}>({})", std::any::type_name::<T>(), self.producer.topic())
    }
}
