//! The cluster: whether it is there, what it is, and topics looked up. Those that are made or verified are in `wanted`, what is
//! remembered of consumers in `past`.

mod past;
mod wanted;

use crate::client::{self, Ctx};
use crate::fault;
use crate::threads::Threads;
use crate::url::Settings;
use mq_api::{Durability, Error, ErrorKind, Result};
use mq_core::Env;
use parking_lot::{Mutex, RwLock};
use past::{Past, Reader};
pub(crate) use past::{Reading, Watched};
use rdkafka::admin::{AdminClient, AdminOptions, ResourceSpecifier};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
pub(crate) use wanted::{LARGEST, Wanted};

/// A single request to the cluster is answered within this, or it failed.
pub(crate) const REQUEST: Duration = Duration::from_secs(8);

/// The cluster, for everything that is not fetching or sending.
pub(crate) struct Cluster {
    pub(crate) settings: Arc<Settings>,
    pub(crate) env: Env,
    pub(crate) threads: Threads,
    looker: RwLock<Option<Arc<BaseConsumer<Ctx>>>>,
    ctx: Ctx,
    watched: Mutex<Vec<Weak<Watched>>>,
    /// What each consumer read last.
    read: Mutex<HashMap<Reader, Past>>,
    /// Whether brokers tell the ids of topics, once that is known.
    tells_ids: Mutex<Option<bool>>,
}

impl Cluster {
    pub(crate) fn new(settings: Arc<Settings>, env: Env) -> Result<Self> {
        let ctx = Ctx::default();
        let looker: BaseConsumer<Ctx> =
            client::base(&settings).create_with_context(ctx.clone()).map_err(|e| fault::error("kafka", e))?;
        Ok(Self {
            settings,
            env,
            threads: Threads::default(),
            looker: RwLock::new(Some(Arc::new(looker))),
            ctx,
            watched: Mutex::default(),
            read: Mutex::default(),
            tells_ids: Mutex::default(),
        })
    }

    /// Runs what blocks on a thread for it, counted as a task.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        job: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (cluster, handle) = (self.clone(), self.env.handle().clone());
        let job = self.env.spawn(async move { handle.spawn_blocking(move || job(&cluster)).await });
        match job.await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) | Err(error) => {
                Err(Error::new(ErrorKind::Other, "a request to the cluster was cut off").with_source(error))
            }
        }
    }

    /// Waits until a broker answers, or refuses, or `limit` has passed; the cluster's id. Blocks.
    pub(crate) fn wait_up(&self, limit: Duration) -> Result<Option<String>> {
        let until = Instant::now() + limit;
        loop {
            self.serve();
            if let Some(refusal) = self.ctx.refused() {
                return Err(refusal);
            }
            let step = Duration::from_millis(250).min(until.saturating_duration_since(Instant::now()));
            let looker = self.looker()?;
            let found = looker.client().fetch_metadata(Some(PROBE), step.max(Duration::from_millis(50)));
            // A broker that just started may name none at all, and then the client knows of none any more.
            let found = found.and_then(|found| match found.brokers().is_empty() {
                true => Err(KafkaError::MetadataFetch(Code::AllBrokersDown)),
                false => Ok(()),
            });
            match self.answered(&looker, found) {
                Ok(()) => {
                    return Ok(looker.client().fetch_cluster_id(Duration::from_millis(500)));
                }
                Err(error) if Instant::now() >= until => {
                    self.serve();
                    if let Some(refusal) = self.ctx.refused() {
                        return Err(refusal);
                    }
                    let why = self.ctx.away().map(|d| format!(" ({d})")).unwrap_or_default();
                    let text = format!(
                        "no broker of {} answered within {limit:?}{why}; is it running, and host and port right?",
                        self.settings.brokers
                    );
                    return Err(Error::new(ErrorKind::Unavailable, text).with_source(error));
                }
                // It fails at once while no broker is known.
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Whether a broker answers now, whatever was refused before. Blocks.
    pub(crate) fn look_again(&self, limit: Duration) -> Result<()> {
        self.serve();
        self.ctx.forget_refusal();
        self.wait_up(limit).map(drop)
    }

    /// Takes what the client has to tell.
    pub(crate) fn serve(&self) {
        let Ok(looker) = self.looker() else { return };
        for _ in 0..64 {
            if looker.poll(Duration::ZERO).is_none() {
                return;
            }
        }
    }

    /// Why no broker can be reached, if so.
    pub(crate) fn down(&self) -> Option<String> {
        self.ctx.down()
    }

    /// The client that looks.
    pub(crate) fn looker(&self) -> Result<Arc<BaseConsumer<Ctx>>> {
        self.looker.read().clone().ok_or_else(|| Error::closed("the connection"))
    }

    /// Lets go of the client. Blocks.
    pub(crate) fn close(&self) -> Result<()> {
        let looker = self.looker.write().take();
        drop(looker);
        Ok(())
    }

    /// Passes an answer of the cluster on. Where none came the brokers are named to the client again, now and then: it may have
    /// forgotten all of them.
    pub(crate) fn answered<T, E>(
        &self,
        looker: &BaseConsumer<Ctx>,
        answer: std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        match &answer {
            Ok(_) => self.ctx.is_up(),
            Err(_) => self.ctx.remind(looker.client(), &self.settings.brokers),
        }
        answer
    }

    /// How many partitions a topic has; `None` if there is none. Blocks.
    pub(crate) fn partitions(&self, topic: &str) -> Result<Option<u32>> {
        Ok(self.describe(topic)?.map(|(n, _, _)| n))
    }

    /// Partitions, whether all have a leader, and the smallest number of copies. Blocks.
    fn describe(&self, topic: &str) -> Result<Option<(u32, bool, usize)>> {
        let doing = || format!("looking up topic '{topic}'");
        let looker = self.looker()?;
        let found = self.answered(&looker, looker.client().fetch_metadata(Some(topic), REQUEST));
        let found = found.map_err(|e| fault::error(doing(), e))?;
        let Some(found) = found.topics().iter().find(|t| t.name() == topic) else { return Ok(None) };
        match found.error().map(Code::from) {
            None => {}
            Some(code) if fault::is_gone(code) => return Ok(None),
            Some(Code::LeaderNotAvailable) => return Ok(Some((found.partitions().len() as u32, false, 1))),
            Some(code) => return Err(fault::coded(doing(), code)),
        }
        let led = found.partitions().iter().all(|p| p.leader() >= 0 && p.error().is_none());
        let copies = found.partitions().iter().map(|p| p.replicas().len()).min().unwrap_or(1);
        Ok(match found.partitions().len() {
            0 => None,
            n => Some((n as u32, led, copies)),
        })
    }

    /// A client for administration. Blocks when it is dropped.
    pub(crate) fn admin(&self) -> Result<AdminClient<Ctx>> {
        client::base(&self.settings).create_with_context(Ctx::default()).map_err(|e| fault::error("kafka", e))
    }

    /// Runs an administrative request; blocks.
    pub(crate) fn wait<T>(&self, request: impl Future<Output = T>) -> T {
        self.env.handle().block_on(request)
    }

    /// The level of what is confirmed, as far as the cluster's defaults tell; and notes how short sessions may be. Blocks.
    pub(crate) fn level(&self) -> Durability {
        let Ok(looker) = self.looker() else { return Durability::Disk };
        let brokers = match looker.client().fetch_metadata(Some(PROBE), REQUEST) {
            Ok(found) => found.brokers().iter().map(|b| b.id()).collect::<Vec<_>>(),
            Err(_) => Vec::new(),
        };
        let Some(first) = brokers.first() else { return Durability::Disk };
        let alone = brokers.len() == 1;
        if alone && self.settings.min_session.is_some() {
            // Nothing to ask for. Written to one log, which outlives the process.
            return Durability::Disk;
        }
        let Ok(admin) = self.admin() else { return Durability::Disk };
        let asked = [ResourceSpecifier::Broker(*first)];
        let told = self.wait(admin.describe_configs(&asked, &options()));
        let number = |name: &str| -> Option<i64> {
            let config = told.as_ref().ok()?.first()?.as_ref().ok()?;
            config.get(name)?.value.as_ref()?.parse().ok()
        };
        if let Some(ms) = number("group.min.session.timeout.ms").and_then(|ms| u64::try_from(ms).ok()) {
            // Leases shorter than the brokers' default of 6 s are kept where they are allowed.
            let _ = self.settings.told_session.set(Duration::from_millis(ms));
        }
        let copies = match self.settings.replication {
            _ if alone => 1,
            -1 => number("default.replication.factor").unwrap_or(1),
            n => i64::from(n),
        };
        let in_sync = number("min.insync.replicas").unwrap_or(1);
        if copies > 1 && in_sync < 2 {
            tracing::warn!(
                "min.insync.replicas is {in_sync}: with one copy in sync, a confirmed message is on one disk only"
            );
        }
        if copies > 1 && in_sync > 1 { Durability::Replicated } else { Durability::Disk }
    }
}

/// Tries again what failed because the cluster is changing (a coordinator being elected, a leader away), at most for
/// [`REQUEST`]. Blocks.
pub(crate) fn patient<T>(mut what: impl FnMut() -> Result<T>) -> Result<T> {
    let until = Instant::now() + REQUEST;
    loop {
        match what() {
            Err(error)
                if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Disconnected)
                    && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(50));
            }
            result => return result,
        }
    }
}

/// No topic has this name; asking for it lists the brokers and nothing else.
const PROBE: &str = "anymq..probe";

pub(crate) fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(REQUEST)).operation_timeout(Some(REQUEST))
}
