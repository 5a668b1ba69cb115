//! Owns the faults a test wants, as written in the node's `nvml.json`; read anew whenever that file changes.
//! Refuses a file it does not understand: every call then returns UNKNOWN and stderr says why.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use serde::Deserialize;

use crate::{Code, Outcome, UNKNOWN, write};

/// A file being written is given this long to become whole.
const PATIENCE: Duration = Duration::from_millis(20);
const TRIES: u32 = 5;

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Faults {
    /// By exact function name.
    calls: BTreeMap<String, CallFault>,
    pub(crate) lost: BTreeSet<usize>,
    /// For `nvmlInit*`.
    pub(crate) version_mismatch: bool,
    /// For `nvmlInit*` and everything asked of a device.
    pub(crate) no_permission: bool,
    /// PIDs whose bytes are unknown.
    pub(crate) not_available: BTreeSet<u32>,
    /// Bytes in use that no process has, by GPU.
    pub(crate) extra_unattributed: BTreeMap<usize, u64>,
    /// Bytes of a row under the `_v3` symbols.
    stride: Option<Stride>,
    /// Every list is once too long for the room that was made for it.
    grow: bool,
    pub(crate) rows: Vec<ExtraRow>,
    /// By GPU; one that is here has MIG enabled.
    pub(crate) mig: BTreeMap<usize, Mig>,
    /// `nvmlComputeMode_t` by GPU; 0 when left out.
    pub(crate) compute_mode: BTreeMap<usize, u32>,
    /// Faults that event sets tell, oldest first: each set tells those that were added since it was made.
    pub(crate) xids: Vec<Xid>,
    /// How busy processes are, by PID; idle when left out.
    busy: BTreeMap<u32, Busy>,
    #[serde(skip)]
    grown: Mutex<BTreeSet<(&'static str, usize)>>,
}

/// Percent of the multiprocessors and of the memory's time.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Busy {
    pub(crate) sm: u32,
    pub(crate) memory: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Xid {
    pub(crate) gpu: usize,
    pub(crate) code: u32,
    /// The GPU instance it is about.
    #[serde(default)]
    pub(crate) gi: Option<u32>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct CallFault {
    #[serde(rename = "return")]
    code: Option<Code>,
    /// Before returning, with the fault's code or the true answer.
    hang_ms: u64,
    /// What the call takes, in the driver's queue: everybody else's calls wait for it.
    holds_us: u64,
    /// Only on this GPU.
    gpu: Option<usize>,
    /// Only on whole GPUs, or only on MIG devices.
    on: Option<Scope>,
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Scope {
    Gpu,
    Mig,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "u32")]
#[cfg_attr(feature = "old", allow(dead_code, reason = "checked, but there is no `_v3` list"))]
struct Stride(usize);

impl TryFrom<u32> for Stride {
    type Error = String;

    fn try_from(bytes: u32) -> Result<Self, String> {
        match bytes {
            16 | 24 | 32 => Ok(Self(bytes as usize / size_of::<u64>())),
            _ => Err(format!("no NVML ever wrote rows of {bytes} bytes")),
        }
    }
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum List {
    Compute,
    Graphics,
    Mps,
}

/// A row that the node's state does not have. In the compute list it takes the place of the PID's own.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExtraRow {
    pub(crate) gpu: usize,
    pub(crate) pid: u32,
    pub(crate) bytes: Option<u64>,
    pub(crate) list: List,
    /// The MIG device it is on.
    #[serde(default)]
    pub(crate) slot: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Mig {
    pub(crate) max: u32,
    pub(crate) slots: BTreeMap<u32, MigSlot>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MigSlot {
    pub(crate) uuid: String,
    /// All that the MIG device has.
    pub(crate) bytes: u64,
    #[serde(default)]
    pub(crate) used: u64,
    pub(crate) gi: u32,
    pub(crate) ci: u32,
}

impl Faults {
    /// Hangs and fails as the file says. `at` is the GPU that is asked, and as what.
    pub(crate) fn strike(
        &self,
        function: &str,
        at: Option<(usize, Scope)>,
        hold: impl FnOnce(Duration),
    ) -> Outcome {
        let Some(fault) = self.calls.get(function) else { return Ok(()) };
        let elsewhere = fault.gpu.is_some_and(|gpu| at.is_none_or(|at| at.0 != gpu))
            || fault.on.is_some_and(|scope| at.is_none_or(|at| at.1 != scope));
        if elsewhere {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(fault.hang_ms));
        if fault.holds_us > 0 {
            hold(Duration::from_micros(fault.holds_us));
        }
        match fault.code {
            None | Some(0) => Ok(()),
            Some(code) => Err(code),
        }
    }

    pub(crate) fn busy(&self, pid: u32) -> Busy {
        self.busy.get(&pid).copied().unwrap_or_default()
    }

    /// Words of a row under the `_v3` symbols.
    #[cfg(not(feature = "old"))]
    pub(crate) fn v3_words(&self) -> usize {
        self.stride.map_or(3, |stride| stride.0)
    }

    /// Whether the list has just outgrown its `room`. A question for the size makes it grow again.
    pub(crate) fn outgrows(&self, function: &'static str, gpu: usize, room: u32) -> bool {
        let mut grown = self.grown.lock().unwrap_or_else(PoisonError::into_inner);
        if room == 0 {
            grown.remove(&(function, gpu));
            return false;
        }
        self.grow && grown.insert((function, gpu))
    }
}

/// Which writing of the file this is.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(data: &Metadata) -> Self {
        Self { inode: data.ino(), len: data.len(), modified: (data.mtime(), data.mtime_nsec()) }
    }
}

pub(crate) struct FaultFile {
    path: PathBuf,
    known: Mutex<(Option<Stamp>, Arc<Faults>)>,
}

impl FaultFile {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, known: Mutex::default() }
    }

    pub(crate) fn now(&self) -> Outcome<Arc<Faults>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut reason = String::new();
        for _ in 0..TRIES {
            let stamp = std::fs::metadata(&self.path).ok().as_ref().map(Stamp::of);
            if known.0 == stamp {
                return Ok(Arc::clone(&known.1));
            }
            match self.read() {
                Ok(faults) => {
                    *known = (stamp, Arc::new(faults));
                    return Ok(Arc::clone(&known.1));
                }
                Err(error) => reason = error.to_string(),
            }
            thread::sleep(PATIENCE);
        }
        write::warn(&format!("{}: {reason}", self.path.display()));
        Err(UNKNOWN)
    }

    fn read(&self) -> io::Result<Faults> {
        match std::fs::read(&self.path) {
            Ok(text) => Ok(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Faults::default()),
            Err(error) => Err(error),
        }
    }
}
