//! Owns the lines of what was measured: victims, causes, events, who grew.
//! Refuses length: what is left out is counted in a line of its own.

use super::words::{clean, clock, duration, gib_exact, percent, who};
use super::{LINES, reasons};
use crate::incident::{Evidence, Incident, KillEvidence, StallEvidence, Step, Victim, XidEvidence};

pub(super) fn lines(incident: &Incident) -> Vec<String> {
    let mut lines = Vec::new();
    let mut left_out = incident.unlisted.victims + incident.unlisted.evidence + incident.unlisted.timeline;
    let mut some = |sort: Vec<String>| {
        left_out += sort.len().saturating_sub(LINES) as u64;
        lines.extend(sort.into_iter().take(LINES));
    };
    some(incident.victims.iter().filter_map(blocked).collect());
    some(causes(incident).into_iter().collect());
    some(incident.evidence.iter().filter_map(event).collect());
    some(incident.timeline.iter().rev().take(LINES).rev().map(step).collect());
    left_out += incident.timeline.len().saturating_sub(LINES) as u64;
    if left_out > 0 {
        lines.push(format!("{left_out} more lines are not shown."));
    }
    lines
}

fn blocked(victim: &Victim) -> Option<String> {
    let observed = victim.observed_seconds.filter(|_| victim.blocked_seconds > 0.0)?;
    let longest = victim.longest_seconds.map_or_else(
        || "longest single wait unknown".to_owned(),
        |seconds| format!("longest {}", duration(seconds)),
    );
    Some(format!(
        "{}: blocked {} in driver calls over {} watched, {} of it by neighbours; {} waits, {longest}.",
        who(&victim.tenant),
        duration(victim.blocked_seconds),
        duration(observed),
        duration(victim.neighbour_seconds),
        victim.waits,
    ))
}

fn causes(incident: &Incident) -> Option<String> {
    let shares = incident.wait_shares?;
    let named: Vec<_> =
        incident.culprits.iter().filter(|blame| blame.blocked_seconds > 0.0).take(LINES).collect();
    let others = shares.neighbours - named.iter().filter_map(|blame| blame.wait_share).sum::<f64>();
    let mut parts: Vec<String> = named
        .iter()
        .map(|blame| format!("{} {}", who(&blame.tenant), percent(blame.wait_share.unwrap_or(0.0))))
        .collect();
    let apart = [
        // Below this it is what is left over from summing.
        ("other neighbours", if others > 1e-6 { others } else { 0.0 }),
        ("the victims themselves", shares.own),
        ("device", shares.device),
        ("kernel threads", shares.kernel),
        ("unknown", shares.unknown),
    ];
    let apart = apart.iter().filter(|(_, share)| *share > 0.0);
    parts.extend(apart.map(|(name, share)| format!("{name} {}", percent(*share))));
    Some(format!("Blocked time by cause: {}.", parts.join(", ")))
}

fn event(line: &Evidence) -> Option<String> {
    match line {
        // Told with the reasons.
        Evidence::Wait(_) => None,
        Evidence::Stall(stall) => Some(stalled(stall)),
        Evidence::Failure(failure) => Some(reasons::measured(failure)),
        Evidence::Kill(kill) => Some(killed(kill)),
        Evidence::Xid(xid) => Some(faulted(xid)),
    }
}

fn stalled(stall: &StallEvidence) -> String {
    format!(
        "{}: one wait of {}{} ({}), begun {} UTC; holder {}.",
        who(&stall.victim),
        duration(stall.seconds),
        if stall.ongoing { " so far" } else { "" },
        stall.class,
        clock(stall.since_unix),
        clean(&stall.holder),
    )
}

fn killed(kill: &KillEvidence) -> String {
    let gpu = if kill.gpu_live.is_empty() {
        "GPU memory at death unknown or none".to_owned()
    } else {
        let parts: Vec<_> =
            kill.gpu_live.iter().map(|live| format!("{} on {}", gib_exact(live.bytes), live.gpu)).collect();
        format!("held {}", parts.join(", "))
    };
    let pinned = kill.host_pinned.map_or_else(
        || "pinned host memory unknown".to_owned(),
        |bytes| format!("pinned {} of host memory", gib_exact(bytes)),
    );
    let trigger = kill.trigger.as_ref().map_or_else(
        || "who asked for the memory is unknown".to_owned(),
        |tenant| format!("{} asked for the memory", who(tenant)),
    );
    format!("{}: killed at {} UTC, {gpu}, {pinned}; {trigger}.", who(&kill.victim), clock(kill.at_unix))
}

fn faulted(xid: &XidEvidence) -> String {
    let process =
        xid.tenant.as_ref().map_or_else(String::new, |tenant| format!(", process of {}", who(tenant)));
    format!(
        "Xid {} on {}, {} seen, last at {} UTC{process}.",
        xid.code,
        xid.gpu,
        xid.count,
        clock(xid.last_unix)
    )
}

fn step(step: &Step) -> String {
    let did = if step.bytes < 0 { "gave back" } else { "took" };
    format!(
        "{} to {} UTC: {} {did} {} on {}.",
        clock(step.from_unix),
        clock(step.to_unix),
        who(&step.tenant),
        gib_exact(step.bytes.unsigned_abs()),
        step.gpu,
    )
}
