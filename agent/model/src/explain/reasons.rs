//! Owns the words of verdicts.
//! Refuses more than the verdict says.

use super::words::{clock, duration, gib, gib_exact, percent, who};
use crate::incident::{FailureEvidence, Scarce, Warned};
use crate::verdict::{Arena, Because, LimitScope, LimitSource, MissingFact, Verdict, VerdictKind};

/// Where, when no GPU is named.
pub(super) fn arena_words(verdict: &Verdict) -> String {
    match verdict.arena {
        Arena::Host => "the host (pinned memory)",
        Arena::Managed => "managed memory",
        Arena::Mapping => "its address space",
        Arena::Device | Arena::Context => "a GPU that is unknown",
    }
    .to_owned()
}

/// Half a sentence for the headline.
pub(super) fn cause(verdict: &Verdict) -> String {
    match verdict.kind {
        VerdictKind::Neighbour => match verdict.culprits().first() {
            None => "its neighbours hold the room".to_owned(),
            Some((tenant, _)) => {
                let holder = verdict.holders.iter().find(|holder| holder.tenant == **tenant);
                let holds = holder.and_then(|holder| holder.bytes).map_or_else(
                    || "holds an unknown amount".to_owned(),
                    |bytes| format!("holds {}", gib(bytes)),
                );
                let grew = holder
                    .and_then(|holder| holder.grew)
                    .and_then(|bytes| u64::try_from(bytes).ok())
                    .filter(|bytes| *bytes > 0);
                match grew {
                    Some(bytes) => {
                        format!("its neighbour {} {holds} and had just grown by {}", who(tenant), gib(bytes))
                    }
                    None => format!("its neighbour {} {holds}", who(tenant)),
                }
            }
        },
        VerdictKind::Own => "its own memory is in the way".to_owned(),
        VerdictKind::Fragmentation => {
            "there was room, so memory is fragmented or a limit applies that nobody declared".to_owned()
        }
        VerdictKind::Limit => "it is over its limit".to_owned(),
        VerdictKind::Impossible => "it is more than there is altogether".to_owned(),
        VerdictKind::Unknown => "the cause is unknown".to_owned(),
    }
}

/// What was measured about one record of refusals.
pub(super) fn measured(failure: &FailureEvidence) -> String {
    let size = match failure.sizes {
        None => "size unknown".to_owned(),
        Some(sizes) if sizes.smallest == sizes.largest => gib_exact(sizes.largest),
        Some(sizes) => format!("{} to {}", gib_exact(sizes.smallest), gib_exact(sizes.largest)),
    };
    let misses = match failure.near_misses {
        0 => String::new(),
        n => format!(", {n} of them granted at the same size afterwards"),
    };
    let when = if failure.count == 1 {
        format!("at {} UTC", clock(failure.first_unix))
    } else {
        format!("from {} to {} UTC", clock(failure.first_unix), clock(failure.last_unix))
    };
    format!(
        "{}: {} returned {} {} {when}, {size}{misses}.",
        who(&failure.victim),
        failure.operation.as_str(),
        failure.error,
        if failure.count == 1 { "once".to_owned() } else { format!("{} times", failure.count) },
    )
}

/// What the forecast had said, and how right it was.
pub(super) fn warned(warned: &Warned) -> String {
    let when = format!(
        "{} before, at {} UTC, with a risk of {} within a minute",
        duration(warned.lead_seconds),
        clock(warned.raised_unix),
        percent(warned.risk),
    );
    match &warned.of {
        Scarce::Gpu { .. } => {}
        Scarce::Limit { tenant } => {
            return format!("That {} fills the host memory it may hold was warned of {when}.", who(tenant));
        }
        Scarce::Host => {
            let grew = warned.driver.as_ref().map(|driver| format!(" {} grew fastest.", who(driver)));
            return format!(
                "That this host runs out of memory was warned of {when}.{}",
                grew.unwrap_or_default()
            );
        }
    }
    let right = |right: Option<bool>| match right {
        Some(true) => ", rightly",
        Some(false) => ", wrongly",
        None => "",
    };
    let driver = warned.driver.as_ref().map_or_else(
        || "It named no driver".to_owned(),
        |driver| format!("It named {} as the driver{}", who(driver), right(warned.driver_right)),
    );
    let victims: Vec<String> = warned.victims.iter().map(who).collect();
    let victims = if victims.is_empty() {
        "nobody as who would be refused first".to_owned()
    } else {
        format!("{} as who would be refused first{}", victims.join(" or "), right(warned.victim_right))
    };
    format!("It was warned of {when}. {driver}, and {victims}.")
}

/// Each step of the reasoning as a sentence, then the holders.
pub(super) fn because(verdict: &Verdict) -> Vec<String> {
    let mut words: Vec<String> = verdict.because.iter().map(sentence).collect();
    let holders: Vec<String> = verdict
        .holders
        .iter()
        .take(3)
        .filter_map(|holder| Some(format!("{} {}", who(&holder.tenant), gib_exact(holder.bytes?))))
        .collect();
    if !holders.is_empty() {
        words.push(format!("Largest other holders: {}.", holders.join(", ")));
    }
    if let Some(miss) = verdict.near_miss {
        let freed = miss.freed.map_or_else(
            || "what it freed in between is unknown".to_owned(),
            |bytes| format!("it had freed {} in between", gib_exact(bytes)),
        );
        words.push(format!("The same size was granted {} later; {freed}.", duration(miss.after_seconds)));
    }
    words
}

fn sentence(why: &Because) -> String {
    match why {
        Because::LargerThanDevice { requested, usable } => {
            format!("It asked for {} and there are {} in all.", gib_exact(*requested), gib_exact(*usable))
        }
        Because::OverLimit { requested, held, limit, enforced } => {
            let source = match limit.source {
                LimitSource::Mps => "MPS limit",
                LimitSource::Cgroup => "cgroup limit",
                LimitSource::Dmem => "cgroup's limit on device memory",
                LimitSource::Declared => "declared limit",
                LimitSource::Configured => "configured limit",
            };
            let scope = match limit.scope {
                LimitScope::Process => "of the process",
                LimitScope::Tenant => "of the tenant",
            };
            let held = held.map_or_else(|| "an unknown amount".to_owned(), gib_exact);
            let requested = requested.map_or_else(|| "an unknown amount".to_owned(), gib_exact);
            let enforced = if *enforced { "" } else { " (nothing in the driver enforces it)" };
            format!(
                "{held} held and {requested} asked are over the {source} {scope}, {}{enforced}.",
                gib_exact(limit.bytes)
            )
        }
        Because::RoomWasFree { requested, free, age_seconds } => {
            let age = age_seconds.map_or_else(
                || "read at an unknown time before".to_owned(),
                |age| format!("read {} before", duration(age)),
            );
            format!("{} were free ({age}) and {} were asked.", gib_exact(*free), gib_exact(*requested))
        }
        Because::AtMostFree { bytes, told } => {
            let told =
                told.map_or_else(String::new, |told| format!(" (an older reading said {})", gib(told)));
            format!("By what is booked, no more than {} can have been free{told}.", gib_exact(*bytes))
        }
        Because::Shortfall { requested, free, missing } => format!(
            "{} were asked, {} were free, {} were missing.",
            gib_exact(*requested),
            gib_exact(*free),
            gib_exact(*missing)
        ),
        Because::FitsWithoutNeighbours { room, .. } => {
            format!("Without its neighbours {} would have been free.", gib_exact(*room))
        }
        Because::TooLargeEvenAlone { room, .. } => {
            format!("Even without its neighbours only {} would have been free.", gib_exact(*room))
        }
        Because::OwnHolds { bytes } => format!("It held {} itself.", gib_exact(*bytes)),
        Because::OwnCache { bytes } => format!("Of that its own pools kept {} unused.", gib_exact(*bytes)),
        Because::OwnSiblings { bytes } => format!("Of that its other processes held {}.", gib_exact(*bytes)),
        Because::OwnGrew { bytes } => format!("It had just grown by {}.", gib_exact(*bytes)),
        Because::NeighboursHold { bytes } => format!("Its neighbours held {}.", gib_exact(*bytes)),
        Because::NeighboursGrew { bytes } => {
            format!("Its neighbours had just grown by {}.", gib_exact(*bytes))
        }
        Because::Unattributed { bytes } => {
            format!("{} are in use that no listed process holds.", gib_exact(*bytes))
        }
        Because::ContextEstimate { bytes } => {
            format!("A context's size is not told; {} are taken for it.", gib(*bytes))
        }
        Because::HostMemory => {
            "Pinned memory is the host's: the memory of the GPU has no part in it.".to_owned()
        }
        Because::BackedByHost => {
            "Managed memory is backed by the host, so the size of the GPU is not its bound.".to_owned()
        }
        Because::NotPhysical => {
            "The call takes no physical memory: address space or page tables ran out.".to_owned()
        }
        Because::Missing { what } => format!(
            "Unknown: {}.",
            match what {
                MissingFact::Requested => "how much was asked",
                MissingFact::Free => "how much was free",
                MissingFact::OwnHeld => "how much it held itself",
                MissingFact::Holders => "who held the rest",
            }
        ),
    }
}
