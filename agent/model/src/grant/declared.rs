//! Owns what a pod's annotations say it asked of GPU memory, and which GPU its scheduler gave it.
//! Refuses to believe that it keeps to it: nothing enforces a request, and a tenant may write its own annotations.

use std::collections::BTreeSet;

use super::DeviceId;
use crate::{GpuId, grant::Physical};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Entries of one annotation that are read.
const MAX_ENTRIES: usize = 64;
/// Characters of an annotation's value that are read.
const MAX_VALUE: usize = 16_384;
/// More than any GPU has: a request above it is a mistake in the unit.
const MAX_BYTES: u64 = 1 << 50;

/// KAI's and Run:ai's: a part of each of a pod's GPUs, 0 to 1.
const FRACTION: &str = "gpu-fraction";
/// KAI's and Run:ai's: MiB on each of a pod's GPUs, without a unit.
const MEMORY: &str = "gpu-memory";
/// The scheduler of `HAMi`: `UUID,type,MiB,percent of cores` by device, `:` after each, `;` after each container.
const HAMI: &str = "hami.io/vgpu-devices-allocated";
/// gpushare's scheduler extender: units for this pod, and units that the GPU has. GiB or MiB, as its plugin was told.
const GPUSHARE_POD: &str = "ALIYUN_COM_GPU_MEM_POD";
const GPUSHARE_GPU: &str = "ALIYUN_COM_GPU_MEM_DEV";
/// Label that KAI gives to a reservation pod and to those that share its GPU; with several GPUs the group follows.
const GROUP: &str = "runai-gpu-group";

/// Who said how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestSource {
    Hami,
    KaiMemory,
    KaiFraction,
    Gpushare,
    /// The whole device was granted.
    Device,
}

impl RequestSource {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hami => "hami",
            Self::KaiMemory => "kai_memory",
            Self::KaiFraction => "kai_fraction",
            Self::Gpushare => "gpushare",
            Self::Device => "device",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    Bytes(u64),
    /// Of the GPU's memory, 0 to 1.
    Fraction(f64),
    /// So many of the units that the GPU has.
    Units {
        units: u64,
        of: u64,
    },
}

impl Amount {
    /// On a GPU of this size; `None` where the unit cannot be told.
    pub fn bytes(self, total: u64) -> Option<u64> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 1 of 64 bits")]
            Self::Fraction(part) => Some((total as f64 * part) as u64),
            Self::Units { units, of } => {
                // The plugin rounds the GPU's memory down to whole units.
                let fits =
                    |unit: &u64| of.checked_mul(*unit).is_some_and(|all| all <= total && all > total / 2);
                units.checked_mul([GIB, MIB].into_iter().find(fits)?)
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub source: RequestSource,
    /// `None`: on whichever GPUs the pod has, the same on each.
    pub gpu: Option<GpuId>,
    pub amount: Amount,
}

/// What one pod's sandbox carries about GPUs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Declared {
    pub namespace: String,
    pub pod: String,
    pub requests: Vec<Request>,
    /// Groups of pods on one GPU that a reservation pod holds for them.
    pub groups: BTreeSet<String>,
}

impl Declared {
    /// `annotation`, `labels`: the pod's own. The first scheduler that is found counts.
    pub fn read<'a>(
        annotation: impl Fn(&str) -> Option<&'a str>,
        labels: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Self {
        let number = |key: &str| annotation(key).and_then(whole);
        let one = |source, amount| vec![Request { source, gpu: None, amount }];
        let requests = if let Some(text) = annotation(HAMI) {
            hami(text)
        } else if let Some(bytes) = number(MEMORY).and_then(mebibytes) {
            one(RequestSource::KaiMemory, Amount::Bytes(bytes))
        } else if let Some(part) = annotation(FRACTION).and_then(fraction) {
            one(RequestSource::KaiFraction, Amount::Fraction(part))
        } else if let (Some(units), Some(of)) = (number(GPUSHARE_POD), number(GPUSHARE_GPU)) {
            one(RequestSource::Gpushare, Amount::Units { units, of })
        } else {
            Vec::new()
        };
        let groups = labels
            .filter(|(key, _)| {
                key.strip_prefix(GROUP).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
            .map(|(_, group)| group.chars().take(128).collect())
            .take(MAX_ENTRIES)
            .collect();
        Self { requests, groups, ..Self::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.groups.is_empty()
    }
}

/// Of the containers of one pod together, by GPU.
fn hami(text: &str) -> Vec<Request> {
    let text = text.get(..MAX_VALUE).unwrap_or(text);
    let mut by_gpu: std::collections::BTreeMap<GpuId, u64> = std::collections::BTreeMap::new();
    for device in text.split([';', ':']).take(MAX_ENTRIES) {
        let mut fields = device.split(',');
        let id = fields.next().map(str::trim).and_then(|id| DeviceId::parse(id).ok());
        let Some(Physical::Gpu(gpu) | Physical::Mig(gpu)) = id.map(|id| id.physical) else { continue };
        if let Some(bytes) = fields.nth(1).and_then(whole).and_then(mebibytes) {
            let sum = by_gpu.entry(gpu).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    let request =
        |(gpu, bytes)| Request { source: RequestSource::Hami, gpu: Some(gpu), amount: Amount::Bytes(bytes) };
    by_gpu.into_iter().map(request).collect()
}

fn whole(text: &str) -> Option<u64> {
    let text = text.trim();
    let plain = !text.is_empty() && text.len() < 20 && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| plain && *number > 0)
}

fn mebibytes(number: u64) -> Option<u64> {
    number.checked_mul(MIB).filter(|bytes| *bytes <= MAX_BYTES)
}

fn fraction(text: &str) -> Option<f64> {
    let text = text.trim();
    let plain = text.len() <= 16 && text.bytes().all(|byte| byte == b'.' || byte.is_ascii_digit());
    text.parse().ok().filter(|part: &f64| plain && *part > 0.0 && *part <= 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const U: &str = "GPU-6a1b2c3d-0000-4444-8888-123456789abc";
    const V: &str = "GPU-6a1b2c3d-0000-4444-8888-123456789abd";

    fn read(annotations: &[(&str, &str)]) -> Vec<Request> {
        let find = |key: &str| annotations.iter().find(|(name, _)| *name == key).map(|(_, value)| *value);
        Declared::read(find, std::iter::empty()).requests
    }

    #[test]
    fn c19_each_scheduler_s_request_is_read_in_its_unit() {
        let one = |source, amount| vec![Request { source, gpu: None, amount }];
        assert_eq!(read(&[(MEMORY, "2000")]), one(RequestSource::KaiMemory, Amount::Bytes(2000 * MIB)));
        assert_eq!(read(&[(FRACTION, "0.5")]), one(RequestSource::KaiFraction, Amount::Fraction(0.5)));
        let units = Amount::Units { units: 8, of: 22 };
        assert_eq!(read(&[(GPUSHARE_POD, "8"), (GPUSHARE_GPU, "22")]), one(RequestSource::Gpushare, units));
        assert_eq!(read(&[(GPUSHARE_POD, "8")]), []);
        let on = |gpu, mib| Request {
            source: RequestSource::Hami,
            gpu: Some(GpuId::from_nvml(gpu)),
            amount: Amount::Bytes(mib * MIB),
        };
        let text = format!("{U},NVIDIA,3000,30:;{V},NVIDIA,1000,0:{U},NVIDIA,500,0:;");
        assert_eq!(read(&[(HAMI, &text), (MEMORY, "1")]), [on(U, 3500), on(V, 1000)]);
    }

    #[test]
    fn c19_what_a_tenant_writes_is_bounded_and_never_a_panic() {
        for text in
            ["", "-1", "0", "1e9", "2000Mi", "99999999999999999999", "nan", "é", "18446744073709551615"]
        {
            assert_eq!(read(&[(MEMORY, text)]), [], "{text}");
        }
        for text in ["", "0", "1.5", "inf", "NaN", "-0.5", ".", "0.5e0"] {
            assert_eq!(read(&[(FRACTION, text)]), [], "{text}");
        }
        for text in [
            ";:,,",
            "x,NVIDIA,1,1:;",
            &format!("{U},NVIDIA,-3,0"),
            &format!("{U},NVIDIA"),
            "é".repeat(99_999).as_str(),
        ] {
            assert_eq!(read(&[(HAMI, text)]), [], "{}", text.len());
        }
        let many = format!("{U},NVIDIA,1,0:").repeat(100_000);
        assert!(read(&[(HAMI, &many)]).len() == 1);
    }

    #[test]
    fn c19_units_are_what_makes_the_gpu_s_size() {
        // An L4: 22.5 GiB.
        let total = 23_034 * MIB;
        assert_eq!(Amount::Units { units: 8, of: 22 }.bytes(total), Some(8 * GIB));
        assert_eq!(Amount::Units { units: 3803, of: 23_034 }.bytes(total), Some(3803 * MIB));
        assert_eq!(Amount::Units { units: 1, of: 5 }.bytes(total), None);
        assert_eq!(Amount::Units { units: u64::MAX, of: 22 }.bytes(total), None);
        assert_eq!(Amount::Fraction(0.5).bytes(total), Some(total / 2));
    }

    #[test]
    fn groups_are_labels_of_kai_s_and_no_others() {
        let labels =
            [("runai-gpu-group", "a"), ("runai-gpu-group/b", "b"), ("runai-gpu-groups", "c"), ("x", "d")];
        let declared = Declared::read(|_| None, labels.into_iter());
        assert_eq!(declared.groups, BTreeSet::from(["a".into(), "b".into()]));
    }
}
