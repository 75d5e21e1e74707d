//! What failed in a step's output, in few lines: a report of thousands is read from its end, and often only there.

/// Lines shown of one step at most.
const SHOWN: usize = 30;

/// Tests that failed by name and the targets they are in, what the suite says of its own, panics with their message, and errors
/// of the compiler.
pub(crate) fn of(output: &str) -> Vec<String> {
    let lines: Vec<&str> = output.lines().map(str::trim).collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let test = line.starts_with("test ") && line.ends_with("FAILED");
        if test || line.starts_with("FAILED ") || line.starts_with("error") || line.starts_with("`-p ") {
            found.push((*line).to_owned());
        } else if line.contains(" panicked at ") {
            found.push(format!("{line} {}", lines.get(at + 1).unwrap_or(&"")));
        }
    }
    found.dedup();
    found.truncate(SHOWN);
    found
}

#[cfg(test)]
mod tests {
    use super::of;

    #[test]
    fn what_failed_is_found_among_what_did_not() {
        let output = "test a ... ok\ntest b ... FAILED\n\n---- b stdout ----\n\
                      thread 'b' (1) panicked at tests/x.rs:3:5:\nleft is not right\nnote: run\n\
                      failures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed\n    FAILED p6_4_close: b got m\n   Compiling zmij\n";
        let said = [
            "test b ... FAILED",
            "thread 'b' (1) panicked at tests/x.rs:3:5: left is not right",
            "FAILED p6_4_close: b got m",
        ];
        assert_eq!(of(output), said);
        assert!(of("test a ... ok\n0 failed").is_empty());
        let many: String = (0..100).map(|n| format!("error: {n}\n")).collect();
        assert_eq!(of(&many).len(), super::SHOWN);
    }
}
