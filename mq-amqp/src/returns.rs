//! Which send was returned? The client hands a returned message to whichever confirmation resolves next, so the answer is
//! read from the returned message itself: every publish carries a private number.
//!
//! The broker returns a message before it confirms it, and the client queues returns in order and gives one to each
//! confirmation that resolves. Hence: a confirmation *without* a returned message found that queue empty, so its own return, if
//! any, was given to a confirmation that resolved before it. And a confirmation that was given *another's* return may have its
//! own still in the queue; it has come out when every publish up to it has resolved, since each of those took one out
//! while the queue was not empty.

use std::collections::{HashSet, VecDeque};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Flying,
    /// Confirmed; nothing was attached.
    Clean,
    /// Confirmed; another's return was attached.
    Doubtful,
    Done,
}

/// What became of one publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// A queue has it.
    Taken,
    /// No queue took it.
    Unroutable,
}

/// Attributes the returns of one channel.
#[derive(Debug, Default)]
pub(crate) struct Returns {
    first: u64,
    states: VecDeque<State>,
    returned: HashSet<u64>,
    waiting: VecDeque<u64>,
}

impl Returns {
    /// The number of the next publish.
    pub(crate) fn next(&mut self) -> u64 {
        self.states.push_back(State::Flying);
        self.first + self.states.len() as u64 - 1
    }

    fn set(&mut self, number: u64, state: State) {
        if let Some(at) = number.checked_sub(self.first)
            && let Some(entry) = self.states.get_mut(at as usize)
        {
            *entry = state;
        }
    }

    fn get(&self, number: u64) -> State {
        let at = number.checked_sub(self.first).map(|at| at as usize);
        at.and_then(|at| self.states.get(at)).copied().unwrap_or(State::Done)
    }

    /// A publish was confirmed; `attached` is the number on the message that came with it.
    pub(crate) fn confirmed(&mut self, number: u64, attached: Option<u64>) {
        if let Some(other) = attached {
            self.returned.insert(other);
        }
        self.set(number, if attached.is_none() { State::Clean } else { State::Doubtful });
        self.waiting.push_back(number);
    }

    /// A publish ended without confirmation: its fate is told elsewhere.
    pub(crate) fn gave_up(&mut self, number: u64, attached: Option<u64>) {
        self.returned.extend(attached);
        self.set(number, State::Done);
    }

    /// What is certain now. Call when every confirmation that has resolved was seen.
    pub(crate) fn certain(&mut self, mut tell: impl FnMut(u64, Fate)) {
        let resolved_up_to = {
            let flying = self.states.iter().position(|s| *s == State::Flying).unwrap_or(self.states.len());
            self.first + flying as u64
        };
        for _ in 0..self.waiting.len() {
            let Some(number) = self.waiting.pop_front() else { break };
            let fate = if self.returned.remove(&number) {
                Fate::Unroutable
            } else if self.get(number) == State::Clean || number < resolved_up_to {
                Fate::Taken
            } else {
                self.waiting.push_back(number);
                continue;
            };
            self.set(number, State::Done);
            tell(number, fate);
        }
        while self.states.front() == Some(&State::Done) {
            self.states.pop_front();
            self.returned.remove(&self.first);
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Fate, Returns};
    use std::collections::{HashMap, VecDeque};

    fn certain(returns: &mut Returns) -> Vec<(u64, Fate)> {
        let mut out = Vec::new();
        returns.certain(|n, f| out.push((n, f)));
        out
    }

    #[test]
    fn a_stolen_return_finds_its_owner() {
        let mut r = Returns::default();
        let (a, b, c) = (r.next(), r.next(), r.next());
        // a (routable) resolves and is given b's return; nothing is known of a while earlier ones could hold it back.
        r.confirmed(a, Some(b));
        assert_eq!(certain(&mut r), [(a, Fate::Taken)], "all up to it are resolved");
        r.confirmed(c, None);
        assert_eq!(certain(&mut r), [(c, Fate::Taken)]);
        r.confirmed(b, None);
        assert_eq!(certain(&mut r), [(b, Fate::Unroutable)]);
    }

    /// Broker and client modelled: returns queue in order, confirmations resolve in any order and take one each.
    #[test]
    fn every_fate_is_right_in_any_order_of_confirmations() {
        for seed in 0..300u64 {
            let mut random = seed;
            let mut next = |n: u64| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (random >> 33) % n
            };
            let mut r = Returns::default();
            let (mut queue, mut flying, mut truth) = (VecDeque::new(), Vec::new(), HashMap::new());
            let mut told = HashMap::new();
            let (mut sent, total) = (0, 200);
            while told.len() < total {
                if sent < total && (flying.is_empty() || next(2) == 0) {
                    let number = r.next();
                    let unroutable = next(3) == 0;
                    truth.insert(number, unroutable);
                    if unroutable {
                        queue.push_back(number);
                    }
                    flying.push(number);
                    sent += 1;
                } else if !flying.is_empty() {
                    // Several resolve at once and are seen in another order.
                    let n = (1 + next(4)).min(flying.len() as u64);
                    let mut seen = Vec::new();
                    for _ in 0..n {
                        let number = flying.swap_remove(next(flying.len() as u64) as usize);
                        seen.push((number, queue.pop_front()));
                    }
                    seen.reverse();
                    seen.into_iter().for_each(|(number, attached)| r.confirmed(number, attached));
                }
                r.certain(|n, fate| assert!(told.insert(n, fate == Fate::Unroutable).is_none()));
            }
            assert_eq!(told, truth, "seed {seed}");
        }
    }
}
