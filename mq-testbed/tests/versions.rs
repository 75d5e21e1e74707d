//! Every other version starts, and comes back after a kill. Long, and it downloads: `cargo xtask test --full` runs it.

// A test may unwrap: its panic is the report.
#![allow(clippy::unwrap_used)]

use mq_testbed::{Folder, Version};

#[test]
#[ignore = "long, and it downloads"]
fn every_version_comes_back_after_a_kill() {
    Version::provide(&Version::ALL, |line| println!("{line}")).unwrap();
    for version in Version::ALL {
        let folder = Folder::for_run().unwrap();
        let mut server = version.start_in(folder.path()).unwrap();
        let killed = server.kill().unwrap();
        assert!(!server.answers(), "{} answers after kill -9", version.name());
        let back = server.restart().unwrap();
        assert_ne!(killed.pid, back.pid);
        assert!(mq_testbed::eventually(std::time::Duration::from_secs(30), || server.answers()));
    }
}
