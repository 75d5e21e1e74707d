//! The Redis backend of the anymq messaging library: Streams with groups, and Pub/Sub. Redis 7.0 or later, or Valkey.
//!
//! # URL
//!
//! `redis://`, `rediss://` (TLS) and `redis+unix:///path` are Streams; `redis+pubsub://`, `rediss+pubsub://` and
//! `redis+pubsub+unix://` are Pub/Sub. `[user[:password]@]host[:port][,host[:port]..][/database]`; with several hosts the first
//! master is taken. Unknown parameters and values of the wrong type are errors.
//!
//! | parameter | default | meaning |
//! |---|---|---|
//! | `connect_timeout` | `30s` | how long a server that is down is waited for at start |
//! | `response_timeout` | `15s` | time without an answer after which a connection counts as lost |
//! | `wait`, `wait_timeout` | `0` (Sentinel: `1`), `1s` | replicas that must have a send, and how long they may take (above zero, below `response_timeout`); unmet is an unknown outcome |
//! | `sentinel`, `sentinel_user`, `sentinel_password` | | the hosts are Sentinels of the master of this name |
//! | `ca`, `cert`, `key` | system roots | PEM files for `rediss` |
//! | `address_map` | none | `told:port=reached:port,…`: what a Cluster or a Sentinel tells, and where it is reached from here, for servers in containers |
//! | `db`, `name` | `0`, `anymq` | database, name in `CLIENT LIST` |
//!
//! # Mapping
//!
//! A topic is the stream of its name. What the library makes beside it shares its slot: `{orders}..meta` (retention),
//! `{orders}..billing..due` (delayed entries by time), `..tries` (attempts), `..dlq` (dead letters), `..again` (redriven, read
//! by this group only), `..wake` (written when an entry comes back). The wire format is two fields, `mq` and `p`. Entries of other programs are delivered as their fields in
//! a JSON object, or as the value of `payload` if that is the only field. On Pub/Sub a topic is a channel.
//!
//! # Delivery
//!
//! A client has one connection for commands and sends, and one for each subscription.
//! Groups read with blocking `XREADGROUP` on a connection of their own, which is never cancelled. Where entries may be removed
//! unread (log mode, streams of others) a script reads instead, woken by a blocking `XREAD` that takes nothing, and counts in the same
//! step what went: the `Gap` says exactly how much a group missed, or no number if entries ahead of it were deleted one by one. In a topic of ours that keeps what was not handled, a look each second
//! compares what left the stream with what the library removed: entries that others removed unread are a `Gap`, with their number if
//! the group had read nothing since the look before, else without one. Pending entries that were removed are counted when they
//! are renewed or taken. Sends are pipelines of at most
//! 500 `XADD`, four in flight. Broadcast reads the stream from its end, at most once. A confirmed send is at level `Disk` with
//! `appendfsync always`, `Replicated` with `wait`, else `Memory`.
//!
//! Retention removes what all groups handled, at most 1,000,000 entries a topic, then sends are `Full`. `Retention::Log` keeps by
//! count or age, and is needed for replay. Behind a delayed entry, what was handled is removed only when the topic would be full.
//!
//! # Ordering
//!
//! One producer's messages of a key are stored in order. Members of a group read side by side, so `PerKey` is refused.
//!
//! # Redelivery
//!
//! A delayed or released entry stays in the pending list, owned by the pseudo consumer `~parked`, with an index of due times: losing the
//! index only makes it come after a lease. Members with room are told at once that one came back or when it will be due, by `CLIENT
//! TRACKING` of one key a group; where server or user rights do not allow that, they see it within 500 ms. Retries, releases and dead letters are one script that checks owner and count of takes.
//! An acknowledgement is a plain `XACK` while the lease is certain, that script otherwise. Leases are renewed every third of a
//! lease on the library's own thread. Attempts are counted when they are settled, so a crash may not be counted.
//!
//! # Reconnect
//!
//! Any loss ends the session, fences its handles and attaches again. A group that is gone is made again at the lowest id it had not
//! settled, at the beginning if the stream is new, and reported as one `Gap`. A member that comes back takes over its own
//! pending entries at once.
//!
//! # Native access
//!
//! `Topic::native` takes an existing stream as it is: nothing is put beside it unless retention is asked for. Producers take
//! `native("fields", "plain")`: one readable field per part (on Pub/Sub: the payload alone). Pub/Sub subscriptions take
//! `native("pattern", "true")`; the header `mq-channel` then names the channel.
//!
//! # Limits
//!
#![doc = include_str!("capabilities.md")]
//!
//! No partitions and no order per key. Pub/Sub stores nothing: no groups, settling, retries, dead letters, replay or backlog. On a
//! Cluster `PUBLISH` counts the receivers of one node. Settlements are not waited for with `WAIT`.
//! With an append-only file, or after a failover, the server's own lag is not believed (Redis 7.0 restores it wrongly): entries are
//! counted instead, up to 10,000 from either end of the stream, and a backlog deeper than that on both sides is `AtLeast`.

mod admin;
mod answer;
mod attend;
mod broadcast;
mod broker;
mod conn;
mod connect;
mod dial;
mod driver;
mod entry;
mod foreign;
mod keys;
mod master;
mod member;
mod probe;
mod pubsub;
mod read;
mod resp;
mod room;
mod scripts;
mod send;
mod settle;
mod tend;
mod topology;
mod url;
mod wake;
mod wire;

use std::sync::Arc;

/// Connects.
///
/// # Errors
/// `Config` names a URL parameter that is wrong; `Auth` and `Tls` fail at once with the server's words; a server that is down is
/// waited for, up to `connect_timeout`.
pub async fn connect(url: &str) -> mq_api::Result<Arc<dyn mq_api::Broker>> {
    connect_with_hooks(url, Arc::new(mq_core::NoHooks)).await
}

/// Connects; `hooks` are told what happens, for metrics and traces.
///
/// # Errors
/// As [`connect`].
pub async fn connect_with_hooks(url: &str, hooks: Arc<dyn mq_core::Hooks>) -> mq_api::Result<Arc<dyn mq_api::Broker>> {
    Ok(broker::Redis::connect(url, hooks).await?)
}
