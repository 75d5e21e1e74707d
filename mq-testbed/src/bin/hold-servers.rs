//! Starts servers and holds them until it is ended, however that happens: what `tests/left_behind.rs` ends.

use std::io::Read;

use mq_testbed::{Fleet, Folder, Origin, Problem, Want};

fn main() -> Result<(), Problem> {
    mq_testbed::end_with_a_server();
    let wants: Vec<Want> = std::env::args().skip(1).filter_map(|name| Want::named(&name)).collect();
    let fleet = Fleet::start(&wants, Folder::for_run()?);
    for entry in fleet.entries() {
        match &entry.origin {
            Origin::Missing(problem) => eprintln!("{} is missing: {problem}", entry.want.name()),
            _ => eprintln!("{}: {}", entry.want.name(), entry.url.as_deref().unwrap_or_default()),
        }
    }
    println!("{} up", fleet.entries().iter().filter(|entry| entry.url.is_some()).count());
    let mut word = [0];
    let heard = std::io::stdin().read(&mut word).unwrap_or(0);
    // One way to end by accident, on request.
    assert!(heard == 0, "asked to panic");
    Ok(())
}
