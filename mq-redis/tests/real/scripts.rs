//! Scripts where they stand: with data that a program would need long to make.

use crate::rig::{GROUP, TOPIC, ask, raw, server};

/// Calls a script as the library does.
pub(crate) fn call(raw: &mut redis::Connection, text: &str, keys: &[&str], args: &[&str]) -> redis::Value {
    let text = format!("#!lua flags=allow-oom\n{}{text}", include_str!("../../src/scripts/ids.lua"));
    let number = keys.len().to_string();
    let words: Vec<&str> =
        ["EVAL", &text, &number].into_iter().chain(keys.iter().copied()).chain(args.iter().copied()).collect();
    ask(raw, &words)
}

/// What others removed is still in the list of what is pending, and must not hide what stands behind it.
#[test]
fn a_sweep_removes_nothing_that_is_pending() {
    let Some(server) = server(false, &[]) else { return };
    let mut raw = raw(&server);
    let _: () = ask(&mut raw, &["XGROUP", "CREATE", TOPIC, GROUP, "0", "MKSTREAM"]);
    for n in 1..=1200 {
        let _: String = ask(&mut raw, &["XADD", TOPIC, &format!("1-{n}"), "k", "v"]);
    }
    let _: redis::Value = ask(&mut raw, &["XREADGROUP", "GROUP", GROUP, "one", "COUNT", "1200", "STREAMS", TOPIC, ">"]);
    for n in 2..=1100 {
        let _: i64 = ask(&mut raw, &["XDEL", TOPIC, &format!("1-{n}")]);
    }
    let sweep = include_str!("../../src/scripts/sweep.lua");
    call(&mut raw, sweep, &[TOPIC, "{orders}..meta"], &["-", "1000"]);
    assert_eq!(ask::<i64>(&mut raw, &["XLEN", TOPIC]), 101, "all are pending");
    // What is not pending goes.
    let _: i64 = ask(&mut raw, &["XACK", TOPIC, GROUP, "1-1150"]);
    call(&mut raw, sweep, &[TOPIC, "{orders}..meta"], &["-", "1000"]);
    assert_eq!(ask::<i64>(&mut raw, &["XLEN", TOPIC]), 100);
}

/// Of a group that was made again at a lower place, entries that it has not read again yet were tried before.
#[test]
fn tidying_keeps_the_attempts_of_what_is_to_be_read_again() {
    let Some(server) = server(false, &[]) else { return };
    let mut raw = raw(&server);
    let tries = "{orders}..billing..tries";
    for n in 1..=3 {
        let _: String = ask(&mut raw, &["XADD", TOPIC, &format!("1-{n}"), "k", "v"]);
        let _: i64 = ask(&mut raw, &["HSET", tries, &format!("1-{n}"), "4:0"]);
    }
    let _: () = ask(&mut raw, &["XGROUP", "CREATE", TOPIC, GROUP, "1-1"]);
    let _: redis::Value = ask(&mut raw, &["XREADGROUP", "GROUP", GROUP, "one", "COUNT", "1", "STREAMS", TOPIC, ">"]);
    call(&mut raw, include_str!("../../src/scripts/leave.lua"), &[TOPIC, tries], &[GROUP, "", "100000"]);
    let mut left: Vec<String> = ask(&mut raw, &["HKEYS", tries]);
    left.sort();
    assert_eq!(left, ["1-2", "1-3"], "one is settled, one pending, one to come");
}
