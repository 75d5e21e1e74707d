//! The Redis backend of the anymq messaging library.
