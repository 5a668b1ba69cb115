//! Owns where the `dockerd` that runs here was told to keep its containers, where no file says it.
//! Refuses a process that a tenant can be: only one of root's, outside every container, is asked.

use super::{HostNames, containers::DaemonConfig};
use crate::{Namespace, process::INITIAL_PID, read};

/// Where `dockerd` writes its PID, wherever it keeps the rest.
const PID_FILE: &str = "run/docker.pid";
const MAX_PID: u64 = 32;

impl HostNames {
    /// The data root on its command line, or in the file that its command line names.
    pub(super) fn dockerd_root(&self) -> Option<String> {
        let pid = read::text(&self.host.path(PID_FILE), MAX_PID).ok()?.trim().parse().ok()?;
        // A stale file's PID may be anybody's by now.
        let hosts_own = self.host.comm(pid).ok()? == "dockerd"
            && self.host.uid(pid).ok()? == 0
            && self.host.namespace(pid, Namespace::Pid).ok()? == INITIAL_PID
            && crate::identity::holds_no_tenant(&self.host.cgroup(pid).ok()?);
        if !hosts_own {
            return None;
        }
        let line = self.host.command_line(pid).ok()?;
        let told = |flags: &[&str]| told(&line, flags).map(str::to_owned);
        let root = told(&["--data-root", "--graph", "-g"])
            .or_else(|| self.json::<DaemonConfig>(&told(&["--config-file"])?, None)?.data_root)?;
        root.starts_with('/').then_some(root)
    }
}

/// The value of the last of these flags, in either spelling.
fn told<'a>(line: &'a str, flags: &[&str]) -> Option<&'a str> {
    let words: Vec<&str> = line.split(' ').collect();
    let pairs = words.iter().zip(words.iter().skip(1).map(Some).chain([None]));
    let value = |(word, next): (&&'a str, Option<&&'a str>)| match word.split_once('=') {
        Some((flag, value)) => flags.contains(&flag).then_some(value),
        None => flags.contains(word).then_some(*next?),
    };
    pairs.filter_map(value).last().filter(|value| !value.is_empty())
}
