//! Medians with their intervals, and what follows from them for a bar.

/// The median of some values, and the interval that holds the true median in at least 95 of 100 cases.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Median {
    pub(crate) value: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Median {
    /// By order statistics: how many of `n` values lie below the true median is binomial, whatever they are spread like.
    pub(crate) fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let Some(last) = n.checked_sub(1) else { return Self { value: f64::NAN, low: f64::NAN, high: f64::NAN } };
        let value = f64::midpoint(sorted[last / 2], sorted[n / 2]);
        // The probability that fewer than k of n lie below, for growing k, until 2.5 % would be passed.
        let (mut below, mut chance, mut rank) = (0.0, 0.5_f64.powi(i32::try_from(n).unwrap_or(i32::MAX)), 0);
        while below + chance <= 0.025 && rank < last / 2 {
            below += chance;
            chance *= (n - rank) as f64 / (rank + 1) as f64;
            rank += 1;
        }
        let low = rank.saturating_sub(1);
        Self { value, low: sorted[low], high: sorted[last - low] }
    }
}

/// What the numbers say of a bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Judged {
    Met,
    Missed,
    Undecided,
}

/// What the machine's noise may take from a bar.
const GRACE: f64 = 0.03;

impl Judged {
    /// At least that much: met when the interval's lower end is, less the grace; missed when all of it is below.
    pub(crate) fn at_least(bar: f64, median: Median) -> Self {
        match median {
            _ if median.low >= bar - GRACE => Self::Met,
            _ if median.high < bar => Self::Missed,
            _ => Self::Undecided,
        }
    }

    /// At most that much, likewise.
    pub(crate) fn at_most(bar: f64, median: Median) -> Self {
        match median {
            _ if median.high <= bar + GRACE => Self::Met,
            _ if median.low > bar => Self::Missed,
            _ => Self::Undecided,
        }
    }

    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "missed",
            Self::Undecided => "undecided",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_fifteen_values_the_fourth_from_each_end_bound_the_median() {
        let values: Vec<f64> = (1..=15).map(f64::from).collect();
        assert_eq!(Median::of(&values), Median { value: 8.0, low: 4.0, high: 12.0 });
        let values: Vec<f64> = (1..=20).rev().map(f64::from).collect();
        assert_eq!(Median::of(&values), Median { value: 10.5, low: 6.0, high: 15.0 });
        assert_eq!(Median::of(&[3.0]), Median { value: 3.0, low: 3.0, high: 3.0 });
        assert!(Median::of(&[]).value.is_nan());
    }

    #[test]
    fn a_bar_is_met_missed_or_undecided() {
        let median = |low, high| Median { value: f64::midpoint(low, high), low, high };
        assert_eq!(Judged::at_least(0.95, median(0.93, 1.2)), Judged::Met);
        assert_eq!(Judged::at_least(0.95, median(0.80, 0.94)), Judged::Missed);
        assert_eq!(Judged::at_least(0.95, median(0.80, 1.10)), Judged::Undecided);
        assert_eq!(Judged::at_most(1.10, median(0.9, 1.12)), Judged::Met);
        assert_eq!(Judged::at_most(1.10, median(1.11, 1.4)), Judged::Missed);
        assert_eq!(Judged::at_most(1.10, median(1.05, 1.4)), Judged::Undecided);
    }
}
