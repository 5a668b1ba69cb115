//! Owns which GPU is behind `/dev/nvidiaN`, as the driver's own files say.
//! Refuses indexes: NVML's order and CUDA's are not that of the device nodes.

use std::collections::BTreeMap;

use cotenant_model::GpuId;

use crate::{Host, read};

const GPUS: &str = "proc/driver/nvidia/gpus";
const MAX_GPUS: usize = 256;
const MAX_INFORMATION: u64 = 16 << 10;

impl Host {
    /// By the number of the device node; empty where the driver shows no such files.
    pub(crate) fn gpu_minors(&self) -> BTreeMap<u32, GpuId> {
        let directory = self.path(GPUS);
        read::names_in(&directory, MAX_GPUS)
            .iter()
            .filter_map(|address| {
                let text = read::text(&directory.join(address).join("information"), MAX_INFORMATION).ok()?;
                let field = |name: &str| {
                    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
                    Some(value.trim().to_owned())
                };
                Some((field("Device Minor")?.parse().ok()?, GpuId::from_nvml(&field("GPU UUID")?)))
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
        let minors = Host::at(root.path()).gpu_minors();
        assert_eq!(
            minors.into_iter().map(|(minor, gpu)| (minor, gpu.to_string())).collect::<Vec<_>>(),
            [(0, "GPU-a".to_owned()), (1, "GPU-b".to_owned())]
        );
    }
}
