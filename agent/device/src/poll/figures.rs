//! Owns the figures that are read less often than each poll: which are due, and what stands for those that are not.
//! Refuses to let them age unseen: each carries when it was read.

use std::collections::BTreeMap;
use std::time::Instant;

use cotenant_model::device::ProcessUtilization;
use cotenant_model::{Absence, GpuId, GpuSample, Reading};

use super::Round;
use crate::cadence::{Paced, Spent};
use crate::nvml::{Fault, Figure, Handle, UtilizationRow};
use crate::processes::NOT_AVAILABLE;

type Pair = (Reading<f64>, Reading<f64>);

impl Round<'_> {
    /// Everything but memory and processes of a whole GPU; whether it is in MIG mode.
    pub(super) fn figures(&mut self, device: Handle, index: u32, at: &GpuId) -> Reading<bool> {
        let nvml = self.nvml;
        let utilization = self.paced(
            at,
            Paced::ProcessUtilization,
            |last| last.process_utilization.clone(),
            |round| round.process_utilization(device, index, at),
        );
        self.set(at, |gpu| gpu.process_utilization = utilization);
        self.gauges(device, index, at);
        let ask = |round: &mut Self| {
            let mode = round.ask(index, "nvmlDeviceGetComputeMode", || nvml.compute_mode(device));
            mode.map_err(|fault| fault.absence())
        };
        let compute_mode = self.paced(at, Paced::ComputeMode, |last| last.compute_mode, ask);
        let ask = |round: &mut Self| {
            let mig = round.ask(index, "nvmlDeviceGetMigMode", || nvml.mig_enabled(device));
            mig.map_err(|fault| fault.absence())
        };
        let mig = self.paced(at, Paced::Mig, |last| last.mig_enabled, ask);
        self.set(at, |gpu| {
            gpu.compute_mode = compute_mode;
            gpu.mig_enabled = mig;
        });
        if !self.abandoned {
            let done = self.desk.draft(|draft| draft.gpus.iter().find(|gpu| gpu.id == *at).cloned());
            self.memory.last.extend(done.map(|done| (at.clone(), done)));
        }
        mig
    }

    /// The figure as it was, or read anew if it is due.
    fn paced<T>(
        &mut self,
        at: &GpuId,
        what: Paced,
        kept: impl FnOnce(&GpuSample) -> Reading<T>,
        ask: impl FnOnce(&mut Self) -> Reading<T>,
    ) -> Reading<T> {
        let now = Instant::now();
        let due = self.memory.cadence.due(what, at, now);
        if let Some(last) = self.memory.last.get(at).filter(|_| !due) {
            let read = what.reading().and_then(|name| Some((name, *last.read.get(name)?)));
            let kept = kept(last);
            self.set(at, |gpu| gpu.read.extend(read));
            return kept;
        }
        let (taken, before) = (self.desk.started.elapsed(), self.inside);
        let answer = ask(self);
        let cost = self.inside.saturating_sub(before);
        let spent = Spent { at: now, cost, failed: answer.as_ref().err().copied() };
        if !self.abandoned {
            self.memory.cadence.read(what, at, spent, self.terms);
        }
        if answer.is_ok() {
            let name = what.reading();
            self.set(at, |gpu| gpu.read.extend(name.map(|name| (name, taken))));
        }
        answer
    }

    fn process_utilization(
        &mut self,
        device: Handle,
        index: u32,
        id: &GpuId,
    ) -> Reading<Vec<ProcessUtilization>> {
        if !self.config.host_pid_namespace {
            return Err(Absence::ForeignPidNamespace);
        }
        let nvml = self.nvml;
        let since = self.memory.seen.get(id).copied().unwrap_or(0);
        let ask = || nvml.process_utilization(device, since);
        let rows = match self.ask(index, "nvmlDeviceGetProcessUtilization", ask) {
            Ok(rows) => rows,
            // No sample since then: nobody ran.
            Err(Fault::NotFound) => Vec::new(),
            Err(fault) => return Err(fault.absence()),
        };
        if rows.iter().any(|row| row.sm_percent > 100 || row.memory_percent > 100) {
            return Err(Absence::Implausible);
        }
        let mut newest = BTreeMap::new();
        for row in rows.into_iter().filter(|row| row.timestamp > since && row.pid != 0) {
            let kept = newest.entry(row.pid).or_insert(row);
            if row.timestamp >= kept.timestamp {
                *kept = row;
            }
        }
        if let Some(latest) = newest.values().map(|row| row.timestamp).max() {
            self.memory.seen.insert(id.clone(), latest);
        }
        let share = |row: UtilizationRow| ProcessUtilization {
            pid: row.pid,
            sm: f64::from(row.sm_percent) / 100.0,
            memory: f64::from(row.memory_percent) / 100.0,
        };
        Ok(newest.into_values().map(share).collect())
    }

    fn gauges(&mut self, device: Handle, index: u32, at: &GpuId) {
        let nvml = self.nvml;
        let ask = |round: &mut Self| {
            let rates = round.ask(index, "nvmlDeviceGetUtilizationRates", || nvml.utilization(device));
            match rates.map_err(|fault| fault.absence())? {
                (kernels @ 0..=100, memory @ 0..=100) => {
                    Ok((f64::from(kernels) / 100.0, f64::from(memory) / 100.0))
                }
                _ => Err(Absence::Implausible),
            }
        };
        let kept = |last: &GpuSample| Ok((last.utilization?, last.memory_bandwidth_utilization?));
        let rates = self.paced(at, Paced::Utilization, kept, ask);
        let figure = |figure: Figure| move |round: &mut Self| round.figure(device, index, figure);
        let scaled = |figure: Figure, unit: f64| {
            move |round: &mut Self| round.figure(device, index, figure).map(|value| value as f64 * unit)
        };
        let power =
            self.paced(at, Paced::Power, |last| last.power_watts, scaled(Figure::PowerMilliwatts, 1e-3));
        let energy =
            self.paced(at, Paced::Energy, |last| last.energy_joules, scaled(Figure::EnergyMillijoules, 1e-3));
        let temperature = self.paced(
            at,
            Paced::Temperature,
            |last| last.temperature_celsius,
            scaled(Figure::TemperatureCelsius, 1.0),
        );
        let clocks = self.paced(
            at,
            Paced::Clocks,
            |last| last.clocks_event_reasons,
            figure(Figure::ClocksEventReasons),
        );
        let corrected =
            self.paced(at, Paced::EccCorrected, |last| last.ecc_corrected, figure(Figure::EccCorrected));
        let uncorrected = self.paced(
            at,
            Paced::EccUncorrected,
            |last| last.ecc_uncorrected,
            figure(Figure::EccUncorrected),
        );
        let (transmit, receive) = self.pcie(device, index, at);
        self.set(at, |gpu| {
            gpu.utilization = rates.map(|(kernels, _)| kernels);
            gpu.memory_bandwidth_utilization = rates.map(|(_, memory)| memory);
            gpu.power_watts = power;
            gpu.energy_joules = energy;
            gpu.temperature_celsius = temperature;
            gpu.clocks_event_reasons = clocks;
            gpu.ecc_corrected = corrected;
            gpu.ecc_uncorrected = uncorrected;
            gpu.pcie_transmit_bytes_per_second = transmit;
            gpu.pcie_receive_bytes_per_second = receive;
        });
    }

    fn figure(&mut self, device: Handle, index: u32, figure: Figure) -> Reading<u64> {
        let nvml = self.nvml;
        match self.ask(index, figure.function(), || nvml.figure(device, figure)) {
            Ok(NOT_AVAILABLE) => Err(Absence::NotAvailable),
            // The 32-bit figures have their own "not available".
            Ok(value) if value == u64::from(u32::MAX) && figure.is_narrow() => Err(Absence::NotAvailable),
            Ok(value) => Ok(value),
            Err(fault) => Err(fault.absence()),
        }
    }

    fn pcie(&mut self, device: Handle, index: u32, at: &GpuId) -> Pair {
        if !self.config.pcie {
            return (Err(Absence::Disabled), Err(Absence::Disabled));
        }
        let kept =
            |last: &GpuSample| Ok((last.pcie_transmit_bytes_per_second, last.pcie_receive_bytes_per_second));
        let ask = |round: &mut Self| {
            let mut read =
                |figure| round.figure(device, index, figure).map(|kilobytes| kilobytes as f64 * 1024.0);
            Ok((read(Figure::PcieTransmitKilobytes), read(Figure::PcieReceiveKilobytes)))
        };
        let both: Reading<Pair> = self.paced(at, Paced::Pcie, kept, ask);
        both.unwrap_or_else(|reason| (Err(reason), Err(reason)))
    }
}
