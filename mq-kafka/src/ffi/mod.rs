//! The few calls of librdkafka that the `rdkafka` crate does not offer, or offers in a form that can panic. The only module
//! with unsafe code; each function states why it is sound.
#![allow(unsafe_code)]

mod record;

use bytes::Bytes;
use rdkafka::bindings as sys;
use rdkafka::client::Client;
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::{ClientContext, TopicPartitionList};
use std::ffi::{CStr, CString};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use record::{Queue, Raw};

/// What became of a message, by librdkafka's own account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Persisted {
    No,
    Perhaps,
    Yes,
}

/// A delivery report.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) ticket: u64,
    pub(crate) error: Option<RDKafkaErrorCode>,
    pub(crate) persisted: Persisted,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
}

/// The queue on which a producer's delivery reports arrive.
pub(crate) struct Reports(*mut sys::rd_kafka_queue_t);

// SAFETY: librdkafka's queues may be used from any thread.
unsafe impl Send for Reports {}

impl Reports {
    /// The main queue of a client; the caller keeps the client alive as long as this.
    pub(crate) fn of<C: ClientContext>(client: &Client<C>) -> Self {
        // SAFETY: the client's pointer is valid; the call returns a counted reference that `drop` gives back.
        Self(unsafe { sys::rd_kafka_queue_get_main(client.native_ptr()) })
    }

    /// Waits at most `timeout` for one event; reports go to `report`, errors of the client to `error`. False: nothing came.
    pub(crate) fn poll(
        &self,
        timeout: Duration,
        mut report: impl FnMut(Report),
        mut error: impl FnMut(RDKafkaErrorCode, String),
    ) -> bool {
        let ms = timeout.as_millis().min(60_000) as i32;
        // SAFETY: the queue is valid until `drop`; the event is destroyed below, after the last use of its messages.
        unsafe {
            let event = sys::rd_kafka_queue_poll(self.0, ms);
            if event.is_null() {
                return false;
            }
            match sys::rd_kafka_event_type(event) {
                sys::RD_KAFKA_EVENT_DR => loop {
                    let message = sys::rd_kafka_event_message_next(event);
                    let Some(m) = message.as_ref() else { break };
                    let persisted = match sys::rd_kafka_message_status(message) {
                        sys::rd_kafka_msg_status_t::RD_KAFKA_MSG_STATUS_NOT_PERSISTED => Persisted::No,
                        sys::rd_kafka_msg_status_t::RD_KAFKA_MSG_STATUS_POSSIBLY_PERSISTED => Persisted::Perhaps,
                        sys::rd_kafka_msg_status_t::RD_KAFKA_MSG_STATUS_PERSISTED => Persisted::Yes,
                    };
                    let none = sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR;
                    let error = (m.err != none).then(|| m.err.into());
                    let ticket = m._private as usize as u64;
                    report(Report { ticket, error, persisted, partition: m.partition, offset: m.offset });
                },
                sys::RD_KAFKA_EVENT_ERROR => {
                    let code = sys::rd_kafka_event_error(event).into();
                    error(code, text(sys::rd_kafka_event_error_string(event)));
                }
                _ => {}
            }
            sys::rd_kafka_event_destroy(event);
        }
        true
    }
}

impl Drop for Reports {
    fn drop(&mut self) {
        // SAFETY: the reference that `of` got.
        unsafe { sys::rd_kafka_queue_destroy(self.0) }
    }
}

/// # Safety
/// Null, or a string that ends with a zero byte.
unsafe fn text(p: *const std::ffi::c_char) -> String {
    if p.is_null() {
        return String::new();
    }
    // SAFETY: by the caller.
    unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned()
}

/// One entry of a list of partitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    /// As librdkafka has it: below zero is a special value.
    pub(crate) offset: i64,
    pub(crate) metadata: Bytes,
    pub(crate) error: Option<RDKafkaErrorCode>,
}

/// The entries of a list. `elements` of the crate aborts on empty lists in debug builds, and its `metadata` panics on what
/// another program wrote.
pub(crate) fn entries(list: &TopicPartitionList) -> Vec<Entry> {
    let raw = list.ptr();
    // SAFETY: the list is alive; it holds `cnt` elements, each with a topic, and metadata of the size it says.
    unsafe {
        let n = (*raw).cnt.max(0) as usize;
        if n == 0 || (*raw).elems.is_null() {
            return Vec::new();
        }
        std::slice::from_raw_parts((*raw).elems, n)
            .iter()
            .map(|e| Entry {
                topic: text(e.topic).into(),
                partition: e.partition,
                offset: e.offset,
                metadata: match e.metadata.is_null() {
                    true => Bytes::new(),
                    false => {
                        Bytes::copy_from_slice(std::slice::from_raw_parts(e.metadata.cast::<u8>(), e.metadata_size))
                    }
                },
                error: (e.err != sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR).then(|| e.err.into()),
            })
            .collect()
    }
}

/// The generation of the group that this client is a member of: it rises with each change of ownership, for all members.
pub(crate) fn group_generation<C: ClientContext>(client: &Client<C>) -> u64 {
    // SAFETY: the client is alive; the metadata is ours until it is destroyed.
    unsafe {
        let metadata = sys::rd_kafka_consumer_group_metadata(client.native_ptr());
        if metadata.is_null() {
            return 0;
        }
        let generation = sys::rd_kafka_consumer_group_metadata_generation_id(metadata);
        sys::rd_kafka_consumer_group_metadata_destroy(metadata);
        u64::try_from(generation).unwrap_or(0)
    }
}

/// Commits, and waits for the answer as long as `waiting` says; `None` when it no longer does. The client's own synchronous
/// commit has no limit of time: on a member that has left its group it never returns.
pub(crate) fn commit<C: ClientContext>(
    client: &Client<C>,
    list: &TopicPartitionList,
    waiting: impl Fn() -> bool,
) -> Option<Result<(), RDKafkaErrorCode>> {
    // SAFETY: client and list are alive, and librdkafka copies the list; the queue is ours until it is destroyed, after which
    // a late answer goes nowhere; the event and the list in it are ours until the event is destroyed.
    unsafe {
        let queue = sys::rd_kafka_queue_new(client.native_ptr());
        let asked = sys::rd_kafka_commit_queue(client.native_ptr(), list.ptr(), queue, None, ptr::null_mut());
        let mut answer = (asked != sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR).then(|| Err(asked.into()));
        while answer.is_none() && waiting() {
            let event = sys::rd_kafka_queue_poll(queue, GRAIN_MS);
            if !event.is_null() {
                answer = Some(read_commit(event));
                sys::rd_kafka_event_destroy(event);
            }
        }
        sys::rd_kafka_queue_destroy(queue);
        answer
    }
}

/// How often one who waits is asked whether it still does: an answer comes at once.
const GRAIN_MS: i32 = 20;

/// # Safety
/// An event that is alive.
unsafe fn read_commit(event: *mut sys::rd_kafka_event_t) -> Result<(), RDKafkaErrorCode> {
    let none = sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR;
    // SAFETY: by the caller; the list belongs to the event and holds `cnt` elements.
    unsafe {
        let failed = sys::rd_kafka_event_error(event);
        if failed != none {
            return Err(failed.into());
        }
        let list = sys::rd_kafka_event_topic_partition_list(event);
        if list.is_null() || (*list).cnt <= 0 || (*list).elems.is_null() {
            return Ok(());
        }
        let all = std::slice::from_raw_parts((*list).elems, (*list).cnt as usize);
        all.iter().find(|e| e.err != none).map_or(Ok(()), |e| Err(e.err.into()))
    }
}

/// The partition of a key, of `count`, as the Java client finds it.
pub(crate) fn murmur2(key: &[u8], count: i32) -> i32 {
    let none: *mut std::ffi::c_void = std::ptr::null_mut();
    // SAFETY: the key is valid for its length, and the function looks at nothing else but the count.
    unsafe {
        sys::rd_kafka_msg_partitioner_murmur2(none.cast(), key.as_ptr().cast(), key.len(), count.max(1), none, none)
    }
}

/// Has a producer write what it holds without waiting for more, for at most `limit`, or until nothing is open any more. Blocks.
/// While it does, `linger.ms` counts for nothing.
pub(crate) fn flush<C: ClientContext>(client: &Client<C>, limit: Duration) {
    let ms = limit.as_millis().min(60_000) as i32;
    // SAFETY: the client is alive. The reports are events, so that librdkafka only waits here and serves no queue: the thread
    // that reads them has to be another. Its answer, whether all was written in time, is of no use: the reports tell.
    let _ = unsafe { sys::rd_kafka_flush(client.native_ptr(), ms) };
}

/// Names brokers to a client, in the form of `bootstrap.servers`. Those that it has stay.
pub(crate) fn add_brokers<C: ClientContext>(client: &Client<C>, brokers: &str) {
    let Ok(brokers) = CString::new(brokers) else { return };
    // SAFETY: the client is alive, and librdkafka copies the string.
    let known = unsafe { sys::rd_kafka_brokers_add(client.native_ptr(), brokers.as_ptr()) };
    tracing::debug!(target: "librdkafka", known, "brokers named again");
}

/// What tells a topic from one of the same name before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TopicId(i64, i64);

/// The id of a topic; `None` if there is no such topic, or the brokers (before 2.8) have no ids. Blocks for at most `timeout`.
pub(crate) fn topic_id<C: ClientContext>(
    client: &Client<C>,
    topic: &str,
    timeout: Duration,
) -> Result<Option<TopicId>, RDKafkaErrorCode> {
    let Ok(name) = CString::new(topic) else { return Ok(None) };
    let ms = timeout.as_millis().min(60_000) as i32;
    let timed_out = sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR__TIMED_OUT;
    // SAFETY: the client is alive; the options, the collection and the queue are ours until they are destroyed below, and
    // librdkafka copies what the request needs of them. The result belongs to the event, which is destroyed last.
    unsafe {
        let rk = client.native_ptr();
        let queue = sys::rd_kafka_queue_new(rk);
        let options = sys::rd_kafka_AdminOptions_new(rk, sys::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS);
        sys::rd_kafka_AdminOptions_set_request_timeout(options, ms, ptr::null_mut(), 0);
        let mut names = [name.as_ptr()];
        let topics = sys::rd_kafka_TopicCollection_of_topic_names(names.as_mut_ptr(), 1);
        sys::rd_kafka_DescribeTopics(rk, topics, options, queue);
        let event = sys::rd_kafka_queue_poll(queue, ms.saturating_add(1_000));
        let found = match event.is_null() {
            true => Err(timed_out.into()),
            false => read_id(event),
        };
        if !event.is_null() {
            sys::rd_kafka_event_destroy(event);
        }
        sys::rd_kafka_TopicCollection_destroy(topics);
        sys::rd_kafka_AdminOptions_destroy(options);
        sys::rd_kafka_queue_destroy(queue);
        found
    }
}

/// # Safety
/// An event that is alive.
unsafe fn read_id(event: *mut sys::rd_kafka_event_t) -> Result<Option<TopicId>, RDKafkaErrorCode> {
    use sys::rd_kafka_resp_err_t as E;
    // SAFETY: by the caller; what is read belongs to the event, and each pointer is looked at before it is used.
    unsafe {
        let failed = sys::rd_kafka_event_error(event);
        if failed != E::RD_KAFKA_RESP_ERR_NO_ERROR {
            return Err(failed.into());
        }
        let result = sys::rd_kafka_event_DescribeTopics_result(event);
        let mut n = 0;
        let found = match result.is_null() {
            true => ptr::null_mut(),
            false => sys::rd_kafka_DescribeTopics_result_topics(result, &mut n),
        };
        if n == 0 || found.is_null() || (*found).is_null() {
            return Ok(None);
        }
        let error = sys::rd_kafka_TopicDescription_error(*found);
        match if error.is_null() { E::RD_KAFKA_RESP_ERR_NO_ERROR } else { sys::rd_kafka_error_code(error) } {
            E::RD_KAFKA_RESP_ERR_NO_ERROR => {}
            E::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART | E::RD_KAFKA_RESP_ERR__UNKNOWN_TOPIC => return Ok(None),
            code => return Err(code.into()),
        }
        let id = sys::rd_kafka_TopicDescription_topic_id(*found);
        if id.is_null() {
            return Ok(None);
        }
        let id = TopicId(sys::rd_kafka_Uuid_most_significant_bits(id), sys::rd_kafka_Uuid_least_significant_bits(id));
        Ok((id != TopicId(0, 0)).then_some(id))
    }
}
