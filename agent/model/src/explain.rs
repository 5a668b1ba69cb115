//! Owns an incident in plain words, for somebody who was just woken up: who hurt whom, what was measured, why we say so, what to do.
//! Refuses numbers of its own: what is not known is said to be unknown, and nothing is rounded up to certainty.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::incident::{Evidence, FailureEvidence, Incident, Kind, State, Victim, WaitEvidence};
use crate::sharing::Sharing;
use crate::verdict::{Certainty, VerdictKind};
use crate::{GpuId, WaitClass};

mod measured;
mod reasons;
mod words;

pub use words::{clean, clock, duration, gib, gib_exact, percent, who};

/// Lines of one sort that are worth reading; the JSON has the rest.
const LINES: usize = 8;

/// The words for one incident, in reading order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    pub headline: String,
    pub measured: Vec<String>,
    pub because: Vec<String>,
    pub advice: Vec<String>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{}", self.headline)?;
        for (title, lines) in
            [("Measured", &self.measured), ("Why we say so", &self.because), ("What to do", &self.advice)]
        {
            if !lines.is_empty() {
                writeln!(formatter, "\n{title}:")?;
            }
            for line in lines {
                writeln!(formatter, "  - {line}")?;
            }
        }
        Ok(())
    }
}

/// An incident with its words: one element of `/api/v1/incidents`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explained {
    #[serde(flatten)]
    pub incident: Incident,
    /// For a row of a table.
    pub line: String,
    pub explanation: Explanation,
}

impl From<Incident> for Explained {
    fn from(incident: Incident) -> Self {
        Self { line: line(&incident), explanation: explain(&incident), incident }
    }
}

impl Explained {
    /// With how each of its GPUs is shared.
    pub fn told(incident: Incident, sharing: &BTreeMap<GpuId, Sharing>) -> Self {
        let mut explained = Self::from(incident);
        for gpu in &explained.incident.gpus {
            if let Some(sharing) = sharing.get(gpu) {
                explained.explanation.because.push(format!("{gpu} {}.", sharing.words()));
            }
        }
        explained
    }
}

/// All the words.
pub fn explain(incident: &Incident) -> Explanation {
    Explanation {
        headline: headline(incident),
        measured: measured::lines(incident),
        because: because(incident),
        advice: incident.actions.iter().map(|action| action.words.clone()).collect(),
    }
}

/// One row of a table: since, for how long, state, kind, who, whom, where.
pub fn line(incident: &Incident) -> String {
    let state = match incident.state {
        State::Open => "open",
        State::Closed => "over",
    };
    let culprit = culprit(incident);
    let victim = incident.victims.first().map_or_else(|| "-".to_owned(), |victim| who(&victim.tenant));
    let more = match incident.victims.len() as u64 + incident.unlisted.victims {
        0 | 1 => String::new(),
        n => format!(" (+{})", n - 1),
    };
    format!(
        "{}  {:>9}  {state}  {}  {culprit} -> {victim}{more}  on {}",
        clock(incident.start_unix),
        duration(incident.seconds()),
        incident.kind.as_str(),
        place(incident),
    )
}

/// Who is at fault for what the incident is named by: a neighbour, `itself`, or `-` where it is nobody or not known.
fn culprit(incident: &Incident) -> String {
    let first = incident.culprits.first();
    let (at_fault, own) = match incident.kind {
        Kind::NoisyNeighbour => (first, false),
        Kind::Stall => (first.filter(|blame| blame.holds_stalled > 0), false),
        Kind::AllocationFailure | Kind::NearMiss => (
            first.filter(|blame| blame.memory_share.is_some_and(|share| share > 0.0)),
            incident.memory_shares.is_some_and(|shares| shares.own > 0.0),
        ),
        // Who waited for whom meanwhile is not who killed or broke something.
        Kind::OomKill | Kind::Xid | Kind::XidEcho => (None, false),
    };
    match (at_fault, own) {
        (Some(blame), _) => who(&blame.tenant),
        (None, true) => "itself".to_owned(),
        (None, false) => "-".to_owned(),
    }
}

/// One sentence: who hurt whom on which GPU, how much, since when.
pub fn headline(incident: &Incident) -> String {
    let body = match incident.kind {
        Kind::NoisyNeighbour => waiting(incident),
        Kind::Stall => stalled(incident),
        Kind::AllocationFailure | Kind::NearMiss => refused(incident),
        Kind::OomKill => killed(incident),
        Kind::Xid | Kind::XidEcho => faulted(incident),
    };
    let start = clock(incident.start_unix);
    let when = match incident.end_unix {
        None => format!("since {start} UTC, still open"),
        Some(_) if incident.seconds() < 1.0 => format!("at {start} UTC"),
        Some(end) => format!("{start} to {} UTC, {}", clock(end), duration(incident.seconds())),
    };
    format!("{} ({when}).", body.unwrap_or_else(|| format!("Trouble of unknown kind on {}", place(incident))))
}

/// "2 tenants, most of all X" or "X".
fn victims_words(incident: &Incident, victim: &Victim) -> String {
    match incident.victims.len() as u64 + incident.unlisted.victims {
        0 | 1 => who(&victim.tenant),
        n => format!("{n} tenants, most of all {},", who(&victim.tenant)),
    }
}

fn waiting(incident: &Incident) -> Option<String> {
    let victim = incident.victims.first()?;
    let culprit = incident.culprits.first()?;
    let with = match incident.culprits.len() as u64 + incident.unlisted.culprits - 1 {
        0 => String::new(),
        1 => " and one other".to_owned(),
        n => format!(" and {n} others"),
    };
    let class = top_class(incident).map_or("a driver lock", class_words);
    Some(format!(
        "{}{with} made {} wait {} for {class}{}",
        who(&culprit.tenant),
        victims_words(incident, victim),
        wall_words(victim),
        on_gpus(incident),
    ))
}

/// "1.25 s of 2.00 s (62 %)".
fn wall_words(victim: &Victim) -> String {
    match (victim.observed_seconds, victim.blocked_share) {
        (Some(observed), Some(share)) if share <= 1.0 => {
            format!("{} of {} ({})", duration(victim.neighbour_seconds), duration(observed), percent(share))
        }
        (Some(observed), Some(share)) => format!(
            "{} in {} ({share:.1} threads at a time)",
            duration(victim.neighbour_seconds),
            duration(observed)
        ),
        _ => duration(victim.neighbour_seconds),
    }
}

fn stalled(incident: &Incident) -> Option<String> {
    let stall = incident
        .evidence
        .iter()
        .filter_map(|line| if let Evidence::Stall(stall) = line { Some(stall) } else { None })
        .max_by(|a, b| a.ongoing.cmp(&b.ongoing).then(a.seconds.total_cmp(&b.seconds)))?;
    let is = if stall.ongoing { "has been stuck" } else { "was stuck" };
    let holder = match stall.holder.as_str() {
        "unknown" => "who holds it is unknown".to_owned(),
        "self" => "its own threads hold it".to_owned(),
        "device" => "the device has not answered".to_owned(),
        "kernel" => "a kernel thread holds it".to_owned(),
        name => format!("{} is the only other one in the driver that can hold it", clean(name)),
    };
    Some(format!(
        "{} {is} for {} in one wait for {}{}; {holder}",
        who(&stall.victim),
        duration(stall.seconds),
        class_words(stall.class),
        on_gpus(incident),
    ))
}

/// The refusal that the incident is told by: not recovered before recovered, more certain, more often.
fn chief_failure(incident: &Incident) -> Option<&FailureEvidence> {
    let failures = incident.evidence.iter().filter_map(|line| match line {
        Evidence::Failure(failure) => Some(failure),
        _ => None,
    });
    failures.max_by(|a, b| {
        let key = |failure: &FailureEvidence| {
            (
                !failure.recovered,
                failure.verdict.kind != VerdictKind::Unknown,
                failure.verdict.certainty,
                failure.count,
            )
        };
        key(a).cmp(&key(b)).then(b.record.cmp(&a.record))
    })
}

fn refused(incident: &Incident) -> Option<String> {
    let failure = chief_failure(incident)?;
    let size = match failure.sizes {
        None => "memory of unknown size".to_owned(),
        Some(sizes) if sizes.smallest == sizes.largest => gib(sizes.largest),
        Some(sizes) => format!("{} to {}", gib(sizes.smallest), gib(sizes.largest)),
    };
    let times = match failure.count {
        1 => String::new(),
        n => format!(" {n} times"),
    };
    let then = if failure.recovered { " and got it on a retry" } else { "" };
    Some(format!(
        "{} was refused {size}{times} on {}{then}: {}",
        who(&failure.victim),
        failure.gpu.as_ref().map_or_else(|| reasons::arena_words(&failure.verdict), GpuId::to_string),
        reasons::cause(&failure.verdict),
    ))
}

fn killed(incident: &Incident) -> Option<String> {
    let victim = incident.victims.iter().find(|victim| victim.killed_processes > 0)?;
    let kill = incident
        .evidence
        .iter()
        .find_map(|line| if let Evidence::Kill(kill) = line { Some(kill) } else { None })?;
    let tenants = incident.victims.iter().filter(|victim| victim.killed_processes > 0).count();
    let processes = match victim.killed_processes {
        1 => "a process".to_owned(),
        n => format!("{n} processes"),
    };
    let others = match tenants {
        0 | 1 => String::new(),
        n => format!(" and of {} more tenants", n - 1),
    };
    let owner = match &kill.limit_owner {
        Some(owner) => format!("the memory limit of {} was full", clean(owner)),
        None if kill.scope == crate::incident::KillScope::Node => "the host's memory was full".to_owned(),
        None => "whose memory limit was full is unknown".to_owned(),
    };
    let held = match victim.gpu_bytes_at_death {
        Some(bytes) => format!("; {} of GPU memory went with it", gib(bytes)),
        None => String::new(),
    };
    Some(format!("The kernel killed {processes} of {}{others}: {owner}{held}", who(&victim.tenant)))
}

fn faulted(incident: &Incident) -> Option<String> {
    let xid = incident
        .evidence
        .iter()
        .filter_map(|line| if let Evidence::Xid(xid) = line { Some(xid) } else { None })
        .max_by(|a, b| (!a.echo).cmp(&!b.echo).then(b.first_unix.total_cmp(&a.first_unix)))?;
    let tenant = match &xid.tenant {
        Some(tenant) => format!(" in {}", who(tenant)),
        None => ", whose process is unknown".to_owned(),
    };
    let times = match xid.count {
        1 => String::new(),
        n => format!(" {n} times"),
    };
    let echo = if xid.echo { " (cleanup after another fault)" } else { "" };
    Some(format!("{} reported Xid {}{times}{echo}{tenant}", xid.gpu, xid.code))
}

fn because(incident: &Incident) -> Vec<String> {
    let mut lines = Vec::new();
    for line in &incident.evidence {
        match line {
            Evidence::Wait(wait) if lines.len() < LINES && is_neighbour(&wait.culprit) => {
                lines.push(waker_words(wait));
            }
            Evidence::Failure(failure) if lines.len() < LINES => {
                lines.push(format!(
                    "Verdict for {}: {} (certainty {}). {}",
                    who(&failure.victim),
                    failure.verdict.kind.as_str(),
                    failure.verdict.certainty.as_str(),
                    reasons::because(&failure.verdict).join(" "),
                ));
                if failure.verdict.certainty == Certainty::Low && failure.verdict.kind != VerdictKind::Unknown
                {
                    lines.push("Certainty is low: take the verdict as a lead, not as a finding.".to_owned());
                }
            }
            _ => {}
        }
    }
    for chain in &incident.chains {
        lines.push(format!(
            "{} grew by {} on {}, up to {} before {} was refused.",
            who(&chain.cause.tenant),
            gib_exact(chain.cause.bytes.unsigned_abs()),
            chain.cause.gpu,
            duration(chain.seconds_before),
            who(&chain.victim),
        ));
    }
    lines
}

fn is_neighbour(culprit: &str) -> bool {
    !matches!(culprit, "self" | "device" | "kernel" | "unknown")
}

fn waker_words(wait: &WaitEvidence) -> String {
    let stack = if wait.stack.is_empty() {
        "kernel stack unknown".to_owned()
    } else {
        let frames: Vec<_> = wait.stack.iter().take(LINES).map(|frame| clean(frame)).collect();
        format!("blocked in {}", frames.join(" <- "))
    };
    format!(
        "{} ended {} of {}'s blocked time ({} in {} waits, class {}): {stack}.",
        clean(&wait.culprit),
        percent(wait.share),
        who(&wait.victim),
        duration(wait.seconds),
        wait.waits,
        wait.class,
    )
}

fn top_class(incident: &Incident) -> Option<WaitClass> {
    let culprit = incident.culprits.first()?;
    incident.evidence.iter().find_map(|line| match line {
        Evidence::Wait(wait) if wait.culprit == culprit.tenant.name => Some(wait.class),
        _ => None,
    })
}

const fn class_words(class: WaitClass) -> &'static str {
    match class {
        WaitClass::RmApiLock => "the driver's API lock (one for all GPUs of the host)",
        WaitClass::GpuLock => "the lock of the GPU",
        WaitClass::Reclaim => "memory that the GPU must scrub first",
        WaitClass::UvmEviction => "the eviction of managed memory",
        WaitClass::UserspaceLock => "a lock outside the kernel",
        WaitClass::Device => "the device",
        WaitClass::Other => "something in the driver that has no class",
    }
}

fn on_gpus(incident: &Incident) -> String {
    match incident.gpus.as_slice() {
        [] => String::new(),
        [gpu] => format!(" on {gpu}"),
        [gpu, more @ ..] => format!(" on {gpu} and {} more", more.len()),
    }
}

fn place(incident: &Incident) -> String {
    match (incident.host_lock, incident.gpus.as_slice()) {
        (true, _) => "the host's driver lock".to_owned(),
        (false, []) => incident
            .memory_limits
            .first()
            .map_or_else(|| "a GPU that is unknown".to_owned(), |limit| clean(limit)),
        (false, [gpu]) => gpu.to_string(),
        (false, [gpu, more @ ..]) => format!("{gpu} and {} more", more.len()),
    }
}

#[cfg(test)]
mod tests;
