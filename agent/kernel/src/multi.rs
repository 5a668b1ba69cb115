//! Owns uprobes by the dozen: one link holds every symbol of a library that one program serves (Linux 6.6).
//! Refuses older kernels: there each symbol has a link of its own, and closing one takes about 100 ms.
//!
//! aya 0.14 has no such link, so the two system calls are made here; parsing and relocation stay aya's.
//! Layout: `union bpf_attr` of Linux 6.6, `BPF_PROG_LOAD` and `BPF_LINK_CREATE` (`uprobe_multi`).

use std::{
    collections::{BTreeMap, HashSet},
    ffi::{CString, c_long},
    io,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya::maps::{Map, MapData};

use crate::KernelError;

const PROG_LOAD: c_long = 5;
const BTF_LOAD: c_long = 18;
const LINK_CREATE: c_long = 28;
const TYPE_KPROBE: u32 = 2;
const TRACE_UPROBE_MULTI: u32 = 48;
const FLAG_RETURN: u32 = 1;

#[repr(C)]
#[derive(Default)]
pub(crate) struct ProgLoad {
    pub(crate) prog_type: u32,
    pub(crate) insn_cnt: u32,
    pub(crate) insns: u64,
    pub(crate) license: u64,
    pub(crate) log_level: u32,
    pub(crate) log_size: u32,
    pub(crate) log_buf: u64,
    pub(crate) kern_version: u32,
    pub(crate) prog_flags: u32,
    pub(crate) prog_name: [u8; 16],
    pub(crate) prog_ifindex: u32,
    pub(crate) expected_attach_type: u32,
    pub(crate) prog_btf_fd: u32,
    pub(crate) func_info_rec_size: u32,
    pub(crate) func_info: u64,
    pub(crate) func_info_cnt: u32,
    pub(crate) pad: u32,
}

#[repr(C)]
#[derive(Default)]
struct BtfLoad {
    btf: u64,
    log_buf: u64,
    size: u32,
    log_size: u32,
    log_level: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct LinkCreate {
    pub(crate) prog_fd: u32,
    pub(crate) target_fd: u32,
    pub(crate) attach_type: u32,
    pub(crate) flags: u32,
    pub(crate) path: u64,
    pub(crate) offsets: u64,
    pub(crate) ref_ctr_offsets: u64,
    pub(crate) cookies: u64,
    pub(crate) count: u32,
    pub(crate) multi_flags: u32,
    pub(crate) pid: u32,
    pub(crate) pad: u32,
}

/// A system call that gives a descriptor or an error.
pub(crate) fn bpf<T>(command: c_long, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the attributes are plain integers in the layout of `command`; what they point to is alive in the caller.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    let fd = RawFd::try_from(result).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: a descriptor just made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The uprobe programs, loaded for links of many symbols.
pub(crate) struct Multi(BTreeMap<&'static str, OwnedFd>);

/// Places of one program in one library: file offsets and their cookies, in step.
#[derive(Default)]
pub(crate) struct Places {
    pub(crate) offsets: Vec<u64>,
    pub(crate) cookies: Vec<u64>,
}

fn data(map: &Map) -> Option<&MapData> {
    match map {
        Map::Array(data)
        | Map::HashMap(data)
        | Map::PerCpuArray(data)
        | Map::RingBuf(data)
        | Map::StackTraceMap(data)
        | Map::LruHashMap(data) => Some(data),
        _ => None,
    }
}

impl Multi {
    /// Loads `names` from the object, over the maps that `ebpf` has made.
    pub(crate) fn load(object: &[u8], ebpf: &aya::Ebpf, names: &[&'static str]) -> Result<Self, KernelError> {
        let broken =
            |reason: String| KernelError::Multi { step: "relocate", source: io::Error::other(reason) };
        let mut parsed = aya_obj::Object::parse(object).map_err(|error| broken(error.to_string()))?;
        let features = aya::features()
            .btf()
            .ok_or_else(|| broken("this kernel takes no type information".to_owned()))?;
        // The callback of `bpf_loop` is only taken with its type.
        let types = parsed
            .fixup_and_sanitize_btf(features)
            .map_err(|error| broken(error.to_string()))?
            .map(aya_obj::btf::Btf::to_bytes)
            .unwrap_or_default();
        let types = bpf(
            BTF_LOAD,
            &BtfLoad {
                btf: types.as_ptr() as u64,
                size: u32::try_from(types.len()).unwrap_or(u32::MAX),
                ..BtfLoad::default()
            },
        )
        .map_err(|source| KernelError::Multi { step: "load types", source })?;
        let text: HashSet<usize> = parsed.functions.keys().map(|(section, _)| *section).collect();
        let declared: Vec<(String, aya_obj::Map)> =
            parsed.maps.iter().map(|(name, map)| (name.clone(), map.clone())).collect();
        let maps = declared.iter().filter_map(|(name, map)| {
            let made = data(ebpf.map(name)?)?;
            Some((name.as_str(), made.fd().as_fd().as_raw_fd(), map))
        });
        parsed.relocate_maps(maps, &text).map_err(|error| broken(error.to_string()))?;
        parsed.relocate_calls(&text).map_err(|error| broken(error.to_string()))?;
        let mut programs = BTreeMap::new();
        for name in names {
            let program = parsed.programs.get(*name).ok_or(KernelError::NoProgram { name })?;
            let function =
                parsed.functions.get(&program.function_key()).ok_or(KernelError::NoProgram { name })?;
            let infos = &function.func_info.func_info;
            let mut prog_name = [0; 16];
            for (to, from) in prog_name.iter_mut().take(15).zip(name.bytes()) {
                *to = from;
            }
            let attributes = ProgLoad {
                prog_type: TYPE_KPROBE,
                insn_cnt: u32::try_from(function.instructions.len()).unwrap_or(u32::MAX),
                insns: function.instructions.as_ptr() as u64,
                license: program.license.as_ptr() as u64,
                prog_name,
                expected_attach_type: TRACE_UPROBE_MULTI,
                prog_btf_fd: types.as_raw_fd().cast_unsigned(),
                func_info_rec_size: u32::try_from(function.func_info_rec_size).unwrap_or(0),
                func_info: infos.as_ptr() as u64,
                func_info_cnt: u32::try_from(infos.len()).unwrap_or(0),
                ..ProgLoad::default()
            };
            let loaded =
                bpf(PROG_LOAD, &attributes).map_err(|source| KernelError::Multi { step: "load", source })?;
            programs.insert(*name, loaded);
        }
        Ok(Self(programs))
    }

    /// One link over all the places; closing it detaches them.
    pub(crate) fn attach(
        &self,
        name: &'static str,
        path: &Path,
        places: &Places,
    ) -> Result<OwnedFd, KernelError> {
        let program = self.0.get(name).ok_or(KernelError::NoProgram { name })?;
        let failed = |source| KernelError::Multi { step: "attach", source };
        let path = CString::new(path.as_os_str().as_bytes()).map_err(|error| failed(error.into()))?;
        let attributes = LinkCreate {
            prog_fd: program.as_raw_fd().cast_unsigned(),
            attach_type: TRACE_UPROBE_MULTI,
            path: path.as_ptr() as u64,
            offsets: places.offsets.as_ptr() as u64,
            cookies: places.cookies.as_ptr() as u64,
            count: u32::try_from(places.offsets.len()).unwrap_or(u32::MAX),
            multi_flags: if name.ends_with("_return") { FLAG_RETURN } else { 0 },
            ..LinkCreate::default()
        };
        bpf(LINK_CREATE, &attributes).map_err(failed)
    }
}
