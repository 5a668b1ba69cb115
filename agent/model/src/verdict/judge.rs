//! Owns the order in which the facts of a failed ask are weighed.
//! Refuses facts of its own: every number in a verdict comes from the ask, the estimate of a context's size excepted.
//!
//! The order: larger than the device; over an enforced limit; too large even without neighbours; refused although
//! there was room; then, short of room, whose bytes were missing. Bounds are used only where they imply the answer: what a
//! tenant is known to hold is a lower bound of what it holds, so "too large even alone" stands without the rest.

use std::collections::BTreeMap;

use super::{
    Arena, Ask, Because, Certainty, Holder, LimitScope, MissingFact, NAMED, Verdict, VerdictKind,
    is_memory_failure,
};
use crate::Tenant;

/// The driver hands out physical device memory in pages of this size.
const DEVICE_PAGE: u64 = 2 << 20;
const HOST_PAGE: u64 = 4 << 10;

/// What a context with its modules took on an H200 (480 to 900 MiB; the low end, so that a refusal is not over-explained).
const CONTEXT_BYTES: u64 = 480 << 20;

/// A free figure no older than this was read at the failure.
const FRESH_SECONDS: f64 = 1.0;

/// Neighbours that together hold less than this part of what the tenant holds "hold little".
const LITTLE: u64 = 3;

/// Of the tenants that a verdict names, those kept for growers.
const GROWERS: usize = 3;

type Decision = (VerdictKind, Certainty);

/// Says why an ask failed. `None` where the return code is not a refusal of memory.
pub fn judge(ask: &Ask) -> Option<Verdict> {
    if !is_memory_failure(ask.operation, ask.error) {
        return None;
    }
    let arena = Arena::of(ask.operation)?;
    let mut because = Vec::new();
    let (kind, certainty) = match arena {
        Arena::Managed => {
            because.push(Because::BackedByHost);
            (VerdictKind::Unknown, Certainty::Low)
        }
        Arena::Mapping => {
            because.push(Because::NotPhysical);
            (VerdictKind::Unknown, Certainty::Low)
        }
        Arena::Device | Arena::Host => {
            if arena == Arena::Host {
                because.push(Because::HostMemory);
            }
            weigh(ask, arena, &mut because)
        }
        Arena::Context => {
            because.push(Because::ContextEstimate { bytes: CONTEXT_BYTES });
            let (kind, _) = weigh(ask, arena, &mut because);
            (kind, Certainty::Low)
        }
    };
    // Bytes of GPU neighbours say nothing about address space or managed memory.
    let holders =
        if matches!(arena, Arena::Managed | Arena::Mapping) { Vec::new() } else { named_holders(ask) };
    Some(Verdict { kind, certainty, arena, because, holders, near_miss: ask.retried })
}

fn weigh(ask: &Ask, arena: Arena, because: &mut Vec<Because>) -> Decision {
    let page = if arena == Arena::Host { HOST_PAGE } else { DEVICE_PAGE };
    let told = match arena {
        Arena::Context => Some(CONTEXT_BYTES),
        _ => ask.requested.filter(|bytes| *bytes > 0),
    };
    // Without a size, one page is the least that any ask takes: enough to judge a device that is full.
    let needed = told.unwrap_or(page);
    let usable = ask.capacity.map(|bytes| bytes.saturating_sub(ask.reserved.unwrap_or(0)));
    if let Some(usable) = usable
        && needed > usable
    {
        because.push(Because::LargerThanDevice { requested: needed, usable });
        return (VerdictKind::Impossible, Certainty::High);
    }
    if let Some(decision) = over_limit(ask, told, needed, because) {
        return decision;
    }
    let held = own_held(ask);
    if let (Some(usable), Some(held)) = (usable, held)
        && held.saturating_add(needed) > usable
    {
        because.push(Because::TooLargeEvenAlone { requested: needed, room: usable.saturating_sub(held) });
        own_evidence(ask, held, because);
        return (VerdictKind::Own, Certainty::High);
    }
    let paged = needed.div_ceil(page).saturating_mul(page);
    let Some(free) = free_then(ask, usable, held, paged, because) else {
        because.push(Because::Missing { what: MissingFact::Free });
        return (VerdictKind::Unknown, Certainty::Low);
    };
    if free >= paged {
        if told.is_none() || arena == Arena::Context {
            because.push(Because::Missing { what: MissingFact::Requested });
            return (VerdictKind::Unknown, Certainty::Low);
        }
        if arena == Arena::Host {
            // Pages of the host need not lie together: something else refused.
            because.push(Because::RoomWasFree { requested: needed, free, age_seconds: ask.free_age_seconds });
            return (VerdictKind::Unknown, Certainty::Low);
        }
        return room_was_free(ask, needed, free, because);
    }
    let missing = paged - free;
    because.push(Because::Shortfall { requested: needed, free, missing });
    short_of_room(&Short { ask, needed: paged, free, missing, held, usable }, because)
}

/// What can have been free at the failure. A free figure is as old as NVML's last poll, the ledgers are not: what they
/// say is held cannot have been free, however much was free a poll ago. `None` when that does not settle it either.
fn free_then(
    ask: &Ask,
    usable: Option<u64>,
    held: Option<u64>,
    paged: u64,
    because: &mut Vec<Because>,
) -> Option<u64> {
    let booked = held.unwrap_or(0).saturating_add(neighbours_hold(ask).unwrap_or(0));
    let at_most = usable.map(|usable| usable.saturating_sub(booked)).filter(|bytes| *bytes < paged);
    match (ask.free, at_most) {
        (Some(free), Some(bytes)) if free > bytes => {
            because.push(Because::AtMostFree { bytes, told: Some(free) });
            Some(bytes)
        }
        (None, Some(bytes)) => {
            because.push(Because::AtMostFree { bytes, told: None });
            Some(bytes)
        }
        (free, _) => free,
    }
}

/// Over a limit: the verdict when the limit is enforced, or when nothing else explains the refusal.
fn over_limit(ask: &Ask, told: Option<u64>, needed: u64, because: &mut Vec<Because>) -> Option<Decision> {
    let limit = ask.limit?;
    let held = match limit.scope {
        LimitScope::Tenant => own_held(ask),
        LimitScope::Process => ask
            .process
            .and_then(|id| ask.own_processes.iter().find(|(process, _)| *process == id))
            .map(|(_, bytes)| *bytes),
    };
    // Who enforces it counts contexts too, and was asked; the ledger is younger.
    let held = match (limit.used, held) {
        (Some(used), held) => Some(used.max(held.unwrap_or(0))),
        (None, held) => held,
    };
    if held.unwrap_or(0).saturating_add(needed) <= limit.bytes {
        return None;
    }
    let enforced = limit.source.is_enforced();
    because.push(Because::OverLimit { requested: told, held, limit, enforced });
    let room = ask.free.map(|free| free >= needed);
    match (enforced, room) {
        (true, Some(true)) => {
            if let Some(free) = ask.free {
                because.push(Because::RoomWasFree {
                    requested: needed,
                    free,
                    age_seconds: ask.free_age_seconds,
                });
            }
            Some((VerdictKind::Limit, Certainty::High))
        }
        // The limit alone is a reason; that the device was full as well is a second one.
        (true, _) => Some((VerdictKind::Limit, Certainty::Medium)),
        (false, Some(true)) => Some((VerdictKind::Limit, Certainty::Low)),
        // A limit that nobody enforces refused nothing. It stays as evidence.
        (false, _) => None,
    }
}

fn room_was_free(ask: &Ask, needed: u64, free: u64, because: &mut Vec<Because>) -> Decision {
    because.push(Because::RoomWasFree { requested: needed, free, age_seconds: ask.free_age_seconds });
    let fresh = ask.free_age_seconds.is_some_and(|age| age <= FRESH_SECONDS);
    let grown = neighbours_grew(ask).unwrap_or(0);
    if !fresh && grown > free - needed {
        because.push(Because::NeighboursGrew { bytes: grown });
        return (VerdictKind::Neighbour, Certainty::Low);
    }
    let roomy = free / 2 >= needed;
    (VerdictKind::Fragmentation, if fresh && roomy { Certainty::Medium } else { Certainty::Low })
}

struct Short<'a> {
    ask: &'a Ask,
    needed: u64,
    free: u64,
    missing: u64,
    held: Option<u64>,
    usable: Option<u64>,
}

fn short_of_room(short: &Short<'_>, because: &mut Vec<Because>) -> Decision {
    let Short { ask, needed, free, missing, held, usable } = *short;
    if ask.own_cached.is_some_and(|bytes| bytes >= missing) {
        own_evidence(ask, held.unwrap_or(0), because);
        return (VerdictKind::Own, Certainty::Medium);
    }
    let Some(neighbours) = neighbours_hold(ask) else {
        // Whatever is neither free nor own is somebody's: an upper bound for the neighbours.
        if let (Some(usable), Some(held)) = (usable, held)
            && usable.saturating_sub(free).saturating_sub(held).saturating_mul(LITTLE) < held
        {
            own_evidence(ask, held, because);
            return (VerdictKind::Own, Certainty::Medium);
        }
        because.push(Because::Missing { what: MissingFact::Holders });
        return (VerdictKind::Unknown, Certainty::Low);
    };
    let room = free.saturating_add(neighbours);
    if room < needed {
        let nobodys = usable.zip(held).map(|(usable, held)| {
            usable.saturating_sub(free).saturating_sub(held).saturating_sub(neighbours)
        });
        because.push(Because::TooLargeEvenAlone { requested: needed, room });
        return match (held, nobodys) {
            (Some(held), Some(bytes)) if bytes > held => {
                own_evidence(ask, held, because);
                because.push(Because::Unattributed { bytes });
                (VerdictKind::Unknown, Certainty::Low)
            }
            (Some(held), nobodys) if room.saturating_add(held) >= needed => {
                own_evidence(ask, held, because);
                (VerdictKind::Own, if nobodys.is_some() { Certainty::High } else { Certainty::Medium })
            }
            // Not even all that is known to be held would have made the room.
            (Some(held), _) => {
                own_evidence(ask, held, because);
                (VerdictKind::Unknown, Certainty::Low)
            }
            (None, _) => {
                because.push(Because::Missing { what: MissingFact::OwnHeld });
                (VerdictKind::Unknown, Certainty::Low)
            }
        };
    }
    because.push(Because::FitsWithoutNeighbours { requested: needed, room });
    whose_growth(short, neighbours, because)
}

/// It would have fitted without the neighbours, and also without some of the tenant's own. Who grew decides; where
/// nobody grew enough, who holds most.
fn whose_growth(short: &Short<'_>, neighbours: u64, because: &mut Vec<Because>) -> Decision {
    let Short { ask, missing, held, .. } = *short;
    let grown = neighbours_grew(ask);
    let own_grown = ask.own_growth.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
    let held_or_none = held.unwrap_or(0);
    let own_is_most = held.is_some_and(|held| held >= neighbours);
    let others_decided = grown.is_some_and(|bytes| bytes >= missing);
    let own_decided = own_grown >= missing && own_is_most;
    if own_decided && own_grown > grown.unwrap_or(0)
        || !others_decided && neighbours.saturating_mul(LITTLE) < held_or_none
    {
        own_evidence(ask, held_or_none, because);
        because.push(Because::NeighboursHold { bytes: neighbours });
        return (VerdictKind::Own, Certainty::Medium);
    }
    if let Some(held) = held {
        own_evidence(ask, held, because);
    } else {
        because.push(Because::Missing { what: MissingFact::OwnHeld });
    }
    because.push(Because::NeighboursHold { bytes: neighbours });
    if others_decided {
        because.push(Because::NeighboursGrew { bytes: grown.unwrap_or(0) });
        return (VerdictKind::Neighbour, Certainty::High);
    }
    let certainty = match held {
        Some(_) if !own_is_most => Certainty::High,
        Some(_) => Certainty::Medium,
        None => Certainty::Low,
    };
    (VerdictKind::Neighbour, certainty)
}

/// The tenant's own bytes as far as they are known: a lower bound. `None` when not even the live bytes are.
fn own_held(ask: &Ask) -> Option<u64> {
    Some(ask.own_live?.saturating_add(ask.own_cached.unwrap_or(0)))
}

fn own_evidence(ask: &Ask, held: u64, because: &mut Vec<Because>) {
    because.push(Because::OwnHolds { bytes: held });
    if let Some(bytes) = ask.own_cached.filter(|bytes| *bytes > 0) {
        because.push(Because::OwnCache { bytes });
    }
    if let Some(process) = ask.process {
        let siblings = ask.own_processes.iter().filter(|(id, _)| *id != process);
        let bytes = siblings.fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
        if bytes > 0 {
            because.push(Because::OwnSiblings { bytes });
        }
    }
    if let Some(bytes) = ask.own_growth.and_then(|bytes| u64::try_from(bytes).ok()).filter(|bytes| *bytes > 0)
    {
        because.push(Because::OwnGrew { bytes });
    }
}

fn neighbours_hold(ask: &Ask) -> Option<u64> {
    Some(
        ask.holders
            .as_ref()?
            .iter()
            .filter(|(tenant, _)| *tenant != ask.tenant)
            .fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes)),
    )
}

/// What the growers among the neighbours took. One that shrank does not make up for another that grew.
fn neighbours_grew(ask: &Ask) -> Option<u64> {
    Some(
        ask.growth
            .as_ref()?
            .iter()
            .filter(|(tenant, _)| *tenant != ask.tenant)
            .filter_map(|(_, bytes)| u64::try_from(*bytes).ok())
            .fold(0, u64::saturating_add),
    )
}

/// The largest holders, and among the rest the fastest growers, so that a culprit that holds little is named too.
fn named_holders(ask: &Ask) -> Vec<Holder> {
    let growth_known = ask.growth.is_some();
    let mut others: BTreeMap<&Tenant, (Option<u64>, i64)> = BTreeMap::new();
    for (tenant, bytes) in ask.holders.iter().flatten() {
        let held = &mut others.entry(tenant).or_default().0;
        *held = Some(held.unwrap_or(0).saturating_add(*bytes));
    }
    for (tenant, bytes) in ask.growth.iter().flatten() {
        let grew = &mut others.entry(tenant).or_default().1;
        *grew = grew.saturating_add(*bytes);
    }
    others.remove(&ask.tenant);
    let mut named: Vec<Holder> = others
        .into_iter()
        .filter(|(_, (bytes, grew))| bytes.unwrap_or(0) > 0 || *grew > 0)
        .map(|(tenant, (bytes, grew))| Holder {
            tenant: tenant.clone(),
            bytes,
            grew: growth_known.then_some(grew),
        })
        .collect();
    named.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| b.grew.cmp(&a.grew)));
    let mut rest = named.split_off(named.len().min(NAMED - GROWERS));
    rest.sort_by(|a, b| b.grew.cmp(&a.grew).then_with(|| b.bytes.cmp(&a.bytes)));
    rest.truncate(GROWERS);
    named.append(&mut rest);
    named.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| b.grew.cmp(&a.grew)));
    named
}
