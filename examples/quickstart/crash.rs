//! Death of a member that is a task: the in-memory broker can be told to treat it as a process that was killed.

#[cfg(feature = "memory")]
pub fn crash(url: &str, name: &str) -> Result<(), String> {
    use anymq::memory::{MemoryBroker, MemoryConfig};
    let broker = MemoryConfig::from_url(url).and_then(MemoryBroker::named).map_err(|e| e.to_string())?;
    if broker.crash(name) { Ok(()) } else { Err(format!("there is no member {name}")) }
}

#[cfg(not(feature = "memory"))]
pub fn crash(_: &str, name: &str) -> Result<(), String> {
    Err(format!("{name} cannot die: only the in-memory broker has members that are tasks"))
}
