//! Owns what to do about an incident, as data with words, best first.
//! Refuses to do it.

use serde::Serialize;

use super::{Evidence, Incident, Kind};
use crate::explain::{self, who};
use crate::verdict::{Arena, Because, VerdictKind};
use crate::{GpuId, Tenant, WaitClass};

/// Actions recommended for one incident.
const ACTIONS: usize = 4;

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
    /// Keep memory in the process instead of going to the driver each time.
    UseCachingAllocator,
    /// Another GPU of the same host is far enough.
    SeparateGpus,
    /// Only another host is far enough.
    SeparateHosts,
    ReduceOversubscription,
    InspectHolder,
    CollectDriverState,
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

/// Xids that say that the device, its memory or its link is at fault, or the firmware on it.
const HARDWARE: &[u32] = &[48, 62, 63, 64, 74, 79, 92, 94, 95, 110, 119, 120, 140, 143, 154];

/// Xids that a program's own fault makes.
const PROGRAM: &[u32] = &[13, 31, 43, 69];

pub(super) fn recommend(incident: &Incident) -> Vec<Action> {
    let mut actions: Vec<Action> = Vec::new();
    let mut add = |remedy, tenant: Option<&Tenant>, gpu: Option<&GpuId>, words: String| {
        if !actions.iter().any(|known| known.remedy == remedy && known.tenant.as_ref() == tenant) {
            actions.push(Action { remedy, tenant: tenant.cloned(), gpu: gpu.cloned(), words });
        }
    };
    for line in &incident.evidence {
        match line {
            Evidence::Xid(xid) if !xid.echo && HARDWARE.contains(&xid.code) => add(
                Remedy::ReplaceDevice,
                None,
                Some(&xid.gpu),
                format!(
                    "Take {} out of service and read the kernel log: Xid {} is the device's, not a tenant's.",
                    xid.gpu, xid.code
                ),
            ),
            Evidence::Xid(xid) if !xid.echo && PROGRAM.contains(&xid.code) => add(
                Remedy::DebugProgram,
                xid.tenant.as_ref(),
                Some(&xid.gpu),
                match &xid.tenant {
                    Some(tenant) => format!(
                        "Look into {}'s own program: Xid {} is a fault of code that it ran.",
                        who(tenant),
                        xid.code
                    ),
                    None => format!(
                        "Find the process in the kernel log's Xid {} line: its program faulted.",
                        xid.code
                    ),
                },
            ),
            Evidence::Xid(xid) if !xid.echo => add(
                Remedy::Observe,
                xid.tenant.as_ref(),
                Some(&xid.gpu),
                format!(
                    "Look up Xid {} in NVIDIA's catalogue: whose fault it is cannot be said from the code alone.",
                    xid.code
                ),
            ),
            Evidence::Kill(kill) => add(
                Remedy::RaiseHostLimit,
                Some(&kill.victim),
                None,
                match (&kill.limit_owner, kill.host_pinned) {
                    (Some(owner), pinned) => format!(
                        "Raise memory.max of {} or make {} use less host memory{}.",
                        explain::clean(owner),
                        who(&kill.victim),
                        pinned_words(pinned)
                    ),
                    (None, pinned) => {
                        format!(
                            "Make {} use less host memory, or give it a host with more{}.",
                            who(&kill.victim),
                            pinned_words(pinned)
                        )
                    }
                },
            ),
            _ => {}
        }
    }
    for line in &incident.evidence {
        if let Evidence::Failure(failure) = line {
            let verdict = &failure.verdict;
            let victim = &failure.victim;
            let gpu = failure.gpu.as_ref();
            match verdict.kind {
                VerdictKind::Neighbour => {
                    if let Some((culprit, _)) = verdict.culprits().first() {
                        add(
                            Remedy::CapNeighbour,
                            Some(culprit),
                            gpu,
                            format!(
                                "Cap {}'s memory (MPS limit, framework fraction) or move it or {} to another GPU.",
                                who(culprit),
                                who(victim)
                            ),
                        );
                    }
                }
                VerdictKind::Own
                    if verdict.because.iter().any(|why| matches!(why, Because::OwnCache { .. })) =>
                {
                    add(
                        Remedy::TrimCache,
                        Some(victim),
                        gpu,
                        format!(
                            "Let {} trim its pools (cuMemPoolTrimTo, a lower release threshold).",
                            who(victim)
                        ),
                    )
                }
                VerdictKind::Own | VerdictKind::Impossible => add(
                    Remedy::ShrinkSelf,
                    Some(victim),
                    gpu,
                    format!(
                        "Give {} a smaller batch or model part, offload, or a larger GPU: no neighbour is in its way.",
                        who(victim)
                    ),
                ),
                VerdictKind::Limit => add(
                    Remedy::RaiseLimit,
                    Some(victim),
                    gpu,
                    format!("Raise {}'s limit or make it hold less.", who(victim)),
                ),
                VerdictKind::Fragmentation => add(
                    Remedy::Defragment,
                    Some(victim),
                    gpu,
                    format!(
                        "Look for a limit on {} that was not declared (MPS cap); if there is none, restart it or let it use expandable segments.",
                        who(victim)
                    ),
                ),
                VerdictKind::Unknown => {
                    add(Remedy::Observe, Some(victim), gpu, unknown_words(verdict.arena).to_owned())
                }
            }
        }
    }
    for line in &incident.evidence {
        if let Evidence::Stall(stall) = line
            && incident.kind == Kind::Stall
        {
            let held = incident.culprits.iter().find(|blame| blame.tenant.name == stall.holder);
            let victim = who(&stall.victim);
            match (held, stall.holder.as_str()) {
                (Some(blame), _) => add(
                    Remedy::InspectHolder,
                    Some(&blame.tenant),
                    None,
                    format!(
                        "Look at what {} does in the driver: it holds what {victim} waits for.",
                        who(&blame.tenant)
                    ),
                ),
                (None, "self") => add(
                    Remedy::InspectHolder,
                    Some(&stall.victim),
                    None,
                    format!("Look at {victim}'s other threads: one of them holds what it waits for."),
                ),
                (None, holder) => add(
                    Remedy::CollectDriverState,
                    None,
                    None,
                    format!(
                        "Collect the kernel log and nvidia-bug-report.sh before anything is restarted: {}.",
                        if holder == "device" {
                            "the device has not answered"
                        } else {
                            "no tenant is known to hold it"
                        }
                    ),
                ),
            }
        }
    }
    if let Some((culprit, victim, class)) = top_wait(incident) {
        let (culprit_name, victim_name) = (who(culprit), who(victim));
        match class {
            WaitClass::RmApiLock => {
                add(
                    Remedy::UseCachingAllocator,
                    Some(culprit),
                    None,
                    format!(
                        "Let {culprit_name} keep its memory instead of returning it to the driver each time (caching allocator, pool release threshold); the same helps {victim_name}."
                    ),
                );
                add(
                    Remedy::SeparateHosts,
                    Some(victim),
                    None,
                    format!(
                        "If that cannot be, put {victim_name} on another host: the lock is one for all GPUs of this one."
                    ),
                );
            }
            WaitClass::GpuLock | WaitClass::Reclaim | WaitClass::Device => add(
                Remedy::SeparateGpus,
                Some(victim),
                None,
                format!("Put {victim_name} and {culprit_name} on different GPUs."),
            ),
            WaitClass::UvmEviction => add(
                Remedy::ReduceOversubscription,
                Some(culprit),
                None,
                format!(
                    "Let {culprit_name} use less managed memory: the GPU evicts pages to make room for it."
                ),
            ),
            WaitClass::UserspaceLock | WaitClass::Other => add(
                Remedy::InspectHolder,
                Some(culprit),
                None,
                format!(
                    "Look at what {culprit_name} does while {victim_name} waits: the lock is not one of the kernel driver's."
                ),
            ),
        }
    }
    actions.sort_by_key(|action| action.remedy);
    actions.truncate(ACTIONS);
    actions
}

fn pinned_words(pinned: Option<u64>) -> String {
    match pinned {
        Some(0) | None => String::new(),
        Some(bytes) => format!(" ({} of it was pinned for the GPU)", explain::gib(bytes)),
    }
}

const fn unknown_words(arena: Arena) -> &'static str {
    match arena {
        Arena::Managed => "Look at the host's memory: managed memory is backed by it.",
        Arena::Mapping => {
            "Look at the process's address space and its limits: the call takes no device memory."
        }
        Arena::Host => "Look at the host's free memory and the pod's memory limit at that time.",
        Arena::Device | Arena::Context => {
            "Find out on /status why the agent did not have the fact that is missing."
        }
    }
}

/// The neighbour, victim and class of the most waiting.
fn top_wait(incident: &Incident) -> Option<(&Tenant, &Tenant, WaitClass)> {
    incident.evidence.iter().find_map(|line| {
        let Evidence::Wait(wait) = line else { return None };
        let blame = incident
            .culprits
            .iter()
            .find(|blame| blame.tenant.name == wait.culprit && blame.tenant != wait.victim)?;
        Some((&blame.tenant, &wait.victim, wait.class))
    })
}
