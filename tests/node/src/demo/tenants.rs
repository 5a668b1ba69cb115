//! Owns who lives on the demo's node: their cgroups, and scripts that end by themselves shortly before the demo does.
//! Refuses to be driven: once started, a tenant does what its script says.

use anyhow::Result;
use cotenant_node::{Cgroup, SimulatedNode, Tenant};

/// A tenant before it is started.
pub(crate) struct Plan {
    /// What the agent is expected to call it.
    pub(crate) label: &'static str,
    /// What a person would say it does.
    pub(crate) story: &'static str,
    file: &'static str,
    cgroup: &'static str,
    visible: &'static str,
    script: String,
}

/// A running tenant in its cgroup. The tenant goes first on drop: a cgroup with a process in it cannot.
pub(crate) struct Resident {
    pub(crate) plan: Plan,
    pub(crate) tenant: Tenant,
    _cgroup: Cgroup,
}

impl Resident {
    pub(crate) fn start(node: &SimulatedNode, plan: Plan) -> Result<Self> {
        let cgroup = Cgroup::create(plan.cgroup)?;
        let tenant =
            node.tenant(plan.file, &cgroup, &plan.script, &[("CUDA_VISIBLE_DEVICES", plan.visible)])?;
        Ok(Self { plan, tenant, _cgroup: cgroup })
    }
}

const CONTAINER: &str = "docker/3fd09c1f2b7e48a1b6d5c4e3f2a190887766554433221100ffeeddccbbaa9988";

/// Four tenants that are busy for about `milliseconds`.
pub(crate) fn plans(milliseconds: u64) -> Vec<Plan> {
    // The library is loaded before the first step. A cuInit under way while it gets its probes is not counted, and
    // programs import for longer than this between the two. They come one after the other.
    let begin = |place: u64| format!("sleep {}\ninit\nuuid 0\nretain 0\n", 250 + place * milliseconds / 40);
    let end = "print held\nwait\n";
    // Grows for 6 tenths of the time to 48 GiB, then only holds.
    let steps = 48;
    let growth = milliseconds * 6 / 10 / steps;
    let trainer = format!(
        "{}loop {steps} {{\n  alloc shard 1GiB\n  sleep {growth}\n}}\nsleep {}\n{end}",
        begin(0),
        (milliseconds * 4 / 10).saturating_sub(250)
    );
    // A request: 4 ms of thought and about 1 ms of the driver, the waits behind the batch job's requests included.
    let chat = format!(
        "{}loop {} {{\n  alloc prompt 2MiB\n  alloc cache 64MiB cuMemAllocAsync\n  sleep 4\n  \
         free cache cuMemFreeAsync\n  free prompt\n}}\n{end}",
        begin(1),
        milliseconds * 2 / 12
    );
    // 40 ms to allocate 30 GiB, 200 to hold, 40 to free; every fourth time 200 GiB, which no GPU here has.
    let burst = "  alloc batch 30GiB\n  sleep 200\n  free batch\n  sleep 200\n";
    let batch = format!(
        "{}loop {} {{\n{}  alloc batch 200GiB\n  expect 2\n}}\n{end}",
        begin(2),
        (milliseconds * 9 / 10 / (4 * 485)).max(1),
        burst.repeat(4)
    );
    // Sees the node's second GPU as its device 0.
    let notebook = format!(
        "{}alloc frame 4GiB cuMemAllocManaged\ncreate arena 2GiB 0\nmap arena\nalloc staging 512MiB \
         cuMemAllocHost_v2\nloop {} {{\n  alloc cell 64MiB\n  sleep 245\n}}\n{end}",
        begin(3),
        milliseconds * 9 / 10 / 250
    );
    vec![
        Plan {
            label: "systemd:train.service",
            story: "a trainer that grows by 1 GiB steps, then holds",
            file: "train",
            cgroup: "system.slice/train.service",
            visible: "0",
            script: trainer,
        },
        Plan {
            label: "systemd:chat.service",
            story: "a chat service that allocates and frees 2 MiB and 64 MiB (pool) a request",
            file: "chat",
            cgroup: "system.slice/chat.service",
            visible: "0",
            script: chat,
        },
        Plan {
            label: "slurm:4711",
            story: "a batch job that takes 30 GiB for 200 ms, and now and then asks for 200 GiB",
            file: "batch",
            cgroup: "slurm/uid_0/job_4711/step_0/task_0",
            visible: "0",
            script: batch,
        },
        Plan {
            label: "docker:3fd09c1f2b7e",
            story: "a notebook that never frees its 64 MiB cells; managed, mapped and pinned memory besides",
            file: "notebook",
            cgroup: CONTAINER,
            visible: "1",
            script: notebook,
        },
    ]
}
