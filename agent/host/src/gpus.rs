//! Owns which GPU is behind `/dev/nvidiaN` and at which address, as the driver's own files say.
//! Refuses indexes: NVML's order and CUDA's are not that of the device nodes.

use std::collections::BTreeMap;

use cotenant_model::{GpuId, xid::PciAddress};

use crate::{Host, read};

const GPUS: &str = "proc/driver/nvidia/gpus";
const MAX_GPUS: usize = 256;
const MAX_INFORMATION: u64 = 16 << 10;

impl Host {
    /// By the number of the device node; empty where the driver shows no such files.
    pub(crate) fn gpu_minors(&self) -> BTreeMap<u32, GpuId> {
        self.informed(|_, field| field("Device Minor")?.parse().ok())
    }

    /// By PCI address: a GPU that NVML does not list, for it fell off the bus, has its name here.
    pub fn gpu_addresses(&self) -> BTreeMap<PciAddress, GpuId> {
        self.informed(|address, _| PciAddress::parse(address))
    }

    fn informed<K: Ord>(
        &self,
        key: impl Fn(&str, &dyn Fn(&str) -> Option<String>) -> Option<K>,
    ) -> BTreeMap<K, GpuId> {
        let directory = self.path(GPUS);
        read::names_in(&directory, MAX_GPUS)
            .iter()
            .filter_map(|address| {
                let text = read::text(&directory.join(address).join("information"), MAX_INFORMATION).ok()?;
                let field = |name: &str| {
                    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
                    Some(value.trim().to_owned())
                };
                Some((key(address, &field)?, GpuId::from_nvml(&field("GPU UUID")?)))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c04_a_device_node_s_number_is_a_gpu_s_uuid() {
        let root = tempfile::tempdir().unwrap();
        for (address, minor, uuid) in [("0000:19:00.0", "1", "GPU-b"), ("0000:3b:00.0", "0", "GPU-a")] {
            let directory = root.path().join(GPUS).join(address);
            std::fs::create_dir_all(&directory).unwrap();
            // Driver 570, shortened.
            let text = format!(
                "Model: \t\t NVIDIA H200\nIRQ:   \t\t 183\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\nDevice Minor: \t {minor}\n\
                 GPU Excluded:\t No\n"
            );
            std::fs::write(directory.join("information"), text).unwrap();
        }
        std::fs::create_dir_all(root.path().join(GPUS).join("junk")).unwrap();
        let host = Host::at(root.path());
        let told: Vec<_> =
            host.gpu_minors().into_iter().map(|(minor, gpu)| (minor, gpu.to_string())).collect();
        assert_eq!(told, [(0, "GPU-a".to_owned()), (1, "GPU-b".to_owned())]);
        let bus = |bus| PciAddress { domain: 0, bus, device: 0 };
        let told: Vec<_> = host.gpu_addresses().into_iter().map(|(at, gpu)| (at, gpu.to_string())).collect();
        assert_eq!(told, [(bus(0x19), "GPU-b".to_owned()), (bus(0x3b), "GPU-a".to_owned())]);
    }
}
