use std::cell::Cell;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

/// The identity of a message. Made when the message is built; it stays through retries, dead letters and redrive.
///
/// The library never drops a message because of its id: the same id sent twice is two messages.
/// Made ids are 16 bytes (a random prefix per thread and a counter) and print as 32 lowercase hexadecimal digits; ids of
/// other programs are kept as text.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageId(Repr);

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Repr {
    Made([u8; 16]),
    Text(Arc<str>),
}

thread_local! {
    /// (prefix, next number); prefix 0 = not made yet.
    static NEXT: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

#[cold]
fn random_prefix() -> u64 {
    // `RandomState` is seeded by the operating system, which spares this crate a random-number dependency.
    RandomState::new().build_hasher().finish() | 1
}

impl MessageId {
    /// No id yet: a producer makes one when it sends.
    pub const NIL: MessageId = MessageId(Repr::Made([0; 16]));

    /// A new id, unique with overwhelming probability among all programs.
    #[inline]
    pub fn make() -> Self {
        NEXT.with(|next| {
            let (mut prefix, number) = next.get();
            if prefix == 0 {
                prefix = random_prefix();
            }
            next.set((prefix, number.wrapping_add(1)));
            let mut id = [0; 16];
            id[..8].copy_from_slice(&prefix.to_be_bytes());
            id[8..].copy_from_slice(&number.to_be_bytes());
            Self(Repr::Made(id))
        })
    }

    /// Makes the ids of this thread a function of `seed`, so that a simulated run can be replayed byte for byte.
    pub fn seed_thread(seed: u64) {
        NEXT.with(|next| next.set((seed.rotate_left(17) | 1, 0)));
    }

    /// An id of the caller's own. Text of 32 lowercase hexadecimal digits is taken as a made id. Empty text is no id: the
    /// producer makes one, or all messages without would count as one wherever ids are compared.
    pub fn text(text: impl AsRef<str>) -> Self {
        let text = text.as_ref();
        if text.is_empty() {
            return Self::NIL;
        }
        match parse_made(text) {
            Some(id) => Self(Repr::Made(id)),
            None => Self(Repr::Text(text.into())),
        }
    }

    /// The bytes of a made id, for a compact wire form.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Repr::Made(bytes))
    }

    /// The 16 bytes of a made id; `None` for text.
    pub fn as_bytes(&self) -> Option<&[u8; 16]> {
        match &self.0 {
            Repr::Made(id) => Some(id),
            Repr::Text(_) => None,
        }
    }

    /// Lets go of what is on the heap.
    #[inline(always)]
    pub(crate) fn clear(&mut self) {
        if let Repr::Text(_) = self.0 {
            *self = Self::NIL;
        }
    }

    /// Whether no id was given yet.
    #[inline]
    pub fn is_nil(&self) -> bool {
        matches!(self.0, Repr::Made(id) if id == [0; 16])
    }
}

fn parse_made(text: &str) -> Option<[u8; 16]> {
    let digits = text.as_bytes();
    if digits.len() != 32 {
        return None;
    }
    let value = |b: u8| match b {
        b'0'..=b'9' => Some(b - b'0'),
        b'a'..=b'f' => Some(b - b'a' + 10),
        _ => None,
    };
    let mut id = [0; 16];
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Some(id)
}

impl Default for MessageId {
    fn default() -> Self {
        Self::NIL
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Repr::Made(id) => id.iter().try_for_each(|b| write!(f, "{b:02x}")),
            Repr::Text(text) => f.write_str(text),
        }
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<&str> for MessageId {
    fn from(text: &str) -> Self {
        Self::text(text)
    }
}

impl From<String> for MessageId {
    fn from(text: String) -> Self {
        Self::text(text)
    }
}

#[cfg(test)]
mod tests {
    use super::MessageId;

    #[test]
    fn made_ids_differ_and_survive_text() {
        let (a, b) = (MessageId::make(), MessageId::make());
        assert_ne!(a, b);
        assert_eq!(MessageId::text(a.to_string()), a);
        assert_eq!(MessageId::text("order-7").to_string(), "order-7");
        assert!(MessageId::NIL.is_nil() && !a.is_nil() && MessageId::text("").is_nil());
    }

    #[test]
    fn a_seeded_thread_repeats_its_ids() {
        MessageId::seed_thread(7);
        let first = MessageId::make();
        MessageId::seed_thread(7);
        assert_eq!(MessageId::make(), first);
    }
}
