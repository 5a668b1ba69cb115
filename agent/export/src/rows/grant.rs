//! Owns the rows of grants: what is held, how that stands beside use, what was asked for, and who holds idly.
//! Refuses standings of `other`: many tenants together are neither idle nor used.

use std::collections::BTreeMap;

use cotenant_model::grant::{GrantsView, RequestRow, Standing, StandingRow};
use cotenant_model::idle::HoldersView;
use cotenant_model::view::View;
use cotenant_model::{GpuId, Tenant, TenantKind};

use super::tenant::tenant_labels;
use super::{Labels, Sheet};
use crate::Id;
use crate::catalogue::attributes::{GRANT, HW_ID, HW_ID_OR_UNKNOWN, REQUEST_SOURCE, RESOURCE};
use crate::label::clean_tenant;

pub(super) fn write(sheet: &mut Sheet, view: &View) {
    asking(sheet, &view.grants);
    for row in &view.grants.shares {
        let gpu = row.gpu.as_ref().map_or("unknown", |gpu| gpu.as_str());
        let labels = published(&row.tenant).with(HW_ID_OR_UNKNOWN, gpu).with(RESOURCE, &row.resource);
        sheet.put(Id::GrantShares, labels, row.shares);
    }
    let own = |tenant: &Tenant| tenant.kind != TenantKind::Other;
    for row in view.grants.standings.iter().filter(|row| own(&row.tenant)) {
        standing(sheet, row);
    }
    for row in view.grants.requests.iter().filter(|row| own(&row.tenant)) {
        request(sheet, row);
    }
    holders(sheet, &view.holders);
}

fn published(tenant: &Tenant) -> Labels {
    let clean = clean_tenant(tenant);
    tenant_labels(Labels::default(), clean.as_ref().unwrap_or(tenant))
}

fn asking(sheet: &mut Sheet, grants: &GrantsView) {
    for source in &grants.sources {
        let (errors, age) = match source.name {
            "apiserver" => (Id::ApiWatchErrors, Id::ApiWatchAge),
            "podresources" => (Id::PodResourcesErrors, Id::PodResourcesAge),
            _ => (Id::RuntimeErrors, Id::RuntimeAge),
        };
        sheet.put(errors, Labels::default(), source.errors);
        if let Some(seconds) = source.age_seconds {
            sheet.put(age, Labels::default(), seconds);
        }
    }
    if let Some(stale) = grants.stale {
        sheet.put(Id::StaleGrants, Labels::default(), stale);
    }
    if grants.sources.iter().any(|source| source.name == "podresources") {
        sheet.put(Id::UnreadDeviceIds, Labels::default(), grants.unread_ids);
    }
}

fn standing(sheet: &mut Sheet, row: &StandingRow) {
    let labels = published(&row.tenant).with(HW_ID, row.gpu.as_str());
    match row.bytes {
        // The lists were read, and it is in none of them.
        Some(Ok(bytes)) => sheet.put(Id::MemoryProcess, labels.clone(), bytes),
        Some(Err(reason)) => {
            let clean = clean_tenant(&row.tenant);
            let on = Labels::default().with(HW_ID, row.gpu.as_str());
            let labels = tenant_labels(on, clean.as_ref().unwrap_or(&row.tenant));
            sheet.put_absence(labels, "process_bytes", reason);
        }
        None => {}
    }
    if let Ok(standing) = row.standing {
        for state in Standing::ALL {
            sheet.put(Id::GrantState, labels.clone().with(GRANT, state.as_str()), *state == standing);
        }
    }
    if let Some(seconds) = row.idle_seconds {
        sheet.put(Id::GrantIdle, labels, seconds);
    }
}

fn request(sheet: &mut Sheet, row: &RequestRow) {
    let labels =
        published(&row.tenant).with(HW_ID, row.gpu.as_str()).with(REQUEST_SOURCE, row.source.as_str());
    sheet.put(Id::MemoryRequest, labels.clone(), row.bytes);
    if let Some(over) = row.over {
        sheet.put(Id::MemoryOverRequest, labels, over);
    }
}

/// Nobody idle is a fact where it was judged, and nothing where it was not.
fn holders(sheet: &mut Sheet, view: &HoldersView) {
    let mut sums: BTreeMap<(&Tenant, &GpuId), (u64, u64, f64)> =
        view.judged.iter().map(|(tenant, gpu)| ((tenant, gpu), (0, 0, 0.0))).collect();
    for holder in &view.idle {
        let (count, bytes, longest) = sums.entry((&holder.tenant, &holder.gpu)).or_default();
        *count += 1;
        *bytes += holder.bytes;
        *longest = longest.max(holder.idle_seconds);
    }
    for ((tenant, gpu), (count, bytes, longest)) in sums {
        let labels = published(tenant).with(HW_ID, gpu.as_str());
        sheet.put(Id::IdleHolders, labels.clone(), count);
        sheet.put(Id::IdleHolderBytes, labels.clone(), bytes);
        if count > 0 {
            sheet.put(Id::IdleHolderAge, labels, longest);
        }
    }
}
