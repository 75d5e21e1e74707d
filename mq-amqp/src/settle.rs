//! Delivery tags of one channel: which acknowledgements to write so that the fewest frames say it, and none covers a delivery
//! that is not settled.

use std::collections::VecDeque;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Ours, unsettled.
    Held,
    /// To be acknowledged.
    Settled,
    /// The broker was told.
    Told,
}

/// A frame to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frame {
    /// Acknowledge up to this tag, or only it.
    Ack { tag: u64, multiple: bool },
    /// Give back.
    Requeue(u64),
}

/// See the module. Tags of a channel are 1, 2, 3, …
#[derive(Debug)]
pub(crate) struct Tags {
    /// The tag of the first entry.
    first: u64,
    states: VecDeque<State>,
    loose: Vec<u64>,
}

impl Default for Tags {
    fn default() -> Self {
        Self { first: 1, states: VecDeque::new(), loose: Vec::new() }
    }
}

impl Tags {
    /// A delivery came.
    pub(crate) fn arrived(&mut self, tag: u64) {
        while self.first + (self.states.len() as u64) < tag {
            // Never seen with RabbitMQ; an unknown tag must not be covered.
            self.states.push_back(State::Held);
        }
        if self.first + self.states.len() as u64 == tag {
            self.states.push_back(State::Held);
        }
    }

    fn entry(&mut self, tag: u64) -> Option<&mut State> {
        let at = tag.checked_sub(self.first)?;
        self.states.get_mut(usize::try_from(at).ok()?)
    }

    /// A delivery is to be acknowledged. A tag that is not held is nobody's: nothing is written for it.
    pub(crate) fn ack(&mut self, tag: u64) -> bool {
        match self.entry(tag) {
            Some(state) if *state == State::Held => {
                *state = State::Settled;
                self.loose.push(tag);
                true
            }
            _ => false,
        }
    }

    /// Acknowledgements that are not written.
    pub(crate) fn pending(&self) -> usize {
        self.loose.len()
    }

    /// A delivery is to be given back now.
    pub(crate) fn requeue(&mut self, tag: u64) -> Option<Frame> {
        match self.entry(tag) {
            Some(state) if *state == State::Held => {
                *state = State::Told;
                Some(Frame::Requeue(tag))
            }
            _ => None,
        }
    }

    /// What to write for the acknowledgements so far: one for the settled beginning, one for each behind a gap.
    pub(crate) fn acks(&mut self, into: &mut Vec<Frame>) {
        let (mut last, mut n) = (None, 0);
        while let Some(state) = self.states.front()
            && *state != State::Held
        {
            if *state == State::Settled {
                last = Some(self.first);
                n += 1;
            }
            self.states.pop_front();
            self.first += 1;
        }
        if let Some(tag) = last {
            into.push(Frame::Ack { tag, multiple: n > 1 });
        }
        for tag in std::mem::take(&mut self.loose) {
            if tag < self.first {
                continue;
            }
            if let Some(state) = self.entry(tag)
                && *state == State::Settled
            {
                *state = State::Told;
                into.push(Frame::Ack { tag, multiple: false });
            }
        }
    }

    /// How many are unsettled.
    #[cfg(test)]
    fn held(&self) -> usize {
        self.states.iter().filter(|s| **s == State::Held).count()
    }
}

#[cfg(test)]
mod tests {
    use super::{Frame, Tags};
    use std::collections::BTreeSet;

    fn acks(tags: &mut Tags) -> Vec<Frame> {
        let mut frames = Vec::new();
        tags.acks(&mut frames);
        frames
    }

    #[test]
    fn a_prefix_is_one_frame_and_a_gap_stays() {
        let mut tags = Tags::default();
        (1..=6).for_each(|t| tags.arrived(t));
        for t in [1, 2, 3, 5] {
            assert!(tags.ack(t));
        }
        assert_eq!(acks(&mut tags), [Frame::Ack { tag: 3, multiple: true }, Frame::Ack { tag: 5, multiple: false }]);
        assert!(!tags.ack(5) && !tags.ack(3) && !tags.ack(99) && !tags.ack(0), "never twice, never unknown, never 0");
        assert!(acks(&mut tags).is_empty());
        assert_eq!(tags.requeue(4), Some(Frame::Requeue(4)));
        tags.ack(6);
        assert_eq!(acks(&mut tags), [Frame::Ack { tag: 6, multiple: false }]);
        assert_eq!(tags.held(), 0);
    }

    /// The broker modelled: an acknowledgement covers what it says, and must never cover an unsettled delivery.
    #[test]
    fn nothing_unsettled_is_ever_covered() {
        for seed in 1..200u64 {
            let mut random = seed;
            let mut next = |n: u64| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                (random >> 33) % n
            };
            let mut tags = Tags::default();
            let (mut unacked, mut settled) = (BTreeSet::new(), BTreeSet::new());
            let mut last = 0;
            for _ in 0..400 {
                match next(4) {
                    0 | 1 => {
                        last += 1;
                        tags.arrived(last);
                        unacked.insert(last);
                    }
                    2 => {
                        let pick: Vec<u64> = unacked.difference(&settled).copied().collect();
                        if !pick.is_empty() {
                            let tag = pick[next(pick.len() as u64) as usize];
                            if next(5) == 0 {
                                assert!(tags.requeue(tag).is_some());
                                unacked.remove(&tag);
                            } else {
                                assert!(tags.ack(tag));
                                settled.insert(tag);
                            }
                        }
                    }
                    _ => {
                        let mut frames = Vec::new();
                        tags.acks(&mut frames);
                        for frame in frames {
                            let Frame::Ack { tag, multiple } = frame else { panic!("{frame:?}") };
                            let covered: Vec<u64> = match multiple {
                                true => unacked.range(..=tag).copied().collect(),
                                false => vec![tag],
                            };
                            for tag in covered {
                                assert!(settled.remove(&tag) && unacked.remove(&tag), "{tag} was not settled");
                            }
                        }
                        assert!(settled.is_empty(), "every acknowledgement was written");
                    }
                }
            }
        }
    }
}
