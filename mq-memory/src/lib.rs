//! The in-memory broker of the anymq messaging library.
