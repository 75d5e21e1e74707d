//! What a commit says besides its offset: what was acknowledged beyond it, attempts, trials of crash suspects and how often a
//! stretch of messages was taken by members that died. All in the metadata of the commit, at most 4,096 bytes.
//!
//! `mq1.` then base64 of: whether keys are in order, takes, exceptions, acknowledged. Numbers are LEB128; offsets are relative to the commit's.
//! Whatever cannot be read means "nothing known": never that something was acknowledged.

mod takes;
mod text;

use std::collections::BTreeMap;
pub(crate) use takes::Takes;
use text::{base64, bounded, get, put, unbase64};

/// Offsets that a commit can speak of, from its own on: the worst bitmap of them, in base64, leaves a third of the metadata.
pub(crate) const SPAN: u64 = 16_384;
/// Brokers refuse longer metadata (`offset.metadata.max.bytes`).
const MAX_TEXT: usize = 4_096;
const MARK: &str = "mq1.";

/// Attempts and trials of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tried {
    /// The number of its next hand-over.
    pub(crate) attempt: u32,
    /// How often it was recorded as handed over alone.
    pub(crate) trials: u32,
}

/// All that a commit knows besides its offset.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Record {
    /// The group keeps the order of keys: what is redriven has to join its key's line.
    pub(crate) keyed: bool,
    pub(crate) takes: Takes,
    pub(crate) tried: BTreeMap<u64, Tried>,
    /// Acknowledged stretches `first..end`, ordered, disjoint.
    pub(crate) done: Vec<(u64, u64)>,
}

impl Record {
    /// Whether the message at `offset` was acknowledged.
    pub(crate) fn is_done(&self, offset: u64) -> bool {
        let at = self.done.partition_point(|(_, end)| *end <= offset);
        self.done.get(at).is_some_and(|(first, _)| *first <= offset)
    }

    /// The first offset from `offset` on that was not acknowledged.
    pub(crate) fn skip_done(&self, offset: u64) -> u64 {
        let at = self.done.partition_point(|(_, end)| *end <= offset);
        match self.done.get(at) {
            Some((first, end)) if *first <= offset => *end,
            _ => offset,
        }
    }

    /// Adds an acknowledged stretch behind all others.
    pub(crate) fn add_done(&mut self, offset: u64) {
        match self.done.last_mut() {
            Some((_, end)) if *end == offset => *end += 1,
            _ => self.done.push((offset, offset + 1)),
        }
    }

    /// What another record calls done is done here too.
    pub(crate) fn take_out(&mut self, other: &[(u64, u64)]) {
        let mut all = std::mem::take(&mut self.done);
        all.extend_from_slice(other);
        all.sort_unstable();
        for (first, end) in all {
            match self.done.last_mut() {
                Some((_, last)) if *last >= first => *last = end.max(*last),
                _ => self.done.push((first, end)),
            }
        }
    }

    /// The metadata of a commit at `base`, and whether everything fitted. What does not fit is the last of the attempts:
    /// attempt numbers are "at least"; acknowledgements, takes and trials always fit.
    pub(crate) fn encode(&self, base: u64) -> (String, bool) {
        let mut head = Vec::new();
        let takes = self.takes.from(base).0;
        put(&mut head, u64::from(self.keyed));
        put(&mut head, takes.len() as u64);
        for (upto, times) in &takes {
            put(&mut head, upto.saturating_sub(base));
            put(&mut head, u64::from(*times));
        }
        let done = self.encode_done(base);
        let room = (MAX_TEXT - MARK.len()) / 4 * 3;
        let room = room.saturating_sub(head.len() + done.len() + 10);
        let (tried, fitted) = self.encode_tried(base, room);
        head.extend(tried);
        head.extend(done);
        (format!("{MARK}{}", base64(&head)), fitted)
    }

    fn encode_tried(&self, base: u64, room: usize) -> (Vec<u8>, bool) {
        // Runs of neighbours with the same numbers: (gap, length, attempt, trials).
        let mut runs: Vec<(u64, u64, Tried)> = Vec::new();
        for (offset, tried) in self.tried.range(base..) {
            match runs.last_mut() {
                Some((first, n, t)) if *first + *n == *offset && t == tried => *n += 1,
                _ => runs.push((*offset, 1, *tried)),
            }
        }
        let write = |runs: &[(u64, u64, Tried)]| {
            let mut out = Vec::new();
            put(&mut out, runs.len() as u64);
            let mut at = base;
            for (first, n, tried) in runs {
                put(&mut out, first - at);
                put(&mut out, *n);
                put(&mut out, u64::from(tried.attempt));
                put(&mut out, u64::from(tried.trials));
                at = first + n;
            }
            out
        };
        let all = write(&runs);
        if all.len() <= room {
            return (all, true);
        }
        // Trials first: a suspect's count must not be lost. Then the lowest offsets.
        let mut chosen: Vec<(u64, u64, Tried)> = runs.iter().copied().filter(|(_, _, t)| t.trials > 0).collect();
        let mut cost = write(&chosen).len() + 2;
        for run in runs.iter().filter(|(_, _, t)| t.trials == 0) {
            // A run is at most 3 + 3 + 5 + 1 bytes within the span.
            cost += 12;
            if cost > room {
                break;
            }
            chosen.push(*run);
        }
        chosen.sort_by_key(|(first, _, _)| *first);
        (write(&chosen), false)
    }

    fn encode_done(&self, base: u64) -> Vec<u8> {
        let stretches: Vec<(u64, u64)> = self
            .done
            .iter()
            .filter(|(_, end)| *end > base)
            .map(|(first, end)| (first.max(&base) - base, (end - base).min(SPAN)))
            .filter(|(first, end)| first < end)
            .collect();
        let mut runs = vec![0];
        put(&mut runs, stretches.len() as u64);
        let mut at = 0;
        for (first, end) in &stretches {
            put(&mut runs, first - at);
            put(&mut runs, end - first);
            at = *end;
        }
        let bits = stretches.last().map_or(0, |(_, end)| *end);
        let bytes = bits.div_ceil(8) as usize;
        if runs.len() <= bytes + 3 {
            return runs;
        }
        let mut map = vec![0u8; bytes];
        for (first, end) in &stretches {
            for bit in *first..*end {
                map[bit as usize / 8] |= 1 << (bit % 8);
            }
        }
        let mut out = vec![1];
        put(&mut out, map.len() as u64);
        out.extend(map);
        out
    }

    /// Reads the metadata of a commit at `base`. `None`: it is foreign or damaged, so nothing is known.
    pub(crate) fn decode(base: u64, metadata: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(metadata).ok()?.strip_prefix(MARK)?;
        let bytes = unbase64(text)?;
        let mut input = bytes.as_slice();
        let mut record = Self { keyed: bounded(&mut input, 1)? == 1, ..Self::default() };
        let n = bounded(&mut input, 64)?;
        let (mut last_upto, mut last_times) = (0, u64::MAX);
        for _ in 0..n {
            let (upto, times) = (get(&mut input)?, get(&mut input)?);
            if upto <= last_upto || times > last_times {
                return None;
            }
            (last_upto, last_times) = (upto, times);
            record.takes.0.push((base.checked_add(upto)?, u32::try_from(times).ok()?));
        }
        let n = bounded(&mut input, SPAN)?;
        let mut at = base;
        // More than a commit can speak of is damage, and would fill the memory.
        let mut left = SPAN;
        for _ in 0..n {
            let (gap, run) = (get(&mut input)?, bounded(&mut input, left)?);
            left -= run;
            let attempt = u32::try_from(get(&mut input)?).ok()?;
            let trials = u32::try_from(get(&mut input)?).ok()?;
            at = at.checked_add(gap)?;
            for offset in at..at.checked_add(run)? {
                record.tried.insert(offset, Tried { attempt, trials });
            }
            at += run;
        }
        let (form, rest) = input.split_first()?;
        input = rest;
        match form {
            0 => {
                let n = bounded(&mut input, SPAN)?;
                let mut at = base;
                for _ in 0..n {
                    let (gap, run) = (get(&mut input)?, get(&mut input)?);
                    let first = at.checked_add(gap)?;
                    at = first.checked_add(run)?;
                    if run == 0 || at - base > SPAN {
                        return None;
                    }
                    record.done.push((first, at));
                }
            }
            1 => {
                let n = bounded(&mut input, SPAN / 8)? as usize;
                let map = input.get(..n)?;
                input = &input[n..];
                for (i, byte) in map.iter().enumerate() {
                    for bit in 0..8 {
                        if byte & 1 << bit != 0 {
                            record.add_done(base + (i * 8 + bit) as u64);
                        }
                    }
                }
            }
            _ => return None,
        }
        input.is_empty().then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_TEXT, Record, SPAN, Takes, Tried, base64, put};
    use proptest::prelude::*;

    fn record(done: &[(u64, u64)], tried: &[(u64, u32, u32)]) -> Record {
        Record {
            keyed: false,
            takes: Takes::default(),
            tried: tried
                .iter()
                .map(|(o, attempt, trials)| (*o, Tried { attempt: *attempt, trials: *trials }))
                .collect(),
            done: done.to_vec(),
        }
    }

    #[test]
    fn takes_are_a_staircase() {
        let one = Takes::default().once_more(100);
        assert_eq!((one.of(99), one.of(100)), (1, 0));
        let two = one.once_more(50);
        assert_eq!((two.of(49), two.of(50), two.of(99), two.of(100)), (2, 1, 1, 0));
        let three = two.once_more(200);
        assert_eq!((three.of(0), three.of(60), three.of(150), three.of(200)), (3, 2, 1, 0));
        assert_eq!(three.from(60), Takes(vec![(100, 2), (200, 1)]));
    }

    #[test]
    fn the_worst_bitmap_fits() {
        let mut r = Record::default();
        (0..SPAN).step_by(2).for_each(|o| r.add_done(1_000_000 + o));
        let mut takes = Takes::default();
        (0..16).for_each(|i| takes = takes.once_more(1_000_000 + SPAN - i * 100));
        r.takes = takes;
        for o in (0..SPAN).step_by(3) {
            r.tried.insert(1_000_000 + o, Tried { attempt: 2 + (o % 2) as u32, trials: 0 });
        }
        r.tried.insert(1_016_000, Tried { attempt: 9, trials: 1 });
        let (text, fitted) = r.encode(1_000_000);
        assert!(text.len() <= MAX_TEXT && !fitted, "{}", text.len());
        let read = Record::decode(1_000_000, text.as_bytes()).unwrap();
        assert_eq!((&read.done, &read.takes), (&r.done, &r.takes), "acknowledgements and takes are never dropped");
        assert_eq!(read.tried.get(&1_016_000), Some(&Tried { attempt: 9, trials: 1 }), "nor are trials");
    }

    #[test]
    fn foreign_or_damaged_metadata_means_nothing_known() {
        let (text, _) = record(&[(12, 15)], &[(11, 3, 1)]).encode(10);
        for wrong in ["", "mq1.", "mq2.AAAA", "some other program's", "mq1.!!!!", "mq1.A", &text[..text.len() - 1]] {
            assert_eq!(Record::decode(10, wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(Record::decode(10, &[0xff, 0xfe]), None);
        assert!(Record::decode(10, text.as_bytes()).is_some());
    }

    #[test]
    fn damaged_metadata_does_not_fill_the_memory() {
        // Each run is of 32,768 messages, and there are 500 of them.
        let mut bytes = vec![0, 0];
        put(&mut bytes, 500);
        for _ in 0..500 {
            bytes.extend([0, 0x80, 0x80, 0x02, 2, 0]);
        }
        bytes.extend([0, 0]);
        assert_eq!(Record::decode(0, format!("mq1.{}", base64(&bytes)).as_bytes()), None);
    }

    #[test]
    fn what_is_done_is_found() {
        let r = record(&[(5, 7), (9, 10)], &[]);
        let done: Vec<u64> = (0..12).filter(|o| r.is_done(*o)).collect();
        assert_eq!(done, [5, 6, 9]);
        assert_eq!((r.skip_done(5), r.skip_done(7), r.skip_done(9)), (7, 7, 10));
    }

    proptest! {
        /// Whatever a tracker knows comes back as it was.
        #[test]
        fn survives_the_broker(base in 0u64..1 << 40, done in proptest::collection::btree_set(1u64..2000, 0..300),
            tried in proptest::collection::btree_map(0u64..2000, (2u32..9, 0u32..3), 0..40), horizons in proptest::collection::vec(1u64..3000, 0..6), keyed: bool) {
            let mut r = Record { keyed, ..Record::default() };
            done.iter().for_each(|o| r.add_done(base + o));
            r.tried = tried.into_iter().map(|(o, (attempt, trials))| (base + o, Tried { attempt, trials })).collect();
            for h in horizons {
                r.takes = r.takes.once_more(base + h);
            }
            let (text, fitted) = r.encode(base);
            prop_assert!(fitted && text.len() <= MAX_TEXT);
            prop_assert_eq!(Record::decode(base, text.as_bytes()), Some(r));
        }

        /// No text makes it panic or claim much.
        #[test]
        fn reads_any_text(text in "mq1\\.[A-Za-z0-9_-]{0,200}") {
            if let Some(r) = Record::decode(7, text.as_bytes()) {
                prop_assert!(r.done.iter().all(|(first, end)| *first >= 7 && *end <= 7 + SPAN + 8));
            }
        }
    }
}
