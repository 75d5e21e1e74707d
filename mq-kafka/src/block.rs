//! Where what is read is copied to. librdkafka's own memory is not kept: a record in hand would keep a whole answer of the broker,
//! some megabytes. But an allocation each costs more than the copy, above all when another thread frees it; so small ones share.

use bytes::{Bytes, BytesMut};

/// Shared by what fits. The longest-lived of them keeps all of it: no more than a page.
const SIZE: usize = 4 << 10;
/// Larger ones have an allocation of their own.
const SMALL: usize = SIZE / 4;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Block(BytesMut);

impl Block {
    /// A copy of these bytes.
    pub(crate) fn copy(&mut self, bytes: &[u8]) -> Bytes {
        if bytes.is_empty() {
            return Bytes::new();
        }
        if bytes.len() > SMALL {
            return Bytes::copy_from_slice(bytes);
        }
        if self.0.capacity() < bytes.len() {
            self.0 = BytesMut::with_capacity(SIZE);
        }
        self.0.extend_from_slice(bytes);
        self.0.split().freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::{Block, SMALL};

    #[test]
    fn copies_are_what_was_copied_and_share_what_they_can() {
        let mut block = Block::default();
        let all: Vec<Vec<u8>> = (0..300_usize).map(|n| vec![n as u8; n * 7 % (SMALL + 50)]).collect();
        let copies: Vec<_> = all.iter().map(|bytes| block.copy(bytes)).collect();
        assert!(all.iter().zip(&copies).all(|(bytes, copy)| copy == bytes));
        let [one, two] = [block.copy(b"one"), block.copy(b"two")];
        assert_eq!(one.as_ptr().wrapping_add(3), two.as_ptr(), "one allocation");
    }
}
