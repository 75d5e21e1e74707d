//! A topic keeps what not every group handled: what others remove from it unread is told, and only to the groups that miss it.

use crate::rig::{LEASE, TOPIC, ask, close, open, raw, server};
use mq_api::{Broker, BrokerExt, Consumer, Event, Events, GapCause, Subscription};
use redis::Connection;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(20);

/// Waits until something holds.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < limit, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

struct Member {
    group: &'static str,
    consumer: Box<dyn Consumer>,
    events: Events,
    /// Handled, and the counts of the gaps it was told of.
    seen: u64,
    gaps: Vec<Option<u64>>,
}

impl Member {
    async fn join(broker: &dyn Broker, group: &'static str) -> Self {
        let consumer = broker.subscribe(Subscription::group(TOPIC, group).lease(LEASE)).await.unwrap();
        let events = consumer.control().events();
        Self { group, consumer, events, seen: 0, gaps: Vec::new() }
    }

    fn listen(&mut self) {
        for event in self.events.drain() {
            let Event::Gap(gap) = event else { continue };
            assert_eq!(gap.cause, GapCause::Retention, "{gap:?}");
            self.gaps.push(gap.count);
        }
    }

    /// Handles what comes, until that much was handled.
    async fn handle(&mut self, seen: u64) {
        while self.seen < seen {
            drop(crate::rig::next(&mut self.consumer).await.ack());
            self.seen += 1;
        }
        self.listen();
    }

    /// Waits until the group was looked at as it is now, and what it read is known.
    async fn is_noted(&self, raw: &mut Connection) {
        let group = self.group;
        until("the note of where the group stands", || {
            let noted: Option<String> = ask(raw, &["HGET", "{orders}..meta", &format!("at:{group}")]);
            let now = format!("{} {} ", removed_by_others(raw), last_delivered(raw, group));
            noted.is_some_and(|noted| noted.starts_with(&now) && !noted.ends_with(" -1"))
        })
        .await;
    }

    async fn is_told(&mut self, count: u64) {
        let limit = Instant::now() + LIMIT;
        while self.gaps.is_empty() && Instant::now() < limit {
            tokio::time::sleep(Duration::from_millis(10)).await;
            self.listen();
        }
        assert_eq!(std::mem::take(&mut self.gaps), [Some(count)], "group {}", self.group);
    }
}

/// All that is gone, less what the library noted as removed by itself.
fn removed_by_others(raw: &mut Connection) -> i64 {
    let stream: std::collections::HashMap<String, redis::Value> = ask(raw, &["XINFO", "STREAM", TOPIC]);
    let own: Option<i64> = ask(raw, &["HGET", "{orders}..meta", "removed"]);
    match (&stream["entries-added"], &stream["length"]) {
        (redis::Value::Int(added), redis::Value::Int(length)) => added - length - own.unwrap_or(0),
        other => panic!("{other:?}"),
    }
}

fn last_delivered(raw: &mut Connection, group: &str) -> String {
    let groups: Vec<std::collections::HashMap<String, redis::Value>> = ask(raw, &["XINFO", "GROUPS", TOPIC]);
    let text = |value: &redis::Value| redis::from_redis_value::<String>(value.clone()).unwrap();
    let own = groups.iter().find(|found| text(&found["name"]) == group).unwrap();
    text(&own["last-delivered-id"])
}

/// Stops reading, and waits for the end of the read that was under way: each sets back its name's idle time, and blocks for a
/// quarter of the lease.
async fn stand_still(raw: &mut Connection, member: &Member) {
    member.consumer.control().pause();
    let group = member.group;
    until("the end of the last read", || {
        let members: Vec<std::collections::HashMap<String, redis::Value>> =
            ask(raw, &["XINFO", "CONSUMERS", TOPIC, group]);
        members.iter().all(|found| matches!(found["idle"], redis::Value::Int(ms) if ms > LEASE.as_millis() as i64 / 2))
    })
    .await;
}

fn add(raw: &mut Connection, n: u64) -> Vec<String> {
    (0..n).map(|_| ask(raw, &["XADD", TOPIC, "*", "payload", "x"])).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_remove_unread_is_counted() {
    let Some(server) = server(false, &[]) else { return };
    let broker = open(&server.url()).await;
    let mut raw = raw(&server);
    let mut member = Member::join(&*broker, "billing").await;
    add(&mut raw, 10);
    member.handle(10).await;
    stand_still(&mut raw, &member).await;
    member.is_noted(&mut raw).await;
    add(&mut raw, 7);
    let _: u64 = ask(&mut raw, &["XTRIM", TOPIC, "MAXLEN", "3"]);
    member.is_told(4).await;
    // One by one, and all that is left.
    let ids = add(&mut raw, 1);
    let _: u64 = ask(&mut raw, &["XDEL", TOPIC, &ids[0]]);
    member.is_told(1).await;
    member.consumer.control().resume();
    member.handle(13).await;
    assert_eq!(member.gaps, []);
    stand_still(&mut raw, &member).await;
    member.is_noted(&mut raw).await;
    add(&mut raw, 2);
    let _: u64 = ask(&mut raw, &["XTRIM", TOPIC, "MAXLEN", "0"]);
    member.is_told(2).await;
    // The number of those that wait is right again too.
    add(&mut raw, 3);
    let backlog = broker.admin().backlog(&TOPIC.into(), &"billing".into()).await.unwrap();
    assert_eq!(backlog.ready, mq_api::Count::Exact(3));
    member.consumer.control().resume();
    member.handle(16).await;
    assert_eq!(member.gaps, []);
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_remove_while_nobody_reads_is_counted() {
    let Some(server) = server(false, &[]) else { return };
    let mut raw = raw(&server);
    let broker = open(&server.url()).await;
    broker.admin().create_group(&TOPIC.into(), &"new".into(), mq_api::Start::Oldest).await.unwrap();
    let mut member = Member::join(&*broker, "billing").await;
    add(&mut raw, 5);
    member.handle(5).await;
    close(broker).await;
    add(&mut raw, 4);
    let _: u64 = ask(&mut raw, &["XTRIM", TOPIC, "MAXLEN", "1"]);
    let broker = open(&server.url()).await;
    let mut member = Member::join(&*broker, "billing").await;
    member.is_told(3).await;
    member.handle(1).await;
    // A group that never read: nothing was removed for it before, since nobody may remove what it has not read.
    let mut new = Member::join(&*broker, "new").await;
    new.is_told(8).await;
    new.handle(1).await;
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_misses_nothing_hears_nothing() {
    let Some(server) = server(false, &[]) else { return };
    let mut raw = raw(&server);
    let broker = open(&server.url()).await;
    let mut slow = Member::join(&*broker, "slow").await;
    stand_still(&mut raw, &slow).await;
    let mut fast = Member::join(&*broker, "fast").await;
    add(&mut raw, 6);
    fast.handle(6).await;
    fast.is_noted(&mut raw).await;
    let _: u64 = ask(&mut raw, &["XTRIM", TOPIC, "MAXLEN", "2"]);
    slow.is_told(4).await;
    fast.is_noted(&mut raw).await;
    fast.listen();
    assert_eq!(fast.gaps, []);
    slow.consumer.control().resume();
    slow.handle(2).await;
    assert_eq!(slow.gaps, []);
    // What the library removes itself is no gap.
    for n in 3..6 {
        add(&mut raw, 1);
        slow.handle(n).await;
        fast.handle(n + 4).await;
        until("the removal of what was handled", || ask::<u64>(&mut raw, &["XLEN", TOPIC]) == 0).await;
    }
    slow.is_noted(&mut raw).await;
    fast.is_noted(&mut raw).await;
    slow.listen();
    fast.listen();
    assert_eq!((&slow.gaps[..], &fast.gaps[..]), (&[][..], &[][..]));
    close(broker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_remove_while_a_group_reads_on_is_a_gap() {
    let Some(server) = server(false, &[]) else { return };
    let mut raw = raw(&server);
    let broker = open(&server.url()).await;
    let mut member = Member::join(&*broker, "billing").await;
    let mut burst = redis::pipe();
    burst.atomic();
    for _ in 0..50 {
        burst.cmd("XADD").arg(TOPIC).arg("*").arg("payload").arg("x");
    }
    burst.cmd("XTRIM").arg(TOPIC).arg("MAXLEN").arg(10);
    burst.exec(&mut raw).unwrap();
    member.handle(10).await;
    let limit = Instant::now() + LIMIT;
    while member.gaps.is_empty() && Instant::now() < limit {
        tokio::time::sleep(Duration::from_millis(10)).await;
        member.listen();
    }
    // Where the look came first it knows the number.
    let [gap] = &member.gaps[..] else { panic!("{:?}", member.gaps) };
    assert!(gap.is_none_or(|lost| lost == 40), "{gap:?}");
    close(broker).await;
}

/// Redis 7.0 has its count of what a group read neither in its append-only file nor on its replicas, and makes its lag of it.
#[tokio::test(flavor = "multi_thread")]
async fn numbers_are_right_after_a_restart_from_the_append_only_file() {
    let Some(mut server) = server(true, &[]) else { return };
    let mut connection = raw(&server);
    let broker = open(&server.url()).await;
    let mut member = Member::join(&*broker, "billing").await;
    add(&mut connection, 10);
    member.handle(10).await;
    stand_still(&mut connection, &member).await;
    member.is_noted(&mut connection).await;
    add(&mut connection, 4);
    server.kill().unwrap();
    server.restart().unwrap();
    let mut connection = until_raw(&server).await;
    let ready = async || broker.admin().backlog(&TOPIC.into(), &"billing".into()).await.map(|backlog| backlog.ready);
    let limit = Instant::now() + LIMIT;
    let mut count = ready().await;
    while count.is_err() && Instant::now() < limit {
        tokio::time::sleep(Duration::from_millis(20)).await;
        count = ready().await;
    }
    assert_eq!(count.unwrap(), mq_api::Count::Exact(4));
    // Only what is removed after that is missed, and by its number.
    let _: u64 = ask(&mut connection, &["XTRIM", TOPIC, "MAXLEN", "1"]);
    member.is_told(3).await;
    member.consumer.control().resume();
    member.handle(11).await;
    assert_eq!(ready().await.unwrap(), mq_api::Count::Exact(0));
    assert_eq!(member.gaps, []);
    close(broker).await;
}

async fn until_raw(server: &mq_testbed::Server) -> Connection {
    let mut found = None;
    until("a connection", || {
        found = redis::Client::open(server.url()).ok().and_then(|client| client.get_connection().ok());
        found.is_some()
    })
    .await;
    found.unwrap()
}
