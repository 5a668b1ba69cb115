//! Owns what a scheduler granted: device ids and resource names as facts beside use.
//! Refuses ownership: a grant says who may use a GPU, never who does.

mod book;
mod declared;
mod holding;
mod job;

use std::collections::BTreeSet;
use std::fmt;

pub use book::{Book, GrantsView, RequestRow, ShareRow, SourceView, StandingRow};
pub use declared::{Amount, Declared, Request, RequestSource};
pub use holding::Facts;
pub use job::{JobDevice, JobFacts, JobGrant};

use crate::{GpuId, Reading};

/// Digits of a UUID with its dashes.
const UUID: usize = 36;
/// Namespaces whose pods hold a GPU for pods that share it (KAI, Run:ai). Not a pod's name: anybody can take one.
const RESERVATIONS: [&str; 2] = ["kai-resource-reservation", "runai-reservation"];
const GPUSHARE: &str = "aliyun.com/gpu-mem";

/// The device behind an id of a device plugin.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Physical {
    /// A whole GPU.
    Gpu(GpuId),
    /// A MIG device by its own UUID; the GPU it is on is NVML's to say.
    Mig(GpuId),
    /// `nvidiaN` of GKE's plugin: the minor number of the device node, not NVML's index.
    Node(u32),
}

/// One device id of a grant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    pub physical: Physical,
    pub gpu_instance: Option<u32>,
    pub compute_instance: Option<u32>,
    /// Which of the shares of the device; shares are slots, not parts.
    pub replica: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceIdError {
    #[error("the device id is empty; the device plugin registered a device without a name")]
    Empty,
    #[error(
        "{0:?} begins like no device id of NVIDIA's, GKE's or HAMi's plugins; report it with the plugin's version"
    )]
    Unknown(String),
    #[error("{0:?} has no UUID of 8-4-4-4-12 hexadecimal digits after its prefix")]
    Uuid(String),
    #[error("{0:?} ends in something that is neither a share nor an instance number")]
    Suffix(String),
}

impl DeviceId {
    const fn whole(physical: Physical) -> Self {
        Self { physical, gpu_instance: None, compute_instance: None, replica: None }
    }

    /// The grammar of the plugins: `GPU-u`, `GPU-u::3`, `GPU-u-1`, `GPU-u-_-7`, `MIG-u`, `MIG-u::2`, `MIG-GPU-u/5/0`,
    /// `nvidia0`, `nvidia0/vgpu2`, `nvidia0/gi3`, `nvidia0/gi3/vgpu1`.
    pub fn parse(text: &str) -> Result<Self, DeviceIdError> {
        let shown = || text.chars().take(80).collect::<String>();
        if text.is_empty() {
            return Err(DeviceIdError::Empty);
        }
        if let Some(rest) = text.strip_prefix("nvidia") {
            return Self::node(rest).ok_or_else(|| DeviceIdError::Suffix(shown()));
        }
        let (body, replica) = match text.split_once("::") {
            Some((body, replica)) => {
                (body, Some(number(replica).ok_or_else(|| DeviceIdError::Suffix(shown()))?))
            }
            None => (text, None),
        };
        let uuid = |body| split_uuid(body).ok_or_else(|| DeviceIdError::Uuid(shown()));
        if let Some(rest) = body.strip_prefix("MIG-GPU-") {
            let (of, rest): (String, &str) = uuid(rest)?;
            let physical = Physical::Gpu(GpuId::from_nvml(&format!("GPU-{of}")));
            let instances = rest.strip_prefix('/').and_then(|rest| rest.split_once('/'));
            let (gi, ci) = instances.ok_or_else(|| DeviceIdError::Suffix(shown()))?;
            let (Some(gi), Some(ci)) = (number(gi), number(ci)) else {
                return Err(DeviceIdError::Suffix(shown()));
            };
            return Ok(Self {
                gpu_instance: Some(gi),
                compute_instance: Some(ci),
                replica,
                ..Self::whole(physical)
            });
        }
        let (mig, rest) = match (body.strip_prefix("GPU-"), body.strip_prefix("MIG-")) {
            (Some(rest), _) => (false, rest),
            (None, Some(rest)) => (true, rest),
            (None, None) => return Err(DeviceIdError::Unknown(shown())),
        };
        let (of, rest) = uuid(rest)?;
        let physical = if mig {
            Physical::Mig(GpuId::from_nvml(&format!("MIG-{of}")))
        } else {
            Physical::Gpu(GpuId::from_nvml(&format!("GPU-{of}")))
        };
        // Older plugins and HAMi number their shares with one dash, gpushare its units of memory with `-_-`.
        let replica = match (replica, rest) {
            (replica, "") => replica,
            (None, rest) => {
                let share = rest.strip_prefix("-_-").or_else(|| rest.strip_prefix('-')).and_then(number);
                Some(share.ok_or_else(|| DeviceIdError::Suffix(shown()))?)
            }
            _ => return Err(DeviceIdError::Suffix(shown())),
        };
        Ok(Self { replica, ..Self::whole(physical) })
    }

    /// `0`, `0/vgpu2`, `0/gi3`, `0/gi3/vgpu1`.
    fn node(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let mut id = Self::whole(Physical::Node(number(parts.next()?)?));
        for part in parts {
            if let Some(gi) = part.strip_prefix("gi")
                && id.gpu_instance.is_none()
                && id.replica.is_none()
            {
                id.gpu_instance = Some(number(gi)?);
            } else if let Some(share) = part.strip_prefix("vgpu")
                && id.replica.is_none()
            {
                id.replica = Some(number(share)?);
            } else {
                return None;
            }
        }
        Some(id)
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.physical {
            Physical::Gpu(id) | Physical::Mig(id) => formatter.write_str(id.as_str())?,
            Physical::Node(minor) => write!(formatter, "nvidia{minor}")?,
        }
        if let Some(gi) = self.gpu_instance {
            write!(formatter, "/gi{gi}")?;
        }
        match self.replica {
            Some(replica) => write!(formatter, "::{replica}"),
            None => Ok(()),
        }
    }
}

fn number(text: &str) -> Option<u32> {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if plain { text.parse().ok() } else { None }
}

/// A UUID in NVML's lower case, and what follows it.
fn split_uuid(text: &str) -> Option<(String, &str)> {
    let (uuid, rest) = text.split_at_checked(UUID)?;
    let groups: Vec<usize> = uuid.split('-').map(str::len).collect();
    let digits = uuid.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
    (groups == [8, 4, 4, 4, 12] && digits).then(|| (uuid.to_ascii_lowercase(), rest))
}

/// What a resource name says about how a GPU is shared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// Whole GPUs, as far as the name says: time-slicing may keep the name.
    Gpu,
    /// Renamed by the plugin because it is shared: `….shared`.
    Shared,
    /// Units of memory, as gpushare counts them: `aliyun.com/gpu-mem`.
    Memory,
    /// `nvidia.com/mig-1g.10gb`, shared or not.
    Mig { profile: String, shared: bool },
}

impl Resource {
    /// Any resource of `nvidia.com/`, whatever the administrator renamed it to, gpushare's, and those in `also`.
    pub fn parse(name: &str, also: &[String]) -> Option<Self> {
        if name == GPUSHARE {
            return Some(Self::Memory);
        }
        let local = match name.strip_prefix("nvidia.com/") {
            Some(local) if !local.is_empty() => local,
            _ if also.iter().any(|other| other == name) => name.rsplit('/').next().unwrap_or(name),
            _ => return None,
        };
        let (kind, shared) = match local.strip_suffix(".shared") {
            Some(kind) => (kind, true),
            None => (local, false),
        };
        Some(match kind.strip_prefix("mig-") {
            Some(profile) => Self::Mig { profile: profile.to_owned(), shared },
            None if shared => Self::Shared,
            None => Self::Gpu,
        })
    }
}

/// A device as granted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GrantedDevice {
    Known(DeviceId),
    /// A claim of dynamic resource allocation: the driver's own names, not a UUID.
    Claimed {
        pool: String,
        device: String,
    },
}

/// What one container was granted of one resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub namespace: String,
    pub pod: String,
    /// Kubelet's list does not hold it: known when something else on the host names the pod.
    pub pod_uid: Option<String>,
    pub container: String,
    pub resource: String,
    pub devices: Vec<GrantedDevice>,
}

/// Whose grants they are, beyond the obvious.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GrantState {
    /// The pod is there.
    Held,
    /// Kubelet lists it, and neither a cgroup nor a process of the pod is there (C09).
    Stale,
    /// A pod that holds the GPU for others (C28): never a user.
    Reservation,
    /// Nothing says which pod it is.
    Unknown,
}

impl Grant {
    pub fn is_reservation(&self) -> bool {
        RESERVATIONS.contains(&self.namespace.as_str())
    }

    /// `live`: the UIDs of pods with a cgroup or process on this node; `None` where they could not be listed.
    /// `all_named`: something names each of them, so that a pod that nothing names is none of them.
    pub fn state(&self, live: Option<&BTreeSet<String>>, all_named: bool) -> GrantState {
        match (live, &self.pod_uid) {
            _ if self.is_reservation() => GrantState::Reservation,
            (Some(live), Some(uid)) if live.contains(uid) => GrantState::Held,
            (Some(_), Some(_)) => GrantState::Stale,
            (Some(_), None) if all_named => GrantState::Stale,
            _ => GrantState::Unknown,
        }
    }

    /// The GPUs by UUID, each once however many shares of it are granted; MIG devices by theirs.
    /// `node`: which UUID `nvidiaN` is.
    pub fn gpus(&self, node: impl Fn(u32) -> Option<GpuId>) -> BTreeSet<GpuId> {
        self.devices.iter().filter_map(|device| device.gpu(&node)).collect()
    }
}

impl GrantedDevice {
    fn gpu(&self, node: impl Fn(u32) -> Option<GpuId>) -> Option<GpuId> {
        match self {
            Self::Known(DeviceId { physical: Physical::Gpu(gpu) | Physical::Mig(gpu), .. }) => {
                Some(gpu.clone())
            }
            Self::Known(DeviceId { physical: Physical::Node(minor), .. }) => node(*minor),
            Self::Claimed { .. } => None,
        }
    }

    /// The GPU of a claim, and whether only a MIG device of it was granted. NVIDIA's driver calls them `gpu-N` and `gpu-N-mig-…`,
    /// with N the index in its first releases and the device node's number since: it is known where both are one GPU's.
    fn claimed(
        &self,
        minors: &std::collections::BTreeMap<u32, GpuId>,
        indexes: &std::collections::BTreeMap<u32, GpuId>,
    ) -> Option<(GpuId, bool)> {
        let Self::Claimed { device, .. } = self else { return None };
        let rest = device.strip_prefix("gpu-")?;
        if let Some((uuid, "")) = split_uuid(rest) {
            return Some((GpuId::from_nvml(&format!("GPU-{uuid}")), false));
        }
        let (of, part) = rest.split_once("-mig-").map_or((rest, false), |(of, _)| (of, true));
        let of = number(of)?;
        let gpu = indexes.get(&of).filter(|gpu| minors.get(&of) == Some(gpu))?;
        Some((gpu.clone(), part))
    }
}

/// Grant and use of one tenant on one GPU, side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Standing {
    GrantedAndUsed,
    GrantedIdle,
    /// Used, and this or another GPU was granted: slots are not ownership (C02).
    Mismatch,
    /// Used, and nothing was granted (C06).
    UsedWithoutGrant,
    /// Granted to a pod that is gone (C09).
    Stale,
    /// Held for others (C28).
    Reservation,
}

impl Standing {
    pub const ALL: &'static [Self] = &[
        Self::GrantedAndUsed,
        Self::GrantedIdle,
        Self::Mismatch,
        Self::UsedWithoutGrant,
        Self::Stale,
        Self::Reservation,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::GrantedAndUsed => "used",
            Self::GrantedIdle => "idle",
            Self::Mismatch => "allocation_mismatch",
            Self::UsedWithoutGrant => "none",
            Self::Stale => "stale",
            Self::Reservation => "reservation",
        }
    }

    /// Of one GPU. `used`: the bytes that process lists show, absent if they could not be read, so that an
    /// unreadable GPU is never idle (C14). `elsewhere`: whether the tenant has a grant on another GPU.
    pub fn of(granted: bool, used: Reading<u64>, elsewhere: bool) -> Reading<Option<Self>> {
        Ok(match (granted, used?) {
            (true, 0) => Some(Self::GrantedIdle),
            (true, _) => Some(Self::GrantedAndUsed),
            (false, 0) => None,
            (false, _) if elsewhere => Some(Self::Mismatch),
            (false, _) => Some(Self::UsedWithoutGrant),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Absence;

    const U: &str = "6a1b2c3d-0000-4444-8888-123456789abc";

    fn gpu() -> Physical {
        Physical::Gpu(GpuId::from_nvml(&format!("GPU-{U}")))
    }

    fn mig() -> Physical {
        Physical::Mig(GpuId::from_nvml(&format!("MIG-{U}")))
    }

    #[test]
    fn c04_every_plugins_device_id_is_read() {
        let id = |physical, gpu_instance, compute_instance, replica| DeviceId {
            physical,
            gpu_instance,
            compute_instance,
            replica,
        };
        for (text, expected) in [
            ("GPU-u", id(gpu(), None, None, None)),
            ("GPU-u::3", id(gpu(), None, None, Some(3))),
            ("GPU-u-1", id(gpu(), None, None, Some(1))),
            ("GPU-u-_-7", id(gpu(), None, None, Some(7))),
            ("nvidia0", id(Physical::Node(0), None, None, None)),
            ("nvidia12", id(Physical::Node(12), None, None, None)),
            ("nvidia0/vgpu2", id(Physical::Node(0), None, None, Some(2))),
            ("nvidia0/gi3", id(Physical::Node(0), Some(3), None, None)),
            ("nvidia0/gi3/vgpu1", id(Physical::Node(0), Some(3), None, Some(1))),
            ("MIG-u", id(mig(), None, None, None)),
            ("MIG-u::2", id(mig(), None, None, Some(2))),
            ("MIG-GPU-u/5/0", id(gpu(), Some(5), Some(0), None)),
            ("MIG-GPU-u/5/0::1", id(gpu(), Some(5), Some(0), Some(1))),
        ] {
            let text = text.replace("-u", &format!("-{U}"));
            assert_eq!(DeviceId::parse(&text), Ok(expected), "{text}");
        }
        let upper = format!("GPU-{}", U.to_uppercase());
        assert_eq!(DeviceId::parse(&upper).map(|id| id.physical), Ok(gpu()));
    }

    #[test]
    fn c04_junk_is_a_typed_error() {
        let full = |text: &str| text.replace("-u", &format!("-{U}"));
        assert_eq!(DeviceId::parse(""), Err(DeviceIdError::Empty));
        for text in ["0", "amd0", "GPU", "gpu-u", "MIG", "é", "mdev-1"] {
            assert!(matches!(DeviceId::parse(text), Err(DeviceIdError::Unknown(_))), "{text}");
        }
        for text in ["GPU-", "GPU-1", "MIG-x/1/2", "GPU-6a1b2c3d-0000-4444-8888-12345678éabc", "MIG-GPU-/1/0"]
        {
            assert!(matches!(DeviceId::parse(text), Err(DeviceIdError::Uuid(_))), "{text}");
        }
        for text in [
            "GPU-u::",
            "GPU-u::x",
            "GPU-u::-1",
            "GPU-u-",
            "GPU-ux",
            "GPU-u-1::2",
            "GPU-u-_-",
            "GPU-u-_-1::2",
            "GPU-u::99999999999",
            "MIG-GPU-u",
            "MIG-GPU-u/5",
            "MIG-GPU-u/5/",
            "MIG-GPU-u/a/0",
            "nvidia",
            "nvidiactl",
            "nvidia0/",
            "nvidia0/x",
            "nvidia0/vgpu",
            "nvidia0/vgpu1/gi3",
            "nvidia0/gi1/gi2",
            "nvidia-uvm",
        ] {
            let text = full(text);
            assert!(matches!(DeviceId::parse(&text), Err(DeviceIdError::Suffix(_))), "{text}");
        }
        let long = DeviceId::parse(&"x".repeat(1 << 20)).unwrap_err().to_string();
        assert!(long.len() < 300, "{}", long.len());
    }

    #[test]
    fn c05_any_nvidia_resource_and_the_configured_ones_count() {
        let also = ["example.com/card".to_owned()];
        let read = |name: &str| Resource::parse(name, &also);
        let mig = |shared| Some(Resource::Mig { profile: "1g.10gb".into(), shared });
        assert_eq!(read("nvidia.com/gpu"), Some(Resource::Gpu));
        assert_eq!(read("nvidia.com/gpu.shared"), Some(Resource::Shared));
        assert_eq!(read("nvidia.com/mig-1g.10gb"), mig(false));
        assert_eq!(read("nvidia.com/mig-1g.10gb.shared"), mig(true));
        assert_eq!(read("nvidia.com/a100"), Some(Resource::Gpu));
        assert_eq!(read("example.com/card"), Some(Resource::Gpu));
        assert_eq!(read("aliyun.com/gpu-mem"), Some(Resource::Memory));
        assert_eq!(read("example.com/foo"), None);
        assert_eq!(read("nvidia.com/"), None);
        assert_eq!(read("nvidia.community/gpu"), None);
    }

    fn grant(namespace: &str, uid: Option<&str>, ids: &[&str]) -> Grant {
        Grant {
            namespace: namespace.into(),
            pod: "p".into(),
            pod_uid: uid.map(str::to_owned),
            container: "c".into(),
            resource: "nvidia.com/gpu".into(),
            devices: ids
                .iter()
                .map(|id| GrantedDevice::Known(DeviceId::parse(&id.replace("-u", &format!("-{U}"))).unwrap()))
                .collect(),
        }
    }

    #[test]
    fn c02_two_slots_of_one_gpu_are_one_gpu() {
        let grant = grant("a", None, &["GPU-u::5", "GPU-u::19", "nvidia3"]);
        let gpus = grant.gpus(|minor| (minor == 3).then(|| GpuId::from_nvml("GPU-other")));
        assert_eq!(gpus.len(), 2);
        assert_eq!(grant.gpus(|_| None).len(), 1);
    }

    #[test]
    fn c09_a_grant_without_its_pod_is_stale_and_only_if_pods_could_be_listed() {
        let live = BTreeSet::from([U.to_owned()]);
        assert_eq!(grant("a", Some(U), &[]).state(Some(&live), false), GrantState::Held);
        assert_eq!(grant("a", Some("gone"), &[]).state(Some(&live), false), GrantState::Stale);
        assert_eq!(grant("a", Some("gone"), &[]).state(None, true), GrantState::Unknown);
        assert_eq!(grant("a", None, &[]).state(Some(&live), false), GrantState::Unknown);
        assert_eq!(grant("a", None, &[]).state(Some(&live), true), GrantState::Stale);
    }

    #[test]
    fn c28_a_reservation_is_its_namespace_and_nobody_can_name_itself_one() {
        let live = BTreeSet::from([U.to_owned()]);
        let of = |namespace| grant(namespace, Some(U), &["GPU-u"]).state(Some(&live), false);
        assert_eq!(of("kai-resource-reservation"), GrantState::Reservation);
        assert_eq!(of("team-a"), GrantState::Held);
        let named = Grant { pod: "gpu-reservation-x".into(), ..grant("team-a", Some(U), &[]) };
        assert!(!named.is_reservation());
    }

    #[test]
    fn c02_c06_c14_grant_beside_use() {
        assert_eq!(Standing::of(true, Ok(1), false), Ok(Some(Standing::GrantedAndUsed)));
        assert_eq!(Standing::of(true, Ok(0), false), Ok(Some(Standing::GrantedIdle)));
        assert_eq!(Standing::of(true, Err(Absence::Timeout), false), Err(Absence::Timeout));
        assert_eq!(Standing::of(false, Ok(1), true), Ok(Some(Standing::Mismatch)));
        assert_eq!(Standing::of(false, Ok(1), false), Ok(Some(Standing::UsedWithoutGrant)));
        assert_eq!(Standing::of(false, Ok(0), false), Ok(None));
    }
}
