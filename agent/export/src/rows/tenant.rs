//! Owns the rows of tenants: ledger, NVML's view of their processes, calls, failures, latency and waits.
//! Refuses processes: nothing here names one.

use std::borrow::Cow;
use std::time::Duration;

use cotenant_model::Tenant;
use cotenant_model::sample::{Confidence, GpuRef};
use cotenant_model::view::{TenantView, View};

use super::{Labels, Sheet};
use crate::Id;
use crate::catalogue::attributes::{
    CONFIDENCE, CONTAINER, CUDA_ERROR, HW_ID, LABEL_KEY, LABEL_SOURCE, LABEL_VALUE, LEDGER_HW_ID,
    LIMIT_SCOPE, LIMIT_SOURCE, MEMORY_KIND, NAMESPACE, OPERATION, PART, POD, TENANT, TENANT_KIND, WAIT_CLASS,
};
use crate::guard::distinct;
use crate::label::{clean, clean_tenant};

pub(super) fn write(sheet: &mut Sheet, view: &View) {
    for tenant in one_view_each(&view.tenants).iter() {
        let labels = tenant_labels(Labels::default(), &tenant.tenant);
        ledger(sheet, tenant, &labels);
        device_side(sheet, tenant, &labels);
        calls(sheet, tenant, &labels);
        waits(sheet, tenant, &labels);
        for note in &tenant.notes {
            let labels = labels.clone().with(LABEL_SOURCE, note.source);
            let labels = labels.with(LABEL_KEY, &clean(&note.key)).with(LABEL_VALUE, &clean(&note.value));
            sheet.put(Id::TenantLabel, labels, true);
        }
    }
}

/// After the guard the views are already distinct, and nothing is copied.
fn one_view_each(views: &[TenantView]) -> Cow<'_, [TenantView]> {
    let mut seen = std::collections::BTreeSet::new();
    let clean = views.iter().all(|view| clean_tenant(&view.tenant).is_none() && seen.insert(&view.tenant));
    if clean { Cow::Borrowed(views) } else { Cow::Owned(distinct(views.to_vec()).into_values().collect()) }
}

/// The tenant set, after what `labels` already holds.
pub(super) fn tenant_labels(labels: Labels, tenant: &Tenant) -> Labels {
    let labels = labels.with(TENANT, &tenant.name).with(TENANT_KIND, tenant.kind.as_str());
    if !tenant.kind.is_kubernetes() {
        return labels;
    }
    labels
        .with_some(NAMESPACE, tenant.namespace.as_deref())
        .with_some(POD, tenant.pod.as_deref())
        .with_some(CONTAINER, tenant.container.as_deref())
}

fn with_gpu(labels: &Labels, gpu: &GpuRef) -> Labels {
    let id = match gpu {
        GpuRef::Known(id) => Some(id.as_str()),
        GpuRef::Unknown => Some("unknown"),
        GpuRef::Host => None,
    };
    labels.clone().with_some(LEDGER_HW_ID, id)
}

fn ledger(sheet: &mut Sheet, tenant: &TenantView, labels: &Labels) {
    sheet.put(Id::TenantProcesses, labels.clone(), u64::from(tenant.processes));
    for state in [Confidence::Complete, Confidence::JoinedLate, Confidence::EventsLost] {
        let labels = labels.clone().with(CONFIDENCE, state.as_str());
        sheet.put(Id::MemoryConfidence, labels, state == tenant.confidence);
    }
    for ((gpu, kind), totals) in &tenant.memory {
        let labels = with_gpu(labels, gpu).with(MEMORY_KIND, kind.as_str());
        // Without a process there is nobody to hold anything: the series ends, what it peaked at stays.
        if tenant.processes > 0 {
            sheet.put(Id::MemoryLive, labels.clone(), totals.live);
        }
        sheet.put(Id::MemoryPeak, labels.clone(), totals.peak);
        sheet.put(Id::MemoryAllocated, labels.clone(), totals.allocated);
        sheet.put(Id::MemoryFreed, labels, totals.freed);
    }
}

fn device_side(sheet: &mut Sheet, tenant: &TenantView, labels: &Labels) {
    for (gpu, bytes) in &tenant.process_bytes {
        match bytes {
            Ok(bytes) => sheet.put(Id::MemoryProcess, labels.clone().with(HW_ID, gpu.as_str()), *bytes),
            Err(reason) => {
                let labels = tenant_labels(Labels::default().with(HW_ID, gpu.as_str()), &tenant.tenant);
                sheet.put_absence(labels, "process_bytes", *reason);
            }
        }
    }
    for (gpu, bytes) in &tenant.pool_reserved {
        if let Some(bytes) = bytes {
            sheet.put(Id::MemoryPool, labels.clone().with(HW_ID, gpu.as_str()), *bytes);
        }
    }
    for (gpu, residual) in &tenant.residual {
        let parts =
            [("context", residual.context), ("baseline", residual.baseline), ("drift", residual.drift)];
        for (part, bytes) in parts {
            let labels = labels.clone().with(HW_ID, gpu.as_str()).with(PART, part);
            sheet.put(Id::MemoryResidual, labels, bytes);
        }
    }
    for (gpu, bytes) in &tenant.device_cgroup_bytes {
        sheet.put(Id::MemoryCgroup, labels.clone().with(HW_ID, gpu.as_str()), *bytes);
    }
    for (gpu, limit) in &tenant.limits {
        let labels = labels
            .clone()
            .with(HW_ID, gpu.as_str())
            .with(LIMIT_SOURCE, limit.source.as_str())
            .with(LIMIT_SCOPE, limit.scope.as_str());
        sheet.put(Id::TenantLimit, labels.clone(), limit.bytes);
        if let Some(room) = limit.room() {
            sheet.put(Id::TenantRoom, labels, room);
        }
    }
    for (gpu, share) in &tenant.utilization {
        // A sum of samples that were not taken at one instant can come out above the whole.
        sheet.put(Id::TenantUtilization, labels.clone().with(HW_ID, gpu.as_str()), share.min(1.0));
    }
}

fn calls(sheet: &mut Sheet, tenant: &TenantView, labels: &Labels) {
    for ((gpu, operation), count) in &tenant.operations {
        let labels = with_gpu(labels, gpu).with(OPERATION, operation.as_str());
        sheet.put(Id::Operations, labels, *count);
    }
    for ((gpu, operation, error), count) in &tenant.failures {
        if error.is_failure() {
            let labels =
                with_gpu(labels, gpu).with(OPERATION, operation.as_str()).with(CUDA_ERROR, error.name());
            sheet.put(Id::MemoryFailures, labels, *count);
        }
    }
    for (operation, histogram) in &tenant.latency {
        sheet.put(Id::OperationDuration, labels.clone().with(OPERATION, operation.as_str()), histogram);
    }
}

fn waits(sheet: &mut Sheet, tenant: &TenantView, labels: &Labels) {
    for (class, histogram) in &tenant.waits {
        let labels = labels.clone().with(WAIT_CLASS, class.as_str());
        sheet.put(Id::DriverWait, labels.clone(), Duration::from_nanos(histogram.sum_ns).as_secs_f64());
        sheet.put(Id::DriverWaitDuration, labels, histogram);
    }
    let excess = tenant.excess;
    // Nobody overlapped: that is a zero. Somebody did and nothing is known of it: that is none.
    if excess.calls > 0 || excess.unjudged == 0 {
        let seconds = Duration::from_nanos(excess.time_ns).as_secs_f64();
        sheet.put(Id::ContentionExcess, labels.clone(), seconds);
    }
    sheet.put(Id::ContentionUnjudged, labels.clone(), excess.unjudged);
}
