//! Owns what the driver, NVML and the probed libraries are to the agent, as features.
//! Refuses to ask them: what they said comes in.

use std::path::Path;

use cotenant_device::Condition;
use cotenant_host::{Hardware, Host};
use cotenant_model::{
    Absence,
    device::{DeviceSample, LibraryFacts, Reading},
    sample::LibraryState,
    view::{Feature, FeatureState},
};

use super::{active, feature, remedied};
use crate::config::simulated;

/// NVML, which is not asked where `condition` is `None`.
pub(crate) fn nvml(library: &Reading<LibraryFacts>, condition: Option<&Condition>) -> Feature {
    let Some(condition) = condition else {
        return feature("nvml", FeatureState::Disabled, "nvml.enabled = false".into());
    };
    let reason = match library {
        Ok(facts) => return active("nvml", format!("driver {}", facts.driver_version)),
        Err(reason) => *reason,
    };
    let (seen, remedy) = match reason {
        Absence::LibraryMissing => (
            "libnvidia-ml.so.1 was not found",
            "install the driver, or set nvml.library to its path (ldconfig -p | grep libnvidia-ml)",
        ),
        Absence::VersionMismatch => (
            "library and kernel module differ",
            "reload the module or reboot: cat /proc/driver/nvidia/version; ls /usr/lib*/*/libnvidia-ml.so.*",
        ),
        Absence::Timeout => {
            ("a call has not come back: the driver is stuck", "dmesg | grep -i -e NVRM -e Xid")
        }
        Absence::NoPermission => {
            ("no permission", "run as root with access to /dev/nvidia* (ls -l /dev/nvidia*)")
        }
        Absence::NotYet => ("not asked yet", ""),
        Absence::Released => ("handles are dropped on request", ""),
        _ => ("NVML does not answer", "nvidia-smi; dmesg | grep -i NVRM"),
    };
    let state = match condition {
        Condition::Starting => FeatureState::Degraded,
        Condition::Released => FeatureState::Disabled,
        _ if reason == Absence::LibraryMissing => FeatureState::Unsupported,
        _ => FeatureState::Broken,
    };
    remedied(feature("nvml", state, format!("{}: {seen}", reason.as_str())), remedy)
}

/// GPUs that the host shows beside those that NVML lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Visible {
    /// `None` where the host's bus is not the one of the GPUs: a simulated node's.
    pub(crate) expected: Option<u32>,
}

impl Visible {
    pub(crate) fn on(host: &Host) -> Self {
        // A simulated node has no bus, unless a test brings one.
        let simulated = simulated() && host.root() == Path::new("/");
        Self { expected: (!simulated).then(|| host.expected_gpus()) }
    }
}

/// The feature, and how many GPUs are missing where that is known (C79).
pub(crate) fn visibility(
    Visible { expected }: Visible,
    device: &DeviceSample,
    condition: Option<&Condition>,
) -> (Feature, Option<u64>) {
    let name = "gpu_visibility";
    let Some(expected) = expected else {
        return (active(name, "a simulated node's GPUs are on no bus"), None);
    };
    match condition {
        None => return (feature(name, FeatureState::Disabled, "nvml.enabled = false".into()), None),
        Some(Condition::Released) => {
            return (feature(name, FeatureState::Disabled, "handles are dropped on request".into()), None);
        }
        Some(_) if expected == 0 => return (active(name, "this host shows no NVIDIA GPU"), Some(0)),
        Some(_) if device.library == Err(Absence::NotYet) => {
            return (feature(name, FeatureState::Degraded, "NVML has not been asked yet".into()), None);
        }
        Some(_) => {}
    }
    let whole = device.gpus.iter().filter(|gpu| gpu.parent.is_none()).count();
    let listed = u32::try_from(whole).unwrap_or(u32::MAX);
    let missing = expected.saturating_sub(listed);
    if missing == 0 {
        return (active(name, format!("{listed} of {expected}")), Some(0));
    }
    let why =
        device.library.as_ref().err().map_or_else(String::new, |reason| format!(" ({})", reason.as_str()));
    let seen = format!("this host shows {expected} NVIDIA GPUs, NVML lists {listed}{why}");
    (feature(name, FeatureState::Broken, seen), Some(u64::from(missing)))
}

/// Kernel module and libraries by their files, before anybody asks NVML.
pub(crate) fn driver(hardware: &Hardware) -> Feature {
    let name = "driver_version";
    let Hardware { module_version, library_versions, .. } = hardware;
    match module_version {
        None if hardware.expected() == 0 => active(name, "no NVIDIA GPU and no driver here"),
        None => remedied(
            feature(
                name,
                FeatureState::Broken,
                format!("{} NVIDIA GPUs, and no driver is loaded", hardware.expected()),
            ),
            "modprobe nvidia; dmesg | grep -i -e NVRM -e nouveau",
        ),
        Some(version) if library_versions.is_empty() || library_versions.contains(version) => {
            active(name, version.clone())
        }
        Some(version) => feature(
            name,
            FeatureState::Broken,
            format!("the kernel module is {version}, the libraries are {}", library_versions.join(", ")),
        ),
    }
}

/// The libcuda files under observation.
pub(crate) fn libraries(libraries: &[LibraryState]) -> Feature {
    let name = "libraries";
    let whole =
        |library: &&LibraryState| library.refused.is_none() && library.attached > 0 && library.failed == 0;
    let probed = libraries.iter().filter(whole).count();
    if probed == libraries.len() {
        let seen = match probed {
            0 => "no process has mapped a libcuda, and none is where drivers put it".to_owned(),
            count => format!("{count} probed"),
        };
        return active(name, seen);
    }
    let worst = libraries.iter().find(|library| !whole(library));
    let why = worst.map_or_else(String::new, |library| {
        let reason = library.refused.clone();
        let reason = reason.unwrap_or_else(|| format!("{} symbols could not be probed", library.failed));
        format!("; {}: {reason}", library.path)
    });
    let state = if probed == 0 { FeatureState::Broken } else { FeatureState::Degraded };
    feature(name, state, format!("{probed} of {} probed{why}", libraries.len()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn sample(library: Reading<LibraryFacts>) -> DeviceSample {
        DeviceSample { library, ..DeviceSample::absent(Duration::ZERO, Absence::NotYet) }
    }

    #[allow(clippy::unnecessary_wraps, reason = "as a sample has it")]
    fn answering() -> Reading<LibraryFacts> {
        Ok(LibraryFacts { driver_version: "580.1".into(), nvml_version: "13".into() })
    }

    #[test]
    fn c79_gpus_that_nvml_does_not_list_make_a_node_not_ready() {
        let see = |expected, library| {
            visibility(Visible { expected: Some(expected) }, &sample(library), Some(&Condition::Answering))
        };
        let (feature, missing) = see(2, answering());
        assert_eq!((feature.state, missing), (FeatureState::Broken, Some(2)));
        assert_eq!(feature.reason, "this host shows 2 NVIDIA GPUs, NVML lists 0");
        assert!(!super::super::ready(&[feature]));
        let (feature, missing) = see(1, Err(Absence::LibraryMissing));
        assert_eq!(missing, Some(1));
        assert!(feature.reason.ends_with("(library_missing)"), "{}", feature.reason);
        assert_eq!(see(0, Err(Absence::LibraryMissing)).1, Some(0));
    }

    #[test]
    fn c79_what_is_not_known_yet_is_no_mismatch() {
        let starting = Some(&Condition::Starting);
        let (feature, missing) =
            visibility(Visible { expected: Some(1) }, &sample(Err(Absence::NotYet)), starting);
        assert_eq!((feature.state, missing), (FeatureState::Degraded, None));
        for (expected, condition) in
            [(None, Some(&Condition::Answering)), (Some(1), None), (Some(1), Some(&Condition::Released))]
        {
            let (feature, missing) = visibility(Visible { expected }, &sample(answering()), condition);
            assert!(!super::super::bad(feature.state) && missing.is_none());
        }
    }

    #[test]
    fn a_driver_that_is_not_its_libraries_is_broken() {
        let of = |module: Option<&str>, libraries: &[&str], device_nodes| {
            driver(&Hardware {
                module_version: module.map(str::to_owned),
                library_versions: libraries.iter().map(|version| (*version).to_owned()).collect(),
                device_nodes,
                ..Hardware::default()
            })
        };
        assert_eq!(of(None, &[], 0).state, FeatureState::Active);
        assert_eq!(of(None, &[], 1).state, FeatureState::Broken);
        assert_eq!(of(Some("580.1.1"), &[], 1).state, FeatureState::Active);
        assert_eq!(of(Some("580.1.1"), &["570.0.1", "580.1.1"], 1).state, FeatureState::Active);
        let wrong = of(Some("580.1.1"), &["570.0.1"], 1);
        assert_eq!(wrong.state, FeatureState::Broken);
        assert!(wrong.reason.contains("580.1.1") && wrong.reason.contains("570.0.1"));
    }

    #[test]
    fn c53_nothing_to_probe_is_a_state_to_wait_in() {
        assert_eq!(libraries(&[]).state, FeatureState::Active);
        let library = |attached, failed, refused: Option<&str>| LibraryState {
            path: "/usr/lib/libcuda.so.1".into(),
            device: 1,
            inode: 2,
            attached,
            missing: 0,
            failed,
            processes: 1,
            pids: Vec::new(),
            shed: false,
            refused: refused.map(str::to_owned),
        };
        assert_eq!(libraries(&[library(40, 0, None)]).state, FeatureState::Active);
        assert_eq!(libraries(&[library(40, 0, None), library(40, 2, None)]).state, FeatureState::Degraded);
        let refused = libraries(&[library(0, 0, Some("no symbols"))]);
        assert_eq!(refused.state, FeatureState::Broken);
        assert!(refused.reason.contains("no symbols"));
    }

    #[test]
    fn nvml_says_why_it_does_not_answer() {
        let of = |reason, condition| nvml(&Err(reason), Some(&condition));
        let missing = of(Absence::LibraryMissing, Condition::Degraded(Absence::LibraryMissing));
        assert_eq!(missing.state, FeatureState::Unsupported);
        let differ = of(Absence::VersionMismatch, Condition::Degraded(Absence::VersionMismatch));
        assert_eq!(differ.state, FeatureState::Broken);
        assert!(differ.reason.starts_with("version_mismatch") && differ.remedy.contains("reload"));
        assert_eq!(of(Absence::NotYet, Condition::Starting).state, FeatureState::Degraded);
        assert_eq!(of(Absence::Released, Condition::Released).state, FeatureState::Disabled);
        assert_eq!(nvml(&answering(), None).state, FeatureState::Disabled);
    }
}
