//! Promises that a hostile review found broken, by what they are about.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic)] // A test may: its panic is the report.

mod asked;
mod bounds;
mod closes;
mod letters;
mod made_again;
mod scene;
mod subscribed;
mod trials;
