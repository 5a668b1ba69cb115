//! Owns what the kernel lets this process do: capabilities, and what takes them back.
//! Refuses to ask for more, to give anything up, and to say why a call was refused: whoever tried it knows more.

use std::fmt;
use std::path::Path;

use crate::{Host, read};

const LIMIT: u64 = 64 << 10;
/// `uid_map` of the host's own user namespace.
const HOST_USERS: [&str; 3] = ["0", "0", "4294967295"];
/// Debian's and Ubuntu's kernels know levels above 2, at which `perf_event_open` is refused in spite of `CAP_PERFMON`.
const PATCHED_LEVEL: i32 = 3;

/// The capabilities that anything here rests on, by their bit (`linux/capability.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Capability {
    DacReadSearch = 2,
    SysPtrace = 19,
    SysAdmin = 21,
    SysResource = 24,
    Syslog = 34,
    Perfmon = 38,
    Bpf = 39,
    CheckpointRestore = 40,
}

impl Capability {
    pub const ALL: &'static [Self] = &[
        Self::Bpf,
        Self::Perfmon,
        Self::SysPtrace,
        Self::DacReadSearch,
        Self::Syslog,
        Self::SysResource,
        Self::SysAdmin,
        Self::CheckpointRestore,
    ];

    /// As Kubernetes and Docker spell it.
    pub fn short(self) -> &'static str {
        self.as_str().trim_start_matches("CAP_")
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::DacReadSearch => "CAP_DAC_READ_SEARCH",
            Self::SysPtrace => "CAP_SYS_PTRACE",
            Self::SysAdmin => "CAP_SYS_ADMIN",
            Self::SysResource => "CAP_SYS_RESOURCE",
            Self::Syslog => "CAP_SYSLOG",
            Self::Perfmon => "CAP_PERFMON",
            Self::Bpf => "CAP_BPF",
            Self::CheckpointRestore => "CAP_CHECKPOINT_RESTORE",
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// What this process may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    effective: u64,
    /// In a user namespace of its own, whose capabilities count for nothing towards the host.
    apart: bool,
    /// `kernel.perf_event_paranoid`.
    perf_event_paranoid: Option<i32>,
    /// A seccomp filter judges this process's system calls.
    filtered: bool,
}

impl Rights {
    /// Pure over the texts of `status` and `uid_map` of a process, and `perf_event_paranoid`.
    fn parse(status: &str, users: &str, paranoid: &str) -> Self {
        let field = |name: &str| {
            status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        let apart = !users.is_empty() && users.split_whitespace().ne(HOST_USERS);
        Self {
            apart,
            effective: field("CapEff").and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or(0),
            perf_event_paranoid: paranoid.trim().parse().ok(),
            filtered: field("Seccomp") == Some("2"),
        }
    }

    /// Those of a process with this effective set, in the host's user namespace or apart from it.
    pub fn of(effective: u64, filtered: bool, apart: bool) -> Self {
        Self { effective, apart, filtered, ..Self::default() }
    }

    /// In a user namespace of its own.
    pub const fn are_apart(&self) -> bool {
        self.apart
    }

    /// A seccomp filter judges this process's system calls.
    pub const fn are_filtered(&self) -> bool {
        self.filtered
    }

    /// `CAP_SYS_ADMIN` stands for what was split off it.
    pub fn has(&self, capability: Capability) -> bool {
        let held = |capability: Capability| (self.effective >> (capability as u32)) & 1 == 1;
        let split = matches!(
            capability,
            Capability::Bpf | Capability::Perfmon | Capability::CheckpointRestore | Capability::SysAdmin
        );
        !self.apart && (held(capability) || split && held(Capability::SysAdmin))
    }

    /// Whether the eBPF side works by `CAP_SYS_ADMIN`: older tools give only that, and some kernels want it too.
    pub fn rests_on_admin(&self) -> bool {
        let split = [Capability::Bpf, Capability::Perfmon];
        self.has(Capability::SysAdmin)
            && (split.iter().any(|capability| (self.effective >> (*capability as u32)) & 1 == 0)
                || self.perf_event_paranoid.is_some_and(|level| level >= PATCHED_LEVEL))
    }

    /// The first of these that is not held.
    pub fn lacks(&self, wanted: &[Capability]) -> Option<Capability> {
        wanted.iter().copied().find(|capability| !self.has(*capability))
    }
}

impl Host {
    /// Of the process whose files this tree has: a recorded host's.
    pub fn recorded_rights(&self) -> Rights {
        let text = |path: &str| read::text(&self.path(path), LIMIT).unwrap_or_default();
        Rights::parse(
            &text("proc/self/status"),
            &text("proc/self/uid_map"),
            &text("proc/sys/kernel/perf_event_paranoid"),
        )
    }

    /// Of the calling thread, whatever this host's root is. What cannot be read counts as not there.
    pub fn rights(&self) -> Rights {
        let text = |path: &Path| read::text(path, LIMIT).unwrap_or_default();
        Rights::parse(
            &text(Path::new("/proc/thread-self/status")),
            &text(Path::new("/proc/thread-self/uid_map")),
            &text(&self.path("proc/sys/kernel/perf_event_paranoid")),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rights(capabilities: &[Capability], seccomp: u8, paranoid: &str) -> Rights {
        let effective = capabilities.iter().fold(0u64, |set, capability| set | 1 << (*capability as u32));
        let status = format!("Name:\tcotenant\nCapEff:\t{effective:016x}\nSeccomp:\t{seccomp}\n");
        Rights::parse(&status, "         0          0 4294967295\n", paranoid)
    }

    #[test]
    fn c72_sys_admin_is_rested_on_where_nothing_finer_is_given_or_it_is_wanted_beside() {
        let all = [Capability::Bpf, Capability::Perfmon, Capability::SysAdmin];
        assert!(rights(&all[2..], 0, "2").rests_on_admin());
        assert!(rights(&all[1..], 0, "2").rests_on_admin());
        assert!(!rights(&all, 0, "2").rests_on_admin() && !rights(&all, 0, "").rests_on_admin());
        assert!(rights(&all, 0, "3\n").rests_on_admin());
        assert!(!rights(&all[..2], 0, "4").rests_on_admin());
    }

    #[test]
    fn c73_a_filter_is_seen() {
        assert!(rights(&[], 2, "2").are_filtered() && !rights(&[], 0, "2").are_filtered());
    }

    #[test]
    fn capabilities_of_a_user_namespace_count_for_nothing() {
        let status = "CapEff:\t000001ffffffffff\nSeccomp:\t0\n";
        let apart = Rights::parse(status, "         0       1000          1\n", "2");
        assert!(!apart.has(Capability::SysPtrace) && !apart.rests_on_admin());
        assert!(apart.are_apart());
        assert!(Rights::parse(status, "0 0 4294967295\n", "2").has(Capability::SysPtrace));
        // A kernel without user namespaces has no such file.
        assert!(Rights::parse(status, "", "2").has(Capability::SysPtrace));
    }

    #[test]
    fn sys_admin_stands_for_what_was_split_off_it_only() {
        let admin = rights(&[Capability::SysAdmin], 0, "2");
        assert_eq!(admin.lacks(&[Capability::Bpf, Capability::Perfmon, Capability::CheckpointRestore]), None);
        assert_eq!(admin.lacks(&[Capability::SysPtrace]), Some(Capability::SysPtrace));
        assert_eq!(admin.lacks(&[Capability::Syslog]), Some(Capability::Syslog));
    }

    #[test]
    fn the_running_process_has_what_its_status_says() {
        // Root in CI; whoever else runs it has less, and `has` then says so.
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
        assert_eq!(Host::live().rights().effective, u64::from_str_radix(line, 16).unwrap());
    }
}
