use std::collections::BTreeMap;

use cotenant_host::Host;
use cotenant_model::{
    Absence, GpuId, MemoryKind,
    risk::Forecast,
    sample::{Confidence, End, FailureRow, KernelSample, ProcessSample},
    verdict::VerdictKind,
};

use super::*;
use crate::{limits::Limits, stacks::Stacks};

const PROCESS: ProcessId = ProcessId(7);
const KEY: Key = (PROCESS, Operation::MemAlloc);

/// One process, which the agent has seen.
struct Node {
    asks: Asks,
    roll: Roll,
    stacks: Stacks,
    limits: Limits,
    ticks: u32,
}

impl Node {
    fn new() -> Self {
        let tenants = BTreeMap::from([(PROCESS, tenant())]);
        let mut roll = Roll::default();
        roll.advance(&tenants, clock(0));
        let classes = crate::config::Config::default().waits.classes().expect("the built-in classes");
        Self {
            asks: Asks::new(Host::at("/nowhere")),
            roll,
            stacks: Stacks::new(Host::at("/nowhere"), classes),
            limits: Limits::new(Host::at("/nowhere")),
            ticks: 0,
        }
    }

    /// A tick at which the kernel has counted so many refusals, and the ring has brought these words.
    fn tick(&mut self, counted: u64, ended: bool, words: Vec<Word>) {
        self.ticks += 1;
        let row = FailureRow {
            gpu: GpuRef::Known(gpu()),
            operation: Operation::MemAlloc,
            error: CudaError::OUT_OF_MEMORY,
            count: counted,
        };
        let other = FailureRow { error: CudaError(1), ..row.clone() };
        let mut kernel = KernelSample::default();
        let end = ended.then_some(End::Exit);
        kernel.processes.push(ProcessSample {
            ended: end,
            ended_at: u64::from(ended),
            failures: vec![row, other],
            ..process(PROCESS)
        });
        let device = DeviceSample::absent(std::time::Duration::ZERO, Absence::NotYet);
        let (tenants, blame) = (BTreeMap::new(), BTreeMap::new());
        let forecast = Forecast::default();
        let tick = Tick {
            forecast: (&forecast, std::time::Duration::ZERO),
            kernel: &kernel,
            device: &device,
            tenants: &tenants,
            blame: &blame,
            reports: Vec::new(),
            stacks: &self.stacks,
            reader: None,
            only: None,
            limits: &self.limits,
            faults: Vec::new(),
        };
        self.asks.tell(words, &tick, &self.roll, clock(self.ticks));
    }

    /// The record as it is, which is one or none.
    fn told(&mut self) -> Option<(u64, VerdictKind, bool)> {
        let mut records = self.asks.records.drain(f64::from(self.ticks));
        assert!(records.len() < 2, "{records:?}");
        records.pop().map(|record| (record.count, record.verdict.kind, record.recovered))
    }
}

fn process(id: ProcessId) -> ProcessSample {
    ProcessSample {
        id,
        tgid: 7,
        uid: 0,
        cgroup_id: 1,
        comm: "tenant".into(),
        first_seen: 1,
        ended: None,
        ended_at: 0,
        confidence: Confidence::Complete,
        before_memory: true,
        last_calls: Vec::new(),
        pools: Vec::new(),
        ledger: Vec::new(),
        calls: Vec::new(),
        failures: Vec::new(),
        latency: Vec::new(),
        waits: Vec::new(),
        blame: Vec::new(),
        effort: Vec::new(),
    }
}

fn clock(second: u32) -> Clock {
    Clock { monotonic_ns: u64::from(second) * 1_000_000_000, unix: f64::from(second) }
}

fn tenant() -> Tenant {
    Tenant::plain(TenantKind::Docker, "a")
}

fn gpu() -> GpuId {
    GpuId::from_uuid([1; 16])
}

/// One that was larger than its device.
fn report(second: u32) -> Word {
    let mut ask = Ask::new(tenant(), Operation::MemAlloc, CudaError::OUT_OF_MEMORY);
    (ask.requested, ask.capacity, ask.gpu) = (Some(200 << 30), Some(100 << 30), Some(gpu()));
    Word::Failed { at: f64::from(second), key: KEY, ask: Box::new(ask) }
}

fn grant(second: u32) -> Word {
    let success = Success {
        at_unix: f64::from(second),
        tenant: tenant(),
        process: PROCESS,
        gpu: Some(gpu()),
        operation: Operation::MemAlloc,
        bytes: 200 << 30,
        freed: None,
    };
    Word::Retried { process: PROCESS, success }
}

#[test]
fn the_kernels_count_is_told_however_few_are_reported() {
    let mut node = Node::new();
    node.tick(1000, false, vec![report(1), report(1), report(1)]);
    assert_eq!(node.told(), Some((1000, VerdictKind::Impossible, false)));
    node.tick(5000, false, Vec::new());
    assert_eq!(node.told(), Some((5000, VerdictKind::Impossible, false)));
    node.tick(5000, true, Vec::new());
    assert_eq!(node.told(), None, "nothing new");
}

#[test]
fn a_report_before_its_count_counts_once() {
    let mut node = Node::new();
    node.tick(0, false, vec![report(1)]);
    assert_eq!(node.told(), None);
    node.tick(1, false, Vec::new());
    assert_eq!(node.told(), Some((1, VerdictKind::Impossible, false)));
}

#[test]
fn a_grant_that_comes_before_the_count_of_its_refusal_is_a_near_miss() {
    let mut node = Node::new();
    node.tick(0, false, vec![report(1), grant(1)]);
    assert_eq!(node.told(), None);
    node.tick(1, false, Vec::new());
    assert_eq!(node.told(), Some((1, VerdictKind::Impossible, true)));
}

#[test]
fn a_report_after_its_count_says_more_and_counts_nothing() {
    let mut node = Node::new();
    node.tick(2, true, Vec::new());
    assert_eq!(node.told(), Some((2, VerdictKind::Unknown, false)), "it has ended: no report is waited for");
    node.tick(2, true, vec![report(1), report(1)]);
    assert_eq!(node.told(), Some((2, VerdictKind::Impossible, false)));
    let mut node = Node::new();
    for _ in 0..=PATIENCE {
        node.tick(1, false, Vec::new());
    }
    assert_eq!(node.told(), Some((1, VerdictKind::Unknown, false)));
    node.tick(1, false, vec![report(1)]);
    assert_eq!(node.told(), None, "it could be of one that is counted next");
    node.tick(1, false, Vec::new());
    assert_eq!(node.told(), Some((1, VerdictKind::Impossible, false)));
}

#[test]
fn what_nobody_reports_is_told_after_a_little_patience() {
    let mut node = Node::new();
    for _ in 0..PATIENCE {
        node.tick(3, false, Vec::new());
        assert_eq!(node.told(), None);
    }
    node.tick(3, false, Vec::new());
    assert_eq!(node.told(), Some((3, VerdictKind::Unknown, false)));
}

#[test]
fn those_that_were_not_reported_do_not_undo_a_grant_after_them() {
    let mut node = Node::new();
    node.tick(40, false, vec![report(1), grant(1)]);
    assert_eq!(node.told(), Some((40, VerdictKind::Impossible, true)));
    node.tick(41, false, vec![report(2)]);
    assert_eq!(node.told(), Some((41, VerdictKind::Impossible, false)), "refused again");
}

#[test]
fn a_gpu_that_the_kernel_could_not_name_has_holders_all_the_same() {
    let row = |live| LedgerRow {
        gpu: GpuRef::Known(gpu()),
        kind: MemoryKind::Device,
        live,
        peak: live,
        allocated: live,
        freed: 0,
        allocations: 1,
        frees: 0,
    };
    let mut kernel = KernelSample::default();
    for (id, live) in [(PROCESS, 3), (ProcessId(8), 90), (ProcessId(9), 0)] {
        kernel.processes.push(ProcessSample { ledger: vec![row(live)], ..process(id) });
    }
    let mut call = FailedCall {
        process: PROCESS,
        tgid: 7,
        at: 5,
        operation: Operation::MemAlloc,
        error: CudaError::OUT_OF_MEMORY,
        requested: Some(10),
        total: 0,
        own: 0,
        holders: Vec::new(),
        complete: true,
    };
    let now = Census::of(&call, &gpu(), &kernel);
    assert_eq!((now.total, now.own, now.at_failure), (93, 3, false));
    assert_eq!(now.holders, [(PROCESS, 3), (ProcessId(8), 90)]);
    (call.total, call.holders) = (40, vec![(ProcessId(8), 40)]);
    let then = Census::of(&call, &gpu(), &kernel);
    assert_eq!((then.total, then.own, then.at_failure), (40, 0, true), "what was told then is better");
    call.complete = false;
    let now = Census::of(&call, &gpu(), &kernel);
    assert_eq!((now.total, now.own, now.at_failure), (93, 3, false), "but not where somebody is missing");
}

#[test]
fn what_the_short_list_leaves_out_is_held_all_the_same() {
    let holders = vec![(PROCESS, 20), (ProcessId(8), 40), (ProcessId(9), 10)];
    let census = Census { holders, total: 200, own: 30, at_failure: true };
    assert_eq!(census.unlisted(PROCESS), 200 - 50 - 30);
    let census =
        Census { holders: vec![(PROCESS, 30), (ProcessId(8), 40)], total: 70, own: 30, at_failure: true };
    assert_eq!(census.unlisted(PROCESS), 0);
}
