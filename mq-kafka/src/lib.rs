//! The Kafka backend of the anymq messaging library.

mod admin;
mod broadcast;
mod client;
mod commit;
mod connect;
mod delay;
mod driver;
mod fault;
mod ffi;
mod group;
mod letters;
mod member;
mod partition;
mod record;
mod send;
mod start;
mod thread;
mod topology;
mod url;
mod wire;

pub use connect::{connect, connect_with};
