//! A member: one consumer of the broker, its bounds, health, events, and its end.

mod absence;

use crate::broadcast::Queue;
use crate::clock::Clock;
use crate::core::Core;
use crate::group::Group;
use crate::letter::give_back;
use crate::topic::Topic;
use crate::trace::{Place, What};
use futures_core::future::BoxFuture;
use mq_api::{
    CloseReport, Control, EventLog, Events, HealthSetter, HealthState, HealthWatch, Source, Stored, Subscription,
};
use mq_core::{Flow, Gate, Policy};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Waker};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

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
    /// Broadcast queues that are out of the topic while it is away.
    unplugged: Mutex<Vec<(usize, Arc<Queue>)>>,
    health: HealthSetter,
    waker: Mutex<Option<Waker>>,
    streak: AtomicU32,
    /// When the pause of a transient failure ends.
    paused_until: Mutex<Option<Instant>>,
    trouble: Mutex<Option<String>>,
    closing: Mutex<Option<watch::Receiver<Option<CloseReport>>>>,
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
            unplugged: Mutex::default(),
            waker: Mutex::default(),
            streak: AtomicU32::new(0),
            paused_until: Mutex::default(),
            trouble: Mutex::default(),
            closing: Mutex::default(),
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
            Err(error) => self.trouble(Some(format!("dead letters cannot be written, so originals wait: {error}"))),
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

    #[inline]
    pub(crate) fn is_crashed(&self) -> bool {
        self.crashed.load(Ordering::Relaxed)
    }

    /// See [`plain`](Self::plain).
    #[inline(always)]
    pub(crate) fn is_plain(&self) -> bool {
        self.plain.load(Ordering::Relaxed)
    }

    /// Something the handler depends on is down: pause, longer each time in a row.
    pub(crate) fn transient(&self) {
        if !self.flow.shut(Gate::Transient) {
            return;
        }
        let streak = self.streak.fetch_add(1, Ordering::SeqCst);
        self.plain.store(false, Ordering::SeqCst);
        let until = self.core.env.after(self.policy.transient_pause(streak));
        *self.paused_until.lock() = Some(until);
        self.refresh();
        let me = self.me.clone();
        self.core.timer.at(until, move || {
            if let Some(me) = me.upgrade() {
                *me.paused_until.lock() = None;
                me.flow.open(Gate::Transient);
                me.refresh();
                me.wake();
            }
        });
    }

    /// How long it takes nothing because of a transient failure, also one that is about to be counted.
    pub(crate) fn pause_ahead(&self, fails_now: bool) -> Duration {
        match *self.paused_until.lock() {
            Some(until) => until.saturating_duration_since(self.core.env.now()),
            None if fails_now => self.policy.transient_pause(self.streak.load(Ordering::SeqCst)),
            None => Duration::ZERO,
        }
    }

    /// Something was handled: the next transient failure is the first again.
    pub(crate) fn handled(&self) {
        if self.flow.is_shut(Gate::Transient) {
            return;
        }
        self.streak.store(0, Ordering::SeqCst);
        self.plain.store(!self.core.watched, Ordering::SeqCst);
        // It may have died meanwhile.
        if self.crashed.load(Ordering::SeqCst) {
            self.plain.store(false, Ordering::SeqCst);
        }
    }

    pub(crate) fn trouble(&self, reason: Option<String>) {
        let mut trouble = self.trouble.lock();
        if *trouble != reason {
            *trouble = reason;
            drop(trouble);
            self.refresh();
        }
    }

    pub(crate) fn refresh(&self) {
        let (state, reason) = if self.flow.is_shut(Gate::Stopping) {
            (HealthState::Closed, String::new())
        } else if let Some(reason) = self.away.lock().clone() {
            (HealthState::Reconnecting, reason)
        } else if self.flow.is_shut(Gate::Paused) {
            (HealthState::Paused, "by the program".to_owned())
        } else if self.flow.is_shut(Gate::Transient) {
            (HealthState::Paused, "a transient failure: something the handler depends on is down".to_owned())
        } else if let Some(trouble) = self.trouble.lock().clone() {
            (HealthState::Degraded, trouble)
        } else if self.flow.in_flight() >= self.flow.max() {
            (HealthState::Backpressured, format!("{} deliveries are in flight", self.flow.max()))
        } else {
            (HealthState::Running, String::new())
        };
        self.core.hooks.health(&self.sub.topic, state, &reason);
        self.health.set(state, reason, self.core.env.wall());
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
                let entry = part.groups.get(group.number).and_then(|slot| slot.entries.get(*position));
                let Some(entry) = entry.copied() else { continue };
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
            for part in &topic.parts {
                part.lock().broadcast.retain(|queue| queue.lane.0.epoch != u64::from(self.id));
            }
        }
        self.core.members.lock().remove(&self.id);
        self.events.close();
    }

    /// For a consumer that is dropped without close: what is in hand stays settleable for a while.
    pub(crate) fn close_now(&self) {
        if self.closing.lock().is_none() && !self.is_crashed() {
            drop(self.close(Duration::from_secs(5)));
        }
    }
}

/// The end of a close: gives back what is still in hand, and leaves. When it is dropped, so also with a runtime that ends first.
struct End {
    member: Arc<Member>,
    told: watch::Sender<Option<CloseReport>>,
}

impl Drop for End {
    fn drop(&mut self) {
        let mut report = CloseReport::default();
        if !self.member.is_crashed() {
            report.given_back = self.member.give_back_all();
            self.member.leave();
        }
        self.told.send_replace(Some(report));
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
        self.flow.in_flight()
    }

    fn health(&self) -> HealthWatch {
        self.refresh();
        self.health.watch()
    }

    fn events(&self) -> Events {
        self.events.reader()
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'static, CloseReport> {
        let mut closing = self.closing.lock();
        let mut done = match (&*closing, self.me.upgrade()) {
            (Some(done), _) => done.clone(),
            (None, Some(me)) => {
                let (told, done) = watch::channel(None);
                *closing = Some(done.clone());
                self.flow.shut(Gate::Stopping);
                self.refresh();
                self.wake();
                let core = self.core.clone();
                let end = End { member: me, told };
                core.env.spawn(async move {
                    let drained = std::future::poll_fn(|cx| end.member.flow.poll_drained(cx));
                    let _ = tokio::time::timeout(deadline, drained).await;
                    drop(end);
                });
                done
            }
            (None, None) => return Box::pin(async { CloseReport::default() }),
        };
        drop(closing);
        Box::pin(async move {
            match done.wait_for(Option::is_some).await {
                Ok(report) => report.unwrap_or_default(),
                Err(_) => CloseReport::default(),
            }
        })
    }
}
