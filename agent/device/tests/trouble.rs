//! Owns what the device does when NVML hangs, fails, vanishes or must be let go.
//! Refuses real time: intervals and deadlines are milliseconds here.

#![allow(clippy::unwrap_used, reason = "a test that unwraps fails at the right line")]

mod common;

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use common::{DEADLINE, GIB, INTERVAL, Node, complete, cost, gpu, until, until_health};
use cotenant_device::nvml::Fault;
use cotenant_device::{Condition, DeviceError};
use cotenant_model::{Absence, DeviceSample};

const SAMPLES: &str = "nvmlDeviceGetProcessUtilization";
const LIST: &str = "nvmlDeviceGetComputeRunningProcesses_v3";

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn c46_hang_is_published_counted_and_survived() {
    let node = Node::with(2);
    node.set(|state| state.gpus[0].compute = vec![(11, GIB)]);
    let device = node.start();
    until(&device, complete);
    node.set(|state| state.hang = Some(LIST));
    let hung = until(&device, |sample| sample.library == Err(Absence::Timeout));
    // What was read before the hang stands, what was not is late, and both GPUs are still there.
    assert!(gpu(&hung, "GPU-0").memory.is_ok());
    assert_eq!(gpu(&hung, "GPU-0").processes, Err(Absence::Timeout));
    assert_eq!(gpu(&hung, "GPU-1").memory, Err(Absence::Timeout));
    assert_eq!(gpu(&hung, "GPU-1").name, "NVIDIA Fake");
    assert!(matches!(device.health().condition, Condition::Hung { function: LIST, .. }));

    // Every poll that falls into the hang is a timeout; no thread is started for it.
    let before = threads();
    let more = until(&device, |sample| cost(sample, LIST).timeouts >= 5);
    assert_eq!(more.taken, hung.taken);
    assert!(threads() <= before + 2, "{} threads, {before} before", threads());
    let asked = Instant::now();
    device.latest();
    assert!(asked.elapsed() < Duration::from_millis(50));

    node.set(|state| state.hang = None);
    let back = until(&device, complete);
    assert_eq!(gpu(&back, "GPU-0").processes.as_ref().map(Vec::len), Ok(1));
    assert_eq!(device.health().condition, Condition::Answering);
    assert_eq!(node.opened.load(Ordering::SeqCst), 1);
}

#[test]
fn c46_hang_while_opening() {
    let node = Node::with(1);
    node.set(|state| state.hang = Some("nvmlInit_v2"));
    let device = node.start();
    let hung = until(&device, |sample| sample.library == Err(Absence::Timeout));
    assert!(hung.gpus.is_empty());
    assert!(cost(&hung, "nvmlInit_v2").timeouts >= 1);
    node.set(|state| state.hang = None);
    until(&device, complete);
}

#[test]
fn c44_unknown_error_after_success_opens_anew_with_back_off() {
    let node = Node::with(1);
    let device = node.start();
    until(&device, complete);
    node.set(|state| state.faults = vec![("nvmlDeviceGetMemoryInfo_v2", None, Fault::Unknown)]);
    until_health(&device, |health| health.condition == Condition::Degraded(Absence::Failed));
    let polls = cost(&device.latest(), "nvmlDeviceGetCount_v2").calls;
    let sample = until(&device, |sample| cost(sample, "nvmlDeviceGetCount_v2").calls > polls + 20);
    let opened = node.opened.load(Ordering::SeqCst);
    assert!((2..=7).contains(&opened), "{opened} openings in 20 polls");
    assert_eq!(node.closed.load(Ordering::SeqCst), opened - 1);
    assert_eq!(gpu(&sample, "GPU-0").memory, Err(Absence::Failed));
    node.set(|state| state.faults.clear());
    until_health(&device, |health| health.condition == Condition::Answering);
}

#[test]
fn c42_a_refusal_from_the_start_is_no_trouble() {
    let node = Node::with(1);
    node.set(|state| state.faults = vec![("nvmlDeviceGetMemoryInfo_v2", None, Fault::NoPermission)]);
    let device = node.start();
    until(&device, |sample| complete(sample) && cost(sample, "nvmlDeviceGetCount_v2").calls > 5);
    assert_eq!(device.health().condition, Condition::Answering);
    assert_eq!(node.opened.load(Ordering::SeqCst), 1);
}

#[test]
fn a_lost_gpu_stays_listed_and_the_other_is_still_read() {
    let node = Node::with(2);
    let device = node.start();
    until(&device, complete);
    node.set(|state| state.faults = vec![("nvmlDeviceGetHandleByIndex_v2", Some(0), Fault::GpuLost)]);
    let sample = until(&device, |sample| complete(sample) && gpu(sample, "GPU-0").memory.is_err());
    assert_eq!(gpu(&sample, "GPU-0").memory, Err(Absence::GpuLost));
    assert!(gpu(&sample, "GPU-1").memory.is_ok());
    node.set(|state| state.faults.clear());
    until(&device, |sample| gpu(sample, "GPU-0").memory.is_ok());
}

#[test]
fn a_library_that_is_missing_is_looked_for_again() {
    let node = Node::with(1);
    node.set(|state| state.open_fault = Some(Fault::LibraryMissing { reason: "no such file".into() }));
    let device = node.start();
    let sample = until(&device, |sample| sample.library == Err(Absence::LibraryMissing));
    assert!(sample.gpus.is_empty());
    node.set(|state| state.open_fault = None);
    until(&device, complete);
}

#[test]
fn a_version_mismatch_is_named_and_survived() {
    let node = Node::with(1);
    let device = node.start();
    until(&device, complete);
    node.set(|state| {
        state.open_fault = Some(Fault::from_code(18));
        state.faults = vec![("nvmlDeviceGetCount_v2", None, Fault::from_code(18))];
    });
    let sample = until(&device, |sample| sample.library == Err(Absence::VersionMismatch));
    assert_eq!(gpu(&sample, "GPU-0").memory, Err(Absence::VersionMismatch));
    node.set(|state| {
        state.open_fault = None;
        state.faults.clear();
    });
    until(&device, complete);
}

#[test]
fn c47_slow_calls_keep_the_duty_cycle_below_one_per_cent() {
    let node = Node::with(1);
    node.set(|state| state.slow = Duration::from_millis(1));
    let begun = Instant::now();
    let device = node.start();
    let sample = until(&device, complete);
    let inside = |sample: &DeviceSample| -> Duration {
        sample.calls.iter().filter(|cost| cost.function != "nvmlInit_v2").map(|cost| cost.total).sum()
    };
    let first = inside(&sample);
    assert!(device.health().delay >= first * 100, "{:?} after {first:?}", device.health().delay);
    let second = until(&device, |sample| cost(sample, "nvmlDeviceGetCount_v2").calls == 2);
    let share = first.as_secs_f64() / begun.elapsed().as_secs_f64();
    assert!(share < 0.01, "{share} with {:?}", inside(&second));
}

#[test]
fn c47_dear_figures_are_read_seldom_and_say_how_old_they_are() {
    const RATES: &str = "nvmlDeviceGetUtilizationRates";
    let node = Node::with(1);
    node.set(|state| {
        state.dear = vec![(RATES, Duration::from_millis(2)), (SAMPLES, Duration::from_millis(1))];
    });
    let begun = Instant::now();
    let device = node.start();
    let polls = |sample: &DeviceSample| cost(sample, "nvmlDeviceGetCount_v2").calls;
    let sample = until(&device, |sample| complete(sample) && polls(sample) >= 30);
    let memory = cost(&sample, "nvmlDeviceGetMemoryInfo_v2").calls;
    assert!(memory >= 30, "memory comes with each poll: {memory} of {}", polls(&sample));
    // One poll's allowance is 50 us: 2 ms come at most every 40th interval, 1 ms every 20th.
    let at_most = |intervals: u32| 2 + begun.elapsed().as_millis() / (INTERVAL * intervals).as_millis();
    assert!(u128::from(cost(&sample, RATES).calls) <= at_most(39), "{:?}", cost(&sample, RATES));
    assert!(u128::from(cost(&sample, SAMPLES).calls) <= at_most(19), "{:?}", cost(&sample, SAMPLES));
    assert!(cost(&sample, "nvmlDeviceGetHandleByIndex_v2").calls == 1);
    assert!(cost(&sample, "nvmlDeviceGetPowerUsage").calls >= 20, "cheap ones do too");
    // What was not read this time is there as it was, with its age.
    let gpu = gpu(&sample, "GPU-0");
    assert_eq!(gpu.utilization, Ok(0.5));
    assert!(gpu.read["utilization"] < sample.taken && gpu.read["power"] > gpu.read["utilization"]);
    assert!(!gpu.read.contains_key("energy"), "nothing was read: {:?}", gpu.energy_joules);
}

#[test]
fn c47_figures_give_way_before_memory_does() {
    let node = Node::with(1);
    let device = node.start();
    device.hold_back(4);
    let calls = |sample: &DeviceSample, function| cost(sample, function).calls;
    let (memory, power) = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetPowerUsage");
    let sample = until(&device, |sample| complete(sample) && calls(sample, memory) >= 24);
    assert!(device.health().delay <= INTERVAL);
    assert!(calls(&sample, power) <= 2 + calls(&sample, memory) / 3, "{:?}", cost(&sample, power));
    device.hold_back(32);
    until_health(&device, |health| health.delay == INTERVAL * 8);
}

#[test]
fn a_lost_gpu_takes_along_what_was_known_of_it() {
    let node = Node::with(1);
    node.set(|state| state.dear = vec![("nvmlDeviceGetUtilizationRates", Duration::from_millis(2))]);
    let device = node.start();
    until(&device, |sample| complete(sample) && gpu(sample, "GPU-0").utilization.is_ok());
    let lost = [
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetHandleByIndex_v2",
    ];
    node.set(|state| state.faults = lost.map(|function| (function, None, Fault::GpuLost)).into());
    let sample = until(&device, |sample| gpu(sample, "GPU-0").memory == Err(Absence::GpuLost));
    let gpu = gpu(&sample, "GPU-0");
    assert_eq!((gpu.utilization, gpu.power_watts), (Err(Absence::GpuLost), Err(Absence::GpuLost)));
    assert!(gpu.read.is_empty() || !gpu.read.contains_key("utilization"), "{:?}", gpu.read);
}

#[test]
fn released_handles_are_closed_until_resumed() {
    let node = Node::with(1);
    let device = node.start();
    until(&device, complete);
    device.release().unwrap();
    let sample = device.latest();
    assert_eq!(sample.library, Err(Absence::Released));
    assert_eq!(gpu(&sample, "GPU-0").memory, Err(Absence::Released));
    assert_eq!(device.health().condition, Condition::Released);
    assert_eq!((node.opened.load(Ordering::SeqCst), node.closed.load(Ordering::SeqCst)), (1, 1));
    thread::sleep(INTERVAL * 4);
    assert_eq!(node.opened.load(Ordering::SeqCst), 1);
    device.resume();
    until(&device, complete);
    assert_eq!(node.opened.load(Ordering::SeqCst), 2);
}

#[test]
fn releasing_a_hung_library_says_so_within_the_deadline() {
    let node = Node::with(1);
    let device = node.start();
    until(&device, complete);
    node.set(|state| state.hang = Some(LIST));
    until(&device, |sample| sample.library == Err(Absence::Timeout));
    let asked = Instant::now();
    assert!(matches!(device.release(), Err(DeviceError::StillHeld { function: LIST })));
    assert!(asked.elapsed() < DEADLINE * 5);
    node.set(|state| state.hang = None);
    until(&device, |sample| sample.library == Err(Absence::Released));
    assert_eq!(node.closed.load(Ordering::SeqCst), 1);
}

#[test]
fn a_dropped_device_closes_the_library() {
    let node = Node::with(1);
    let device = node.start();
    until(&device, complete);
    drop(device);
    let give_up = Instant::now() + Duration::from_secs(5);
    while node.closed.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < give_up);
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn live_without_a_library_says_so() {
    let config = cotenant_device::NvmlConfig {
        library: Some("/nonexistent/libnvidia-ml.so.1".into()),
        ..cotenant_device::NvmlConfig::default()
    };
    let device = cotenant_device::Device::spawn(config, Instant::now()).unwrap();
    until(&device, |sample| sample.library == Err(Absence::LibraryMissing));
}
