//! Acknowledgements that were taken and are not confirmed yet, and what they are answered when their lane is lost: an
//! acknowledgement is in a commit as soon as it is made, often before its turn to be confirmed comes.

use mq_api::Settled;
use std::collections::{BTreeSet, HashMap};

/// What a commit says is settled of one partition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Written {
    /// Everything below.
    pub(crate) base: u64,
    /// Stretches from there on, in order.
    pub(crate) done: Vec<(u64, u64)>,
}

impl Written {
    fn has(&self, offset: u64) -> bool {
        let next = self.done.partition_point(|(_, end)| *end <= offset);
        offset < self.base || self.done.get(next).is_some_and(|(first, _)| *first <= offset)
    }
}

/// What may have been written beyond what is known to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Perhaps {
    Nothing,
    /// A commit whose answer did not come.
    This(Written),
    /// Several, each of them perhaps.
    Anything,
}

/// How the ownership of a lane ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ending {
    /// In good order: all is in a commit that is under way or done.
    Good,
    Lost {
        written: Written,
        perhaps: Perhaps,
    },
}

impl Ending {
    /// Of a lane that nothing is known of.
    const UNKNOWN: Self = Self::Lost { written: Written { base: 0, done: Vec::new() }, perhaps: Perhaps::Anything };

    /// The answer of an acknowledgement; `None`: confirmed in its turn.
    fn answer(&self, offset: u64) -> Option<Settled> {
        let Self::Lost { written, perhaps } = self else { return None };
        if written.has(offset) {
            return None;
        }
        match perhaps {
            Perhaps::Anything => Some(Settled::Unknown),
            Perhaps::This(flying) if flying.has(offset) => Some(Settled::Unknown),
            // Nothing was written, the message comes again elsewhere.
            _ => Some(Settled::Stale),
        }
    }
}

/// One message of an acknowledgement.
struct Waiting {
    lane: u32,
    op: u64,
    offset: u64,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Answers {
    waiting: Vec<Waiting>,
    /// Answers other than "confirmed".
    exceptions: Vec<(u64, Settled)>,
    /// Lanes that ended since acknowledgements were taken last: some may still come.
    over: HashMap<u32, Ending>,
}

impl Answers {
    /// An acknowledgement was taken from the engine.
    pub(crate) fn taken(&mut self, lane: u32, op: u64, offset: u64) {
        self.waiting.push(Waiting { lane, op, offset });
    }

    /// All that there were are taken; a lane that ended before has no more.
    pub(crate) fn all_taken(&mut self) {
        for (lane, ending) in std::mem::take(&mut self.over) {
            self.settle(lane, &ending);
        }
    }

    /// A lane is over.
    pub(crate) fn end(&mut self, lane: u32, ending: Ending) {
        self.settle(lane, &ending);
        self.over.insert(lane, ending);
    }

    /// The last commit of these lanes failed, and may have been written.
    pub(crate) fn unsure(&mut self, lanes: &[u32]) {
        lanes.iter().for_each(|lane| self.end(*lane, Ending::UNKNOWN));
    }

    fn settle(&mut self, lane: u32, ending: &Ending) {
        if *ending == Ending::Good {
            return;
        }
        let mut answers: HashMap<u64, Option<Settled>> = HashMap::new();
        for one in self.waiting.iter().filter(|w| w.lane == lane) {
            let answer = ending.answer(one.offset);
            let all = answers.entry(one.op).or_insert(answer);
            if *all != answer {
                // Some of its messages come again, and some do not.
                *all = Some(Settled::Unknown);
            }
        }
        self.waiting.retain(|w| w.lane != lane || answers.get(&w.op).is_none_or(Option::is_none));
        self.exceptions.extend(answers.into_iter().filter_map(|(op, answer)| Some((op, answer?))));
    }

    /// Everything up to here is confirmed, but for these. `unsaid`: lanes of which only what is below an offset was written.
    pub(crate) fn confirm(&mut self, upto: u64, unsaid: &[(u32, u64)]) -> Vec<(u64, Settled)> {
        let beyond = |w: &Waiting| unsaid.iter().any(|(lane, base)| w.lane == *lane && w.offset >= *base);
        let unknown: BTreeSet<u64> = match unsaid.is_empty() {
            true => BTreeSet::new(),
            false => self.waiting.iter().filter(|w| w.op <= upto && beyond(w)).map(|w| w.op).collect(),
        };
        self.exceptions.extend(unknown.into_iter().map(|op| (op, Settled::Unknown)));
        self.waiting.retain(|w| w.op > upto);
        std::mem::take(&mut self.exceptions)
    }
}

#[cfg(test)]
mod tests {
    use super::{Answers, Ending, Perhaps, Written};
    use mq_api::Settled;

    fn written(base: u64, done: &[(u64, u64)]) -> Written {
        Written { base, done: done.to_vec() }
    }

    fn sorted(mut all: Vec<(u64, Settled)>) -> Vec<(u64, Settled)> {
        all.sort_by_key(|(op, _)| *op);
        all
    }

    #[test]
    fn what_a_commit_has_is_known_exactly() {
        let it = written(10, &[(12, 14), (20, 21)]);
        let has: Vec<u64> = (8..23).filter(|offset| it.has(*offset)).collect();
        assert_eq!(has, [8, 9, 12, 13, 20]);
    }

    #[test]
    fn an_acknowledgement_that_was_written_is_not_stale() {
        let mut answers = Answers::default();
        for (op, offset) in [(1, 9), (2, 10), (3, 12), (4, 15), (5, 30)] {
            answers.taken(7, op, offset);
        }
        answers.taken(8, 6, 9);
        let flying = written(11, &[(12, 14), (15, 16)]);
        let lost = Ending::Lost { written: written(10, &[(12, 14)]), perhaps: Perhaps::This(flying) };
        answers.end(7, lost);
        // Made before the lane was lost, taken after.
        answers.taken(7, 7, 13);
        answers.taken(7, 8, 31);
        answers.all_taken();
        let stale = Settled::Stale;
        let wanted = [(2, Settled::Unknown), (4, Settled::Unknown), (5, stale), (8, stale)];
        assert_eq!(sorted(answers.confirm(8, &[])), wanted);
        assert!(answers.waiting.is_empty() && answers.over.is_empty());
    }

    #[test]
    fn one_answer_for_several_messages_is_not_better_than_the_worst() {
        let mut answers = Answers::default();
        for (op, offset) in [(1, 1), (1, 2), (2, 20), (2, 1), (3, 20), (3, 21)] {
            answers.taken(7, op, offset);
        }
        answers.end(7, Ending::Lost { written: written(10, &[]), perhaps: Perhaps::Nothing });
        assert_eq!(sorted(answers.confirm(3, &[])), [(2, Settled::Unknown), (3, Settled::Stale)]);
    }

    #[test]
    fn a_good_end_is_confirmed_unless_its_commit_fails() {
        let mut answers = Answers::default();
        answers.taken(7, 1, 5);
        answers.end(7, Ending::Good);
        answers.taken(7, 2, 6);
        answers.all_taken();
        assert_eq!(answers.confirm(1, &[]), []);
        answers.unsure(&[7]);
        assert_eq!(answers.confirm(2, &[]), [(2, Settled::Unknown)]);
    }

    #[test]
    fn what_only_metadata_could_say_is_unknown_without_it() {
        let mut answers = Answers::default();
        for (op, lane, offset) in [(1, 7, 4), (2, 7, 5), (2, 7, 3), (3, 8, 9), (4, 7, 6)] {
            answers.taken(lane, op, offset);
        }
        assert_eq!(answers.confirm(3, &[(7, 5)]), [(2, Settled::Unknown)]);
        assert_eq!(answers.confirm(4, &[(7, 7)]), []);
    }
}
