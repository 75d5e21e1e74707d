//! Judges a history: what was lost, duplicated, out of order, delivered after its ack, owned by two.
//!
//! It knows messages, times and outcomes, and nothing of the client that wrote them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::history::{Event, How, Record, Sent, Settled};

/// What the client under test promises beyond "at least once".
#[derive(Debug, Clone, Copy, Default)]
pub struct Promises {
    /// First deliveries of one producer's messages of one key come in the order they were sent in.
    pub ordered: bool,
    /// A message has one owner at a time, as long as no fault is at work.
    pub one_owner: bool,
}

/// The judgement. Ids are listed where they are something to look into.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Messages that were tried to be sent.
    pub sent: usize,
    /// Messages that the broker confirmed.
    pub confirmed: usize,
    /// Messages that were delivered at least once.
    pub delivered: usize,
    /// Deliveries of a message beyond its first.
    pub duplicates: usize,
    /// Confirmed, and neither settled nor dead-lettered nor still in the broker.
    pub lost: BTreeSet<String>,
    /// Lost to a fault that destroys, having been sent before its end.
    pub destroyed: BTreeSet<String>,
    /// Delivered, but never sent by anybody.
    pub invented: BTreeSet<String>,
    /// First delivered after a later message of the same producer and key.
    pub out_of_order: BTreeSet<String>,
    /// Delivered again after its ack was confirmed.
    pub after_ack: BTreeSet<String>,
    /// In two members' hands at the same time, with no fault at work.
    pub owned_by_two: BTreeSet<String>,
    /// Messages were destroyed, and no member was told of it.
    pub unreported_gap: bool,
}

impl Verdict {
    /// Every broken promise in words; empty when all were kept.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        let mut list = |what: &str, ids: &BTreeSet<String>| {
            if !ids.is_empty() {
                let some: Vec<&str> = ids.iter().take(5).map(String::as_str).collect();
                complaints.push(format!("{} {what}: {}", ids.len(), some.join(" ")));
            }
        };
        list("lost", &self.lost);
        list("never sent but delivered", &self.invented);
        list("out of order", &self.out_of_order);
        list("delivered after a confirmed ack", &self.after_ack);
        list("owned by two", &self.owned_by_two);
        if self.unreported_gap {
            complaints.push(format!("{} destroyed, and no gap was reported", self.destroyed.len()));
        }
        complaints
    }
}

/// Judges records that are sorted by time.
#[must_use]
pub fn check(records: &[Record], promises: Promises) -> Verdict {
    let mut verdict = Verdict::default();
    let faults = Faults::of(records);
    let sends = Sends::of(records);
    verdict.sent = sends.first_try.len();
    verdict.confirmed = sends.confirmed.len();
    deliveries(records, &sends, &mut verdict);
    losses(records, &sends, &faults, &mut verdict);
    acks(records, &faults, &mut verdict);
    if promises.ordered {
        order(records, &sends, &mut verdict);
    }
    if promises.one_owner {
        owners(records, &faults, &mut verdict);
    }
    verdict
}

/// The times at which something was broken.
struct Faults {
    /// Begin, end, whether it destroys.
    spans: Vec<(u64, u64, bool)>,
}

impl Faults {
    fn of(records: &[Record]) -> Self {
        let mut spans: Vec<(u64, u64, bool)> = Vec::new();
        for record in records {
            match record.event {
                Event::FaultBegins { destroys, .. } => spans.push((record.at, u64::MAX, destroys)),
                Event::FaultEnds { .. } => {
                    if let Some(open) = spans.last_mut() {
                        open.1 = record.at;
                    }
                }
                _ => {}
            }
        }
        Self { spans }
    }

    fn touch(&self, from: u64, to: u64) -> bool {
        self.spans.iter().any(|(begin, end, _)| *begin <= to && from <= *end)
    }
}

struct Sends<'a> {
    /// When a message was first tried, and its key.
    first_try: HashMap<&'a str, (u64, &'a str)>,
    /// When the first try began that led to a confirmation.
    confirmed: HashMap<&'a str, u64>,
    /// Came back as unknown or rejected at least once, or was tried again when a later message of its key had been tried.
    doubtful: BTreeSet<&'a str>,
}

impl<'a> Sends<'a> {
    fn of(records: &'a [Record]) -> Self {
        let mut sends = Self { first_try: HashMap::new(), confirmed: HashMap::new(), doubtful: BTreeSet::new() };
        let mut last_try: HashMap<&str, u64> = HashMap::new();
        let mut last_of_key: HashMap<(&str, &str), &str> = HashMap::new();
        for record in records {
            match &record.event {
                Event::Sending { id, key } => {
                    let again = sends.first_try.contains_key(id.as_str());
                    sends.first_try.entry(id).or_insert((record.at, key));
                    last_try.insert(id, record.at);
                    match last_of_key.insert((&record.who, key), id) {
                        Some(other) if again && other != id => drop(sends.doubtful.insert(id)),
                        _ => {}
                    }
                }
                Event::Sent { id, outcome: Sent::Confirmed } => {
                    let begun = last_try.get(id.as_str()).copied().unwrap_or(record.at);
                    sends.confirmed.entry(id).or_insert(begun);
                }
                Event::Sent { id, outcome: Sent::Unknown | Sent::Rejected } => {
                    sends.doubtful.insert(id);
                }
                _ => {}
            }
        }
        sends
    }
}

fn deliveries(records: &[Record], sends: &Sends<'_>, verdict: &mut Verdict) {
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for record in records {
        if let Event::Delivered { id, .. } = &record.event {
            *seen.entry(id).or_default() += 1;
            if !sends.first_try.contains_key(id.as_str()) {
                verdict.invented.insert(id.clone());
            }
        }
    }
    verdict.delivered = seen.len();
    verdict.duplicates = seen.values().map(|times| times - 1).sum();
}

/// Messages whose handler succeeded and that somebody asked to ack, unless the answer was "not yours".
///
/// Without an answer, because none came or because the process was killed first, the broker may have it or not, and
/// whether it gives the message once more is its affair.
pub(crate) fn handled(records: &[Record]) -> BTreeSet<&str> {
    let mut acks: HashMap<(&str, &str, Option<&str>), bool> = HashMap::new();
    for record in records {
        match &record.event {
            Event::Settling { id, how: How::Ack, place } => {
                acks.insert((&record.who, id, place.as_deref()), true);
            }
            Event::Settled { id, how: How::Ack, outcome, place } => {
                acks.insert((&record.who, id, place.as_deref()), *outcome != Settled::Stale);
            }
            _ => {}
        }
    }
    acks.into_iter().filter(|(_, counts)| *counts).map(|((_, id, _), _)| id).collect()
}

fn losses(records: &[Record], sends: &Sends<'_>, faults: &Faults, verdict: &mut Verdict) {
    let mut kept = handled(records);
    for record in records {
        if let Event::Remaining { id } | Event::Dead { id } = &record.event {
            kept.insert(id);
        }
    }
    let mut earliest_destruction = None;
    for (id, begun) in &sends.confirmed {
        if kept.contains(id) {
            continue;
        }
        match faults.spans.iter().find(|(_, end, destroys)| *destroys && begun <= end) {
            Some((begin, ..)) => {
                verdict.destroyed.insert((*id).to_owned());
                earliest_destruction = Some(earliest_destruction.map_or(*begin, |known: u64| known.min(*begin)));
            }
            None => {
                verdict.lost.insert((*id).to_owned());
            }
        }
    }
    if let Some(begin) = earliest_destruction {
        verdict.unreported_gap = !records.iter().any(|record| record.event == Event::Gap && record.at >= begin);
    }
}

/// Messages that may lie in the broker twice: tried more than once, or on their way while a fault was at work, when the
/// client library may have repeated them by itself.
fn repeated<'a>(records: &'a [Record], faults: &Faults) -> BTreeSet<&'a str> {
    let mut first: HashMap<&str, u64> = HashMap::new();
    let mut found = BTreeSet::new();
    for record in records {
        match &record.event {
            Event::Sending { id, .. } => {
                let again = first.insert(id, record.at).is_some();
                found.extend(again.then_some(id.as_str()));
            }
            Event::Sent { id, .. } if first.get(id.as_str()).is_some_and(|begun| faults.touch(*begun, record.at)) => {
                found.insert(id);
            }
            _ => {}
        }
    }
    found
}

/// Delivered again after a confirmed ack. A message can lie in the broker twice, when its first send had no answer and
/// was repeated: where the broker says the place, places are compared; else messages whose sends were all answered.
fn acks(records: &[Record], faults: &Faults, verdict: &mut Verdict) {
    let repeated = repeated(records, faults);
    let mut acked: BTreeSet<(&str, Option<&str>)> = BTreeSet::new();
    for record in records {
        match &record.event {
            Event::Settled { id, how: How::Ack, outcome: Settled::Confirmed, place } => {
                acked.insert((id, place.as_deref()));
            }
            Event::Delivered { id, place }
                if acked.contains(&(id.as_str(), place.as_deref()))
                    && (place.is_some() || !repeated.contains(id.as_str())) =>
            {
                verdict.after_ack.insert(id.clone());
            }
            _ => {}
        }
    }
}

/// Within one producer and key, first deliveries follow the order of the first tries. A message whose send came back
/// without a confirmation is left out: from there on, order is its sender's affair.
fn order(records: &[Record], sends: &Sends<'_>, verdict: &mut Verdict) {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    let mut last: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for record in records {
        let Event::Delivered { id, .. } = &record.event else { continue };
        let Some((tried, key)) = sends.first_try.get(id.as_str()) else { continue };
        if !seen.insert(id) || sends.doubtful.contains(id.as_str()) {
            continue;
        }
        let producer = id.split('-').next().unwrap_or_default();
        let newest = last.entry((producer, key)).or_insert(*tried);
        if tried < newest {
            verdict.out_of_order.insert(id.clone());
        }
        *newest = (*newest).max(*tried);
    }
}

/// Two members hold one message. Not counted where a fault touches the first one's hold: it may have lost its
/// ownership without being able to know. Nor where two copies may lie in the broker and it does not say which is which.
fn owners(records: &[Record], faults: &Faults, verdict: &mut Verdict) {
    let repeated = repeated(records, faults);
    // A hold is one delivery of one copy.
    let mut held: HashMap<(&str, Option<&str>), (&str, u64)> = HashMap::new();
    for record in records {
        match &record.event {
            Event::Delivered { id, place } => {
                let copy = (id.as_str(), place.as_deref());
                if place.is_none() && repeated.contains(id.as_str()) {
                    continue;
                }
                if let Some((owner, since)) = held.insert(copy, (&record.who, record.at))
                    && owner != record.who
                    && !faults.touch(since, record.at)
                {
                    verdict.owned_by_two.insert(id.clone());
                }
            }
            Event::Settled { id, place, .. } => {
                let copy = (id.as_str(), place.as_deref());
                if held.get(&copy).is_some_and(|(owner, _)| *owner == record.who) {
                    held.remove(&copy);
                }
            }
            Event::Disowned { id } => {
                held.retain(|(held_id, _), (owner, _)| *held_id != id || *owner != record.who);
            }
            _ => {}
        }
    }
}
