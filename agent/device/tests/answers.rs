//! Owns what a poll makes of NVML's answers, odd ones included.
//! Refuses timing: hangs and back-off are in `trouble.rs`.

#![allow(clippy::unwrap_used, reason = "a test that unwraps fails at the right line")]

mod common;

use common::{GIB, Node, complete, cost, gpu, until};
use cotenant_device::nvml::{Fault, ListVersion, UtilizationRow};
use cotenant_model::Absence;

fn bytes(processes: &[cotenant_model::GpuProcess]) -> Vec<(u32, u64)> {
    processes.iter().map(|process| (process.pid, process.bytes.unwrap())).collect()
}

#[test]
fn c01_each_process_has_its_own_bytes() {
    let node = Node::with(1);
    let listed = vec![(11, GIB), (12, 2 * GIB), (13, 3 * GIB)];
    node.set(|state| state.gpus[0].compute.clone_from(&listed));
    let sample = until(&node.start(), complete);
    let gpu = gpu(&sample, "GPU-0");
    assert_eq!(bytes(gpu.processes.as_ref().unwrap()), listed);
    assert_eq!(gpu.memory.unwrap().used, 6 * GIB);
    assert_eq!((gpu.name.as_str(), gpu.pci.as_str()), ("NVIDIA Fake", "00000000:00:00.0"));
}

#[test]
fn c02_processes_are_on_the_gpu_that_lists_them() {
    let node = Node::with(2);
    node.set(|state| state.gpus[1].compute = vec![(11, GIB)]);
    let sample = until(&node.start(), complete);
    assert_eq!(gpu(&sample, "GPU-0").processes, Ok(vec![]));
    assert_eq!(bytes(gpu(&sample, "GPU-1").processes.as_ref().unwrap()), [(11, GIB)]);
}

#[test]
fn c07_mps_clients_and_server_are_told_apart() {
    let node = Node::with(1);
    node.set(|state| {
        state.gpus[0].compute = vec![(11, GIB), (12, GIB), (19, 69 << 20)];
        state.gpus[0].mps = vec![(11, GIB), (12, GIB)];
    });
    let device = node.start();
    let sample = until(&device, complete);
    let processes = gpu(&sample, "GPU-0").processes.clone().unwrap();
    let servers: Vec<u32> = processes.iter().filter(|process| process.mps_server).map(|p| p.pid).collect();
    let clients: Vec<u32> = processes.iter().filter(|process| process.mps_client).map(|p| p.pid).collect();
    assert_eq!((servers, clients, processes.len()), (vec![19], vec![11, 12], 3));
    // One more client is seen by the next poll, though an empty list is asked for more seldom; the server stays one.
    node.set(|state| {
        state.gpus[0].compute = vec![(19, 69 << 20)];
        state.gpus[0].mps = vec![];
    });
    let server =
        until(&device, |sample| gpu(sample, "GPU-0").processes.as_ref().is_ok_and(|list| list.len() == 1));
    assert!(gpu(&server, "GPU-0").processes.as_ref().unwrap()[0].mps_server);
    node.set(|state| {
        state.gpus[0].compute = vec![(19, 69 << 20), (13, GIB)];
        state.gpus[0].mps = vec![(13, GIB)];
    });
    let again =
        until(&device, |sample| gpu(sample, "GPU-0").processes.as_ref().is_ok_and(|list| list.len() == 2));
    assert!(gpu(&again, "GPU-0").processes.as_ref().unwrap()[0].mps_client);
}

#[test]
fn c17_bandwidth_time_is_a_share_and_never_bytes() {
    let node = Node::with(1);
    node.set(|state| {
        state.gpus[0].compute = vec![(11, 8 * GIB)];
        let row =
            |timestamp, sm_percent| UtilizationRow { pid: 11, timestamp, sm_percent, memory_percent: 0 };
        state.utilization = vec![row(1, 90), row(3, 40), row(2, 70)];
    });
    let sample = until(&node.start(), complete);
    let gpu = gpu(&sample, "GPU-0");
    assert_eq!(bytes(gpu.processes.as_ref().unwrap()), [(11, 8 * GIB)]);
    let [row] = gpu.process_utilization.clone().unwrap().try_into().unwrap();
    assert!((row.sm - 0.4).abs() < 1e-9 && row.memory == 0.0);
}

#[test]
fn c20_c35_reserved_is_apart_with_v2_and_absent_with_v1() {
    let node = Node::with(1);
    let device = node.start();
    let sample = until(&device, complete);
    assert_eq!(gpu(&sample, "GPU-0").memory.unwrap().reserved, Some(GIB / 2));
    for refusal in [Fault::from_code(13), Fault::from_code(25), Fault::SymbolMissing] {
        node.set(|state| state.faults = vec![("nvmlDeviceGetMemoryInfo_v2", None, refusal)]);
        let old = until(&device, |sample| {
            gpu(sample, "GPU-0").memory.is_ok_and(|memory| memory.reserved.is_none())
        });
        assert_eq!(gpu(&old, "GPU-0").memory.unwrap().used, 6 * GIB);
        node.set(|state| state.faults.clear());
        until(&device, |sample| gpu(sample, "GPU-0").memory.is_ok_and(|memory| memory.reserved.is_some()));
    }
}

#[test]
fn c34_older_libraries_list_through_older_symbols() {
    for newest in ListVersion::ALL {
        let node = Node::with(1);
        node.set(|state| {
            state.newest_list = Some(newest);
            state.gpus[0].compute = vec![(11, GIB), (12, 2 * GIB)];
        });
        let sample = until(&node.start(), complete);
        assert_eq!(bytes(gpu(&sample, "GPU-0").processes.as_ref().unwrap()), [(11, GIB), (12, 2 * GIB)]);
        // A missing symbol is no call and no error.
        assert!(sample.calls.iter().all(|cost| cost.errors == 0), "{:?}", sample.calls);
    }
}

#[test]
fn c32_a_list_with_a_pid_that_cannot_be_is_refused_whole() {
    let node = Node::with(1);
    node.set(|state| state.gpus[0].compute = vec![(11, GIB), (5000, GIB)]);
    let sample = until(&node.start(), complete);
    assert_eq!(gpu(&sample, "GPU-0").processes, Err(Absence::Implausible));
    assert!(gpu(&sample, "GPU-0").memory.is_ok());
}

#[test]
fn c36_no_sample_is_an_empty_list_and_no_error() {
    let node = Node::with(1);
    node.set(|state| state.faults = vec![("nvmlDeviceGetProcessUtilization", None, Fault::NotFound)]);
    let sample = until(&node.start(), complete);
    assert_eq!(gpu(&sample, "GPU-0").process_utilization, Ok(vec![]));
    assert_eq!(cost(&sample, "nvmlDeviceGetProcessUtilization").errors, 0);
}

#[test]
fn c38_not_available_is_not_sixteen_exbibytes() {
    let node = Node::with(1);
    node.set(|state| state.gpus[0].compute = vec![(11, u64::MAX)]);
    let sample = until(&node.start(), complete);
    let gpu = gpu(&sample, "GPU-0");
    assert_eq!(gpu.processes.as_ref().unwrap()[0].bytes, Err(Absence::NotAvailable));
    assert_eq!(gpu.energy_joules, Err(Absence::NotAvailable));
    assert_eq!(gpu.temperature_celsius, Err(Absence::NotAvailable));
    assert_eq!(gpu.power_watts, Ok(250.0));
}

#[test]
fn c29_in_a_foreign_pid_namespace_no_list_is_asked_for() {
    let node = Node::with(1);
    node.set(|state| state.gpus[0].compute = vec![(11, GIB)]);
    let device = node.start_with(|config| config.host_pid_namespace = false);
    let sample = until(&device, complete);
    assert_eq!(gpu(&sample, "GPU-0").processes, Err(Absence::ForeignPidNamespace));
    assert!(!sample.calls.iter().any(|cost| cost.function.contains("RunningProcesses")));
}

#[test]
fn c41_free_slots_are_passed_over_and_deleted_instances_leave() {
    let node = Node::with(1);
    let own = |name: &str| Some((name.to_owned(), true));
    node.set(|state| {
        state.gpus[0].slots = vec![own("MIG-a"), None, own("MIG-b"), None, None, own("MIG-c"), None];
    });
    let device = node.start();
    let ids = |sample: &cotenant_model::DeviceSample| -> Vec<String> {
        sample.gpus.iter().map(|gpu| gpu.id.to_string()).collect()
    };
    let sample = until(&device, complete);
    assert_eq!(ids(&sample), ["GPU-0", "MIG-a", "MIG-b", "MIG-c"]);
    assert_eq!(gpu(&sample, "MIG-b").parent.as_ref().unwrap().as_str(), "GPU-0");
    // The library still gives a handle for the slot, but it is nobody's.
    node.set(|state| state.gpus[0].slots[2] = Some(("MIG-b".into(), false)));
    until(&device, |sample| complete(sample) && ids(sample) == ["GPU-0", "MIG-a", "MIG-c"]);
}

#[test]
fn c42_an_instance_is_read_where_its_parent_may_not_be() {
    let node = Node::with(1);
    node.set(|state| {
        state.gpus[0].slots = vec![Some(("MIG-a".into(), true))];
        state.faults = vec![("nvmlDeviceGetMemoryInfo_v2", None, Fault::NoPermission)];
    });
    let sample = until(&node.start(), complete);
    assert_eq!(gpu(&sample, "GPU-0").memory, Err(Absence::NoPermission));
    assert!(gpu(&sample, "MIG-a").memory.is_ok());
    assert_eq!(cost(&sample, "nvmlDeviceGetMemoryInfo_v2").errors, 1);
}

#[test]
fn c43_an_instance_has_no_utilization_rather_than_zero() {
    let node = Node::with(1);
    node.set(|state| state.gpus[0].slots = vec![Some(("MIG-a".into(), true))]);
    let sample = until(&node.start(), complete);
    let instance = gpu(&sample, "MIG-a");
    assert_eq!(instance.utilization, Err(Absence::NotSupported));
    assert_eq!(instance.process_utilization, Err(Absence::NotSupported));
    assert!(instance.memory.is_ok() && instance.processes.is_ok());
}

#[test]
fn c114_a_failed_figure_is_absent_and_not_idle() {
    let node = Node::with(1);
    node.set(|state| state.faults = vec![("nvmlDeviceGetUtilizationRates", None, Fault::Unknown)]);
    let sample = until(&node.start(), complete);
    assert_eq!(gpu(&sample, "GPU-0").utilization, Err(Absence::Failed));
    assert_eq!(gpu(&sample, "GPU-0").memory_bandwidth_utilization, Err(Absence::Failed));
    assert!(cost(&sample, "nvmlDeviceGetUtilizationRates").errors > 0);
}

#[test]
fn pcie_is_asked_for_only_on_request_and_seldom() {
    let node = Node::with(1);
    let sample = until(&node.start(), complete);
    assert_eq!(gpu(&sample, "GPU-0").pcie_transmit_bytes_per_second, Err(Absence::Disabled));
    let device = node.start_with(|config| config.pcie = true);
    let polls = |sample: &cotenant_model::DeviceSample| cost(sample, "nvmlDeviceGetCount_v2").calls;
    let sample = until(&device, |sample| complete(sample) && polls(sample) >= 13);
    assert_eq!(gpu(&sample, "GPU-0").pcie_receive_bytes_per_second, Ok(7.0 * 1024.0));
    assert!(cost(&sample, "nvmlDeviceGetPcieThroughput").calls <= 2 * (1 + polls(&sample) / 6));
}
