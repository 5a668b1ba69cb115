//! Owns the rows of host memory's forecast: of the node, of each GPU tenant under the limit of its memory cgroup, and what
//! became of warnings.
//! Refuses a limit where there is none, and a time where nothing grows: the series are not there.

use std::collections::BTreeSet;

use cotenant_model::Tenant;
use cotenant_model::risk::HORIZON_NAMES;
use cotenant_model::view::View;

use super::risk::warnings;
use super::tenant::tenant_labels;
use super::{Labels, Sheet};
use crate::Id;
use crate::catalogue::attributes::HORIZON;
use crate::label::clean_tenant;

pub(super) fn write(sheet: &mut Sheet, view: &View) {
    let Some(host) = &view.risk.host else { return };
    for (id, counts) in
        [(Id::HostLimitWarnings, &host.limit_warnings), (Id::HostMemoryWarnings, &host.host_warnings)]
    {
        warnings(sheet, id, &Labels::default(), counts);
    }
    if let Some(node) = &host.node {
        for (horizon, risk) in HORIZON_NAMES.into_iter().zip(node.risk) {
            sheet.put(Id::HostMemoryRisk, Labels::default().with(HORIZON, horizon), risk);
        }
        if let Some(time) = node.exhaustion {
            sheet.put(Id::HostMemoryTime, Labels::default(), time.seconds);
        }
    }
    // A tenant's series go with it.
    let known: BTreeSet<&Tenant> = view.tenants.iter().map(|of| &of.tenant).collect();
    for of in &host.tenants {
        let clean = clean_tenant(&of.tenant);
        let tenant = clean.as_ref().unwrap_or(&of.tenant);
        if !known.contains(tenant) {
            continue;
        }
        let labels = tenant_labels(Labels::default(), tenant);
        for (horizon, risk) in HORIZON_NAMES.into_iter().zip(of.memory.risk) {
            sheet.put(Id::HostLimitRisk, labels.clone().with(HORIZON, horizon), risk);
        }
        // What is summed up as other has no limit, and no time.
        if *tenant != Tenant::other() {
            if let Some(limit) = of.memory.limit {
                sheet.put(Id::HostLimit, labels.clone(), limit);
            }
            if let Some(time) = of.memory.exhaustion {
                sheet.put(Id::HostLimitTime, labels.clone(), time.seconds);
            }
        }
        sheet.put(Id::HostUsage, labels, of.memory.held);
    }
}
