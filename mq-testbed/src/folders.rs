//! Where the state of the servers lies, and how what a killed process left behind is found and removed.
//!
//! Everything is under `target/brokers`: `cache` (downloads, made once), `up` (the servers of `brokers up`), and
//! `runs/PID-N` for every other process. A folder names its owner; one whose owner is gone is stale.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::{Problem, Result, eventually, table};

const OWNER: &str = "owner";

/// The target folder of this checkout.
#[must_use]
pub fn target() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => workspace.join(folder),
        None => workspace.join("target"),
    }
}

/// The folder of all broker state: `target/brokers`, or the one that `MQ_TEST_BROKERS` names, an absolute path. With one
/// of its own, a test of `brokers up` and `down` neither sees nor ends what else runs in this checkout.
#[must_use]
pub fn root() -> PathBuf {
    std::env::var_os("MQ_TEST_BROKERS").map_or_else(|| target().join("brokers"), PathBuf::from)
}

/// Where logs and histories of test runs lie: the target folder, or the one of `MQ_TEST_BROKERS`, see [`root`].
#[must_use]
pub fn records() -> PathBuf {
    std::env::var_os("MQ_TEST_BROKERS").map_or_else(target, PathBuf::from)
}

/// Where downloads and other things made once are kept.
pub(crate) fn cache() -> PathBuf {
    target().join("brokers").join("cache")
}

/// PostgreSQL refuses to run as root, and its user may not be able to enter a checkout below `/root`: then its folder
/// lies here instead. Named after the checkout, so that another one's is left alone.
pub(crate) fn outside_root() -> PathBuf {
    let name: String =
        root().to_string_lossy().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    PathBuf::from(format!("/tmp/anymq{name}"))
}

/// Both roots.
pub(crate) fn roots() -> [PathBuf; 2] {
    [root(), outside_root()]
}

/// A folder for servers that belongs to this process; removed when dropped.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    kept: bool,
}

impl Folder {
    /// A new folder for this process, `target/brokers/runs/PID-N`.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn for_run() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        if number == 0 {
            sweep();
        }
        Self::owned(root().join("runs").join(format!("{}-{number}", std::process::id())))
    }

    /// The folder of `brokers up`.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn for_up() -> Result<Self> {
        sweep();
        Self::owned(root().join("up"))
    }

    fn owned(path: PathBuf) -> Result<Self> {
        // Made elsewhere and moved here with its owner in it: a sweep of another process takes one without for abandoned, and
        // kills what begins in it.
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let fresh = root().join("new").join(format!("{}-{name}", std::process::id()));
        make(&fresh)?;
        let owner = i32::try_from(std::process::id()).ok().and_then(table::identity).unwrap_or_default();
        fs::write(fresh.join(OWNER), owner).map_err(Problem::during(format!("write in {}", fresh.display())))?;
        if let Some(above) = path.parent() {
            make(above)?;
        }
        fs::rename(&fresh, &path).map_err(Problem::during(format!("make folder {}", path.display())))?;
        Ok(Self { path, kept: false })
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves the folder there when dropped: the logs of something that failed are worth reading.
    pub fn keep(&mut self) {
        self.kept = true;
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.kept {
            remove(&self.path);
        }
    }
}

/// Makes a folder with all above it.
pub(crate) fn make(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(Problem::during(format!("make folder {}", path.display())))
}

/// The folder for what has to be reachable by another user, standing for `folder`: itself where that user can pass,
/// else its counterpart under [`outside_root`].
pub(crate) fn passable(folder: &Path) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let open = folder
        .ancestors()
        .skip(1)
        .all(|above| fs::metadata(above).is_ok_and(|data| !data.is_dir() || data.permissions().mode() & 0o001 != 0));
    if open {
        return folder.to_path_buf();
    }
    outside_root().join(folder.strip_prefix(root()).unwrap_or(folder))
}

/// Ends what processes that are gone left running, and removes their folders. Called before anything is started or
/// counted, so that a `kill -9` leaves nothing behind for longer than until the next call.
pub fn sweep() {
    let mut stale = Vec::new();
    if let Ok(runs) = fs::read_dir(root().join("runs")) {
        stale.extend(runs.flatten().map(|entry| entry.path()));
    }
    stale.push(root().join("up"));
    for folder in stale.into_iter().filter(|folder| folder.exists()) {
        let owner = fs::read_to_string(folder.join(OWNER)).unwrap_or_default();
        if !table::is_same(&owner) {
            remove(&folder);
        }
    }
    if !root().join("up").exists() {
        // Else a shell would source the URLs of servers that are gone.
        let _ = fs::remove_file(root().join("env"));
    }
}

/// Ends every server process inside the folder, then removes it (and its counterpart outside).
pub(crate) fn remove(folder: &Path) {
    let twin = folder.strip_prefix(root()).ok().map(|below| outside_root().join(below));
    for place in [Some(folder.to_path_buf()), twin].into_iter().flatten() {
        // Twice through: a PostgreSQL backend or an Erlang helper can appear while its parent is being ended.
        eventually(Duration::from_secs(10), || {
            let left = table::inside(&place);
            for pid in &left {
                if let Some(pid) = Pid::from_raw(*pid) {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            left.is_empty()
        });
        // What cannot be removed is taken up by the next sweep.
        let _ = fs::remove_dir_all(&place);
    }
}

/// The log files of the server in that folder, or in its counterpart outside.
#[must_use]
pub fn logs_in(folder: &Path) -> Vec<PathBuf> {
    let twin = outside_root().join(folder.strip_prefix(root()).unwrap_or(folder));
    let mut files: Vec<PathBuf> = [folder.to_path_buf(), folder.join("log"), twin]
        .into_iter()
        .filter_map(|place| fs::read_dir(place).ok())
        .flat_map(|entries| entries.flatten().map(|entry| entry.path()))
        .filter(|file| file.extension().is_some_and(|end| end == "log"))
        .collect();
    files.sort();
    files
}
