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
    #[error("cannot load program {name}")]
    Program {
        name: &'static str,
        #[source]
        source: aya::programs::ProgramError,
    },
    #[error("the kernel refused program {name}: {verdict}")]
    Refused {
        name: &'static str,
        /// What the verifier said last.
        verdict: String,
        #[source]
        source: std::io::Error,
    },
    #[error("this kernel takes no probes on libraries")]
    NoProbes,
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

/// Characters of a verdict that are kept: it stands on `/status` and in the log.
const VERDICT: usize = 300;

impl KernelError {
    /// The verifier's whole walk, up to megabytes, goes to the debug log; its last word into the error.
    pub(crate) fn refusal(name: &'static str, error: aya::programs::ProgramError) -> Self {
        match error {
            aya::programs::ProgramError::LoadError { io_error, verifier_log } => {
                let log = verifier_log.to_string();
                tracing::debug!(program = name, log, "refused by the verifier");
                Self::Refused { name, verdict: verdict(&log), source: io_error }
            }
            source => Self::Program { name, source },
        }
    }
}

/// The last line that is not one of the verifier's statistics.
fn verdict(log: &str) -> String {
    const STATISTICS: [&str; 3] = ["verification time ", "stack depth ", "processed "];
    let mut lines = log.lines().map(str::trim).rev();
    let last = lines.find(|line| !line.is_empty() && !STATISTICS.iter().any(|start| line.starts_with(start)));
    last.unwrap_or("it gave no reason").chars().take(VERDICT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c77_a_refusal_names_the_program_and_the_verifiers_last_word() {
        // Linux 6.1.
        let log = "; let (Some(format), Some(channels)) = (read_user::<u32>(tail)\n1550: (79) r3 = *(u64 *)(r10 -32)\n\
                   invalid read from stack R10 off=-32 size=8\nverification time 1293804 usec\nstack depth 96+8\n\
                   processed 8574 insns (limit 1000000) max_states_per_insn 4\n\n";
        let error = KernelError::Refused {
            name: "allocate_return",
            verdict: verdict(log),
            source: std::io::ErrorKind::PermissionDenied.into(),
        };
        assert_eq!(
            error.to_string(),
            "the kernel refused program allocate_return: invalid read from stack R10 off=-32 size=8"
        );
        assert_eq!(verdict(""), "it gave no reason");
        assert_eq!(verdict(&"x".repeat(5000)).len(), VERDICT);
    }
}
