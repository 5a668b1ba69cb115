//! Owns who processes were, a while after they ended: what is reported of one may come a tick after its last figures.
//! Refuses PIDs: they are used again.

use std::collections::BTreeMap;

use cotenant_model::{ProcessId, Tenant};

use super::Clock;

const KEPT_NS: u64 = 60_000_000_000;
/// The dead that are kept; a host that lives faster forgets earlier.
const MOST: usize = 16_384;

#[derive(Default)]
pub(super) struct Roll {
    /// With when each was last there.
    tenants: BTreeMap<ProcessId, (u64, Tenant)>,
}

impl Roll {
    pub(super) fn advance(&mut self, present: &BTreeMap<ProcessId, Tenant>, clock: Clock) {
        let now = clock.monotonic_ns;
        for (id, tenant) in present {
            match self.tenants.get_mut(id) {
                Some((seen, known)) => {
                    *seen = now;
                    // A pod may get its name late.
                    if known != tenant {
                        *known = tenant.clone();
                    }
                }
                None => {
                    self.tenants.insert(*id, (now, tenant.clone()));
                }
            }
        }
        let kept = if self.tenants.len() > present.len() + MOST { 0 } else { KEPT_NS };
        self.tenants.retain(|_, (seen, _)| now.saturating_sub(*seen) <= kept);
    }

    pub(super) fn of(&self, process: ProcessId) -> Option<&Tenant> {
        self.tenants.get(&process).map(|(_, tenant)| tenant)
    }
}

#[cfg(test)]
mod tests {
    use cotenant_model::TenantKind;

    use super::*;

    fn at(seconds: u64) -> Clock {
        Clock { monotonic_ns: seconds * 1_000_000_000, unix: 0.0 }
    }

    #[test]
    fn the_dead_keep_their_names_for_a_minute() {
        let mut roll = Roll::default();
        let tenant = Tenant::plain(TenantKind::Docker, "a");
        roll.advance(&BTreeMap::from([(ProcessId(1), tenant.clone())]), at(10));
        roll.advance(&BTreeMap::new(), at(69));
        assert_eq!(roll.of(ProcessId(1)), Some(&tenant));
        assert_eq!(roll.of(ProcessId(2)), None);
        roll.advance(&BTreeMap::new(), at(71));
        assert_eq!(roll.of(ProcessId(1)), None);
    }

    #[test]
    fn a_later_name_is_taken() {
        let mut roll = Roll::default();
        for name in ["uid", "ns/pod"] {
            let tenant = Tenant::plain(TenantKind::Pod, name);
            roll.advance(&BTreeMap::from([(ProcessId(1), tenant)]), at(10));
        }
        assert_eq!(roll.of(ProcessId(1)).map(|tenant| tenant.name.as_str()), Some("pod:ns/pod"));
    }
}
