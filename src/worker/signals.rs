/// Waits for SIGINT or SIGTERM (Ctrl-C and Ctrl-Break on Windows); says which. Cancel-safe.
///
/// The first call takes over the signal's default, which is to end the process.
///
/// # Errors
/// When the operating system refuses to install the handler.
pub async fn shutdown_signal() -> std::io::Result<&'static str> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut term = signal(SignalKind::terminate())?;
        let mut int = signal(SignalKind::interrupt())?;
        tokio::select! {
            biased;
            _ = term.recv() => Ok("SIGTERM"),
            _ = int.recv() => Ok("SIGINT"),
        }
    }
    #[cfg(not(unix))]
    {
        tokio::signal::ctrl_c().await?;
        Ok("Ctrl-C")
    }
}
