//! The numbered promises, so that none is without a test.

/// Number and gist of every promise. Each has at least one test of the suite that is named after it (`p4_8_…` for 4.8).
///
/// Section 9 is the table of what each backend refuses: the files of expected refusals and the tests of the capabilities are
/// its tests. Of 7.5 the suite tests the secrets; TLS and authentication are promises about a transport, and tests of the
/// networked backends' own crates, which the in-memory broker has no part in. Those of section 10 are about the in-memory
/// broker and run on it alone, with every profile.
pub const PROMISES: &[(&str, &str)] = &[
    ("1.1", "messages arrive as they were sent"),
    ("1.2", "names are checked, and made names never meet"),
    ("1.3", "groups divide, each sees all, broadcast is from now on"),
    ("1.4", "a delivery says what and where it is"),
    ("1.5", "an attempt is a hand-over"),
    ("1.6", "durability has levels, and less is refused"),
    ("2.1", "a send is Ok only when confirmed"),
    ("2.2", "unroutable, or stored"),
    ("2.3", "failures say what is known"),
    ("2.4", "a batch has one result for each"),
    ("2.5", "a key keeps its order"),
    ("2.6", "retries within a limit, bounds in flight"),
    ("2.7", "too large is refused before it is written"),
    ("2.8", "a dropped send is not sent or counted; close flushes"),
    ("3.1", "at least once"),
    ("3.2", "at most max_in_flight in hand"),
    ("3.3", "where a group starts"),
    ("3.4", "a cancelled recv loses nothing"),
    ("3.5", "what cannot be decoded stops nothing"),
    ("3.6", "a broadcast that falls behind is told"),
    ("3.7", "order by key"),
    ("3.8", "members share"),
    ("4.1", "ack"),
    ("4.2", "nack, by class"),
    ("4.3", "dead_letter and release"),
    ("4.4", "a dropped delivery is a nack"),
    ("4.5", "a stale settle harms nothing"),
    ("4.6", "leases are renewed up to max_processing"),
    ("4.7", "takeover within its bound"),
    ("4.8", "what kills its consumer ends in the dead letters"),
    ("4.9", "attempt numbers"),
    ("4.10", "pause and resume"),
    ("5.1", "dead letters are readable and carry an envelope"),
    ("5.2", "confirmed before the original is acknowledged"),
    ("5.3", "redrive, peek, count, discard"),
    ("6.1", "a broker that is down at start is waited for"),
    ("6.2", "after any loss the consumer runs again"),
    ("6.3", "what it made is made again, with one Gap"),
    ("6.4", "close gives back"),
    ("6.5", "nothing blocks the runtime"),
    ("6.6", "nothing is left after close"),
    ("7.1", "the URL picks the backend"),
    ("7.2", "unknown keys are errors"),
    ("7.3", "what is asked is checked first"),
    ("7.4", "create, verify or none"),
    ("7.5", "secrets never show"),
    ("8.1", "backlog is never wrong"),
    ("8.2", "admin, where the broker can"),
    ("8.3", "hooks fire"),
    ("10.1", "one seed, one run"),
    ("10.2", "a profile refuses what its broker refuses"),
    ("10.3", "wait until all is done, and assert exactly"),
];

#[cfg(test)]
mod tests {
    use super::PROMISES;
    use std::collections::BTreeSet;

    #[test]
    fn every_promise_has_a_test_named_after_it() {
        let all = crate::all();
        let has = |number: &str| {
            let prefix = format!("p{}_", number.replace('.', "_"));
            all.iter().any(|case| case.promise == number && case.name.starts_with(&prefix))
        };
        let without: Vec<_> = PROMISES.iter().map(|(number, _)| *number).filter(|number| !has(number)).collect();
        assert!(without.is_empty(), "no test is named after {without:?}");
    }

    #[test]
    fn every_test_named_after_a_promise_is_of_one_in_the_list() {
        let known: BTreeSet<&str> = PROMISES.iter().map(|(number, _)| *number).collect();
        assert_eq!(known.len(), PROMISES.len(), "a number stands twice");
        for case in crate::all() {
            let numbered = case.promise.split('.').all(|part| part.parse::<u32>().is_ok());
            // The head of section 4 has no number of its own: settling takes effect at the call, and tells.
            assert!(!numbered || case.promise == "4.0" || known.contains(case.promise), "{}", case.name);
            let own = format!("p{}_", case.promise.replace('.', "_"));
            let named = case.name.starts_with('p') && case.name[1..].starts_with(|c: char| c.is_ascii_digit());
            assert!(!named || case.name.starts_with(&own), "{} is filed under {}", case.name, case.promise);
        }
    }
}
