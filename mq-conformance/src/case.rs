//! One test of the suite, as data.

use crate::planted::Bug;
use crate::{Check, Clock, Test};
use futures_util::future::LocalBoxFuture;
use mq_api::Feature;

/// A test.
#[derive(Clone, Copy)]
pub struct Case {
    /// Its name; starts with the promise, the bug or the capability that it is about.
    pub name: &'static str,
    /// The promise, such as `4.8`.
    pub promise: &'static str,
    /// Without these the test is unsupported, and the refusal is tested in its place.
    pub needs: &'static [Feature],
    /// On how many partitions it runs.
    pub spread: Spread,
    /// Which clock it needs.
    pub clock: Option<Clock>,
    /// Must not run beside others: it counts what the whole process has, or blocks it.
    pub alone: bool,
    /// Only for a broker that writes down what happens: a promise to users' tests.
    pub recorded: bool,
    /// Planted bugs that have to make it fail.
    pub bugs: &'static [Bug],
    /// The test.
    pub run: fn(Test) -> LocalBoxFuture<'static, Check>,
}

/// On how many partitions a test runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// With 1, and with 8 where the backend has partitions.
    Both,
    /// With 1: it is about the order of one partition, or partitions do not matter.
    One,
}

/// Lists the tests of a module: `"promise" function [features] bugs [bugs] options;`.
macro_rules! cases {
    ($( $promise:literal $name:ident needs [$($need:ident)*] bugs [$($bug:ident)*] $($option:ident)*; )*) => {
        /// The tests of this section.
        pub(crate) const CASES: &[$crate::case::Case] = &[$({
            #[allow(unused_mut)]
            let mut case = $crate::case::Case {
                name: stringify!($name),
                promise: $promise,
                needs: &[$(mq_api::Feature::$need),*],
                spread: $crate::case::Spread::Both,
                clock: None,
                alone: false,
                recorded: false,
                bugs: &[$($crate::planted::Bug::$bug),*],
                run: |t| Box::pin($name(t)),
            };
            $( $crate::case::cases!(@option case $option); )*
            case
        }),*];
    };
    (@option $case:ident one) => { $case.spread = $crate::case::Spread::One; };
    (@option $case:ident real) => { $case.clock = Some($crate::Clock::Real); };
    (@option $case:ident recorded) => { $case.recorded = true; };
    (@option $case:ident alone) => { $case.alone = true; };
}
pub(crate) use cases;
