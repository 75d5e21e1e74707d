//! What may go wrong, and how often. Drawn from the broker's seeded randomness: the same seed gives the same faults.

use mq_api::{Error, ErrorKind, Result};
use std::time::Duration;

/// A plan of faults. Shares are between 0 and 1 and are drawn once for each operation.
///
/// With a plan, sends and receives go through the engine's queues as on a broker behind a network, so that what is tested is
/// what runs in production. A plan without any fault is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct FaultPlan {
    /// The connection is lost.
    pub cut: f64,
    /// Longest random delay before the broker answers or delivers.
    pub delay: Duration,
    /// A send is stored twice.
    pub duplicate: f64,
    /// Messages without order come in another one.
    pub reorder: f64,
    /// A member loses the leases of what it holds.
    pub lose_lease: f64,
    /// A send is stored, and its confirmation lost.
    pub confirm_lost: f64,
    /// An acknowledgement is carried out, and its answer lost with the connection.
    pub ack_lost: f64,
    /// A send is refused: the topic is full.
    pub full: f64,
}

impl FaultPlan {
    /// Nothing goes wrong.
    pub fn none() -> Self {
        Self::default()
    }

    /// Everything goes wrong now and then.
    pub fn rough() -> Self {
        Self {
            cut: 0.01,
            delay: Duration::from_millis(20),
            duplicate: 0.0,
            reorder: 0.05,
            lose_lease: 0.005,
            confirm_lost: 0.02,
            ack_lost: 0.01,
            full: 0.01,
        }
    }

    /// Reads `cut:0.01,delay:20ms,confirm_lost:0.02`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] naming the part and those allowed.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |part: &str| {
            let all = "cut, delay (as 20ms), duplicate, reorder, lose_lease, confirm_lost, ack_lost, full, each as name:share with a share of 0 to 1";
            Error::new(ErrorKind::Config, format!("memory URL: fault '{part}' is not understood; there are {all}"))
        };
        let mut plan = Self::default();
        for part in text.split(',').filter(|p| !p.is_empty()) {
            let (name, value) = part.split_once(':').ok_or_else(|| bad(part))?;
            if name == "delay" {
                let ms = value.strip_suffix("ms").and_then(|v| v.parse().ok()).ok_or_else(|| bad(part))?;
                plan.delay = Duration::from_millis(ms);
                continue;
            }
            let share: f64 = value.parse().map_err(|_| bad(part))?;
            if !(0.0..=1.0).contains(&share) {
                return Err(bad(part));
            }
            *match name {
                "cut" => &mut plan.cut,
                "duplicate" => &mut plan.duplicate,
                "reorder" => &mut plan.reorder,
                "lose_lease" => &mut plan.lose_lease,
                "confirm_lost" => &mut plan.confirm_lost,
                "ack_lost" => &mut plan.ack_lost,
                "full" => &mut plan.full,
                _ => return Err(bad(part)),
            } = share;
        }
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::FaultPlan;
    use std::time::Duration;

    #[test]
    fn plans_are_read_strictly() -> mq_api::Result<()> {
        let plan = FaultPlan::parse("cut:0.5,delay:20ms")?;
        assert_eq!((plan.cut, plan.delay, plan.full), (0.5, Duration::from_millis(20), 0.0));
        for bad in ["cut", "cut:2", "delay:1", "burn:0.1", "cut:x"] {
            assert!(FaultPlan::parse(bad).is_err(), "{bad}");
        }
        Ok(())
    }
}
