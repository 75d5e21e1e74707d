//! Which features all builds turn on, so that every step shares one build of each dependency.

use std::process::Command;

use mq_testbed::Problem;
use serde_json::Value;

/// Features that change how a C library is built or found rather than what the library does. Turning them on would
/// need further tools, and build librdkafka a second time. `shuttle` puts that scheduler's locks into the engine's own tests:
/// a step of its own.
const HOW_TO_BUILD: [&str; 7] = ["cmake", "dynamic", "vendored", "static", "gssapi", "zstd", "shuttle"];

/// `cargo` arguments that select the whole workspace with the features of every crate.
pub(crate) fn everything() -> Result<Vec<String>, Problem> {
    let mut features = Vec::new();
    for (package, feature) in all()? {
        features.push(format!("{package}/{feature}"));
    }
    let mut args = vec!["--workspace".to_owned()];
    if !features.is_empty() {
        args.extend(["--features".into(), features.join(",")]);
    }
    Ok(args)
}

/// The backends of anymq behind a feature and a crate each, whose crate is still a stub: without a `connect` the facade
/// cannot be built with it, and there is nothing to test.
pub(crate) fn stubs() -> Vec<&'static str> {
    let is_stub = |backend: &&str| {
        let root = format!("mq-{backend}/src/lib.rs");
        !std::fs::read_to_string(root).unwrap_or_default().contains("connect")
    };
    ["redis", "amqp", "kafka"].into_iter().filter(is_stub).collect()
}

/// What cargo says of the workspace.
pub(crate) fn metadata() -> Result<Value, Problem> {
    let output = Command::new("cargo")
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()
        .map_err(Problem::during("start cargo metadata"))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Problem::new(format!("cargo metadata failed, a Cargo.toml may be wrong: {words}")));
    }
    serde_json::from_slice(&output.stdout).map_err(Problem::during("read cargo metadata"))
}

/// Every feature of every package of the workspace, but [`HOW_TO_BUILD`] and what turns on a stub.
pub(crate) fn all() -> Result<Vec<(String, String)>, Problem> {
    let metadata = metadata()?;
    let stubs = stubs();
    let mut found = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        for (feature, enables) in package["features"].as_object().into_iter().flatten() {
            let enables: Vec<&str> = enables.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            let of_stub = stubs.iter().any(|stub| {
                let through = format!("anymq/{stub}");
                (name == "anymq" && (feature == stub || enables.contains(stub)))
                    || enables.iter().any(|enabled| *enabled == through)
            });
            if !of_stub && !HOW_TO_BUILD.iter().any(|part| feature.contains(part)) {
                found.push((name.to_owned(), feature.clone()));
            }
        }
    }
    Ok(found)
}
