//! Owns a node of made-up GPUs behind the `Nvml` trait, whose faults and hangs a test switches on and off.
//! Refuses to be clever: it answers from a table.

#![allow(
    clippy::unwrap_used,
    dead_code,
    unreachable_pub,
    reason = "test support, shared by several test files"
)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use cotenant_device::nvml::{
    Alarm, Alarms, Answer, Bell, Fault, Figure, Handle, List, ListVersion, MemoryRow, MemoryVersion, Nvml,
    Opener, RawRows, Text, UtilizationRow,
};
use cotenant_device::{Device, Health, NvmlConfig, ProcessCheck};
use cotenant_model::device::{CallCost, ComputeMode, LibraryFacts};
use cotenant_model::{DeviceSample, GpuSample};

pub const GIB: u64 = 1 << 30;
pub const INTERVAL: Duration = Duration::from_millis(20);
pub const DEADLINE: Duration = Duration::from_millis(60);

#[derive(Clone, Debug, Default)]
pub struct FakeGpu {
    pub uuid: String,
    pub compute: Vec<(u32, u64)>,
    pub mps: Vec<(u32, u64)>,
    /// MIG slots; the last flag says whose: false is a stale handle of another parent.
    pub slots: Vec<Option<(String, bool)>>,
}

#[derive(Debug, Default)]
pub struct State {
    pub gpus: Vec<FakeGpu>,
    pub open_fault: Option<Fault>,
    /// Function → what it answers instead, on the GPU with this index or on all.
    pub faults: Vec<(&'static str, Option<usize>, Fault)>,
    /// The function that does not come back.
    pub hang: Option<&'static str>,
    /// How long every call takes.
    pub slow: Duration,
    /// How long calls of these functions take beyond that.
    pub dear: Vec<(&'static str, Duration)>,
    pub newest_list: Option<ListVersion>,
    pub utilization: Vec<UtilizationRow>,
    pub used: u64,
    pub alarms: Vec<Alarm>,
}

#[derive(Clone, Debug)]
pub struct Node {
    state: Arc<(Mutex<State>, Condvar)>,
    pub opened: Arc<AtomicU64>,
    pub closed: Arc<AtomicU64>,
    /// Event sets that are open.
    pub bells: Arc<AtomicU64>,
}

impl Node {
    pub fn with(gpus: usize) -> Self {
        let gpus = (0..gpus).map(|index| FakeGpu { uuid: format!("GPU-{index}"), ..FakeGpu::default() });
        let state = State { gpus: gpus.collect(), used: 6 * GIB, ..State::default() };
        Self {
            state: Arc::new((Mutex::new(state), Condvar::new())),
            opened: Arc::default(),
            closed: Arc::default(),
            bells: Arc::default(),
        }
    }

    pub fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.state.1.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.0.lock().unwrap()
    }

    /// A call: hangs, takes its time, or fails, as told.
    fn call(&self, function: &'static str, gpu: Option<usize>) -> Answer<MutexGuard<'_, State>> {
        let mut state = self.lock();
        while state.hang == Some(function) {
            state = self.state.1.wait(state).unwrap();
        }
        let dear = state.dear.iter().filter(|(name, _)| *name == function).map(|(_, takes)| *takes);
        let slow = state.slow + dear.sum::<Duration>();
        if !slow.is_zero() {
            drop(state);
            thread::sleep(slow);
            state = self.lock();
        }
        let hit = |(name, on, fault): &(&str, Option<usize>, Fault)| {
            (*name == function && (on.is_none() || *on == gpu)).then(|| fault.clone())
        };
        match state.faults.iter().find_map(hit) {
            Some(fault) => Err(fault),
            None => Ok(state),
        }
    }

    pub fn opener(&self) -> Opener {
        let node = self.clone();
        Box::new(move || {
            let state = node.call("nvmlInit_v2", None)?;
            if let Some(fault) = state.open_fault.clone() {
                return Err(fault);
            }
            node.opened.fetch_add(1, Ordering::SeqCst);
            Ok(Box::new(Fake(node.clone())) as Box<dyn Nvml>)
        })
    }

    pub fn bell(&self) -> Bell {
        let node = self.clone();
        Box::new(move || {
            drop(node.call("nvmlEventSetCreate", None)?);
            node.bells.fetch_add(1, Ordering::SeqCst);
            Ok(Box::new(FakeSet(node.clone())) as Box<dyn Alarms>)
        })
    }

    pub fn start(&self) -> Device {
        self.start_with(|_| {})
    }

    pub fn start_with(&self, change: impl FnOnce(&mut NvmlConfig)) -> Device {
        let mut config = NvmlConfig {
            test_interval: Some(INTERVAL),
            deadline: DEADLINE,
            processes: ProcessCheck {
                exists: Arc::new(|pid| pid < 1000),
                command: Arc::new(|pid| Some(if pid == 19 { "nvidia-cuda-mps" } else { "python" }.into())),
            },
            ..NvmlConfig::default()
        };
        change(&mut config);
        Device::spawn_with(config, Instant::now(), self.opener(), self.bell()).unwrap()
    }
}

/// Waits until the sample is as wanted, and fails with the last one if it never is.
pub fn until(device: &Device, wanted: impl Fn(&DeviceSample) -> bool) -> Arc<DeviceSample> {
    let give_up = Instant::now() + Duration::from_secs(10);
    loop {
        let sample = device.latest();
        if wanted(&sample) {
            return sample;
        }
        assert!(Instant::now() < give_up, "never came: {sample:#?}");
        thread::sleep(Duration::from_millis(2));
    }
}

pub fn until_health(device: &Device, wanted: impl Fn(&Health) -> bool) -> Arc<Health> {
    let give_up = Instant::now() + Duration::from_secs(10);
    loop {
        let health = device.health();
        if wanted(&health) {
            return health;
        }
        assert!(Instant::now() < give_up, "never came: {health:#?}");
        thread::sleep(Duration::from_millis(2));
    }
}

pub fn complete(sample: &DeviceSample) -> bool {
    sample.library.is_ok()
}

pub fn gpu<'a>(sample: &'a DeviceSample, id: &str) -> &'a GpuSample {
    sample.gpus.iter().find(|gpu| gpu.id.as_str() == id).unwrap_or_else(|| panic!("no {id}: {sample:#?}"))
}

pub fn cost(sample: &DeviceSample, function: &str) -> CallCost {
    sample.calls.iter().find(|cost| cost.function == function).cloned().unwrap()
}

struct FakeSet(Node);

impl Drop for FakeSet {
    fn drop(&mut self) {
        self.0.bells.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Alarms for FakeSet {
    fn watched(&self) -> usize {
        self.0.lock().gpus.len()
    }

    fn wait(&mut self, at_most: Duration) -> Answer<Option<Alarm>> {
        let mut state = self.0.call("nvmlEventSetWait_v2", None)?;
        if state.alarms.is_empty() {
            state = self.0.state.1.wait_timeout(state, at_most).unwrap().0;
        }
        Ok(if state.alarms.is_empty() { None } else { Some(state.alarms.remove(0)) })
    }
}

struct Fake(Node);

impl Drop for Fake {
    fn drop(&mut self) {
        drop(self.0.call("nvmlShutdown", None));
        self.0.closed.fetch_add(1, Ordering::SeqCst);
    }
}

/// Handles: GPU index, or (index, slot) from 1000 on.
fn index(handle: Handle) -> (usize, Option<usize>) {
    match handle.0.checked_sub(1000) {
        Some(rest) => (rest / 100, Some(rest % 100)),
        None => (handle.0, None),
    }
}

impl Nvml for Fake {
    fn facts(&self) -> Answer<LibraryFacts> {
        drop(self.0.call("nvmlSystemGetDriverVersion", None)?);
        Ok(LibraryFacts { driver_version: "580.65.06".into(), nvml_version: "13.580".into() })
    }

    fn count(&self) -> Answer<u32> {
        let state = self.0.call("nvmlDeviceGetCount_v2", None)?;
        Ok(u32::try_from(state.gpus.len()).unwrap())
    }

    fn device(&self, index: u32) -> Answer<Handle> {
        drop(self.0.call("nvmlDeviceGetHandleByIndex_v2", Some(index as usize))?);
        Ok(Handle(index as usize))
    }

    fn text(&self, device: Handle, text: Text) -> Answer<String> {
        let (gpu, slot) = index(device);
        let state = self.0.call(text.function(), Some(gpu))?;
        let slot_uuid =
            slot.map(|slot| state.gpus[gpu].slots[slot].clone().map(|(uuid, _)| uuid).unwrap_or_default());
        Ok(match text {
            Text::Uuid => slot_uuid.unwrap_or_else(|| state.gpus[gpu].uuid.clone()),
            Text::Name => "NVIDIA Fake".into(),
            Text::Pci => format!("00000000:0{gpu}:00.0"),
        })
    }

    fn memory(&self, device: Handle, version: MemoryVersion) -> Answer<MemoryRow> {
        let (gpu, slot) = index(device);
        let function = if slot.is_some() { "instance memory" } else { version.function() };
        let used = self.0.call(function, Some(gpu))?.used;
        let reserved = (version == MemoryVersion::V2).then_some(GIB / 2);
        Ok(MemoryRow { total: 16 * GIB, used, free: 16 * GIB - used, reserved })
    }

    fn processes(&self, device: Handle, list: List, version: ListVersion) -> Answer<RawRows> {
        let (gpu, _) = index(device);
        let state = self.0.call(version.function(list), Some(gpu))?;
        let newest = state.newest_list.unwrap_or(ListVersion::V3);
        let age = |version| ListVersion::ALL.iter().position(|known| *known == version);
        if age(version) < age(newest) {
            return Err(Fault::SymbolMissing);
        }
        let rows = match list {
            List::Compute => &state.gpus[gpu].compute,
            List::Mps => &state.gpus[gpu].mps,
            List::Graphics => return Err(Fault::NotSupported),
        };
        let stride = if version == ListVersion::Unversioned { 2 } else { 3 };
        let mut words = vec![];
        for (pid, bytes) in rows {
            words.extend([u64::from(*pid), *bytes]);
            words.resize(words.len() + stride - 2, u64::MAX);
        }
        words.resize(words.len() + 64, 0);
        Ok(RawRows { count: rows.len(), words })
    }

    fn process_utilization(&self, device: Handle, since: u64) -> Answer<Vec<UtilizationRow>> {
        let state = self.0.call("nvmlDeviceGetProcessUtilization", Some(index(device).0))?;
        Ok(state.utilization.iter().filter(|row| row.timestamp > since).copied().collect())
    }

    fn utilization(&self, device: Handle) -> Answer<(u32, u32)> {
        drop(self.0.call("nvmlDeviceGetUtilizationRates", Some(index(device).0))?);
        Ok((50, 0))
    }

    fn figure(&self, device: Handle, figure: Figure) -> Answer<u64> {
        drop(self.0.call(figure.function(), Some(index(device).0))?);
        Ok(match figure {
            Figure::PowerMilliwatts => 250_000,
            Figure::TemperatureCelsius => u64::from(u32::MAX),
            Figure::EnergyMillijoules => u64::MAX,
            _ => 7,
        })
    }

    fn compute_mode(&self, device: Handle) -> Answer<ComputeMode> {
        drop(self.0.call("nvmlDeviceGetComputeMode", Some(index(device).0))?);
        Ok(ComputeMode::Default)
    }

    fn mig_enabled(&self, device: Handle) -> Answer<bool> {
        let (gpu, _) = index(device);
        let state = self.0.call("nvmlDeviceGetMigMode", Some(gpu))?;
        if state.gpus[gpu].slots.is_empty() { Err(Fault::NotSupported) } else { Ok(true) }
    }

    fn mig_slots(&self, device: Handle) -> Answer<u32> {
        let state = self.0.call("nvmlDeviceGetMaxMigDeviceCount", None)?;
        Ok(u32::try_from(state.gpus[index(device).0].slots.len()).unwrap())
    }

    fn mig_device(&self, device: Handle, slot: u32) -> Answer<Handle> {
        let (gpu, _) = index(device);
        let state = self.0.call("nvmlDeviceGetMigDeviceHandleByIndex", Some(gpu))?;
        match state.gpus[gpu].slots[slot as usize] {
            Some(_) => Ok(Handle(1000 + gpu * 100 + slot as usize)),
            None if slot.is_multiple_of(2) => Err(Fault::NotFound),
            None => Err(Fault::InvalidArgument),
        }
    }

    fn mig_parent(&self, instance: Handle) -> Answer<Handle> {
        let (gpu, slot) = index(instance);
        let state = self.0.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", Some(gpu))?;
        let own = slot.and_then(|slot| state.gpus[gpu].slots[slot].clone()).is_some_and(|(_, own)| own);
        Ok(Handle(if own { gpu } else { gpu + 1 }))
    }

    fn mig_ids(&self, instance: Handle) -> Answer<(u32, u32)> {
        Ok((u32::try_from(instance.0).unwrap(), 0))
    }
}
