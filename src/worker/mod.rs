//! The worker: handlers are plain async functions whose arguments are taken from the message and whose result settles it.
//!
//! | to | use |
//! |---|---|
//! | run handlers | [`Worker`] |
//! | take things from a message | [`Json`], [`Payload`], [`Key`], [`Attempt`], [`State`], `Headers`, `Source`, `MessageId`, `Message`, or your own [`FromDelivery`] |
//! | decide what becomes of it | `()`, `Result<(), E>`, [`Outcome`] |
//! | handle many at once | [`Worker::batch`], [`Batch`] |
//! | put something around handlers | [`Worker::layer`] with any `tower::Layer`; [`TimeoutLayer`], [`IdempotentLayer`] are here |
//! | pause, resume, stop | [`WorkerHandle`] |

mod batch;
mod batch_runner;
mod books;
mod builder;
mod course;
mod extract;
mod handle;
pub mod handler;
pub mod idempotent;
mod outcome;
mod request;
mod route;
mod runner;
mod signals;
mod slots;
mod timeout;

pub use batch::{Batch, BatchFuture, BatchHandler, BatchHandlerService, BatchRequest, IntoOutcomes, Outcomes};
pub use books::Report;
pub use builder::{BatchRouted, Routed, Worker};
pub use extract::{Attempt, FromDelivery, FromRef, Json, Key, Payload, State};
pub use handle::{Phase, WorkerHandle};
pub use handler::Handler;
pub use idempotent::IdempotentLayer;
pub use outcome::{IntoOutcome, Outcome};
pub use request::Request;
pub use route::{BatchService, IntoSubscriptions, Layered, LayeredRest, Many, MessageService, One, Plan, Routes};
pub use signals::shutdown_signal;
pub use timeout::{Elapsed, Timeout, TimeoutFuture, TimeoutLayer};
