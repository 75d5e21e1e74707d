//! What is where: kept up with a history while it grows, since looking through all of it each time would take longer than
//! the fault.

use std::collections::{HashMap, HashSet};

use crate::history::{Event, How, Record, Sent, Settled};

/// One message.
#[derive(Default)]
struct Message {
    last_try: Option<u64>,
    confirmed: bool,
    dead: bool,
    /// Who settled which copy, and whether that counts; as in [`handled`](crate::checker::handled).
    acks: Vec<(String, Option<String>, bool)>,
}

impl Message {
    fn is_settled(&self) -> bool {
        self.dead || self.acks.iter().any(|(_, _, counts)| *counts)
    }

    fn ack(&mut self, who: &str, place: Option<&String>, counts: bool) {
        match self.acks.iter_mut().find(|(by, at, _)| by == who && at.as_ref() == place) {
            Some(known) => known.2 = counts,
            None => self.acks.push((who.to_owned(), place.cloned(), counts)),
        }
    }
}

/// The events until now, counted.
#[derive(Default)]
pub(super) struct Tally {
    messages: HashMap<String, Message>,
    /// Confirmed and not settled.
    open: HashSet<String>,
    tried: usize,
    settled: usize,
    /// Processes that are at work.
    pub(super) ready: usize,
    /// Messages that the broker confirmed.
    pub(super) confirmed: usize,
    since: Option<Since>,
}

/// What happened since a fault ended.
struct Since {
    end: u64,
    first_delivery: Option<u64>,
    newer_settled: usize,
    answers: usize,
}

impl Tally {
    pub(super) fn add(&mut self, record: &Record) {
        let after = self.since.as_mut().filter(|since| record.at > since.end);
        match &record.event {
            Event::Ready => self.ready += 1,
            Event::Sending { id, .. } => self.change(id, |message| message.last_try = Some(record.at)),
            Event::Sent { id, outcome: Sent::Confirmed } => self.change(id, |message| message.confirmed = true),
            Event::Delivered { .. } => {
                if let Some(since) = after {
                    let first = since.first_delivery.get_or_insert(record.at);
                    // The files are read one after the other.
                    *first = record.at.min(*first);
                }
            }
            Event::Settling { id, how: How::Ack, place } => {
                self.change(id, |message| message.ack(&record.who, place.as_ref(), true));
            }
            Event::Settled { id, how, outcome, place } => {
                if let Some(since) = after {
                    since.answers += 1;
                }
                match (how, outcome) {
                    (How::Ack, outcome) => self.change(id, |message| {
                        message.ack(&record.who, place.as_ref(), *outcome != Settled::Stale);
                    }),
                    (How::DeadLetter, Settled::Confirmed | Settled::Sent) => {
                        self.change(id, |message| message.dead = true);
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }

    fn change(&mut self, id: &str, how: impl FnOnce(&mut Message)) {
        if !self.messages.contains_key(id) {
            self.messages.insert(id.to_owned(), Message::default());
        }
        let Some(message) = self.messages.get_mut(id) else { return };
        let facts = |message: &Message| (message.last_try.is_some(), message.confirmed, message.is_settled());
        let (tried, confirmed, settled) = facts(message);
        how(message);
        let now = facts(message);
        self.tried += usize::from(now.0 && !tried);
        self.confirmed += usize::from(now.1 && !confirmed);
        self.settled = self.settled + usize::from(now.2) - usize::from(settled);
        if now.2
            && !settled
            && let Some(since) = &mut self.since
        {
            since.newer_settled += usize::from(message.last_try.is_some_and(|at| at > since.end));
        }
        let (was_open, is_open) = (confirmed && !settled, now.1 && !now.2);
        if is_open && !was_open {
            self.open.insert(id.to_owned());
        }
        if was_open && !is_open {
            self.open.remove(id);
        }
    }

    /// From now on, also counts what happens after that time.
    pub(super) fn since(&mut self, end: u64) {
        self.since = Some(Since { end, first_delivery: None, newer_settled: 0, answers: 0 });
    }

    pub(super) fn settled(&self) -> usize {
        self.settled
    }

    pub(super) fn in_flight(&self) -> usize {
        self.tried.saturating_sub(self.settled)
    }

    pub(super) fn all_settled(&self) -> bool {
        self.open.is_empty()
    }

    /// Whether everything that was confirmed of the time before the end of the fault is settled.
    pub(super) fn older_settled(&self) -> bool {
        let end = self.since.as_ref().map_or(u64::MAX, |since| since.end);
        let newer = |id: &String| self.messages.get(id).and_then(|message| message.last_try).is_some_and(|at| at > end);
        self.open.iter().all(newer)
    }

    /// Messages tried since the fault ended and settled.
    pub(super) fn newer_settled(&self) -> usize {
        self.since.as_ref().map_or(0, |since| since.newer_settled)
    }

    /// Settlements answered since the fault ended.
    pub(super) fn answers_since(&self) -> usize {
        self.since.as_ref().map_or(0, |since| since.answers)
    }

    /// Microseconds from the end of the fault to the first delivery.
    pub(super) fn first_delivery(&self) -> Option<u64> {
        let since = self.since.as_ref()?;
        since.first_delivery.map(|at| at - since.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checker;

    fn record(at: u64, who: &str, event: Event) -> Record {
        Record { at, who: who.into(), event }
    }

    fn sending(id: &str) -> Event {
        Event::Sending { id: id.into(), key: "k".into() }
    }

    fn settled(id: &str, outcome: Settled) -> Event {
        Event::Settled { id: id.into(), how: How::Ack, outcome, place: None }
    }

    fn settling(id: &str) -> Event {
        Event::Settling { id: id.into(), how: How::Ack, place: None }
    }

    fn sent(id: &str) -> Event {
        Event::Sent { id: id.into(), outcome: Sent::Confirmed }
    }

    #[test]
    fn an_ack_counts_until_it_is_stale_and_only_its_own() {
        let mut tally = Tally::default();
        let mut records = Vec::new();
        let mut step = |tally: &mut Tally, who: &str, event: Event| {
            records.push(record(records.len() as u64, who, event));
            tally.add(&records[records.len() - 1]);
            assert_eq!(tally.settled(), checker::handled(&records).len(), "{records:?}");
        };
        step(&mut tally, "p0", sending("p0-1"));
        assert_eq!((tally.in_flight(), tally.all_settled()), (1, true));
        step(&mut tally, "p0", sent("p0-1"));
        assert!(!tally.all_settled());
        step(&mut tally, "m0", settling("p0-1"));
        assert!(tally.all_settled());
        step(&mut tally, "m0", settled("p0-1", Settled::Stale));
        assert_eq!((tally.in_flight(), tally.all_settled()), (1, false));
        step(&mut tally, "m1", settling("p0-1"));
        step(&mut tally, "m1", settled("p0-1", Settled::Unknown));
        step(&mut tally, "m0", settled("p0-1", Settled::Stale));
        assert_eq!((tally.in_flight(), tally.all_settled(), tally.confirmed), (0, true, 1));
    }

    #[test]
    fn older_and_newer_are_told_apart_by_the_last_try() {
        let mut tally = Tally::default();
        for (at, event) in [(1, sending("p0-1")), (2, sent("p0-1")), (3, sending("p0-2"))] {
            tally.add(&record(at, "p0", event));
        }
        tally.since(10);
        assert!(!tally.older_settled());
        let delivered = || Event::Delivered { id: "p0-1".into(), place: None };
        for (at, event) in [(9, delivered()), (25, delivered()), (15, delivered()), (26, settling("p0-1"))] {
            tally.add(&record(at, "m0", event));
        }
        assert_eq!((tally.first_delivery(), tally.older_settled(), tally.newer_settled()), (Some(5), true, 0));
        for (at, event) in [(30, sending("p0-2")), (31, sent("p0-2"))] {
            tally.add(&record(at, "p0", event));
        }
        assert!(tally.older_settled() && !tally.all_settled());
        tally.add(&record(40, "m0", settling("p0-2")));
        tally.add(&record(41, "m0", settled("p0-2", Settled::Sent)));
        assert_eq!((tally.newer_settled(), tally.answers_since(), tally.all_settled()), (1, 1, true));
    }
}
