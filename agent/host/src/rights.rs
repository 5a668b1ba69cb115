//! Owns what this process may do: capabilities, seccomp, user namespace, and the kernel's switches that take more away.
//! Refuses to try anything: a system call that is refused says more than any file, and is made elsewhere.

use procfs::{FromRead, process::Status};

use crate::{Host, HostError, read};

const LIMIT: u64 = 64 << 10;

/// A capability that the agent has a use for, with its bit (`include/uapi/linux/capability.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Capability {
    DacReadSearch = 2,
    SysPtrace = 19,
    SysAdmin = 21,
    SysResource = 24,
    Syslog = 34,
    /// Linux 5.8; before it `SysAdmin`.
    Perfmon = 38,
    /// Linux 5.8; before it `SysAdmin`.
    Bpf = 39,
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
    ];

    /// As Kubernetes and Docker spell it; systemd and `capsh` put `CAP_` before it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::DacReadSearch => "DAC_READ_SEARCH",
            Self::SysPtrace => "SYS_PTRACE",
            Self::SysAdmin => "SYS_ADMIN",
            Self::SysResource => "SYS_RESOURCE",
            Self::Syslog => "SYSLOG",
            Self::Perfmon => "PERFMON",
            Self::Bpf => "BPF",
        }
    }
}

/// What the kernel lets this process do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// The effective set, a bit a capability.
    pub effective: u64,
    /// 0 none, 1 strict, 2 a filter; `None` where the kernel has no seccomp.
    pub seccomp: Option<u32>,
    pub no_new_privileges: bool,
    /// Capabilities count for the host only in its first user namespace.
    pub initial_user_namespace: bool,
}

impl Rights {
    pub const fn has(&self, capability: Capability) -> bool {
        self.effective & 1 << capability as u8 != 0
    }

    /// `SYS_ADMIN` was all of `BPF` and `PERFMON` before Linux 5.8, and still stands for both.
    pub const fn may(&self, capability: Capability) -> bool {
        match capability {
            Capability::Bpf | Capability::Perfmon => self.has(capability) || self.has(Capability::SysAdmin),
            _ => self.has(capability),
        }
    }
}

/// How far the kernel's lockdown goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lockdown {
    /// Not built in, or off.
    #[default]
    None,
    Integrity,
    /// BPF programs may not read kernel memory, and tracefs and kprobes are closed.
    Confidentiality,
}

impl Lockdown {
    /// `none [integrity] confidentiality`: the one in brackets is in force.
    pub fn parse(text: &str) -> Option<Self> {
        match text.split_once('[')?.1.split_once(']')?.0 {
            "none" => Some(Self::None),
            "integrity" => Some(Self::Integrity),
            "confidentiality" => Some(Self::Confidentiality),
            _ => None,
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Integrity => "integrity",
            Self::Confidentiality => "confidentiality",
        }
    }
}

/// Switches under `/proc/sys/kernel`; `None` for what this kernel has not or does not show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// 2 is the mainline's highest; distributions add 3 and 4, which ask for more than `PERFMON`.
    pub perf_event_paranoid: Option<i32>,
    /// 0 lets everybody load programs.
    pub unprivileged_bpf_disabled: Option<i32>,
    pub kptr_restrict: Option<i32>,
    pub dmesg_restrict: Option<i32>,
}

impl Host {
    pub fn rights(&self) -> Result<Rights, HostError> {
        let path = self.path("proc/self/status");
        let content = read::bytes(&path, LIMIT)?;
        let status = Status::from_read(content.as_slice())
            .map_err(|_| HostError::Malformed { path, what: "not a status file" })?;
        Ok(Rights {
            effective: status.capeff,
            seccomp: status.seccomp,
            no_new_privileges: status.nonewprivs == Some(1),
            initial_user_namespace: self.in_initial_user_namespace(),
        })
    }

    /// The first user namespace maps every id to itself. One that cannot be read is taken for it.
    fn in_initial_user_namespace(&self) -> bool {
        read::text(&self.path("proc/self/uid_map"), LIMIT).map_or(true, |map| {
            let words: Vec<&str> = map.split_whitespace().collect();
            words.is_empty() || words == ["0", "0", "4294967295"]
        })
    }

    /// A kernel without the file has no lockdown; one whose securityfs is not mounted here cannot be asked.
    pub fn lockdown(&self) -> Option<Lockdown> {
        if !self.path("sys/kernel/security").join("lsm").exists() {
            return None;
        }
        let path = self.path("sys/kernel/security/lockdown");
        read::text(&path, LIMIT).map_or(Some(Lockdown::None), |text| Lockdown::parse(&text))
    }

    pub fn switches(&self) -> Switches {
        let number = |name: &str| {
            read::text(&self.path(&format!("proc/sys/kernel/{name}")), LIMIT).ok()?.trim().parse().ok()
        };
        Switches {
            perf_event_paranoid: number("perf_event_paranoid"),
            unprivileged_bpf_disabled: number("unprivileged_bpf_disabled"),
            kptr_restrict: number("kptr_restrict"),
            dmesg_restrict: number("dmesg_restrict"),
        }
    }

    /// What the kernel tells time by.
    pub fn clock_source(&self) -> Option<String> {
        let path = self.path("sys/devices/system/clocksource/clocksource0/current_clocksource");
        Some(read::text(&path, LIMIT).ok()?.trim().to_owned()).filter(|name| !name.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn c72_the_effective_set_is_read_bit_by_bit() {
        let rights = Rights { effective: 1 << 39 | 1 << 19, ..Rights::default() };
        assert!(rights.has(Capability::Bpf) && rights.has(Capability::SysPtrace));
        assert!(!rights.may(Capability::Perfmon) && !rights.may(Capability::DacReadSearch));
        let old = Rights { effective: 1 << 21, ..Rights::default() };
        assert!(old.may(Capability::Bpf) && old.may(Capability::Perfmon) && !old.has(Capability::Bpf));
    }

    #[test]
    fn live_rights_are_those_of_the_status_file() {
        let rights = Host::live().rights().unwrap();
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
        assert_eq!(rights.effective, u64::from_str_radix(line.trim(), 16).unwrap());
        assert!(rights.seccomp.is_some());
    }

    #[test]
    fn lockdown_is_the_word_in_brackets() {
        assert_eq!(Lockdown::parse("[none] integrity confidentiality\n"), Some(Lockdown::None));
        assert_eq!(Lockdown::parse("none integrity [confidentiality]"), Some(Lockdown::Confidentiality));
        assert_eq!(Lockdown::parse("none integrity"), None);
        assert_eq!(Lockdown::parse("[maximal]"), None);
    }

    #[test]
    fn what_a_tree_does_not_show_is_not_known() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        assert_eq!(host.switches(), Switches::default());
        assert_eq!((host.lockdown(), host.clock_source()), (None, None));
        fs::create_dir_all(root.path().join("proc/sys/kernel")).unwrap();
        fs::write(root.path().join("proc/sys/kernel/perf_event_paranoid"), "4\n").unwrap();
        fs::write(root.path().join("proc/sys/kernel/kptr_restrict"), "x\n").unwrap();
        let switches = host.switches();
        assert_eq!((switches.perf_event_paranoid, switches.kptr_restrict), (Some(4), None));
        fs::create_dir_all(root.path().join("sys/kernel/security")).unwrap();
        fs::write(root.path().join("sys/kernel/security/lsm"), "capability").unwrap();
        assert_eq!(host.lockdown(), Some(Lockdown::None));
    }

    #[test]
    fn a_user_namespace_is_seen_by_its_map() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/self")).unwrap();
        let map = root.path().join("proc/self/uid_map");
        let host = Host::at(root.path());
        fs::write(&map, "         0          0 4294967295\n").unwrap();
        assert!(host.in_initial_user_namespace());
        fs::write(&map, "         0     100000      65536\n").unwrap();
        assert!(!host.in_initial_user_namespace());
    }
}
