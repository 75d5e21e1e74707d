//! The engine that every anymq backend shares. For authors of backends; programs use the `anymq` crate.
//!
//! A backend behind a network implements [`Driver`] and gets [`EngineConsumer`] and [`EngineProducer`]: in-flight bounds,
//! retries, dead letters, settlement and acknowledgement batching, crash suspects, order per key, supervision, drain and
//! health exist here, once.
//!
//! | part | module |
//! |---|---|
//! | what a driver implements | [`Driver`], [`Session`], [`TxSession`] |
//! | one ownership period | [`Lane`] |
//! | settlements to carry out | [`SettleQueue`], [`Plan`] |
//! | messages to write | [`Outbox`], [`Outgoing`] |
//! | retry and dead-letter policy | [`Policy`], [`Settlement`] |
//! | in-flight bounds | [`Flow`] |
//! | what a connection made, and its close | [`Roster`] |

mod apply;
mod consumer;
mod deadline;
mod env;
mod flow;
mod hands;
mod hold;
mod hooks;
mod hosts;
mod inbox;
mod keeper;
mod keygate;
mod lane;
mod mechanics;
#[cfg(test)]
mod model;
mod outbox;
mod plan;
mod policy;
mod producer;
pub mod redrive;
mod resume;
mod ring;
mod roster;
mod seam;
mod settles;
mod shared;
mod slots;
mod stamp;
mod supervise;
mod sync;
mod ticket;
mod tries;
mod window;
mod written;

pub use consumer::EngineConsumer;
pub use deadline::{Begun, Closing, Deadline};
pub use env::Env;
pub use flow::{Credit, Flow, Gate};
pub use hold::SlotView;
pub use hooks::{Hooks, NoHooks};
pub use hosts::HostTurns;
pub use keeper::Target;
pub use keygate::{Fnv, KeyGate, key_hash};
pub use lane::{Incoming, Lane};
pub use mechanics::{Mechanics, MoveBy, ReleaseBy, RetryBy};
pub use outbox::Outbox;
pub use plan::{Ack, Carry, Other, Plan, Token};
pub use policy::{LetterFacts, Policy, Settlement, Verdict};
pub use producer::EngineProducer;
pub use resume::Resume;
pub use ring::SeqRing;
pub use roster::{Reserved, Roster, Seat};
pub use seam::{Driver, End, Purpose, Run, Session, Stop, TxSession};
pub use settles::SettleQueue;
pub use stamp::stamp;
pub use supervise::ConnectPolicy;
pub use tries::Outgoing;
pub use written::written_time;
