//! One member of a group: its subscription, its handler, its worker.

use crate::ledger::{Entry, What};
use crate::options::Sabotage;
use anymq::prelude::*;
use anymq::{Error, Guarantee};
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;

#[derive(Deserialize)]
struct Order {
    id: String,
    #[allow(dead_code)]
    customer: String,
    cents: u64,
    payment: String,
}

/// Where a member tells what it did, before the message is acknowledged.
pub type Log = Arc<dyn Fn(Entry) + Send + Sync>;
/// How a member dies of a deadly order.
pub type Die = Arc<dyn Fn() + Send + Sync>;

/// What the handlers of a member share.
#[derive(Clone)]
pub struct Member {
    pub group: String,
    pub name: String,
    pub topic: String,
    pub lease: Duration,
    pub sabotage: Option<Sabotage>,
    pub log: Log,
    pub die: Die,
}

impl Member {
    /// What it receives. Leases and delays are short, so that the whole run ends within a minute.
    fn subscription(&self) -> Subscription {
        let delays = [50, 100, 200, 400].map(Duration::from_millis);
        let subscription = Subscription::group(self.topic.as_str(), self.group.as_str())
            .member(&self.name)
            .lease(self.lease)
            .retry(RetryPolicy::attempts(5).delays(delays))
            .max_in_flight(64)
            .concurrency(16);
        match self.sabotage {
            Some(Sabotage::AckEarly) if self.group == "billing" => subscription.guarantee(Guarantee::AtMostOnce),
            _ => subscription,
        }
    }

    /// Runs until `until`, or until the handle says so.
    pub async fn run(self, broker: Arc<dyn Broker>, until: impl Future<Output = ()>) -> Result<(), Error> {
        let worker = Worker::new(broker).state(self.clone()).shutdown_deadline(Duration::from_secs(5));
        match self.group.as_str() {
            "billing" => worker.route(self.subscription(), bill).run_until(until).await?,
            _ => worker.route(self.subscription(), analyse).run_until(until).await?,
        };
        Ok(())
    }

    fn tell(&self, headers: &Headers, what: What) {
        let line = headers.get_str("line").and_then(|line| line.parse().ok()).unwrap_or(0);
        (self.log)(Entry { group: self.group.clone(), line, what });
    }
}

/// Charges an order. What cannot be read as an `Order` goes to the dead letters before this is called.
async fn bill(
    Json(order): Json<Order>,
    headers: Headers,
    Attempt(attempt): Attempt,
    State(me): State<Member>,
) -> Result<(), Failure> {
    let charged = match order.payment.as_str() {
        "unknown-customer" => Err(Failure::permanent("nobody knows this customer")),
        "refused" => Err(Failure::failed("the card was refused")),
        "flaky" if attempt <= 2 => Err(Failure::failed("the payment service timed out")),
        "deadly" => {
            (me.die)();
            std::future::pending().await
        }
        _ => Ok(()),
    };
    if let Err(error) = charged {
        me.tell(&headers, What::Failed);
        return Err(error);
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    let forgotten = me.sabotage == Some(Sabotage::Drop) && order.id.ends_with("00");
    if !forgotten {
        me.tell(&headers, What::Handled { order: Some(order.id), cents: Some(order.cents) });
    }
    Ok(())
}

/// Counts everything, readable or not.
async fn analyse(Payload(bytes): Payload, headers: Headers, State(me): State<Member>) {
    let order: Option<Order> = serde_json::from_slice(&bytes).ok();
    let (id, cents) = (order.as_ref().map(|o| o.id.clone()), order.as_ref().map(|o| o.cents));
    me.tell(&headers, What::Handled { order: id, cents });
}
