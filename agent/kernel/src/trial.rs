//! Owns small trials of what the agent needs from the kernel: each system call alone, and one probe that really fires.
//! Refuses to say why something was refused: the errors are facts, and the binary has the others.
//!
//! The probe is put on a function of this very program. The calls and layouts are those of `multi.rs`; commands and
//! attach types are stable numbers of `include/uapi/linux/bpf.h`.

use std::{
    ffi::{CString, c_long},
    fs, io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::PathBuf,
};

use aya::{programs::ProgramType, sys::is_helper_supported};
use aya_obj::generated::bpf_func_id;
use perf_event_open_sys::{bindings, perf_event_open};

use crate::multi::{LinkCreate, ProgLoad, bpf};

const MAP_CREATE: c_long = 0;
const MAP_LOOKUP: c_long = 1;
const PROG_LOAD: c_long = 5;
const RAW_TRACEPOINT_OPEN: c_long = 17;
const LINK_CREATE: c_long = 28;
/// Far above every command that there is.
const NO_COMMAND: c_long = 0xFFFF;
const ARRAY: u32 = 2;
const RING_BUFFER: u32 = 27;
const KPROBE: u32 = 2;
const RAW_TRACEPOINT: u32 = 17;
const PERF_EVENT: u32 = 41;
const UPROBE_MULTI: u32 = 48;
const COOKIE: u64 = 0x000C_07E7_A9C7;

/// How a trial went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tried {
    Works,
    /// The error number.
    Refused(i32),
    /// Everything was accepted, and then the probe did not fire.
    Silent,
    /// What it rests on does not work.
    #[default]
    NotTried,
}

/// Every trial, in the order in which one rests on the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trials {
    /// `bpf` reaches the kernel: it knows that there is no such command.
    pub bpf: Tried,
    pub map: Tried,
    pub ring_buffer: Tried,
    pub program: Tried,
    /// `perf_event_open` reaches the kernel.
    pub perf: Tried,
    /// Events of every process on one CPU.
    pub perf_all: Tried,
    /// A uprobe with a cookie, fired once.
    pub uprobe: Tried,
    /// The same by a link of many.
    pub uprobe_multi: Tried,
    pub raw_tracepoint: Tried,
    /// `None` where it could not be asked.
    pub attach_cookie: Option<bool>,
    pub bpf_loop: Option<bool>,
}

/// Tries everything. Takes some milliseconds, and leaves nothing behind.
pub fn trials() -> Trials {
    let mut trials = Trials { bpf: reaches_bpf(), perf: reaches_perf(), ..Trials::default() };
    let map = made(map(ARRAY, 4, 8, 1), &mut trials.map);
    made(map_of_ring(), &mut trials.ring_buffer);
    made(load(KPROBE, 0, &NOTHING), &mut trials.program);
    made(dummy(), &mut trials.perf_all);
    let helper = |id| is_helper_supported(ProgramType::KProbe, id).ok();
    if trials.program == Tried::Works {
        trials.attach_cookie = helper(bpf_func_id::BPF_FUNC_get_attach_cookie);
        trials.bpf_loop = helper(bpf_func_id::BPF_FUNC_loop);
        trials.raw_tracepoint = raw_tracepoint();
    }
    if let (Some(map), Tried::Works, Some(true)) = (map, trials.program, trials.attach_cookie)
        && let Some(target) = Target::own()
    {
        trials.uprobe = fired(&single(&map, &target), &map);
        trials.uprobe_multi = fired(&many(&map, &target), &map);
    }
    trials
}

fn tried<T>(result: &io::Result<T>) -> Tried {
    match result {
        Ok(_) => Tried::Works,
        Err(error) => Tried::Refused(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}

fn made<T>(result: io::Result<T>, outcome: &mut Tried) -> Option<T> {
    *outcome = tried(&result);
    result.ok()
}

/// A call that can only fail works if it fails for the reason that only the kernel itself knows.
fn refused_by_the_kernel<T>(result: &io::Result<T>) -> Tried {
    match tried(result) {
        Tried::Refused(libc::EINVAL) => Tried::Works,
        other => other,
    }
}

fn reaches_bpf() -> Tried {
    refused_by_the_kernel(&bpf(NO_COMMAND, &[0_u64; 4]))
}

fn reaches_perf() -> Tried {
    let mut attributes = bindings::perf_event_attr::default();
    // SAFETY: the attributes are initialised; no such flags exist, so that nothing is opened.
    let opened = descriptor(unsafe { perf_event_open(&raw mut attributes, -1, 0, -1, u64::MAX) });
    refused_by_the_kernel(&opened)
}

fn descriptor(raw: i32) -> io::Result<OwnedFd> {
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor just returned by the kernel, owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// As the agent watches mappings.
fn dummy() -> io::Result<OwnedFd> {
    let mut attributes = attributes(bindings::PERF_TYPE_SOFTWARE);
    attributes.config = u64::from(bindings::PERF_COUNT_SW_DUMMY);
    attributes.set_mmap(1);
    open(&mut attributes)
}

fn attributes(kind: u32) -> bindings::perf_event_attr {
    bindings::perf_event_attr {
        type_: kind,
        size: u32::try_from(size_of::<bindings::perf_event_attr>()).unwrap_or(0),
        ..Default::default()
    }
}

/// Of every process, on the first CPU.
fn open(attributes: &mut bindings::perf_event_attr) -> io::Result<OwnedFd> {
    // SAFETY: the attributes are initialised, and what they point to is alive in the caller.
    descriptor(unsafe {
        perf_event_open(&raw mut *attributes, -1, 0, -1, bindings::PERF_FLAG_FD_CLOEXEC.into())
    })
}

fn map(kind: u32, key: u32, value: u32, entries: u32) -> io::Result<OwnedFd> {
    bpf(MAP_CREATE, &[kind, key, value, entries, 0, 0])
}

fn map_of_ring() -> io::Result<OwnedFd> {
    map(RING_BUFFER, 0, 0, u32::try_from(rustix::param::page_size()).unwrap_or(4096))
}

const fn instruction(code: u8, to: u8, from: u8, offset: i16, value: i32) -> u64 {
    u64::from_le_bytes([
        code,
        from << 4 | to,
        offset.to_le_bytes()[0],
        offset.to_le_bytes()[1],
        value.to_le_bytes()[0],
        value.to_le_bytes()[1],
        value.to_le_bytes()[2],
        value.to_le_bytes()[3],
    ])
}

const RETURN_ZERO: [u64; 2] = [instruction(0xB7, 0, 0, 0, 0), instruction(0x95, 0, 0, 0, 0)];
const NOTHING: [u64; 2] = RETURN_ZERO;

/// Puts the cookie of the probe that fired into the only row of the map.
fn note_cookie(map: &OwnedFd) -> Vec<u64> {
    let mut program = vec![
        instruction(0x85, 0, 0, 0, bpf_func_id::BPF_FUNC_get_attach_cookie as i32),
        instruction(0xBF, 7, 0, 0, 0),
        instruction(0x62, 10, 0, -4, 0),
        instruction(0xBF, 2, 10, 0, 0),
        instruction(0x07, 2, 0, 0, -4),
        instruction(0x18, 1, 1, 0, map.as_raw_fd()),
        0,
        instruction(0x85, 0, 0, 0, bpf_func_id::BPF_FUNC_map_lookup_elem as i32),
        instruction(0x15, 0, 0, 1, 0),
        instruction(0x7B, 0, 7, 0, 0),
    ];
    program.extend(RETURN_ZERO);
    program
}

fn load(kind: u32, attach: u32, instructions: &[u64]) -> io::Result<OwnedFd> {
    let license = c"Dual MIT/GPL";
    bpf(
        PROG_LOAD,
        &ProgLoad {
            prog_type: kind,
            insn_cnt: u32::try_from(instructions.len()).unwrap_or(u32::MAX),
            insns: instructions.as_ptr() as u64,
            license: license.as_ptr() as u64,
            expected_attach_type: attach,
            ..ProgLoad::default()
        },
    )
}

fn raw_tracepoint() -> Tried {
    #[repr(C)]
    struct Open {
        name: u64,
        program: u32,
        pad: u32,
    }
    let opened = load(RAW_TRACEPOINT, 0, &NOTHING).and_then(|program| {
        let name = c"sched_process_exit";
        let program = program.as_raw_fd().cast_unsigned();
        bpf(RAW_TRACEPOINT_OPEN, &Open { name: name.as_ptr() as u64, program, pad: 0 })
    });
    tried(&opened)
}

/// The function that is probed.
#[inline(never)]
extern "C" fn landing(value: u64) -> u64 {
    std::hint::black_box(value).wrapping_add(1)
}

/// Where in which file that function is.
struct Target {
    path: CString,
    offset: u64,
}

impl Target {
    fn own() -> Option<Self> {
        let address = landing as *const () as u64;
        let maps = fs::read_to_string("/proc/self/maps").ok()?;
        let offset = maps.lines().find_map(|line| {
            let mut fields = line.split_whitespace();
            let (start, end) = fields.next()?.split_once('-')?;
            let hex = |text: &str| u64::from_str_radix(text, 16).ok();
            let (start, end, from) = (hex(start)?, hex(end)?, hex(fields.nth(1)?)?);
            (start..end).contains(&address).then(|| address - start + from)
        })?;
        let path: PathBuf = fs::read_link("/proc/self/exe").ok()?;
        Some(Self { path: CString::new(path.as_os_str().as_bytes()).ok()?, offset })
    }
}

/// What holds a probe in place.
type Held = (OwnedFd, Option<OwnedFd>);

fn single(map: &OwnedFd, target: &Target) -> io::Result<Held> {
    let program = load(KPROBE, 0, &note_cookie(map))?;
    let kind = fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?;
    let kind = kind.trim().parse().map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?;
    let mut attributes = attributes(kind);
    attributes.__bindgen_anon_3.config1 = target.path.as_ptr() as u64;
    attributes.__bindgen_anon_4.config2 = target.offset;
    let event = open(&mut attributes)?;
    let link = LinkCreate {
        prog_fd: program.as_raw_fd().cast_unsigned(),
        target_fd: event.as_raw_fd().cast_unsigned(),
        attach_type: PERF_EVENT,
        // `perf_event.bpf_cookie` is where `uprobe_multi.path` is.
        path: COOKIE,
        ..LinkCreate::default()
    };
    Ok((bpf(LINK_CREATE, &link)?, Some(event)))
}

fn many(map: &OwnedFd, target: &Target) -> io::Result<Held> {
    let program = load(KPROBE, UPROBE_MULTI, &note_cookie(map))?;
    let (offsets, cookies) = ([target.offset], [COOKIE]);
    let link = LinkCreate {
        prog_fd: program.as_raw_fd().cast_unsigned(),
        attach_type: UPROBE_MULTI,
        path: target.path.as_ptr() as u64,
        offsets: offsets.as_ptr() as u64,
        cookies: cookies.as_ptr() as u64,
        count: 1,
        ..LinkCreate::default()
    };
    Ok((bpf(LINK_CREATE, &link)?, None))
}

/// Calls the probed function, and looks whether the program has seen it.
fn fired(held: &io::Result<Held>, map: &OwnedFd) -> Tried {
    let outcome = tried(held);
    if outcome != Tried::Works {
        return outcome;
    }
    if set(map, 0).is_err() {
        return Tried::Silent;
    }
    std::hint::black_box(landing(std::hint::black_box(1)));
    if row(map).is_ok_and(|seen| seen == COOKIE) { Tried::Works } else { Tried::Silent }
}

#[repr(C)]
struct Element {
    map: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

fn element(command: c_long, map: &OwnedFd, value: &mut u64) -> io::Result<()> {
    let key = 0_u32;
    let element = Element {
        map: map.as_raw_fd().cast_unsigned(),
        pad: 0,
        key: &raw const key as u64,
        value: &raw mut *value as u64,
        flags: 0,
    };
    // SAFETY: the element points to a key and a value of this map's sizes, both alive here.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw const element, size_of::<Element>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn row(map: &OwnedFd) -> io::Result<u64> {
    let mut value = 0;
    element(MAP_LOOKUP, map, &mut value).map(|()| value)
}

fn set(map: &OwnedFd, mut value: u64) -> io::Result<()> {
    const MAP_UPDATE: c_long = 2;
    element(MAP_UPDATE, map, &mut value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c72_the_running_kernel_takes_every_trial_and_the_probe_fires() {
        assert!(rustix::process::geteuid().is_root(), "run as root: trials need CAP_BPF and CAP_PERFMON");
        let trials = trials();
        let all = [
            trials.bpf,
            trials.map,
            trials.ring_buffer,
            trials.program,
            trials.perf,
            trials.perf_all,
            trials.uprobe,
            trials.raw_tracepoint,
        ];
        assert!(all.iter().all(|tried| *tried == Tried::Works), "{trials:?}");
        assert_eq!(trials.attach_cookie, Some(true));
    }

    #[test]
    fn a_refusal_for_want_of_a_command_is_the_kernels_own() {
        let refused = |errno| Err::<(), _>(io::Error::from_raw_os_error(errno));
        assert_eq!(refused_by_the_kernel(&refused(libc::EINVAL)), Tried::Works);
        assert_eq!(refused_by_the_kernel(&refused(libc::EPERM)), Tried::Refused(libc::EPERM));
        assert_eq!(refused_by_the_kernel(&refused(libc::ENOSYS)), Tried::Refused(libc::ENOSYS));
    }
}
