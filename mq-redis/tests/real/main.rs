//! Tests on real servers, each private to its test. Without a Redis on this machine they say so, and count as skipped.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test program")]

mod delivery;
mod deployments;
mod faults;
mod gaps;
mod pubsub;
mod rarer;
mod removed;
mod reports;
mod rig;
