//! Owns what this host says: processes, cgroups, mapped libraries, tracefs and BTF, as facts and identities.
//! Refuses the GPU and the kernel's programs; it only ever reads, except to mount tracefs when asked.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test that unwraps fails at the right line"))]

mod apiserver;
pub mod btf;
mod dmem;
mod elf;
mod error;
mod facts;
mod gpus;
mod hardware;
mod heard;
mod identity;
mod jobs;
mod kallsyms;
mod kernel_log;
mod kubelet;
mod library;
mod mappings;
mod memory;
mod memory_events;
mod names;
mod process;
mod read;
mod rights;
mod surroundings;
mod switches;
pub mod tracefs;

use std::path::{Path, PathBuf};

pub use apiserver::{
    AccessError, ApiConfig, NoteKind, PodNote, PodWatch, PodWatchError, Roster, Team, Wishes,
};
pub use dmem::{Dmem, Region};
pub use elf::{ElfError, Exports, exports};
pub use error::HostError;
pub use facts::KernelVersion;
pub use hardware::{Hardware, PciGpu};
pub use heard::{Asked, Heard};
pub use identity::{CgroupView, Identity, Kind, Observed, Owner, Runtime, identify};
pub use jobs::{JobListing, Jobs, JobsConfig};
pub use kernel_log::{Followed, KernelLog, KernelLogError, Notice, Record, Start};
pub use kubelet::{Kubelet, KubeletConfig, Listing, Source};
pub use library::{Library, LibraryError, is_libcuda};
pub use mappings::{Mapping, Mappings};
pub use memory::{HostMemory, MemoryLimit, MemoryPlace};
pub use memory_events::MemoryEvents;
pub use names::{HostNames, Named, Names, PodName};
pub use process::{Namespace, SelfCost};
pub use read::exact as as_text;
pub use rights::{Capability, Rights};
pub use surroundings::{CgroupMode, Cluster};
pub use switches::{Lockdown, Switches};

/// A host as a directory tree, so that tests can bring a recorded one.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
    pod_logs: PathBuf,
}

impl Host {
    pub const POD_LOGS: &'static str = "/var/log/pods";

    /// The host that this process sees.
    pub fn live() -> Self {
        Self::at("/")
    }

    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), pod_logs: PathBuf::from(Self::POD_LOGS) }
    }

    /// Where kubelet keeps the logs of pods: the names of its directories name them.
    #[must_use]
    pub fn with_pod_logs(self, directory: impl Into<PathBuf>) -> Self {
        Self { pod_logs: directory.into(), ..self }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `path` (with or without its leading slash) on this host.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    pub(crate) fn pod_logs(&self) -> PathBuf {
        self.path(&self.pod_logs.to_string_lossy())
    }
}
