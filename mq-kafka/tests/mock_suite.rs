//! The quick part of the conformance suite on librdkafka's mock cluster: no server, no Java, some seconds. What the mock cannot
//! do is left to the real one: administration, faults of the line, starts by time.
#![allow(clippy::unwrap_used, clippy::panic)]

use mq_api::{
    Admin, Broker, Capabilities, CloseReport, Consumer, HealthWatch, Producer, ProducerSpec, Result, Subscription,
    async_trait,
};
use mq_conformance::{Clock, Connection, Environment, Factory, Options, Pace};
use rdkafka::mocking::MockCluster;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Asks the mock for a topic; it cannot be asked by the protocol.
type Asked = (String, u32, mpsc::Sender<()>);

/// The mock's handle stays on the thread that made it.
fn start_mock() -> (String, mpsc::Sender<Asked>) {
    let (tell, told) = mpsc::channel();
    let (ask, asked) = mpsc::channel::<Asked>();
    std::thread::spawn(move || {
        let cluster = MockCluster::new(1).unwrap();
        tell.send(cluster.bootstrap_servers()).unwrap();
        while let Ok((name, partitions, done)) = asked.recv() {
            // It may be there already.
            let _ = cluster.create_topic(&name, partitions as i32, 1);
            let _ = done.send(());
        }
    });
    (told.recv().unwrap(), ask)
}

struct Mock {
    servers: String,
    ask: mpsc::Sender<Asked>,
}

impl Factory for Mock {
    fn name(&self) -> String {
        "kafka".to_owned()
    }

    fn environment(&self, _: Clock, _run: &str) -> Arc<dyn Environment> {
        Arc::new(World { servers: self.servers.clone(), ask: self.ask.clone(), numbers: AtomicU64::new(0) })
    }
}

struct World {
    servers: String,
    ask: mpsc::Sender<Asked>,
    numbers: AtomicU64,
}

#[async_trait]
impl Environment for World {
    fn pace(&self) -> Pace {
        // The mock lets a group wait for 3 s before its first member has anything: a session has to outlast that.
        Pace { lease: Duration::from_secs(6), ..Pace::real() }
    }

    fn settles_until_answered(&self) -> bool {
        true
    }

    async fn connect_with(&self, parameters: &[(&str, &str)]) -> Result<Connection> {
        let mut url = format!("kafka://{}?min_session=1s&librdkafka.fetch.wait.max.ms=20", self.servers);
        for (name, value) in parameters {
            url.push_str(&format!("&{name}={value}"));
        }
        let inner = mq_kafka::connect(&url).await?;
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        Ok(Connection { broker: Arc::new(WithTopics { inner, ask: self.ask.clone() }), number })
    }
}

/// The library's broker, before which somebody makes the topics.
struct WithTopics {
    inner: Arc<dyn Broker>,
    ask: mpsc::Sender<Asked>,
}

impl WithTopics {
    fn make(&self, name: &str, partitions: u32) {
        let (done, is_done) = mpsc::channel();
        self.ask.send((name.to_owned(), partitions, done)).unwrap();
        is_done.recv().unwrap();
    }
}

#[async_trait]
impl Broker for WithTopics {
    fn capabilities(&self) -> Arc<Capabilities> {
        self.inner.capabilities()
    }

    async fn open_producer(&self, spec: ProducerSpec) -> Result<Arc<dyn Producer>> {
        if spec.topic.validate().is_ok() {
            self.make(spec.topic.as_str(), spec.partitions.unwrap_or(12));
        }
        self.inner.open_producer(spec).await
    }

    async fn open_consumer(&self, sub: Subscription) -> Result<Box<dyn Consumer>> {
        if sub.topic.validate().is_ok() {
            let letters = sub.topic.dead_letters_of().is_some();
            self.make(sub.topic.as_str(), if letters { 1 } else { sub.partitions.unwrap_or(12) });
            if let Some(letters) = sub.dead_letter_topic() {
                self.make(letters.as_str(), 1);
            }
            if let Some(group) = sub.group_name() {
                self.make(&format!("{}..{group}..retry", sub.topic), 4);
            }
        }
        self.inner.open_consumer(sub).await
    }

    fn admin(&self) -> Arc<dyn Admin> {
        self.inner.admin()
    }

    fn health(&self) -> HealthWatch {
        self.inner.health()
    }

    async fn close(&self, deadline: Duration) -> CloseReport {
        self.inner.close(deadline).await
    }
}

/// Tests that need nothing that the mock lacks.
const QUICK: &[&str] = &[
    "p1_1_a_message_arrives_whole",
    "p1_1_contents_of_every_size_arrive",
    "p1_1_no_key_and_empty_key_differ",
    "p1_1_the_same_id_twice_is_two_messages",
    "p1_1_tombstone_and_empty_payload_differ",
    "p1_2_bad_names_are_refused_by_name",
    "p1_3_broadcast_gets_what_is_sent_from_now_on",
    "p1_4_a_delivery_says_where_it_is_from",
    "p1_6_levels_are_stated_and_required",
    "p2_2_nobody_to_take_it_is_told_or_stored",
    "p2_3_a_refused_message_was_not_sent",
    "p2_4_a_batch_has_one_result_each_in_order",
    "p2_4_a_large_batch_is_stored_once_and_in_order",
    "p2_5_a_key_keeps_its_order_when_sends_run_concurrently",
    "p2_7_too_large_is_refused_and_the_producer_goes_on",
    "p2_8_a_closed_producer_refuses",
    "p2_8_a_dropped_send_is_not_sent_or_counted",
    "p2_8_close_flushes_what_was_accepted",
    "p3_1_a_message_stays_until_it_is_acked",
    "p3_1_what_retention_took_is_a_gap",
    "p3_2_a_message_over_the_byte_bound_comes_alone",
    "p3_2_no_more_bytes_in_hand_than_asked_for",
    "p3_2_no_more_in_hand_than_asked_for",
    "p3_2_parked_messages_have_a_bound_of_their_own",
    "p3_3_by_default_a_group_gets_the_oldest",
    "p3_3_latest_gets_what_is_sent_from_now_on",
    "p3_3_replay_from_a_position",
    "p3_4_a_cancelled_recv_loses_nothing",
    "p3_5_a_typed_tombstone_is_none",
    "p3_6_a_broadcast_receiver_that_falls_behind_is_told",
    "p3_7_a_retried_message_keeps_its_place",
    "p3_7_different_keys_run_concurrently",
    "p3_7_messages_without_key_have_no_order",
    "p3_7_what_waits_behind_a_delayed_key_is_bounded",
    "p4_0_a_settlement_takes_effect_at_the_call",
    "p4_0_the_answer_says_what_became_of_it",
    "p4_10_a_paused_subscription_takes_nothing_and_says_so",
    "p4_10_what_is_in_hand_is_settled_while_paused",
    "p4_1_an_awaited_ack_waits_for_no_tick",
    "p4_1_whole_batches_are_acked_at_once",
    "p4_2_a_delay_holds_back_no_neighbour",
    "p4_2_jitter_only_adds",
    "p4_3_a_release_goes_back_at_once_and_is_not_counted",
    "p4_4_a_batch_dropped_is_nacked",
    "p4_4_a_dropped_delivery_is_a_nack",
    "p4_6_past_max_processing_it_is_a_nack",
    "p4_9_attempt_numbers_rise_by_one",
    "p5_1_dead_letters_have_no_dead_letters",
    "p5_1_off_may_mean_discard",
    "p5_1_off_may_mean_for_ever",
    "p5_3_redrive_has_a_rate",
];

#[test]
fn the_quick_part_of_the_suite_passes_on_the_mock() {
    let (servers, ask) = start_mock();
    let factory: Arc<dyn Factory> = Arc::new(Mock { servers, ask });
    let cases: Vec<_> = mq_conformance::all().into_iter().filter(|case| QUICK.contains(&case.name)).collect();
    assert_eq!(cases.len(), QUICK.len(), "a test of the list is gone");
    let options = Options { parallel: 8, partitions: Some(1), ..Options::default() };
    let report = mq_conformance::run(&factory, &cases, &options);
    println!("{}", report.last_line());
    assert_eq!(report.failed(), 0, "{}\n{}", report.table(), report.histories());
    assert_eq!(report.last_line(), format!("{} passed, 0 failed, 0 unsupported", QUICK.len()));
}
