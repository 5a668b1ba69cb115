//! Owns what can go wrong between the agent and the kernel, one variant a step.
//! Refuses advice about the host: the reasons it gives are for the binary to complete with a remedy.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("cannot load the eBPF object (needs CAP_BPF and CAP_PERFMON, or root, and Linux 5.15 or later)")]
    Object(#[source] Box<aya::EbpfError>),
    #[error("the eBPF object has no program {name}")]
    NoProgram { name: &'static str },
    #[error("program {name} is not of the kind the agent expects")]
    ProgramKind {
        name: &'static str,
        #[source]
        source: aya::programs::ProgramError,
    },
    #[error("the kernel refused program {name}")]
    Program {
        name: &'static str,
        #[source]
        source: aya::programs::ProgramError,
    },
    #[error("cannot attach {name} to {target}")]
    Attach {
        name: &'static str,
        target: String,
        #[source]
        source: aya::programs::ProgramError,
    },
    #[error("links of many uprobes cannot be used ({step})")]
    Multi {
        step: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("the eBPF object has no map {name}")]
    NoMap { name: &'static str },
    #[error("cannot use map {name}")]
    Map {
        name: &'static str,
        #[source]
        source: aya::maps::MapError,
    },
    #[error("cannot watch mappings on CPU {cpu} (perf_event_open; needs CAP_PERFMON, or root)")]
    Perf {
        cpu: u32,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot wait for kernel events")]
    Wait(#[source] std::io::Error),
    #[error("cannot open {path}")]
    Open {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}
