//! A test that failed beside others is run once more, alone. Two cores and five servers make a deadline pass now and then; a fault
//! fails again. It is named in the report either way, and counted apart from what passed at once: one that is named often is
//! looked into.

use crate::steps::{Report, Step, in_turn};

/// More than this failing in one step is no accident.
const FEW: usize = 3;

/// Looks again at what failed.
pub(crate) fn at(reports: &mut [Report]) {
    for report in reports.iter_mut().filter(|report| report.count.failed > 0) {
        let failed = report.count.failed;
        let names = tests(&report.failures);
        // What else failed, as a crash or a program that does not compile, has no name.
        if names.is_empty() || names.len() > FEW || names.len() as u64 != failed {
            continue;
        }
        let looks = in_turn(steps(&report.step, &names, &report.failures));
        let passed = looks.iter().map(|look| look.count.passed).sum::<u64>();
        if looks.iter().all(|look| look.count.failed == 0) && passed >= failed {
            report.count.failed = 0;
            report.count.late = failed;
        }
    }
}

/// The tests that failed, by name.
fn tests(failures: &[String]) -> Vec<String> {
    let mut names: Vec<String> = failures
        .iter()
        .filter_map(|line| {
            let of_cargo = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED"));
            let of_suite = || line.strip_prefix("FAILED ").and_then(|rest| rest.split_once(": ")).map(|(name, _)| name);
            of_cargo.or_else(of_suite).map(str::to_owned)
        })
        .collect();
    names.sort();
    names.dedup();
    names
}

/// The same step with these tests only.
fn steps(step: &Step, names: &[String], failures: &[String]) -> Vec<Step> {
    let again = format!("{}, second look", step.suite);
    if step.suite.starts_with("conformance") {
        return names
            .iter()
            .map(|name| step.clone().named(&again).args(["--filter".to_owned(), name.clone()]))
            .collect();
    }
    // With --no-fail-fast cargo ends with the targets that failed, each as "    `-p package --test name`".
    let targets: Vec<&str> = failures
        .iter()
        .filter_map(|line| line.strip_prefix("`-p ")?.strip_suffix('`')?.split_once(" --test "))
        .map(|(_, target)| target)
        .collect();
    if targets.is_empty() {
        return Vec::new();
    }
    let mut only = step.clone().named(&again).without_targets();
    for target in targets {
        only = only.args(["--test", target]);
    }
    vec![only.args(["--", "--exact"]).args(names.iter().cloned())]
}

#[cfg(test)]
mod tests {
    use super::{steps, tests};
    use crate::failures;
    use crate::steps::Step;

    #[test]
    fn what_failed_is_run_again_and_nothing_else() {
        let output = "test ok_one ... ok\ntest slow::one ... FAILED\nfailures:\n    slow::one\nerror: 1 target failed:\n    `-p mq-kafka --test faults`\n";
        let failed = failures::of(output);
        let names = tests(&failed);
        assert_eq!(names, ["slow::one"]);
        let step = Step::cargo("tests", &["test", "--lib", "--bins", "--test", "a", "--test", "faults"]);
        let again: Vec<Vec<String>> =
            steps(&step, &names, &failed).iter().map(|step| step.arguments().to_vec()).collect();
        assert_eq!(again, [["test", "--test", "faults", "--", "--exact", "slow::one"]]);
        let failed = failures::of("    FAILED p6_4_close: b got m\n");
        let again = steps(&Step::xtask("amqp", "conformance", &["conformance", "amqp"]), &tests(&failed), &failed);
        assert_eq!(again[0].arguments(), ["conformance", "amqp", "--filter", "p6_4_close"]);
    }
}
