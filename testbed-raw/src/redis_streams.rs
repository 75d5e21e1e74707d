//! Redis Streams through the `redis` crate.

use std::time::{Duration, Instant};

use mq_testbed::client::{Order, id_in};
use mq_testbed::history::{Sent, Settled};
use redis::{Connection, RedisError, RedisResult, Value};

use crate::roles::{Failed, Got, Raw, Receiver, Sender};

/// An answer that takes longer than this does not come.
const ANSWER: Duration = Duration::from_secs(2);

/// An entry that its owner has held for this long is taken over.
const LEASE: Duration = Duration::from_secs(3);

/// Its owner stops handing it over earlier, so that the two never meet.
const OWN_LEASE: Duration = Duration::from_secs(2);

pub(crate) struct Streams {
    order: Order,
}

impl Streams {
    pub(crate) fn new(order: &Order) -> Self {
        Self { order: order.clone() }
    }

    fn connect(&self) -> Result<Connection, String> {
        let open = || -> RedisResult<Connection> {
            let connection = redis::Client::open(self.order.url.as_str())?.get_connection_with_timeout(ANSWER)?;
            connection.set_read_timeout(Some(ANSWER))?;
            connection.set_write_timeout(Some(ANSWER))?;
            Ok(connection)
        };
        open().map_err(|error| error.to_string())
    }
}

fn words(error: &RedisError) -> String {
    error.to_string()
}

fn create_group(connection: &mut Connection, order: &Order) -> RedisResult<()> {
    redis::cmd("XGROUP").arg(&["CREATE", &order.topic, &order.group, "0", "MKSTREAM"]).query(connection)
}

impl Raw for Streams {
    fn prepare(&self) -> Result<(), String> {
        create_group(&mut self.connect()?, &self.order).map_err(|error| words(&error))
    }

    fn sender(&self) -> Result<Box<dyn Sender>, String> {
        Ok(Box::new(Adder { connection: self.connect()?, topic: self.order.topic.clone() }))
    }

    fn receiver(&self) -> Result<Box<dyn Receiver>, String> {
        Ok(Box::new(Member {
            connection: self.connect()?,
            order: self.order.clone(),
            looked: Instant::now(),
            destroyed: false,
        }))
    }

    fn remaining(&self) -> Result<Vec<String>, String> {
        let mut connection = self.connect()?;
        let Order { topic, group, .. } = &self.order;
        let mut ask = || -> RedisResult<Vec<Got>> {
            let mut found = Vec::new();
            let pending: Vec<Vec<Value>> =
                redis::cmd("XPENDING").arg(&[topic, group, "-", "+", "1000000"]).query(&mut connection)?;
            for entry in pending {
                let place: String = redis::from_redis_value(entry.into_iter().next().unwrap_or(Value::Nil))?;
                found.extend(entries(redis::cmd("XRANGE").arg(&[topic, &place, &place]).query(&mut connection)?)?);
            }
            // What no member was given yet.
            loop {
                let command = ["GROUP", group, "inspector", "COUNT", "1000", "STREAMS", topic, ">"];
                let more = read_reply(redis::cmd("XREADGROUP").arg(&command).query(&mut connection)?)?;
                if more.is_empty() {
                    return Ok(found);
                }
                found.extend(more);
            }
        };
        Ok(ask().map_err(|error| words(&error))?.into_iter().map(|got| got.id).collect())
    }

    fn destroy(&self) -> Result<(), String> {
        redis::cmd("FLUSHALL").exec(&mut self.connect()?).map_err(|error| words(&error))
    }
}

struct Adder {
    connection: Connection,
    topic: String,
}

impl Sender for Adder {
    fn send(&mut self, _: &str, payload: &[u8]) -> Result<(), Failed> {
        let added = redis::cmd("XADD").arg(&self.topic).arg("*").arg("p").arg(payload).exec(&mut self.connection);
        added.map_err(|error| Failed { outcome: Sent::Unknown, words: words(&error) })
    }
}

struct Member {
    connection: Connection,
    order: Order,
    /// When it last looked for what others let lie.
    looked: Instant,
    destroyed: bool,
}

impl Member {
    fn read(&mut self, from: &str) -> RedisResult<Vec<Got>> {
        let Order { topic, group, name, .. } = &self.order;
        let command = ["GROUP", group, name, "COUNT", "10", "BLOCK", "200", "STREAMS", topic, from];
        read_reply(redis::cmd("XREADGROUP").arg(&command).query(&mut self.connection)?)
    }

    fn take_over(&mut self) -> RedisResult<Vec<Got>> {
        let Order { topic, group, name, .. } = &self.order;
        let lease = LEASE.as_millis().to_string();
        let command = [topic, group, name, &lease, "0-0", "COUNT", "10"];
        let reply: Vec<Value> = redis::cmd("XAUTOCLAIM").arg(&command).query(&mut self.connection)?;
        entries(reply.into_iter().nth(1).unwrap_or(Value::Nil))
    }

    /// What others let lie, which after a reconnect is also what this member was given before; else what is new.
    fn next(&mut self) -> RedisResult<Vec<Got>> {
        if self.looked.elapsed() > Duration::from_secs(1) {
            self.looked = Instant::now();
            let taken = self.take_over()?;
            if !taken.is_empty() {
                return Ok(taken);
            }
        }
        self.read(">")
    }
}

impl Receiver for Member {
    fn receive(&mut self) -> Result<Vec<Got>, String> {
        match self.next() {
            Ok(batch) => Ok(batch),
            Err(error) if error.code() == Some("NOGROUP") => {
                // Another member may be faster; then the group is there, and both tell of the gap.
                let _ = create_group(&mut self.connection, &self.order);
                self.destroyed = true;
                Ok(Vec::new())
            }
            Err(error) => Err(words(&error)),
        }
    }

    fn ack(&mut self, got: &Got) -> Result<Settled, String> {
        let place = got.place.as_deref().unwrap_or_default();
        let done: RedisResult<u64> =
            redis::cmd("XACK").arg(&[&self.order.topic, &self.order.group, place]).query(&mut self.connection);
        match done {
            Ok(1) => Ok(Settled::Confirmed),
            Ok(_) => Ok(Settled::Stale),
            Err(error) => Err(words(&error)),
        }
    }

    fn found_destroyed(&mut self) -> bool {
        std::mem::take(&mut self.destroyed)
    }
}

/// The reply of XREADGROUP for one stream.
fn read_reply(reply: Value) -> RedisResult<Vec<Got>> {
    if reply == Value::Nil {
        return Ok(Vec::new());
    }
    let streams: Vec<Vec<Value>> = redis::from_redis_value(reply)?;
    let mut found = Vec::new();
    for stream in streams {
        found.extend(entries(stream.into_iter().nth(1).unwrap_or(Value::Nil))?);
    }
    Ok(found)
}

fn entries(list: Value) -> RedisResult<Vec<Got>> {
    if list == Value::Nil {
        return Ok(Vec::new());
    }
    let list: Vec<Value> = redis::from_redis_value(list)?;
    let mut found = Vec::new();
    for entry in list {
        // An entry that was deleted while pending is nil, or has no fields.
        let Ok((place, fields)) = redis::from_redis_value::<(String, Vec<Vec<u8>>)>(entry) else { continue };
        let id = fields.get(1).map(|payload| id_in(payload)).unwrap_or_default();
        found.push(Got { id, place: Some(place), ours_until: Some(Instant::now() + OWN_LEASE) });
    }
    Ok(found)
}
