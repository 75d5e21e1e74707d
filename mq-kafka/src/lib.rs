//! The Kafka backend of the anymq messaging library, over librdkafka.
//!
//! # URL
//!
//! `kafka://[user:password@]host[:port][,host[:port]…][?parameters]`; `kafkas://` is TLS. Parameters that are not known are
//! errors that name the allowed ones.
//!
//! | parameter | meaning |
//! |---|---|
//! | `connect_timeout` | how long a broker that is down is waited for; default 30 s |
//! | `partitions` | of topics that have to be made; default 12, because adding some later moves keys |
//! | `replication` | copies of topics that have to be made; default -1, the cluster's own |
//! | `min_session` | shortest session that the brokers allow, a lower bound of leases; default: asked of them, at least 2 s; 6 s if they do not tell |
//! | `sasl` | `plain` (default with a user), `scram-sha-256`, `scram-sha-512`, `oauthbearer` |
//! | `ca`, `cert`, `key`, `key_password` | files for TLS |
//! | `client_id`, `rack`, `instance_id`, `group_protocol`, `compression`, `address_family` | as librdkafka knows them |
//! | `librdkafka.<property>` | passed through; those that would break the contract are refused by name |
//!
//! SCRAM, OAUTHBEARER and TLS need the feature `tls` or `tls-vendored` (of `anymq`: `kafka-tls`, `kafka-tls-vendored`). OAUTHBEARER
//! is untried, and so are `zstd`, `gssapi`, `rack`, `instance_id` and `group_protocol=consumer`: no test has been seen to pass with
//! them.
//!
//! # Mapping
//!
//! A topic is a topic. A group of a topic is the consumer group `{topic}..{group}`, so that groups of one name on other topics
//! neither rebalance it nor are deleted with it; groups of native topics keep their plain name. Dead letters are the topic
//! `{topic}..{group}..dlq` (one partition, kept 14 days), long retries the topics `{topic}..{group}..retry…` with a consumer
//! group of their own. Ids, content types and retry data travel in headers that start with `mq-`.
//!
//! # Delivery
//!
//! One thread per subscription polls partitions by credit, a second one commits. A commit carries the contiguous prefix, and in
//! its metadata what was acknowledged beyond it, attempts, trials of crash suspects and how often a stretch was taken by
//! members that died. An awaited ack forces its commit; others are committed within a second or 5,000. Nothing is handed out
//! before a commit says that it may be. A broker that takes no such metadata (`offset.metadata.max.bytes`, 4,096 by default)
//! keeps only what is acknowledged in order: the rest is answered `Unknown`. Broadcast reads every partition from its end, without a group.
//!
//! # Ordering
//!
//! A partition has one owner, a key one partition (murmur2, as the Java client). Under `PerKey` one message of a key is out at
//! a time, retries keep their place and what is redriven queues up behind. The epoch of a delivery is the generation of the group.
//!
//! # Redelivery
//!
//! Delays up to 30 s are held in memory within `max_parked`; longer ones, and those past the bound, are copied to the retry
//! topics and the original is acknowledged once the copy is confirmed. Under `PerKey` all are held in memory. Attempt numbers
//! are "at least". The lease is the session time-out. Retry topics keep two weeks; delays over twelve days go to
//! `{topic}..{group}..retry-longest`, which keeps everything until the group is deleted. Where topics are not made (`Verify`,
//! `None`) the first, `{topic}..{group}..retry`, has to be there and takes what would go to one that is not.
//!
//! # Reconnect
//!
//! librdkafka reconnects, within a second of the broker's return; health says `Reconnecting` meanwhile. A line whose peer is gone
//! without a word is noticed when a request was not answered for 10 s (`librdkafka.socket.timeout.ms`; lines slower than 100 kB/s
//! want more), by a member that is just joining its group after 60 s, under `PerKey` 300 s. What librdkafka calls fatal, and a
//! topic that is gone, ends the session, which is made anew. A topic that was made again under its name is told from the one
//! before by its id and reported as one gap; a group that was lost goes on at the lowest offset that its member does not know to
//! be settled. Messages are handed to librdkafka only while a broker can be reached. A member that heard nothing for its lease
//! joins anew, and a broker that comes back with the group as it was waits one lease for the member that it knew: after an
//! outage longer than the lease, fetching begins that much later.
//!
//! # Native access
//!
//! `Topic::native` takes topics as they are. `native("librdkafka.<property>", ..)` on a subscription or producer passes a
//! property for it alone. Members of groups show as `{client_id}-{member}`.
//!
//! # Limits
//!
#![doc = include_str!("capabilities.md")]
//!
//! * A group that has members cannot be deleted or moved.
//! * Of one partition at most 16,384 messages are between the oldest that is not settled and the newest that was delivered, so that a
//!   commit can say of each of them what became of it. A subscription with a larger `max_in_flight` needs partitions for it.
//! * Retention by number of messages, or of what is unhandled only, is refused: a topic keeps by age.
//! * While a partition that moves is waited for (a delivery in hand), others of the same revocation wait too: at most 10 s,
//!   under `PerKey` 200 s.
//! * A broadcast does not see partitions that are added while it runs.
//! * What is redriven to a group that keeps the order of keys is written to the topic itself, with the name of the group:
//!   other groups and broadcasts of this library pass it by, programs without it see it. On native topics it comes by the retry
//!   topic, beside later messages of its key.
//! * `Admin::pending` lists deliveries of this connection only, and backlog counts are upper bounds.
//! * Brokers do not tell their version; `Capabilities::server` names the cluster's id.

mod admin;
mod answers;
mod backlog;
mod block;
mod broadcast;
mod client;
mod commit;
mod connect;
mod delay;
mod driver;
mod fault;
mod ffi;
mod group;
mod letters;
mod member;
mod partition;
mod record;
mod relay;
mod reports;
mod send;
mod spread;
mod start;
mod thread;
mod threads;
mod topology;
mod url;
mod wire;

pub use connect::{connect, connect_with};
