//! Owns the rows that the agent publishes about itself: losses, maps, features, NVML calls, cost.
//! Refuses library paths and reasons in words: both are free text and are on `/status`.

use cotenant_model::Note;
use cotenant_model::device::CallCost;
use cotenant_model::sample::LibraryState;
use cotenant_model::view::{FeatureState, OtlpView, View};

use super::device::collected;
use super::{Distribution, Labels, Sheet, Value};
use crate::Id;
use crate::catalogue::attributes::{
    ABSENCE_REASON, FEATURE, FEATURE_STATE, FUNCTION, LIBRARY_STATE, LOSS_REASON, MAP, NOTE,
    OTLP_DROP_REASON, OTLP_FAILURE_REASON, OTLP_SIGNAL, PUSH_OUTCOME, READING, SYMBOL_STATE, VERSION,
};

/// Upper bounds of [`CallCost::buckets`], in seconds.
const CALL_BOUNDS: [f64; 7] = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, f64::INFINITY];

pub(super) fn write(sheet: &mut Sheet, view: &View) {
    own_cost(sheet, view);
    kernel_side(sheet, view);
    libraries(sheet, &view.agent.libraries);
    nvml(sheet, view);
    otlp(sheet, &view.agent.otlp);
    for (outcome, requests) in &view.agent.alert_pushes {
        sheet.put(Id::AlertPushes, Labels::default().with(PUSH_OUTCOME, outcome), *requests);
    }
}

fn own_cost(sheet: &mut Sheet, view: &View) {
    let agent = &view.agent;
    let none = Labels::default;
    sheet.put(Id::AgentBuild, none().with(VERSION, agent.version), true);
    sheet.put(Id::AgentCpu, none(), agent.cpu_seconds);
    sheet.put(Id::AgentResident, none(), agent.resident_bytes);
    sheet.put(Id::AgentTick, none(), agent.tick_seconds);
    sheet.put(Id::AgentTenantsFolded, none(), agent.tenants_folded);
    if let Some(seconds) = agent.probe_cost_seconds {
        sheet.put(Id::ProbeCalibration, none(), seconds);
        let hits = agent.notes.iter().find(|(note, _)| *note == Note::ProbeHits).map_or(0, |(_, hits)| *hits);
        sheet.put(Id::ProbeCost, none(), hits as f64 * seconds);
    }
    sheet.put(Id::ProbesShed, none(), agent.probes_shed);
    sheet.put(Id::ProcessesUntimed, none(), agent.processes_untimed);
    for feature in &agent.features {
        for state in FeatureState::ALL {
            let labels = none().with(FEATURE, feature.name).with(FEATURE_STATE, state.as_str());
            sheet.put(Id::AgentFeature, labels, *state == feature.state);
        }
    }
}

fn kernel_side(sheet: &mut Sheet, view: &View) {
    for (loss, count) in &view.agent.losses {
        sheet.put(Id::AgentLosses, Labels::default().with(LOSS_REASON, loss.as_str()), *count);
    }
    for (note, count) in &view.agent.notes {
        sheet.put(Id::AgentNotes, Labels::default().with(NOTE, note.as_str()), *count);
    }
    for map in &view.agent.maps {
        let labels = Labels::default().with(MAP, map.name);
        sheet.put(Id::AgentMapEntries, labels.clone(), map.entries);
        sheet.put(Id::AgentMapCapacity, labels, map.capacity);
    }
}

/// Every state is always there: zero libraries attached is a fact, and the one to alert on.
fn libraries(sheet: &mut Sheet, libraries: &[LibraryState]) {
    for state in ["attached", "partial", "refused"] {
        let count = libraries.iter().filter(|library| library_state(library) == state).count();
        sheet.put(Id::ProbeLibraries, Labels::default().with(LIBRARY_STATE, state), count as u64);
    }
    let sum =
        |count: fn(&LibraryState) -> u32| libraries.iter().map(|library| u64::from(count(library))).sum();
    let symbols: [(&str, u64); 3] = [
        ("attached", sum(|library| library.attached)),
        ("missing", sum(|library| library.missing)),
        ("failed", sum(|library| library.failed)),
    ];
    for (state, count) in symbols {
        sheet.put(Id::ProbeSymbols, Labels::default().with(SYMBOL_STATE, state), count);
    }
}

fn library_state(library: &LibraryState) -> &'static str {
    if library.refused.is_some() || library.attached == 0 {
        "refused"
    } else if library.failed > 0 {
        "partial"
    } else {
        "attached"
    }
}

fn nvml(sheet: &mut Sheet, view: &View) {
    if let Some(missing) = view.agent.missing_gpus {
        sheet.put(Id::AgentGpuVisibilityMismatch, Labels::default(), missing);
    }
    sheet.put(Id::NvmlSuccess, Labels::default(), collected(view));
    if let Some(age) = view.agent.nvml_age_seconds {
        sheet.put(Id::NvmlAge, Labels::default(), age);
    }
    for ((reading, reason), count) in &view.agent.nvml_absences {
        let labels = Labels::default().with(READING, reading).with(ABSENCE_REASON, reason.as_str());
        sheet.put(Id::NvmlAbsences, labels, *count);
    }
    for cost in &view.agent.nvml_calls {
        let labels = Labels::default().with(FUNCTION, cost.function);
        sheet.put(Id::NvmlErrors, labels.clone(), cost.errors);
        sheet.put(Id::NvmlTimeouts, labels.clone(), cost.timeouts);
        sheet.put(Id::NvmlDuration, labels, duration(cost));
    }
}

/// Every reason is always there: nothing dropped is a fact.
fn otlp(sheet: &mut Sheet, signals: &[OtlpView]) {
    for view in signals {
        let labels = Labels::default().with(OTLP_SIGNAL, view.signal);
        sheet.put(Id::OtlpExported, labels.clone(), view.exported);
        sheet.put(Id::OtlpQueueLength, labels.clone(), view.queued);
        sheet.put(Id::OtlpQueueBytes, labels.clone(), view.queued_bytes);
        if let Some(age) = view.last_success_seconds {
            sheet.put(Id::OtlpAge, labels.clone(), age);
        }
        for (reason, items) in &view.dropped {
            sheet.put(Id::OtlpDropped, labels.clone().with(OTLP_DROP_REASON, reason), *items);
        }
        for (reason, attempts) in &view.failures {
            sheet.put(Id::OtlpFailures, labels.clone().with(OTLP_FAILURE_REASON, reason), *attempts);
        }
    }
}

/// The model gives counts at or below each bound; a distribution has each bucket alone.
fn duration(cost: &CallCost) -> Value {
    let mut below = 0;
    let alone = |(bound, at_or_below): (f64, u64)| {
        let count = at_or_below.saturating_sub(below);
        below = below.max(at_or_below);
        (bound, count)
    };
    Value::Distribution(Distribution {
        sum_seconds: cost.total.as_secs_f64(),
        buckets: CALL_BOUNDS.into_iter().zip(cost.buckets).map(alone).collect(),
    })
}
