//! Several servers that are one broker: Redis with Sentinel, Redis Cluster, RabbitMQ, Kafka, three nodes each.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use crate::kafka::KafkaMember;
use crate::rabbitmq::RabbitMember;
use crate::server::START;
use crate::{
    Folder, KafkaOptions, Kind, Launch, Problem, Process, RabbitOptions, RedisOptions, Result, Server, folders,
    free_port, greet, until,
};

/// Which cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Formation {
    /// A Redis master and its replica, watched by three sentinels, in this order among the nodes.
    RedisSentinel,
    /// Three Redis masters that share the keys.
    RedisCluster,
    /// Three RabbitMQ nodes.
    RabbitMq,
    /// Three Kafka brokers that are also the controllers; three copies, two of them needed.
    Kafka,
}

impl Formation {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::RedisSentinel, Self::RedisCluster, Self::RabbitMq, Self::Kafka];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RedisSentinel => "redis-sentinel",
            Self::RedisCluster => "redis-cluster",
            Self::RabbitMq => "rabbitmq-cluster",
            Self::Kafka => "kafka-cluster",
        }
    }

    /// The variable under which its URL is made known.
    #[must_use]
    pub const fn variable(self) -> &'static str {
        match self {
            Self::RedisSentinel => "MQ_TEST_REDIS_SENTINEL_URL",
            Self::RedisCluster => "MQ_TEST_REDIS_CLUSTER_URL",
            Self::RabbitMq => "MQ_TEST_AMQP_CLUSTER_URL",
            Self::Kafka => "MQ_TEST_KAFKA_CLUSTER_URL",
        }
    }

    /// What its nodes are.
    #[must_use]
    pub const fn kind(self) -> Kind {
        match self {
            Self::RedisSentinel | Self::RedisCluster => Kind::Redis,
            Self::RabbitMq => Kind::RabbitMq,
            Self::Kafka => Kind::Kafka,
        }
    }
}

/// A running cluster; its nodes end when it is dropped.
pub struct Cluster {
    formation: Formation,
    nodes: Vec<Server>,
    /// What all nodes need, and nobody hurts.
    _common: Vec<Process>,
    _folder: Option<Folder>,
}

impl Cluster {
    /// Starts one in a folder of its own.
    ///
    /// # Errors
    /// When its programs are missing, or it does not come together.
    pub fn start(formation: Formation) -> Result<Self> {
        let folder = Folder::for_run()?;
        let mut cluster = Self::start_in(formation, folder.path())?;
        cluster._folder = Some(folder);
        Ok(cluster)
    }

    /// Starts one in a folder below the one given.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub fn start_in(formation: Formation, parent: &Path) -> Result<Self> {
        let folder = parent.join(formation.name());
        let begun = Instant::now();
        match Self::try_in(formation, &folder) {
            // Its nodes were told each other's ports, and another program may have taken one before they bound it: once
            // more, with others. One that did not come together in its time would not do so in twice as much.
            Err(_) if begun.elapsed() < START => {
                folders::remove(&folder);
                Self::try_in(formation, &folder)
            }
            outcome => outcome,
        }
    }

    fn try_in(formation: Formation, folder: &Path) -> Result<Self> {
        folders::make(folder)?;
        let (nodes, common) = match formation {
            Formation::RedisSentinel => (redis_sentinel(folder)?, Vec::new()),
            Formation::RedisCluster => (redis_cluster(folder)?, Vec::new()),
            Formation::RabbitMq => rabbitmq(folder)?,
            Formation::Kafka => (kafka(folder)?, Vec::new()),
        };
        Ok(Self { formation, nodes, _common: common, _folder: None })
    }

    /// Its nodes, to be hurt one by one.
    pub fn nodes(&mut self) -> &mut [Server] {
        &mut self.nodes
    }

    /// One URL that names all nodes: hosts with commas between them. For Sentinel those are the sentinels, and the path
    /// is the name of what they watch.
    #[must_use]
    pub fn url(&self) -> String {
        let all = |nodes: &[Server]| {
            let hosts: Vec<String> = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
            hosts.join(",")
        };
        match self.formation {
            Formation::RedisSentinel => format!("redis+sentinel://{}/mymaster", all(&self.nodes[2..])),
            Formation::RedisCluster => format!("redis+cluster://{}/", all(&self.nodes)),
            Formation::RabbitMq => format!("amqp://guest:guest@{}/%2f", all(&self.nodes)),
            Formation::Kafka => format!("kafka://{}", all(&self.nodes)),
        }
    }
}

fn ports<const N: usize>() -> Result<[u16; N]> {
    let mut ports = [0; N];
    for port in &mut ports {
        *port = free_port()?;
    }
    Ok(ports)
}

/// Starts nodes side by side: many are ready only once they see each other.
fn together(starts: Vec<Box<dyn FnOnce() -> Result<Server> + Send + '_>>) -> Result<Vec<Server>> {
    thread::scope(|scope| {
        let running: Vec<_> = starts.into_iter().map(|start| scope.spawn(start)).collect();
        let panicked = |_| Err(Problem::new("the thread that started a node panicked"));
        running.into_iter().map(|node| node.join().unwrap_or_else(panicked)).collect()
    })
}

fn redis_node(path: PathBuf, options: RedisOptions) -> Result<Server> {
    Server::with(|_| crate::redis::recipe(&path, options.clone()), &path)
}

fn redis_sentinel(folder: &Path) -> Result<Vec<Server>> {
    let [master, replica, sentinels @ ..] = ports::<5>()?;
    let plain = |port, lines| RedisOptions { port: Some(port), lines, ..RedisOptions::default() };
    // One after the other: a replica that finds no master tries again only after a second.
    let mut nodes = vec![redis_node(folder.join("master"), plain(master, Vec::new()))?];
    nodes.push(redis_node(folder.join("replica"), plain(replica, vec![format!("replicaof 127.0.0.1 {master}")]))?);
    for (number, port) in sentinels.into_iter().enumerate() {
        let lines = vec![
            format!("sentinel monitor mymaster 127.0.0.1 {master} 2"),
            "sentinel down-after-milliseconds mymaster 1000".to_owned(),
            "sentinel failover-timeout mymaster 3000".into(),
            "sentinel parallel-syncs mymaster 1".into(),
        ];
        let options = RedisOptions { sentinel: true, ..plain(port, lines) };
        nodes.push(redis_node(folder.join(format!("sentinel{number}")), options)?);
    }
    until("the sentinels to see each other and the replica", START, || {
        let all = sentinels.iter().all(|port| {
            greet::redis_says(*port, "SENTINEL CKQUORUM mymaster").starts_with("+OK 3")
                && greet::redis_says(*port, "SENTINEL REPLICAS mymaster").contains(&replica.to_string())
        });
        all.then_some(())
    })?;
    Ok(nodes)
}

fn redis_cluster(folder: &Path) -> Result<Vec<Server>> {
    let clients = ports::<3>()?;
    let mut nodes = Vec::new();
    for (number, port) in clients.into_iter().enumerate() {
        let lines = vec![
            "cluster-enabled yes".to_owned(),
            "cluster-config-file nodes.conf".into(),
            "cluster-node-timeout 1000".into(),
            format!("cluster-port {}", free_port()?),
        ];
        let options = RedisOptions { port: Some(port), lines, ..RedisOptions::default() };
        nodes.push(redis_node(folder.join(format!("node{number}")), options)?);
    }
    let mut create = Launch::new("redis-cli", folder).args(["--cluster", "create"]);
    create = create.args(clients.map(|port| format!("127.0.0.1:{port}"))).args(["--cluster-yes"]);
    create.run()?;
    // The command returns before all nodes have heard of it.
    until("all nodes to say that the cluster is whole", START, || {
        let whole = |port: &u16| greet::redis_says(*port, "CLUSTER INFO").contains("cluster_state:ok");
        clients.iter().all(whole).then_some(())
    })?;
    Ok(nodes)
}

fn rabbitmq(folder: &Path) -> Result<(Vec<Server>, Vec<Process>)> {
    let port = free_port()?;
    let epmd = crate::rabbitmq::epmd(folder, port).spawn()?;
    let node = |name: &str, seed: Option<&str>| {
        let member = RabbitMember { name: name.into(), epmd: port, seed: seed.map(str::to_owned) };
        let path = folder.join(name);
        let options = RabbitOptions { member: Some(member), ..RabbitOptions::default() };
        Server::with(|_| crate::rabbitmq::recipe(&path, options.clone()), &path)
    };
    // The first alone: of several that start at once, two can each think they are the first.
    let mut nodes = vec![node("n1", None)?];
    let node = &node;
    nodes.extend(together(vec![Box::new(move || node("n2", Some("n1"))), Box::new(move || node("n3", Some("n1")))])?);
    until("three running nodes", START, || {
        nodes[0].control(&["eval", "3 = length(rabbit_nodes:all_running())."]).ok()
    })?;
    Ok((nodes, vec![epmd]))
}

fn kafka(folder: &Path) -> Result<Vec<Server>> {
    let (clients, controllers) = (ports::<3>()?, ports::<3>()?);
    let voters: Vec<String> = controllers.iter().zip(1..).map(|(port, id)| format!("{id}@127.0.0.1:{port}")).collect();
    let voters = voters.join(",");
    let mut starts: Vec<Box<dyn FnOnce() -> Result<Server> + Send>> = Vec::new();
    for (id, (port, controller)) in (1..).zip(clients.into_iter().zip(controllers)) {
        let member = KafkaMember { id, port, controller, voters: voters.clone() };
        let options = KafkaOptions { member: Some(member), ..KafkaOptions::default() };
        let path = folder.join(format!("broker{id}"));
        starts.push(Box::new(move || Server::with(|_| crate::kafka::recipe(&path, options.clone()), &path)));
    }
    let nodes = together(starts)?;
    until("every broker to see all three", START, || {
        clients.iter().all(|port| greet::kafka_brokers(*port) == Some(3)).then_some(())
    })?;
    Ok(nodes)
}
