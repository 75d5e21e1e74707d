//! Every public future, dropped at each of its awaits: polled once, twice, … and dropped, until it completes. Whatever was
//! dropped, afterwards nothing may be lost, leaked or stuck. Inline and behind the engine's seam, where a broker answers late.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test program")]

mod list;
mod operations;
mod world;

use operations::{OPERATIONS, Operation};
use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;
use world::World;

/// Polls `operation` `polls` times, letting time pass in between, and drops it; says whether it completed.
async fn dropped_after(polls: u32, operation: &Operation, world: &mut World) -> bool {
    let mut future = (operation.run)(world);
    for poll in 0..polls {
        if poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await {
            return true;
        }
        // Often a little, so that each await is met, then long, so that what waits for a deadline ends.
        let pause = if poll < 40 { Duration::from_millis(1) } else { Duration::from_secs(1) };
        tokio::time::sleep(pause).await;
    }
    false
}

/// Longest operation: a close waits for what is in hand until its deadline.
const MOST: u32 = 200;

fn drop_everywhere(behind_seam: bool) {
    for operation in OPERATIONS {
        let mut met = 0;
        for polls in 0.. {
            assert!(polls <= MOST, "{} never completes", operation.name);
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
            let completed = runtime.block_on(async {
                let mut world = World::new(behind_seam).await;
                let completed = dropped_after(polls, operation, &mut world).await;
                let at = format!("{} dropped after {polls} polls (behind the seam: {behind_seam})", operation.name);
                let whole =
                    tokio::time::timeout(Duration::from_secs(24 * 3600), world.assert_whole(operation, &at)).await;
                assert!(whole.is_ok(), "{at}: stuck");
                completed
            });
            met += 1;
            if completed {
                break;
            }
        }
        println!("{:<28} {met} drops", operation.name);
    }
}

#[test]
fn dropped_at_each_await_inline() {
    drop_everywhere(false);
}

#[test]
fn dropped_at_each_await_behind_the_seam() {
    drop_everywhere(true);
}
