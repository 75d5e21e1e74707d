//! Planted histories: the checker has to reject each broken one, and to let the sound ones pass.

use mq_testbed::checker::{Promises, Verdict, check};
use mq_testbed::history::{Event, How, Record, Sent, Settled};

/// Writes a history, one microsecond per event.
#[derive(Default)]
struct Plant(Vec<Record>);

impl Plant {
    fn event(mut self, who: &str, event: Event) -> Self {
        let at = self.0.len() as u64;
        self.0.push(Record { at, who: who.into(), event });
        self
    }

    fn sending(self, id: &str) -> Self {
        self.event("p0", Event::Sending { id: id.into(), key: "k".into() })
    }

    fn came_back(self, id: &str, outcome: Sent) -> Self {
        self.event("p0", Event::Sent { id: id.into(), outcome })
    }

    fn sent(self, id: &str) -> Self {
        self.sending(id).came_back(id, Sent::Confirmed)
    }

    fn delivered(self, who: &str, id: &str) -> Self {
        self.event(who, Event::Delivered { id: id.into(), place: None })
    }

    fn delivered_at(self, who: &str, id: &str, place: &str) -> Self {
        self.event(who, Event::Delivered { id: id.into(), place: Some(place.into()) })
    }

    fn settled(self, who: &str, id: &str, how: How, outcome: Settled) -> Self {
        self.event(who, Event::Settled { id: id.into(), how, outcome, place: None })
    }

    fn acked(self, who: &str, id: &str) -> Self {
        self.settled(who, id, How::Ack, Settled::Confirmed)
    }

    fn acked_at(self, who: &str, id: &str, place: &str) -> Self {
        let place = Some(place.into());
        self.event(who, Event::Settled { id: id.into(), how: How::Ack, outcome: Settled::Confirmed, place })
    }

    fn fault(self, destroys: bool) -> Self {
        self.event("faults", Event::FaultBegins { name: "f".into(), destroys })
    }

    fn over(self) -> Self {
        self.event("faults", Event::FaultEnds { bite: "b".into() })
    }

    fn verdict(self) -> Verdict {
        check(&self.0, Promises { ordered: true, one_owner: true })
    }

    fn sound(self) -> Verdict {
        let verdict = self.verdict();
        assert_eq!(verdict.complaints(), Vec::<String>::new());
        verdict
    }
}

fn ids(ids: &std::collections::BTreeSet<String>) -> Vec<&str> {
    ids.iter().map(String::as_str).collect()
}

#[test]
fn a_sound_history_passes_and_is_counted() {
    let verdict = Plant::default()
        .sent("p0-0")
        .sent("p0-1")
        .sending("p0-2")
        .came_back("p0-2", Sent::Rejected)
        .delivered("m0", "p0-0")
        .settled("m0", "p0-0", How::Nack, Settled::Confirmed)
        .delivered("m0", "p0-1")
        .acked("m0", "p0-1")
        .delivered("m1", "p0-0")
        .acked("m1", "p0-0")
        .sound();
    assert_eq!((verdict.sent, verdict.confirmed, verdict.delivered, verdict.duplicates), (3, 2, 2, 1));
}

#[test]
fn a_confirmed_message_that_never_came_is_lost() {
    let verdict = Plant::default().sent("p0-0").sent("p0-1").delivered("m0", "p0-1").acked("m0", "p0-1").verdict();
    assert_eq!(ids(&verdict.lost), ["p0-0"]);
}

#[test]
fn delivered_is_not_yet_settled() {
    let verdict = Plant::default().sent("p0-0").delivered("m0", "p0-0").verdict();
    assert_eq!(ids(&verdict.lost), ["p0-0"]);
    let verdict =
        Plant::default().sent("p0-0").delivered("m0", "p0-0").settled("m0", "p0-0", How::Ack, Settled::Stale).verdict();
    assert_eq!(ids(&verdict.lost), ["p0-0"], "a stale ack settles nothing");
}

#[test]
fn what_is_still_in_the_broker_is_not_lost() {
    Plant::default().sent("p0-0").event("inspect", Event::Remaining { id: "p0-0".into() }).sound();
}

#[test]
fn a_dead_letter_has_to_be_found_among_the_dead() {
    let given_up =
        |plant: Plant| plant.delivered("m0", "p0-0").settled("m0", "p0-0", How::DeadLetter, Settled::Confirmed);
    let verdict = given_up(Plant::default().sent("p0-0")).verdict();
    assert_eq!(ids(&verdict.lost), ["p0-0"]);
    given_up(Plant::default().sent("p0-0")).event("inspect", Event::Dead { id: "p0-0".into() }).sound();
}

#[test]
fn an_unconfirmed_message_may_vanish() {
    Plant::default()
        .sending("p0-0")
        .came_back("p0-0", Sent::Unknown)
        .sending("p0-1")
        .came_back("p0-1", Sent::NotSent)
        .sound();
}

#[test]
fn destroyed_needs_a_reported_gap() {
    let verdict = Plant::default().sent("p0-0").fault(true).over().verdict();
    assert!(verdict.lost.is_empty());
    assert_eq!(ids(&verdict.destroyed), ["p0-0"]);
    assert!(verdict.unreported_gap);
    let verdict = Plant::default().sent("p0-0").fault(true).over().event("m0", Event::Gap).sound();
    assert_eq!(ids(&verdict.destroyed), ["p0-0"]);
}

#[test]
fn a_gap_before_the_fault_does_not_cover_it() {
    assert!(Plant::default().sent("p0-0").event("m0", Event::Gap).fault(true).over().verdict().unreported_gap);
}

#[test]
fn what_is_confirmed_after_the_destruction_has_to_arrive() {
    let verdict = Plant::default().fault(true).over().sent("p0-0").event("m0", Event::Gap).verdict();
    assert_eq!(ids(&verdict.lost), ["p0-0"]);
}

#[test]
fn a_fault_that_does_not_destroy_excuses_no_loss() {
    let verdict = Plant::default().sent("p0-0").fault(false).over().event("m0", Event::Gap).verdict();
    assert_eq!(ids(&verdict.lost), ["p0-0"]);
}

#[test]
fn overtaking_within_a_key_is_out_of_order() {
    let both = |plant: Plant| plant.acked("m0", "p0-0").acked("m0", "p0-1");
    let verdict =
        both(Plant::default().sent("p0-0").sent("p0-1").delivered("m0", "p0-1").delivered("m0", "p0-0")).verdict();
    assert_eq!(ids(&verdict.out_of_order), ["p0-0"]);
}

#[test]
fn a_duplicate_of_an_earlier_message_is_in_order() {
    let plant = Plant::default().sent("p0-0").sent("p0-1").fault(false).delivered("m0", "p0-0").delivered("m0", "p0-1");
    let verdict = plant.delivered("m1", "p0-0").over().acked("m1", "p0-0").acked("m0", "p0-1").sound();
    assert_eq!(verdict.duplicates, 1);
}

#[test]
fn delivered_after_its_confirmed_ack() {
    let verdict =
        Plant::default().sent("p0-0").delivered("m0", "p0-0").acked("m0", "p0-0").delivered("m1", "p0-0").verdict();
    assert_eq!(ids(&verdict.after_ack), ["p0-0"]);
    let verdict = Plant::default()
        .sent("p0-0")
        .delivered_at("m0", "p0-0", "0:7")
        .acked_at("m0", "p0-0", "0:7")
        .delivered_at("m1", "p0-0", "0:7")
        .verdict();
    assert_eq!(ids(&verdict.after_ack), ["p0-0"]);
}

#[test]
fn a_second_copy_of_a_repeated_send_is_not_after_the_ack() {
    Plant::default()
        .sending("p0-0")
        .came_back("p0-0", Sent::Unknown)
        .sent("p0-0")
        .delivered_at("m0", "p0-0", "0:7")
        .acked_at("m0", "p0-0", "0:7")
        .delivered_at("m1", "p0-0", "0:8")
        .acked_at("m1", "p0-0", "0:8")
        .sound();
}

#[test]
fn an_unanswered_ack_excuses_the_next_delivery() {
    Plant::default()
        .sent("p0-0")
        .delivered("m0", "p0-0")
        .settled("m0", "p0-0", How::Ack, Settled::Unknown)
        .delivered("m1", "p0-0")
        .acked("m1", "p0-0")
        .sound();
}

#[test]
fn in_two_hands_at_once() {
    let plant = Plant::default().sent("p0-0").delivered("m0", "p0-0").delivered("m1", "p0-0");
    assert_eq!(ids(&plant.acked("m0", "p0-0").acked("m1", "p0-0").verdict().owned_by_two), ["p0-0"]);
}

#[test]
fn a_fault_or_a_word_excuses_two_hands() {
    let plant = Plant::default().sent("p0-0").delivered("m0", "p0-0").fault(false).over().delivered("m1", "p0-0");
    plant.acked("m1", "p0-0").sound();
    let plant =
        Plant::default().sent("p0-0").delivered("m0", "p0-0").event("m0", Event::Disowned { id: "p0-0".into() });
    plant.delivered("m1", "p0-0").acked("m1", "p0-0").sound();
}

#[test]
fn what_nobody_sent_is_invented() {
    let verdict = Plant::default().delivered("m0", "p9-9").acked("m0", "p9-9").verdict();
    assert_eq!(ids(&verdict.invented), ["p9-9"]);
}

#[test]
fn killed_between_asking_and_answer_may_have_settled() {
    let settling = Event::Settling { id: "p0-0".into(), how: How::Ack, place: None };
    let plant = Plant::default().sent("p0-0").delivered("m0", "p0-0").event("m0", settling);
    assert!(plant.sound().lost.is_empty());
    let settling = Event::Settling { id: "p0-0".into(), how: How::Ack, place: None };
    let plant = Plant::default().sent("p0-0").delivered("m0", "p0-0").event("m0", settling);
    let verdict = plant.settled("m0", "p0-0", How::Ack, Settled::Stale).verdict();
    assert_eq!(ids(&verdict.lost), ["p0-0"]);
}

#[test]
fn two_copies_without_a_place_are_not_two_owners() {
    let plant = Plant::default().sending("p0-0").came_back("p0-0", Sent::Unknown).sent("p0-0");
    plant.delivered("m0", "p0-0").delivered("m1", "p0-0").acked("m0", "p0-0").acked("m1", "p0-0").sound();
}
