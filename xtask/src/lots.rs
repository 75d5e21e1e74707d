//! The integration tests in lots, each a step of its own: most of them wait for servers, and lots wait side by side.

use std::collections::HashSet;

use mq_testbed::Problem;

use crate::features;

/// Packages whose integration tests wait for servers most of the time: each a step of its own, so that they wait side by side.
const WAITING: [&str; 4] = ["mq-kafka", "mq-amqp", "mq-redis", "mq-testbed"];

/// The integration tests by name, in lots that run side by side: those of one package each, and last the rest. A name that
/// several packages use is in one lot only, since `--test` takes it from all of them.
pub(crate) fn lots() -> Result<Vec<(&'static str, Vec<String>)>, Problem> {
    let mut lots: Vec<(&'static str, Vec<String>)> = WAITING.map(|package| (package, Vec::new())).into();
    lots.push(("", Vec::new()));
    let mut tests = Vec::new();
    let metadata = features::metadata()?;
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let place = WAITING.iter().position(|waiting| *waiting == name).unwrap_or(WAITING.len());
        for target in package["targets"].as_array().into_iter().flatten() {
            if target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "test")) {
                tests.push((place, target["name"].as_str().unwrap_or_default().to_owned()));
            }
        }
    }
    tests.sort();
    let mut seen = HashSet::new();
    for (place, test) in tests {
        if seen.insert(test.clone()) {
            lots[place].1.push(test);
        }
    }
    Ok(lots)
}
