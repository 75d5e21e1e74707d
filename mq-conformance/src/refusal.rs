//! Proves that a missing feature is refused, at the start and by name, rather than ignored.

use crate::{Check, Connection, Test, TestFailure, ensure, ensure_eq};
use mq_api::{
    BrokerExt, Capabilities, DeadLetterPolicy, ErrorKind, Feature, Group, Ordering, RedriveOptions, ReplayFrom, Result,
    RetryPolicy, Start, Subscription, TopicSpec,
};
use std::time::Duration;

const MARK: &str = "\u{1}unsupported:";

/// The text by which a proven refusal travels out of the test's runtime.
pub(crate) fn mark(missing: &[Feature]) -> String {
    let names: Vec<&str> = missing.iter().map(|f| f.as_str()).collect();
    format!("{MARK}{}", names.join(";"))
}

pub(crate) fn unmark(text: &str) -> Option<Vec<String>> {
    Some(text.strip_prefix(MARK)?.split(';').map(str::to_owned).collect())
}

/// Asks for `feature` on a connection of its own and expects the refusal.
pub(crate) async fn prove(t: &Test, feature: Feature) -> Check {
    let connection = t.connect().await?;
    prove_on(t, &connection, feature).await
}

/// Asks for `feature` and expects the refusal.
///
/// # Errors
/// That it was granted, or refused in other words.
pub(crate) async fn prove_on(t: &Test, on: &Connection, feature: Feature) -> Check {
    let found = on.broker.capabilities();
    refused(&found, feature, found.require(feature).err(), "Capabilities::require")?;
    let topic = t.topic_named("refused");
    let group = Group::new("refused");
    let plain = || {
        Subscription::group(topic.clone(), group.clone())
            .retry(RetryPolicy::attempts(3).delays([]))
            .dead_letter(DeadLetterPolicy::Forever)
    };
    let admin = on.broker.admin();
    let subscribe = match feature {
        Feature::Groups | Feature::Settlement | Feature::Retry => Some(plain()),
        Feature::Broadcast => Some(Subscription::broadcast(topic.clone())),
        Feature::Delay => Some(plain().retry(RetryPolicy::attempts(3).delays([Duration::from_secs(1)]))),
        Feature::DeadLetters => Some(plain().dead_letter(DeadLetterPolicy::On)),
        Feature::Replay => Some(plain().start(Start::Replay(ReplayFrom::Earliest))),
        Feature::PerKey => Some(plain().ordering(Ordering::PerKey)),
        Feature::Partitions => Some(plain().partitions(2)),
        _ => None,
    };
    if let Some(sub) = subscribe {
        let answer = on.broker.subscribe(sub).await;
        return refused(&found, feature, answer.err(), "subscribe");
    }
    let answer: Result<()> = match feature {
        Feature::Redrive => admin.redrive(&topic, &group, RedriveOptions::default()).await.map(drop),
        Feature::Peek => admin.dead_letters(&topic, &group, 10).await.map(drop),
        Feature::Backlog => admin.backlog(&topic, &group).await.map(drop),
        Feature::Inspect => admin.pending(&topic, &group, 10).await.map(drop),
        Feature::Provision => admin.create_topic(TopicSpec::new(topic.clone())).await,
        Feature::Reset => admin.reset_group(&topic, &group, Start::Latest).await,
        // Nothing in the interface asks for it yet.
        _ => return Ok(()),
    };
    refused(&found, feature, answer.err(), "the call")
}

/// An error that refuses a feature: of the right kind, naming it (or groups, without which most do not exist) and the broker.
#[track_caller]
fn refused(found: &Capabilities, feature: Feature, error: Option<mq_api::Error>, by: &str) -> Check {
    let Some(error) = error else {
        return Err(TestFailure::new(format!("{by} granted {feature}, which the capabilities lack")));
    };
    ensure_eq!(error.kind(), ErrorKind::Unsupported, "{by} refuses {feature} as '{error}'");
    let text = error.to_string();
    let base = [Feature::Groups, Feature::Settlement, Feature::Retry];
    let named = text.contains(feature.as_str()) || base.iter().any(|f| !found.has(*f) && text.contains(f.as_str()));
    ensure!(named, "{by} refuses {feature} without naming it: '{text}'");
    ensure!(text.contains(&found.backend), "{by} refuses {feature} without naming the broker: '{text}'");
    Ok(())
}
