//! The RabbitMQ backend of anymq, over AMQP 0-9-1.
//!
//! Programs use it through the `anymq` crate (feature `amqp`) and a URL; [`connect`] is the same without the facade.
//!
//! # URL
//!
//! `amqp[s]://[user:password@]host[:port][,host2[:port2]][/vhost][?parameters]`. Without user it is `guest`; without path, or with
//! `/` alone, the virtual host is `/`; `/shop` is `shop`, and one that is called `/shop` is written `/%2fshop`. With several
//! hosts the next is tried when one does not answer.
//!
//! | parameter | default | meaning |
//! |---|---|---|
//! | `queue_type` | `quorum` | type of the queues that are made: `quorum` or `classic` |
//! | `heartbeat` | `5s` | a connection silent for twice this is dead |
//! | `connect_timeout` | `30s` | longest wait for a broker that is down at start |
//! | `confirm_timeout` | `20s` | longest wait for a confirmation; then the channel is made again and the message sent again, with its id |
//! | `name` | `anymq` | beginning of the connections' names in RabbitMQ's listings |
//! | `ca` | the system's | PEM file of further authorities (`amqps`) |
//! | `cert`, `key` | none | PEM files of the client's certificate (`amqps`); without a password the login is by it (`EXTERNAL`) |
//!
//! Times are more than nothing and at most ten years (`heartbeat`: 1 s to 1 h; `confirm_timeout`: from 1 s).
//! Anything else is an error that names it. A wrong password, missing rights and TLS errors fail at once.
//!
//! # Mapping
//!
//! | here | on RabbitMQ |
//! |---|---|
//! | topic `orders` | durable topic exchange `orders` |
//! | group `billing` | durable queue `orders..billing`, bound with `#` |
//! | dead letters | durable queue `orders..billing..dlq` |
//! | delays | queues `orders..billing..retry..1000` (and 5 s, 30 s, 2 min, 10 min, 1 h), made when first needed |
//! | delays of several steps | queues `orders..billing..step..1000` (and so on) before the last one, and between them `orders..billing..steps` |
//! | crash suspects | queue `orders..billing..alone`, empty unless a consumer died |
//! | broadcast | an exclusive queue, gone with its session |
//! | broadcast with `queue-type=stream` | stream `orders..stream`, bound with `#` |
//! | `Topic::native("jobs")`, `native("queue://jobs")` | that queue, as it is: sent to by the default exchange, never made |
//! | `Topic::native("exchange://logs")` | that exchange; groups are queues `logs..group` bound to it |
//!
//! Messages are persistent, published `mandatory` and confirmed. Key, exact timestamp and tombstones are headers `x-mq-…`, which
//! receivers do not see; header values of other programs arrive as bytes (numbers as text). Headers `amqp.routing-key`,
//! `amqp.priority`, `amqp.correlation-id`, `amqp.reply-to`, `amqp.type`, `amqp.app-id`, `amqp.content-encoding` and (sending)
//! `amqp.expiration` are the properties of that name, both ways. `CC` and `BCC`, which RabbitMQ takes for more routing keys, are headers
//! like others here. What the server would close the channel for is refused before it is sent.
//!
//! No queue argument derives from a setting that programs tune (attempts, delays, prefetch): changing one and starting again
//! works. Quorum queues get an `x-delivery-limit` of 1,000,000, since RabbitMQ 4 has one of 20 otherwise. What exists with other
//! arguments is refused once, with the broker's words.
//!
//! # Delivery
//!
//! At least once. A send is `Ok` when every queue that took the message confirmed it (level `Disk`; a quorum queue of a cluster
//! is on a majority, which AMQP does not tell). `Unroutable`: no queue took it. A negative confirmation is `Unknown`: with
//! several groups, some may have it. Two connections, since an alarm stops everything on one that publishes; under an alarm
//! sends wait, within the caller's time limit, and acknowledgements go out.
//!
//! AMQP never answers an acknowledgement, so its level is `Sent`. An awaited one is told when the broker has *read* it; a
//! broker that is killed within about a second may still bring the message again.
//!
//! # Ordering
//!
//! A queue is in order; several members, retries and redeliveries are not. `Ordering::PerKey` is refused. The native option
//! `single-active` gives one member at a time.
//!
//! # Redelivery
//!
//! A failed message is copied to the group's delay queue with its attempt number, and acknowledged when the copy is confirmed;
//! it survives the member and the server, waits behind no longer delay, and any length is reached in steps. Between two steps it
//! comes into a queue that every member looks into all the time, busy, paused or not, and passes on from; only for its last
//! second it comes into the group's queue, where the member that takes it waits for that. Dead letters are published with their
//! envelope and confirmed first; the broker's own dead-lettering is only a net under that (messages with an expiration).
//!
//! What a dead member had comes again at once (a socket that broke), or after two heartbeats (a machine that vanished). A
//! message that came back as often as the policy has attempts is handed over alone, and recorded before; when its consumer
//! dies with it `crash_trials` times it is dead-lettered as `crash`. What a lost connection gave back is no death: a member
//! that saw the broker away counts nothing that was recorded before. A recorded one goes to a member with nothing in hand, if there
//! is one; a paused one, or one without room, takes none. Quorum queues count how often a message came back;
//! on classic ones it is copied with its count, which takes a second. Attempt numbers are at least: hand-overs
//! that ended in a crash are counted only for suspects.
//!
//! # Reconnect
//!
//! The client's own recovery is off. Each consumer and producer has a supervisor that attaches again after a lost connection,
//! closed channel, deleted queue, consumer time-out or missing exchange; what was in hand turns stale, and what was made by
//! this program under `Provisioning::Create` is made again, with one `Gap`. Nobody is told when an exchange is deleted, so what was
//! bound is bound once more every 10 s: a member hears again what is sent to an exchange that somebody else made anew, and one whose
//! exchange is gone begins a new session (and waits for it where it is another program's).
//!
//! # Native access
//!
//! Options of a subscription: `routing-key` (patterns, comma-separated), `headers` (`a=1,b=2`) with `headers-match` (`all`,
//! `any`), `queue-type`, `max-priority`, `message-ttl`, `max-length`, `max-length-bytes`, `single-active`. Options of a producer:
//! `routing-key` (of messages that name none), `queue-type` (of the groups it makes). Unknown ones are refused, and so are those that
//! would mean nothing: `headers` for a topic, which looks at none, or what makes or binds a queue for one that is there already. The
//! queue of a broadcast takes those of the priority, of time and of length.
//! `Retention::Handled { max }` bounds each group's queue.
//!
//! **Streams** are logs beside the queues: `queue-type=stream` on a producer makes the topic's stream before the first send, and on a
//! broadcast subscription reads it, or `native("queue://name")`. `stream-offset` says from where: `first`, `last`, `next` (the
//! default), an offset, `@` and seconds since 1970, or an age like `30m`. `max-age`, `max-length-bytes` and `Retention::log_for`
//! bound it. What a stream can do is not what a queue can: everybody reads everything, from anywhere, as often as they like, with
//! its offset as position; nothing is acknowledged, tried again or dead-lettered, and groups are refused, since the broker keeps no
//! position for them over AMQP. A slow reader is waited for. After a lost connection a reader goes on behind what it took, without
//! a gap, unless retention removed what it had not read, or another message is where the last one was, or nothing comes where
//! something must be: then it is another stream, read from its beginning after a `Gap`. A program that starts again says from where.
//!
//! # Limits
//!
//! What quorum and classic queues can do, feature by feature, with the tests behind each word, is the table in
//! `docs/capabilities.md`, made from a run of the suite.
//!
//! * Key and headers together fit one frame of the server (128 KiB by default), less 6 KiB that are kept for the properties and the
//!   envelope of a dead letter; the payload is bounded by `max_message`. Where copies of large headers would not fit, they travel
//!   in one header of ours, which other programs do not read.
//! * Groups see what is sent after they were made. A producer's `groups` makes them before the first send.
//! * All groups of a dead-letter topic or a native queue share its one queue.
//! * `Admin::delete_topic` deletes the topic's stream and the groups that this connection knows; AMQP does not list bindings. Members and pending
//!   deliveries are not listed either.
//! * A backlog is exact while a group has neither members nor ever had a long delay; else each number is a bound, since AMQP tells
//!   neither what members hold nor what is on its way between two queues. With members, `ready` is at least what waits in the
//!   group's queue, all of which is due but for the last second of a delay; without, at most that and what is between two steps,
//!   which nobody passes on then. `delayed` is at least what delay queues hold; with members
//!   one that was made within the last minute may be missing. `dead` is at least what is in the queue of dead letters: who lists
//!   them or sends them back holds them meanwhile, unseen.
//! * Where `…..steps` was deleted by hand, members make it again at once. A step that ended meanwhile, or without any member, is
//!   not lost, but the broker tries it again only after three minutes.
//! * Looking at dead letters takes them for a moment and gives them back.
//! * Delays are compared by the clocks of the members: keep them within the precision you need.
//! * A message that the server finds too large (its `max_message_size`) closes the channel: it is `TooLarge`, and its neighbours
//!   are sent again.
//! * The server's version is read on a socket of its own when a client connects; its log notes that this one ended early.

mod admin;
mod alone;
mod bound;
mod broadcast;
mod broker;
mod channels;
mod connect;
mod copies;
mod decode;
mod delay;
mod driver;
mod farewell;
mod fault;
mod fetch;
mod flush;
mod greeting;
mod letters;
mod line;
mod options;
mod probe;
mod produce;
mod read;
mod returns;
mod same;
mod send;
mod settle;
mod steps;
mod stream;
mod topology;
mod url;
mod wire;

pub use broker::{connect, connect_with_hooks};
