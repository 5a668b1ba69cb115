//! Stacks as recorded on an H200 host (driver 580.159.04, Linux 6.18), innermost first, and some that nobody should have.

use super::*;

const IOCTL: [&str; 8] = [
    "rm_ioctl",
    "nvidia_unlocked_ioctl",
    "__x64_sys_ioctl",
    "x64_sys_call",
    "do_syscall_64",
    "entry_SYSCALL_64_after_hwframe",
    "",
    "0x7f00",
];

/// `inner`, below the way into the driver that all of them have.
fn class(inner: &[&str]) -> WaitClass {
    let stack: Vec<&str> = inner.iter().chain(&IOCTL).copied().collect();
    Classes::default().class(&stack)
}

#[test]
fn every_row_of_the_table_is_used() {
    assert_eq!(Classes::default().rules.len(), TABLE.len());
    for (at, (pattern, expected)) in TABLE.iter().enumerate() {
        let symbol = pattern.replace('*', "x");
        let first =
            TABLE.iter().position(|(row, _)| Pattern::parse(row).is_some_and(|row| row.matches(&symbol)));
        assert_eq!(first, Some(at), "{pattern} can never decide: an earlier row takes {symbol}");
        assert_eq!(Classes::default().class(&[&symbol]), *expected, "{pattern}");
    }
}

#[test]
fn c108_the_api_lock_is_told_from_the_gpu_lock() {
    let sleep = ["__schedule", "schedule", "schedule_preempt_disabled"];
    let api = ["rwsem_down_write_slowpath", "down_write", "os_acquire_rwlock_write", "rmapiLockAcquire"];
    let gpu =
        ["__down_common", "__down", "down", "os_acquire_mutex", "_rmGpuLocksAcquire", "rmGpuLocksAcquire"];
    assert_eq!(class(&[&sleep[..], &api, &["serverTopLock_Prologue"]].concat()), WaitClass::RmApiLock);
    assert_eq!(class(&[&sleep[..], &gpu, &["serverResLock_Prologue"]].concat()), WaitClass::GpuLock);
    // The same sleep, from a lock that is neither.
    let neither = ["__down_common", "down", "os_acquire_mutex", "gpumgrGetGpuLockAndDrPorts"];
    assert_eq!(class(&[&sleep[..], &neither].concat()), WaitClass::Device);
    let neither = ["down_write", "os_acquire_rwlock_write", "memoryexportConstruct_IMPL"];
    assert_eq!(class(&neither), WaitClass::Device);
}

#[test]
fn scrubbing_is_reclaim_also_while_its_mutex_is_waited_for() {
    let scrub =
        ["schedule", "os_schedule", "_scrubWaitAndSave", "scrubCheckAndWaitForSize", "pmaAllocatePages"];
    assert_eq!(class(&scrub), WaitClass::Reclaim);
    assert_eq!(
        class(&["down", "os_acquire_mutex", "pmaAllocatePages", "vidmemPmaAllocate"]),
        WaitClass::Reclaim
    );
}

#[test]
fn an_eviction_below_the_allocator_is_an_eviction() {
    let eviction = [
        "schedule",
        "uvm_tracker_wait",
        "uvm_va_block_evict_chunks",
        "evict_root_chunk_from_va_block",
        "uvm_pmm_gpu_pma_evict_pages",
        "uvm_pmm_gpu_pma_evict_pages_wrapper_entry",
        "_pmaEvictPages",
        "pmaAllocatePages",
    ];
    assert_eq!(class(&eviction), WaitClass::UvmEviction);
    assert_eq!(
        class(&["down_read", "os_acquire_rwlock_read", "_pmaEvictContiguous", "pmaAllocatePages"]),
        WaitClass::UvmEviction
    );
    // Which has to scrub what it frees.
    let scrub = [&["_scrubWaitAndSave", "scrubCheckAndWaitForSize"], &eviction[2..]].concat();
    assert_eq!(class(&scrub), WaitClass::Reclaim);
}

#[test]
fn c109_a_futex_is_the_user_space_drivers_lock() {
    let futex = [
        "__schedule",
        "schedule",
        "futex_do_wait",
        "__futex_wait",
        "futex_wait",
        "do_futex",
        "__x64_sys_futex",
        "do_syscall_64",
    ];
    assert_eq!(Classes::default().class(&futex), WaitClass::UserspaceLock);
    // Linux 5.15 and 6.1 sleep in functions that newer ones renamed.
    assert_eq!(
        Classes::default().class(&["schedule", "futex_wait_queue_me", "futex_wait"]),
        WaitClass::UserspaceLock
    );
    // File locks, recorded on Linux 6.18.
    let flock = ["schedule", "locks_lock_inode_wait", "__do_sys_flock", "do_syscall_64"];
    assert_eq!(Classes::default().class(&flock), WaitClass::UserspaceLock);
    let record = ["schedule", "fcntl_setlk", "do_fcntl", "__x64_sys_fcntl", "do_syscall_64"];
    assert_eq!(Classes::default().class(&record), WaitClass::UserspaceLock);
    let pipe = ["schedule", "anon_pipe_read", "vfs_read", "ksys_read", "do_syscall_64"];
    assert_eq!(Classes::default().class(&pipe), WaitClass::Other);
}

#[test]
fn what_is_only_in_the_driver_is_device() {
    assert_eq!(class(&["schedule_timeout", "__wait_for_common"]), WaitClass::Device);
    assert_eq!(Classes::default().class(&["schedule", "_nv012345rm", "_nv000001rm"]), WaitClass::Device);
    assert_eq!(
        Classes::default().class(&["schedule", "uvm_unlocked_ioctl_entry", "__x64_sys_ioctl"]),
        WaitClass::Device
    );
}

#[test]
fn nothing_known_is_other() {
    let classes = Classes::default();
    assert_eq!(classes.class(&[]), WaitClass::Other);
    assert_eq!(
        classes.class(&["", "*", "schedule", "rmap_walk", "futex", "scrub", "_nv", "nv"]),
        WaitClass::Other
    );
    // No prefix is enough by itself to claim a kernel symbol that only looks like it.
    assert_eq!(classes.class(&["nvme_wait_freeze", "osnoise_main", "uvmlock", "rmdir"]), WaitClass::Other);
}

#[test]
fn the_deepest_stack_is_read_to_its_end() {
    let mut deep = vec!["do_nanosleep"; 126];
    deep.push("rmapiLockAcquire");
    assert_eq!(deep.len(), 127);
    assert_eq!(Classes::default().class(&deep), WaitClass::RmApiLock);
    let long = "x".repeat(100_000);
    assert_eq!(Classes::default().class(&[long.as_str(); 127]), WaitClass::Other);
}

#[test]
fn configured_symbols_come_first() {
    let classes = Classes::new([
        ("sim_gpu_lock", WaitClass::GpuLock),
        ("sim_*", WaitClass::RmApiLock),
        ("pmaAllocatePages", WaitClass::Other),
    ])
    .unwrap();
    assert_eq!(classes.class(&["schedule", "sim_gpu_lock", "sim_call"]), WaitClass::GpuLock);
    assert_eq!(classes.class(&["futex_wait", "sim_call"]), WaitClass::RmApiLock);
    assert_eq!(classes.class(&["_scrubWaitAndSave", "pmaAllocatePages"]), WaitClass::Other);
    assert_eq!(classes.class(&["_scrubWaitAndSave", "pmaAllocatePagesBroadcast"]), WaitClass::Reclaim);
}

#[test]
fn patterns_that_would_claim_everything_are_refused() {
    for pattern in ["", "*", "a*", "ab*", "*ab", "a*b*c", "with space", "tab\t", &"x".repeat(512)] {
        let error = Classes::new([(pattern, WaitClass::Device)]).map(|_| ()).unwrap_err();
        assert_eq!(error.pattern, pattern);
    }
    assert!(Classes::new([("x", WaitClass::Device), ("ab*c", WaitClass::Device)]).is_ok());
}
