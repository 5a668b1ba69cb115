//! Owns the kernel's switches that take rights away, and what it tells time by.
//! Refuses to try anything: a system call that is refused says more than any file, and is made elsewhere.

use crate::{Host, read};

const LIMIT: u64 = 64 << 10;

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
}
