//! The commands of the anymq repository.

fn main() {}
