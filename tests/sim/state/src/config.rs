//! Owns what a simulated node is made of, as written in `node.json` of its directory.
//! Refuses a node that could be taken for real: a device name always says SIMULATED.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Names the node's directory. Without it both libraries refuse to initialise.
pub const ENV_NODE: &str = "COTENANT_SIM_NODE";
pub const MAX_GPUS: usize = 16;

/// 16 bytes as the driver passes them; shown as NVML does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// The same for every node, so that tests can name a GPU before they start one.
    pub const fn of_index(index: u8) -> Self {
        Self([0xc0, 0x7e, 0x4a, 0x47, 0x51, 0x3d, 0x40, 0x00, 0x80, 0x00, 0, 0, 0, 0, 0, index])
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("GPU-")?;
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                out.write_str("-")?;
            }
            write!(out, "{byte:02x}")?;
        }
        Ok(())
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuConfig {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
    pub capacity: u64,
    /// Taken by the driver for itself before any process comes.
    #[serde(default = "default_reserved")]
    pub reserved: u64,
    /// Taken by a process with its first context on this GPU.
    #[serde(default = "default_context")]
    pub context_bytes: u64,
    #[serde(default = "default_name")]
    pub name: String,
}

/// As measured on H200: NVML v1 `used` of an idle card.
const fn default_reserved() -> u64 {
    645 << 20
}

const fn default_context() -> u64 {
    512 << 20
}

fn default_name() -> String {
    "SIMULATED H200".to_owned()
}

impl GpuConfig {
    pub fn new(capacity: u64) -> Self {
        Self {
            uuid: None,
            capacity,
            reserved: default_reserved(),
            context_bytes: default_context(),
            name: default_name(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeConfig {
    pub gpus: Vec<GpuConfig>,
    /// 1 gives the latencies of facts.md §3, 0 gives none.
    #[serde(default = "default_scale")]
    pub cost_scale: f64,
    #[serde(default = "default_version")]
    pub driver_version: String,
}

const fn default_scale() -> f64 {
    1.0
}

fn default_version() -> String {
    "580.159.04".to_owned()
}

impl NodeConfig {
    pub fn new(gpus: usize, capacity: u64) -> Self {
        Self {
            gpus: vec![GpuConfig::new(capacity); gpus],
            cost_scale: default_scale(),
            driver_version: default_version(),
        }
    }

    /// Fills in what was left out. `Err` says what cannot be.
    pub(crate) fn complete(mut self) -> Result<Self, String> {
        if self.gpus.len() > MAX_GPUS {
            return Err(format!("{} GPUs; at most {MAX_GPUS}", self.gpus.len()));
        }
        for (index, gpu) in (0..).zip(&mut self.gpus) {
            gpu.uuid.get_or_insert(Uuid::of_index(index));
            if !gpu.name.contains("SIMULATED") {
                gpu.name = format!("SIMULATED {}", gpu.name);
            }
            if gpu.reserved > gpu.capacity {
                return Err(format!("GPU {index} reserves more than it has"));
            }
        }
        Ok(self)
    }

    pub fn uuid(&self, gpu: usize) -> Uuid {
        self.gpus[gpu].uuid.unwrap_or(Uuid::of_index(u8::try_from(gpu).unwrap_or(u8::MAX)))
    }
}
