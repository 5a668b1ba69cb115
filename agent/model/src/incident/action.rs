//! Owns what to do about an incident, as data with words, best first.
//! Refuses to do it.

use serde::Serialize;

use super::{
    Evidence, FailureEvidence, Incident, KillEvidence, Kind, StallEvidence, WaitEvidence, XidEvidence,
};
use crate::explain::{self, who};
use crate::verdict::{Arena, Because, VerdictKind};
use crate::{GpuId, Tenant, WaitClass};

/// Actions recommended for one incident.
const ACTIONS: usize = 4;

/// Ordered by which to try first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Remedy {
    /// Drain the node or reset the GPU: it is not the tenants.
    ReplaceDevice,
    /// The tenant's own program faulted.
    DebugProgram,
    RaiseHostLimit,
    /// Cap or move the neighbour that takes the room.
    CapNeighbour,
    /// Ask for less, or hold less.
    ShrinkSelf,
    TrimCache,
    RaiseLimit,
    /// Restart, or use growable segments.
    Defragment,
    InspectHolder,
    CollectDriverState,
    /// Keep memory in the process instead of going to the driver each time.
    UseCachingAllocator,
    /// Another GPU of the same host is far enough.
    SeparateGpus,
    /// Only another host is far enough.
    SeparateHosts,
    ReduceOversubscription,
    /// A fact is missing: get it.
    Observe,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Action {
    #[serde(rename = "action")]
    pub remedy: Remedy,
    pub tenant: Option<Tenant>,
    pub gpu: Option<GpuId>,
    pub words: String,
}

/// Xids that say that the device, its memory, its link or its firmware is at fault.
const HARDWARE: &[u32] = &[48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143, 154];

/// Xids that a program's own fault makes.
const PROGRAM: &[u32] = &[13, 31, 43, 69];

pub(super) fn recommend(incident: &Incident) -> Vec<Action> {
    let of_evidence = incident.evidence.iter().filter_map(|line| match line {
        Evidence::Xid(xid) if !xid.echo => Some(after_xid(xid)),
        Evidence::Kill(kill) => Some(after_kill(kill)),
        Evidence::Failure(failure) => after_failure(failure),
        // A stall that was not the worst is told among the waits.
        Evidence::Stall(stall) if incident.kind == Kind::Stall => Some(after_stall(incident, stall)),
        _ => None,
    });
    let mut actions: Vec<Action> = Vec::new();
    for action in of_evidence.chain(after_waits(incident)) {
        let same = |known: &Action| known.remedy == action.remedy && known.tenant == action.tenant;
        if !actions.iter().any(same) {
            actions.push(action);
        }
    }
    actions.sort_by_key(|action| action.remedy);
    actions.truncate(ACTIONS);
    actions
}

fn action(remedy: Remedy, tenant: Option<&Tenant>, gpu: Option<&GpuId>, words: String) -> Action {
    Action { remedy, tenant: tenant.cloned(), gpu: gpu.cloned(), words }
}

fn after_xid(xid: &XidEvidence) -> Action {
    let (gpu, code, tenant) = (&xid.gpu, xid.code, xid.tenant.as_ref());
    if HARDWARE.contains(&code) {
        let words = format!(
            "Take {gpu} out of service and read the kernel log: Xid {code} is the device's, not a tenant's."
        );
        return action(Remedy::ReplaceDevice, None, Some(gpu), words);
    }
    if PROGRAM.contains(&code) {
        let words = match tenant {
            Some(tenant) => {
                format!("Look into {}'s own program: Xid {code} is a fault of code that it ran.", who(tenant))
            }
            None => {
                format!("Find the process in the kernel log's Xid {code} line: its program faulted.")
            }
        };
        return action(Remedy::DebugProgram, tenant, Some(gpu), words);
    }
    let words = format!(
        "Look up Xid {code} in NVIDIA's catalogue: whose fault it is cannot be said from the code alone."
    );
    action(Remedy::Observe, tenant, Some(gpu), words)
}

fn after_kill(kill: &KillEvidence) -> Action {
    let victim = who(&kill.victim);
    let pinned = match kill.host_pinned {
        Some(0) | None => String::new(),
        Some(bytes) => format!(" ({} of it was pinned for the GPU)", explain::gib(bytes)),
    };
    let words = match &kill.limit_owner {
        Some(owner) => format!(
            "Raise memory.max of {} or make {victim} use less host memory{pinned}.",
            explain::clean(owner)
        ),
        None => format!("Make {victim} use less host memory, or give it a host with more{pinned}."),
    };
    action(Remedy::RaiseHostLimit, Some(&kill.victim), None, words)
}

fn after_failure(failure: &FailureEvidence) -> Option<Action> {
    let verdict = &failure.verdict;
    let victim = who(&failure.victim);
    let (remedy, words) = match verdict.kind {
        VerdictKind::Neighbour => {
            let culprit = verdict.culprits().first()?.0.clone();
            let words = format!(
                "Cap {}'s memory (MPS limit, framework fraction) or move it or {victim} to another GPU.",
                who(&culprit)
            );
            return Some(action(Remedy::CapNeighbour, Some(&culprit), failure.gpu.as_ref(), words));
        }
        VerdictKind::Own if verdict.because.iter().any(|why| matches!(why, Because::OwnCache { .. })) => {
            let words = format!("Let {victim} trim its pools (cuMemPoolTrimTo, a lower release threshold).");
            (Remedy::TrimCache, words)
        }
        VerdictKind::Own | VerdictKind::Impossible => (
            Remedy::ShrinkSelf,
            match verdict.arena {
                Arena::Host => format!("Let {victim} pin less host memory: no neighbour is in its way."),
                _ => format!(
                    "Give {victim} a smaller batch or model part, offload, or a larger GPU: no neighbour is in its way."
                ),
            },
        ),
        VerdictKind::Limit => (Remedy::RaiseLimit, format!("Raise {victim}'s limit or make it hold less.")),
        VerdictKind::Fragmentation => (
            Remedy::Defragment,
            format!(
                "Look for a limit on {victim} that was not declared (MPS cap); if there is none, restart it or let it use expandable segments."
            ),
        ),
        VerdictKind::Unknown => (
            Remedy::Observe,
            match verdict.arena {
                Arena::Managed => "Look at the host's memory: managed memory is backed by it.",
                Arena::Mapping => {
                    "Look at the process's address space and its limits: the call takes no device memory."
                }
                Arena::Host => "Look at the host's free memory and the tenant's memory limit at that time.",
                Arena::Device | Arena::Context => {
                    "Find out on /status why the agent did not have the fact that is missing."
                }
            }
            .to_owned(),
        ),
    };
    Some(action(remedy, Some(&failure.victim), failure.gpu.as_ref(), words))
}

fn after_stall(incident: &Incident, stall: &StallEvidence) -> Action {
    let victim = who(&stall.victim);
    let holder = incident.culprits.iter().find(|blame| blame.tenant.name == stall.holder);
    if let Some(blame) = holder {
        let words = format!(
            "Look at what {} does in the driver: nobody else there can hold what {victim} waits for.",
            who(&blame.tenant)
        );
        return action(Remedy::InspectHolder, Some(&blame.tenant), None, words);
    }
    if stall.holder == "self" {
        let words = format!("Look at {victim}'s other threads: one of them holds what it waits for.");
        return action(Remedy::InspectHolder, Some(&stall.victim), None, words);
    }
    let why = match stall.holder.as_str() {
        "device" => "the device has not answered",
        _ => "no tenant is known to hold it",
    };
    let words =
        format!("Collect the kernel log and nvidia-bug-report.sh before anything is restarted: {why}.");
    action(Remedy::CollectDriverState, None, None, words)
}

/// By the class of the most waiting.
fn after_waits(incident: &Incident) -> Vec<Action> {
    let Some((culprit, wait)) = top_wait(incident) else { return Vec::new() };
    let (name, victim) = (who(culprit), who(&wait.victim));
    let on_culprit = |remedy, words| vec![action(remedy, Some(culprit), None, words)];
    match wait.class {
        WaitClass::RmApiLock => vec![
            action(
                Remedy::UseCachingAllocator,
                Some(culprit),
                None,
                format!(
                    "Let {name} keep its memory instead of returning it to the driver each time (caching allocator, pool release threshold); the same helps {victim}."
                ),
            ),
            action(
                Remedy::SeparateHosts,
                Some(&wait.victim),
                None,
                format!(
                    "If that cannot be, put {victim} on another host: the lock is one for all GPUs of this one."
                ),
            ),
        ],
        WaitClass::GpuLock | WaitClass::Reclaim | WaitClass::Device => vec![action(
            Remedy::SeparateGpus,
            Some(&wait.victim),
            None,
            format!("Put {victim} and {name} on different GPUs."),
        )],
        WaitClass::UvmEviction => on_culprit(
            Remedy::ReduceOversubscription,
            format!("Let {name} use less managed memory: the GPU evicts pages to make room for it."),
        ),
        WaitClass::UserspaceLock | WaitClass::Other => on_culprit(
            Remedy::InspectHolder,
            format!(
                "Look at what {name} does while {victim} waits: the lock is not one of the kernel driver's."
            ),
        ),
    }
}

fn top_wait(incident: &Incident) -> Option<(&Tenant, &WaitEvidence)> {
    incident.evidence.iter().find_map(|line| {
        let Evidence::Wait(wait) = line else { return None };
        let blame = incident.culprits.iter().find(|blame| blame.tenant.name == wait.culprit)?;
        Some((&blame.tenant, wait))
    })
}
