//! Owns an incident's shape as a trace: a root from its start to its end, a child for each stall, refusal, kill and fault.
//! Refuses times that were not measured: waits are sums without a moment, so they are events of the root, not spans.

use cotenant_model::explain;
use cotenant_model::incident::{Evidence, Incident, IncidentId, Kind, Scarce, State};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::Event;

use super::context::{Attributes, Context, Links, failed};
use super::sender::nanoseconds;
use crate::catalogue::attributes::{
    CUDA_ERROR, CULPRIT, HW_ID, INCIDENT_KIND, OOM_SCOPE, OPERATION, TENANT, VICTIM, WAIT_CLASS, XID,
};

/// Of one incident on one node.
pub(super) fn context(seed: &str, id: IncidentId) -> Context {
    Context::of(seed, "incident", &id.to_string())
}

/// The whole trace of an incident that is over.
pub(super) fn closed(incident: &Incident, seed: &str, links: &Links) -> Vec<Span> {
    let root = context(seed, incident.id);
    let merged = incident.merged.iter().map(|id| {
        let why = Attributes::default().words("cotenant.link", "merged_into_this");
        context(seed, *id).link(why.0)
    });
    let end = incident.end_unix.unwrap_or(incident.last_unix);
    let mut span = root.span(None, &name(incident), incident.start_unix, end);
    span.links = merged.collect();
    links.hang_on(&mut span);
    fill(&mut span, incident);
    let children = incident.evidence.iter().enumerate().filter_map(|(n, line)| child(&root, n, line));
    std::iter::once(span).chain(children).collect()
}

/// An open incident as it stands. A span of its own below the root, because the root has no end yet and a span id
/// must not be told twice.
pub(super) fn standing(incident: &Incident, seed: &str, now_unix: f64) -> Span {
    let root = context(seed, incident.id);
    let own = root.child(&format!("standing\0{}", nanoseconds(now_unix)));
    let name = format!("{} so far", name(incident));
    let mut span = own.span(Some(&root), &name, incident.start_unix, now_unix);
    fill(&mut span, incident);
    span
}

fn name(incident: &Incident) -> String {
    format!("incident {}", incident.kind.as_str())
}

fn fill(span: &mut Span, incident: &Incident) {
    span.attributes = summary(incident).0;
    span.events = events(incident);
    if !matches!(incident.kind, Kind::XidEcho | Kind::NearMiss) {
        span.status = Some(failed(incident.kind.as_str()));
    }
}

/// What an incident is, for spans and log records alike.
pub(super) fn summary(incident: &Incident) -> Attributes {
    let unlisted = incident.unlisted;
    let hidden = unlisted.victims + unlisted.culprits + unlisted.evidence + unlisted.timeline;
    let mut attributes = Attributes::default()
        .text("cotenant.incident.id", &incident.id.to_string())
        .named(INCIDENT_KIND, incident.kind.as_str())
        .text("cotenant.incident.state", if incident.state == State::Open { "open" } else { "closed" })
        .words("cotenant.incident.summary", &explain::line(incident))
        .truth("cotenant.incident.host_lock", incident.host_lock)
        .list("cotenant.incident.gpus", incident.gpus.iter().map(cotenant_model::GpuId::as_str))
        .list("cotenant.incident.memory_limits", incident.memory_limits.iter().map(String::as_str))
        .list("cotenant.incident.victims", incident.victims.iter().map(|victim| victim.tenant.name.as_str()))
        .list("cotenant.incident.culprits", incident.culprits.iter().map(|blame| blame.tenant.name.as_str()))
        .count("cotenant.incident.unlisted", Some(hidden));
    if let [gpu] = incident.gpus.as_slice() {
        attributes = attributes.named(HW_ID, gpu.as_str());
    }
    if let Some(first) = incident.culprits.first() {
        attributes = attributes.named(CULPRIT, &first.tenant.name);
    }
    if let Some(first) = incident.victims.first() {
        attributes = attributes.named(VICTIM, &first.tenant.name);
    }
    let waits = incident.wait_shares;
    let memory = incident.memory_shares;
    attributes
        .number("cotenant.wait.share.neighbours", waits.map(|shares| shares.neighbours))
        .number("cotenant.wait.share.self", waits.map(|shares| shares.own))
        .number("cotenant.wait.share.device", waits.map(|shares| shares.device))
        .number("cotenant.wait.share.kernel", waits.map(|shares| shares.kernel))
        .number("cotenant.wait.share.unknown", waits.map(|shares| shares.unknown))
        .number("cotenant.memory.share.neighbours", memory.map(|shares| shares.neighbours))
        .number("cotenant.memory.share.self", memory.map(|shares| shares.own))
        .number("cotenant.memory.share.other_causes", memory.map(|shares| shares.other_causes))
        .number("cotenant.memory.share.unknown", memory.map(|shares| shares.unknown))
}

fn events(incident: &Incident) -> Vec<Event> {
    let victims = incident.victims.iter().map(|victim| {
        let attributes = Attributes::default()
            .tenant(&victim.tenant)
            .number("cotenant.blocked_seconds", Some(victim.blocked_seconds))
            .number("cotenant.neighbour_seconds", Some(victim.neighbour_seconds))
            .number("cotenant.observed_seconds", victim.observed_seconds)
            .number("cotenant.blocked_share", victim.blocked_share)
            .number("cotenant.peak_share", victim.peak_share)
            .count("cotenant.waits", Some(victim.waits))
            .number("cotenant.longest_seconds", victim.longest_seconds)
            .count("cotenant.failures", Some(victim.failures))
            .count("cotenant.near_misses", Some(victim.near_misses))
            .count("cotenant.killed_processes", Some(victim.killed_processes))
            .count("cotenant.gpu_bytes_at_death", victim.gpu_bytes_at_death);
        event("victim", incident.start_unix, attributes)
    });
    let culprits = incident.culprits.iter().map(|blame| {
        let attributes = Attributes::default()
            .tenant(&blame.tenant)
            .number("cotenant.blocked_seconds", Some(blame.blocked_seconds))
            .number("cotenant.wait_share", blame.wait_share)
            .number("cotenant.memory_share", blame.memory_share)
            .count("cotenant.held_bytes", blame.held_bytes)
            .bytes("cotenant.grew_bytes", blame.grew_bytes);
        event("culprit", incident.start_unix, attributes)
    });
    let waits = incident.evidence.iter().filter_map(|line| {
        let Evidence::Wait(wait) = line else { return None };
        let attributes = Attributes::default()
            .named(VICTIM, &wait.victim.name)
            .named(CULPRIT, &wait.culprit)
            .named(WAIT_CLASS, wait.class.as_str())
            .number("cotenant.blocked_seconds", Some(wait.seconds))
            .number("cotenant.wait_share", Some(wait.share))
            .count("cotenant.waits", Some(wait.waits))
            .number("cotenant.longest_seconds", wait.longest_seconds)
            .list("cotenant.kernel_stack", wait.stack.iter().map(String::as_str));
        Some(event("waits", incident.last_unix, attributes))
    });
    let growth = incident.chains.iter().map(|chain| {
        let attributes = Attributes::default()
            .named(CULPRIT, &chain.cause.tenant.name)
            .named(VICTIM, &chain.victim.name)
            .named(HW_ID, chain.cause.gpu.as_str())
            .bytes("cotenant.grew_bytes", Some(chain.cause.bytes))
            .number("cotenant.seconds_before_refusal", Some(chain.seconds_before));
        event("growth before a refusal", chain.cause.to_unix, attributes)
    });
    let warnings = incident.warnings.iter().map(|warned| {
        let mut attributes = Attributes::default()
            .text("cotenant.warning.memory", warned.of.as_str())
            .number("cotenant.warning.lead_seconds", Some(warned.lead_seconds))
            .number("cotenant.warning.risk", Some(warned.risk))
            .text("cotenant.warning.severity", warned.severity.as_str())
            .list("cotenant.warning.victims", warned.victims.iter().map(|tenant| tenant.name.as_str()));
        match &warned.of {
            Scarce::Gpu { gpu } => attributes = attributes.named(HW_ID, gpu.as_str()),
            Scarce::Limit { tenant } => attributes = attributes.named(TENANT, &tenant.name),
            Scarce::Host => {}
        }
        if let Some(driver) = &warned.driver {
            attributes = attributes.named(CULPRIT, &driver.name);
        }
        for (key, right) in [
            ("cotenant.warning.driver_right", warned.driver_right),
            ("cotenant.warning.victim_right", warned.victim_right),
        ] {
            if let Some(right) = right {
                attributes = attributes.truth(key, right);
            }
        }
        event("warning", warned.raised_unix, attributes)
    });
    victims.chain(culprits).chain(waits).chain(growth).chain(warnings).collect()
}

fn event(name: &str, at_unix: f64, attributes: Attributes) -> Event {
    Event {
        time_unix_nano: nanoseconds(at_unix),
        name: name.to_owned(),
        attributes: attributes.0,
        ..Event::default()
    }
}

fn child(root: &Context, number: usize, line: &Evidence) -> Option<Span> {
    let own = |name: &str, from: f64, to: f64| {
        root.child(&format!("{name}\0{number}")).span(Some(root), name, from, to)
    };
    let (mut span, attributes) = match line {
        Evidence::Wait(_) => return None,
        Evidence::Stall(stall) => (
            own("stall", stall.since_unix, stall.since_unix + stall.seconds),
            Attributes::default()
                .named(VICTIM, &stall.victim.name)
                .named(CULPRIT, &stall.holder)
                .named(WAIT_CLASS, stall.class.as_str())
                .truth("cotenant.stall.ongoing", stall.ongoing),
        ),
        Evidence::Failure(failure) => (
            own("allocation failure", failure.first_unix, failure.last_unix),
            Attributes::default()
                .named(VICTIM, &failure.victim.name)
                .named(HW_ID, failure.gpu.as_ref().map_or("unknown", |gpu| gpu.as_str()))
                .named(OPERATION, failure.operation.as_str())
                .named(CUDA_ERROR, failure.error)
                .count("cotenant.failures", Some(failure.count))
                .truth("cotenant.recovered", failure.recovered)
                .count("cotenant.requested_bytes", failure.sizes.map(|sizes| sizes.largest))
                .text("cotenant.verdict", failure.verdict.kind.as_str())
                .text("cotenant.verdict.certainty", failure.verdict.certainty.as_str()),
        ),
        Evidence::Kill(kill) => (
            own("oom kill", kill.at_unix, kill.at_unix),
            Attributes::default()
                .named(VICTIM, &kill.victim.name)
                .named(OOM_SCOPE, kill.scope.as_str())
                .text("cotenant.oom.limit_owner", kill.limit_owner.as_deref().unwrap_or_default())
                .text("cotenant.oom.trigger", kill.trigger.as_ref().map_or("", |tenant| &tenant.name))
                .count("cotenant.killed_processes", Some(kill.processes))
                .count("cotenant.host_pinned_bytes", kill.host_pinned),
        ),
        Evidence::Xid(xid) => (
            own("xid", xid.first_unix, xid.last_unix),
            Attributes::default()
                .named(HW_ID, xid.gpu.as_str())
                .named(XID, &xid.code.to_string())
                .named(TENANT, xid.tenant.as_ref().map_or("", |tenant| &tenant.name))
                .truth("cotenant.xid.echo", xid.echo)
                .count("cotenant.xids", Some(xid.count)),
        ),
    };
    span.attributes = attributes.0;
    Some(span)
}
