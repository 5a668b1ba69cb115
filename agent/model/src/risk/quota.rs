//! Owns how much memory each tenant of a GPU should be allowed: what it needs, less its part of what is not there.
//! Refuses a quota below what is held: that would be no cap but an end.

use super::forecast::{Headroom, TenantForecast};

const MIB: u64 = 1 << 20;
/// A process's context and modules, which no ledger has: 430 to 600 MiB on an H200 with CUDA 13.
pub const CONTEXT: u64 = 600 * MIB;
/// Quotas are multiples of this.
pub const STEP: u64 = 256 * MIB;

/// The highest of what was held and of what is to be expected, with the context, rounded up.
pub(super) fn need(peak: u64, expected: u64) -> u64 {
    (peak.max(expected) + CONTEXT).div_ceil(STEP) * STEP
}

/// Sets the quotas: what is needed, where there is room for all of that. Else those who grow give up what is missing,
/// each by its share.
pub(super) fn share_out(headroom: &Headroom, tenants: &mut [TenantForecast]) {
    let contexts = tenants.len() as u64 * CONTEXT;
    let ledgers: u64 = tenants.iter().map(|of| of.live).sum();
    // What is neither a tenant's nor a context is not theirs to share.
    let usable = headroom.free + headroom.used.min(ledgers + contexts);
    let missing = tenants.iter().map(|of| of.need).sum::<u64>().saturating_sub(usable);
    let shares: f64 = tenants.iter().map(|of| of.share).sum();
    for of in tenants {
        let part = if shares > 0.0 { of.share / shares } else { 0.0 };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of bytes")]
        let gives = (missing as f64 * part) as u64;
        let least = need(of.live, 0).min(of.need);
        of.quota = (of.need.saturating_sub(gives) / STEP * STEP).max(least);
    }
}

/// One cut of a GPU: its name, and the bytes that an instance of it is sure to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    pub name: String,
    pub bytes: u64,
}

/// The MIG profiles of a GPU of this size, smallest first; none where no GPU of it has MIG.
///
/// By NVIDIA's MIG User Guide ("Supported MIG Profiles"): memory is cut into eighths, and a profile has one, two, four or
/// eight. Its name has the product's gigabytes over its part, rounded. An instance has up to a tenth less than its part
/// (an H200's 1g.18gb has 16.0 of 17.5 GiB), so a tenth is taken off.
pub fn profiles(limit: u64) -> Vec<Profile> {
    let product = limit.div_ceil(1 << 30);
    // A100 and its kind, H100, H100 NVL, GH200, H200, B200. An A30 has quarters, and is left out.
    if ![40, 80, 94, 96, 141, 144, 180].contains(&product) {
        return Vec::new();
    }
    let cuts = [("1g", 1), ("1g", 2), ("2g", 2), ("3g", 4), ("4g", 4), ("7g", 8)];
    let of = |(slices, eighths): (&str, u64)| Profile {
        name: format!("{slices}.{}gb", (product * eighths * 2 + 8) / 16),
        bytes: limit / 8 * eighths / 10 * 9,
    };
    cuts.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::risk::{Growth, HORIZONS};
    use crate::{Tenant, TenantKind};

    const GIB: u64 = 1 << 30;

    fn tenant(live: u64, needs: u64, share: f64) -> TenantForecast {
        TenantForecast {
            tenant: Tenant::plain(TenantKind::Docker, "of"),
            share,
            live: live * GIB,
            peak: live * GIB,
            ceiling: live * GIB,
            rate: 0.0,
            growth: [Growth::default(); HORIZONS.len()],
            need: needs * GIB,
            quota: 0,
        }
    }

    fn quotas(used: u64, free: u64, mut tenants: Vec<TenantForecast>) -> Vec<f64> {
        let (used, free) = (used * GIB, free * GIB);
        let headroom = Headroom { limit: used + free, reserved: None, used, free, pool: None, managed: 0 };
        share_out(&headroom, &mut tenants);
        tenants.iter().map(|of| of.quota as f64 / GIB as f64).collect()
    }

    #[test]
    fn where_there_is_room_everyone_gets_what_it_needs() {
        assert_eq!(quotas(62, 78, vec![tenant(40, 50, 0.9), tenant(20, 30, 0.1)]), [50.0, 30.0]);
    }

    #[test]
    fn a_leak_is_capped_at_what_the_others_leave() {
        // 141 GiB for all; the leak asks for 120, the others for 60.
        let quotas = quotas(102, 40, vec![tenant(60, 120, 1.0), tenant(40, 60, 0.0)]);
        assert!((60.0..60.1).contains(&quotas[1]), "{quotas:?}");
        assert!((80.0..=82.0).contains(&quotas[0]), "{quotas:?}");
    }

    #[test]
    fn nobody_is_capped_below_what_it_holds() {
        let quotas = quotas(138, 2, vec![tenant(90, 120, 1.0), tenant(46, 60, 0.0)]);
        assert!((90.5..91.0).contains(&quotas[0]), "{quotas:?}");
    }

    #[test]
    fn profiles_have_the_names_that_nvidia_gave_them() {
        let names =
            |mib: u64| profiles(mib * MIB).into_iter().map(|cut| cut.name).collect::<Vec<_>>().join(" ");
        assert_eq!(names(143_771), "1g.18gb 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb");
        assert_eq!(names(81_559), "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb");
        assert_eq!(names(40_536), "1g.5gb 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb");
        assert_eq!(names(24_576), "");
    }
}
