//! Real brokers, faults and history checks for the tests of anymq.
//!
//! * [`Server`] is one private Redis, RabbitMQ, Kafka or PostgreSQL: on free ports of 127.0.0.1, with all its state in
//!   one folder under `target/brokers`, ended with the process that started it, however that ends.
//! * [`Proxy`](proxy::Proxy) stands before a server and misbehaves on demand.
//! * [`Fleet`] starts several at once, or uses the ones that `MQ_TEST_*_URL` names.
//!
//! Not published; nothing here is part of the library.

mod acl;
#[cfg(feature = "tls")]
mod certificates;
pub mod checker;
pub mod client;
mod cluster;
mod fleet;
mod folders;
mod greet;
pub mod history;
mod install;
mod kafka;
mod kind;
mod need;
mod offsets;
mod ports;
mod postgres;
mod problem;
mod process;
mod programs;
pub mod proxy;
mod rabbitmq;
mod redis;
#[cfg(feature = "conformance")]
mod road;
mod server;
mod silent;
mod table;
pub mod trial;
mod versions;
mod wait;
mod watch;

pub use acl::{KafkaResource, kafka_allow};
#[cfg(feature = "tls")]
pub use certificates::{Certificates, Pair};
pub use cluster::{Cluster, Formation};
pub use fleet::{Entry, Fleet, Origin, Want, ports_in, provide, url_answers};
pub use folders::{Folder, logs_in, records, root, sweep, target};
pub use greet::answers;
pub use install::{provide_for_build, shortage};
pub use kafka::{KafkaMember, KafkaOptions, KafkaSecurity};
pub use kind::Kind;
pub use need::{in_ci, missing, need, private, skip};
pub use offsets::committed as kafka_committed;
pub use ports::free_port;
pub use postgres::PostgresOptions;
pub use problem::{Problem, Result};
pub use process::{Knock, Launch, Process, send, send_to_group};
pub use rabbitmq::{RabbitMember, RabbitOptions, RabbitUser};
pub use redis::RedisOptions;
#[cfg(feature = "conformance")]
pub use road::{Doors, Road, Roads};
pub use server::{Killed, Restarted, Server};
pub use silent::SilentHosts;
pub use table::{Running, identity, is_same, running};
pub use versions::Version;
pub use wait::{eventually, until};
pub use watch::end_with_a_server;
