//! What a step's output says about passed, failed and skipped, and the table at the end.

use std::fmt;
use std::ops::AddAssign;

use crate::steps::Report;

/// A count of tests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Failed beside others and passed alone.
    pub(crate) late: u64,
    /// Could not run here: a server is missing.
    pub(crate) skipped: u64,
    /// Refusals that the contract lists; they passed as refusals and are no skips.
    pub(crate) unsupported: u64,
    /// Marked as long in the code; `--full` runs them.
    pub(crate) left_for_full: u64,
    /// There is nothing to test yet.
    pub(crate) not_built: bool,
}

impl Count {
    /// Reads a step's output. Lines that count are cargo's `test result:` lines, and of other programs the last line
    /// of the form `N passed, M failed, ...` or `N faults, M lost, K over bound`. A step without any counts as one.
    pub(crate) fn read(output: &str, succeeded: bool) -> Self {
        let mut count = Self::default();
        let mut counted = false;
        for line in output.lines() {
            if let Some(rest) = line.trim().strip_prefix("test result: ") {
                counted = true;
                count.passed += number_before(rest, "passed").unwrap_or(0);
                count.failed += number_before(rest, "failed").unwrap_or(0);
                count.left_for_full += number_before(rest, "ignored").unwrap_or(0);
            }
        }
        // A program that fails may say so once more after its count.
        let is_count = |line: &&str| number_before(line, "passed").is_some() && number_before(line, "failed").is_some();
        let counts = || output.lines().map(str::trim).rfind(is_count);
        let last = output.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default();
        let last = if succeeded { last } else { counts().unwrap_or(last) };
        if !counted && let Some(passed) = number_before(last, "passed") {
            counted = true;
            count.passed = passed;
            count.failed = number_before(last, "failed").unwrap_or(0);
            count.skipped = number_before(last, "skipped").unwrap_or(0);
            count.unsupported = number_before(last, "unsupported").unwrap_or(0);
        } else if !counted && let Some(faults) = number_before(last, "faults") {
            counted = true;
            count.failed = u64::from(!succeeded);
            count.passed = faults.saturating_sub(count.failed);
        } else if !counted && succeeded && last == "not built" {
            counted = true;
            count.not_built = true;
        }
        if !counted && succeeded {
            count.passed = 1;
        }
        // A step that did not compile, crashed or was ended has failed, whatever it had counted before.
        if !succeeded && count.failed == 0 {
            count.failed = 1;
        }
        count
    }
}

/// The number that stands before a word: 12 in `ok. 12 passed; 0 failed`.
fn number_before(line: &str, word: &str) -> Option<u64> {
    let mut words = line.split([' ', ',', ';', '.']).filter(|part| !part.is_empty()).peekable();
    while let Some(part) = words.next() {
        if words.peek() == Some(&word) {
            return part.parse().ok();
        }
    }
    None
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.late += other.late;
        self.skipped += other.skipped;
        self.unsupported += other.unsupported;
        self.left_for_full += other.left_for_full;
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.not_built {
            return f.write_str("not built");
        }
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)?;
        if self.late > 0 { write!(f, ", {} passed at a second look", self.late) } else { Ok(()) }
    }
}

/// Prints backend by suite, and returns the sum.
pub(crate) fn table(reports: &[Report]) -> Count {
    let mut sum = Count::default();
    println!("\n{:<14} {:<16} {:>7} {:>7} {:>8} {:>9}", "backend", "suite", "passed", "failed", "skipped", "seconds");
    for Report { step, count, took, .. } in reports {
        let seconds = took.as_secs_f64();
        if count.not_built {
            println!("{:<14} {:<16} {:<24} {seconds:>9.1}", step.backend, step.suite, "not built");
        } else {
            let Count { passed, failed, skipped, .. } = count;
            let late = if count.late > 0 { format!("   {} at a second look", count.late) } else { String::new() };
            println!(
                "{:<14} {:<16} {passed:>7} {failed:>7} {skipped:>8} {seconds:>9.1}{late}",
                step.backend, step.suite
            );
        }
        sum += *count;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_results_are_summed() {
        let text = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.03s\n\
                    test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out\nerror: test failed";
        let count = Count::read(text, false);
        assert_eq!((count.passed, count.failed, count.left_for_full), (15, 2, 1));
    }

    #[test]
    fn the_last_line_of_other_programs_counts() {
        let count = Count::read("a\n7 passed, 0 failed, 2 unsupported\n", true);
        assert_eq!((count.passed, count.failed, count.unsupported, count.skipped), (7, 0, 2, 0));
        let count = Count::read("9 faults, 0 lost, 0 over bound\n", true);
        assert_eq!((count.passed, count.failed), (9, 0));
        assert!(Count::read("not built\n", true).not_built);
    }

    #[test]
    fn a_step_without_numbers_is_one() {
        assert_eq!(Count::read("Finished", true).passed, 1);
        assert_eq!(Count::read("7 passed, 0 failed", false).failed, 1, "it crashed after printing");
        let count = Count::read("7 passed, 2 failed, 1 unsupported\nerror: it failed", false);
        assert_eq!((count.passed, count.failed), (7, 2));
        assert_eq!(Count::read("", false).failed, 1);
    }
}
