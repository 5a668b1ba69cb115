//! Owns what a tenant may take of a GPU, by who says so, and how far it is from that.
//! Refuses requests: what a scheduler was asked for limits nothing.

use crate::verdict::{Ask, Limit, LimitScope, LimitSource};
use crate::{GpuId, xid::PciAddress};

/// The client's own words to the MPS server about its limit.
pub const MPS_VARIABLE: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
/// Devices that one variable may name.
const MOST_DEVICES: usize = 64;

/// The device that an entry of the variable names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Device {
    /// As the process counts its devices.
    Ordinal(u32),
    Id(GpuId),
}

/// `0=1G,1=512M`: bytes by device. A process writes it itself, so an entry that is not of this form is passed over, and one
/// that names a device again does not count: the server takes the first.
pub fn mps_limits(text: &str) -> Vec<(Device, u64)> {
    let mut limits: Vec<(Device, u64)> = Vec::new();
    for entry in text.split(',').take(MOST_DEVICES) {
        let Some((device, bytes)) = entry.split_once('=') else { continue };
        let device = device.trim();
        let device = match device.parse() {
            Ok(ordinal) => Device::Ordinal(ordinal),
            Err(_) if device.starts_with("GPU-") || device.starts_with("MIG-") => {
                Device::Id(GpuId::from_nvml(device))
            }
            Err(_) => continue,
        };
        let Some(bytes) = size(bytes.trim()) else { continue };
        if limits.iter().all(|(known, _)| *known != device) {
            limits.push((device, bytes));
        }
    }
    limits
}

/// `1G`, `512M`, as the MPS documentation has it; `K` and plain bytes are taken too.
fn size(text: &str) -> Option<u64> {
    let (digits, unit) = match text.char_indices().next_back()? {
        (at, 'G' | 'g') => (&text[..at], 1 << 30),
        (at, 'M' | 'm') => (&text[..at], 1 << 20),
        (at, 'K' | 'k') => (&text[..at], 1 << 10),
        _ => (text, 1),
    };
    let plain = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    digits.parse::<u64>().ok().filter(|_| plain)?.checked_mul(unit)
}

/// The GPU that a `dmem` region is on: `drm/0000:03:00.0/vram0`.
pub fn region_place(region: &str) -> Option<PciAddress> {
    region.split('/').find_map(PciAddress::parse)
}

impl Limit {
    /// What may still be taken under it. `None` where nobody says what is.
    pub fn room(&self) -> Option<u64> {
        Some(self.bytes.saturating_sub(self.used?))
    }
}

impl Ask {
    /// Weighs the ask against the limit that leaves it least room; one that is enforced counts before one that is not.
    #[must_use]
    pub fn under(mut self, limits: impl IntoIterator<Item = Limit>) -> Self {
        let own = self.own_live.unwrap_or(0);
        let process = self.process.and_then(|id| {
            let mine = self.own_processes.iter().find(|(process, _)| *process == id);
            mine.map(|(_, bytes)| *bytes)
        });
        let room = |limit: &Limit| {
            let held = match limit.scope {
                LimitScope::Tenant => own,
                LimitScope::Process => process.unwrap_or(0),
            };
            limit.bytes.saturating_sub(limit.used.unwrap_or(0).max(held))
        };
        self.limit = limits.into_iter().min_by_key(|limit| (!limit.source.is_enforced(), room(limit)));
        self
    }
}

/// The tighter of a tenant's limits of one source: by what room they leave, else by their bytes.
pub fn tighter(one: Limit, other: Limit) -> Limit {
    let key = |limit: &Limit| (limit.room().unwrap_or(limit.bytes), limit.bytes);
    if key(&other) < key(&one) { other } else { one }
}

/// The limit by which an MPS server holds a client. Of a process that is no client it is only what it says.
pub const fn of_client(bytes: u64, used: Option<u64>, is_client: bool) -> Limit {
    let source = if is_client { LimitSource::Mps } else { LimitSource::Declared };
    Limit { bytes, source, scope: LimitScope::Process, used }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CudaError, Operation, ProcessId, Tenant, TenantKind, verdict};

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_mps_variable_is_read_by_device() {
        let id = || Device::Id(GpuId::from_nvml("GPU-6a1b2c3d-0000-4444-8888-123456789abc"));
        for (text, expected) in [
            ("0=1G", vec![(Device::Ordinal(0), GIB)]),
            ("0=1G,1=512M", vec![(Device::Ordinal(0), GIB), (Device::Ordinal(1), GIB / 2)]),
            (" 0 = 2g , 1=1024k", vec![(Device::Ordinal(0), 2 * GIB), (Device::Ordinal(1), 1 << 20)]),
            ("GPU-6a1b2c3d-0000-4444-8888-123456789abc=1G", vec![(id(), GIB)]),
            ("0=1G,0=9G", vec![(Device::Ordinal(0), GIB)]),
        ] {
            assert_eq!(mps_limits(text), expected, "{text}");
        }
    }

    #[test]
    fn hostile_words_limit_nothing() {
        for text in [
            "",
            "=",
            "0=",
            "=1G",
            "0=G",
            "0=-1G",
            "0=+1G",
            "0=1T",
            "0=1GG",
            "0=0x10",
            "x=1G",
            "0=1.5G",
            "0;rm=1G",
            "0=99999999999999999999G",
            "18446744073709551616=1G",
            "0=18446744073709551615G",
            "\u{661}=1G",
        ] {
            assert_eq!(mps_limits(text), [], "{text:?}");
        }
        let many: String = (0..10_000).map(|at| format!("{at}=1G,")).collect();
        assert_eq!(mps_limits(&many).len(), MOST_DEVICES);
    }

    #[test]
    fn c116_a_region_of_dmem_is_placed_by_its_address() {
        let place = region_place("drm/0000:03:00.0/vram0");
        assert_eq!(place, PciAddress::parse("00000000:03:00.0"));
        for region in ["drm/card0/vram0", "", "system", "drm/0000:zz:00.0/vram0"] {
            assert_eq!(region_place(region), None, "{region}");
        }
    }

    #[test]
    fn c104_the_limit_with_least_room_decides_and_an_enforced_one_first() {
        let mut ask =
            Ask::new(Tenant::plain(TenantKind::Docker, "a"), Operation::MemAlloc, CudaError::OUT_OF_MEMORY);
        ask.requested = Some(2 * GIB);
        ask.process = Some(ProcessId(1));
        ask.own_live = Some(6 * GIB);
        ask.own_processes = vec![(ProcessId(1), GIB), (ProcessId(2), 5 * GIB)];
        ask.free = Some(70 * GIB);
        let mps = of_client(2 * GIB, None, true);
        let dmem = Limit {
            bytes: 20 * GIB,
            source: LimitSource::Dmem,
            scope: LimitScope::Tenant,
            used: Some(7 * GIB),
        };
        let declared = of_client(GIB / 2, None, false);
        let asked = ask.clone().under([declared, dmem, mps]);
        assert_eq!(asked.limit, Some(mps));
        let told = verdict::judge(&asked).map(|verdict| verdict.kind);
        assert_eq!(told, Some(verdict::VerdictKind::Limit));
        assert_eq!(ask.clone().under([]).limit, None);
        // What the cgroup counts is more than the ledger: contexts are in it.
        let full = Limit { used: Some(19 * GIB), ..dmem };
        let asked = ask.under([full]);
        assert_eq!(verdict::judge(&asked).map(|told| told.kind), Some(verdict::VerdictKind::Limit));
    }

    #[test]
    fn room_is_unknown_where_use_is() {
        assert_eq!(of_client(GIB, None, true).room(), None);
        assert_eq!(of_client(GIB, Some(2 * GIB), true).room(), Some(0));
        let (roomy, tight) = (of_client(4 * GIB, Some(0), true), of_client(8 * GIB, Some(7 * GIB), true));
        assert_eq!(tighter(roomy, tight), tight);
    }
}
