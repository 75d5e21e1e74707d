//! The conformance suite of the anymq messaging library; any backend can run it.
