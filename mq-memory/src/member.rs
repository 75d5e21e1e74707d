//! A member: one consumer of the broker, its bounds, health, events, and its end.

mod absence;
mod condition;

pub(crate) use condition::Trouble;

use crate::broadcast::Buffer;
use crate::clock::Clock;
use crate::core::Core;
use crate::group::Group;
use crate::letter::give_back;
use crate::pending::History;
use crate::topic::Topic;
use crate::trace::{Place, What};
use futures_core::future::BoxFuture;
use mq_api::{
    CloseReport, Control, EventLog, Events, HealthSetter, HealthState, HealthWatch, Source, Stored, Subscription,
};
use mq_core::{Begun, Closing, Flow, Gate, Policy};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Waker};
use std::time::Duration;
use tokio::time::Instant;

/// A topic, and what was heard of it.
pub(crate) type Heard = (Arc<Topic>, Arc<Buffer>);

pub(crate) struct Member {
    pub(crate) id: u32,
    pub(crate) name: Arc<str>,
    pub(crate) sub: Subscription,
    pub(crate) policy: Policy,
    pub(crate) flow: Flow,
    pub(crate) events: EventLog,
    pub(crate) core: Arc<Core>,
    /// Since when it holds what it holds.
    pub(crate) clock: Clock,
    /// Whether the broker ends what it holds too long; behind the engine's seam the engine does.
    pub(crate) times_out: bool,
    /// The topic and group it sits in; they change when somebody deletes them and it makes them again.
    seat: Mutex<(Arc<Topic>, Option<Arc<Group>>)>,
    /// Where dead letters go; changes when somebody deletes that topic.
    dead: Mutex<Option<Arc<Topic>>>,
    /// A dead member's handles do nothing: its process is gone.
    pub(crate) crashed: AtomicBool,
    /// An ack is a mark and nothing else: nobody wants to hear of every message, it lives, and its last failure was no
    /// transient one. One cell, so that the hot path looks once.
    plain: AtomicBool,
    /// Why the broker cannot be reached (a fault of a linked connection).
    away: Mutex<Option<String>>,
    /// Rises with every freeze and thaw; odd while frozen.
    freezes: AtomicU32,
    /// What listens to a topic that was made in place of a deleted one, until it is looked at.
    pub(crate) remade: Mutex<Option<Heard>>,
    /// What a broadcast subscription has not looked at.
    pub(crate) heard: Mutex<Weak<Buffer>>,
    health: HealthSetter,
    waker: Mutex<Option<Waker>>,
    streak: AtomicU32,
    /// When the pause of a transient failure ends.
    paused_until: Mutex<Option<Instant>>,
    troubles: Mutex<BTreeMap<Trouble, String>>,
    /// It waited for room since it last had some, and health says so.
    full: AtomicBool,
    closing: Closing,
    /// The crash suspect in hand: nothing else goes out beside it.
    suspect: Mutex<Option<(usize, u64)>>,
    me: Weak<Member>,
}

impl Member {
    pub(crate) fn new(
        id: u32,
        sub: Subscription,
        core: Arc<Core>,
        topic: Arc<Topic>,
        group: Option<Arc<Group>>,
        dead: Option<Arc<Topic>>,
        times_out: bool,
    ) -> Arc<Self> {
        let name: Arc<str> = sub.member.clone().unwrap_or_else(|| format!("member-{id}")).into();
        let plain = !core.watched;
        Arc::new_cyclic(|me| Self {
            id,
            policy: Policy::new(&sub, name.clone()),
            flow: Flow::new(sub.max_in_flight, sub.max_in_flight_bytes),
            events: EventLog::default(),
            health: HealthSetter::new(HealthState::Running, core.env.wall()),
            name,
            sub,
            core,
            clock: Clock::default(),
            times_out,
            seat: Mutex::new((topic, group)),
            dead: Mutex::new(dead),
            crashed: AtomicBool::new(false),
            plain: AtomicBool::new(plain),
            away: Mutex::default(),
            freezes: AtomicU32::new(0),
            remade: Mutex::default(),
            heard: Mutex::default(),
            waker: Mutex::default(),
            streak: AtomicU32::new(0),
            paused_until: Mutex::default(),
            troubles: Mutex::default(),
            full: AtomicBool::new(false),
            closing: Closing::default(),
            suspect: Mutex::default(),
            me: me.clone(),
        })
    }

    /// Itself, for what happens later.
    pub(crate) fn handle(&self) -> Weak<Member> {
        self.me.clone()
    }

    pub(crate) fn seat(&self) -> (Arc<Topic>, Option<Arc<Group>>) {
        self.seat.lock().clone()
    }

    pub(crate) fn take_seat(&self, topic: Arc<Topic>, group: Option<Arc<Group>>) {
        *self.seat.lock() = (topic, group);
    }

    /// Where dead letters go.
    pub(crate) fn dead(&self) -> Option<Arc<Topic>> {
        self.dead.lock().clone()
    }

    /// If somebody deleted the topic of its dead letters and it makes what is missing, makes it again. With no partition locked.
    pub(crate) fn renew_dead(&self) {
        if self.dead().is_none_or(|dead| !dead.deleted.load(Ordering::Acquire)) {
            return;
        }
        let Some(name) = self.sub.dead_letter_topic() else { return };
        match self.core.letters_topic(&name, self.sub.provisioning) {
            Ok(topic) => *self.dead.lock() = Some(topic),
            Err(error) => self
                .trouble(Trouble::Letters, Some(format!("dead letters cannot be written, so originals wait: {error}"))),
        }
    }

    /// Takes from which on a message is handed over alone.
    pub(crate) fn suspect_at(&self) -> u32 {
        match self.sub.dead_letter {
            mq_api::DeadLetterPolicy::Forever => u32::MAX,
            _ => self.policy.suspect_at,
        }
    }

    /// Remembers who polls, for changes that come from no partition.
    pub(crate) fn wait(&self, cx: &mut Context<'_>) {
        let mut waker = self.waker.lock();
        if !waker.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
            *waker = Some(cx.waker().clone());
        }
    }

    pub(crate) fn wake(&self) {
        let waker = self.waker.lock().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.flow.is_shut(Gate::Stopping)
    }

    pub(crate) fn begin_suspect(&self, part: usize, position: u64) {
        *self.suspect.lock() = Some((part, position));
        self.flow.shut(Gate::Alone);
    }

    /// Nothing that waits for its turn alone is there any more.
    pub(crate) fn forget_suspect(&self) {
        *self.suspect.lock() = None;
        self.flow.open(Gate::Alone);
    }

    pub(crate) fn end_suspect(&self, part: usize, position: u64) {
        if !self.flow.is_shut(Gate::Alone) {
            return;
        }
        let mut suspect = self.suspect.lock();
        if *suspect == Some((part, position)) {
            *suspect = None;
            drop(suspect);
            self.flow.open(Gate::Alone);
        }
    }

    pub(crate) fn is_away(&self) -> bool {
        self.away.lock().is_some()
    }

    #[inline]
    pub(crate) fn is_crashed(&self) -> bool {
        self.crashed.load(Ordering::Relaxed)
    }

    /// See [`plain`](Self::plain).
    #[inline(always)]
    pub(crate) fn is_plain(&self) -> bool {
        self.plain.load(Ordering::Relaxed)
    }

    pub(crate) fn trace_delivered(&self, source: &Source, position: u64, stored: &Stored, attempt: u32) {
        self.core.hooks.delivered(source, 1);
        if let Some(trace) = &self.core.trace {
            trace.push(What::Delivered { attempt }, self.place(source, position), &stored.message.id);
        }
    }

    pub(crate) fn place<'a>(&'a self, source: &'a Source, position: u64) -> Place<'a> {
        Place {
            topic: &source.topic,
            group: source.group.as_ref(),
            partition: source.partition.unwrap_or(0),
            position,
            member: Some(&self.name),
        }
    }

    /// Gives back everything in hand; says how much.
    fn give_back_all(&self) -> u64 {
        let (topic, Some(group)) = self.seat() else { return 0 };
        let mut given = 0;
        for (number, part) in topic.parts.iter().enumerate() {
            let mut guard = part.lock();
            let part = &mut *guard;
            let Some(slot) = part.groups.get(group.number) else { continue };
            let mut bytes = 0;
            let held = slot.held_positions(self.id);
            for position in &held {
                let Some(slot) = part.groups.get_mut(group.number) else { continue };
                let Some(entry) = slot.entries.get(*position).copied() else { continue };
                slot.on_history(*position, History::untried);
                bytes += entry.size as usize;
                if let Some(trace) = &self.core.trace {
                    let source = Source::new(topic.name.clone(), Some(group.name.clone())).at(Some(number as u32), 0);
                    let id = part.stored(*position).map(|s| s.message.id.clone()).unwrap_or_default();
                    trace.push(What::Released, self.place(&source, *position), &id);
                }
                give_back(&self.core, (&topic, number), &group, part, (*position, entry.attempt()), self.suspect_at());
            }
            part.waiting = true;
            part.wake();
            drop(guard);
            self.flow.give(held.len(), bytes);
            given += held.len() as u64;
        }
        given
    }

    /// Leaves: partitions move on, listings forget it.
    pub(crate) fn leave(&self) {
        let (topic, group) = self.seat();
        if let Some(group) = group {
            group.leave(self.id);
        } else {
            self.unlisten(&topic);
        }
        self.core.members.lock().remove(&self.id);
        self.events.close();
    }

    /// For a consumer that is dropped without close: what is in hand stays settleable for a while.
    pub(crate) fn close_now(&self) {
        if !self.closing.is_begun() && !self.is_crashed() {
            drop(self.close(Duration::from_secs(5)));
        }
    }
}

/// The end of a close: gives back what is still in hand, and leaves. When it is dropped, so also with a runtime that ends first.
struct End {
    member: Arc<Member>,
    begun: Begun,
}

impl Drop for End {
    fn drop(&mut self) {
        let mut report = CloseReport::default();
        if !self.member.is_crashed() {
            report.given_back = self.member.give_back_all();
            self.member.leave();
        }
        self.begun.tell(report);
    }
}

impl Control for Member {
    fn pause(&self) {
        self.flow.shut(Gate::Paused);
        self.refresh();
        self.wake();
    }

    fn resume(&self) {
        self.flow.open(Gate::Paused);
        self.refresh();
        self.wake();
    }

    fn in_flight(&self) -> usize {
        if self.is_crashed() {
            // What a dead member had is nobody's.
            return 0;
        }
        // The buffer first: what leaves it is charged before.
        let buffered = self.heard.lock().upgrade().map_or(0, |buffer| buffer.len());
        buffered + self.flow.in_flight()
    }

    fn health(&self) -> HealthWatch {
        self.refresh();
        self.health.watch()
    }

    fn events(&self) -> Events {
        self.events.reader()
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'static, CloseReport> {
        let (begun, report) = self.closing.ask(self.core.env.after(deadline));
        if let (Some(begun), Some(member)) = (begun, self.me.upgrade()) {
            self.flow.shut(Gate::Stopping);
            self.refresh();
            self.wake();
            let end = End { member, begun };
            self.core.env.spawn(async move {
                end.begun.deadline.within(std::future::poll_fn(|cx| end.member.flow.poll_drained(cx))).await;
                drop(end);
            });
        }
        report
    }
}
