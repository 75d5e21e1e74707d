//! How to test a handler: no server, no waiting, and exact statements about what must have happened.
//!
//!     cargo run --example testing        runs the three tests below and says how long they took
//!     cargo test --example testing       runs them as tests, which is where they belong
//!
//! The handler under test charges a card and sends a receipt.

use anymq::prelude::*;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Serialize, Deserialize)]
struct Order {
    card: String,
}

/// Charges the card; a receipt goes out for each that could be charged.
async fn bill(
    Json(order): Json<Order>,
    Attempt(attempt): Attempt,
    State(receipts): State<Arc<dyn Producer>>,
) -> Result<(), anymq::BoxError> {
    match order.card.as_str() {
        "good" => {}
        "flaky" if attempt > 2 => {}
        "flaky" => return Err("the payment service timed out".into()),
        "unknown" => return Err(Failure::permanent("no such card").into()),
        _ => return Err("the card was refused".into()),
    }
    receipts.send(Message::json(&format!("paid with {}", order.card))?).await?;
    Ok(())
}

/// The worker as the program runs it; only the broker is another one.
async fn start() -> anymq::testing::Test {
    let billing = Subscription::group("orders", "billing");
    anymq::testing::Start::default()
        .worker(async |broker| {
            let receipts = broker.producer("receipts").await?;
            Ok(Worker::new(broker).state(receipts).route(billing, bill))
        })
        .await
}

fn order(card: &str) -> Order {
    Order { card: card.to_owned() }
}

async fn a_refused_card_is_tried_five_times_and_then_dead_lettered() {
    let test = start().await;
    test.send("orders", &order("stolen")).await;
    test.all_done().await; // two and a half minutes of back-off
    test.on("orders", "billing").handled(0).attempts(5).dead_lettered(1).because("max-attempts", 1);
    test.nothing_else(); // above all: no receipt
}

async fn a_flaky_payment_is_paid_once() {
    let test = start().await;
    test.send("orders", &order("flaky")).await;
    test.all_done().await;
    test.on("orders", "billing").handled(1).attempts(3);
    test.sent("receipts", 1).nothing_else();
}

async fn what_cannot_be_paid_is_not_tried_again() {
    let test = start().await;
    test.send("orders", &order("unknown")).await;
    test.send("orders", &"this is no order").await;
    test.all_done().await;
    test.on("orders", "billing").handled(0).dead_lettered(2).because("permanent", 1).because("undecodable", 1);
    test.nothing_else();
}

fn main() {
    let begun = std::time::Instant::now();
    // `#[tokio::test(start_paused = true)]` does this for a test.
    let paused = || tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    for run in [0, 1, 2] {
        let Ok(runtime) = paused() else { return eprintln!("no runtime") };
        let clock = runtime.block_on(async {
            let clock = tokio::time::Instant::now();
            match run {
                0 => a_refused_card_is_tried_five_times_and_then_dead_lettered().await,
                1 => a_flaky_payment_is_paid_once().await,
                _ => what_cannot_be_paid_is_not_tried_again().await,
            }
            clock.elapsed()
        });
        println!("test {} passed, {:.1} s of the broker's time", run + 1, clock.as_secs_f64());
    }
    println!("all in {:?}", begun.elapsed());
}

#[cfg(test)]
mod tests {
    #[tokio::test(start_paused = true)]
    async fn a_refused_card_is_tried_five_times_and_then_dead_lettered() {
        super::a_refused_card_is_tried_five_times_and_then_dead_lettered().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_flaky_payment_is_paid_once() {
        super::a_flaky_payment_is_paid_once().await;
    }

    #[tokio::test(start_paused = true)]
    async fn what_cannot_be_paid_is_not_tried_again() {
        super::what_cannot_be_paid_is_not_tried_again().await;
    }
}
