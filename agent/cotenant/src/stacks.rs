//! Owns what each kernel stack means: its symbols and its wait class, found once.
//! Refuses to ask twice: the table of symbols is long, stacks are few.

use std::collections::BTreeMap;

use cotenant_host::Host;
use cotenant_model::{Classes, WaitClass, sample::StackId};
use tracing::warn;

use crate::discovery::chain;

/// Frames of a stack that are kept for people.
const SHOWN: usize = 16;
/// What every blocked thread has on its stack: this agent's own hook, the scheduler, the way into the kernel.
const COMMON: [&str; 12] = [
    "bpf_prog_",
    "bpf_trace_run",
    "__bpf_trace_",
    "__schedule",
    "schedule",
    "do_syscall_64",
    "x64_sys_call",
    "entry_SYSCALL_64",
    "invoke_syscall",
    "do_el0_svc",
    "el0_svc",
    "el0t_64_sync",
];

pub(crate) struct Stacks {
    host: Host,
    classes: Classes,
    known: BTreeMap<StackId, WaitClass>,
    symbols: BTreeMap<StackId, Vec<String>>,
}

impl Stacks {
    pub(crate) fn new(host: Host, classes: Classes) -> Self {
        Self { host, classes, known: BTreeMap::new(), symbols: BTreeMap::new() }
    }

    /// Names stacks that were not there before. Where the kernel hides its addresses they are `other`.
    pub(crate) fn learn(&mut self, stacks: BTreeMap<StackId, Vec<u64>>) {
        let addresses: Vec<u64> = stacks.values().flatten().copied().collect();
        if addresses.is_empty() {
            return;
        }
        let names = self.host.symbolize(&addresses).unwrap_or_else(|error| {
            warn!(error = %chain(&error), "waits have no class: kernel stacks cannot be named");
            vec![None; addresses.len()]
        });
        let mut names = names.into_iter();
        for (id, frames) in stacks {
            let symbols: Vec<String> = names.by_ref().take(frames.len()).flatten().collect();
            let frames: Vec<&str> = symbols.iter().map(String::as_str).collect();
            self.known.insert(id, self.classes.class(&frames));
            let telling = |symbol: &String| !COMMON.iter().any(|common| symbol.starts_with(common));
            self.symbols.insert(id, symbols.into_iter().filter(telling).take(SHOWN).collect());
        }
    }

    pub(crate) fn classes(&self) -> &BTreeMap<StackId, WaitClass> {
        &self.known
    }

    /// The functions of a stack, innermost first.
    pub(crate) fn symbols(&self, id: StackId) -> &[String] {
        self.symbols.get(&id).map_or(&[], Vec::as_slice)
    }
}
