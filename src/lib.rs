//! The anymq messaging library.
