//! The RabbitMQ backend.

mod admin;
mod alone;
mod broadcast;
mod broker;
mod connect;
mod copies;
mod delay;
mod driver;
mod fault;
mod letters;
mod options;
mod probe;
mod produce;
mod read;
mod returns;
mod send;
mod settle;
mod topology;
mod url;
mod wire;

pub use broker::{connect, connect_with_hooks};
