//! Owns who holds memory and does nothing with it, process by process (C23).
//! Refuses to call idle what nobody could watch: without the probes or NVML's figures the clock begins anew.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    DeviceSample, GpuId, GpuSample, ProcessId, Tenant,
    sample::{Confidence, ProcessSample},
};

/// A process that holds memory of a GPU and has done nothing for a while.
#[derive(Clone, Debug, PartialEq)]
pub struct IdleHolder {
    pub pid: u32,
    pub tenant: Tenant,
    pub gpu: GpuId,
    pub bytes: u64,
    /// Since it last was seen to do something, or was first seen.
    pub idle_seconds: f64,
}

/// Idle holders, ready to be published.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HoldersView {
    /// From this long on a holder is idle.
    pub after_seconds: f64,
    /// The most bytes first.
    pub idle: Vec<IdleHolder>,
    /// Tenants of whom this was judged, idle or not.
    pub judged: BTreeSet<(Tenant, GpuId)>,
}

#[derive(Clone, Copy, Debug)]
struct Watched {
    /// A PID that is used again is somebody else.
    process: Option<ProcessId>,
    calls: u64,
    since: Duration,
}

/// When each process was last seen to do something.
#[derive(Debug, Default)]
pub struct Idle {
    watched: BTreeMap<(u32, GpuId), Watched>,
}

impl Idle {
    /// One tick. `calls`: the processes whose calls are counted; `None` while no probe counts them.
    pub fn advance(
        &mut self,
        calls: Option<&[ProcessSample]>,
        device: &DeviceSample,
        by_pid: &BTreeMap<u32, Tenant>,
        now: Duration,
        after: Duration,
    ) -> HoldersView {
        let mut view = HoldersView { after_seconds: after.as_secs_f64(), ..HoldersView::default() };
        let mut past = std::mem::take(&mut self.watched);
        let Some(processes) = calls else { return view };
        let running: BTreeMap<u32, &ProcessSample> =
            processes.iter().filter(|process| process.ended.is_none()).map(|of| (of.tgid, of)).collect();
        for gpu in &device.gpus {
            let Ok(listed) = &gpu.processes else { continue };
            for process in listed.iter().filter(|process| !process.mps_server) {
                let (Ok(bytes), Some(tenant)) = (process.bytes, by_pid.get(&process.pid)) else { continue };
                let Some(busy) = works(gpu, process.pid) else { continue };
                let sample = running.get(&process.pid);
                if sample.is_some_and(|sample| sample.confidence == Confidence::EventsLost) {
                    // What calls it made is not known, nor will it be.
                    continue;
                }
                let fresh = Watched {
                    process: sample.map(|sample| sample.id),
                    calls: sample.map_or(0, |sample| sample.calls.iter().map(|row| row.calls).sum()),
                    since: now,
                };
                let key = (process.pid, gpu.id.clone());
                let same = |past: &Watched| past.process == fresh.process && past.calls == fresh.calls;
                let kept = past.remove(&key).filter(|past| same(past) && !busy).unwrap_or(fresh);
                let idle = now.saturating_sub(kept.since);
                if idle >= after && bytes > 0 {
                    view.idle.push(IdleHolder {
                        pid: process.pid,
                        tenant: tenant.clone(),
                        gpu: gpu.id.clone(),
                        bytes,
                        idle_seconds: idle.as_secs_f64(),
                    });
                }
                view.judged.insert((tenant.clone(), gpu.id.clone()));
                self.watched.insert(key, kept);
            }
        }
        view.idle.sort_by(|one, two| two.bytes.cmp(&one.bytes).then(one.pid.cmp(&two.pid)));
        view
    }
}

/// Whether kernels of this process ran, as far as NVML's samples show; `None` where they show nothing.
fn works(gpu: &GpuSample, pid: u32) -> Option<bool> {
    let samples = gpu.process_utilization.as_ref().ok()?;
    if let Some(sample) = samples.iter().find(|sample| sample.pid == pid) {
        return Some(sample.sm > 0.0);
    }
    // NVML leaves processes out, busy ones as well. Somebody is missing where the GPU is busy and nobody in the list.
    let explained = samples.iter().any(|sample| sample.sm > 0.0);
    let quiet = gpu.utilization.ok()? <= 0.0;
    Some(!explained && !quiet)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Absence, GpuProcess, Operation, TenantKind,
        device::ProcessUtilization,
        sample::{CallRow, GpuRef},
    };

    const AFTER: Duration = Duration::from_mins(1);

    fn process(pid: u32, calls: u64) -> ProcessSample {
        let row = CallRow { gpu: GpuRef::Unknown, operation: Operation::MemAlloc, calls };
        ProcessSample { calls: vec![row], ..crate::sample::tests::process(u64::from(pid)) }
    }

    /// Four processes of one pod with 1 to 4 GiB; only the first one's kernels run.
    fn device(utilization: Result<Vec<ProcessUtilization>, Absence>) -> DeviceSample {
        let row = |pid: u32| GpuProcess {
            pid,
            bytes: Ok(u64::from(pid) << 30),
            compute: true,
            graphics: false,
            mps_client: false,
            mps_server: false,
        };
        let mut sample = DeviceSample::absent(Duration::ZERO, Absence::NotYet);
        sample.gpus.push(GpuSample {
            processes: Ok((1..=4).map(row).collect()),
            process_utilization: utilization,
            utilization: Ok(0.5),
            ..GpuSample::absent(GpuId::from_nvml("GPU-a"), 0, Absence::NotSupported)
        });
        sample
    }

    fn busy(pids: &[u32]) -> Vec<ProcessUtilization> {
        pids.iter().map(|pid| ProcessUtilization { pid: *pid, sm: 0.5, memory: 0.0 }).collect()
    }

    fn tenants() -> BTreeMap<u32, Tenant> {
        (1..=4).map(|pid| (pid, Tenant::plain(TenantKind::Docker, "models"))).collect()
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn c23_three_of_four_hold_and_do_nothing() {
        let mut idle = Idle::default();
        let sample = device(Ok(busy(&[1])));
        let processes: Vec<ProcessSample> = (1..=4).map(|pid| process(pid, 7)).collect();
        for second in 0..59 {
            let view = idle.advance(Some(&processes), &sample, &tenants(), at(second), AFTER);
            assert!(view.idle.is_empty() && view.judged.len() == 1, "{second}");
        }
        let view = idle.advance(Some(&processes), &sample, &tenants(), at(90), AFTER);
        let rows: Vec<(u32, u64)> = view.idle.iter().map(|holder| (holder.pid, holder.bytes >> 30)).collect();
        assert_eq!(rows, [(4, 4), (3, 3), (2, 2)]);
        assert!(view.idle.iter().all(|holder| (holder.idle_seconds - 90.0).abs() < 1e-9));
        // A call of one of them, and its clock begins anew.
        let processes: Vec<ProcessSample> =
            (1..=4).map(|pid| process(pid, if pid == 3 { 8 } else { 7 })).collect();
        let view = idle.advance(Some(&processes), &sample, &tenants(), at(91), AFTER);
        assert_eq!(view.idle.iter().map(|holder| holder.pid).collect::<Vec<_>>(), [4, 2]);
    }

    #[test]
    fn c23_what_nobody_watches_is_not_idle() {
        let mut idle = Idle::default();
        let mut look = |utilization, calls: Option<&[ProcessSample]>| {
            idle.advance(calls, &device(utilization), &tenants(), Duration::ZERO, AFTER);
            idle.advance(calls, &device(Ok(busy(&[1]))), &tenants(), at(100), AFTER);
            idle.advance(calls, &device(Err(Absence::Timeout)), &tenants(), at(101), AFTER)
        };
        assert!(look(Ok(busy(&[1])), Some(&[])).judged.is_empty(), "no samples");
        assert!(look(Ok(busy(&[1])), None).judged.is_empty(), "no probes");
        // Calls were lost, so that none may have been seen.
        let deaf = ProcessSample { confidence: Confidence::EventsLost, ..process(4, 7) };
        let deaf = [deaf];
        let view = [0, 100]
            .map(|second| idle.advance(Some(&deaf), &device(Ok(busy(&[1]))), &tenants(), at(second), AFTER));
        assert_eq!(view[1].idle.iter().map(|holder| holder.pid).collect::<Vec<_>>(), [3, 2]);
        // The GPU is busy and nobody in the list is: it may be any of them.
        let nobody = device(Ok(busy(&[])));
        for second in 102..300 {
            let view = idle.advance(Some(&[]), &nobody, &tenants(), at(second), AFTER);
            assert!(view.idle.is_empty());
        }
    }

    #[test]
    fn c23_a_pid_that_is_used_again_begins_anew() {
        let mut idle = Idle::default();
        let sample = device(Ok(busy(&[1])));
        idle.advance(Some(&[process(2, 0)]), &sample, &tenants(), Duration::ZERO, AFTER);
        let other = ProcessSample { id: ProcessId(99), ..process(2, 0) };
        let view = idle.advance(Some(&[other]), &sample, &tenants(), at(100), AFTER);
        assert_eq!(view.idle.iter().map(|holder| holder.pid).collect::<Vec<_>>(), [4, 3]);
    }
}
