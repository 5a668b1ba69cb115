//! Owns why a fact about the host could not be had.
//! Refuses library and ELF errors, which have their own types beside their doors.

use std::io;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("could not read {}; run as root in the host's namespaces", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is longer than {limit} bytes and was not read", path.display())]
    TooLong { path: PathBuf, limit: u64 },
    #[error("{} does not look like this kernel's format: {what}; report it with `uname -r`", path.display())]
    Malformed { path: PathBuf, what: &'static str },
    #[error(
        "{} hides every address from this process; run `sysctl kernel.kptr_restrict=1` and give the agent CAP_SYSLOG",
        path.display()
    )]
    AddressesHidden { path: PathBuf },
    #[error(
        "tracefs is not mounted (or cannot be looked into: another user than root needs CAP_DAC_READ_SEARCH) and could not \
         be mounted at {}; run `mount -t tracefs tracefs /sys/kernel/tracing` on the host, or mount it into the container", path.display()
    )]
    MountTracefs { path: PathBuf, source: io::Error },
    #[error(
        "tracefs is mounted, and this process may not read {}; run as root, or give it CAP_DAC_READ_SEARCH",
        path.display()
    )]
    TracefsHidden { path: PathBuf },
    #[error("could not start the {what} thread; raise the limit on processes")]
    Thread { what: &'static str, source: io::Error },
}

impl HostError {
    /// The process or file went away while it was asked about.
    pub fn is_gone(&self) -> bool {
        const ESRCH: i32 = rustix::io::Errno::SRCH.raw_os_error();
        match self {
            Self::Read { source, .. } => {
                source.kind() == io::ErrorKind::NotFound || source.raw_os_error() == Some(ESRCH)
            }
            _ => false,
        }
    }
}
