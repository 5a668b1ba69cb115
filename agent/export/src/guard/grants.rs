//! Owns the bound on tenants that are there by their grants alone, and what of grants becomes part of `other`.
//! Refuses to move a tenant: who got series of its own keeps them while it has a grant.

use std::collections::BTreeSet;

use cotenant_model::view::View;
use cotenant_model::{Tenant, TenantKind};

use super::Guard;
use crate::label::clean_tenant;

impl Guard {
    /// Grants of folded tenants become shares of `other`; a tenant without a process takes a place like any other.
    pub(super) fn fold_grants(&mut self, view: &mut View) {
        let clean = |tenant: &Tenant| clean_tenant(tenant).unwrap_or_else(|| tenant.clone());
        // What is of a pod as a whole goes with its containers.
        let folded: BTreeSet<String> = self.folded.keys().map(place).collect();
        let own: BTreeSet<String> = self.own.iter().map(place).collect();
        let free = self.limits.max_tenants.saturating_sub(own.len());
        let grants = &mut view.grants;
        let shares = grants.shares.iter_mut().map(|row| &mut row.tenant);
        let standings = grants.standings.iter_mut().map(|row| &mut row.tenant);
        let requests = grants.requests.iter_mut().map(|row| &mut row.tenant);
        let all: Vec<&mut Tenant> = shares.chain(standings).chain(requests).collect();
        let known: BTreeSet<String> = all.iter().map(|tenant| place(&clean(tenant))).collect();
        let mut granted: BTreeSet<String> = self.granted.intersection(&known).cloned().collect();
        for tenant in all {
            let name = place(&clean(tenant));
            if tenant.kind == TenantKind::System || own.contains(&name) || granted.contains(&name) {
                continue;
            }
            if folded.contains(&name) || granted.len() >= free {
                *tenant = Tenant::other();
            } else {
                granted.insert(name);
            }
        }
        self.granted = granted;
        let judged = std::mem::take(&mut view.holders.judged);
        view.holders.judged =
            judged.into_iter().filter(|(tenant, _)| !self.folded.contains_key(&clean(tenant))).collect();
        for holder in &mut view.holders.idle {
            if self.folded.contains_key(&clean(&holder.tenant)) {
                holder.tenant = Tenant::other();
            }
        }
    }
}

/// What takes one place: a team's name alone would let in any number of its pods.
fn place(tenant: &Tenant) -> String {
    match (tenant.kind, &tenant.namespace, &tenant.pod) {
        (TenantKind::Team, Some(namespace), Some(pod)) => format!("{} {namespace}/{pod}", tenant.name),
        _ => tenant.name.clone(),
    }
}
