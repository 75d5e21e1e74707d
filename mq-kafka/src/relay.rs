//! Where the copies of a group go: its retry topics and its dead letters. Retry topics are made at their first use, and what is
//! gone is made again: each session looks anew.

use crate::delay::RetryTopics;
use crate::topology::{Cluster, Wanted};
use mq_api::{Error, ErrorKind, Outcome, Provisioning, Result, Subscription};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// See the module.
pub(crate) struct Relay {
    retries: RetryTopics,
    /// Whether topics are made.
    pub(crate) makes: bool,
    /// Whether those that were looked for are there.
    there: Mutex<HashMap<String, bool>>,
}

impl Relay {
    pub(crate) fn new(sub: &Subscription) -> Result<Self> {
        let Some(group) = sub.group_name() else {
            return Err(Error::new(ErrorKind::Other, "a relay without group"));
        };
        Ok(Self {
            retries: RetryTopics::new(&sub.topic, group),
            makes: sub.provisioning == Provisioning::Create,
            there: Mutex::default(),
        })
    }

    /// The topic for a delay. Where nothing is made not all may be there, but the first is: it was asked for at subscribe, and
    /// whatever is in it waits until it is due.
    pub(crate) async fn retry(&self, cluster: &Arc<Cluster>, after: Duration) -> Result<&str> {
        let wanted = self.retries.wanted(after);
        let there = self.ensure(cluster, wanted).await?;
        Ok(if there { self.retries.of(after) } else { self.retries.first() })
    }

    /// Dead letters go to this topic. It was made at subscribe.
    pub(crate) async fn letters(&self, cluster: &Arc<Cluster>, topic: &str) -> Result<()> {
        if self.makes {
            self.ensure(cluster, Wanted::letters(topic.to_owned())).await?;
        }
        Ok(())
    }

    /// Makes a topic, or looks whether it is there.
    async fn ensure(&self, cluster: &Arc<Cluster>, wanted: Wanted) -> Result<bool> {
        let known = self.there.lock().get(&wanted.name).copied();
        if let Some(there) = known {
            return Ok(there);
        }
        let (name, makes) = (wanted.name.clone(), self.makes);
        let there = cluster.blocking(move |cluster| match makes {
            true => cluster.provision(&[wanted], Provisioning::Create).map(|_| true),
            false => Ok(cluster.partitions(&wanted.name)?.is_some()),
        });
        let there = there.await.map_err(|e| e.with_outcome(Outcome::NotSent))?;
        self.there.lock().insert(name, there);
        Ok(there)
    }
}
