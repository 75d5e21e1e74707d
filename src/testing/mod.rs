//! Testing handlers without a server: a worker on the in-memory broker, and assertions about exactly what happened.
//!
//! ```
//! use anymq::prelude::*;
//!
//! # #[derive(serde::Serialize, serde::Deserialize)] struct Order { card: String }
//! async fn bill(Json(order): Json<Order>) -> Result<(), String> {
//!     if order.card == "good" { Ok(()) } else { Err("the card was refused".to_owned()) }
//! }
//!
//! #[tokio::test(start_paused = true)]
//! # async fn fake() {}
//! async fn a_refused_card_is_tried_five_times_and_then_dead_lettered() {
//!     let test = anymq::testing::start(|broker| {
//!         Worker::new(broker).route(Subscription::group("orders", "billing"), bill)
//!     })
//!     .await;
//!     test.send("orders", &Order { card: "stolen".into() }).await;
//!     test.all_done().await; // minutes of back-off take milliseconds
//!     test.on("orders", "billing").handled(0).attempts(5).dead_lettered(1);
//!     test.nothing_else();
//! }
//! # tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
//! #     .block_on(a_refused_card_is_tried_five_times_and_then_dead_lettered());
//! ```
//!
//! `start_paused = true` needs tokio's feature `test-util`. Without it everything works in real time.

mod assertions;
mod tally;
mod test;

pub use assertions::On;
pub use mq_memory::{Happened, What};
pub use test::{Start, Test, start};
