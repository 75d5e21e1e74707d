//! How a RabbitMQ is started: its own epmd, its own Erlang home, every port on 127.0.0.1.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;

use crate::server::Recipe;
use crate::{Kind, Launch, Problem, Result, Server, folders, free_port, programs};

/// What a test may ask of its RabbitMQ.
#[derive(Debug, Clone, Default)]
pub struct RabbitOptions {
    /// Further lines of `rabbitmq.conf`.
    pub lines: Vec<String>,
    /// The content of `advanced.config`, for what `rabbitmq.conf` has no name for.
    pub advanced: Option<String>,
    /// Plugins that are on; none by default.
    pub plugins: Vec<String>,
    /// Users beside `guest`.
    pub users: Vec<RabbitUser>,
    /// Its place among several.
    pub member: Option<RabbitMember>,
    /// Where it listens with TLS too.
    pub tls_port: Option<u16>,
}

/// One of several nodes.
#[derive(Debug, Clone)]
pub struct RabbitMember {
    /// Without the host.
    pub name: String,
    /// The port of the epmd that all share, which somebody else holds.
    pub epmd: u16,
    /// The node to join, by its name.
    pub seed: Option<String>,
}

/// Nodes of a cluster let each other in by this, and need to have the same.
const COOKIE: &str = "anymqtestcookie";

/// A user with all permissions in one virtual host, which is made for it.
#[derive(Debug, Clone)]
pub struct RabbitUser {
    /// Its name.
    pub name: String,
    /// Its password.
    pub password: String,
    /// Its virtual host.
    pub virtual_host: String,
    /// What it may configure, write and read: three regular expressions.
    pub permissions: [String; 3],
}

impl RabbitOptions {
    /// Starts a private RabbitMQ with these options.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start(self) -> Result<Server> {
        Server::in_own_folder(|_, path| recipe(path, self.clone()), Kind::RabbitMq)
    }

    /// Adds a user with all permissions in a virtual host.
    #[must_use]
    pub fn user(mut self, name: &str, password: &str, virtual_host: &str) -> Self {
        self.users.push(RabbitUser {
            name: name.into(),
            password: password.into(),
            virtual_host: virtual_host.into(),
            permissions: [".*", ".*", ".*"].map(str::to_owned),
        });
        self
    }

    /// Listens with TLS on that port too, which [`free_port`](crate::free_port) gives, and asks clients for a
    /// certificate. The usual port stays open without.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls(mut self, port: u16, certificates: &crate::Certificates, server: &crate::Pair) -> Self {
        self.tls_port = Some(port);
        self.lines.extend([
            format!("listeners.ssl.1 = 127.0.0.1:{port}"),
            format!("ssl_options.cacertfile = {}", certificates.authority.display()),
            format!("ssl_options.certfile = {}", server.certificate.display()),
            format!("ssl_options.keyfile = {}", server.key.display()),
            "ssl_options.verify = verify_peer".to_owned(),
            "ssl_options.fail_if_no_peer_cert = true".to_owned(),
        ]);
        self
    }

    /// Lets in, with [`tls`](Self::tls), whoever has a certificate with a user's name in it; passwords do as before.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn login_by_certificate(mut self) -> Self {
        self.plugins.push("rabbitmq_auth_mechanism_ssl".into());
        self.lines.extend([
            "auth_mechanisms.1 = EXTERNAL".to_owned(),
            "auth_mechanisms.2 = PLAIN".to_owned(),
            "ssl_cert_login_from = common_name".to_owned(),
        ]);
        self
    }

    /// Ends consumers that hold a message unacknowledged for longer than this.
    #[must_use]
    pub fn consumer_timeout(mut self, limit: std::time::Duration) -> Self {
        self.lines.push(format!("consumer_timeout = {}", limit.as_millis()));
        // The timeout is looked at once per tick, which is a minute by default.
        self.advanced = Some("[{rabbit, [{channel_tick_interval, 1000}]}].\n".into());
        self
    }
}

pub(crate) fn recipe(path: &Path, options: RabbitOptions) -> Result<Box<dyn Recipe>> {
    with_home(path, programs::rabbitmq()?, None, options)
}

/// One of another release, from a private root; its epmd is the machine's, for that protocol has not changed.
pub(crate) fn recipe_in_root(path: &Path, root: &Path) -> Result<Box<dyn Recipe>> {
    with_home(path, PathBuf::from("/usr/lib/rabbitmq"), Some(root.to_path_buf()), RabbitOptions::default())
}

fn with_home(path: &Path, home: PathBuf, root: Option<PathBuf>, options: RabbitOptions) -> Result<Box<dyn Recipe>> {
    Ok(Box::new(RabbitMq {
        path: path.to_path_buf(),
        port: free_port()?,
        distribution: free_port()?,
        epmd: options.member.as_ref().map_or_else(free_port, |member| Ok(member.epmd))?,
        command_line: free_port()?,
        home,
        root,
        options,
    }))
}

struct RabbitMq {
    path: PathBuf,
    port: u16,
    distribution: u16,
    epmd: u16,
    command_line: u16,
    home: PathBuf,
    /// Where it is not the machine's own.
    root: Option<PathBuf>,
    options: RabbitOptions,
}

impl RabbitMq {
    fn node(&self) -> String {
        format!("{}@localhost", self.options.member.as_ref().map_or("mq", |member| &member.name))
    }

    fn cluster_lines(&self, member: &RabbitMember) -> Result<Vec<String>> {
        use std::os::unix::fs::PermissionsExt;
        let cookie = self.path.join(".erlang.cookie");
        programs::write(&cookie, COOKIE)?;
        // Erlang refuses a cookie that others could read.
        std::fs::set_permissions(&cookie, std::fs::Permissions::from_mode(0o400))
            .map_err(Problem::during("protect the Erlang cookie"))?;
        let mut lines = vec![
            // A node that stands still is given up after this many seconds.
            "net_ticktime = 5".to_owned(),
            "cluster_partition_handling = ignore".into(),
        ];
        if let Some(seed) = &member.seed {
            lines.extend([
                "cluster_formation.peer_discovery_backend = classic_config".to_owned(),
                format!("cluster_formation.classic_config.nodes.1 = {seed}@localhost"),
                "cluster_formation.discovery_retry_interval = 200".into(),
                "cluster_formation.discovery_retry_limit = 200".into(),
            ]);
        }
        Ok(lines)
    }

    fn environment(&self, mut launch: Launch) -> Launch {
        let at = |name: &str| self.path.join(name).into_os_string();
        let local = "-kernel inet_dist_use_interface {127,0,0,1}";
        let settings: [(&'static str, OsString); 19] = [
            // Erlang keeps its cookie in HOME.
            ("HOME", at("")),
            ("RABBITMQ_NODENAME", self.node().into()),
            ("RABBITMQ_MNESIA_BASE", at("mnesia")),
            ("RABBITMQ_LOG_BASE", at("log")),
            ("RABBITMQ_CONFIG_FILE", at("rabbitmq.conf")),
            ("RABBITMQ_ADVANCED_CONFIG_FILE", at("advanced.config")),
            // Not the file of an installed service.
            ("RABBITMQ_CONF_ENV_FILE", "/dev/null".into()),
            ("RABBITMQ_ENABLED_PLUGINS_FILE", at("enabled_plugins")),
            ("RABBITMQ_FEATURE_FLAGS_FILE", at("feature_flags")),
            ("RABBITMQ_PID_FILE", at("pid")),
            ("RABBITMQ_DIST_PORT", self.distribution.to_string().into()),
            ("RABBITMQ_CTL_DIST_PORT_MIN", self.command_line.to_string().into()),
            ("RABBITMQ_CTL_DIST_PORT_MAX", self.command_line.to_string().into()),
            ("ERL_EPMD_PORT", self.epmd.to_string().into()),
            ("ERL_EPMD_ADDRESS", "127.0.0.1".into()),
            ("ERL_CRASH_DUMP", at("erl_crash.dump")),
            ("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", local.into()),
            ("RABBITMQ_CTL_ERL_ARGS", local.into()),
            ("LANG", "C.UTF-8".into()),
        ];
        launch.env.extend(settings);
        launch
    }
}

/// Erlang's directory of nodes. Without one of our own a node starts one that outlives it and everybody.
pub(crate) fn epmd(path: &Path, port: u16) -> Launch {
    let mut launch = Launch::new("epmd", path).args(["-address", "127.0.0.1", "-port", &port.to_string()]);
    launch.log = path.join("epmd.log");
    launch
}

/// Users and virtual hosts as a file that the server reads at start: cheaper than one command for each. With such a file
/// `guest` is not made by itself.
fn definitions(users: &[RabbitUser]) -> String {
    let mut names = vec![json!({ "name": "guest", "password": "guest", "tags": ["administrator"] })];
    let mut hosts = vec![json!({ "name": "/" })];
    let all = |user: &str, host: &str, [configure, write, read]: &[String; 3]| json!({ "user": user, "vhost": host, "configure": configure, "write": write, "read": read });
    let everything = [".*", ".*", ".*"].map(str::to_owned);
    let mut permissions = vec![all("guest", "/", &everything)];
    for user in users {
        names.push(json!({ "name": user.name, "password": user.password, "tags": [] }));
        if user.virtual_host != "/" {
            hosts.push(json!({ "name": user.virtual_host }));
            permissions.push(all("guest", &user.virtual_host, &everything));
        }
        permissions.push(all(&user.name, &user.virtual_host, &user.permissions));
    }
    let (policies, queues, exchanges, bindings) = (json!([]), json!([]), json!([]), json!([]));
    json!({
        "users": names, "vhosts": hosts, "permissions": permissions,
        "policies": policies, "queues": queues, "exchanges": exchanges, "bindings": bindings,
    })
    .to_string()
}

impl Recipe for RabbitMq {
    fn kind(&self) -> Kind {
        Kind::RabbitMq
    }

    fn port(&self) -> u16 {
        self.port
    }

    fn url_at(&self, port: u16) -> String {
        format!("amqp://guest:guest@127.0.0.1:{port}/%2f")
    }

    fn prepare(&self) -> Result<()> {
        let mut lines = vec![
            format!("listeners.tcp.1 = 127.0.0.1:{}", self.port),
            "log.console = false".to_owned(),
            // The default is 50 MB free or every publisher stands still; say so here, where it can be changed.
            "disk_free_limit.absolute = 50MB".into(),
        ];
        lines.extend(self.options.lines.iter().cloned());
        if let Some(member) = &self.options.member {
            lines.extend(self.cluster_lines(member)?);
        }
        if !self.options.users.is_empty() {
            let file = self.path.join("definitions.json");
            programs::write(&file, &definitions(&self.options.users))?;
            lines.push(format!("load_definitions = {}", file.display()));
        }
        programs::write(&self.path.join("rabbitmq.conf"), &(lines.join("\n") + "\n"))?;
        let plugins = format!("[{}].\n", self.options.plugins.join(","));
        programs::write(&self.path.join("enabled_plugins"), &plugins)?;
        match &self.options.advanced {
            Some(terms) => programs::write(&self.path.join("advanced.config"), terms),
            None => Ok(()),
        }
    }

    fn ready(&self) -> bool {
        // It listens on one port after the other.
        let listens = |port: u16| std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
        crate::answers(Kind::RabbitMq, self.port) && self.options.tls_port.is_none_or(listens)
    }

    fn companions(&self) -> Vec<Launch> {
        if self.options.member.is_some() { Vec::new() } else { vec![epmd(&self.path, self.epmd)] }
    }

    fn control(&self, arguments: &[&str]) -> Option<Launch> {
        if self.root.is_some() {
            return None;
        }
        // Not the rabbitmqctl on the PATH, which changes to another user and reads another cookie.
        let mut launch = Launch::new(self.home.join("sbin/rabbitmqctl"), &self.path).args(["-q"]).args(arguments);
        launch.log = self.path.join("rabbitmqctl.log");
        Some(self.environment(launch))
    }

    fn launch(&self) -> Launch {
        // With ALLOW_INPUT the start script becomes the Erlang machine by exec instead of starting it as a child, so
        // the process we hold is the server; -noinput, since there is nobody to type.
        let launch = match &self.root {
            None => Launch::new(self.home.join("sbin/rabbitmq-server"), &self.path),
            Some(root) => Launch::new("unshare", &self.path)
                .args(["--mount", "--propagation", "private", "sh", "-c", ENTER, "sh"])
                .args([root, &self.path, &self.home.join("bin/rabbitmq-server")]),
        };
        self.environment(launch.args(["-noinput"])).env("RABBITMQ_ALLOW_INPUT", "1")
    }
}

/// Runs a program inside a root of its own: `ROOT FOLDER PROGRAM ARGUMENTS`. The mounts are seen by it alone and vanish
/// with it. All by exec, so that the process we hold becomes the server.
const ENTER: &str = r#"set -e
root=$1 folder=$2; shift 2
mkdir -p "$root$folder"
mount --bind "$folder" "$root$folder"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
exec chroot "$root" /usr/bin/env PATH=/usr/sbin:/usr/bin "$@""#;

/// Plugins that a broker without plugins still consists of (RabbitMQ 3.10).
const NEEDED: [&str; 24] = [
    "accept",
    "amqp10_common",
    "amqp_client",
    "aten",
    "base64url",
    "credentials_obfuscation",
    "cuttlefish",
    "enough",
    "gen_batch_server",
    "getopt",
    "jsx",
    "observer_cli",
    "osiris",
    "ra",
    "rabbit",
    "rabbit_common",
    "rabbitmq_auth_mechanism_ssl",
    "rabbitmq_prelaunch",
    "ranch",
    "recon",
    "seshat",
    "stdout_formatter",
    "syslog",
    "sysmon_handler",
];

/// A home that holds only what is needed, made of links: the installed one has 70 plugin folders, and looking for every
/// module in all of them is half of the start time. Versions other than 3.10 are taken as they are.
pub(crate) fn trimmed_home(installed: &Path) -> Result<PathBuf> {
    let version = installed.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if !version.starts_with("rabbitmq_server-3.10.") {
        return Ok(installed.to_path_buf());
    }
    let home = folders::cache().join(&version);
    let done = home.join("complete");
    if done.exists() {
        return Ok(home);
    }
    let failed = |what: &str| Problem::during::<std::io::Error>(format!("make a RabbitMQ home, {what}"));
    // Others may be making it at the same time: build aside, then rename.
    static MAKING: AtomicU64 = AtomicU64::new(0);
    let number = MAKING.fetch_add(1, Ordering::Relaxed);
    let aside = folders::cache().join(format!("{version}.{}.{number}", std::process::id()));
    folders::make(&aside.join("plugins"))?;
    folders::make(&aside.join("sbin"))?;
    for entry in std::fs::read_dir(installed.join("sbin")).map_err(failed("read sbin"))?.flatten() {
        // Copies, for the scripts find their home from where they lie.
        std::fs::copy(entry.path(), aside.join("sbin").join(entry.file_name())).map_err(failed("copy sbin"))?;
    }
    std::os::unix::fs::symlink(installed.join("escript"), aside.join("escript")).map_err(failed("link escript"))?;
    for entry in std::fs::read_dir(installed.join("plugins")).map_err(failed("read plugins"))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let plugin = name.split('-').next().unwrap_or_default();
        if NEEDED.contains(&plugin) || plugin == "systemd" {
            let link = aside.join("plugins").join(&name);
            std::os::unix::fs::symlink(entry.path(), link).map_err(failed("link plugins"))?;
        }
    }
    programs::write(&aside.join("complete"), "")?;
    if std::fs::rename(&aside, &home).is_err() {
        // Somebody else was faster.
        let _ = std::fs::remove_dir_all(&aside);
    }
    Ok(home)
}
