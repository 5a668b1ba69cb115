//! Owns the rows of what happened: incidents, kills for memory, Xids.
//! Refuses single events: those are on the API and in OTLP, not in series.

use cotenant_model::incident::Kind;
use cotenant_model::kill::Scope;
use cotenant_model::view::View;
use cotenant_model::{Tenant, TenantKind};

use super::tenant::tenant_labels;
use super::{Labels, Sheet};
use crate::Id;
use crate::catalogue::attributes::{HW_ID, INCIDENT_KIND, OOM_SCOPE, XID, XID_SOURCE};
use crate::label::clean_tenant;

pub(super) fn write(sheet: &mut Sheet, view: &View) {
    let events = &view.events;
    sheet.put(Id::AgentEventsLost, Labels::default(), events.lost);
    sheet.put(Id::IncidentsOpen, Labels::default(), events.open_incidents);
    for kind in Kind::ALL {
        let count = events.incidents.get(kind).copied().unwrap_or(0);
        sheet.put(Id::Incidents, Labels::default().with(INCIDENT_KIND, kind.as_str()), count);
    }
    for ((tenant, scope), kills) in &events.kills {
        let unknown = || Tenant::plain(TenantKind::Unknown, "gone");
        let tenant = tenant.clone().unwrap_or_else(unknown);
        let tenant = clean_tenant(&tenant).unwrap_or(tenant);
        let scope = scope.map_or("unknown", Scope::as_str);
        sheet.put(Id::OomKills, tenant_labels(Labels::default(), &tenant).with(OOM_SCOPE, scope), *kills);
    }
    for ((gpu, code), (count, last)) in &events.xids {
        let labels = Labels::default()
            .with(HW_ID, gpu.as_ref().map_or("unknown", |gpu| gpu.as_str()))
            .with(XID, &code.to_string());
        sheet.put(Id::XidErrors, labels.clone(), *count);
        sheet.put(Id::XidLast, labels, *last);
    }
    for ((gpu, code, source), count) in &events.xid_reports {
        let labels = Labels::default()
            .with(HW_ID, gpu.as_ref().map_or("unknown", |gpu| gpu.as_str()))
            .with(XID, &code.to_string())
            .with(XID_SOURCE, source.as_str());
        sheet.put(Id::XidReports, labels, *count);
    }
}
