//! Owns events as log records: what happened, how bad it is, and the trace it belongs to.
//! Refuses to repeat itself: one record when something is first seen; counts are in the incident and in the metrics.

use cotenant_model::explain;
use cotenant_model::incident::{Incident, KillNote, Kind, XidNote};
use cotenant_model::verdict::FailureRecord;
use opentelemetry_proto::tonic::common::v1::{AnyValue, any_value::Value};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, SeverityNumber};

use super::context::{Attributes, Context};
use super::incident::summary;
use super::sender::nanoseconds;
use crate::catalogue::attributes::{CUDA_ERROR, HW_ID, OOM_SCOPE, OPERATION, TENANT, XID};
use crate::label::clean;

/// Who fell, and whether somebody has to get up for it.
const fn severity_of(kind: Kind) -> SeverityNumber {
    match kind {
        Kind::XidEcho | Kind::NearMiss => SeverityNumber::Info,
        Kind::NoisyNeighbour | Kind::Stall => SeverityNumber::Warn,
        Kind::AllocationFailure | Kind::OomKill | Kind::Xid => SeverityNumber::Error,
    }
}

pub(super) fn opened(incident: &Incident, observed_unix: f64, context: Context) -> LogRecord {
    let severity = severity_of(incident.kind);
    let words = explain::line(incident);
    record(
        "cotenant.incident.opened",
        incident.start_unix,
        observed_unix,
        severity,
        &words,
        summary(incident),
        Some(context),
    )
}

pub(super) fn closed(incident: &Incident, observed_unix: f64, context: Context) -> LogRecord {
    let at = incident.end_unix.unwrap_or(observed_unix);
    let words = format!("over: {}", explain::line(incident));
    record(
        "cotenant.incident.closed",
        at,
        observed_unix,
        SeverityNumber::Info,
        &words,
        summary(incident),
        Some(context),
    )
}

pub(super) fn kill(kill: &KillNote, observed_unix: f64, context: Option<Context>) -> LogRecord {
    let live: Option<u64> = match kill.gpu_live.as_slice() {
        [] => None,
        live => Some(live.iter().map(|(_, bytes)| bytes).sum()),
    };
    let attributes = Attributes::default()
        .tenant(&kill.victim)
        .named(OOM_SCOPE, kill.scope.as_str())
        .text("cotenant.oom.limit_owner", kill.limit_owner.as_deref().unwrap_or_default())
        .text("cotenant.oom.trigger", kill.trigger.as_ref().map_or("", |tenant| &tenant.name))
        .count("cotenant.killed_processes", Some(kill.processes))
        .count("cotenant.gpu_bytes_at_death", live)
        .count("cotenant.host_pinned_bytes", kill.host_pinned);
    let words = format!("the kernel killed {} for memory", clean(&kill.victim.name));
    record(
        "cotenant.oom_kill",
        kill.at_unix,
        observed_unix,
        SeverityNumber::Error,
        &words,
        attributes,
        context,
    )
}

pub(super) fn xid(xid: &XidNote, observed_unix: f64, context: Option<Context>) -> LogRecord {
    let severity = if xid.echo { SeverityNumber::Info } else { SeverityNumber::Error };
    let attributes = Attributes::default()
        .named(HW_ID, xid.gpu.as_str())
        .named(XID, &xid.code.to_string())
        .named(TENANT, xid.tenant.as_ref().map_or("", |tenant| &tenant.name))
        .truth("cotenant.xid.echo", xid.echo);
    let words = format!("{} reported Xid {}", xid.gpu, xid.code);
    record("cotenant.xid", xid.at_unix, observed_unix, severity, &words, attributes, context)
}

pub(super) fn failure(failure: &FailureRecord, observed_unix: f64, context: Option<Context>) -> LogRecord {
    let severity = if failure.recovered { SeverityNumber::Warn } else { SeverityNumber::Error };
    let culprits = failure.verdict.culprits();
    let attributes = Attributes::default()
        .tenant(&failure.tenant)
        .named(HW_ID, failure.gpu.as_ref().map_or("unknown", |gpu| gpu.as_str()))
        .named(OPERATION, failure.operation.as_str())
        .named(CUDA_ERROR, failure.error.name())
        .count("cotenant.requested_bytes", failure.sizes.map(|sizes| sizes.largest))
        .text("cotenant.verdict", failure.verdict.kind.as_str())
        .text("cotenant.verdict.certainty", failure.verdict.certainty.as_str())
        .list("cotenant.incident.culprits", culprits.iter().map(|(tenant, _)| tenant.name.as_str()));
    let words =
        format!("{} was refused memory: {}", clean(&failure.tenant.name), failure.verdict.kind.as_str());
    record(
        "cotenant.allocation_failure",
        failure.first_unix,
        observed_unix,
        severity,
        &words,
        attributes,
        context,
    )
}

fn record(
    name: &str,
    at_unix: f64,
    observed_unix: f64,
    severity: SeverityNumber,
    words: &str,
    attributes: Attributes,
    context: Option<Context>,
) -> LogRecord {
    let text = match severity {
        SeverityNumber::Error => "ERROR",
        SeverityNumber::Warn => "WARN",
        _ => "INFO",
    };
    LogRecord {
        time_unix_nano: nanoseconds(at_unix),
        observed_time_unix_nano: nanoseconds(observed_unix),
        severity_number: severity.into(),
        severity_text: text.to_owned(),
        body: Some(AnyValue { value: Some(Value::StringValue(words.to_owned())) }),
        attributes: attributes.0,
        event_name: name.to_owned(),
        trace_id: context.map(|context| context.trace.to_vec()).unwrap_or_default(),
        span_id: context.map(|context| context.span.to_vec()).unwrap_or_default(),
        flags: u32::from(context.is_some()),
        ..LogRecord::default()
    }
}
