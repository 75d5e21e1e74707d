//! Order per key: at most one message of a key is out, the others wait in line. Pure; used under the lane's or partition's lock.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// FNV-1a: short keys, no random state (a replay must take the same path).
#[derive(Debug, Clone)]
pub struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Fnv {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// The hash of a key.
#[inline]
pub fn key_hash(key: &[u8]) -> u64 {
    let mut fnv = Fnv::default();
    fnv.write(key);
    fnv.finish()
}

/// Lines of messages, one per key that is out. Keys are told apart by their 64-bit hash: two that meet wait for each other,
/// which costs concurrency and breaks no order.
#[derive(Debug, Default)]
pub struct KeyGate {
    lines: HashMap<u64, std::collections::VecDeque<u64>, BuildHasherDefault<Fnv>>,
    waiting: usize,
}

impl KeyGate {
    /// A message of this key arrived. True: it may go out now. False: it waits in line.
    pub fn arrive(&mut self, key: u64, slot: u64) -> bool {
        match self.lines.entry(key) {
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(Default::default());
                true
            }
            std::collections::hash_map::Entry::Occupied(mut line) => {
                line.get_mut().push_back(slot);
                self.waiting += 1;
                false
            }
        }
    }

    /// Whether a message of this key is out.
    pub fn is_busy(&self, key: u64) -> bool {
        self.lines.contains_key(&key)
    }

    /// The message of this key that was out is settled for good: the next of the line may go out.
    pub fn leave(&mut self, key: u64) -> Option<u64> {
        let line = self.lines.get_mut(&key)?;
        match line.pop_front() {
            Some(next) => {
                self.waiting -= 1;
                Some(next)
            }
            None => {
                self.lines.remove(&key);
                None
            }
        }
    }

    /// A message that waits in line is gone.
    pub fn forget(&mut self, key: u64, slot: u64) {
        let Some(line) = self.lines.get_mut(&key) else { return };
        if let Some(at) = line.iter().position(|s| *s == slot) {
            line.remove(at);
            self.waiting -= 1;
        }
    }

    /// Messages that wait in line.
    pub fn waiting(&self) -> usize {
        self.waiting
    }
}

#[cfg(test)]
mod tests {
    use super::KeyGate;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// However arrivals and settlements mix, one of a key is out at a time and each key goes out in order of arrival.
        #[test]
        fn one_at_a_time_and_in_order(keys in proptest::collection::vec(0u64..4, 1..200), settle in any::<u64>()) {
            let mut gate = KeyGate::default();
            let (mut out, mut seen): (BTreeMap<u64, u64>, BTreeMap<u64, Vec<u64>>) = Default::default();
            let mut bits = settle | 1;
            for (slot, key) in keys.iter().enumerate() {
                let slot = slot as u64;
                if gate.arrive(*key, slot) {
                    prop_assert!(out.insert(*key, slot).is_none());
                    seen.entry(*key).or_default().push(slot);
                }
                bits = bits.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                if bits & 1 == 0 && let Some((key, _)) = out.pop_first() && let Some(next) = gate.leave(key) {
                    out.insert(key, next);
                    seen.entry(key).or_default().push(next);
                }
            }
            while let Some((key, _)) = out.pop_first() {
                if let Some(next) = gate.leave(key) {
                    out.insert(key, next);
                    seen.entry(key).or_default().push(next);
                }
            }
            prop_assert_eq!(gate.waiting(), 0);
            for (key, slots) in seen {
                let expected: Vec<u64> = keys.iter().enumerate().filter(|(_, k)| **k == key).map(|(i, _)| i as u64).collect();
                prop_assert_eq!(slots, expected);
            }
        }
    }
}
