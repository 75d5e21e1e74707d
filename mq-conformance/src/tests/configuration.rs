//! Section 7: what is asked for is checked, and what is wrong is named.

use crate::case::cases;
use crate::{Check, Doing, GROUP, Test, TestFailure, ensure, ensure_eq};
use mq_api::{
    BrokerExt, Durability, Error, ErrorKind, Feature, Message, Ordering, Provisioning, ReplayFrom, Start, Subscription,
};
use std::time::Duration;

cases! {
    "7.1" p7_1_the_same_program_runs_on_any_broker needs [] bugs [LoseMessage];
    "7.2" p7_2_an_unknown_parameter_is_named needs [] bugs [ParametersIgnored] one;
    "7.2" p7_2_a_wrong_value_is_named needs [] bugs [ParametersIgnored] one;
    "7.2" p7_2_an_unknown_native_option_is_named needs [] bugs [NativeIgnored] one;
    "7.2" p7_2_senseless_values_are_named needs [] bugs [ValuesUnchecked] one;
    "7.2" p7_2_a_second_member_of_one_name_is_refused needs [Groups Settlement] bugs [NamesShared] one;
    "7.3" p7_3_what_is_asked_for_is_checked_first needs [] bugs [RefusesNothing] one;
    "7.4" p7_4_verify_names_what_is_missing needs [Groups Settlement Provision] bugs [ProvisioningIgnored] one;
    "7.4" p7_4_none_makes_nothing needs [Groups Settlement Provision] bugs [ProvisioningIgnored] one;
    "7.4" p7_4_settings_that_are_tuned_change_no_topology needs [Groups Settlement Retry Delay] bugs [TuningIsTopology] one;
    "7.5" p7_5_secrets_and_contents_never_show needs [] bugs [SecretsShown] one;
}

async fn p7_1_the_same_program_runs_on_any_broker(t: Test) -> Check {
    // Nothing in here knows what it runs on.
    let c = t.connect().await?;
    let orders = t.sender(&c).await?;
    let mut billing = c.broker.subscribe(t.sub()).await?;
    for n in 0..10_u32 {
        orders.send_message(Message::json(&n)?.key(n.to_string())).await?;
    }
    let mut sum = 0;
    for _ in 0..10 {
        let next = t.within("an order", t.pace().patience, mq_api::ConsumerExt::recv(&mut billing)).await?;
        let Some(delivery) = next? else { return Err(TestFailure::new("the stream ended")) };
        sum += String::from_utf8_lossy(delivery.payload_bytes()).parse::<u32>().doing("reading an order")?;
        let settled = delivery.ack().await;
        ensure!(settled.is_ok(), "ack: {settled:?}");
    }
    ensure_eq!(sum, 45, "the sum of all orders");
    t.count("sum", sum);
    Ok(())
}

/// An error that is a configuration's, and names what is wrong.
fn names(error: Option<Error>, what: &str) -> Check {
    let Some(e) = error else { return Err(TestFailure::new(format!("'{what}' was accepted"))) };
    ensure_eq!(e.kind(), ErrorKind::Config, "'{what}': {e}");
    ensure!(e.to_string().contains(what), "'{e}' does not name '{what}'");
    Ok(())
}

async fn p7_2_an_unknown_parameter_is_named(t: Test) -> Check {
    let answer = t.env().connect_with(&[("no_such_parameter", "1")]).await;
    if let Ok(c) = &answer {
        t.adopt(c.clone());
    }
    names(answer.err(), "no_such_parameter")
}

async fn p7_2_a_wrong_value_is_named(t: Test) -> Check {
    let wrong = t.env().wrong_value();
    let answer = t.env().connect_with(&[wrong]).await;
    if let Ok(c) = &answer {
        t.adopt(c.clone());
    }
    names(answer.err(), wrong.0)
}

async fn p7_2_an_unknown_native_option_is_named(t: Test) -> Check {
    let c = t.connect().await?;
    let answer = c.broker.producer(t.spec_to(t.topic()).native("no-such-option", "1")).await;
    names(answer.err(), "no-such-option")?;
    let sub = Subscription::broadcast(t.topic()).native("no-such-option", "1");
    let sub = if c.broker.capabilities().has(Feature::Groups) { t.sub().native("no-such-option", "1") } else { sub };
    names(c.broker.subscribe(sub).await.err(), "no-such-option")
}

async fn p7_2_senseless_values_are_named(t: Test) -> Check {
    let c = t.connect().await?;
    let sub = || Subscription::broadcast(t.topic());
    names(c.broker.subscribe(sub().max_in_flight(0)).await.err(), "max_in_flight")?;
    names(c.broker.subscribe(sub().lease(Duration::ZERO)).await.err(), "lease")?;
    names(c.broker.subscribe(sub().max_processing(Duration::ZERO)).await.err(), "max_processing")?;
    names(c.broker.subscribe(sub().crash_trials(0)).await.err(), "crash_trials")?;
    names(c.broker.producer(t.spec_to(t.topic()).max_message(0)).await.err(), "max_message")?;
    names(c.broker.producer(t.spec_to(t.topic()).max_in_flight(0, 1)).await.err(), "max_in_flight")
}

async fn p7_2_a_second_member_of_one_name_is_refused(t: Test) -> Check {
    let c = t.connect().await?;
    let first = t.member(&c, "anna").await?;
    names(c.broker.subscribe(t.sub().member("anna")).await.err(), "anna")?;
    // Elsewhere the name is free: in another group, and in this one once the first has gone.
    let mut other = t.sub().member("anna");
    other.mode = mq_api::Mode::Group("others".into());
    drop(c.broker.subscribe(other).await?);
    first.close().await;
    let mut again = t.member(&c, "anna").await?;
    t.sender(&c).await?.send("m").await?;
    again.ack_next(1).await
}

async fn p7_3_what_is_asked_for_is_checked_first(t: Test) -> Check {
    let c = t.connect().await?;
    let found = c.broker.capabilities();
    let group = || Subscription::group(t.topic(), GROUP);
    let asks: [(&str, Subscription); 6] = [
        ("order", group().ordering(Ordering::PerKey)),
        ("replay", group().start(Start::Replay(ReplayFrom::Earliest))),
        ("broadcast", Subscription::broadcast(t.topic())),
        ("group", group()),
        ("durability", Subscription::broadcast(t.topic()).require_durability(Durability::Replicated)),
        ("partitions", group().partitions(found.max_partitions.saturating_add(1).max(2))),
    ];
    for (what, sub) in asks {
        let wanted = found.check(&sub);
        let answer = c.broker.subscribe(sub).await;
        match (wanted, answer) {
            (Ok(()), Ok(consumer)) => drop(consumer.control().close(t.pace().drain).await),
            (Ok(()), Err(e)) => {
                // A broker may know only from its topic (log mode, an existing count) that it cannot.
                ensure!(matches!(e.kind(), ErrorKind::Unsupported | ErrorKind::Topology), "{what} was refused: {e}");
            }
            (Err(_), Ok(_)) => return Err(TestFailure::new(format!("{what} is missing and was granted"))),
            (Err(w), Err(e)) => ensure_eq!(e.kind(), w.kind(), "{what}: {e}"),
        }
    }
    Ok(())
}

async fn p7_4_verify_names_what_is_missing(t: Test) -> Check {
    let c = t.connect().await?;
    let verify = || t.sub().provisioning(Provisioning::Verify);
    for round in ["no topic", "no group"] {
        let Some(e) = c.broker.subscribe(verify()).await.err() else {
            return Err(TestFailure::new(format!("{round}, and verify was content")));
        };
        ensure_eq!(e.kind(), ErrorKind::Topology, "{round}: {e}");
        let text = e.to_string();
        ensure!(text.contains(t.topic().as_str()) || text.contains(GROUP), "'{text}' does not name what is missing");
        if round == "no topic" {
            let spec = t.spec_to(t.topic());
            let e = c.broker.producer(spec.clone().provisioning(Provisioning::Verify)).await.err();
            ensure_eq!(e.map(|e| e.kind()), Some(ErrorKind::Topology), "a producer under verify without a topic");
            t.sender_with(&c, spec).await?;
        }
    }
    // Everything there: verify is content, with the dead letters' topic made by the first member.
    t.member(&c, "maker").await?.close().await;
    let sender = t.sender_with(&c, t.spec().provisioning(Provisioning::Verify)).await?;
    let mut member = t.member_with(&c, "a", verify()).await?;
    sender.send("m").await?;
    member.ack_next(1).await
}

async fn p7_4_none_makes_nothing(t: Test) -> Check {
    let c = t.connect().await?;
    // Without checks the failure may come at the start or with the first send; it comes, and nothing is made.
    match c.broker.producer(t.spec_to(t.topic()).provisioning(Provisioning::None)).await {
        Err(e) => ensure!(matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Topology), "{e}"),
        Ok(producer) => {
            let sending = mq_api::ProducerExt::send_timeout(&*producer, Message::new("m"), t.pace().retry * 2);
            let Err(e) = sending.await else {
                return Err(TestFailure::new("a send to a topic that does not exist was confirmed"));
            };
            ensure!(e.outcome().is_some(), "{e} says nothing about the outcome");
        }
    }
    let topic = c.broker.admin().topic(&t.topic()).await?;
    ensure!(topic.is_none(), "the topic was made under `none`: {topic:?}");
    Ok(())
}

async fn p7_4_settings_that_are_tuned_change_no_topology(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("m").await?;
    member.ack_next(1).await?;
    member.close().await;
    let mut sub = t.sub().max_in_flight(7).max_parked(3).max_blocked(3).crash_trials(5).concurrency(4);
    sub.retry.max_attempts = 9;
    sub.retry.delays = vec![t.pace().retry * 2, t.pace().long];
    sub.lease = t.pace().lease * 2;
    sub.max_processing = t.pace().long * 2;
    sub.max_in_flight_bytes = 5_000;
    let mut member = t.member_with(&c, "b", sub).await?;
    sender.send("n").await?;
    member.ack_next(1).await
}

async fn p7_5_secrets_and_contents_never_show(t: Test) -> Check {
    let c = t.connect().await?;
    let found = c.broker.capabilities();
    let sender = t.sender_with(&c, if found.has(Feature::Groups) { t.spec() } else { t.spec_to(t.topic()) }).await?;
    let mut shown = Vec::new();
    let message = Message::new("s3cret-payload").key("s3cret-key").header("h", "s3cret-value");
    shown.push(format!("{message:?}"));
    shown.push(format!("{:?} {:?}", sender.producer().health(), c.broker.health()));
    shown.push(format!("{found:?}"));
    let settled = found.has(Feature::Groups) && found.has(Feature::Settlement);
    if settled {
        let mut member = t.member(&c, "a").await?;
        shown.push(format!("{:?}", sender.send_message(message).await?));
        let got = member.next().await?;
        shown.push(format!("{:?} {:?} {:?}", &*got, got.source(), member.control()));
        got.ack().await;
    }
    if let Err(e) = sender.try_send(Message::new("s3cret-payload").header("bad\nname", "s3cret-value")).await {
        shown.push(format!("{e} {e:?}"));
    }
    shown.push(format!("{:?}", t.env().connect_with(&[("no_such_parameter", "s3cret-value")]).await.err()));
    let mut secrets = vec!["s3cret-payload".to_owned(), "s3cret-key".to_owned(), "s3cret-value".to_owned()];
    secrets.extend(t.env().secret());
    for text in &shown {
        for secret in &secrets {
            ensure!(!text.contains(secret.as_str()), "'{secret}' shows in '{text}'");
        }
    }
    Ok(())
}
