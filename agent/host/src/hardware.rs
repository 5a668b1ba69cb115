//! Owns what the host shows of NVIDIA's hardware and driver without the driver's help: PCI, device nodes, versions.
//! Refuses NVML: what it counts is compared with this by the caller.

use crate::{Host, library::is_libcuda, read};

const LIMIT: u64 = 4096;
/// Devices of a bus, or names of a directory, that are looked at.
const MAX_ENTRIES: usize = 8192;
const NVIDIA: &str = "0x10de";
/// Display controllers: VGA (00), XGA (01), 3D (02). Their audio and USB functions have other classes.
const DISPLAY: &str = "0x03";

/// A display controller of NVIDIA on the PCI bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciGpu {
    /// `0000:65:00.0`.
    pub address: String,
    /// The kernel driver that holds it, if one does.
    pub driver: Option<String>,
    /// A virtual function: NVML lists its physical one.
    pub is_virtual: bool,
}

impl PciGpu {
    /// Whether NVML on this host should list it: not when it is given away whole (to a virtual machine), or a slice.
    pub fn is_expected(&self) -> bool {
        !self.is_virtual && !matches!(self.driver.as_deref(), Some("vfio-pci" | "pci-stub" | "xen-pciback"))
    }
}

/// What there is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hardware {
    pub gpus: Vec<PciGpu>,
    /// `/dev/nvidia0` and on.
    pub device_nodes: u32,
    /// Of the loaded kernel module, such as `580.159.04`.
    pub module_version: Option<String>,
    /// Of libcuda and NVML where distributions put them, by their file names.
    pub library_versions: Vec<String>,
}

impl Hardware {
    /// GPUs that NVML should list.
    pub fn expected(&self) -> u32 {
        let bus = self.gpus.iter().filter(|gpu| gpu.is_expected()).count();
        self.device_nodes.max(u32::try_from(bus).unwrap_or(u32::MAX))
    }
}

impl Host {
    pub fn hardware(&self) -> Hardware {
        Hardware {
            gpus: self.pci_gpus(),
            device_nodes: self.device_nodes(),
            module_version: self.module_version(),
            library_versions: self.library_versions(),
        }
    }

    /// GPUs that NVML should list here; a few hundred small files of sysfs at most.
    pub fn expected_gpus(&self) -> u32 {
        Hardware { gpus: self.pci_gpus(), device_nodes: self.device_nodes(), ..Hardware::default() }
            .expected()
    }

    fn pci_gpus(&self) -> Vec<PciGpu> {
        let bus = self.path("sys/bus/pci/devices");
        let mut gpus: Vec<PciGpu> = read::names_in(&bus, MAX_ENTRIES)
            .into_iter()
            .filter_map(|address| {
                let device = bus.join(&address);
                let is = |file: &str, wanted: &str| {
                    read::text(&device.join(file), LIMIT).is_ok_and(|text| text.starts_with(wanted))
                };
                if !is("vendor", NVIDIA) || !is("class", DISPLAY) {
                    return None;
                }
                let driver = std::fs::read_link(device.join("driver")).ok();
                let driver = driver.and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
                Some(PciGpu { is_virtual: device.join("physfn").exists(), address, driver })
            })
            .collect();
        gpus.sort_by(|left, right| left.address.cmp(&right.address));
        gpus
    }

    fn device_nodes(&self) -> u32 {
        let numbered = |name: &String| {
            name.strip_prefix("nvidia")
                .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let count =
            read::names_in(&self.path("dev"), MAX_ENTRIES).iter().filter(|name| numbered(name)).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// From the module itself, or from the first line of its report.
    fn module_version(&self) -> Option<String> {
        let own = read::text(&self.path("sys/module/nvidia/version"), LIMIT).ok();
        if let Some(version) = own.as_deref().and_then(version) {
            return Some(version);
        }
        let report = read::text(&self.path("proc/driver/nvidia/version"), LIMIT).ok()?;
        report.lines().next()?.split_whitespace().find_map(version)
    }

    fn library_versions(&self) -> Vec<String> {
        let mut versions: Vec<String> = crate::library::CONFIGURED
            .iter()
            .flat_map(|directory| read::names_in(&self.path(directory), MAX_ENTRIES))
            .filter(|name| is_libcuda(name) || name.starts_with("libnvidia-ml.so."))
            .filter_map(|name| version(name.split_once(".so.")?.1))
            .collect();
        versions.sort();
        versions.dedup();
        versions
    }
}

/// `580.159.04`: numbers with at least one dot between, as NVIDIA writes them. `1`, a library's ABI, is none.
fn version(text: &str) -> Option<String> {
    let text = text.trim();
    let parts: Vec<&str> = text.split('.').collect();
    let number =
        |part: &&str| !part.is_empty() && part.len() <= 6 && part.bytes().all(|byte| byte.is_ascii_digit());
    (parts.len() >= 2 && parts.len() <= 4 && parts.iter().all(number)).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::Path};

    use super::*;

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn gpu(root: &Path, address: &str, vendor: &str, class: &str, driver: Option<&str>) {
        let device = format!("sys/bus/pci/devices/{address}");
        put(root, &format!("{device}/vendor"), vendor);
        put(root, &format!("{device}/class"), class);
        if let Some(driver) = driver {
            symlink(format!("../../../bus/pci/drivers/{driver}"), root.join(device).join("driver")).unwrap();
        }
    }

    #[test]
    fn c79_gpus_are_nvidia_display_controllers_that_are_not_given_away() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        gpu(root, "0000:65:00.0", "0x10de\n", "0x030200\n", Some("nvidia"));
        gpu(root, "0000:17:00.0", "0x10de\n", "0x030000\n", None);
        gpu(root, "0000:17:00.1", "0x10de\n", "0x040300\n", Some("snd_hda_intel"));
        gpu(root, "0000:b1:00.0", "0x10de\n", "0x030200\n", Some("vfio-pci"));
        gpu(root, "0000:65:00.4", "0x10de\n", "0x030200\n", Some("nvidia"));
        put(root, "sys/bus/pci/devices/0000:65:00.4/physfn/vendor", "0x10de\n");
        gpu(root, "0000:00:02.0", "0x8086\n", "0x030000\n", Some("i915"));
        let hardware = Host::at(root).hardware();
        let addresses: Vec<&str> = hardware.gpus.iter().map(|gpu| gpu.address.as_str()).collect();
        assert_eq!(addresses, ["0000:17:00.0", "0000:65:00.0", "0000:65:00.4", "0000:b1:00.0"]);
        assert_eq!((hardware.expected(), Host::at(root).expected_gpus()), (2, 2));
    }

    #[test]
    fn device_nodes_count_where_there_is_no_bus() {
        let root = tempfile::tempdir().unwrap();
        for name in ["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps", "nvidia"] {
            put(root.path(), &format!("dev/{name}"), "");
        }
        assert_eq!(Host::at(root.path()).expected_gpus(), 3);
        assert_eq!(Host::at(root.path().join("none")).hardware(), Hardware::default());
    }

    #[test]
    fn versions_are_those_of_the_module_and_of_files() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        put(
            root,
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs@buildbot)\n\
             GCC version:  gcc version 12.2.0\n",
        );
        put(root, "usr/lib/x86_64-linux-gnu/libcuda.so.1", "");
        put(root, "usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05", "");
        put(root, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05", "");
        put(root, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "");
        let host = Host::at(root);
        assert_eq!(host.hardware().module_version.as_deref(), Some("580.159.04"));
        assert_eq!(host.hardware().library_versions, ["580.95.05"]);
        put(root, "sys/module/nvidia/version", "570.1.2\n");
        assert_eq!(host.hardware().module_version.as_deref(), Some("570.1.2"));
    }
}
