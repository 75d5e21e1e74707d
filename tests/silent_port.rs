//! A port on which somebody listens and never says a word: a wrong port, or a server that hangs. `connect_timeout` holds there
//! too, and the error names the address.
#![cfg(any(feature = "redis", feature = "amqp", feature = "kafka"))]
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use anymq::ErrorKind;
use mq_testbed::SilentHosts;
use std::time::{Duration, Instant};

async fn gives_up(scheme: &str) {
    let silent = SilentHosts::new(1).unwrap();
    let address = silent.to_string();
    let begun = Instant::now();
    let connected = anymq::connect(&format!("{scheme}://{address}?connect_timeout=1s")).await;
    let error = connected.err().expect("nobody answers there");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{scheme}: {error}");
    assert!(error.to_string().contains(&address), "{scheme} does not name the address: {error}");
    let took = begun.elapsed();
    // Ten times what was asked for: a machine that does other things too. What hangs takes minutes.
    assert!(took < Duration::from_secs(10), "{scheme} took {took:?} of one second");
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn redis_gives_up_in_time() {
    gives_up("redis").await;
    gives_up("redis+pubsub").await;
}

#[cfg(feature = "amqp")]
#[tokio::test]
async fn amqp_gives_up_in_time() {
    gives_up("amqp").await;
}

#[cfg(feature = "kafka")]
#[tokio::test]
async fn kafka_gives_up_in_time() {
    gives_up("kafka").await;
}
