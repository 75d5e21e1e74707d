//! Which node to talk to: the only one, the master among several hosts, the one that a Sentinel names, and on a Cluster the one that
//! holds the key.

use crate::answer::{as_bytes, as_int, as_text, checked, failure, list};
use crate::connect::{Hub, Link, login};
use crate::driver::mends;
use crate::url::Place;
use mq_api::{Error, ErrorKind, HealthState, Result};
use redis::{ConnectionAddr, RedisConnectionInfo};

impl Hub {
    /// The connection for commands on `key`; made in the caller's task.
    pub(crate) async fn link_here(&self, key: &str) -> Result<Link> {
        let route = self.routes.lock().await.get(key).cloned();
        let mut link = match route {
            Some(node) => self.link_to(&node).await?,
            None => self.main_link().await?,
        };
        if !link.facts.cluster {
            return Ok(link);
        }
        // A command on the key tells where it lives.
        let mut broken = 0;
        for _ in 0..5 {
            match link.query(redis::cmd("EXISTS").arg(key)).await {
                Ok(_) => {
                    self.routes.lock().await.insert(key.to_owned(), link.node.clone());
                    return Ok(link);
                }
                Err(error) => match error.redirect_node() {
                    Some((address, _)) => {
                        let node = self.node_of(address)?;
                        link = self.link_to(&node).await?;
                    }
                    None => {
                        let error = failure(error, "looking for the topic's node");
                        if !mends(error.kind()) {
                            return Err(error);
                        }
                        // Nothing runs on it that would have noticed, as when only one of several nodes is in use: without this
                        // it would be tried for ever, and a topic whose own link is new would wait for another turn.
                        self.lost(&link).await;
                        // The first one asked, and the one it named.
                        broken += 1;
                        if broken > 2 {
                            return Err(error);
                        }
                        link = self.main_link().await?;
                    }
                },
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "the Cluster is moving this topic; tried again"))
    }

    fn node_of(&self, address: &str) -> Result<ConnectionAddr> {
        let (host, port) = address
            .rsplit_once(':')
            .and_then(|(host, port)| Some((host.to_owned(), port.parse().ok()?)))
            .ok_or_else(|| Error::new(ErrorKind::Other, format!("the Cluster named a node '{address}'")))?;
        Ok(self.told(host, port))
    }

    async fn main_link(&self) -> Result<Link> {
        let known = self.main.lock().await.clone();
        if let Some(node) = known
            && let Some(link) = self.links.lock().await.get(&node.to_string()).filter(|link| !link.conn.is_lost())
        {
            return Ok(link.clone());
        }
        let result = match &self.options.place {
            Place::Socket(path) => self.link_to(&ConnectionAddr::Unix(path.clone())).await,
            Place::Hosts(hosts) if self.options.sentinel.is_some() => self.sentinels_master(hosts).await,
            Place::Hosts(hosts) => self.first_master(hosts).await,
        };
        match result {
            Ok(link) => {
                *self.main.lock().await = Some(link.node.clone());
                self.health.set(HealthState::Running, "", self.env.wall());
                Ok(link)
            }
            Err(error) => {
                let state = match self.facts() {
                    None => HealthState::Connecting,
                    Some(_) => HealthState::Reconnecting,
                };
                self.health.set(state, error.to_string(), self.env.wall());
                Err(error)
            }
        }
    }

    async fn first_master(&self, hosts: &[(String, u16)]) -> Result<Link> {
        let mut failed = None;
        for at in self.turns.of(hosts.len()) {
            let (host, port) = &hosts[at];
            match self.link_to(&self.address(host.clone(), *port)).await {
                Ok(link) if hosts.len() == 1 || self.is_master(&link).await => {
                    self.turns.worked(at);
                    return Ok(link);
                }
                Ok(link) => {
                    self.lost(&link).await;
                    failed.get_or_insert(Error::new(ErrorKind::Unavailable, "none of the hosts is a master"));
                }
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.unwrap_or_else(|| Error::new(ErrorKind::Config, "the URL names no host")))
    }

    async fn is_master(&self, link: &Link) -> bool {
        match link.query(&redis::cmd("ROLE")).await {
            Ok(role) => list(role).first().and_then(as_bytes) == Some(b"master"),
            // Not allowed to ask: taken as it is.
            Err(error) => error.code() == Some("NOPERM"),
        }
    }

    /// The master that one of the Sentinels names. One that was cut off from the others names the former for as long as that
    /// lasts, so what is named must say itself that it is the master.
    async fn sentinels_master(&self, hosts: &[(String, u16)]) -> Result<Link> {
        let (mut tried, mut failed, mut silent) = (Vec::new(), None, None);
        for at in self.turns.of(hosts.len()) {
            let (host, port) = &hosts[at];
            let node = match self.ask_sentinel(self.address(host.clone(), *port)).await {
                Ok(node) if tried.contains(&node) => continue,
                Ok(node) => node,
                Err(error) => {
                    silent = Some(error);
                    continue;
                }
            };
            match self.link_to(&node).await {
                Ok(link) if self.is_master(&link).await => {
                    self.turns.worked(at);
                    return Ok(link);
                }
                Ok(link) => {
                    self.lost(&link).await;
                    let text = format!("{node}, which a Sentinel names as the master, is none; asked again");
                    failed = Some(Error::new(ErrorKind::Unavailable, text));
                }
                Err(error) => failed = Some(error),
            }
            tried.push(node);
        }
        Err(failed.or(silent).unwrap_or_else(|| Error::new(ErrorKind::Config, "the URL names no Sentinel")))
    }

    /// The address of the master, as this Sentinel knows it.
    async fn ask_sentinel(&self, node: ConnectionAddr) -> Result<ConnectionAddr> {
        let name = self.options.sentinel.as_deref().unwrap_or_default();
        let settings = login(
            RedisConnectionInfo::default(),
            self.options.sentinel_user.as_deref(),
            self.options.sentinel_password.as_ref(),
        );
        let mut conn = self.open(&node, settings, Some(self.patience()), None).await?;
        let cmd = redis::cmd("SENTINEL").arg("get-master-addr-by-name").arg(name).take();
        let answer = conn.send_packed_command(&cmd).await.and_then(checked);
        let parts = answer.map(list).map_err(|e| failure(e, "asking a Sentinel"))?;
        match (parts.first().and_then(as_text), parts.get(1).and_then(as_int).and_then(|p| p.try_into().ok())) {
            (Some(host), Some(port)) => Ok(self.told(host.to_owned(), port)),
            _ => {
                let text = format!("the Sentinel at {node} knows no master '{name}'; check sentinel= of the URL");
                Err(Error::new(ErrorKind::Unavailable, text))
            }
        }
    }
}
