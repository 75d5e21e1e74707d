//! The guides say what the code does.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

/// Each backend names its parameters when it is given one that it does not know, and the guide explains each of them.
#[tokio::test]
async fn the_configuration_guide_explains_every_parameter_of_a_url() {
    let guide = include_str!("../docs/guide/configuration.md");
    let built = [
        ("memory://x", cfg!(feature = "memory"), 8),
        ("redis://h", cfg!(feature = "redis"), 13),
        ("amqp://h", cfg!(feature = "amqp"), 8),
        ("kafka://h", cfg!(feature = "kafka"), 16),
    ];
    for (url, _, count) in built.into_iter().filter(|(_, built, _)| *built) {
        let error = anymq::connect(format!("{url}?no_such=1")).await.err().unwrap().to_string();
        let names = error.split_once("allowed").or_else(|| error.split_once("there are")).unwrap().1;
        let names: Vec<&str> = names
            .trim_start_matches(|c: char| !c.is_ascii_alphabetic())
            .trim_start_matches("are ")
            .split(',')
            .map(|name| name.trim().trim_start_matches("and "))
            .collect();
        assert_eq!(names.len(), count, "{error}");
        for name in names {
            assert!(
                guide.contains(&format!("`{name}`")),
                "{url} takes {name}, which docs/guide/configuration.md does not explain"
            );
        }
    }
}
