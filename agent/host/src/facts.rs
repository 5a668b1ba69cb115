//! Owns what kind of kernel this is: its version and which attachment kinds it offers.
//! Refuses conclusions: what follows from a missing facility is the plan's business.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};

use crate::{Host, HostError, read};

/// Some 250,000 symbols at 60 bytes each fit four times.
const KALLSYMS_LIMIT: u64 = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl KernelVersion {
    /// `6.18.44-fc-v782`, `5.15.0-1084-aws`, `6.9-rc3`, `4.18.0-553.el8`.
    pub fn parse(release: &str) -> Option<Self> {
        let digits = |text: &str| -> Option<u32> {
            text[..text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len())].parse().ok()
        };
        let mut parts = release.trim().splitn(3, '.');
        let major = digits(parts.next()?)?;
        let minor = digits(parts.next()?)?;
        let patch = parts.next().and_then(digits).unwrap_or(0);
        Some(Self { major, minor, patch })
    }
}

impl Host {
    pub fn kernel_version(&self) -> Result<KernelVersion, HostError> {
        let path = self.path("proc/sys/kernel/osrelease");
        let release = read::text(&path, 4096)?;
        KernelVersion::parse(&release).ok_or(HostError::Malformed { path, what: "not a kernel release" })
    }

    /// Whether kprobes can be made through perf events.
    pub fn has_kprobes(&self) -> bool {
        self.path("sys/bus/event_source/devices/kprobe/type").exists()
    }

    /// Whether uprobes can be made through perf events.
    pub fn has_uprobes(&self) -> bool {
        self.path("sys/bus/event_source/devices/uprobe/type").exists()
    }

    /// Which of `names` the running kernel has, modules included, in their order.
    pub fn kernel_symbols(&self, names: &[&str]) -> Result<Vec<bool>, HostError> {
        let path = self.path("proc/kallsyms");
        let failed = |source| HostError::Read { path: path.clone(), source };
        let mut found = vec![false; names.len()];
        let mut reader = BufReader::new(File::open(&path).map_err(failed)?.take(KALLSYMS_LIMIT));
        let mut line = String::new();
        while reader.read_line(&mut line).map_err(failed)? > 0 {
            if let Some(symbol) = line.split_whitespace().nth(2)
                && let Some(at) = names.iter().position(|name| *name == symbol)
            {
                found[at] = true;
            }
            line.clear();
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_distributions_are_read() {
        let version = |major, minor, patch| Some(KernelVersion { major, minor, patch });
        assert_eq!(KernelVersion::parse("6.18.44-fc-v782\n"), version(6, 18, 44));
        assert_eq!(KernelVersion::parse("5.15.0-1084-aws"), version(5, 15, 0));
        assert_eq!(KernelVersion::parse("6.9-rc3"), version(6, 9, 0));
        assert_eq!(KernelVersion::parse("4.18.0-553.el8_10.x86_64"), version(4, 18, 0));
        assert_eq!(KernelVersion::parse("linux"), None);
        assert!(version(5, 15, 0) > version(5, 4, 300));
    }

    #[test]
    fn live_kernel_has_a_version_and_symbols() {
        let host = Host::live();
        assert!(host.kernel_version().unwrap().major >= 4);
        assert_eq!(host.kernel_symbols(&["schedule", "no_such_symbol_here"]).unwrap(), [true, false]);
    }

    #[test]
    fn kprobes_are_a_fact_of_the_tree() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        assert!(!host.has_kprobes());
        let device = root.path().join("sys/bus/event_source/devices/kprobe");
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("type"), "8\n").unwrap();
        assert!(host.has_kprobes());
    }
}
