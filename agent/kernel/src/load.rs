//! Owns the way from the embedded object to loaded programs with their host-wide hooks attached.
//! Refuses library probes (see `attach`) and decisions (see `plan`).

use std::collections::BTreeMap;

use aya::{
    EbpfLoader,
    maps::{Array, MapData},
    programs::{KProbe, RawTracePoint, TracePoint},
};
use cotenant_abi::{Settings, TABLES, Table, WHOLE};

use crate::{
    Boundary, ExitRule, KernelError, Plan, Probes, Reader, Waits, Watcher, maps::take, multi::Multi, raw::Raw,
};

static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("COTENANT_EBPF_OBJECT"));

/// The eBPF object that this agent carries.
pub fn object() -> &'static [u8] {
    OBJECT
}

/// Entries of the maps that grow with the workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSizes {
    pub processes: u32,
    pub threads: u32,
    pub pointers: u32,
    pub handles: u32,
    /// Of the rows for live memory that others leave, what one process may take: parts of [`WHOLE`].
    pub share: u32,
}

impl Default for MapSizes {
    fn default() -> Self {
        Self { processes: 4096, threads: 16_384, pointers: 262_144, handles: 65_536, share: 512 }
    }
}

impl MapSizes {
    /// The same with another share, 0 to 1.
    #[must_use]
    pub fn with_share(self, share: f64) -> Self {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to WHOLE")]
        let share = (share.clamp(0.0, 1.0) * WHOLE as f64).round() as u32;
        Self { share, ..self }
    }

    pub(crate) fn rows(self, table: Table) -> u32 {
        if table == Table::Pointers { self.pointers } else { self.handles }
    }

    /// Rows by map name. Per-process tables are sized from the number of processes.
    pub(crate) fn entries(self) -> BTreeMap<&'static str, u32> {
        let Self { processes, threads, pointers, handles, .. } = self;
        BTreeMap::from([
            ("PROCESS_IDS", processes),
            ("PROCESSES", processes.saturating_mul(2)),
            ("THREADS", threads),
            ("POINTERS", pointers),
            ("HANDLES", handles),
            ("PHYSICALS", handles),
            ("MAPPINGS", handles),
            ("CHUNKS", handles),
            ("POOLS", processes.saturating_mul(4)),
            ("CONTEXTS", processes.saturating_mul(2)),
            ("PRIMARIES", processes.saturating_mul(2)),
            ("ORDINALS", processes.saturating_mul(4)),
            ("LEDGER", processes.saturating_mul(8)),
            ("CONTEXT_LEDGER", processes.saturating_mul(8)),
            ("CALLS", processes.saturating_mul(16)),
            ("FAILURES", processes.saturating_mul(4)),
            ("LATENCY", processes.saturating_mul(8)),
            ("WAITS", processes.saturating_mul(8)),
            ("BLAME", processes.saturating_mul(16)),
            ("EFFORT", processes.saturating_mul(16)),
            ("SWEPT", processes.saturating_mul(2)),
            ("LEAN", processes.saturating_mul(2)),
            ("RECENT", processes.saturating_mul(2)),
        ])
    }
}

/// The loaded kernel side, in its three parts that live on different threads.
pub struct Kernel {
    pub reader: Reader,
    pub probes: Probes,
    pub watcher: Watcher,
    /// Host-wide hooks that did not attach, with the reason: each costs its own feature only.
    pub missing: Vec<(&'static str, KernelError)>,
}

pub fn start(plan: &Plan, sizes: MapSizes, own_tgid: u32) -> Result<Kernel, KernelError> {
    let entries = sizes.entries();
    let mut loader = EbpfLoader::new();
    for (name, entries) in &entries {
        loader.map_max_entries(name, *entries);
    }
    let mut ebpf = loader.load(OBJECT).map_err(|error| KernelError::Object(Box::new(error)))?;
    settle(&mut ebpf, plan, sizes, own_tgid)?;
    let mut missing = Vec::new();
    for (name, category, event) in
        [("process_exit", "sched", "sched_process_exit"), ("process_exec", "sched", "sched_process_exec")]
    {
        if let Err(error) = tracepoint(&mut ebpf, name, category, event) {
            missing.push((name, error));
        }
    }
    let mut boundary = match plan.boundary {
        Boundary::Kprobe => kprobe(&mut ebpf, "uvm_ioctl", "uvm_unlocked_ioctl_entry"),
        Boundary::SyscallTracepoint => tracepoint(&mut ebpf, "ioctl_enter", "syscalls", "sys_enter_ioctl"),
        Boundary::ContextOnly => Ok(()),
    };
    // A module that was built without function tracing has the symbol, and the kernel takes no kprobe on it.
    if plan.boundary == Boundary::Kprobe
        && plan.boundary_else
        && let Err(error) = boundary
    {
        boundary = tracepoint(&mut ebpf, "ioctl_enter", "syscalls", "sys_enter_ioctl");
        missing.push(("uvm_kprobe", error));
    }
    if let Err(error) = boundary {
        missing.push(("boundary", error));
    }
    if plan.kills.is_some()
        && let Err(error) = tracepoint(&mut ebpf, "mark_victim", "oom", "mark_victim")
    {
        missing.push(("mark_victim", error));
    }
    if plan.xid.is_some()
        && let Err(error) = tracepoint(&mut ebpf, "xid", "nvidia", "nvidia_dev_xid")
    {
        missing.push(("xid", error));
    }
    if let Some(waits) = plan.waits {
        // The waker's hook first: a block that is seen has a wake-up that is seen.
        let contention: &[&str] =
            if waits.contention { &["contention_end", "contention_begin"] } else { &[] };
        for name in ["sched_waking", "sched_switch"].iter().chain(contention) {
            if let Err(error) = raw_tracepoint(&mut ebpf, name) {
                missing.push((name, error));
            }
        }
    }
    let multi = if plan.probes && plan.multi {
        match Multi::load(OBJECT, &ebpf, crate::attach::PROGRAMS) {
            Ok(multi) => Some(multi),
            Err(error) => {
                missing.push(("multi_uprobes", error));
                None
            }
        }
    } else {
        None
    };
    let events = take(&mut ebpf, "EVENTS")?;
    let reader = Reader::take(&mut ebpf, &entries, sizes)?;
    let watcher = Watcher::open(events)?;
    let mut probes = Probes::new(ebpf, multi);
    if !plan.probes {
        probes.refuse();
    } else if !probes.links_many()
        && let Err(error) = probes.load_single(plan.unmap, &mut missing)
    {
        probes.refuse();
        missing.push(("allocation_probes", error));
    }
    Ok(Kernel { reader, probes, watcher, missing })
}

fn settle(ebpf: &mut aya::Ebpf, plan: &Plan, sizes: MapSizes, own_tgid: u32) -> Result<(), KernelError> {
    let name = "SETTINGS";
    let mut settings: Array<&mut MapData, Raw<Settings>> = ebpf
        .map_mut(name)
        .ok_or(KernelError::NoMap { name })?
        .try_into()
        .map_err(|source| KernelError::Map { name, source })?;
    let xid = plan.xid.unwrap_or_default();
    let mut value = Settings {
        own_tgid,
        exit_rule: plan.exit.tag(),
        uuids_closed: 0,
        pad: [0; 2],
        group_dead_offset: 0,
        signal_offset: 0,
        live_offset: 0,
        pid_offset: 0,
        state_offset: 0,
        flags_offset: 0,
        state_argument: 0,
        pad2: [0; 3],
        victim_offset: plan.kills.unwrap_or(0),
        interrupts: [[0; 2]; 2],
        slow: plan.slow.map_or(0, |slow| u64::try_from(slow.as_nanos()).unwrap_or(u64::MAX)),
        row_limits: Table::ALL.iter().fold([0; TABLES], |mut limits, table| {
            limits[*table as usize] = sizes.rows(*table).into();
            limits
        }),
        swept: [0; TABLES],
        row_share: sizes.share.into(),
        lean: 0,
        xid_code: xid.code,
        xid_device: xid.device,
        xid_message: xid.message,
        shedding: 0,
    };
    if let Some(Waits { task, state_argument, interrupts, .. }) = plan.waits {
        (value.pid_offset, value.state_offset, value.flags_offset) = (task.pid, task.state, task.flags);
        value.state_argument = u8::from(state_argument);
        value.interrupts = interrupts.unwrap_or_default();
    }
    match plan.exit {
        ExitRule::Field { offset } => value.group_dead_offset = offset,
        ExitRule::SignalLive { signal, live } => (value.signal_offset, value.live_offset) = (signal, live),
        ExitRule::Leader => {}
    }
    settings.set(0, Raw(value), 0).map_err(|source| KernelError::Map { name, source })
}

pub(crate) fn program<'a, P>(ebpf: &'a mut aya::Ebpf, name: &'static str) -> Result<&'a mut P, KernelError>
where
    &'a mut P: TryFrom<&'a mut aya::programs::Program, Error = aya::programs::ProgramError>,
{
    ebpf.program_mut(name)
        .ok_or(KernelError::NoProgram { name })?
        .try_into()
        .map_err(|source| KernelError::ProgramKind { name, source })
}

fn tracepoint(
    ebpf: &mut aya::Ebpf,
    name: &'static str,
    category: &str,
    event: &str,
) -> Result<(), KernelError> {
    let program: &mut TracePoint = program(ebpf, name)?;
    program.load().map_err(|error| KernelError::refusal(name, error))?;
    program.attach(category, event).map_err(|source| KernelError::Attach {
        name,
        target: format!("{category}:{event}"),
        source,
    })?;
    Ok(())
}

fn raw_tracepoint(ebpf: &mut aya::Ebpf, name: &'static str) -> Result<(), KernelError> {
    let program: &mut RawTracePoint = program(ebpf, name)?;
    program.load().map_err(|error| KernelError::refusal(name, error))?;
    program.attach(name).map_err(|source| KernelError::Attach { name, target: name.to_owned(), source })?;
    Ok(())
}

fn kprobe(ebpf: &mut aya::Ebpf, name: &'static str, symbol: &str) -> Result<(), KernelError> {
    let program: &mut KProbe = program(ebpf, name)?;
    program.load().map_err(|error| KernelError::refusal(name, error))?;
    program.attach(symbol, 0).map_err(|source| KernelError::Attach {
        name,
        target: symbol.to_owned(),
        source,
    })?;
    Ok(())
}
