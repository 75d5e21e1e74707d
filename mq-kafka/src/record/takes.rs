//! How often messages were taken by members that died.

/// Steps of a staircase of takes.
const MAX_STEPS: usize = 32;

/// How often messages were taken: everything below `upto` at least `times`. Both fall together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Takes(pub(super) Vec<(u64, u32)>);

impl Takes {
    /// Times that the message at `offset` was taken.
    pub(crate) fn of(&self, offset: u64) -> u32 {
        self.0.iter().find(|(upto, _)| offset < *upto).map_or(0, |(_, times)| *times)
    }

    /// Everything below `horizon` is taken once more.
    pub(crate) fn once_more(&self, horizon: u64) -> Self {
        let mut out: Vec<(u64, u32)> = Vec::with_capacity(self.0.len() + 1);
        for (upto, times) in &self.0 {
            if *upto <= horizon {
                out.push((*upto, times.saturating_add(1)));
            } else {
                if out.last().is_none_or(|(u, _)| *u < horizon) {
                    out.push((horizon, times.saturating_add(1)));
                }
                out.push((*upto, *times));
            }
        }
        if out.last().is_none_or(|(u, _)| *u < horizon) {
            out.push((horizon, 1));
        }
        // So many horizons mean as many deaths; dropping a step counts too low, never too high.
        if out.len() > MAX_STEPS {
            out.remove(MAX_STEPS / 2);
        }
        Self(out)
    }

    /// Only what concerns offsets from `base` on.
    pub(crate) fn from(&self, base: u64) -> Self {
        Self(self.0.iter().copied().filter(|(upto, _)| *upto > base).collect())
    }
}
