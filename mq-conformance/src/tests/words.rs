//! Section 1: what the words mean.

use crate::case::cases;
use crate::{Check, Doing, GROUP, Test, TestFailure, ensure, ensure_eq};
use mq_api::{
    BrokerExt, Durability, ErrorKind, Group, Headers, Message, MessageId, ProducerSpec, Settled, Subscription, Topic,
};
use std::time::{Duration, SystemTime};

cases! {
    "1.1" p1_1_a_message_arrives_whole needs [] bugs [HeadersReversed HeaderLost IdReplaced TimestampLost];
    "1.1" p1_1_no_key_and_empty_key_differ needs [] bugs [EmptyKeyIsNone] one;
    "1.1" p1_1_tombstone_and_empty_payload_differ needs [] bugs [TombstoneIsEmpty] one;
    "1.1" p1_1_the_same_id_twice_is_two_messages needs [] bugs [SameIdOnce] one;
    "1.1" p1_1_contents_of_every_size_arrive needs [] bugs [PayloadCut] one;
    "1.2" p1_2_bad_names_are_refused_by_name needs [] bugs [NamesUnchecked] one;
    "1.2" p1_2_made_names_never_meet needs [Groups Settlement DeadLetters] bugs [MadeNamesMeet] one;
    "1.3" p1_3_groups_see_all_and_members_divide needs [Groups Settlement] bugs [DeliverTwice GroupsMixed];
    "1.3" p1_3_broadcast_gets_what_is_sent_from_now_on needs [Broadcast] bugs [BroadcastLoses];
    "1.4" p1_4_a_delivery_says_where_it_is_from needs [Groups Settlement] bugs [PositionLost SourceLost];
    "1.5" p1_5_only_hand_overs_are_attempts needs [Groups Settlement] bugs [AttemptTooHigh];
    "1.6" p1_6_levels_are_stated_and_required needs [] bugs [DurabilityIgnored LevelInflated] one;
}

/// A message with one of everything that a message can have.
fn full(label: &str) -> Message {
    let when = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_123);
    Message::new(label.to_owned())
        .key(vec![0_u8, 255, b'k'])
        .header("b", "first")
        .header("a", vec![0_u8, 159, 146, 150])
        .header("b", "second")
        .header("empty", "")
        .header("größe-名前", "utf-8 name")
        .id(MessageId::make())
        .timestamp(when)
        .content_type("application/vnd.x+json")
}

async fn p1_1_a_message_arrives_whole(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let sent = full("whole");
    sender.send_message(sent.clone()).await?;
    let got = member.next().await?;
    ensure_eq!(got.id, sent.id, "id");
    ensure_eq!(got.key, sent.key, "key");
    ensure_eq!(got.payload, sent.payload, "payload");
    ensure_eq!(user_headers(&got.headers), user_headers(&sent.headers), "headers, in order, with doubles");
    ensure_eq!(got.timestamp, sent.timestamp, "timestamp, to the millisecond");
    ensure_eq!(got.content_type, sent.content_type, "content type");
    got.ack_ok().await?;
    sender.send("stamped").await?;
    let got = member.next().await?;
    ensure!(got.timestamp.is_some(), "a message without timestamp was not stamped by its producer");
    ensure!(got.content_type.is_none() && got.key.is_none(), "a plain message got a key or a content type");
    got.ack_ok().await
}

fn user_headers(headers: &Headers) -> Vec<(String, Vec<u8>)> {
    headers.iter().filter(|(n, _)| !n.starts_with("mq-")).map(|(n, v)| (n.to_owned(), v.to_vec())).collect()
}

async fn p1_1_no_key_and_empty_key_differ(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send_message(Message::new("none")).await?;
    sender.send_message(Message::new("empty").key("")).await?;
    for _ in 0..2 {
        let got = member.next().await?;
        let wanted = (got.label == "empty").then(bytes::Bytes::new);
        ensure_eq!(got.key, wanted, "key of '{}'", got.label);
        got.ack_ok().await?;
    }
    Ok(())
}

async fn p1_1_tombstone_and_empty_payload_differ(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    sender.send_message(Message::tombstone("gone")).await?;
    sender.send_message(Message::new("").key("empty")).await?;
    for _ in 0..2 {
        let got = member.next().await?;
        let gone = got.key.as_deref() == Some(b"gone");
        ensure_eq!(got.payload.is_none(), gone, "whether '{:?}' has no payload", got.key);
        got.ack_ok().await?;
    }
    Ok(())
}

async fn p1_1_the_same_id_twice_is_two_messages(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    for label in ["one", "two"] {
        sender.send_message(Message::new(label).id("the-same")).await?;
    }
    member.ack_next(2).await?;
    t.ledger().exactly_once(GROUP, ["one", "two"])?;
    t.all_settled(&c, GROUP).await
}

async fn p1_1_contents_of_every_size_arrive(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    for size in [0_usize, 1, 255, 256, 65_535, 65_536, 999_000] {
        let payload: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
        let mut message = Message::new(payload.clone());
        for n in 0..64_u32 {
            message = message.header(format!("h{n}"), n.to_string());
        }
        sender.send_message(message).await?;
        let got = member.next().await?;
        ensure!(got.payload_bytes() == payload.as_slice(), "a payload of {size} bytes came with other contents");
        ensure_eq!(user_headers(&got.headers).len(), 64, "headers beside a payload of {size} bytes");
        got.ack_ok().await?;
    }
    Ok(())
}

async fn p1_2_bad_names_are_refused_by_name(t: Test) -> Check {
    let c = t.connect().await?;
    let long = "x".repeat(101);
    for bad in ["", ".a", "a.", "a..b", "a b", "a/b", "ä", "a\n", long.as_str()] {
        match c.broker.producer(ProducerSpec::new(bad)).await {
            Ok(_) => return Err(TestFailure::new(format!("a producer of a topic called {bad:?} was made"))),
            Err(e) => {
                ensure_eq!(e.kind(), ErrorKind::InvalidName, "producer of {bad:?}: {e}");
                ensure!(e.to_string().contains(&format!("{bad:?}")), "'{e}' does not name {bad:?}");
            }
        }
        let sub = Subscription::broadcast(bad);
        let kind = c.broker.subscribe(sub).await.err().map(|e| e.kind());
        ensure_eq!(kind, Some(ErrorKind::InvalidName), "subscription to {bad:?}");
    }
    let long = "x".repeat(61);
    for bad in ["", "a..b", "a b", long.as_str()] {
        let kind = c.broker.subscribe(Subscription::group("fine", bad)).await.err().map(|e| e.kind());
        ensure_eq!(kind, Some(ErrorKind::InvalidName), "group {bad:?}");
    }
    let spec = ProducerSpec::new("fine").group("not fine");
    ensure_eq!(
        c.broker.producer(spec).await.err().map(|e| e.kind()),
        Some(ErrorKind::InvalidName),
        "group of a producer"
    );
    let sender = t.sender_with(&c, t.spec_to(t.topic())).await?;
    for bad in ["", "a\nb", "a\u{0}"] {
        match sender.try_send(Message::new("x").header(bad, "v")).await {
            Ok(_) => return Err(TestFailure::new(format!("a header called {bad:?} was sent"))),
            Err(e) => ensure_eq!(e.kind(), ErrorKind::InvalidName, "header {bad:?}: {e}"),
        }
    }
    Ok(())
}

async fn p1_2_made_names_never_meet(t: Test) -> Check {
    let c = t.connect().await?;
    let base = t.topic();
    let (one, two) = (Topic::new(format!("{base}.b")), base.clone());
    let (group_one, group_two) = ("c", "b.c");
    for (topic, group, label) in [(&one, group_one, "one"), (&two, group_two, "two")] {
        let sender = t.sender_with(&c, t.spec_to(topic.clone()).group(group)).await?;
        let mut member = t.member_with(&c, label, t.sub_to(topic.clone(), group)).await?;
        sender.send(label).await?;
        member.next().await?.dead_letter("on purpose").await;
        member.close().await;
    }
    for (topic, group, label) in [(&one, group_one, "one"), (&two, group_two, "two")] {
        let letters = Topic::dead_letters(topic.clone(), Group::new(group));
        let mut reader = t.member_with(&c, "reader", t.sub_to(letters, "readers")).await?;
        let got = reader.next().await?;
        ensure_eq!(got.label, label, "the dead letter of {topic} and {group}");
        got.ack_ok().await?;
        reader.stays_quiet().await?;
    }
    Ok(())
}

async fn p1_3_groups_see_all_and_members_divide(t: Test) -> Check {
    let c = t.connect().await?;
    let spec = t.spec_to(t.topic()).group("first").group("second");
    let sender = t.sender_with(&c, spec).await?;
    let mut crews = Vec::new();
    for (name, group) in [("a", "first"), ("b", "first"), ("c", "second")] {
        let member = t.member_with(&c, name, t.sub_to(t.topic(), group)).await?;
        crews.push(member.work(|got| async {
            got.ack().await;
        }));
    }
    let labels = sender.send_numbered(t.pace().many).await?;
    for group in ["first", "second"] {
        t.until("both groups saw all", async || Ok((t.ledger().of(group).len() >= labels.len()).then_some(()))).await?;
    }
    t.all_settled(&c, "first").await?;
    t.elapse(t.pace().quiet).await;
    for crew in crews {
        crew.stop().await?;
    }
    t.ledger().exactly_once("first", &labels)?;
    t.ledger().exactly_once("second", &labels)?;
    t.count("deliveries", t.ledger().of("first").len() + t.ledger().of("second").len());
    Ok(())
}

async fn p1_3_broadcast_gets_what_is_sent_from_now_on(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender_with(&c, t.spec_to(t.topic())).await?;
    // Where a topic keeps nothing without a group this one is nobody's: unroutable is as good.
    drop(sender.try_send(Message::new("before")).await);
    let sub = Subscription::broadcast(t.topic());
    let mut first = t.member_with(&c, "a", sub.clone()).await?;
    let mut second = t.member_with(&c, "b", sub).await?;
    for label in ["one", "two", "three"] {
        sender.send_keyed("k", label).await?;
    }
    for receiver in [&mut first, &mut second] {
        for label in ["one", "two", "three"] {
            let got = receiver.next().await?;
            ensure_eq!(got.label, label, "what {} got", receiver.name());
            ensure_eq!(got.attempt(), 1, "attempt");
            ensure!(got.source().group.is_none(), "a broadcast delivery names a group");
            ensure_eq!(got.nack("ignored").await, Settled::Untracked, "settling a broadcast delivery");
        }
        receiver.stays_quiet().await?;
    }
    Ok(())
}

async fn p1_4_a_delivery_says_where_it_is_from(t: Test) -> Check {
    let c = t.connect().await?;
    let sender = t.sender(&c).await?;
    let mut member = t.member(&c, "a").await?;
    let found = c.broker.capabilities();
    let mut last = std::collections::BTreeMap::new();
    for n in 0..t.pace().some {
        let receipt = sender.send_keyed(&format!("k{}", n % 5), &format!("m{n}")).await?;
        let got = member.next().await?;
        ensure_eq!(got.topic(), t.topic().as_str(), "topic");
        ensure_eq!(got.source().group.as_ref().map(Group::as_str), Some(GROUP), "group");
        ensure_eq!(got.attempt(), 1, "attempt of a first hand-over");
        ensure!(got.is_owned(), "a delivery just handed over is not owned");
        if found.receipt_positions {
            ensure_eq!(Some(got.position()), receipt.position, "position, as the receipt said");
            ensure_eq!(got.partition(), receipt.partition, "partition, as the receipt said");
            let before = last.insert(got.partition(), got.position());
            ensure!(before.is_none_or(|b| b < got.position()), "positions of a partition do not rise");
        }
        if t.partitions() > 1 {
            ensure!(got.partition().is_some_and(|p| p < t.partitions()), "partition {:?}", got.partition());
        }
        got.ack_ok().await?;
    }
    Ok(())
}

async fn p1_5_only_hand_overs_are_attempts(t: Test) -> Check {
    let (c, d) = (t.connect().await?, t.connect().await?);
    let sender = t.sender(&c).await?;
    let mut first = t.member(&c, "a").await?;
    let labels = sender.send_numbered(t.pace().some).await?;
    // One is handed over; the others are, as far as the backend likes, prefetched. All come back untried.
    let got = first.next().await?;
    let tried = got.label.clone();
    got.release().await;
    first.close().await;
    let mut second = t.member(&d, "b").await?;
    for _ in &labels {
        let got = second.next().await?;
        ensure_eq!(got.attempt(), 1, "attempt of {}, which nobody tried ({tried} was released)", got.label);
        got.ack_ok().await?;
    }
    t.all_settled(&d, GROUP).await
}

async fn p1_6_levels_are_stated_and_required(t: Test) -> Check {
    let c = t.connect().await?;
    let found = c.broker.capabilities();
    let grouped = found.has(mq_api::Feature::Groups);
    let spec = if grouped { t.spec() } else { t.spec_to(t.topic()) };
    let sender = t.sender_with(&c, spec.clone().require_durability(found.send_level)).await?;
    let receipt = sender.send("m").await?;
    ensure_eq!(receipt.level, found.send_level, "level of a receipt");
    for level in [Durability::Sent, Durability::Memory, Durability::Disk, Durability::Replicated] {
        let answer = c.broker.producer(spec.clone().require_durability(level)).await;
        let sub = Subscription::broadcast(t.topic()).require_durability(level);
        let also = c.broker.subscribe(sub).await;
        if level <= found.send_level {
            answer.doing(format_args!("requiring {level}"))?.close(t.pace().drain).await;
            also.doing(format_args!("requiring {level}"))?.control().close(t.pace().drain).await;
            continue;
        }
        for refusal in [answer.err(), also.err()] {
            let Some(e) = refusal else {
                return Err(TestFailure::new(format!("{level} was granted; the broker gives {}", found.send_level)));
            };
            ensure_eq!(e.kind(), ErrorKind::Unsupported, "requiring {level}: {e}");
            ensure!(e.to_string().contains(&level.to_string()), "'{e}' does not name the level {level}");
        }
    }
    if grouped {
        let mut member = t.member(&c, "a").await?;
        let settled = member.next().await?.ack().await;
        ensure_eq!(settled, Settled::Confirmed(found.settle_level), "level of a settlement");
    }
    Ok(())
}
