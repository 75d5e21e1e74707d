//! The engine that every anymq backend shares; for authors of backends.
