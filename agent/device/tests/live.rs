//! Owns one look at the NVML of the host under test, if it has one.
//! Refuses to fail where there is no GPU: it says that it was skipped.

#![allow(clippy::unwrap_used, reason = "a test that unwraps fails at the right line")]

use std::thread;
use std::time::{Duration, Instant};

use cotenant_device::{Condition, Device, NvmlConfig};

#[test]
fn live_nvml_answers_plausibly() {
    // COTENANT_TEST_NVML names another library, such as the simulated one.
    let library = std::env::var_os("COTENANT_TEST_NVML").map(Into::into);
    let config = NvmlConfig {
        library,
        test_interval: Some(Duration::from_millis(200)),
        pcie: true,
        ..NvmlConfig::default()
    };
    let device = Device::spawn(config, Instant::now()).unwrap();
    let give_up = Instant::now() + Duration::from_secs(30);
    while device.health().condition == Condition::Starting && Instant::now() < give_up {
        thread::sleep(Duration::from_millis(10));
    }
    let sample = device.latest();
    if let Err(reason) = sample.library {
        eprintln!("skipped: no NVML here ({})", reason.as_str());
        return;
    }
    eprintln!("{sample:#?}\n{:#?}", device.health());
    for gpu in &sample.gpus {
        let memory = gpu.memory.unwrap();
        assert!(memory.used <= memory.total && memory.total > 0);
        assert!(gpu.id.uuid().is_some(), "{}", gpu.id);
        assert!(gpu.processes.is_ok(), "{:?}", gpu.processes);
        assert!(gpu.utilization.is_ok_and(|share| (0.0..=1.0).contains(&share)) || gpu.parent.is_some());
    }
    device.release().unwrap();
    device.resume();
    let give_up = Instant::now() + Duration::from_secs(30);
    while device.latest().library.is_err() {
        assert!(Instant::now() < give_up, "NVML did not come back after release");
        thread::sleep(Duration::from_millis(10));
    }
}
