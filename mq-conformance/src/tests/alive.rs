//! Section 6, first half: losing things and coming back.

use crate::case::cases;
use crate::{Check, Connection, Doing, GROUP, Stopwatch, Test, TestFailure, ensure, ensure_eq};
use mq_api::{
    BrokerExt, Durability, ErrorKind, Event, Feature, Gap, Group, HealthState, Message, Provisioning, Settled,
};
use std::time::Duration;

cases! {
    "6.1" p6_1_a_broker_that_is_down_at_start_is_waited_for needs [Groups Settlement] bugs [ImpatientConnect] one;
    "6.1" p6_1_and_not_for_ever needs [] bugs [PatientConnect] one;
    "6.2" p6_2_after_a_cut_the_consumer_runs_by_itself needs [Groups Settlement] bugs [StaysDown];
    "6.2" p6_2_a_cut_with_deliveries_in_hand_loses_nothing needs [Groups Settlement] bugs [StaysDown];
    "6.2" p6_2_health_says_what_is_going_on needs [] bugs [HealthAlwaysRunning] one;
    "6.2" p6_2_a_deleted_group_comes_back needs [Groups Settlement Provision] bugs [GoneForGood] one;
    "6.2" p6_2_a_deleted_topic_comes_back needs [Groups Settlement Provision] bugs [GoneForGood] one;
    "6.3" p6_3_what_was_not_settled_comes_again needs [Groups Settlement Provision] bugs [UnsettledForgotten] one;
    "6.3" p6_3_what_the_broker_lost_is_one_gap needs [Groups Settlement Provision] bugs [GapHidden] one;
    "6.3" p6_3_only_what_this_program_made_is_made_again needs [Groups Settlement Provision] bugs [ProvisioningIgnored] one;
}

async fn p6_1_a_broker_that_is_down_at_start_is_waited_for(t: Test) -> Check {
    let answer = t.env().accepting(false).await;
    t.hook(answer)?;
    let connecting = {
        let test = t.clone();
        t.spawn(async move {
            let c = test.connect().await?;
            let sender = test.sender(&c).await?;
            sender.send("m").await?;
            Ok::<Connection, TestFailure>(c)
        })
    };
    t.elapse(t.pace().long / 2).await;
    ensure!(!connecting.is_finished(), "the program did not wait for its broker: {:?}", connecting.await);
    let answer = t.env().accepting(true).await;
    t.hook(answer)?;
    let c = t.within("the program starts", t.pace().patience, connecting).await?.doing("the program")??;
    let mut member = t.member(&c, "a").await?;
    member.ack_next(1).await
}

async fn p6_1_and_not_for_ever(t: Test) -> Check {
    let answer = t.env().accepting(false).await;
    t.hook(answer)?;
    let watch = Stopwatch::start();
    let limited = t.env().connect_with(&[("connect_timeout", "2s")]);
    let attempt = async {
        match limited.await {
            Err(e) => Some(e),
            Ok(c) => {
                let c = t.adopt(c);
                c.broker.producer(t.spec_to(t.topic())).await.err()
            }
        }
    };
    let error = t.within("starting is bounded", t.pace().patience, attempt).await?;
    let answer = t.env().accepting(true).await;
    t.hook(answer)?;
    let Some(e) = error else { return Err(TestFailure::new("a broker that is away was connected to")) };
    ensure!(matches!(e.kind(), ErrorKind::Unavailable | ErrorKind::Timeout), "{e} is {:?}", e.kind());
    ensure!(watch.elapsed() >= Duration::from_secs(1), "it was not waited for: {:?}", watch.elapsed());
    Ok(())
}

async fn p6_2_after_a_cut_the_consumer_runs_by_itself(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut member = t.member(&c, "a").await?;
    for round in 0..3 {
        t.cut(&c).await?;
        let label = format!("m{round}");
        sender.send(&label).await?;
        let got = member.next().await?;
        ensure_eq!(got.label, label, "what comes after cut {round}");
        ensure_eq!(got.attempt(), 1, "attempt of what was sent after the cut");
        got.ack_ok().await?;
        if c.broker.capabilities().settle_level == Durability::Sent {
            // Nobody said that the ack arrived: a cut right after it may bring the message again.
            t.elapse(t.pace().retry).await;
        }
    }
    member.stays_quiet().await?;
    t.ledger().exactly_once(GROUP, ["m0", "m1", "m2"])
}

async fn p6_2_a_cut_with_deliveries_in_hand_loses_nothing(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut member = t.member_with(&c, "a", t.sub().max_in_flight(8)).await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    let held = member.take(4).await?;
    t.cut(&c).await?;
    for got in held {
        let settled = got.ack().await;
        ensure!(settled != Settled::Untracked, "an ack across a cut gave {settled:?}");
    }
    member.ack_until_settled(&d, GROUP).await?;
    t.ledger().between(GROUP, &labels, 2)
}

async fn p6_2_health_says_what_is_going_on(t: Test) -> Check {
    let c = t.connect().await?;
    let member = t.member(&c, "a").await?;
    member.becomes(HealthState::Running).await?;
    t.reachable(&c, false).await?;
    member.becomes(HealthState::Reconnecting).await?;
    let health = member.control().health().current();
    ensure!(!health.reason.is_empty(), "reconnecting without a reason");
    t.reachable(&c, true).await?;
    member.becomes(HealthState::Running).await?;
    let again = member.control().health().current();
    ensure!(again.since >= health.since, "health is older than the one before it");
    member.close().await;
    ensure_eq!(member.control().health().current().state, HealthState::Closed, "health after close");
    Ok(())
}

async fn p6_2_a_deleted_group_comes_back(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("before").await?;
    member.ack_next(1).await?;
    t.delete_group_in_use(&d).await?;
    // Only messages confirmed after the group is back are promised; a log keeps also those in between.
    t.until("the consumer is back", async || {
        sender.try_send(Message::new("probe")).await.ok();
        Ok(member.next_within(t.pace().retry).await?.map(|g| drop(g.into_delivery().ack())))
    })
    .await?;
    sender.send("after").await?;
    // A member may fetch before it knows that its group went; such an ack is not confirmed, and the message comes again.
    t.until("an ack of what was sent after the group came back is confirmed", async || {
        while let Some(got) = member.next_within(t.pace().retry).await? {
            let after = got.label == "after";
            let answer = got.ack().await;
            if after && matches!(answer, Settled::Confirmed(_)) {
                return Ok(Some(()));
            }
        }
        Ok(None)
    })
    .await?;
    member.ack_until_settled(&d, GROUP).await?;
    t.all_settled(&d, GROUP).await
}

async fn p6_2_a_deleted_topic_comes_back(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send("before").await?;
    member.ack_next(1).await?;
    ensure!(d.broker.admin().delete_topic(&t.topic()).await?, "the topic was not there to delete");
    t.until("the consumer is back", async || {
        sender.try_send(Message::new("probe")).await.ok();
        Ok(member.next_within(t.pace().retry).await?.map(|g| drop(g.into_delivery().ack())))
    })
    .await?;
    sender.send("after").await?;
    let mut seen = false;
    while let Some(got) = member.next_within(t.pace().quiet).await? {
        seen |= got.label == "after";
        got.ack_ok().await?;
    }
    ensure!(seen, "what was sent to the new topic did not arrive");
    Ok(())
}

async fn p6_3_what_was_not_settled_comes_again(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut member = t.member(&c, "a").await?;
    for n in 0..6 {
        sender.send_keyed("k", &format!("m{n}")).await?;
    }
    let mut held = member.take(6).await?;
    held.remove(0).ack_ok().await?;
    held.remove(1).ack_ok().await?;
    t.delete_group_in_use(&d).await?;
    let open: Vec<String> = held.iter().map(|g| g.label.clone()).collect();
    if !d.broker.capabilities().retains_without_group {
        // With the queue went its messages: that is a gap, which is tested on its own.
        return Ok(());
    }
    let mut back = Vec::new();
    t.until("all that was unsettled when the group was deleted comes again", async || {
        while let Some(got) = member.next_within(t.pace().retry).await? {
            back.push(got.label.clone());
            got.ack().await;
        }
        Ok(open.iter().all(|l| back.contains(l)).then_some(()))
    })
    .await?;
    for got in held {
        ensure_eq!(got.ack().await, Settled::Stale, "an ack of a delivery of the deleted group");
    }
    // A member that fetched before it knew that its group went had its ack refused, and is given that once more.
    member.ack_until_settled(&d, GROUP).await?;
    t.all_settled(&d, GROUP).await
}

async fn p6_3_what_the_broker_lost_is_one_gap(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    let mut member = t.member_with(&c, "a", t.sub().max_in_flight(1)).await?;
    let mut events = member.events();
    sender.send_numbered(5).await?;
    let held = member.next().await?;
    d.broker.admin().delete_topic(&t.topic()).await?;
    held.ack().await;
    let seen = std::sync::Arc::new(parking_lot::Mutex::new(Vec::<Gap>::new()));
    t.until("a gap", async || {
        while let Some(got) = member.next_within(t.pace().retry / 10).await? {
            got.ack().await;
        }
        let found = events.drain().into_iter().filter_map(|e| if let Event::Gap(g) = e { Some(g) } else { None });
        seen.lock().extend(found);
        Ok((!seen.lock().is_empty()).then_some(()))
    })
    .await?;
    member.ack_until_quiet().await?;
    seen.lock().extend(events.drain().into_iter().filter_map(|e| if let Event::Gap(g) = e { Some(g) } else { None }));
    let gaps = seen.lock().clone();
    ensure_eq!(gaps.len(), 1, "gaps reported for one loss: {gaps:?}");
    ensure_eq!(gaps[0].topic, t.topic(), "topic of the gap");
    Ok(())
}

async fn p6_3_only_what_this_program_made_is_made_again(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&d).await?;
    t.member(&d, "maker").await?.close().await;
    let mut member = t.member_with(&c, "a", t.sub().provisioning(Provisioning::Verify)).await?;
    member.becomes(HealthState::Running).await?;
    let (topic, group) = (t.topic(), Group::new(GROUP));
    sender.producer().close(t.pace().drain).await;
    t.delete_group_in_use(&d).await?;
    // It has to notice, and to stay: after the first success a refused topology is a state of health.
    if let Some(got) = member.next_within(t.pace().quiet).await? {
        return Err(TestFailure::new(format!("{} came by a group that is gone", got.label)));
    }
    let state = member.control().health().current();
    ensure!(
        matches!(state.state, HealthState::Reconnecting | HealthState::Degraded),
        "a group under `verify` is gone, and health is {state:?}"
    );
    if d.broker.capabilities().has(Feature::Inspect) {
        let groups = d.broker.admin().groups(&topic).await?;
        ensure!(groups.iter().all(|g| g.group != group), "a group under `verify` was made again");
    }
    // Whoever may makes it again, and it goes on by itself.
    t.member(&d, "maker").await?.close().await;
    t.sender(&d).await?.send("m").await?;
    member.ack_next(1).await?;
    member.becomes(HealthState::Running).await?;
    t.ledger().exactly_once(GROUP, ["m"])
}
