//! How topics and groups are spelled as Redis keys. The key of a topic's stream is the topic's name; every key that the library
//! makes beside it has the same hash tag, so that one script may use them all, also on a Cluster.

use mq_api::{Group, Topic};

/// The consumer that owns delayed entries. No member can be called so: `~` is in no valid group or made member name.
pub(crate) const PARKED: &str = "~parked";

/// The key of a topic's stream.
pub(crate) fn stream(topic: &Topic) -> String {
    match topic.dead_letters_of() {
        Some((of, group)) => dead_letters(&stream(of), group.as_str()),
        None => topic.as_str().to_owned(),
    }
}

/// The hash tag of a key, if it has one by the rules of Redis Cluster.
fn has_tag(key: &str) -> bool {
    key.find('{').is_some_and(|open| key[open + 1..].find('}').is_some_and(|close| close > 0))
}

/// `{orders}` for `orders`; a key that has a tag keeps it. A key that is all tag is told from the one without: no group begins
/// with a dot.
fn tagged(stream: &str) -> String {
    if !has_tag(stream) {
        return format!("{{{stream}}}");
    }
    let all = stream.starts_with('{') && stream.find('}') == Some(stream.len() - 1);
    if all { format!("{stream}.") } else { stream.to_owned() }
}

/// Where retention is noted.
pub(crate) fn meta(stream: &str) -> String {
    format!("{}..meta", tagged(stream))
}

fn dead_letters(stream: &str, group: &str) -> String {
    format!("{}..{group}..dlq", tagged(stream))
}

/// All keys that one group of one stream uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupKeys {
    /// The stream.
    pub(crate) stream: String,
    /// Sorted set: entries that wait, by the time they are due.
    pub(crate) due: String,
    /// Hash: `attempt:trials` of entries that were tried before.
    pub(crate) tries: String,
    /// Stream of dead letters.
    pub(crate) dead: String,
    /// Written when an entry comes back, or will.
    pub(crate) wake: String,
}

impl GroupKeys {
    pub(crate) fn new(topic: &Topic, group: &Group) -> Self {
        Self::of(stream(topic), group.as_str())
    }

    fn of(stream: String, group: &str) -> Self {
        let tag = tagged(&stream);
        Self {
            due: format!("{tag}..{group}..due"),
            tries: format!("{tag}..{group}..tries"),
            dead: dead_letters(&stream, group),
            wake: format!("{tag}..{group}..wake"),
            stream,
        }
    }

    /// The side stream of this group, which redrive writes to: only this group reads it. Its dead letters and what wakes its members are the same.
    pub(crate) fn again(&self, group: &str) -> Self {
        let stream = format!("{}..{group}..again", tagged(&self.stream));
        let (dead, wake) = (self.dead.clone(), self.wake.clone());
        Self { due: format!("{stream}-due"), tries: format!("{stream}-tries"), dead, wake, stream }
    }
}

#[cfg(test)]
mod tests {
    use super::{GroupKeys, meta, stream};
    use mq_api::Topic;

    #[test]
    fn made_keys_share_the_slot_of_the_topic() {
        let keys = GroupKeys::new(&"orders".into(), &"billing".into());
        assert_eq!(keys.stream, "orders");
        assert_eq!(keys.dead, "{orders}..billing..dlq");
        assert_eq!(keys.due, "{orders}..billing..due");
        assert_eq!(keys.again("billing").stream, "{orders}..billing..again");
        assert_eq!(meta("orders"), "{orders}..meta");
        let letters = Topic::dead_letters("orders", "billing");
        assert_eq!(stream(&letters), keys.dead);
        assert_eq!(GroupKeys::new(&letters, &"ops".into()).due, "{orders}..billing..dlq..ops..due");
        assert_eq!(meta("{a}b"), "{a}b..meta", "a tag of the name's own stays");
        assert_ne!(meta("{orders}"), meta("orders"), "two streams, two sets of keys");
    }
}
