//! Owns the numbers of processes and threads as the host has them: a driver knows no PID namespace.
//! Refuses to guess them from inside one: [`PROC_VARIABLE`] names the host's own `/proc` there.

use std::{env, fs, path::PathBuf, sync::OnceLock};

/// Names the host's `/proc` for a process that sees another one.
pub const PROC_VARIABLE: &str = "COTENANT_SIM_PROC";

fn foreign() -> Option<&'static PathBuf> {
    static FOREIGN: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOREIGN.get_or_init(|| env::var_os(PROC_VARIABLE).map(PathBuf::from)).as_ref()
}

/// A file of the host's `/proc`.
pub(crate) fn proc_file(name: &str) -> PathBuf {
    foreign().map_or_else(|| PathBuf::from("/proc"), Clone::clone).join(name)
}

/// This process.
pub fn own_pid() -> u32 {
    let Some(proc) = foreign() else { return std::process::id() };
    // The link says who reads it, in the numbers of the namespace that this /proc was mounted in.
    let link = fs::read_link(proc.join("self")).ok();
    link.and_then(|link| link.to_str()?.parse().ok()).unwrap_or(0)
}

/// This thread.
pub fn own_thread() -> u32 {
    let Some(proc) = foreign() else {
        // SAFETY: takes no argument and cannot fail.
        return unsafe { libc::gettid() }.unsigned_abs();
    };
    let link = fs::read_link(proc.join("thread-self")).ok();
    link.and_then(|link| link.file_name()?.to_str()?.parse().ok()).unwrap_or(0)
}
