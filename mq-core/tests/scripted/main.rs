//! The engine against a toy broker in memory, behind the same seam as real backends, in three shapes: a blocking reader
//! (like Redis), a pusher with prefetch (like RabbitMQ), an OS thread with a committed prefix (like Kafka).

// A test crate has no outside, and its panics are its reports.
#![allow(unreachable_pub, clippy::expect_used, clippy::unwrap_used, clippy::panic)]

mod broker;
mod handler;
mod pusher;
mod reader;
mod rig;
mod script;
mod thread;
mod tx;

mod at_most_once;
mod bounds;
mod closing;
mod crashes;
mod everything_once;
mod keys;
mod producing;
mod reconnect;
mod retries;
mod stale;
mod supervision;
