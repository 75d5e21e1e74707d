//! Bugs that are a changed request: what was asked for is not what the broker is told.

use super::{Bug, State};
use mq_api::{
    DeadLetterPolicy, Group, Guarantee, Mode, OnDeadLetter, Ordering, ProducerSpec, Provisioning, Start, Subscription,
    Topic,
};
use std::time::Duration;

/// The one group of [`Bug::GroupsMixed`].
const ONE: &str = "the-one-group";
const EVER: Duration = Duration::from_secs(30 * 24 * 3600);

/// The subscription that the broker is told.
pub(super) fn subscription(state: &State, mut sub: Subscription) -> Subscription {
    match state.bug {
        Bug::AtMostOnceIgnored => sub.guarantee = Guarantee::AtLeastOnce,
        Bug::BytesIgnored => sub.max_in_flight_bytes = 1 << 40,
        Bug::CrashTrialsIgnored => {
            sub.crash_trials = 1_000;
            sub.retry.max_attempts = 1_000;
        }
        Bug::DelayDoubled => sub.retry.delays.iter_mut().for_each(|d| *d *= 3),
        Bug::DelayIgnored => sub.retry.delays = vec![Duration::ZERO],
        Bug::DurabilityIgnored => sub.require_durability = None,
        Bug::GroupsMixed => {
            if let Mode::Group(group) = &mut sub.mode {
                *group = Group::new(ONE);
            }
        }
        Bug::InFlightIgnored => sub.max_in_flight *= 20,
        Bug::LatestIsOldest if sub.start == Start::Latest => sub.start = Start::Oldest,
        Bug::LeaseNotRenewed => sub.max_processing = sub.lease,
        Bug::MadeNamesMeet => sub.topic = meeting(state, sub.topic),
        Bug::MaxAttemptsIgnored => sub.retry.max_attempts = 1_000,
        Bug::MaxProcessingIgnored => sub.max_processing = EVER,
        Bug::NamesUnchecked => {
            sub.topic = clean(&sub.topic);
            if let Mode::Group(group) = &mut sub.mode {
                *group = Group::new(clean_name(group.as_str()));
            }
        }
        Bug::NativeIgnored => sub.native.clear(),
        Bug::OneInFlight => sub.max_in_flight = 1,
        Bug::ParkKeyIgnored => sub.on_dead_letter = OnDeadLetter::Continue,
        Bug::PartitionsUnmade => sub.partitions = None,
        Bug::PerKeyIgnored => sub.ordering = Ordering::None,
        Bug::PolicyIgnored if sub.topic.dead_letters_of().is_none() => sub.dead_letter = DeadLetterPolicy::On,
        Bug::ProvisioningIgnored => sub.provisioning = Provisioning::Create,
        Bug::ReplayIgnored if matches!(sub.start, Start::Replay(_)) => sub.start = Start::Latest,
        Bug::StartIgnored => sub.start = Start::Latest,
        Bug::ValuesUnchecked => {
            sub.max_in_flight = sub.max_in_flight.max(1);
            sub.crash_trials = sub.crash_trials.max(1);
            sub.lease = sub.lease.max(Duration::from_secs(1));
            sub.max_processing = sub.max_processing.max(Duration::from_secs(1));
        }
        _ => {}
    }
    sub
}

/// The producer that the broker is told.
pub(super) fn producer(state: &State, mut spec: ProducerSpec) -> ProducerSpec {
    match state.bug {
        Bug::DurabilityIgnored => spec.require_durability = None,
        Bug::GroupsMixed => spec.groups.iter_mut().for_each(|g| *g = Group::new(ONE)),
        Bug::GroupsNotMade | Bug::StartIgnored => spec.groups.clear(),
        Bug::MaxMessageIgnored => spec.max_message = 100_000_000,
        Bug::NamesUnchecked => {
            spec.topic = clean(&spec.topic);
            spec.groups.iter_mut().for_each(|g| *g = Group::new(clean_name(g.as_str())));
        }
        Bug::NativeIgnored => spec.native.clear(),
        Bug::NoSendRetry => spec.retry_for = Duration::ZERO,
        Bug::PartitionsUnmade => spec.partitions = Some(1),
        Bug::ProvisioningIgnored => spec.provisioning = Provisioning::Create,
        Bug::SendBoundIgnored => (spec.max_in_flight, spec.max_in_flight_bytes) = (1_000_000, 1 << 40),
        Bug::SendRetryForced => spec.retry_for = Duration::from_secs(30),
        Bug::ValuesUnchecked => {
            spec.max_message = spec.max_message.max(1);
            spec.max_in_flight = spec.max_in_flight.max(1);
        }
        _ => {}
    }
    spec
}

/// The group that the broker is asked about.
pub(super) fn group(state: &State, group: &Group) -> Group {
    match state.bug {
        Bug::GroupsMixed => Group::new(ONE),
        _ => group.clone(),
    }
}

/// As if `a.b` of `c` and `a` of `b.c` had one name: whoever came first has it.
fn meeting(state: &State, topic: Topic) -> Topic {
    let Some((of, group)) = topic.dead_letters_of() else { return topic };
    let joined = format!("{of}.{group}");
    state.made.lock().entry(joined).or_insert(topic).clone()
}

fn clean(topic: &Topic) -> Topic {
    match topic.dead_letters_of().is_some() || topic.is_native() {
        true => topic.clone(),
        false => Topic::new(clean_name(topic.as_str())),
    }
}

fn clean_name(name: &str) -> String {
    let kept: String = name.chars().filter(char::is_ascii_alphanumeric).take(40).collect();
    format!("x{kept}")
}
