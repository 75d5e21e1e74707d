//! `memory://name?profile=kafka&partitions=8`: strict, like every backend.

use crate::faults::FaultPlan;
use crate::profile::Profile;
use mq_api::{Error, ErrorKind, Feature, Result};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::str::FromStr;
use url::Url;

/// Options of an in-memory broker.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MemoryConfig {
    /// Handles of one process that use the same name reach the same broker.
    pub name: String,
    /// Whose capabilities it has.
    pub profile: Profile,
    /// Partitions of topics that are made without a count. Default 1, or what the profile's broker has.
    pub partitions: u32,
    /// Handled messages that each partition keeps for replays. Default 100,000.
    pub history: u64,
    /// Messages a partition holds; beyond it sends are `Full`. Default 10,000,000: bounded, and above what a test needs.
    pub capacity: u64,
    /// Bytes a partition holds; beyond it sends are `Full`. Default 1 GiB.
    pub capacity_bytes: u64,
    /// Makes ids, jitter, member names and times a function of it: the same seed gives the same run.
    pub seed: Option<u64>,
    /// Records what happens, for assertions. Costs time and memory; off by default.
    pub record: bool,
    /// Features taken away from the profile, to see what a program does without them.
    pub without: Vec<Feature>,
    /// Sends and receives through the engine's queues, as on a broker behind a network, hurt by this plan.
    pub faults: Option<FaultPlan>,
    /// Parameters of the URL it was read from: what is asked for in words counts also where it is the default.
    given: BTreeSet<String>,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            profile: Profile::Memory,
            partitions: 1,
            history: 100_000,
            capacity: 10_000_000,
            capacity_bytes: 1 << 30,
            seed: None,
            record: false,
            without: Vec::new(),
            faults: None,
            given: BTreeSet::new(),
        }
    }
}

const KEYS: &str = "profile, partitions, history, capacity, capacity_bytes, seed, record, faults";

fn value<T: FromStr>(key: &str, text: &str) -> Result<T>
where
    T::Err: Display + std::error::Error + Send + Sync + 'static,
{
    text.parse().map_err(|e: T::Err| {
        Error::new(ErrorKind::Config, format!("memory URL: parameter '{key}' cannot be '{text}': {e}")).with_source(e)
    })
}

impl MemoryConfig {
    /// From a URL.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] naming the parameter and those allowed.
    pub fn from_url(text: &str) -> Result<Self> {
        let bad = |what: String| Error::new(ErrorKind::Config, what);
        let url = Url::parse(text).map_err(|e| bad(format!("'{text}' is not a URL: {e}")).with_source(e))?;
        if url.scheme() != "memory" {
            return Err(bad(format!("scheme '{}' is not memory://", url.scheme())));
        }
        if !url.path().is_empty() && url.path() != "/" {
            return Err(bad(format!("memory URL: path '{}' has no meaning; use memory://name", url.path())));
        }
        if url.port().is_some() || !url.username().is_empty() || url.password().is_some() {
            return Err(bad("memory URL: port, user and password have no meaning; use memory://name".into()));
        }
        let mut config = Self { name: url.host_str().unwrap_or_default().to_owned(), ..Self::default() };
        if let Some(fragment) = url.fragment() {
            return Err(bad(format!("memory URL: '#{fragment}' has no meaning; parameters begin with '?'")));
        }
        let mut partitions = None;
        for (key, text) in url.query_pairs() {
            if !config.given.insert(key.to_string()) {
                return Err(bad(format!("memory URL: parameter '{key}' is given twice")));
            }
            match &*key {
                "profile" => {
                    config.profile = Profile::by_name(&text).ok_or_else(|| {
                        let all = Profile::ALL.map(Profile::as_str).join(", ");
                        bad(format!("memory URL: there is no profile '{text}'; there are {all}"))
                    })?;
                }
                "partitions" => partitions = Some(value::<u32>("partitions", &text)?),
                "history" => config.history = value("history", &text)?,
                "capacity" => config.capacity = value("capacity", &text)?,
                "capacity_bytes" => config.capacity_bytes = value("capacity_bytes", &text)?,
                "seed" => config.seed = Some(value("seed", &text)?),
                "faults" => config.faults = Some(FaultPlan::parse(&text)?),
                "record" => config.record = value("record", &text)?,
                other => return Err(bad(format!("memory URL: there is no parameter '{other}'; there are {KEYS}"))),
            }
        }
        config.partitions = partitions.unwrap_or(config.profile.partitions());
        if config.partitions == 0 || config.partitions > config.profile.capabilities().max_partitions {
            let max = config.profile.capabilities().max_partitions;
            return Err(bad(format!("memory URL: partitions must be 1 to {max} for this profile")));
        }
        Ok(config)
    }

    /// The first option that was given here, by its name or as another than the usual, and is another there.
    pub(crate) fn differs_from(&self, running: &Self) -> Option<&'static str> {
        let usual = Self::profile(self.profile);
        // Its name, whether it is not the usual, whether it is the same there.
        let options = [
            ("profile", true, self.profile == running.profile),
            ("partitions", self.partitions != usual.partitions, self.partitions == running.partitions),
            ("history", self.history != usual.history, self.history == running.history),
            ("capacity", self.capacity != usual.capacity, self.capacity == running.capacity),
            (
                "capacity_bytes",
                self.capacity_bytes != usual.capacity_bytes,
                self.capacity_bytes == running.capacity_bytes,
            ),
            ("seed", self.seed.is_some(), self.seed == running.seed),
            ("record", self.record, self.record == running.record),
            ("without", !self.without.is_empty(), self.without == running.without),
            ("faults", self.faults.is_some(), self.faults == running.faults),
        ];
        let given = |name: &str, changed: bool| changed || self.given.contains(name);
        options.into_iter().find_map(|(name, changed, same)| (given(name, changed) && !same).then_some(name))
    }

    /// By profile, with the defaults.
    pub fn profile(profile: Profile) -> Self {
        Self { profile, partitions: profile.partitions(), ..Self::default() }
    }

    /// With the defaults, recording what happens: for tests.
    pub fn recording() -> Self {
        Self { record: true, ..Self::default() }
    }

    /// Sets the seed.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets the faults.
    pub fn faults(mut self, faults: FaultPlan) -> Self {
        self.faults = Some(faults);
        self
    }

    /// Sets whether it records.
    pub fn record(mut self, record: bool) -> Self {
        self.record = record;
        self
    }

    /// Sets the partitions of topics that are made without a count.
    pub fn partitions(mut self, n: u32) -> Self {
        self.partitions = n;
        self
    }
}
