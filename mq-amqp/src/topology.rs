//! Names, arguments, and making or verifying them. No argument derives from a setting that users tune: changing attempts,
//! delays or prefetch and starting again must work, and a queue's arguments can never be changed.

use crate::connect::{Connections, Role, answer, within};
use crate::fault::{fault, is_missing, is_refused};
use crate::options::GroupOptions;
use crate::url::QueueType;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use lapin::{Channel, ExchangeKind};
use mq_api::{Error, ErrorKind, Group, Provisioning, Result, Topic};
use std::time::Duration;

/// What a topic is on RabbitMQ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// A durable topic exchange of ours.
    Topic(String),
    /// An exchange of somebody else: `native("exchange://name")`.
    Exchange(String),
    /// A queue of somebody else: `native("name")` or `native("queue://name")`.
    Queue(String),
    /// The dead letters of a group: a queue of ours.
    DeadLetters(String),
}

impl Place {
    pub(crate) fn of(topic: &Topic) -> Self {
        if let Some((of, group)) = topic.dead_letters_of() {
            return Self::DeadLetters(Self::of(of).dead_letters(group));
        }
        match topic.as_str() {
            name if !topic.is_native() => Self::Topic(name.to_owned()),
            name => match name.split_once("://") {
                Some(("exchange", name)) => Self::Exchange(name.to_owned()),
                Some(("queue", name)) => Self::Queue(name.to_owned()),
                _ => Self::Queue(name.to_owned()),
            },
        }
    }

    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Topic(name) | Self::Exchange(name) | Self::Queue(name) | Self::DeadLetters(name) => name,
        }
    }

    /// The queue from which a group takes.
    pub(crate) fn queue(&self, group: &Group) -> String {
        match self {
            Self::Topic(name) | Self::Exchange(name) => format!("{name}..{group}"),
            Self::Queue(name) | Self::DeadLetters(name) => name.clone(),
        }
    }

    /// The stream that keeps what is sent here.
    pub(crate) fn stream(&self) -> String {
        match self {
            Self::Topic(name) | Self::Exchange(name) => format!("{name}..stream"),
            Self::Queue(name) | Self::DeadLetters(name) => name.clone(),
        }
    }

    /// The queue of a group's dead letters.
    pub(crate) fn dead_letters(&self, group: &Group) -> String {
        format!("{}..{group}..dlq", self.name())
    }

    /// Exchange and routing key of an ordinary send.
    pub(crate) fn target(&self) -> Result<(ShortString, ShortString)> {
        match self {
            Self::Topic(name) | Self::Exchange(name) => Ok((short(name)?, "".into())),
            Self::Queue(name) | Self::DeadLetters(name) => Ok(("".into(), short(name)?)),
        }
    }
}

/// A name as AMQP writes it.
pub(crate) fn short(name: &str) -> Result<ShortString> {
    ShortString::try_new(name)
        .map_err(|_| Error::new(ErrorKind::InvalidName, format!("the name '{name}' is longer than AMQP's 255 bytes")))
}

/// RabbitMQ 4 gives quorum queues a limit of 20 redeliveries, after which they drop or dead-letter behind our back, and
/// 3.10 takes -1 for "drop every returned message". So a number that is never reached, and never changes.
const DELIVERY_LIMIT: i64 = 1_000_000;

pub(crate) fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(value))
}

/// The arguments of a group's queue. Dead-lettering by the broker is only the net (expiry, the limit): ours is by publishing.
pub(crate) fn group_arguments(kind: QueueType, dead_letters: &str, options: &GroupOptions) -> FieldTable {
    let mut table = FieldTable::default();
    table.insert("x-queue-type".into(), text(kind.as_str()));
    table.insert("x-dead-letter-exchange".into(), text(""));
    table.insert("x-dead-letter-routing-key".into(), text(dead_letters));
    if kind == QueueType::Quorum {
        table.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(DELIVERY_LIMIT));
        table.insert("x-dead-letter-strategy".into(), text("at-least-once"));
        table.insert("x-overflow".into(), text("reject-publish"));
    }
    options.add_to(&mut table);
    table
}

/// Of a queue of ours that only keeps: dead letters, suspects, what is between two steps of a delay.
pub(crate) fn keeping(kind: QueueType) -> FieldTable {
    let mut table = FieldTable::default();
    table.insert("x-queue-type".into(), text(kind.as_str()));
    if kind == QueueType::Quorum {
        table.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(DELIVERY_LIMIT));
    }
    table
}

/// Whether something was there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Already,
    Made,
    /// Not looked for.
    NotLooked,
}

/// Declares on channels of its own: a refusal closes a channel, which must not hit anybody's messages.
pub(crate) struct Declarer<'a> {
    connections: &'a Connections,
    role: Role,
    how: Provisioning,
    channel: Option<Channel>,
}

impl<'a> Declarer<'a> {
    pub(crate) fn new(connections: &'a Connections, role: Role, how: Provisioning) -> Self {
        Self { connections, role, how, channel: None }
    }

    pub(crate) async fn channel(&mut self) -> Result<&Channel> {
        let usable = self.channel.as_ref().is_some_and(|c| c.status().connected());
        if !usable {
            self.channel = None;
        }
        if self.channel.is_none() {
            self.channel = Some(self.connections.channel(self.role).await?);
        }
        self.channel.as_ref().ok_or_else(|| Error::closed("the channel"))
    }

    /// Topic exchange, queue, dead letters and binding of a group.
    pub(crate) async fn group(
        &mut self,
        place: &Place,
        group: &Group,
        kind: QueueType,
        options: &GroupOptions,
        dead_letters: bool,
    ) -> Result<Found> {
        let exchange_found = self.exchange(place).await?;
        let dead_letter_queue = place.dead_letters(group);
        if dead_letters {
            self.dead_letters(&dead_letter_queue, kind).await?;
        }
        let queue = place.queue(group);
        match place {
            Place::Queue(name) => self.look_for(name).await,
            Place::DeadLetters(name) => self.dead_letters(name, kind).await,
            Place::Topic(exchange) | Place::Exchange(exchange) => {
                let found = self.queue(&queue, group_arguments(kind, &dead_letter_queue, options)).await?;
                if self.how == Provisioning::Create {
                    self.bind(&queue, exchange, options).await?;
                }
                // What was sent while there was no exchange is as lost as what was in a queue.
                Ok(if exchange_found == Found::Made { Found::Made } else { found })
            }
        }
    }

    /// Topic exchange, stream and binding; a queue of somebody else only has to be there.
    pub(crate) async fn stream(&mut self, place: &Place, options: &GroupOptions) -> Result<Found> {
        self.exchange(place).await?;
        match place {
            Place::Queue(name) | Place::DeadLetters(name) => self.look_for(name).await,
            Place::Topic(exchange) | Place::Exchange(exchange) => {
                let mut arguments = FieldTable::default();
                arguments.insert("x-queue-type".into(), text("stream"));
                options.add_to(&mut arguments);
                let stream = place.stream();
                let found = self.queue(&stream, arguments).await?;
                if self.how == Provisioning::Create {
                    self.bind(&stream, exchange, options).await?;
                }
                Ok(found)
            }
        }
    }

    /// The queue of a group's dead letters.
    pub(crate) async fn dead_letters(&mut self, name: &str, kind: QueueType) -> Result<Found> {
        self.queue(name, keeping(kind)).await
    }

    /// Makes a queue of ours beside a group's, whatever the provisioning says: its name is no user's. Who may not make queues
    /// uses the one that is there.
    pub(crate) async fn make(&mut self, name: &str, arguments: FieldTable) -> Result<()> {
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        let made = self.channel().await?.queue_declare(short(name)?, durable, arguments);
        match answer(name, made).await? {
            Ok(_) => Ok(()),
            Err(e) if is_refused(&e) && self.depth(name).await?.is_some() => Ok(()),
            Err(e) => Err(fault(format!("make the queue '{name}'"), e)),
        }
    }

    pub(crate) async fn exchange(&mut self, place: &Place) -> Result<Found> {
        let (name, ours) = match place {
            Place::Topic(name) => (name, true),
            Place::Exchange(name) => (name, false),
            Place::Queue(_) | Place::DeadLetters(_) => return Ok(Found::NotLooked),
        };
        if self.how == Provisioning::None {
            return Ok(Found::NotLooked);
        }
        let what = format!("exchange '{name}'");
        let passive = ExchangeDeclareOptions { passive: true, durable: true, ..ExchangeDeclareOptions::default() };
        let channel = self.channel().await?;
        let kind = ExchangeKind::Topic;
        let look = channel.exchange_declare(short(name)?, kind.clone(), passive, FieldTable::default());
        let found = match answer(&what, look).await? {
            Ok(()) => Found::Already,
            Err(e) if is_missing(&e) && self.how == Provisioning::Create && ours => Found::Made,
            Err(e) => return Err(self.missing(what, e)),
        };
        if !ours {
            return Ok(found);
        }
        let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let channel = self.channel().await?;
        match answer(&what, channel.exchange_declare(short(name)?, kind, durable, FieldTable::default())).await? {
            Ok(()) if found == Found::Made => tracing::warn!(exchange = %name, "topic exchange made"),
            Ok(()) => {}
            // It is there; who may not configure it cannot compare it either.
            Err(e) if is_refused(&e) && found == Found::Already => {}
            Err(e) => return Err(fault(what, e)),
        }
        Ok(found)
    }

    async fn look_for(&mut self, name: &str) -> Result<Found> {
        if self.how == Provisioning::None {
            return Ok(Found::NotLooked);
        }
        let what = format!("queue '{name}'");
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let look = self.channel().await?.queue_declare(short(name)?, passive, FieldTable::default());
        answer(&what, look).await?.map_err(|e| self.missing(what, e))?;
        Ok(Found::Already)
    }

    /// What must be there and is not.
    fn missing(&self, what: String, error: lapin::Error) -> Error {
        let missing = is_missing(&error);
        let error = fault(what, error);
        match missing {
            true => error.of_kind(ErrorKind::Topology),
            false => error,
        }
    }

    async fn queue(&mut self, name: &str, arguments: FieldTable) -> Result<Found> {
        if self.how == Provisioning::None {
            return Ok(Found::NotLooked);
        }
        let what = format!("queue '{name}'");
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let look = self.channel().await?.queue_declare(short(name)?, passive, FieldTable::default());
        let found = match answer(&what, look).await? {
            Ok(_) => Found::Already,
            Err(e) if is_missing(&e) && self.how == Provisioning::Create => Found::Made,
            Err(e) => return Err(self.missing(what, e)),
        };
        // Declaring what exists compares: other arguments are refused, and the broker says which.
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        let declare = self.channel().await?.queue_declare(short(name)?, durable, arguments);
        match answer(&what, declare).await? {
            Ok(_) if found == Found::Made => tracing::warn!(queue = %name, "queue made"),
            Ok(_) => {}
            Err(e) if is_refused(&e) && found == Found::Already => {}
            Err(e) => return Err(fault(what, e)),
        }
        Ok(found)
    }

    /// Binds a queue by all of the bindings that are asked for.
    pub(crate) async fn bind(&mut self, queue: &str, exchange: &str, options: &GroupOptions) -> Result<()> {
        for (key, arguments) in options.bindings() {
            let what = format!("bind queue '{queue}' to exchange '{exchange}'");
            let (queue, exchange, key) = (short(queue)?, short(exchange)?, short(&key)?);
            let bind = self.channel().await?.queue_bind(queue, exchange, key, QueueBindOptions::default(), arguments);
            answer(&what, bind).await?.map_err(|e| fault(what, e))?;
        }
        Ok(())
    }

    /// Messages and consumers of a queue; `None` if there is none.
    pub(crate) async fn depth(&mut self, name: &str) -> Result<Option<(u64, u64)>> {
        let what = format!("look at queue '{name}'");
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let look = self.channel().await?.queue_declare(short(name)?, passive, FieldTable::default());
        match answer(&what, look).await? {
            Ok(queue) => Ok(Some((queue.message_count().into(), queue.consumer_count().into()))),
            Err(e) if is_missing(&e) => Ok(None),
            Err(e) => Err(fault(what, e)),
        }
    }

    /// Lets go of the channel.
    pub(crate) async fn done(mut self) {
        if let Some(channel) = self.channel.take()
            && channel.status().connected()
        {
            // A channel that cannot be closed in time goes with its connection.
            let _ = within(Duration::from_secs(1), "close a channel", channel.close(200, "OK".into())).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Place, group_arguments};
    use crate::options::GroupOptions;
    use crate::url::QueueType;
    use lapin::types::AMQPValue;
    use mq_api::{Group, Topic};

    #[test]
    fn queues_have_a_limit_that_is_never_reached_and_a_net() {
        let table = group_arguments(QueueType::Quorum, "t..g..dlq", &GroupOptions::default());
        let argument = |name: &str| table.inner().get(name).cloned();
        // RabbitMQ 4 would drop after 20, 3.10 drops all with -1.
        assert_eq!(argument("x-delivery-limit"), Some(AMQPValue::LongLongInt(1_000_000)));
        assert_eq!(argument("x-dead-letter-routing-key"), Some(super::text("t..g..dlq")));
        assert_eq!(argument("x-dead-letter-strategy"), Some(super::text("at-least-once")));
        let classic = group_arguments(QueueType::Classic, "t..g..dlq", &GroupOptions::default());
        assert!(!classic.contains_key("x-delivery-limit"), "classic queues refuse it");
    }

    #[test]
    fn names_do_not_collide() {
        let group = Group::new("billing");
        let place = Place::of(&Topic::new("orders"));
        assert_eq!(
            (place.queue(&group), place.dead_letters(&group)),
            ("orders..billing".into(), "orders..billing..dlq".into())
        );
        let letters = Place::of(&Topic::dead_letters("orders", "billing"));
        assert_eq!(letters.queue(&"ops".into()), "orders..billing..dlq");
        assert_eq!(Place::of(&Topic::native("jobs")), Place::Queue("jobs".into()));
        assert_eq!(Place::of(&Topic::native("queue://jobs")), Place::Queue("jobs".into()));
        let exchange = Place::of(&Topic::native("exchange://logs"));
        assert_eq!(
            (exchange.clone(), exchange.queue(&group)),
            (Place::Exchange("logs".into()), "logs..billing".into())
        );
    }
}
