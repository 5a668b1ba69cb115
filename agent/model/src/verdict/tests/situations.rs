//! Owns the situations: facts of a failed ask, and the verdict that is right.

use super::*;
use Certainty::{High, Low, Medium};
use LimitScope::{Process, Tenant as WholeTenant};
use LimitSource::{Cgroup, Configured, Declared, Mps};
use VerdictKind::{Fragmentation, Impossible, Limit as OverLimit, Neighbour, Own, Unknown};

pub(super) type Situation = (&'static str, Ask, VerdictKind, Certainty);

pub(super) fn all() -> Vec<Situation> {
    [
        larger_than_the_device(),
        growing_segments(),
        limits(),
        own_memory(),
        neighbours(),
        room_was_free(),
        unknowns(),
        pinned_host_memory(),
    ]
    .concat()
}

fn host(requested: u64, total: u64, available: u64, own: u64, others: &[(&str, u64)]) -> Ask {
    Ask {
        capacity: Some(total),
        reserved: Some(0),
        free: Some(available),
        free_age_seconds: Some(0.1),
        own_live: Some(own),
        holders: Some(others.iter().map(|(name, bytes)| (tenant(name), *bytes)).collect()),
        gpu: None,
        ..ask(Operation::MemHostAlloc, requested)
    }
}

/// Larger than the device.
fn larger_than_the_device() -> Vec<Situation> {
    vec![
        ("400 GiB by cuMemAlloc on an idle H200", h200(400 * GIB, 0, &[]), Impossible, High),
        (
            "400 GiB beside a neighbour: still nobody's fault",
            h200(400 * GIB, 0, &[("b", 100 * GIB)]),
            Impossible,
            High,
        ),
        ("the whole card, of which the driver keeps some", h200(H200, 0, &[]), Impossible, High),
        (
            "larger than a MIG slice",
            Ask { capacity: Some(18 * GIB), reserved: Some(MIB), ..h200(20 * GIB, 0, &[]) },
            Impossible,
            High,
        ),
        (
            "larger than the device, nothing else known",
            Ask { capacity: Some(80 * GIB), ..ask(Operation::MemAlloc, 81 * GIB) },
            Impossible,
            High,
        ),
        (
            "larger than the device and over a limit",
            Ask { limit: limit(GIB, Mps, WholeTenant), ..h200(400 * GIB, 0, &[]) },
            Impossible,
            High,
        ),
        (
            "room for all but the reserve, which is unknown",
            Ask { reserved: None, ..h200(H200 - MIB, 0, &[("b", 100 * GIB)]) },
            Unknown,
            Low,
        ),
    ]
}

/// Growing segments: 14,000 pieces of 10 to 20 MiB, then one refusal (facts, section 1).
fn growing_segments() -> Vec<Situation> {
    vec![
        (
            "the same while the free figure is from before the run",
            Ask {
                operation: Operation::MemCreate,
                own_growth: Some(95 * GIB.cast_signed()),
                free: Some(100 * GIB),
                free_age_seconds: Some(4.0),
                ..h200(20 * MIB, H200 - RESERVED - 40 * GIB - 15 * MIB, &[("b", 40 * GIB)])
            },
            Own,
            Medium,
        ),
        (
            "the end of a 400 GiB ask by expandable segments",
            Ask {
                operation: Operation::MemCreate,
                own_growth: Some(138 * GIB.cast_signed()),
                ..h200(20 * MIB, H200 - RESERVED - 15 * MIB, &[])
            },
            Own,
            High,
        ),
        (
            "the same beside a neighbour that holds little and stands still",
            Ask {
                operation: Operation::MemCreate,
                own_growth: Some(125 * GIB.cast_signed()),
                ..h200(20 * MIB, H200 - RESERVED - 10 * GIB - 15 * MIB, &[("b", 10 * GIB)])
            },
            Own,
            Medium,
        ),
        (
            "the same beside a neighbour that holds a third",
            Ask {
                operation: Operation::MemCreate,
                own_growth: Some(95 * GIB.cast_signed()),
                ..h200(20 * MIB, H200 - RESERVED - 40 * GIB - 15 * MIB, &[("b", 40 * GIB)])
            },
            Own,
            Medium,
        ),
    ]
}

/// Limits.
fn limits() -> Vec<Situation> {
    vec![
        (
            "MPS cap with room on the device",
            Ask { limit: limit(10 * GIB, Mps, WholeTenant), ..h200(2 * GIB, 9 * GIB, &[]) },
            OverLimit,
            High,
        ),
        (
            "MPS cap counts the client, and this client is over it",
            Ask {
                limit: limit(10 * GIB, Mps, Process),
                own_processes: vec![(ProcessId(1), 9 * GIB), (ProcessId(2), GIB)],
                ..h200(2 * GIB, 10 * GIB, &[])
            },
            OverLimit,
            High,
        ),
        (
            "MPS cap counts the client, and only its siblings are large",
            Ask {
                limit: limit(10 * GIB, Mps, Process),
                own_processes: vec![(ProcessId(1), GIB), (ProcessId(2), 9 * GIB)],
                ..h200(2 * GIB, 10 * GIB, &[])
            },
            Fragmentation,
            Medium,
        ),
        (
            "MPS cap exactly reached is not over",
            Ask { limit: limit(11 * GIB, Mps, WholeTenant), ..h200(2 * GIB, 9 * GIB, &[]) },
            Fragmentation,
            Medium,
        ),
        (
            "MPS cap, and the device is full as well",
            Ask { limit: limit(10 * GIB, Mps, WholeTenant), ..h200(2 * GIB, 9 * GIB, &[("b", 130 * GIB)]) },
            OverLimit,
            Medium,
        ),
        (
            "MPS cap, free unknown",
            Ask { limit: limit(10 * GIB, Mps, WholeTenant), free: None, ..h200(2 * GIB, 9 * GIB, &[]) },
            OverLimit,
            Medium,
        ),
        (
            "MPS cap that the ask alone exceeds, own use unknown",
            Ask { limit: limit(GIB, Mps, WholeTenant), own_live: None, ..h200(2 * GIB, 0, &[]) },
            OverLimit,
            High,
        ),
        (
            "C19: a declared request that nothing enforces, with room",
            Ask { limit: limit(2000 * MIB, Declared, WholeTenant), ..h200(2 * GIB, 4 * GIB, &[]) },
            OverLimit,
            Low,
        ),
        (
            "a declared request is no reason when a neighbour took the room",
            Ask {
                limit: limit(2000 * MIB, Declared, WholeTenant),
                ..h200(8 * GIB, 4 * GIB, &[("b", 130 * GIB)])
            },
            Neighbour,
            High,
        ),
        (
            "a configured limit does not refuse either",
            Ask { limit: limit(GIB, Configured, WholeTenant), ..h200(8 * GIB, 4 * GIB, &[("b", 130 * GIB)]) },
            Neighbour,
            High,
        ),
    ]
}

/// Its own memory.
fn own_memory() -> Vec<Situation> {
    vec![
        ("alone and full", h200(20 * GIB, 125 * GIB, &[]), Own, High),
        (
            "too large beside itself, though a neighbour is there",
            h200(60 * GIB, 100 * GIB, &[("b", 30 * GIB)]),
            Own,
            High,
        ),
        (
            "too large beside itself, free and holders unknown",
            Ask { free: None, holders: None, ..h200(60 * GIB, 100 * GIB, &[]) },
            Own,
            High,
        ),
        (
            "holds nearly all, a small neighbour stands still",
            h200(2 * GIB, 136 * GIB, &[("b", 2 * GIB)]),
            Own,
            Medium,
        ),
        (
            "its pool keeps enough",
            Ask {
                own_cached: Some(10 * GIB),
                own_live: Some(20 * GIB),
                ..h200(8 * GIB, 30 * GIB, &[("b", 105 * GIB)])
            },
            Own,
            Medium,
        ),
        (
            "its pool keeps too little",
            Ask {
                own_cached: Some(GIB),
                own_live: Some(29 * GIB),
                ..h200(8 * GIB, 30 * GIB, &[("b", 108 * GIB)])
            },
            Neighbour,
            High,
        ),
        (
            "it grew itself and holds most",
            Ask { own_growth: Some(60 * GIB.cast_signed()), ..h200(10 * GIB, 90 * GIB, &[("b", 45 * GIB)]) },
            Own,
            Medium,
        ),
        (
            "another process of the same tenant is not a neighbour",
            Ask {
                holders: Some(vec![(tenant("a"), 130 * GIB)]),
                own_processes: vec![(ProcessId(1), GIB), (ProcessId(2), 129 * GIB)],
                ..h200(20 * GIB, 130 * GIB, &[])
            },
            Own,
            High,
        ),
        (
            "holders unknown, but hardly anything is left for others",
            Ask { holders: None, ..h200(4 * GIB, 130 * GIB, &[("hidden", 7 * GIB)]) },
            Own,
            Medium,
        ),
    ]
}

/// Neighbours.
#[allow(clippy::too_many_lines, reason = "a table")]
fn neighbours() -> Vec<Situation> {
    vec![
        (
            "free unknown, but the ledgers leave no room",
            Ask { free: None, ..h200(10 * GIB, 5 * GIB, &[("b", 130 * GIB)]) },
            Neighbour,
            High,
        ),
        (
            "a free figure from before the neighbour came",
            Ask {
                free: Some(130 * GIB),
                free_age_seconds: Some(4.0),
                ..h200(10 * GIB, 5 * GIB, &[("b", 130 * GIB)])
            },
            Neighbour,
            High,
        ),
        (
            "C104: free 0.1, the neighbour holds 23.6 of 24",
            Ask {
                capacity: Some(24 * GIB),
                reserved: Some(0),
                free: Some(GIB / 10),
                ..h200(GIB, 0, &[("b", 236 * GIB / 10)])
            },
            Neighbour,
            High,
        ),
        ("a neighbour holds half, two equals", h200(10 * GIB, 68 * GIB, &[("b", 69 * GIB)]), Neighbour, High),
        (
            "it holds more than the neighbour, nobody grew",
            h200(20 * GIB, 80 * GIB, &[("b", 40 * GIB)]),
            Neighbour,
            Medium,
        ),
        (
            "a neighbour that holds little has just grown by what was missing",
            Ask {
                growth: Some(vec![(tenant("b"), 5 * GIB.cast_signed())]),
                ..h200(4 * GIB, 130 * GIB, &[("b", 7 * GIB)])
            },
            Neighbour,
            High,
        ),
        (
            "many small neighbours together",
            h200(20 * GIB, 10 * GIB, &[("b", 30 * GIB), ("c", 30 * GIB), ("d", 30 * GIB), ("e", 30 * GIB)]),
            Neighbour,
            High,
        ),
        (
            "own use unknown",
            Ask { own_live: None, ..h200(10 * GIB, 5 * GIB, &[("b", 125 * GIB)]) },
            Neighbour,
            Low,
        ),
        (
            "stream-ordered, the same rule",
            Ask { operation: Operation::MemAllocAsync, ..h200(10 * GIB, 5 * GIB, &[("b", 130 * GIB)]) },
            Neighbour,
            High,
        ),
        (
            "a page was missing: free is less than a page above the ask",
            Ask { free: Some(3 * MIB), ..h200(3 * MIB, GIB, &[("b", 138 * GIB)]) },
            Neighbour,
            High,
        ),
        (
            "a size that is not known on a device that is full",
            Ask { requested: None, free: Some(MIB), ..h200(0, GIB, &[("b", 138 * GIB)]) },
            Neighbour,
            High,
        ),
        (
            "room by a free figure of 5 s ago, and a neighbour grew by more since",
            Ask {
                free_age_seconds: Some(5.0),
                growth: Some(vec![(tenant("b"), 20 * GIB.cast_signed())]),
                ..h200(10 * GIB, GIB, &[("b", 120 * GIB)])
            },
            Neighbour,
            Low,
        ),
        (
            "a neighbour shrank and another grew",
            Ask {
                growth: Some(vec![
                    (tenant("b"), -30 * GIB.cast_signed()),
                    (tenant("c"), 25 * GIB.cast_signed()),
                ]),
                ..h200(20 * GIB, 70 * GIB, &[("b", 30 * GIB), ("c", 35 * GIB)])
            },
            Neighbour,
            High,
        ),
        (
            "a context's creation on a device that neighbours filled",
            Ask {
                operation: Operation::PrimaryCtxRetain,
                requested: None,
                free: Some(100 * MIB),
                ..h200(0, 0, &[("b", 139 * GIB)])
            },
            Neighbour,
            Low,
        ),
    ]
}

/// There was room.
fn room_was_free() -> Vec<Situation> {
    vec![
        (
            "C104: free 6 GiB, asked 1 GiB, no limit known",
            Ask {
                free: Some(6 * GIB),
                free_age_seconds: Some(0.2),
                ..h200(GIB, 10 * GIB, &[("b", 120 * GIB)])
            },
            Fragmentation,
            Medium,
        ),
        (
            "the same with a free figure of unknown age",
            Ask { free: Some(6 * GIB), free_age_seconds: None, ..h200(GIB, 10 * GIB, &[]) },
            Fragmentation,
            Low,
        ),
        (
            "just enough room",
            Ask { free: Some(GIB + 4 * MIB), ..h200(GIB, 10 * GIB, &[]) },
            Fragmentation,
            Low,
        ),
        (
            "an array, room for many",
            Ask { operation: Operation::Array3DCreate, ..h200(GIB, 10 * GIB, &[]) },
            Fragmentation,
            Medium,
        ),
    ]
}

/// Unknown.
fn unknowns() -> Vec<Situation> {
    vec![
        ("nothing known", ask(Operation::MemAlloc, GIB), Unknown, Low),
        ("free unknown", Ask { free: None, ..h200(10 * GIB, 5 * GIB, &[("b", 100 * GIB)]) }, Unknown, Low),
        (
            "holders unknown and much is held by somebody",
            Ask { holders: None, ..h200(10 * GIB, 5 * GIB, &[("hidden", 130 * GIB)]) },
            Unknown,
            Low,
        ),
        (
            "a size that is not known, and there was room",
            Ask { requested: None, ..h200(0, 5 * GIB, &[]) },
            Unknown,
            Low,
        ),
        (
            "memory that no process is listed for",
            Ask { free: Some(GIB), ..h200(20 * GIB, 5 * GIB, &[("b", 10 * GIB)]) },
            Unknown,
            Low,
        ),
        (
            "neither own nor neighbours explain it, own use unknown",
            Ask { free: Some(GIB), own_live: None, ..h200(20 * GIB, 0, &[("b", 10 * GIB)]) },
            Unknown,
            Low,
        ),
        (
            "a context's creation with room: its size is not told",
            Ask { operation: Operation::CtxCreate, requested: None, ..h200(0, 0, &[("b", 100 * GIB)]) },
            Unknown,
            Low,
        ),
        (
            "managed memory is the host's",
            Ask { operation: Operation::MemAllocManaged, ..h200(400 * GIB, 0, &[("b", 130 * GIB)]) },
            Unknown,
            Low,
        ),
        (
            "address space",
            Ask { operation: Operation::MemAddressReserve, ..h200(1 << 50, 0, &[("b", 130 * GIB)]) },
            Unknown,
            Low,
        ),
        (
            "a mapping",
            Ask { operation: Operation::MemMap, ..h200(20 * MIB, 0, &[("b", 130 * GIB)]) },
            Unknown,
            Low,
        ),
    ]
}

/// Pinned host memory: the host's facts.
fn pinned_host_memory() -> Vec<Situation> {
    vec![
        ("pinned: more than the host has", host(600 * GIB, 512 * GIB, 400 * GIB, 0, &[]), Impossible, High),
        (
            "pinned: over the cgroup's limit",
            Ask {
                limit: limit(16 * GIB, Cgroup, WholeTenant),
                ..host(10 * GIB, 512 * GIB, 400 * GIB, 8 * GIB, &[])
            },
            OverLimit,
            High,
        ),
        (
            "pinned: a neighbour pinned most of the host",
            host(60 * GIB, 512 * GIB, 20 * GIB, 10 * GIB, &[("b", 450 * GIB)]),
            Neighbour,
            High,
        ),
        (
            "pinned: the host's memory went to programs, not to pinning",
            host(60 * GIB, 512 * GIB, 20 * GIB, GIB, &[("b", 2 * GIB)]),
            Unknown,
            Low,
        ),
        (
            "pinned: nothing known of the host",
            Ask { gpu: None, ..ask(Operation::MemAllocHost, GIB) },
            Unknown,
            Low,
        ),
    ]
}
