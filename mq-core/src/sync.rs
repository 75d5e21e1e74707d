//! Locks and atomics of what is shared between threads. In an ordinary build they are `parking_lot`'s and `std`'s; built with
//! the feature `shuttle` the tests in `model` run them under a scheduler that tries many interleavings.

#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) use std::sync::atomic;

#[cfg(all(test, feature = "shuttle"))]
pub(crate) use modelled::{Mutex, MutexGuard};
#[cfg(all(test, feature = "shuttle"))]
pub(crate) use shuttle::sync::atomic;

#[cfg(all(test, feature = "shuttle"))]
mod modelled {
    pub(crate) use shuttle::sync::MutexGuard;

    /// `parking_lot`'s face on shuttle's lock.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("no thread panics with a lock held")
        }
    }
}
