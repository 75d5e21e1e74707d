//! The Kafka backend of the anymq messaging library.
