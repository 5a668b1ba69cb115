//! Owns what is heard of NVML's events: faults, trouble with listening, and letting the library go.
//! Refuses what a fault means.

#![allow(clippy::unwrap_used, reason = "a test that unwraps fails at the right line")]

mod common;

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use common::{DEADLINE, Node, complete, until};
use cotenant_device::nvml::{Alarm, Fault};
use cotenant_device::{Device, DeviceError, Hearing};
use cotenant_model::{Absence, GpuId};

const WAIT: &str = "nvmlEventSetWait_v2";

fn alarm(gpu: &str, code: u32) -> Alarm {
    Alarm { gpu: GpuId::from_nvml(gpu), code, gpu_instance: None }
}

fn until_hearing(device: &Device, wanted: impl Fn(Hearing) -> bool) -> Hearing {
    let give_up = Instant::now() + Duration::from_secs(10);
    loop {
        let hearing = device.hearing();
        if wanted(hearing) {
            return hearing;
        }
        assert!(Instant::now() < give_up, "never came: {hearing:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn heard(device: &Device, count: usize) -> Vec<Alarm> {
    let give_up = Instant::now() + Duration::from_secs(10);
    let mut heard = Vec::new();
    while heard.len() < count {
        heard.extend(device.faults().into_iter().map(|rung| rung.alarm));
        assert!(Instant::now() < give_up, "only {heard:?}");
        thread::sleep(Duration::from_millis(2));
    }
    heard
}

#[test]
fn c105_each_fault_is_heard_once_equal_ones_too() {
    let node = Node::with(2);
    let device = node.start();
    until_hearing(&device, |hearing| hearing == Hearing::Listening { gpus: 2 });
    let told = [alarm("GPU-0", 31), alarm("GPU-0", 31), alarm("GPU-1", 79)];
    node.set(|state| state.alarms = told.to_vec());
    assert_eq!(heard(&device, 3), told);
    assert_eq!(device.faults(), []);
}

#[test]
fn nobody_is_asked_for_events_before_a_poll_was_answered() {
    let node = Node::with(1);
    node.set(|state| state.open_fault = Some(Fault::LibraryMissing { reason: "no such file".into() }));
    let device = node.start();
    until(&device, |sample| sample.library == Err(Absence::LibraryMissing));
    assert_eq!((device.hearing(), node.bells.load(Ordering::SeqCst)), (Hearing::NotYet, 0));
}

#[test]
fn what_is_not_supported_says_so_and_costs_the_polls_nothing() {
    let node = Node::with(1);
    node.set(|state| state.faults = vec![("nvmlEventSetCreate", None, Fault::NotSupported)]);
    let device = node.start();
    until_hearing(&device, |hearing| hearing == Hearing::Failed(Absence::NotSupported));
    until(&device, complete);
    node.set(|state| state.faults.clear());
    until_hearing(&device, |hearing| hearing == Hearing::Listening { gpus: 1 });
}

#[test]
fn c46_a_wait_that_hangs_is_seen_and_polls_go_on() {
    let node = Node::with(1);
    let device = node.start();
    until_hearing(&device, |hearing| matches!(hearing, Hearing::Listening { .. }));
    node.set(|state| state.hang = Some(WAIT));
    until_hearing(&device, |hearing| matches!(hearing, Hearing::Hung { .. }));
    let polls = device.latest().taken;
    until(&device, |sample| complete(sample) && sample.taken > polls);
    node.set(|state| state.hang = None);
    until_hearing(&device, |hearing| matches!(hearing, Hearing::Listening { .. }));
}

#[test]
fn released_events_are_let_go_and_heard_again_after_resuming() {
    let node = Node::with(1);
    let device = node.start();
    until_hearing(&device, |hearing| matches!(hearing, Hearing::Listening { .. }));
    device.release().unwrap();
    assert_eq!(node.bells.load(Ordering::SeqCst), 0);
    until_hearing(&device, |hearing| hearing == Hearing::Released);
    device.resume();
    until_hearing(&device, |hearing| matches!(hearing, Hearing::Listening { .. }));
    node.set(|state| state.alarms = vec![alarm("GPU-0", 48)]);
    assert_eq!(heard(&device, 1), [alarm("GPU-0", 48)]);
}

#[test]
fn a_set_that_hangs_holds_the_library_and_says_so() {
    let node = Node::with(1);
    let device = node.start();
    until_hearing(&device, |hearing| matches!(hearing, Hearing::Listening { .. }));
    node.set(|state| state.hang = Some(WAIT));
    until_hearing(&device, |hearing| matches!(hearing, Hearing::Hung { .. }));
    let asked = Instant::now();
    assert!(matches!(device.release(), Err(DeviceError::StillHeld { function: WAIT })));
    assert!(asked.elapsed() < DEADLINE * 5);
    node.set(|state| state.hang = None);
}

#[test]
fn what_nobody_fetches_is_counted() {
    let node = Node::with(1);
    let device = node.start();
    until_hearing(&device, |hearing| matches!(hearing, Hearing::Listening { .. }));
    node.set(|state| state.alarms = vec![alarm("GPU-0", 13); 300]);
    let give_up = Instant::now() + Duration::from_secs(10);
    while device.faults_dropped() < 44 {
        assert!(Instant::now() < give_up, "{}", device.faults_dropped());
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!((device.faults().len(), device.faults_dropped()), (256, 44));
}
