//! The commonest mistakes, and that the compiler's words help. After a change: `TRYBUILD=overwrite cargo test -p tests-ui`,
//! then read what changed.

#[test]
fn mistakes_are_explained() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
