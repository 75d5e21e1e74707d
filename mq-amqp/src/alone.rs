//! Crash suspects. A queue only says that a message was taken and came back, which is suspicion: it may have been a neighbour's
//! fault. So a suspect is handed over alone, and that this is about to happen is recorded first: a copy that says "trial n" is
//! put into a queue of its own beside the group's (`…..alone`), confirmed, the original acknowledged, and that copy taken and
//! handed over at once. Found there again and taken before, its consumer died with it alone. Only the engine's moment of
//! handing over makes such a copy: a suspect that waits, or is given back cleanly, is never counted.
//!
//! A queue gives back what was taken for two more reasons, which say nothing of the message. A member may take the copy of
//! another before that does, and die of its own. And when the broker or the network was away, every consumer lost what it held
//! and lives on. In both cases the copy is written anew without its trial, before anybody holds it for long.

use crate::connect::{ANSWER, Connections, Role, within};
use crate::copies::{Copy, To};
use crate::decode::{Arrived, decode};
use crate::delay::millis;
use crate::read::Reader;
use crate::topology::{Declarer, short};
use crate::url::QueueType;
use crate::wire::Notes;
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicQosOptions};
use mq_api::{Error, ErrorKind, Position, Provisioning, Result, Stored};
use mq_core::{Flow, Incoming, Token};
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The second half of a token of that queue.
pub(crate) const ALONE: u64 = 1;
/// The queue is looked at this often: a suspect whose consumer died waits at most so long for the next try.
const LOOK: Duration = Duration::from_secs(2);
/// So many looks in a row a member with something in hand leaves to those that have nothing, where a suspect need not wait. A
/// group may be busy for ever, so not all.
const LEFT: u32 = 2;
/// Others' suspects taken on the way to our own, at most.
const OTHERS: usize = 16;

/// The queue of suspects that are recorded.
pub(crate) fn queue(queue: &str) -> String {
    format!("{queue}..alone")
}

struct Trial {
    lane: u32,
    token: Token,
    message: Option<Arc<Stored>>,
    n: u32,
    /// It was given back meanwhile.
    back: bool,
}

/// The suspects of one session.
pub(crate) struct Alone {
    connections: Arc<Connections>,
    name: String,
    kind: QueueType,
    /// Made, or seen to be there.
    exists: bool,
    channel: Option<Channel>,
    /// Taken from this queue and unsettled, with what they noted.
    held: HashMap<u64, Notes>,
    /// Where a delivery of the engine really is since its copy was taken.
    moved: HashMap<Token, u64>,
    /// What is noted on suspects that wait.
    notes: HashMap<Token, Notes>,
    waiting: VecDeque<Trial>,
    /// Copies that are being written, by their number.
    writing: HashMap<u64, Trial>,
    look: Instant,
    /// Looks in a row that were left to members with nothing in hand.
    left: u32,
    /// When this program saw the broker away, in milliseconds since 1970: from its start to the begin of this session, unless
    /// that is its first. What was recorded then came back for that reason, as far as anybody can tell.
    outage: Range<u64>,
}

pub(crate) enum Event {
    Try,
    Look,
}

impl Alone {
    pub(crate) async fn open(
        connections: &Arc<Connections>,
        declarer: &mut Declarer<'_>,
        group_queue: &str,
        kind: QueueType,
        how: Provisioning,
        outage: Range<u64>,
    ) -> Result<Self> {
        let name = queue(group_queue);
        let exists = match how {
            Provisioning::Create => {
                declarer.dead_letters(&name, kind).await?;
                true
            }
            // Made whatever the provisioning says, as the delay queues are, if it may be: a member that does not know of it
            // would leave there what another one died of.
            Provisioning::Verify | Provisioning::None => made(connections, &name, kind).await?.is_ok(),
        };
        Ok(Self {
            connections: connections.clone(),
            name,
            kind,
            exists,
            channel: None,
            held: HashMap::new(),
            moved: HashMap::new(),
            notes: HashMap::new(),
            waiting: VecDeque::new(),
            writing: HashMap::new(),
            look: Instant::now(),
            left: 0,
            outage,
        })
    }

    /// A message that the broker gave back before: what it noted, should it have to be handed over alone.
    pub(crate) fn note(&mut self, token: Token, notes: Notes) {
        self.notes.insert(token, notes);
    }

    /// What was noted on a delivery that is still in the group's queue; nothing of it is kept.
    pub(crate) fn unmoved(&mut self, token: Token) -> Option<Notes> {
        match self.moved.contains_key(&token) {
            true => None,
            false => Some(self.notes.remove(&token).unwrap_or_default()),
        }
    }

    /// Where a delivery is: in the group's queue (`None`) or under this tag here.
    pub(crate) fn place(&mut self, token: Token) -> Option<u64> {
        self.notes.remove(&token);
        match self.moved.remove(&token) {
            Some(tag) => Some(tag),
            None => (token.1 == ALONE).then_some(token.0),
        }
    }

    /// Acknowledges one of this queue; false when it is not held.
    pub(crate) async fn ack(&mut self, tag: u64) -> Result<bool> {
        if self.held.remove(&tag).is_none() {
            return Ok(false);
        }
        let Some(channel) = &self.channel else { return Ok(false) };
        let ack = channel.basic_ack(tag, BasicAckOptions { multiple: false });
        within(ANSWER, "acknowledge", ack).await?;
        // Answered when the broker has read what is before: a record whose acknowledgement is lost on the way looks like a death.
        let read = channel.basic_qos(1, BasicQosOptions { global: false });
        within(ANSWER, "acknowledge", read).await?;
        Ok(true)
    }

    /// What to write so that one of this queue goes back uncounted.
    pub(crate) fn release(&self, tag: u64, message: Option<Arc<Stored>>) -> Option<Copy> {
        let mut notes = *self.held.get(&tag)?;
        notes.untried();
        let message = message?.message.clone();
        Some(Copy { token: Token(tag, ALONE), to: To::Alone, message, notes })
    }

    /// A suspect is about to be handed over for the n-th time.
    pub(crate) fn trial(&mut self, lane: u32, token: Token, message: Option<Arc<Stored>>, n: u32) {
        self.waiting.push_back(Trial { lane, token, message, n, back: false });
    }

    /// A suspect is given back before its trial began. True if its record is being written: that takes its place, and nobody who
    /// finds it counts the trial, since it was never taken.
    pub(crate) fn give_up(&mut self, token: Token) -> bool {
        self.waiting.retain(|trial| trial.token != token);
        let trial = self.writing.values_mut().find(|trial| trial.token == token);
        trial.is_some_and(|trial| {
            trial.back = true;
            true
        })
    }

    /// Looks at the queue at the next turn.
    pub(crate) fn look_now(&mut self) {
        self.look = Instant::now();
    }

    /// Whether what is held of this queue is held no longer: its channel ended, and the broker gave it back.
    fn is_cut_off(&self) -> bool {
        !self.held.is_empty() && !self.channel.as_ref().is_some_and(|c| c.status().connected())
    }

    /// The next thing to do; none while the session drains.
    pub(crate) async fn next(alone: &mut Option<Self>, flow: &Flow, drained: bool) -> Event {
        match alone {
            Some(it) if !drained => {
                if !it.waiting.is_empty() {
                    return Event::Try;
                }
                if !it.exists || !it.writing.is_empty() {
                    return std::future::pending().await;
                }
                tokio::time::sleep_until(it.look).await;
                if it.held.is_empty() {
                    // Taken without room, or in a pause, it would wait for all that is in hand, or for the end of the pause,
                    // and nobody else could have it.
                    poll_fn(|cx| flow.poll_credit(cx)).await;
                }
                Event::Look
            }
            _ => std::future::pending().await,
        }
    }

    async fn take(&mut self) -> Result<Option<(u64, bool, Arrived)>> {
        if self.is_cut_off() {
            return Err(cut_off());
        }
        if !self.channel.as_ref().is_some_and(|c| c.status().connected()) {
            // Tags are those of a channel, and nothing of the last one is held.
            self.moved.clear();
            self.channel = Some(self.connections.channel(Role::Consume).await?);
        }
        let Some(channel) = &self.channel else { return Ok(None) };
        let get = channel.basic_get(short(&self.name)?, BasicGetOptions { no_ack: false });
        let Some(got) = within(ANSWER, "take a suspect", get).await? else { return Ok(None) };
        let d = got.delivery;
        let arrived = decode(d.properties, d.exchange.as_str(), d.routing_key.as_str(), d.data);
        self.held.insert(d.delivery_tag, arrived.notes);
        Ok(Some((d.delivery_tag, d.redelivered, arrived)))
    }

    pub(crate) async fn close(self) {
        if let Some(channel) = &self.channel {
            // What is still held goes back with it.
            let _ = within(Duration::from_secs(1), "close the channel", channel.close(200, "OK".into())).await;
        }
    }
}

/// Bits of a record's number that are chance.
const CHANCE: u32 = 22;

/// The number of a record: when it was made, so that an outage is known to have come later, and chance.
fn number(now: u64, random: u64) -> u64 {
    (now << CHANCE | random & ((1 << CHANCE) - 1)) & (u64::MAX >> 1)
}

/// What a copy that was found in the queue is.
enum Found {
    /// Its trials are those that were handed over.
    Suspect(Incoming),
    /// Its last trial did not take place, or ended with an outage: to be written anew without it.
    Uncounted(Copy),
}

fn found(tag: u64, redelivered: bool, arrived: Arrived, outage: &Range<u64>) -> Found {
    let mut notes = arrived.notes;
    if notes.armed.is_some_and(|armed| !redelivered || outage.contains(&(armed >> CHANCE))) {
        notes.untried();
        return Found::Uncounted(Copy { token: Token(tag, ALONE), to: To::Alone, message: arrived.message, notes });
    }
    let mut incoming = Incoming::new(Token(tag, ALONE), Position::default(), arrived.message);
    incoming.takes = u32::MAX;
    incoming.trials = notes.trials;
    incoming.attempt = notes.attempt.max(1).saturating_add(notes.trials);
    Found::Suspect(incoming)
}

/// Makes the queue of suspects if it is not there; the inner error says that this user may not.
async fn made(connections: &Connections, name: &str, kind: QueueType) -> Result<Result<()>> {
    let mut declarer = Declarer::new(connections, Role::Consume, Provisioning::Create);
    let made = match declarer.dead_letters(name, kind).await {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::Permission => Err(error),
        Err(error) => return Err(error),
    };
    declarer.done().await;
    Ok(made)
}

/// Who holds one of them learns of it by the end of the session.
fn cut_off() -> Error {
    Error::new(ErrorKind::Disconnected, "the channel of the crash suspects ended")
}

/// Does what is next.
pub(crate) async fn handle(reader: &mut Reader, event: Event) -> Result<()> {
    let Some(alone) = &mut reader.alone else { return Ok(()) };
    match event {
        Event::Look => {
            alone.look = Instant::now() + LOOK;
            if alone.is_cut_off() {
                return Err(cut_off());
            }
            if !alone.held.is_empty() {
                return Ok(());
            }
            if reader.session.flow.in_flight() > 0 && alone.left < LEFT {
                alone.left += 1;
                return Ok(());
            }
            alone.left = 0;
            if let Some((tag, redelivered, arrived)) = alone.take().await? {
                let found = found(tag, redelivered, arrived, &alone.outage);
                reader.sort_found([found]);
            }
        }
        Event::Try => {
            let Some(trial) = alone.waiting.pop_front() else { return Ok(()) };
            if !alone.exists {
                let made = made(&alone.connections, &alone.name, alone.kind).await?;
                alone.exists = made.is_ok();
                reader.session.trouble(
                    "suspects",
                    made.err().map(|error| format!("crash suspects are handed over without a record: {error}")),
                );
            }
            // What cannot be recorded is handed over all the same: else it, and all behind it, would come back for ever.
            let message = trial.message.as_ref().filter(|_| alone.exists).map(|m| m.message.clone());
            let Some(message) = message else {
                reader.session.settles.trial_recorded(trial.lane, trial.token);
                return Ok(());
            };
            let number = number(millis(reader.session.env.wall()), reader.session.env.random());
            let noted = match trial.token {
                Token(tag, ALONE) => alone.held.get(&tag),
                token => alone.notes.get(&token),
            };
            let notes = Notes { trials: trial.n, armed: Some(number), due: None, ..noted.copied().unwrap_or_default() };
            let copy = Copy { token: trial.token, to: To::Alone, message, notes };
            alone.writing.insert(number, trial);
            reader.start_copy(copy);
        }
    }
    Ok(())
}

/// The record of a trial is confirmed, and the original acknowledged: the copy is taken and handed over.
pub(crate) async fn recorded(reader: &mut Reader, number: u64) -> Result<()> {
    // An original that came back beside its copy would begin from nothing. (The queue of suspects is on one channel, whose
    // next answer says the same.)
    reader.flush_now().await?;
    let Some(alone) = &mut reader.alone else { return Ok(()) };
    let Some(trial) = alone.writing.remove(&number) else { return Ok(()) };
    if trial.back {
        return Ok(());
    }
    let mut others = Vec::new();
    let mut ours = None;
    for _ in 0..OTHERS {
        match alone.take().await? {
            Some((tag, _, arrived)) if arrived.notes.armed == Some(number) => {
                ours = Some(tag);
                break;
            }
            Some((tag, redelivered, arrived)) => others.push(found(tag, redelivered, arrived, &alone.outage)),
            None => break,
        }
    }
    match ours {
        Some(tag) => {
            alone.moved.insert(trial.token, tag);
        }
        // Another member was faster and tries it now.
        None => reader.lane.lose(&[trial.token]),
    }
    reader.session.settles.trial_recorded(trial.lane, trial.token);
    reader.sort_found(others);
    Ok(())
}

impl Reader {
    fn sort_found(&mut self, found: impl IntoIterator<Item = Found>) {
        for one in found {
            match one {
                Found::Suspect(incoming) => self.lane.push([incoming]),
                Found::Uncounted(copy) => self.start_copy(copy),
            }
        }
    }
}
