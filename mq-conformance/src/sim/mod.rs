//! Simulation: a random workload on the in-memory broker under seeded faults and a paused clock, judged by the promises.
//!
//! One seed decides everything: what is sent, handled, settled, closed and killed, which faults strike, and every delay. The
//! same seed gives the same run, byte for byte, so that a violation found once can be replayed.

mod judge;
mod rng;
mod workload;

use mq_memory::FaultPlan;
use std::time::Duration;

/// What one seed came to.
#[derive(Debug, Clone)]
pub struct Run {
    /// The seed.
    pub seed: u64,
    /// Of everything that happened.
    pub hash: u64,
    /// How many things happened at the broker.
    pub events: usize,
    /// Broken promises.
    pub violations: Vec<String>,
    /// What happened, if a promise was broken.
    pub timeline: String,
}

/// How long a run may take on its own clock; everything is long over by then unless something is stuck.
const LIMIT: Duration = Duration::from_secs(4 * 3600);

/// Which faults strike under a seed: none for every fourth, else all of them, gently or not.
fn plan(seed: u64) -> FaultPlan {
    let mut plan = FaultPlan::rough();
    match seed % 4 {
        0 => return FaultPlan::none(),
        1 => {}
        2 => {
            plan.cut = 0.05;
            plan.confirm_lost = 0.1;
            plan.ack_lost = 0.05;
        }
        _ => {
            plan.lose_lease = 0.03;
            plan.duplicate = 0.05;
            plan.full = 0.05;
        }
    }
    plan
}

/// Runs one seed on a runtime of its own.
pub fn run(seed: u64) -> Run {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let failed = |why: String| Run { seed, hash: 0, events: 0, violations: vec![why], timeline: String::new() };
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(e) => return failed(format!("no runtime: {e}")),
    };
    let run = runtime.block_on(async {
        match tokio::time::timeout(LIMIT, workload::run(seed, plan(seed))).await {
            Ok(Ok(run)) => run,
            Ok(Err(e)) => failed(format!("the workload could not run: {e}")),
            Err(_) => failed(format!("not over after {LIMIT:?}")),
        }
    });
    runtime.shutdown_background();
    run
}
