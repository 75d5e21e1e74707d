//! Traits and types of the anymq messaging library.
