//! Owns the rows of GPUs, and which missing figures mean that NVML failed.
//! Refuses indexes: a GPU is its UUID.

use std::collections::BTreeSet;

use cotenant_model::sharing::Mode;
use cotenant_model::view::{GpuView, View};
use cotenant_model::{Absence, GpuId, Reading};

use super::{Labels, Sheet, Value};
use crate::Id;
use crate::catalogue::attributes::{
    ECC_ERROR, FIGURE, HW_DRIVER_VERSION, HW_GPU_TASK, HW_ID, HW_NAME, HW_PARENT, HW_SENSOR_LOCATION,
    HW_TYPE, IO_DIRECTION, SHARING_MODE, THROTTLE_REASON,
};

/// `nvmlClocksEventReason*` of nvml.h (CUDA 13), by bit from the lowest.
const CLOCKS_EVENT_REASONS: [&str; 9] = [
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
];

pub(super) fn write(sheet: &mut Sheet, view: &View) {
    let driver = match &view.agent.nvml {
        Ok(facts) => Some(facts.driver_version.as_str()),
        Err(reason) => {
            sheet.put_absence(Labels::default(), "library", *reason);
            None
        }
    };
    // A GPU that is listed twice is one GPU: its bytes must not be added.
    let mut seen = BTreeSet::new();
    for gpu in view.gpus.iter().filter(|gpu| seen.insert(gpu.sample.id.as_str())) {
        let mut page = Page { sheet, hw_id: gpu.sample.id.as_str(), absences: Vec::new() };
        page.identity(gpu, driver);
        page.memory(gpu);
        page.activity(gpu);
        page.condition(gpu);
        page.finish();
    }
}

/// Whether the last poll got every figure that this host has.
pub(super) fn collected(view: &View) -> bool {
    let gpus_answer = view.gpus.iter().all(|gpu| absences(gpu).all(|reason| !is_failure(reason)));
    let polls_answer = view.agent.nvml_absences.keys().all(|(_, reason)| !is_failure(*reason));
    view.agent.nvml.is_ok() && gpus_answer && polls_answer
}

/// Six absences are what a host is like and stay so; the others are a poll that went wrong.
fn is_failure(reason: Absence) -> bool {
    !matches!(
        reason,
        Absence::NotSupported
            | Absence::NotAvailable
            | Absence::NoPermission
            | Absence::SymbolMissing
            | Absence::ForeignPidNamespace
            | Absence::Disabled
    )
}

fn absences(gpu: &GpuView) -> impl Iterator<Item = Absence> {
    let sample = &gpu.sample;
    [
        sample.memory.as_ref().err(),
        sample.processes.as_ref().err(),
        sample.process_utilization.as_ref().err(),
        sample.utilization.as_ref().err(),
        sample.memory_bandwidth_utilization.as_ref().err(),
        sample.power_watts.as_ref().err(),
        sample.energy_joules.as_ref().err(),
        sample.temperature_celsius.as_ref().err(),
        sample.pcie_transmit_bytes_per_second.as_ref().err(),
        sample.pcie_receive_bytes_per_second.as_ref().err(),
        sample.clocks_event_reasons.as_ref().err(),
        sample.ecc_corrected.as_ref().err(),
        sample.ecc_uncorrected.as_ref().err(),
        sample.mig_enabled.as_ref().err(),
    ]
    .map(Option::<&Absence>::copied)
    .into_iter()
    .flatten()
}

/// One GPU's part of the sheet.
struct Page<'a> {
    sheet: &'a mut Sheet,
    hw_id: &'a str,
    absences: Vec<(&'static str, Absence)>,
}

impl Page<'_> {
    fn labels(&self) -> Labels {
        Labels::default().with(HW_ID, self.hw_id)
    }

    fn typed(&self) -> Labels {
        self.labels().with(HW_TYPE, "gpu")
    }

    /// The figure, or why it is not there.
    fn put<T: Copy + Into<Value>>(
        &mut self,
        id: Id,
        labels: Labels,
        reading: &'static str,
        value: Reading<T>,
    ) {
        match value {
            Ok(value) => self.sheet.put(id, labels, value),
            Err(reason) => self.absences.push((reading, reason)),
        }
    }

    fn finish(self) {
        for (reading, reason) in &self.absences {
            self.sheet.put_absence(self.labels(), reading, *reason);
        }
    }

    fn identity(&mut self, gpu: &GpuView, driver: Option<&str>) {
        let info = self
            .typed()
            .with(HW_NAME, &gpu.sample.name)
            .with_some(HW_PARENT, gpu.sample.parent.as_ref().map(GpuId::as_str))
            .with_some(HW_DRIVER_VERSION, driver);
        self.sheet.put(Id::GpuInfo, info, true);
        self.sheet.put(Id::ReadingsAge, self.labels(), gpu.age_seconds);
        for (figure, age) in &gpu.figure_ages {
            self.sheet.put(Id::FigureAge, self.labels().with(FIGURE, figure), *age);
        }
        for mode in Mode::ALL {
            let labels = self.labels().with(SHARING_MODE, mode.as_str());
            self.sheet.put(Id::SharingMode, labels, *mode == gpu.sharing.mode);
        }
        self.put(Id::MigEnabled, self.labels(), "mig_enabled", gpu.sample.mig_enabled);
    }

    /// NVML's newer call leaves the reserve out of `used`, the older one has it in and does not tell. Published is the
    /// one with it, so that one name means one thing and processes + unattributed + reserved add up to it.
    fn memory(&mut self, gpu: &GpuView) {
        match gpu.sample.memory {
            Ok(memory) => {
                let used = memory.used + memory.reserved.unwrap_or(0);
                self.sheet.put(Id::MemoryLimit, self.labels(), memory.total);
                self.sheet.put(Id::MemoryUsage, self.labels(), used);
                if memory.total > 0 {
                    let share = used as f64 / memory.total as f64;
                    self.put(Id::MemoryUtilization, self.labels(), "memory_utilization", ratio(Ok(share)));
                }
            }
            Err(reason) => self.absences.push(("memory", reason)),
        }
        self.put(Id::MemoryReserved, self.labels(), "reserved", gpu.reserved);
        self.put(Id::MemoryUnattributed, self.labels(), "unattributed", gpu.unattributed);
        if let Err(reason) = gpu.sample.processes {
            self.absences.push(("processes", reason));
        }
    }

    fn activity(&mut self, gpu: &GpuView) {
        let sample = &gpu.sample;
        let general = self.labels().with(HW_GPU_TASK, "general");
        self.put(Id::GpuUtilization, general, "utilization", ratio(sample.utilization));
        let bandwidth = ratio(sample.memory_bandwidth_utilization);
        self.put(Id::MemoryBandwidth, self.labels(), "memory_bandwidth_utilization", bandwidth);
        if let Err(reason) = sample.process_utilization {
            self.absences.push(("process_utilization", reason));
        }
        let receive = self.labels().with(IO_DIRECTION, "receive");
        self.put(Id::PcieThroughput, receive, "pcie_receive", sample.pcie_receive_bytes_per_second);
        let transmit = self.labels().with(IO_DIRECTION, "transmit");
        self.put(Id::PcieThroughput, transmit, "pcie_transmit", sample.pcie_transmit_bytes_per_second);
    }

    fn condition(&mut self, gpu: &GpuView) {
        let sample = &gpu.sample;
        self.put(Id::Power, self.typed(), "power", sample.power_watts);
        self.put(Id::Energy, self.typed(), "energy", sample.energy_joules);
        let die = self.labels().with(HW_SENSOR_LOCATION, "gpu");
        self.put(Id::Temperature, die, "temperature", sample.temperature_celsius);
        let corrected = self.typed().with(ECC_ERROR, "corrected");
        self.put(Id::Errors, corrected, "ecc_corrected", sample.ecc_corrected);
        let uncorrected = self.typed().with(ECC_ERROR, "uncorrected");
        self.put(Id::Errors, uncorrected, "ecc_uncorrected", sample.ecc_uncorrected);
        match sample.clocks_event_reasons {
            Ok(bits) => self.clocks(bits),
            Err(reason) => self.absences.push(("clocks_event_reasons", reason)),
        }
    }

    fn clocks(&mut self, bits: u64) {
        let named = CLOCKS_EVENT_REASONS.iter().enumerate().map(|(bit, name)| (*name, bits >> bit & 1 == 1));
        let other = ("other", bits >> CLOCKS_EVENT_REASONS.len() != 0);
        for (name, active) in named.chain([other]) {
            self.sheet.put(Id::ClocksEvent, self.labels().with(THROTTLE_REASON, name), active);
        }
    }
}

/// A share outside 0 to 1 is no share.
fn ratio(share: Reading<f64>) -> Reading<f64> {
    share.and_then(|share| if (0.0..=1.0).contains(&share) { Ok(share) } else { Err(Absence::Implausible) })
}
