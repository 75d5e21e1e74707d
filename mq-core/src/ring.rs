//! A ring addressed by sequence number: push at the tail, look up by number, retire from the head. All O(1), no map.

/// Cells `head..tail`, each found by its number.
#[derive(Debug)]
pub struct SeqRing<T> {
    buf: Vec<T>,
    head: u64,
    tail: u64,
}

impl<T: Default> Default for SeqRing<T> {
    fn default() -> Self {
        Self::starting_at(0)
    }
}

impl<T: Default> SeqRing<T> {
    /// Empty; the first cell will have this number.
    pub fn starting_at(seq: u64) -> Self {
        Self { buf: Vec::new(), head: seq, tail: seq }
    }

    #[inline]
    fn at(&self, seq: u64) -> usize {
        // The length is a power of two, so the low bits of the number are the place.
        seq as usize & self.buf.len().wrapping_sub(1)
    }

    /// The lowest number that is not retired.
    #[inline]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// The number that the next push gets.
    #[inline]
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Cells between head and tail.
    #[inline]
    pub fn len(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// The next cell, with whatever retired value it still holds, so that its allocation can be used again.
    #[inline(always)]
    pub fn push_cell(&mut self) -> (u64, &mut T) {
        if self.len() == self.buf.len() {
            self.grow();
        }
        let (seq, i) = (self.tail, self.at(self.tail));
        self.tail += 1;
        (seq, &mut self.buf[i])
    }

    /// The next cells that lie side by side, at most `n` and at least one if `n` is not 0, with whatever retired values they
    /// hold. They count only after [`commit`](Self::commit).
    #[inline(always)]
    pub fn push_slice(&mut self, n: usize) -> &mut [T] {
        if self.len() == self.buf.len() {
            self.grow();
        }
        let (i, room) = (self.at(self.tail), self.buf.len() - self.len());
        let end = self.buf.len().min(i + room.min(n));
        &mut self.buf[i..end]
    }

    /// Pushes `n` cells that [`push_slice`](Self::push_slice) showed.
    #[inline(always)]
    pub fn commit(&mut self, n: usize) {
        debug_assert!(self.len() + n <= self.buf.len(), "committed more than was there");
        self.tail += n as u64;
    }

    /// The cells from `seq` on that lie side by side, at most `n`. Empty if `seq` is retired or not pushed yet.
    #[inline(always)]
    pub fn slice(&self, seq: u64, n: usize) -> &[T] {
        let n = n.min(self.tail.saturating_sub(seq) as usize);
        if n == 0 || seq < self.head {
            return &[];
        }
        let i = self.at(seq);
        &self.buf[i..self.buf.len().min(i + n)]
    }

    /// The cell of this number, unless it is retired or not pushed yet.
    #[inline]
    pub fn get(&self, seq: u64) -> Option<&T> {
        if seq.wrapping_sub(self.head) < self.tail - self.head { self.buf.get(self.at(seq)) } else { None }
    }

    /// The cell of this number, unless it is retired or not pushed yet.
    #[inline]
    pub fn get_mut(&mut self, seq: u64) -> Option<&mut T> {
        let i = self.at(seq);
        if seq.wrapping_sub(self.head) < self.tail - self.head { self.buf.get_mut(i) } else { None }
    }

    /// At most `n` cells from `seq` on, as the two contiguous pieces they are stored in.
    #[inline]
    pub fn slices(&self, seq: u64, n: usize) -> (&[T], &[T]) {
        let n = n.min(self.tail.saturating_sub(seq) as usize);
        if n == 0 || seq < self.head {
            return (&[], &[]);
        }
        let (i, cap) = (self.at(seq), self.buf.len());
        if i + n <= cap { (&self.buf[i..i + n], &[]) } else { (&self.buf[i..], &self.buf[..n - (cap - i)]) }
    }

    /// Like [`slices`](Self::slices), to change.
    #[inline]
    pub fn slices_mut(&mut self, seq: u64, n: usize) -> (&mut [T], &mut [T]) {
        let n = n.min(self.tail.saturating_sub(seq) as usize);
        if n == 0 || seq < self.head {
            return (&mut [], &mut []);
        }
        let (i, cap) = (self.at(seq), self.buf.len());
        if i + n <= cap {
            (&mut self.buf[i..i + n], &mut [])
        } else {
            let (a, b) = self.buf.split_at_mut(i);
            let k = n - b.len();
            (b, &mut a[..k])
        }
    }

    /// The cell at the head.
    #[inline]
    pub fn front_mut(&mut self) -> Option<&mut T> {
        self.get_mut(self.head)
    }

    /// Retires the cell at the head; its value stays for reuse.
    #[inline]
    pub fn retire(&mut self) {
        debug_assert!(self.head < self.tail, "retired more than was pushed");
        self.head += 1;
    }

    /// Retires the next `n`.
    #[inline]
    pub fn retire_n(&mut self, n: u64) {
        debug_assert!(self.head + n <= self.tail, "retired more than was pushed");
        self.head += n;
    }

    /// Retires everything; numbers go on from the tail.
    pub fn clear(&mut self) {
        self.head = self.tail;
    }

    /// Retires everything and goes on from `seq`, which must not be below the tail.
    pub fn skip_to(&mut self, seq: u64) {
        debug_assert!(seq >= self.tail);
        self.head = seq;
        self.tail = seq;
    }

    /// Numbers and cells, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        (self.head..self.tail).map(|s| (s, &self.buf[self.at(s)]))
    }

    #[cold]
    fn grow(&mut self) {
        let new = (self.buf.len() * 2).max(16);
        let mut grown: Vec<T> = Vec::with_capacity(new);
        grown.resize_with(new, T::default);
        for seq in self.head..self.tail {
            let i = self.at(seq);
            grown[seq as usize & (new - 1)] = std::mem::take(&mut self.buf[i]);
        }
        self.buf = grown;
    }
}

#[cfg(test)]
mod tests {
    use super::SeqRing;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// Against a map: any mix of pushes, retirements and look-ups.
        #[test]
        fn behaves_like_a_map(ops in proptest::collection::vec(0u8..5, 1..400), start in 0u64..50) {
            let mut ring = SeqRing::starting_at(start);
            let mut map = BTreeMap::new();
            for (i, op) in ops.into_iter().enumerate() {
                match op {
                    0 | 1 => { let (seq, cell) = ring.push_cell(); *cell = i; map.insert(seq, i); }
                    2 if !ring.is_empty() => { map.remove(&ring.head()); ring.retire_n(1); }
                    3 => {
                        let from = ring.tail();
                        let cells = ring.push_slice(3);
                        prop_assert!((1..=3).contains(&cells.len()));
                        let n = cells.len();
                        cells.fill(i);
                        ring.commit(n);
                        map.extend((from..from + n as u64).map(|seq| (seq, i)));
                    }
                    _ => {}
                }
                prop_assert_eq!(ring.len(), map.len());
                prop_assert_eq!(ring.get(ring.tail()), None);
                prop_assert!(ring.iter().map(|(s, v)| (s, *v)).eq(map.iter().map(|(s, v)| (*s, *v))));
                let (a, b) = ring.slices(ring.head(), 7);
                prop_assert!(a.iter().chain(b).copied().eq(map.values().take(7).copied()));
                prop_assert_eq!(ring.slice(ring.head(), 7), a);
                prop_assert!(ring.slice(ring.tail(), 7).is_empty());
            }
        }
    }
}
