//! Owns the proof that the simulated NVML answers, and fails, as `nvml.json` says; through its own symbols.
//! Refuses a GPU, and the agent: both have their own tests.

#![allow(clippy::unwrap_used, reason = "a test that unwraps fails at the right line")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cotenant_sim_state::{NODE_VARIABLE, Node, NodeConfig, PAGE};
use serde_json::{Value, json};

type Handle = *mut c_void;
type GetHandle = unsafe extern "C" fn(u32, *mut Handle) -> u32;
type GetText = unsafe extern "C" fn(Handle, *mut c_char, u32) -> u32;
type GetWords = unsafe extern "C" fn(Handle, *mut u64) -> u32;
type GetNumber = unsafe extern "C" fn(Handle, *mut u32) -> u32;
type GetList = unsafe extern "C" fn(Handle, *mut u32, *mut u64) -> u32;
type GetMig = unsafe extern "C" fn(Handle, u32, *mut Handle) -> u32;

const GONE: u64 = u64::MAX;

/// The library with its node. One at a time: the library has one node a process.
struct Bench {
    library: usize,
    node: Node,
    slot: usize,
    directory: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

fn library() -> usize {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        let exe = std::env::current_exe().unwrap();
        let path: PathBuf = exe.parent().unwrap().join("libcotenant_sim_nvml.so");
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a library without constructors of its own.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "{}", path.display());
        library.addr()
    })
}

impl Bench {
    fn new() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = tempfile::tempdir().unwrap();
        let node = Node::create(directory.path(), &NodeConfig::h200(2, 0.0)).unwrap();
        let slot = node.join().unwrap();
        assert!(node.open_context(slot, 0) && node.take(slot, 0, PAGE));
        // SAFETY: only this test binary's threads with the turn read or write the environment.
        unsafe { std::env::set_var(NODE_VARIABLE, directory.path()) };
        let bench = Self { library: library(), node, slot, directory, _turn: turn };
        assert_eq!(bench.plain(c"nvmlInit_v2"), 0);
        bench
    }

    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: a handle of `dlopen`, and a C string.
        let symbol = unsafe { libc::dlsym(std::ptr::without_provenance_mut(self.library), name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }

    fn wants(&self, faults: &Value) {
        // Renamed into place: never half written.
        let new = self.directory.path().join("new");
        std::fs::write(&new, faults.to_string()).unwrap();
        std::fs::rename(new, self.directory.path().join("nvml.json")).unwrap();
    }

    fn plain(&self, name: &CStr) -> u32 {
        let function = self.symbol(name).unwrap();
        // SAFETY: nvml.h: takes nothing and returns a code.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u32>(function)() }
    }

    fn gpu(&self, index: u32) -> Result<Handle, u32> {
        let function = self.symbol(c"nvmlDeviceGetHandleByIndex_v2").unwrap();
        let mut handle = std::ptr::null_mut();
        // SAFETY: nvml.h: as the type says.
        let code = unsafe { std::mem::transmute::<*mut c_void, GetHandle>(function)(index, &raw mut handle) };
        if code == 0 { Ok(handle) } else { Err(code) }
    }

    fn text(&self, name: &CStr, device: Handle) -> Result<String, u32> {
        let function = self.symbol(name).unwrap();
        let mut text = [0; 96];
        // SAFETY: nvml.h: as the type says.
        let code =
            unsafe { std::mem::transmute::<*mut c_void, GetText>(function)(device, text.as_mut_ptr(), 96) };
        // SAFETY: zero-filled and longer than what was written.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        if code == 0 { Ok(text.to_str().unwrap().to_owned()) } else { Err(code) }
    }

    /// A struct of 64-bit words, of which the first may be set before.
    fn words<const N: usize>(&self, name: &CStr, device: Handle, first: u64) -> Result<[u64; N], u32> {
        let function = self.symbol(name).unwrap();
        let mut words = [0; N];
        words[0] = first;
        // SAFETY: nvml.h: a struct of N words, as each test says.
        let code =
            unsafe { std::mem::transmute::<*mut c_void, GetWords>(function)(device, words.as_mut_ptr()) };
        if code == 0 { Ok(words) } else { Err(code) }
    }

    fn number(&self, name: &CStr, device: Handle) -> Result<u32, u32> {
        let function = self.symbol(name).unwrap();
        let mut number = 0;
        // SAFETY: nvml.h: as the type says.
        let code =
            unsafe { std::mem::transmute::<*mut c_void, GetNumber>(function)(device, &raw mut number) };
        if code == 0 { Ok(number) } else { Err(code) }
    }

    /// Code, count and the words written.
    fn list(&self, name: &CStr, device: Handle, room: u32) -> (u32, u32, Vec<u64>) {
        let function = self.symbol(name).unwrap();
        let (mut count, mut words) = (room, vec![0; room as usize * 4]);
        // SAFETY: nvml.h; a row has four words at most.
        let code = unsafe {
            std::mem::transmute::<*mut c_void, GetList>(function)(device, &raw mut count, words.as_mut_ptr())
        };
        (code, count, words)
    }

    fn mig(&self, device: Handle, slot: u32) -> Result<Handle, u32> {
        let function = self.symbol(c"nvmlDeviceGetMigDeviceHandleByIndex").unwrap();
        let mut handle = std::ptr::null_mut();
        // SAFETY: nvml.h: as the type says.
        let code =
            unsafe { std::mem::transmute::<*mut c_void, GetMig>(function)(device, slot, &raw mut handle) };
        if code == 0 { Ok(handle) } else { Err(code) }
    }

    #[cfg(not(feature = "old"))]
    fn mine(&self) -> (u64, u64) {
        let mine = self.node.processes().into_iter().find(|process| process.pid == std::process::id());
        (u64::from(std::process::id()), mine.unwrap().bytes[0])
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.wants(&json!({}));
        self.node.close_context(self.slot, 0);
        while self.plain(c"nvmlShutdown") == 0 {}
    }
}

#[test]
fn without_a_node_there_is_no_driver() {
    let bench = Bench::new();
    assert_eq!(bench.plain(c"nvmlShutdown"), 0);
    assert_eq!(bench.gpu(0), Err(1));
    // SAFETY: as in `Bench::new`.
    unsafe { std::env::remove_var(NODE_VARIABLE) };
    assert_eq!(bench.plain(c"nvmlInit_v2"), 9);
}

#[test]
fn devices_are_named_as_simulated_and_found_again() {
    let bench = Bench::new();
    assert_eq!(bench.gpu(2), Err(2));
    let gpu = bench.gpu(1).unwrap();
    let uuid = bench.node.uuid(1).iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    assert_eq!(bench.text(c"nvmlDeviceGetUUID", gpu).unwrap().replace('-', ""), format!("GPU{uuid}"));
    assert!(bench.text(c"nvmlDeviceGetName", gpu).unwrap().contains("SIMULATED"));
    assert_eq!(bench.number(c"nvmlDeviceGetIndex", gpu), Ok(1));
    assert_eq!(bench.number(c"nvmlDeviceGetIndex", std::ptr::null_mut()), Err(2));
}

#[test]
fn c35_v1_counts_what_is_reserved_as_used() {
    let bench = Bench::new();
    bench.wants(&json!({"extra_unattributed": {"0": 4096}}));
    let gpu = bench.gpu(0).unwrap();
    let (capacity, reserved, used) = bench.node.memory(0);
    let used = used + 4096;
    let v1 = bench.words(c"nvmlDeviceGetMemoryInfo", gpu, 0);
    assert_eq!(v1, Ok([capacity, capacity - reserved - used, reserved + used]));
}

#[cfg(not(feature = "old"))]
#[test]
fn c35_v2_wants_its_version_and_leaves_the_reserved_out() {
    let bench = Bench::new();
    let gpu = bench.gpu(0).unwrap();
    for version in [0, 0x0100_0028, 0x0200_0020] {
        assert_eq!(bench.words::<5>(c"nvmlDeviceGetMemoryInfo_v2", gpu, version), Err(25));
    }
    let (capacity, reserved, used) = bench.node.memory(0);
    assert!(used > 0);
    let v2 = bench.words(c"nvmlDeviceGetMemoryInfo_v2", gpu, 0x0200_0028);
    assert_eq!(v2, Ok([0x0200_0028, capacity, reserved, capacity - reserved - used, used]));
}

#[cfg(not(feature = "old"))]
#[test]
fn c32_rows_have_the_width_of_their_symbol_or_of_the_file() {
    let bench = Bench::new();
    let gpu = bench.gpu(0).unwrap();
    let (pid, bytes) = bench.mine();
    let extra = json!([{"gpu": 0, "pid": 11, "bytes": 5, "list": "compute"}]);
    let (v1, v2, v3) = (
        c"nvmlDeviceGetComputeRunningProcesses",
        c"nvmlDeviceGetComputeRunningProcesses_v2",
        c"nvmlDeviceGetComputeRunningProcesses_v3",
    );
    for (name, stride, width) in [(v1, 32, 2), (v2, 32, 3), (v3, 24, 3), (v3, 32, 4), (v3, 16, 2)] {
        bench.wants(&json!({"stride": stride, "rows": extra}));
        let (code, count, words) = bench.list(name, gpu, 8);
        assert_eq!((code, count), (0, 2));
        assert_eq!((words[0], words[1]), (pid, bytes), "{name:?}");
        assert_eq!((words[width], words[width + 1]), (11, 5), "{name:?}");
        assert!(words[2 * width..].iter().all(|word| *word == 0), "{name:?} writes beyond its rows");
    }
}

#[test]
fn c33_lists_say_how_many_there_are_and_grow_once() {
    let bench = Bench::new();
    let gpu = bench.gpu(0).unwrap();
    let name = c"nvmlDeviceGetComputeRunningProcesses_v2";
    assert_eq!(bench.list(name, gpu, 0).0, 7);
    bench.wants(&json!({"grow": true}));
    for _ in 0..2 {
        assert_eq!(bench.list(name, gpu, 0), (7, 1, vec![]));
        assert_eq!(bench.list(name, gpu, 1).0, 7);
        assert_eq!(bench.list(name, gpu, 2).0, 0);
        assert_eq!(bench.list(name, gpu, 2).0, 0);
    }
    let other = bench.gpu(1).unwrap();
    bench.wants(&json!({}));
    assert_eq!(bench.list(name, other, 0), (0, 0, vec![]));
}

#[test]
fn c38_unknown_bytes_are_all_ones_and_lists_are_apart() {
    let bench = Bench::new();
    let gpu = bench.gpu(0).unwrap();
    let row = json!({"gpu": 0, "pid": 12, "bytes": null, "list": "mps"});
    bench.wants(&json!({"not_available": [std::process::id()], "rows": [row]}));
    let (_, count, words) = bench.list(c"nvmlDeviceGetComputeRunningProcesses_v2", gpu, 4);
    assert_eq!((count, words[1]), (1, GONE));
    let (_, count, words) = bench.list(c"nvmlDeviceGetMPSComputeRunningProcesses_v2", gpu, 4);
    assert_eq!((count, words[0], words[1]), (1, 12, GONE));
    assert_eq!(bench.list(c"nvmlDeviceGetGraphicsRunningProcesses_v2", gpu, 4).1, 0);
}

#[test]
fn faults_strike_where_they_should_and_end_with_the_file() {
    let bench = Bench::new();
    let (gpu, other) = (bench.gpu(0).unwrap(), bench.gpu(1).unwrap());
    bench.wants(&json!({"lost": [0]}));
    assert_eq!(bench.gpu(0), Err(15));
    assert_eq!(bench.number(c"nvmlDeviceGetPowerUsage", gpu), Err(15));
    assert_eq!(bench.number(c"nvmlDeviceGetPowerUsage", other), Ok(75_000));
    bench.wants(&json!({"calls": {"nvmlDeviceGetPowerUsage": {"return": 3, "gpu": 1}}}));
    assert_eq!(bench.number(c"nvmlDeviceGetPowerUsage", gpu), Ok(75_000));
    assert_eq!(bench.number(c"nvmlDeviceGetPowerUsage", other), Err(3));
    bench.wants(&json!({"version_mismatch": true}));
    assert_eq!(bench.plain(c"nvmlInit_v2"), 18);
    bench.wants(&json!({"no_permission": true}));
    assert_eq!((bench.plain(c"nvmlInit_v2"), bench.gpu(0)), (4, Err(4)));
    bench.wants(&json!({"no_such_fault": true}));
    assert_eq!(bench.gpu(0), Err(999));
    bench.wants(&json!({}));
    assert_eq!(bench.gpu(0), Ok(gpu));
}

#[test]
fn c46_a_call_hangs_and_others_do_not() {
    let bench = Bench::new();
    let gpu = bench.gpu(0).unwrap();
    bench.wants(&json!({"calls": {"nvmlDeviceGetPowerUsage": {"hang_ms": 300}}}));
    let start = Instant::now();
    assert_eq!(bench.number(c"nvmlDeviceGetIndex", gpu), Ok(0));
    assert!(start.elapsed() < Duration::from_millis(200));
    assert_eq!(bench.number(c"nvmlDeviceGetPowerUsage", gpu), Ok(75_000));
    assert!(start.elapsed() >= Duration::from_millis(300));
}

#[test]
fn c41_c42_mig_devices_come_and_go() {
    let bench = Bench::new();
    let gpu = bench.gpu(0).unwrap();
    assert_eq!(bench.number(c"nvmlDeviceGetMaxMigDeviceCount", gpu), Ok(0));
    let slot = |gi: u32| json!({"uuid": format!("MIG-{gi}"), "bytes": 1 << 30, "gi": gi, "ci": 0});
    let all = json!({"0": {"max": 7, "slots": {"0": slot(1), "2": slot(3)}}});
    let refuse = json!({"nvmlDeviceGetMemoryInfo": {"return": 4, "on": "gpu"}});
    bench.wants(&json!({"mig": all, "calls": refuse}));
    assert_eq!(bench.number(c"nvmlDeviceGetMaxMigDeviceCount", gpu), Ok(7));
    assert_eq!((bench.mig(gpu, 1), bench.mig(gpu, 7)), (Err(6), Err(2)));
    let device = bench.mig(gpu, 2).unwrap();
    assert_eq!(bench.text(c"nvmlDeviceGetUUID", device).unwrap(), "MIG-3");
    assert_eq!(bench.number(c"nvmlDeviceGetGpuInstanceId", device), Ok(3));
    assert_eq!(bench.words(c"nvmlDeviceGetMemoryInfo", device, 0), Ok([1 << 30, 1 << 30, 0]));
    assert_eq!(bench.words::<3>(c"nvmlDeviceGetMemoryInfo", gpu, 0), Err(4));
    assert_eq!(bench.words::<1>(c"nvmlDeviceGetUtilizationRates", device, 0), Err(3));
    bench.wants(&json!({"mig": {"0": {"max": 7, "slots": {"0": slot(1)}}}}));
    assert_eq!(bench.number(c"nvmlDeviceGetGpuInstanceId", device), Err(2));
}

#[test]
fn a_470_library_lacks_what_came_later() {
    let bench = Bench::new();
    let later = [
        c"nvmlDeviceGetMemoryInfo_v2",
        c"nvmlDeviceGetComputeRunningProcesses_v3",
        c"nvmlDeviceGetGraphicsRunningProcesses_v3",
        c"nvmlDeviceGetMPSComputeRunningProcesses_v3",
        c"nvmlDeviceGetCurrentClocksEventReasons",
    ];
    for name in later {
        assert_eq!(bench.symbol(name).is_some(), cfg!(not(feature = "old")), "{name:?}");
    }
    assert!(bench.symbol(c"nvmlDeviceGetPciInfo_v3").is_some());
}
