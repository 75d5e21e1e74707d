//! Since when a member holds what it holds, at the cost of one look for each hand-over.
//!
//! Time is cut into numbered ticks, and a hand-over notes the number of the present one: it happened after that tick began and
//! before the next did. So `max_processing` is never early, however late a tick comes (a runtime that was blocked), and late by
//! one tick at most. While nothing is in hand nobody ticks; then the number is 0, and the next hand-over looks at the clock.

use crate::core::Core;
use crate::member::Member;
use crate::pending::HELD;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::time::Instant;

#[derive(Default)]
struct Ticks {
    /// When they began: those that something in hand may have noted, oldest first.
    began: VecDeque<Instant>,
    /// The number of the first of them.
    first: u32,
    /// When to look next for what is held too long.
    look: Option<Instant>,
    /// Whether the next tick is planned.
    planned: bool,
}

impl Ticks {
    fn last(&self) -> u32 {
        self.first.wrapping_add(self.began.len() as u32).wrapping_sub(1)
    }

    fn begin(&mut self, now: Instant) -> u32 {
        // Not 0, which means that nobody ticks.
        if self.began.is_empty() || self.last() == u32::MAX {
            let next = self.last().wrapping_add(1).max(1);
            self.began.clear();
            self.first = next;
        }
        self.began.push_back(now);
        self.last()
    }

    /// When a tick began; the oldest that is known for one that is older.
    fn began(&self, number: u32) -> Option<Instant> {
        let at = number.wrapping_sub(self.first) as usize;
        self.began.get(at).or(self.began.front()).copied()
    }

    /// What noted this tick was handed over before this.
    fn over(&self, number: u32, now: Instant) -> Instant {
        match number.wrapping_sub(self.first) as usize + 1 {
            next if next < self.began.len() => self.began[next],
            next if next == self.began.len() => now,
            _ => self.began.front().copied().unwrap_or(now),
        }
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Clock {
    /// The present tick; 0 while nobody ticks.
    now: AtomicU32,
    ticks: Mutex<Ticks>,
}

impl Clock {
    /// The present tick; 0 while nobody ticks.
    #[inline(always)]
    pub(crate) fn now(&self) -> u32 {
        self.now.load(Ordering::Relaxed)
    }

    /// How long ago something was handed over, at most a tick too long.
    pub(crate) fn since(&self, number: u32, now: Instant) -> Duration {
        self.ticks.lock().began(number).map_or(Duration::ZERO, |began| now.saturating_duration_since(began))
    }
}

/// A tick is less than a hundredth of `max_processing`, so that it is late by less than that; at most 200 a second. A second is
/// enough where that is more, since `idle` is told by ticks too, and 1,024 of them are remembered at most.
fn length(limit: Duration) -> Duration {
    (limit / 128).min(Duration::from_secs(1)).max(limit / 1024).max(Duration::from_millis(5))
}

impl Member {
    /// The present tick of its clock, which a hand-over notes. Called with the partition locked.
    #[inline(always)]
    pub(crate) fn tick(&self) -> u32 {
        match self.clock.now() {
            0 => self.start_clock(),
            now => now,
        }
    }

    #[cold]
    #[inline(never)]
    fn start_clock(&self) -> u32 {
        let now = self.core.env.now();
        let mut ticks = self.clock.ticks.lock();
        let number = ticks.begin(now);
        self.clock.now.store(number, Ordering::Relaxed);
        // A tick may be on its way: the clock had stopped a moment ago.
        let plan = !std::mem::replace(&mut ticks.planned, true);
        drop(ticks);
        if plan {
            self.plan_tick(now + length(self.sub.max_processing));
        }
        number
    }

    fn plan_tick(&self, at: Instant) {
        let me = self.handle();
        self.core.timer.at(at, move || {
            if let Some(me) = me.upgrade() {
                me.begin_tick();
            }
        });
    }

    fn begin_tick(self: Arc<Self>) {
        let now = self.core.env.now();
        let limit = self.sub.max_processing;
        let mut idle = self.flow.in_flight() == 0 || self.is_crashed();
        if idle {
            self.clock.now.store(0, Ordering::Relaxed);
            // A hand-over that noted a tick before this did so with its partition locked: now it is seen there.
            idle = self.is_crashed() || !self.holds_any();
        }
        let mut ticks = self.clock.ticks.lock();
        if idle && self.clock.now() == 0 {
            ticks.planned = false;
            ticks.look = None;
            return;
        }
        let number = ticks.begin(now);
        self.clock.now.store(number, Ordering::Relaxed);
        let look = *ticks.look.get_or_insert(now);
        drop(ticks);
        let look = if look <= now { self.look(now, limit) } else { look };
        self.clock.ticks.lock().look = Some(look);
        self.plan_tick(look.min(now + length(limit)));
    }

    fn holds_any(&self) -> bool {
        let (topic, Some(group)) = self.seat() else { return false };
        topic.parts.iter().any(|part| part.lock().groups.get(group.number).is_some_and(|g| g.holds(self.id)))
    }

    /// Settles as timed out what it holds too long; says when to look again.
    fn look(self: &Arc<Self>, now: Instant, limit: Duration) -> Instant {
        // What comes to hand from now on is due after that.
        let mut next = now + limit;
        let (topic, Some(group)) = self.seat() else { return next };
        for (number, part) in topic.parts.iter().enumerate() {
            let held: Vec<(u64, u32)> = match part.lock().groups.get(group.number) {
                Some(g) => {
                    let mine = g.entries.iter().filter(|(_, e)| e.owner == self.id && e.is(HELD));
                    mine.map(|(position, e)| (position, e.at)).collect()
                }
                None => Vec::new(),
            };
            for (position, at) in held {
                let due = self.clock.ticks.lock().over(at, now) + limit;
                if due > now {
                    next = next.min(due);
                } else if self.times_out {
                    crate::letter::time_out(self, &topic, &group, number, position);
                }
            }
        }
        let mut ticks = self.clock.ticks.lock();
        // Nothing in hand noted those any more.
        while ticks.began.len() > 1 && ticks.began[1] + limit <= now {
            ticks.began.pop_front();
            ticks.first = ticks.first.wrapping_add(1);
        }
        next
    }
}

impl Core {
    /// How long ago a delayed entry was put aside.
    pub(crate) fn since_tenths(&self, at: u32) -> Duration {
        Duration::from_millis(u64::from(self.tenths().saturating_sub(at)) * 100)
    }
}

#[cfg(test)]
mod tests {
    use super::{Ticks, length};
    use std::time::Duration;
    use tokio::time::Instant;

    #[test]
    fn ticks_are_short_enough_for_one_in_a_hundred_or_ten_milliseconds() {
        for ms in [20, 100, 1_000, 10_000, 60_000, 1_500_000, 86_400_000] {
            let limit = Duration::from_millis(ms);
            let bound = (limit / 100).max(Duration::from_millis(10));
            assert!(length(limit) < bound, "{limit:?}: {:?}", length(limit));
        }
    }

    #[test]
    fn what_noted_a_tick_came_before_the_next() {
        let (mut ticks, start) = (Ticks::default(), Instant::now());
        let s = |n| start + Duration::from_secs(n);
        assert_eq!((ticks.begin(s(0)), ticks.begin(s(1)), ticks.begin(s(4))), (1, 2, 3));
        assert_eq!((ticks.began(2), ticks.over(2, s(9)), ticks.over(3, s(9))), (Some(s(1)), s(4), s(9)));
        ticks.first = u32::MAX - 2;
        assert_eq!(ticks.begin(s(5)), 1, "no tick is called 0");
    }
}
