//! Times as URLs write them.

use std::time::Duration;

/// A number and a unit, as `250ms`, `30s` or `5m`. What is longer than a `Duration` can be is the longest in minutes.
pub fn written_time(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let n: u64 = digits.parse().ok()?;
    match unit {
        "ms" => Some(Duration::from_millis(n)),
        "s" => Some(Duration::from_secs(n)),
        "m" => Some(Duration::from_secs(n.saturating_mul(60))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::written_time;
    use std::time::Duration;

    #[test]
    fn a_number_and_a_unit() {
        let ms = |n| Some(Duration::from_millis(n));
        assert_eq!(["250ms", "30s", "5m"].map(written_time), [ms(250), ms(30_000), ms(300_000)]);
        assert_eq!(["", "5", "s", "5h", "-5s", "5 s", "1.5s", "99999999999999999999s"].map(written_time), [None; 8]);
    }
}
