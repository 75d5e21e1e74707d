//! The conformance suite of the anymq messaging library; any backend can run it.
//!
//! A backend writes a [`Factory`]: how to connect, and how to make things go wrong. [`run`] then runs every test that its
//! capabilities allow, proves the refusal of the others, and returns a [`Report`].
//!
//! Each test carries the number of the promise that it is about, has one deadline, counts what happened exactly, and leaves
//! nothing behind: no task, connection or member. When it fails it prints what happened, in order.

mod case;
mod check;
mod environment;
mod expected;
mod history;
mod ledger;
mod member;
#[cfg(feature = "memory")]
pub mod memory;
pub mod planted;
mod program;
mod promises;
mod refusal;
mod report;
mod runner;
mod sender;
#[cfg(feature = "memory")]
pub mod sim;
mod table;
mod test;
mod tests;
mod trouble;
#[cfg(feature = "world")]
mod world;

pub use case::{Case, Spread};
pub use check::{Check, Doing, TestFailure};
pub use environment::{Clock, Connection, Environment, Factory, Fired, Hook, Lacking, Leftovers, Pace, Record, Tally};
pub use expected::expected_refusals;
pub use history::History;
pub use ledger::{Ledger, Seen};
pub use member::{Crew, Got, Member, Stopwatch};
pub use program::{OnServer, on_server, on_server_with, program};
pub use promises::PROMISES;
pub use report::{Entry, Outcome, Report, Stated};
pub use runner::{Options, run};
pub use sender::Sender;
pub use table::table;
pub use test::{GROUP, READERS, Test};
pub use tests::all;
#[cfg(feature = "world")]
pub use world::{Line, Lines, Site, World};
