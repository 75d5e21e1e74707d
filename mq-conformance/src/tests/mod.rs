//! The tests, in the order of the promises.

mod accepted;
mod alive;
mod bugs;
mod bugs_of_answers;
mod capabilities;
mod closing;
mod configuration;
mod crashes;
mod dead_letters;
mod leases;
mod nacking;
mod order;
mod receiving;
mod recorded;
mod redriving;
mod seeing;
mod sending;
mod settling;
mod sharing;
mod starting;
mod words;

use crate::Case;

/// All tests of the suite.
pub fn all() -> Vec<Case> {
    [
        words::CASES,
        sending::CASES,
        accepted::CASES,
        receiving::CASES,
        starting::CASES,
        order::CASES,
        sharing::CASES,
        settling::CASES,
        nacking::CASES,
        leases::CASES,
        crashes::CASES,
        dead_letters::CASES,
        redriving::CASES,
        alive::CASES,
        closing::CASES,
        configuration::CASES,
        seeing::CASES,
        recorded::CASES,
        capabilities::CASES,
        bugs::CASES,
        bugs_of_answers::CASES,
    ]
    .concat()
}

#[cfg(test)]
mod names {
    #[test]
    fn every_test_has_a_name_of_its_own_and_a_planted_bug() {
        let all = super::all();
        assert!(all.len() >= 80, "{} tests", all.len());
        let mut names: Vec<_> = all.iter().map(|c| c.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all.len(), "two tests share a name");
        let without: Vec<_> = all.iter().filter(|c| c.bugs.is_empty()).map(|c| c.name).collect();
        assert!(without.is_empty(), "no planted bug makes these fail: {without:?}");
    }
}
