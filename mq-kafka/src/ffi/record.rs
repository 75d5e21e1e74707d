//! Records as librdkafka hands them out, and a partition's queue that hands out many at a time: an event for each, as the
//! `rdkafka` crate takes them, costs an allocation and several looks at the clock.

use rdkafka::bindings as sys;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Timestamp};
use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A record that lives at least as long as this.
#[derive(Clone, Copy)]
pub(crate) struct Raw<'m> {
    ptr: NonNull<sys::rd_kafka_message_t>,
    alive: PhantomData<&'m ()>,
}

impl<'m> Raw<'m> {
    /// The record of a message that the `rdkafka` crate handed out.
    pub(crate) fn of(message: &'m BorrowedMessage<'_>) -> Option<Self> {
        Some(Self { ptr: NonNull::new(message.ptr())?, alive: PhantomData })
    }

    fn fields(&self) -> &'m sys::rd_kafka_message_t {
        // SAFETY: alive by the lifetime, and librdkafka does not change these fields of what it handed out.
        unsafe { self.ptr.as_ref() }
    }

    /// # Safety
    /// The bytes belong to this record, or the pointer is null.
    unsafe fn bytes(&self, at: *const std::ffi::c_void, n: usize) -> Option<&'m [u8]> {
        // SAFETY: by the caller; they live as long as the record.
        (!at.is_null()).then(|| unsafe { std::slice::from_raw_parts(at.cast::<u8>(), n) })
    }

    pub(crate) fn key(&self) -> Option<&'m [u8]> {
        let fields = self.fields();
        // SAFETY: librdkafka's pair of pointer and length.
        unsafe { self.bytes(fields.key, fields.key_len) }
    }

    pub(crate) fn payload(&self) -> Option<&'m [u8]> {
        let fields = self.fields();
        // SAFETY: as above.
        unsafe { self.bytes(fields.payload, fields.len) }
    }

    pub(crate) fn partition(&self) -> i32 {
        self.fields().partition
    }

    pub(crate) fn offset(&self) -> i64 {
        self.fields().offset
    }

    pub(crate) fn topic(&self) -> String {
        let topic = self.fields().rkt;
        if topic.is_null() {
            return String::new();
        }
        // SAFETY: the record keeps its topic, whose name ends with a zero byte.
        unsafe { CStr::from_ptr(sys::rd_kafka_topic_name(topic)) }.to_string_lossy().into_owned()
    }

    pub(crate) fn timestamp(&self) -> Timestamp {
        let mut kind = sys::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_NOT_AVAILABLE;
        // SAFETY: the record is alive, and the kind is ours.
        let ms = unsafe { sys::rd_kafka_message_timestamp(self.ptr.as_ptr(), &mut kind) };
        match kind {
            _ if ms == -1 => Timestamp::NotAvailable,
            sys::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_CREATE_TIME => Timestamp::CreateTime(ms),
            sys::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_LOG_APPEND_TIME => Timestamp::LogAppendTime(ms),
            sys::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_NOT_AVAILABLE => Timestamp::NotAvailable,
        }
    }

    /// The headers. Names that are not UTF-8 are read with replacement characters: `rdkafka` panics on them.
    pub(crate) fn headers(&self, mut each: impl FnMut(&str, Option<&[u8]>)) {
        let mut list = ptr::null_mut();
        // SAFETY: the record is alive; names and values live as long as it does.
        unsafe {
            let none = sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR;
            if sys::rd_kafka_message_headers(self.ptr.as_ptr(), &mut list) != none {
                return;
            }
            for index in 0.. {
                let (mut name, mut value, mut size) = (ptr::null(), ptr::null(), 0usize);
                if sys::rd_kafka_header_get_all(list, index, &mut name, &mut value, &mut size) != none {
                    return;
                }
                let name = CStr::from_ptr(name).to_string_lossy();
                let value = (!value.is_null()).then(|| std::slice::from_raw_parts(value.cast::<u8>(), size));
                each(&name, value);
            }
        }
    }

    /// What stands in the place of a record when something went wrong, in librdkafka's words.
    fn error(&self) -> Option<(RDKafkaErrorCode, String)> {
        let code = self.fields().err;
        if code == sys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
            return None;
        }
        // SAFETY: the record is alive, and so is the text, which is null or ends with a zero byte.
        let text = unsafe { super::text(sys::rd_kafka_message_errstr(self.ptr.as_ptr())) };
        Some((code.into(), text))
    }
}

/// A record of our own, given back when it is dropped.
pub(crate) struct Taken(NonNull<sys::rd_kafka_message_t>);

// SAFETY: one thread at a time has it, and librdkafka's records may be read and given back on any.
unsafe impl Send for Taken {}

impl Taken {
    pub(crate) fn raw(&self) -> Raw<'_> {
        Raw { ptr: self.0, alive: PhantomData }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // SAFETY: it is ours, and nobody else's.
        unsafe { sys::rd_kafka_message_destroy(self.0.as_ptr()) }
    }
}

/// Taken at a time: more saves nothing any more.
const MOST: usize = 64;
/// Held here beside what librdkafka counts as fetched, about: large records are taken one by one.
const MOST_BYTES: usize = 64 << 10;

/// A queue that told nothing is looked into all the same, once for so many times that it is asked: whatever librdkafka does with
/// its queues, a record is late then, and not lost.
const LOOKS: u32 = 64;

/// The queue of one partition.
pub(crate) struct Queue<C: ConsumerContext + 'static> {
    /// Taken and not asked for yet. First, so that it is given back before the client can go.
    ahead: VecDeque<Taken>,
    /// Something may be there: it came while the queue was empty, or there was more than was taken. To find a hundred empty queues
    /// empty would cost more than to read the one that is not.
    filled: Arc<AtomicBool>,
    /// Looks that were left out.
    left_out: u32,
    /// Bytes of a record, by the last ones.
    size: usize,
    queue: NonNull<sys::rd_kafka_queue_t>,
    /// Has the call-back.
    _split: PartitionQueue<C>,
    consumer: Arc<BaseConsumer<C>>,
}

// SAFETY: librdkafka's queues may be used from any thread; one at a time has this.
unsafe impl<C: ConsumerContext> Send for Queue<C> {}

impl<C: ConsumerContext> Queue<C> {
    /// Splits the queue of a partition from its consumer's; `None` when there is no such partition. `wake` is called when something
    /// comes into the empty queue, on a thread of librdkafka's.
    pub(crate) fn of(
        consumer: &Arc<BaseConsumer<C>>,
        topic: &str,
        partition: i32,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Option<Self> {
        let mut split = consumer.split_partition_queue(topic, partition)?;
        let filled = Arc::new(AtomicBool::new(true));
        let fills = filled.clone();
        split.set_nonempty_callback(move || {
            fills.store(true, Ordering::Release);
            wake();
        });
        let topic = CString::new(topic).ok()?;
        // SAFETY: the client is alive, and librdkafka copies the name; the reference is given back by `drop`.
        let queue =
            unsafe { sys::rd_kafka_queue_get_partition(consumer.client().native_ptr(), topic.as_ptr(), partition) };
        let (consumer, queue) = (consumer.clone(), NonNull::new(queue)?);
        let ahead = VecDeque::with_capacity(MOST);
        Some(Self { ahead, filled, left_out: 0, size: MOST_BYTES, queue, _split: split, consumer })
    }

    /// Whether it is worth it to ask for the [`next`](Self::next).
    pub(crate) fn may_have(&mut self) -> bool {
        if self.ahead.is_empty() && !self.filled.load(Ordering::Acquire) {
            self.left_out += 1;
            if self.left_out < LOOKS {
                return false;
            }
        }
        self.left_out = 0;
        true
    }

    /// The next record, if there is one already.
    pub(crate) fn next(&mut self) -> Option<Result<Taken, KafkaError>> {
        if self.ahead.is_empty() {
            // Before it is looked into: what comes afterwards says so again.
            self.filled.store(false, Ordering::Release);
            self.take();
            if !self.ahead.is_empty() {
                self.filled.store(true, Ordering::Release);
            }
        }
        let taken = self.ahead.pop_front()?;
        let Some((code, text)) = taken.raw().error() else { return Some(Ok(taken)) };
        // As the crate does it.
        self.consumer.client().context().error(KafkaError::Global(code), &text);
        Some(Err(KafkaError::MessageConsumption(code)))
    }

    fn take(&mut self) {
        let most = (MOST_BYTES / self.size.max(1)).clamp(1, MOST);
        let mut records = [ptr::null_mut(); MOST];
        // SAFETY: the queue is ours, and there is room for as many as are asked for; each is ours from then on.
        let n = unsafe { sys::rd_kafka_consume_batch_queue(self.queue.as_ptr(), 0, records.as_mut_ptr(), most) };
        let n = usize::try_from(n).unwrap_or_default();
        self.ahead.extend(records.into_iter().take(n).filter_map(NonNull::new).map(Taken));
        let bytes = |taken: &Taken| taken.raw().payload().map_or(0, <[u8]>::len);
        if !self.ahead.is_empty() {
            self.size = self.ahead.iter().map(bytes).sum::<usize>() / self.ahead.len();
        }
    }
}

impl<C: ConsumerContext> Drop for Queue<C> {
    fn drop(&mut self) {
        self.ahead.clear();
        // SAFETY: the reference that `of` got.
        unsafe { sys::rd_kafka_queue_destroy(self.queue.as_ptr()) }
    }
}
