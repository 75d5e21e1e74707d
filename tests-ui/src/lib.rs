//! Compile-error tests of anymq; see `tests/ui.rs`.
