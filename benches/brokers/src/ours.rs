//! anymq, over whatever backend the URL names: the program that the raw ones are compared with.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anymq::prelude::*;
use anymq::{Deliveries, Group, SendBatch, Topic};
use bytes::Bytes;

use crate::job::{BATCH, Failed, GROUP, Job, PATIENCE, Ran, payload};
use crate::meter::Meter;

fn subscription(topic: &str) -> Subscription {
    // What a raw consumer is given at a time, twice: one batch in hand while the next one comes.
    Subscription::group(topic, GROUP).max_in_flight(2 * BATCH)
}

/// One payload for all, as the raw programs write one: neither side pays for making it.
fn batch(n: usize, payload: &Bytes) -> SendBatch {
    let mut batch = SendBatch::new();
    batch.messages.extend((0..n).map(|_| Message::new(payload.clone())));
    batch
}

/// Sends `n` messages, at most so many batches at a time.
async fn send(producer: &Arc<dyn Producer>, n: usize, most: usize, payload: &Bytes) -> Result<(), Failed> {
    let mut flying = VecDeque::new();
    let mut left = n;
    while left > 0 || !flying.is_empty() {
        while left > 0 && flying.len() < most {
            let some = left.min(BATCH);
            left -= some;
            flying.push_back(producer.send_batch(batch(some, payload)));
        }
        if let Some(sending) = flying.pop_front()
            && !sending.await.all_ok()
        {
            return Err("a send was not confirmed".into());
        }
    }
    Ok(())
}

async fn receive(consumer: &mut Box<dyn Consumer>, n: usize) -> Result<(), Failed> {
    let mut deliveries = Deliveries::new();
    let mut got = 0;
    let mut last = None;
    while got < n {
        let some = tokio::time::timeout(PATIENCE, consumer.recv_batch(BATCH, &mut deliveries)).await??;
        if some == 0 {
            return Err("the consumer was closed".into());
        }
        got += some;
        // It takes effect at the call; waiting for each answer would be waiting for nothing.
        last = Some(deliveries.ack_all());
    }
    if let Some(last) = last {
        last.await;
    }
    Ok(())
}

/// Sends all, then receives all.
pub(crate) async fn run(job: &Job) -> Result<Ran, Failed> {
    let broker = anymq::connect(job.url.as_str()).await?;
    let mut consumer = broker.subscribe(subscription(&job.topic)).await?;
    // It is there, and takes nothing until it is asked: what it prefetches while the others send would be uncounted.
    consumer.control().pause();
    let producer = broker.producer(ProducerSpec::new(job.topic.as_str()).group(GROUP)).await?;
    let payload = Bytes::from(payload(job.size));
    let meter = Meter::start();
    send(&producer, job.n, job.flying(), &payload).await?;
    let sent = meter.stop();
    let meter = Meter::start();
    consumer.control().resume();
    receive(&mut consumer, job.n).await?;
    let received = meter.stop();
    broker.close(Duration::from_secs(10)).await;
    Ok(Ran { send: sent, receive: received })
}

/// Awaited sends alone.
pub(crate) async fn single(job: &Job) -> Result<Ran, Failed> {
    let broker = anymq::connect(job.url.as_str()).await?;
    let producer = broker.producer(ProducerSpec::new(job.topic.as_str())).await?;
    let payload = Bytes::from(payload(job.size));
    producer.send(Message::new(payload.clone())).await?;
    let meter = Meter::start();
    for _ in 0..job.n {
        producer.send(Message::new(payload.clone())).await?;
    }
    let sent = meter.stop();
    broker.close(Duration::from_secs(10)).await;
    Ok(Ran { send: sent, receive: Meter::start().stop() })
}

/// Messages a second that are received while so many are in hand, all of them sent before.
pub(crate) async fn in_hand(job: &Job, most: usize) -> Result<f64, Failed> {
    let broker = anymq::connect(job.url.as_str()).await?;
    let payload = Bytes::from(payload(job.size));
    let topic = job.topic.as_str();
    let producer = broker.producer(ProducerSpec::new(topic).group(GROUP)).await?;
    send(&producer, job.n, job.flying(), &payload).await?;
    let bytes = most * 8 * job.size;
    let subscription = Subscription::group(topic, GROUP).max_in_flight(most).max_in_flight_bytes(bytes.max(64 << 20));
    let mut consumer = broker.subscribe(subscription).await?;
    let some = BATCH.min(most.div_ceil(2));
    let (mut got, mut hand, mut held) = (0, VecDeque::new(), 0);
    let mut last = None;
    let mut begun = None;
    while got < job.n {
        let mut deliveries = Deliveries::new();
        got += tokio::time::timeout(PATIENCE, consumer.recv_batch(some, &mut deliveries)).await??;
        // Once it flows: joining a group is not what is measured.
        begun.get_or_insert_with(Instant::now);
        held += deliveries.len();
        hand.push_back(deliveries);
        while held + some > most
            && let Some(mut oldest) = hand.pop_front()
        {
            held -= oldest.len();
            last = Some(oldest.ack_all());
        }
    }
    for mut rest in hand {
        last = Some(rest.ack_all());
    }
    if let Some(last) = last {
        last.await;
    }
    let rate = job.n as f64 / begun.ok_or("no message")?.elapsed().as_secs_f64();
    broker.close(Duration::from_secs(10)).await;
    Ok(rate)
}

/// Messages a second that go through, sent and received at the same time, over that many topics of one client.
pub(crate) async fn through(job: &Job, topics: usize, backlog: usize) -> Result<f64, Failed> {
    let broker = anymq::connect(job.url.as_str()).await?;
    let payload = Bytes::from(payload(job.size));
    let mut lanes = Vec::new();
    for number in 0..topics {
        let topic = format!("{}-{number}", job.topic);
        let consumer = broker.subscribe(subscription(&topic)).await?;
        let producer = broker.producer(ProducerSpec::new(topic.as_str()).group(GROUP)).await?;
        lanes.push((producer, consumer));
    }
    for (producer, consumer) in &lanes {
        if backlog > 0 {
            consumer.control().pause();
            send(producer, backlog, job.flying(), &payload).await?;
            consumer.control().resume();
        }
    }
    let each = (job.n / topics).max(1);
    let begun = Instant::now();
    // All at once, as one client of many topics works; one after the other each would wait for its own round trips alone.
    let through = lanes.iter_mut().map(|(producer, consumer)| async {
        let (sent, received) = tokio::join!(send(producer, each, job.flying(), &payload), receive(consumer, each));
        sent.and(received)
    });
    futures_util::future::try_join_all(through).await?;
    let rate = (each * topics) as f64 / begun.elapsed().as_secs_f64();
    drop(lanes);
    if topics > 1 {
        // What stays of hundreds of topics would slow the server down for the runs that follow.
        let names = (0..topics).map(|number| format!("{}-{number}", job.topic));
        futures_util::future::join_all(names.map(|name| delete(&*broker, name))).await;
    }
    broker.close(Duration::from_secs(10)).await;
    Ok(rate)
}

async fn delete(broker: &dyn Broker, topic: String) {
    let (admin, topic) = (broker.admin(), Topic::new(topic));
    let letters = Topic::dead_letters(topic.clone(), Group::new(GROUP));
    // It is only to save the server work.
    drop(tokio::join!(admin.delete_topic(&letters), admin.delete_topic(&topic)));
}

/// Deletes what a run left, whoever made it.
pub(crate) async fn tidy(url: &str, topic: &str) -> Result<(), Failed> {
    let broker = anymq::connect(url).await?;
    tokio::join!(delete(&*broker, topic.to_owned()), delete(&*broker, format!("{topic}-0")));
    broker.close(Duration::from_secs(10)).await;
    Ok(())
}

/// Milliseconds from when a message should have been sent until it was received, sorted: at a rate that does not wait for
/// anything, so that a stall is counted in every message that it holds up.
pub(crate) async fn latencies(job: &Job, rate: f64) -> Result<Vec<f64>, Failed> {
    let broker = anymq::connect(job.url.as_str()).await?;
    let mut consumer = broker.subscribe(subscription(&job.topic)).await?;
    let producer = broker.producer(ProducerSpec::new(job.topic.as_str()).group(GROUP)).await?;
    let filler = payload(job.size);
    // Once it flows: joining a group is not what is measured.
    producer.send(Message::new(filler.clone())).await?;
    let first = tokio::time::timeout(PATIENCE, consumer.recv()).await??;
    first.ok_or("the consumer was closed")?.ack().await;
    let begun = Instant::now();
    let due = |number: usize| Duration::from_secs_f64(number as f64 / rate);
    let n = job.n;
    let sending = async {
        let mut flying = Vec::with_capacity(n);
        let mut next = 0;
        while next < n {
            let now = begun.elapsed();
            while next < n && due(next) <= now {
                let mut bytes = filler.clone();
                let intended = u64::try_from(due(next).as_nanos()).unwrap_or(u64::MAX);
                bytes[..8].copy_from_slice(&intended.to_be_bytes());
                flying.push(producer.send(Message::new(bytes)));
                next += 1;
            }
            tokio::time::sleep_until((begun + due(next)).into()).await;
        }
        for sending in flying {
            sending.await?;
        }
        Ok::<_, Failed>(())
    };
    let receiving = async {
        let mut deliveries = Deliveries::new();
        let mut waits = Vec::with_capacity(n);
        let mut last = None;
        while waits.len() < n {
            tokio::time::timeout(PATIENCE, consumer.recv_batch(BATCH, &mut deliveries)).await??;
            let now = begun.elapsed();
            for message in deliveries.messages() {
                let mut intended = [0; 8];
                intended.copy_from_slice(message.payload.as_deref().and_then(|p| p.get(..8)).unwrap_or(&[0; 8]));
                waits.push((now - Duration::from_nanos(u64::from_be_bytes(intended))).as_secs_f64() * 1e3);
            }
            // As in `receive`: what is next must not wait for the answer, which Kafka's coordinator keeps back for 10 ms.
            last = Some(deliveries.ack_all());
        }
        if let Some(last) = last {
            last.await;
        }
        Ok::<_, Failed>(waits)
    };
    let (sent, waits) = tokio::join!(sending, receiving);
    sent?;
    let mut waits = waits?;
    waits.sort_by(f64::total_cmp);
    broker.close(Duration::from_secs(10)).await;
    Ok(waits)
}
