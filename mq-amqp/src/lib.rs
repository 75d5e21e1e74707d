//! The RabbitMQ backend of the anymq messaging library.
