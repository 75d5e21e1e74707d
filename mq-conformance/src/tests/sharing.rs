//! Section 3: who holds which share of a topic.

use super::order::{of_key, ordered};
use crate::case::cases;
use crate::{Check, GROUP, Test, ensure, ensure_eq};
use mq_api::Feature;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

cases! {
    "3.8" p3_8_members_share_evenly_when_they_come_and_go needs [Groups Settlement] bugs [SecondIdle];
    "3.8" p3_8_a_dead_members_share_is_taken_over needs [Groups Settlement] bugs [CrashIsNone];
    "3.8" p3_8_two_never_hold_one_partition needs [Groups Settlement PerKey] bugs [DeliverTwice PerKeyIgnored];
    "3.8" p3_8_a_slow_member_holds_back_only_what_it_holds needs [Groups Settlement] bugs [SecondIdle] one;
}

type Shares = BTreeMap<String, BTreeSet<Option<u32>>>;

/// Which partitions each member got something of, among hand-overs from `from` on.
fn shares(t: &Test, from: usize) -> Shares {
    let mut shares = Shares::new();
    for seen in t.ledger().of(GROUP).into_iter().skip(from) {
        shares.entry(seen.member).or_default().insert(seen.partition);
    }
    shares
}

/// Sends to every partition until the shares are as wanted; fails when a partition has two holders in one round.
async fn spread(t: &Test, sender: &crate::Sender, what: &str, wanted: impl Fn(&Shares) -> bool) -> Check<Shares> {
    t.until(what, async || {
        let from = t.ledger().of(GROUP).len();
        for n in 0..64 {
            sender.send_keyed(&format!("key-{n}"), &format!("after{from}-{n}")).await?;
        }
        t.until("a round is handled", async || Ok((t.ledger().of(GROUP).len() >= from + 64).then_some(()))).await?;
        let shares = shares(t, from);
        Ok(wanted(&shares).then_some(shares))
    })
    .await
}

async fn p3_8_members_share_evenly_when_they_come_and_go(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    let limit = std::time::Duration::from_secs(15);
    let both = |s: &Shares| {
        let even = t.partitions() == 1 || s.values().all(|p| p.len() == t.partitions() as usize / 2);
        // One partition has one owner where partitions are owned; else both take from the same.
        let owned = t.partitions() == 1 && s.len() == 1 && s.values().all(|p| p.iter().all(Option::is_some));
        (s.len() == 2 && even) || owned
    };
    let handle = |got: crate::Got| async {
        got.ack().await;
    };
    let first = t.member(&c, "a").await?.work(handle);
    spread(&t, &sender, "one member has all", |s| s.len() == 1).await?;
    let second = t.member(&d, "b").await?.work(handle);
    t.within("members share evenly", limit.max(t.pace().patience), spread(&t, &sender, "an even share", both))
        .await??;
    first.stop().await?;
    spread(&t, &sender, "the one that is left has all", |s| s.keys().all(|m| m == "b")).await?;
    second.stop().await?;
    for (label, n) in t.ledger().counts(GROUP) {
        ensure_eq!(n, 1, "hand-overs of {label}: members that come and go cleanly cause no duplicate");
    }
    Ok(())
}

async fn p3_8_a_dead_members_share_is_taken_over(t: Test) -> Check {
    let (c, d, e) = (t.connect().await?, t.connect().await?, t.connect().await?);
    let sender = t.sender(&e).await?;
    let handle = |got: crate::Got| async {
        got.ack().await;
    };
    let first = t.member(&c, "a").await?.work(handle);
    let second = t.member(&d, "b").await?.work(handle);
    t.elapse(t.pace().retry).await;
    t.crash(&c).await?;
    first.abort();
    let labels: Vec<String> = (0..64).map(|n| format!("m{n}")).collect();
    for (n, label) in labels.iter().enumerate() {
        sender.send_keyed(&format!("k{n}"), label).await?;
    }
    let limit = d.broker.capabilities().takeover_bound(t.pace().lease) + std::time::Duration::from_secs(15);
    let all = t.until("the other member gets all", async || {
        Ok((t.ledger().firsts(GROUP).len() >= labels.len()).then_some(()))
    });
    t.within("the dead member's share is taken over", limit, all).await??;
    second.stop().await?;
    t.ledger().between(GROUP, &labels, 2)?;
    ensure!(t.ledger().of(GROUP).iter().all(|s| s.member == "b"), "a dead member was handed something");
    t.all_settled(&e, GROUP).await
}

async fn p3_8_two_never_hold_one_partition(t: Test) -> Check {
    let sender = t.sender(&t.connect().await?).await?;
    let holders: Arc<Mutex<BTreeMap<String, String>>> = Arc::default();
    let clashes: Arc<Mutex<Vec<String>>> = Arc::default();
    let mut crews = Vec::new();
    let (rounds, keys) = (4, 16);
    for round in 0..rounds {
        let on = t.connect().await?;
        let name = format!("member{round}");
        let member = t.member_with(&on, &name, ordered(&t)).await?;
        let (holders, clashes, test) = (holders.clone(), clashes.clone(), t.clone());
        crews.push(member.work(move |got| {
            let (holders, clashes, t, name) = (holders.clone(), clashes.clone(), test.clone(), name.clone());
            let key = got.key.as_ref().map(|k| String::from_utf8_lossy(k).into_owned()).unwrap_or_default();
            if let Some(other) = holders.lock().insert(key.clone(), name.clone()) {
                clashes.lock().push(format!("{} of {key} came to {name} while {other} had one", got.label));
            }
            async move {
                t.elapse(t.pace().retry / 20).await;
                holders.lock().remove(&key);
                got.ack().await;
            }
        }));
        // Neighbours share a key, so that members that take from one partition would meet.
        for n in 0..keys * 2 {
            let key = n / 2;
            sender.send_keyed(&format!("k{key}"), &format!("k{key}-{round}-{n:03}")).await?;
        }
        if round % 2 == 1 {
            crews.remove(0).stop().await?;
        }
    }
    let sent = rounds * keys * 2;
    t.until("all handled", async || Ok((t.ledger().of(GROUP).len() >= sent).then_some(()))).await?;
    for crew in crews {
        crew.stop().await?;
    }
    ensure!(clashes.lock().is_empty(), "two held one key: {:?}", clashes.lock());
    ensure_eq!(t.ledger().of(GROUP).len(), sent, "hand-overs while members come and go cleanly");
    for key in 0..keys {
        let order = of_key(&t, &format!("k{key}"));
        ensure!(order.is_sorted(), "order of key k{key}: {order:?}");
    }
    Ok(())
}

async fn p3_8_a_slow_member_holds_back_only_what_it_holds(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    let mut slow = t.member_with(&c, "slow", t.sub().max_in_flight(1)).await?;
    sender.send("held").await?;
    let held = slow.next().await?;
    let mut quick = t.member_with(&d, "quick", t.sub().max_in_flight(1)).await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    // With one partition that members own, the slow one owns it and the quick one has nothing to do: that is what it holds.
    let owned = held.partition().is_some() && c.broker.capabilities().has(Feature::Partitions);
    if owned {
        // What the slow one's partitions hold comes once it is gone, and nothing of the others waited for that.
        quick.ack_until_quiet().await?;
        held.ack_ok().await?;
        slow.close().await;
    } else {
        let n = quick.ack_until_quiet().await?;
        ensure!(n + 1 >= labels.len(), "{n} of {} passed the slow member", labels.len());
        held.ack_ok().await?;
        slow.close().await;
    }
    quick.ack_until_quiet().await?;
    t.ledger().exactly_once(GROUP, labels.iter().map(String::as_str).chain(["held"]))
}
