//! Owns the proof that the running kernel's verifier takes the programs. Needs root; says so when it is not.

use cotenant_kernel::{Choices, HostFacts, KernelError, MapSizes, TaskOffsets, XidOffsets, decide, start};

/// The kernel side planned as for a kernel of this version.
fn load_as(kernel: (u32, u32)) {
    assert!(rustix::process::geteuid().is_root(), "run as root: loading eBPF needs CAP_BPF and CAP_PERFMON");
    let facts = HostFacts {
        kernel,
        ioctl_tracepoint: true,
        task: Some(TaskOffsets::default()),
        contention: true,
        victim_offset: Some(8),
        xid: Some(XidOffsets { code: 12, device: 8, message: 16 }),
        ..HostFacts::default()
    };
    let plan = decide(&facts, Choices { syscall_tracepoint: true, waits: true, slow: None });
    let kernel = start(&plan, MapSizes::default(), std::process::id()).unwrap_or_else(|error| {
        let mut chain = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            chain = format!("{chain}\n{cause}");
            source = cause.source();
        }
        panic!("{chain}")
    });
    // Where there is no such driver its event is missing, and the program was taken before that showed.
    let loaded =
        |(name, error): &&(&str, KernelError)| *name != "xid" || !matches!(error, KernelError::Attach { .. });
    let missing: Vec<_> =
        kernel.missing.iter().filter(loaded).map(|(name, error)| format!("{name}: {error:?}")).collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(kernel.watcher.blind.is_none());
}

#[test]
fn c77_the_running_kernel_loads_every_program_for_single_links() {
    load_as((6, 1));
}

#[test]
fn c77_the_running_kernel_loads_every_program_for_links_of_many() {
    load_as((6, 6));
}
