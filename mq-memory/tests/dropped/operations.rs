//! The operations. Each is named after the method that it drops.

use crate::world::{GROUP, TOPIC, World, group, sub, topic};
use mq_api::{
    BrokerExt, ConsumerExt, Deliveries, Delivery, Disposition, HealthState, Message, ProducerExt, ProducerSpec,
    RedriveOptions, SendOptions, Start, Subscription, TopicSpec,
};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

type Running<'w> = Pin<Box<dyn Future<Output = ()> + 'w>>;

/// See the module.
pub(crate) struct Operation {
    pub(crate) name: &'static str,
    /// Whether what waited before must come after it: all but what deletes or moves past it.
    pub(crate) keeps: bool,
    /// Labels that it may settle for good, in hand before.
    pub(crate) may_settle: &'static [&'static str],
    pub(crate) run: for<'w> fn(&'w mut World) -> Running<'w>,
}

impl Operation {
    pub(crate) fn must_see(&self) -> impl Iterator<Item = &'static str> {
        ["m0", "m1", "m2", "m3", "m4"].into_iter().filter(|label| !self.may_settle.contains(label))
    }
}

macro_rules! operations {
    ($( $name:literal $keeps:ident [$($settled:literal)*] |$w:ident| $body:block )*) => {
        pub(crate) const OPERATIONS: &[Operation] = &[$(Operation {
            name: $name,
            keeps: operations!(@ $keeps),
            may_settle: &[$($settled),*],
            run: |$w: &mut World| Box::pin(async move { $body }),
        }),*];
    };
    (@ keeps) => { true };
    (@ loses) => { false };
}

fn x() -> Message {
    Message::new("x")
}

const LIMIT: Duration = Duration::from_secs(5);

operations! {
    "Broker::open_producer" keeps [] |w| { w.broker.open_producer(ProducerSpec::new(TOPIC).group(GROUP)).await.unwrap(); }
    "Broker::open_consumer" keeps [] |w| { drop(w.broker.open_consumer(sub()).await.unwrap()); }
    "Broker::close" keeps [] |w| { w.broker.close(LIMIT).await; }
    "BrokerExt::producer" keeps [] |w| { w.broker.producer("others").await.unwrap(); }
    "BrokerExt::subscribe" keeps [] |w| { drop(w.broker.subscribe(Subscription::broadcast(TOPIC)).await.unwrap()); }

    "Producer::send" keeps [] |w| { w.producer.send(x()).await.unwrap(); }
    "Producer::send_with" keeps [] |w| { w.producer.send_with(x(), SendOptions::timeout(LIMIT)).await.unwrap(); }
    "Producer::send_batch" keeps [] |w| { assert!(w.producer.send_batch(vec![x(), x(), x()].into()).await.all_ok()); }
    "Producer::flush" keeps [] |w| {
        drop(w.producer.send(x()));
        assert!(w.producer.flush(LIMIT).await);
    }
    "Producer::close" keeps [] |w| {
        drop(w.producer.send(x()));
        w.producer.close(LIMIT).await;
    }
    "ProducerExt::send_all" keeps [] |w| { w.producer.send_all(vec![x(), x()]).await; }
    "ProducerExt::send_timeout" keeps [] |w| { w.producer.send_timeout(x(), LIMIT).await.unwrap(); }
    "TypedProducer::send" keeps [] |w| { Arc::clone(&w.producer).json::<str>().send("x").await.unwrap(); }
    "TypedProducer::send_all" keeps [] |w| { Arc::clone(&w.producer).json::<str>().send_all(["x", "x"]).await.unwrap(); }

    "ConsumerExt::recv" keeps [] |w| { drop(w.consumer.recv().await.unwrap()); }
    "ConsumerExt::recv_batch" keeps [] |w| {
        let mut out = Deliveries::new();
        assert!(w.consumer.recv_batch(10, &mut out).await.unwrap() > 0);
    }
    "ConsumerExt::close" keeps [] |w| { w.consumer.close(LIMIT).await; }
    "ConsumerControl::close" keeps [] |w| { w.consumer.control().close(LIMIT).await; }
    "Typed::recv" keeps ["m0" "m1" "m2" "m3" "m4"] |w| {
        // None of them is JSON: they go to the dead letters one by one until something is.
        drop(w.producer.send(Message::new("\"xyz\"")));
        let consumer = w.broker.subscribe(sub()).await.unwrap();
        let mut typed = consumer.json::<String>();
        typed.recv().await.unwrap().unwrap().ack().await;
    }
    "pause and resume" keeps [] |w| {
        let control = w.consumer.control();
        control.pause();
        control.health().wait_for(|h| h.state == HealthState::Paused).await;
        control.resume();
        control.health().wait_for(|h| h.state == HealthState::Running).await;
    }
    "paused" keeps [] |w| {
        w.consumer.control().pause();
        control_waits(w).await;
    }

    "Delivery::ack" keeps ["m0"] |w| { w.hand().ack().await; }
    "Delivery::nack" keeps [] |w| { w.hand().nack("failed").await; }
    "Delivery::nack_after" keeps [] |w| { w.hand().nack_after(Duration::from_secs(60), "later").await; }
    "Delivery::dead_letter" keeps ["m0"] |w| { w.hand().dead_letter("bad").await; }
    "Delivery::release" keeps [] |w| { w.hand().release().await; }
    "Delivery::settle" keeps ["m0"] |w| { w.hand().settle(Disposition::Ack).await; }
    "Delivery::lost" keeps ["m0"] |w| {
        let delivery = w.hand();
        let lost = delivery.lost();
        // Somebody else settles it meanwhile, which ends the ownership.
        delivery.ack().await;
        lost.await;
    }
    "Deliveries::ack_all" keeps ["m0" "m1" "m2" "m3" "m4"] |w| {
        let mut all = Deliveries::new();
        w.held.drain(..).for_each(|d: Delivery| all.push(d));
        all.ack_all().await;
    }
    "two settlements" keeps ["m0" "m1"] |w| {
        let (first, second) = (w.hand(), w.hand());
        let (first, second) = (first.ack(), second.ack());
        first.await;
        second.await;
    }

    "HealthWatch::changed" keeps [] |w| {
        let control = w.consumer.control();
        let mut watch = control.health();
        control.pause();
        watch.changed().await;
        control.resume();
    }
    "HealthWatch::wait_for" keeps [] |w| { w.broker.health().wait_for(|h| h.state == HealthState::Running).await; }
    "Events::next" keeps [] |w| {
        let mut events = w.consumer.control().events();
        w.consumer.control().close(LIMIT).await;
        events.next().await;
    }

    "Admin::backlog" keeps [] |w| { w.broker.admin().backlog(&topic(), &group()).await.unwrap(); }
    "Admin::create_topic" keeps [] |w| { w.broker.admin().create_topic(TopicSpec::new("new")).await.unwrap(); }
    "Admin::topic" keeps [] |w| { assert!(w.broker.admin().topic(&topic()).await.unwrap().is_some()); }
    "Admin::delete_topic" loses [] |w| { w.broker.admin().delete_topic(&topic()).await.unwrap(); }
    "Admin::create_group" keeps [] |w| { w.broker.admin().create_group(&topic(), &"new".into(), Start::Latest).await.unwrap(); }
    "Admin::delete_group" loses [] |w| { w.broker.admin().delete_group(&topic(), &group()).await.unwrap(); }
    "Admin::reset_group" loses [] |w| {
        // A group is moved when it has no members.
        w.held.clear();
        w.consumer.close(LIMIT).await;
        w.broker.admin().reset_group(&topic(), &group(), Start::Latest).await.unwrap();
    }
    "Admin::groups" keeps [] |w| { assert_eq!(w.broker.admin().groups(&topic()).await.unwrap().len(), 1); }
    "Admin::pending" keeps [] |w| { w.broker.admin().pending(&topic(), &group(), 10).await.unwrap(); }
    "Admin::dead_letters" keeps [] |w| { w.broker.admin().dead_letters(&topic(), &group(), 10).await.unwrap(); }
    "Admin::redrive" keeps [] |w| {
        let options = RedriveOptions::default();
        assert_eq!(w.broker.admin().redrive(&topic(), &group(), options).await.unwrap().redriven, 1);
    }
    "Admin::discard_dead_letters" keeps [] |w| {
        let options = RedriveOptions::default();
        assert_eq!(w.broker.admin().discard_dead_letters(&topic(), &group(), options).await.unwrap(), 1);
    }

    "mq_memory::connect" keeps [] |_w| { mq_memory::connect("memory://dropped").await.unwrap(); }
    "MemoryBroker::all_done" keeps ["m0" "m1" "m2" "m3" "m4"] |w| {
        for delivery in w.held.drain(..) {
            delivery.ack().await;
        }
        for _ in 0..3 {
            w.consumer.recv().await.unwrap().unwrap().ack().await;
        }
        w.memory.all_done().await.unwrap();
    }
}

/// A paused consumer that is asked for more: it waits, and ends when it is closed.
async fn control_waits(w: &mut World) {
    let control = w.consumer.control();
    let waited = tokio::time::timeout(LIMIT, w.consumer.recv()).await;
    assert!(waited.is_err(), "a paused consumer hands out");
    control.resume();
}
