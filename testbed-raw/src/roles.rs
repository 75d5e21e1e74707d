//! What every raw client does, whatever its library: send until confirmed, receive until told to stop.

use std::time::{Duration, Instant};

use mq_testbed::client::{Order, Role, Stop, payload};
use mq_testbed::history::{Event, Historian, How, Sent, Settled};

/// Between two tries to connect.
const PAUSE: Duration = Duration::from_millis(100);

/// How long a producer that is to end tries to get its last message confirmed.
const LAST_WORDS: Duration = Duration::from_secs(40);

/// A client library and a broker.
pub(crate) trait Raw {
    /// Makes topic and group.
    fn prepare(&self) -> Result<(), String>;
    fn sender(&self) -> Result<Box<dyn Sender>, String>;
    fn receiver(&self) -> Result<Box<dyn Receiver>, String>;
    /// The ids that the group has left.
    fn remaining(&self) -> Result<Vec<String>, String>;
    /// Deletes the topic, or all there is in it.
    fn destroy(&self) -> Result<(), String>;
}

/// A connection that sends.
pub(crate) trait Sender {
    /// Returns once the broker has it. After an error the connection is given up.
    fn send(&mut self, key: &str, payload: &[u8]) -> Result<(), Failed>;
}

/// Why a send failed.
pub(crate) struct Failed {
    pub(crate) outcome: Sent,
    pub(crate) words: String,
}

/// A connection that receives.
pub(crate) trait Receiver {
    /// What has come, waiting a moment for it. After an error the connection is given up.
    fn receive(&mut self) -> Result<Vec<Got>, String>;
    /// Acks one of the messages that `receive` gave last.
    fn ack(&mut self, got: &Got) -> Result<Settled, String>;
    /// Whether the topic was found destroyed, and made anew, since last asked.
    fn found_destroyed(&mut self) -> bool {
        false
    }
}

/// A received message.
pub(crate) struct Got {
    pub(crate) id: String,
    pub(crate) place: Option<String>,
    /// From then on somebody else may have it, so it is not handed over any more.
    pub(crate) ours_until: Option<Instant>,
}

/// Plays the role that the order names.
pub(crate) fn play(raw: &dyn Raw, order: &Order) -> Result<(), String> {
    match order.role {
        Role::Prepare => raw.prepare(),
        Role::Produce => produce(raw, order),
        Role::Consume => consume(raw, order),
        Role::Inspect => {
            let history = order.historian()?;
            for id in raw.remaining()? {
                history.write(Event::Remaining { id });
            }
            Ok(())
        }
        Role::Destroy => raw.destroy(),
    }
}

fn note(history: &Historian, text: impl Into<String>) {
    history.write(Event::Note { text: text.into() });
}

fn produce(raw: &dyn Raw, order: &Order) -> Result<(), String> {
    let history = order.historian()?;
    let stop = Stop::when_input_closes();
    let mut due = Instant::now();
    let mut sender: Option<Box<dyn Sender>> = None;
    history.write(Event::Ready);
    for number in 0.. {
        if stop.wait_until(due) {
            return Ok(());
        }
        due = order.next_due(due);
        let (id, key) = order.message(number);
        let mut last_words: Option<Instant> = None;
        loop {
            let Some(connected) = connect(&mut sender, || raw.sender(), &history) else {
                let now = Instant::now();
                let end = if stop.is_set() { *last_words.get_or_insert(now + LAST_WORDS) } else { now + LAST_WORDS };
                if now > end {
                    return Err(format!("{id} could not be sent any more"));
                }
                std::thread::park_timeout(PAUSE);
                continue;
            };
            history.write(Event::Sending { id: id.clone(), key: key.clone() });
            match connected.send(&key, &payload(&id)) {
                Ok(()) => {
                    history.write(Event::Sent { id: id.clone(), outcome: Sent::Confirmed });
                    break;
                }
                Err(Failed { outcome, words }) => {
                    history.write(Event::Sent { id: id.clone(), outcome });
                    note(&history, words);
                    sender = None;
                }
            }
        }
    }
    Ok(())
}

fn consume(raw: &dyn Raw, order: &Order) -> Result<(), String> {
    let history = order.historian()?;
    let stop = Stop::when_input_closes();
    let mut receiver: Option<Box<dyn Receiver>> = None;
    let mut ready = false;
    while !stop.is_set() {
        let Some(connected) = connect(&mut receiver, || raw.receiver(), &history) else {
            stop.wait(PAUSE);
            continue;
        };
        if !ready {
            ready = true;
            history.write(Event::Ready);
        }
        let handled = connected.receive().and_then(|batch| {
            if connected.found_destroyed() {
                history.write(Event::Gap);
            }
            batch.into_iter().try_for_each(|got| handle(connected.as_mut(), &got, order, &history, &stop))
        });
        if let Err(words) = handled {
            note(&history, words);
            receiver = None;
        }
    }
    Ok(())
}

fn handle(
    receiver: &mut dyn Receiver,
    got: &Got,
    order: &Order,
    history: &Historian,
    stop: &Stop,
) -> Result<(), String> {
    if stop.is_set() || got.ours_until.is_some_and(|until| until <= Instant::now()) {
        return Ok(());
    }
    let (id, place) = (got.id.clone(), got.place.clone());
    history.write(Event::Delivered { id: id.clone(), place: place.clone() });
    // The work.
    std::thread::sleep(order.work);
    history.write(Event::Settling { id: id.clone(), how: How::Ack, place: place.clone() });
    let answer = receiver.ack(got);
    let outcome = *answer.as_ref().unwrap_or(&Settled::Unknown);
    history.write(Event::Settled { id, how: How::Ack, outcome, place });
    answer.map(|_| ())
}

fn connect<'a, T: ?Sized>(
    slot: &'a mut Option<Box<T>>,
    connect: impl FnOnce() -> Result<Box<T>, String>,
    history: &Historian,
) -> Option<&'a mut Box<T>> {
    if slot.is_none() {
        match connect() {
            Ok(connected) => *slot = Some(connected),
            Err(words) => note(history, format!("cannot connect: {words}")),
        }
    }
    slot.as_mut()
}
