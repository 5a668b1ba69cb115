//! Owns how NVML is asked: which library, how often, and for how long a call may take.
//! Refuses files and flags: the binary fills this in and has checked the interval.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

/// Process queries take the driver's API lock and every GPU lock, so polling joins the queue it measures.
pub const MIN_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct NvmlConfig {
    /// The library to load; `None` is the loader's own `libnvidia-ml.so.1`.
    pub library: Option<PathBuf>,
    /// Time between polls; raised to [`MIN_INTERVAL`] when below it.
    pub interval: Duration,
    /// Tests only: an interval below the floor.
    pub test_interval: Option<Duration>,
    /// How long one call may take before the poll is given up.
    pub deadline: Duration,
    /// Read `PCIe` throughput on every sixth poll. Each figure blocks for 20 ms inside the driver.
    pub pcie: bool,
    /// Whether this agent sees the host's PIDs. If not, process lists mean nothing and are not asked for.
    pub host_pid_namespace: bool,
    pub processes: ProcessCheck,
}

impl Default for NvmlConfig {
    fn default() -> Self {
        Self {
            library: None,
            interval: MIN_INTERVAL,
            test_interval: None,
            deadline: Duration::from_secs(2),
            pcie: false,
            host_pid_namespace: true,
            processes: ProcessCheck::live(),
        }
    }
}

impl NvmlConfig {
    /// The interval in force before any stretching.
    pub fn effective_interval(&self) -> Duration {
        self.test_interval.unwrap_or_else(|| self.interval.max(MIN_INTERVAL))
    }
}

type Exists = Arc<dyn Fn(u32) -> bool + Send + Sync>;
type Command = Arc<dyn Fn(u32) -> Option<String> + Send + Sync>;

/// What the process lists are checked against.
#[derive(Clone)]
pub struct ProcessCheck {
    /// Whether a PID exists.
    pub exists: Exists,
    /// The process's `comm`, to know the MPS server by.
    pub command: Command,
}

impl ProcessCheck {
    /// The running kernel's processes. Whether one exists is asked of the kernel and not of `/proc`, which may be mounted
    /// with `hidepid` and hides others' processes from a thread without capabilities.
    pub fn live() -> Self {
        Self {
            exists: Arc::new(exists),
            command: Arc::new(|pid| {
                let comm = std::fs::read(format!("/proc/{pid}/comm")).ok()?;
                Some(String::from_utf8_lossy(comm.trim_ascii_end()).into_owned())
            }),
        }
    }
}

/// "May not be signalled" is an existing process too.
fn exists(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| matches!(test_kill_process(pid), Ok(()) | Err(Errno::PERM)))
}

impl fmt::Debug for ProcessCheck {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ProcessCheck")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_cannot_be_signalled_exists_all_the_same() {
        assert!(exists(std::process::id()) && exists(1));
        for nobody in [0, u32::MAX, 4_194_304] {
            assert!(!exists(nobody), "{nobody}");
        }
    }

    #[test]
    fn c47_interval_has_a_floor() {
        let config = NvmlConfig { interval: Duration::from_millis(10), ..NvmlConfig::default() };
        assert_eq!(config.effective_interval(), MIN_INTERVAL);
        let test = NvmlConfig { test_interval: Some(Duration::from_millis(10)), ..config };
        assert_eq!(test.effective_interval(), Duration::from_millis(10));
    }
}
