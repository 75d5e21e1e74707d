use bytes::Bytes;
use std::fmt;
use std::sync::Arc;

/// An ordered multimap of header names (UTF-8) and values (bytes).
///
/// A name may occur several times and order is kept on every backend. Names must not be empty and must not hold control
/// characters; names starting with `mq-` belong to the library. Cloning shares the storage.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Headers(Option<Arc<List>>);

type List = Vec<(Arc<str>, Bytes)>;

impl Headers {
    /// No headers.
    pub const fn new() -> Self {
        Self(None)
    }

    /// Adds one at the end, beside any of the same name.
    pub fn push(&mut self, name: impl Into<Arc<str>>, value: impl Into<Bytes>) {
        Arc::make_mut(self.0.get_or_insert_default()).push((name.into(), value.into()));
    }

    /// Removes all of this name, then adds one at the end.
    pub fn set(&mut self, name: impl Into<Arc<str>>, value: impl Into<Bytes>) {
        let name = name.into();
        self.remove(&name);
        self.push(name, value);
    }

    /// Removes all of this name; says how many there were.
    pub fn remove(&mut self, name: &str) -> usize {
        if self.get(name).is_none() {
            return 0;
        }
        let Some(list) = &mut self.0 else { return 0 };
        let list = Arc::make_mut(list);
        let before = list.len();
        list.retain(|(n, _)| &**n != name);
        let removed = before - list.len();
        if list.is_empty() {
            self.0 = None;
        }
        removed
    }

    /// The first value of this name.
    pub fn get(&self, name: &str) -> Option<&Bytes> {
        self.iter().find(|(n, _)| *n == name).map(|(_, v)| v)
    }

    /// The first value of this name, if it is UTF-8.
    pub fn get_str(&self, name: &str) -> Option<&str> {
        self.get(name).and_then(|v| std::str::from_utf8(v).ok())
    }

    /// All values of this name, in order.
    pub fn get_all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Bytes> {
        self.iter().filter(move |(n, _)| *n == name).map(|(_, v)| v)
    }

    /// All headers, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Bytes)> {
        self.0.iter().flat_map(|list| list.iter()).map(|(n, v)| (&**n, v))
    }

    /// All headers, in order, as they are kept.
    #[inline]
    pub fn as_slice(&self) -> &[(Arc<str>, Bytes)] {
        self.0.as_ref().map_or(&[], |list| list)
    }

    /// How many there are.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |list| list.len())
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Bytes of names and values.
    #[inline]
    pub fn size(&self) -> usize {
        match &self.0 {
            None => 0,
            Some(list) => list.iter().map(|(n, v)| n.len() + v.len()).sum(),
        }
    }
}

impl fmt::Debug for Headers {
    /// Names and sizes only: values may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().map(|(n, v)| (n, format_args!("{} B", v.len()).to_string()))).finish()
    }
}

impl<N: Into<Arc<str>>, V: Into<Bytes>> FromIterator<(N, V)> for Headers {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(items: I) -> Self {
        let list: Vec<_> = items.into_iter().map(|(n, v)| (n.into(), v.into())).collect();
        if list.is_empty() { Self(None) } else { Self(Some(Arc::new(list))) }
    }
}

#[cfg(test)]
mod tests {
    use super::Headers;

    #[test]
    fn keeps_order_and_duplicates() {
        let mut h: Headers = [("a", "1"), ("b", "2"), ("a", "3")].into_iter().collect();
        assert_eq!(h.get_all("a").count(), 2);
        h.set("a", "4");
        assert_eq!(h.iter().map(|(n, _)| n).collect::<Vec<_>>(), ["b", "a"]);
        assert_eq!((h.remove("b"), h.remove("a"), h.is_empty()), (1, 1, true));
    }
}
