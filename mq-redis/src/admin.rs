//! Looking and tidying.

use crate::answer::{Id, as_bytes, as_id, as_int, as_text, entry, failure, field, id_text, list};
use crate::connect::{Hub, Link};
use crate::keys::{GroupKeys, PARKED, meta, stream};
use crate::scripts::RESET;
use crate::topology::{has_group, look, make_group, place_of, prepare_topic, start_id};
use crate::wire;
use mq_api::{
    Admin, Backlog, Count, DeadLetter, Error, ErrorKind, Group, GroupInfo, PendingDelivery, Position, Provisioning,
    RedriveOptions, RedriveReport, Result, Start, Topic, TopicInfo, TopicSpec, async_trait,
};
use mq_core::redrive::{DeadLetterStore, back, discard, redrive};
use redis::{Cmd, Value};
use std::sync::Arc;
use std::time::Duration;

/// A member whose name was quiet for longer is taken for gone: a living one reads at least each second.
const ALIVE: Duration = Duration::from_millis(2500);

/// See the module.
pub(crate) struct StreamsAdmin {
    hub: Arc<Hub>,
}

impl StreamsAdmin {
    pub(crate) fn new(hub: Arc<Hub>) -> Self {
        Self { hub }
    }

    async fn link(&self, topic: &Topic) -> Result<Link> {
        topic.validate()?;
        self.hub.link(&stream(topic)).await
    }

    async fn ask(&self, link: &Link, cmd: &Cmd, doing: &str) -> Result<Value> {
        let limit = self.hub.options.response_timeout;
        match tokio::time::timeout(limit, link.query(cmd)).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => {
                let error = failure(error, doing);
                if crate::driver::mends(error.kind()) {
                    self.hub.lost(link).await;
                }
                Err(error)
            }
            Err(_) => {
                self.hub.lost(link).await;
                Err(Error::new(ErrorKind::Timeout, format!("{doing}: no answer within {limit:?}")))
            }
        }
    }

    /// All that the numbers of a group are made of, at one moment; `None` if there is no such group.
    async fn look_at_once(
        &self,
        link: &Link,
        keys: &GroupKeys,
        group: &str,
        place: bool,
    ) -> Result<Option<Vec<Value>>> {
        let now = list(self.ask(link, &redis::cmd("TIME"), "asking for the time").await?);
        let part = |at: usize| now.get(at).and_then(as_int).unwrap_or(0);
        let now = part(0) * 1000 + part(1) / 1000;
        let mut pipe = redis::pipe();
        pipe.cmd("XPENDING").arg(&keys.stream).arg(group);
        pipe.cmd("ZCOUNT").arg(&keys.due).arg("-inf").arg(now);
        pipe.cmd("ZCOUNT").arg(&keys.due).arg(format!("({now}")).arg("+inf");
        pipe.cmd("XINFO").arg("GROUPS").arg(&keys.stream).cmd("XINFO").arg("STREAM").arg(&keys.stream);
        if place {
            pipe.add_command(place_of(&keys.stream, group, false).with_text());
        }
        let answers = link.conn.send_together(&pipe).await.map_err(|e| failure(e, "looking at pending deliveries"))?;
        let answers = list(answers);
        for answer in &answers {
            if let Value::ServerError(error) = answer {
                let error = failure(error.clone().into(), "looking at pending deliveries");
                return if error.kind() == ErrorKind::NotFound { Ok(None) } else { Err(error) };
            }
        }
        Ok(Some(answers))
    }

    /// Entries after the last one that the group was given; `None` if the server's own number is not to be believed.
    fn lag(link: &Link, group: &str, answers: &[Value]) -> Option<Count> {
        if let Some(found) = answers.get(5) {
            let parts = list(found.clone());
            let number = |at: usize| parts.get(at).and_then(as_int).and_then(|n| u64::try_from(n).ok());
            return Some(match (number(0), number(1)) {
                (Some(n), Some(1)) => Count::Exact(n),
                (Some(n), _) => Count::AtLeast(n),
                (None, _) => Count::Unknown,
            });
        }
        let groups = list(answers.get(3)?.clone());
        let own = groups.iter().find(|g| field(g, "name").and_then(as_text) == Some(group))?;
        let last = field(own, "last-delivered-id").and_then(as_id).unwrap_or((0, 0));
        let deleted = field(answers.get(4)?, "max-deleted-entry-id").and_then(as_id).unwrap_or((0, 0));
        let lag = field(own, "lag").and_then(as_int).and_then(|n| u64::try_from(n).ok());
        // The server's own number is right unless entries ahead of the group were deleted (redis #13337, #13957, #14257).
        lag.filter(|_| link.facts.counts && deleted <= last).map(Count::Exact)
    }

    async fn side_backlog(&self, link: &Link, keys: &GroupKeys, group: &str) -> Result<Option<[Count; 3]>> {
        let Some(mut answers) = self.look_at_once(link, keys, group, !link.facts.counts).await? else {
            return Ok(None);
        };
        let lag = match Self::lag(link, group, &answers) {
            Some(lag) => lag,
            None => {
                let Some(counted) = self.look_at_once(link, keys, group, true).await? else { return Ok(None) };
                answers = counted;
                Self::lag(link, group, &answers).unwrap_or(Count::Unknown)
            }
        };
        let number = |value: Option<&Value>| value.and_then(as_int).and_then(|n| u64::try_from(n).ok()).unwrap_or(0);
        let (due, later) = (number(answers.get(1)), number(answers.get(2)));
        let summary = answers.into_iter().next().map(list).unwrap_or_default();
        let pending = number(summary.first());
        // The index may hold entries that are settled by now: what is parked is what the pseudo consumer owns.
        let parked = summary.into_iter().nth(3).map(list).unwrap_or_default().into_iter().map(list);
        let parked = parked
            .filter(|c| c.first().and_then(as_bytes) == Some(PARKED.as_bytes()))
            .map(|c| number(c.get(1)))
            .sum::<u64>();
        let due = due.min(parked);
        let ready = match lag {
            Count::Exact(n) => Count::Exact(n + due),
            Count::AtLeast(n) => Count::AtLeast(n + due),
            other => other,
        };
        let delayed = later.min(parked - due);
        Ok(Some([ready, Count::Exact(pending - parked.min(pending)), Count::Exact(delayed)]))
    }

    async fn delete_keys(&self, link: &Link, keys: &[&String]) -> Result<()> {
        self.ask(link, redis::cmd("UNLINK").arg(keys), "deleting keys").await.map(drop)
    }
}

fn plus(a: Count, b: Count) -> Count {
    match (a, b) {
        (Count::Exact(a), Count::Exact(b)) => Count::Exact(a + b),
        (Count::Exact(a) | Count::AtLeast(a), Count::Exact(b) | Count::AtLeast(b)) => Count::AtLeast(a + b),
        _ => Count::Unknown,
    }
}

fn no_group(topic: &Topic, group: &Group) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no group '{group}' of topic '{topic}'"))
}

#[async_trait]
impl Admin for StreamsAdmin {
    async fn backlog(&self, topic: &Topic, group: &Group) -> Result<Backlog> {
        let link = self.link(topic).await?;
        let keys = GroupKeys::new(topic, group);
        let Some(main) = self.side_backlog(&link, &keys, group.as_str()).await? else {
            return Err(no_group(topic, group));
        };
        let again = self.side_backlog(&link, &keys.again(group.as_str()), group.as_str()).await?;
        let again = again.unwrap_or([Count::Exact(0); 3]);
        // A key of another type there is reported by the health of members: the other numbers are right all the same.
        let dead =
            self.ask(&link, redis::cmd("XLEN").arg(&keys.dead), "counting dead letters").await.unwrap_or_default();
        Ok(Backlog {
            ready: plus(main[0], again[0]),
            in_flight: plus(main[1], again[1]),
            delayed: plus(main[2], again[2]),
            dead: as_int(&dead).and_then(|n| n.try_into().ok()).map_or(Count::Unknown, Count::Exact),
        })
    }

    async fn create_topic(&self, spec: TopicSpec) -> Result<()> {
        let link = self.link(&spec.topic).await?;
        spec.groups.iter().try_for_each(Group::validate)?;
        if spec.partitions.is_some_and(|n| n != 1) {
            return Err(Error::unsupported("redis", "partitions", "a stream has none; use one topic, or several"));
        }
        prepare_topic(&link, &spec.topic, spec.retention, None, Provisioning::Create).await?;
        for group in &spec.groups {
            make_group(&link, &GroupKeys::new(&spec.topic, group), group, "0-0", None).await?;
        }
        Ok(())
    }

    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        let link = self.link(topic).await?;
        if !look(&link, topic).await?.exists {
            return Ok(None);
        }
        let length = self.ask(&link, redis::cmd("XLEN").arg(stream(topic)), "looking at the topic").await?;
        Ok(Some(TopicInfo::new(topic.clone(), 1, as_int(&length).and_then(|n| n.try_into().ok()))))
    }

    async fn delete_topic(&self, topic: &Topic) -> Result<bool> {
        let link = self.link(topic).await?;
        let known = look(&link, topic).await?;
        let key = stream(topic);
        let mut keys = vec![meta(&key)];
        if let Ok(groups) = self.ask(&link, redis::cmd("XINFO").arg("GROUPS").arg(&key), "listing groups").await {
            for group in list(groups).iter().filter_map(|g| field(g, "name").and_then(as_text)) {
                let of = GroupKeys::new(topic, &Group::new(group));
                let again = of.again(group);
                keys.extend([of.due, of.tries, of.wake, again.stream, again.due, again.tries]);
            }
        }
        keys.push(key);
        self.delete_keys(&link, &keys.iter().collect::<Vec<_>>()).await?;
        Ok(known.exists)
    }

    async fn create_group(&self, topic: &Topic, group: &Group, start: Start) -> Result<()> {
        group.validate()?;
        let link = self.link(topic).await?;
        let keep = prepare_topic(&link, topic, None, None, Provisioning::Create).await?;
        let start = start_id(start, keep, topic)?;
        make_group(&link, &GroupKeys::new(topic, group), group, &start, None).await.map(drop)
    }

    async fn delete_group(&self, topic: &Topic, group: &Group) -> Result<bool> {
        let link = self.link(topic).await?;
        let keys = GroupKeys::new(topic, group);
        let destroy = redis::cmd("XGROUP").arg("DESTROY").arg(&keys.stream).arg(group.as_str()).take();
        let was = match self.ask(&link, &destroy, "deleting the group").await {
            Ok(n) => as_int(&n) == Some(1),
            // There is no such stream.
            Err(error) if error.kind() == ErrorKind::Other => false,
            Err(error) => return Err(error),
        };
        let again = keys.again(group.as_str());
        self.delete_keys(&link, &[&keys.due, &keys.tries, &keys.wake, &again.stream, &again.due, &again.tries]).await?;
        let note = redis::cmd("HDEL").arg(meta(&keys.stream)).arg(format!("at:{group}")).take();
        self.ask(&link, &note, "forgetting where the group stood").await?;
        Ok(was)
    }

    async fn reset_group(&self, topic: &Topic, group: &Group, to: Start) -> Result<()> {
        let link = self.link(topic).await?;
        let keep = look(&link, topic).await?.keep;
        let start = start_id(to, keep, topic)?;
        let keys = GroupKeys::new(topic, group);
        let call = RESET
            .on(&[&keys.stream, &keys.due, &keys.tries, &meta(&keys.stream)])
            .arg(group.as_str())
            .arg(&start)
            .arg(ALIVE.as_millis().to_string());
        match as_int(&call.run(&link).await.map_err(|e| failure(e, "moving the group"))?) {
            Some(1) => Ok(()),
            Some(-1) => Err(Error::new(
                ErrorKind::Topology,
                format!("group '{group}' of topic '{topic}' has members; close them first, and wait {ALIVE:?}"),
            )),
            _ => Err(no_group(topic, group)),
        }
    }

    async fn groups(&self, topic: &Topic) -> Result<Vec<GroupInfo>> {
        let link = self.link(topic).await?;
        let key = stream(topic);
        let found = match self.ask(&link, redis::cmd("XINFO").arg("GROUPS").arg(&key), "listing groups").await {
            Ok(found) => list(found),
            Err(error) if error.kind() == ErrorKind::Other => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut groups = Vec::with_capacity(found.len());
        for name in found.iter().filter_map(|g| field(g, "name").and_then(as_text)) {
            let group = Group::new(name);
            let members = redis::cmd("XINFO").arg("CONSUMERS").arg(&key).arg(name).take();
            let members = list(self.ask(&link, &members, "listing members").await?);
            let members: Vec<_> =
                members.iter().filter(|m| field(m, "name").and_then(as_text) != Some(PARKED)).collect();
            let idle = members.iter().filter_map(|m| field(m, "idle").and_then(as_int)).min();
            let names = members.iter().filter_map(|m| field(m, "name").and_then(as_text).map(str::to_owned)).collect();
            let idle = idle.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis);
            let backlog = self.backlog(topic, &group).await?;
            groups.push(GroupInfo::new(group, names, backlog, idle));
        }
        Ok(groups)
    }

    async fn pending(&self, topic: &Topic, group: &Group, limit: usize) -> Result<Vec<PendingDelivery>> {
        let link = self.link(topic).await?;
        let keys = GroupKeys::new(topic, group);
        let mut all = Vec::new();
        for key in [&keys.stream, &keys.again(group.as_str()).stream] {
            if !has_group(&link, key, group.as_str()).await? {
                continue;
            }
            let cmd = redis::cmd("XPENDING")
                .arg(key)
                .arg(group.as_str())
                .arg("-")
                .arg("+")
                .arg(limit.saturating_sub(all.len()))
                .take();
            if limit <= all.len() {
                break;
            }
            for held in list(self.ask(&link, &cmd, "listing pending deliveries").await?).into_iter().map(list) {
                let [id, owner, idle, takes] = &held[..] else { continue };
                let Some((ms, seq)) = as_id(id) else { continue };
                let owner = as_text(owner).filter(|o| *o != PARKED).map(str::to_owned);
                let number = |v: &Value| as_int(v).and_then(|n| u64::try_from(n).ok()).unwrap_or(0);
                let idle = Duration::from_millis(number(idle));
                let takes = number(takes).try_into().unwrap_or(u32::MAX);
                all.push(PendingDelivery::new(None, Position::stream_id(ms, seq), owner, idle, takes));
            }
        }
        Ok(all)
    }

    async fn dead_letters(&self, topic: &Topic, group: &Group, limit: usize) -> Result<Vec<DeadLetter>> {
        Letters::of(self, topic, group).await?.page(None, limit).await
    }

    async fn redrive(&self, topic: &Topic, group: &Group, options: RedriveOptions) -> Result<RedriveReport> {
        redrive(&Letters::of(self, topic, group).await?, topic, group, &options).await
    }

    async fn discard_dead_letters(&self, topic: &Topic, group: &Group, filter: RedriveOptions) -> Result<u64> {
        discard(&Letters::of(self, topic, group).await?, &filter).await
    }
}

/// The dead letters of one group.
struct Letters<'a> {
    admin: &'a StreamsAdmin,
    link: Link,
    keys: GroupKeys,
    group: &'a Group,
}

impl<'a> Letters<'a> {
    /// Fails when there is neither such a group nor any letter of one that was.
    async fn of(admin: &'a StreamsAdmin, topic: &Topic, group: &'a Group) -> Result<Self> {
        let link = admin.link(topic).await?;
        let keys = GroupKeys::new(topic, group);
        let any = admin.ask(&link, redis::cmd("EXISTS").arg(&keys.dead), "looking for dead letters").await?;
        if as_int(&any) == Some(0) && admin.side_backlog(&link, &keys, group.as_str()).await?.is_none() {
            return Err(no_group(topic, group));
        }
        Ok(Self { admin, link, keys, group })
    }
}

impl DeadLetterStore for Letters<'_> {
    async fn page(&self, after: Option<Position>, n: usize) -> Result<Vec<DeadLetter>> {
        let from = after.map_or("-".to_owned(), |p| format!("({}", id_text(p.as_stream_id())));
        let range = redis::cmd("XRANGE").arg(&self.keys.dead).arg(from).arg("+").arg("COUNT").arg(n).take();
        let found = list(self.admin.ask(&self.link, &range, "reading dead letters").await?);
        let letters = found.into_iter().filter_map(entry).map(|(id, fields): (Id, _)| {
            DeadLetter::new(wire::from_fields(fields, id), Some(Position::stream_id(id.0, id.1)))
        });
        Ok(letters.collect())
    }

    async fn give_back(&self, letter: &DeadLetter) -> Result<()> {
        let again = self.keys.again(self.group.as_str());
        make_group(&self.link, &again, self.group, "0-0", None).await?;
        let message = back(letter);
        let mut meta = Vec::new();
        wire::encode(&message, &mut meta);
        let mut add = redis::cmd("XADD");
        add.arg(&again.stream).arg("*").arg(wire::META).arg(meta);
        if let Some(payload) = &message.payload {
            add.arg(wire::PAYLOAD).arg(payload.as_ref());
        }
        self.admin.ask(&self.link, &add, "redriving").await.map(drop)
    }

    async fn remove(&self, letter: &DeadLetter) -> Result<bool> {
        let Some(position) = letter.position else { return Ok(false) };
        let cmd = redis::cmd("XDEL").arg(&self.keys.dead).arg(id_text(position.as_stream_id())).take();
        Ok(as_int(&self.admin.ask(&self.link, &cmd, "removing a dead letter").await?) == Some(1))
    }
}

impl std::fmt::Debug for StreamsAdmin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StreamsAdmin")
    }
}
