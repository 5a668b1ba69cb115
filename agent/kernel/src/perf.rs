//! Owns the kernel's own announcement of executable mappings (`PERF_RECORD_MMAP2`), one ring a CPU.
//! Refuses eBPF for it: no system call gets slower, and processes that never map a library cost one record each.
//!
//! Layout: `perf_event_open(2)`, `PERF_RECORD_MMAP2` {header, pid, tid, addr, len, pgoff, maj, min, ino,
//! `ino_generation`, prot, flags, filename}; stable since Linux 3.16. Without `sample_id_all` nothing follows.

use std::{
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering},
};

use perf_event_open_sys::{bindings, perf_event_open};

use crate::KernelError;

/// Data pages of one ring: 64 KiB hold about 500 mappings between two reads.
const DATA_PAGES: usize = 16;
const MMAP2: u32 = 10;
const LOST: u32 = 2;
const HEADER: usize = 8;
const FILENAME: usize = 72;

/// An executable mapping, as the kernel announced it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapped {
    pub pid: u32,
    pub start: u64,
    pub end: u64,
    /// As seen from the process's own root.
    pub path: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Mapped(Mapped),
    /// The ring was full: a look at every process is due.
    Lost(u64),
    Other,
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// Reads one record, header included.
pub(crate) fn decode(record: &[u8]) -> Option<Record> {
    let kind = u32::from_ne_bytes(word(record, 0)?);
    match kind {
        MMAP2 => {
            let start = u64::from_ne_bytes(word(record, 16)?);
            let length = u64::from_ne_bytes(word(record, 24)?);
            let name = record.get(FILENAME..)?;
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            Some(Record::Mapped(Mapped {
                pid: u32::from_ne_bytes(word(record, HEADER)?),
                start,
                end: start.checked_add(length)?,
                path: String::from_utf8_lossy(name).into_owned(),
            }))
        }
        LOST => Some(Record::Lost(u64::from_ne_bytes(word(record, 16)?))),
        _ => Some(Record::Other),
    }
}

/// One CPU's ring.
#[derive(Debug)]
pub(crate) struct Ring {
    event: OwnedFd,
    base: *mut u8,
    length: usize,
    page: usize,
}

// SAFETY: the mapping belongs to this value alone and is only touched through `&mut self`.
unsafe impl Send for Ring {}

impl Ring {
    pub(crate) fn open(cpu: u32) -> Result<Self, KernelError> {
        let failed = |source| KernelError::Perf { cpu, source };
        let mut attributes = bindings::perf_event_attr {
            type_: bindings::PERF_TYPE_SOFTWARE,
            size: u32::try_from(size_of::<bindings::perf_event_attr>()).unwrap_or(0),
            config: u64::from(bindings::PERF_COUNT_SW_DUMMY),
            ..Default::default()
        };
        attributes.set_mmap(1);
        attributes.set_mmap2(1);
        attributes.set_watermark(1);
        attributes.__bindgen_anon_2.wakeup_watermark = 1;
        let cpu_index = i32::try_from(cpu).map_err(|_| failed(std::io::ErrorKind::InvalidInput.into()))?;
        // SAFETY: the attributes are initialised; a dummy event measures nothing.
        let raw = unsafe {
            perf_event_open(&raw mut attributes, -1, cpu_index, -1, bindings::PERF_FLAG_FD_CLOEXEC.into())
        };
        if raw < 0 {
            return Err(failed(std::io::Error::last_os_error()));
        }
        // SAFETY: a descriptor just returned by the kernel, owned by nobody else.
        let event = unsafe { OwnedFd::from_raw_fd(raw) };
        let page = rustix::param::page_size();
        let length = (DATA_PAGES + 1) * page;
        // SAFETY: a fresh shared mapping of the event's ring; unmapped in `drop`.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::SHARED,
                &event,
                0,
            )
        }
        .map_err(|error| failed(error.into()))?;
        Ok(Self { event, base: base.cast(), length, page })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Hands over every waiting record.
    pub(crate) fn drain(&mut self, mut each: impl FnMut(Record)) {
        #[allow(clippy::cast_ptr_alignment, reason = "mmap gives whole pages")]
        let head_page = self.base.cast::<bindings::perf_event_mmap_page>();
        // SAFETY: the first page of the mapping is a perf_event_mmap_page; its positions are shared with the
        // kernel and so read and written atomically.
        let (head, tail) = unsafe {
            (
                AtomicU64::from_ptr(&raw mut (*head_page).data_head),
                AtomicU64::from_ptr(&raw mut (*head_page).data_tail),
            )
        };
        let size = self.page * DATA_PAGES;
        let end = head.load(Ordering::Acquire);
        let mut at = tail.load(Ordering::Relaxed);
        let mut record = Vec::new();
        while at < end {
            let length = usize::from(u16::from_ne_bytes([self.byte(at + 6, size), self.byte(at + 7, size)]));
            if length < HEADER {
                break;
            }
            record.clear();
            record.extend((0..length as u64).map(|offset| self.byte(at + offset, size)));
            if let Some(record) = decode(&record) {
                each(record);
            }
            at += length as u64;
        }
        tail.store(end, Ordering::Release);
    }

    fn byte(&self, position: u64, size: usize) -> u8 {
        #[allow(clippy::cast_possible_truncation, reason = "the remainder is below the ring's size")]
        let offset = (position % size as u64) as usize;
        // SAFETY: the data pages follow the first page, and the offset is within them.
        unsafe { self.base.add(self.page + offset).read_volatile() }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `open`, not used afterwards.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mmap2(path: &[u8]) -> Vec<u8> {
        let mut record = Vec::new();
        record.extend(MMAP2.to_ne_bytes());
        record.extend([0; 4]);
        record.extend(4242u32.to_ne_bytes());
        record.extend(4243u32.to_ne_bytes());
        record.extend(0x7f00_0000_0000u64.to_ne_bytes());
        record.extend(0x1000u64.to_ne_bytes());
        record.resize(FILENAME, 0);
        record.extend(path);
        record.resize(FILENAME + 64, 0);
        record
    }

    #[test]
    fn a_mapping_is_read_with_its_own_path() {
        let Some(Record::Mapped(mapped)) = decode(&mmap2(b"/usr/lib/libcuda.so.1")) else {
            panic!("not a mapping");
        };
        assert_eq!((mapped.pid, mapped.start, mapped.end), (4242, 0x7f00_0000_0000, 0x7f00_0000_1000));
        assert_eq!(mapped.path, "/usr/lib/libcuda.so.1");
    }

    #[test]
    fn a_short_or_hostile_record_is_nothing() {
        assert_eq!(decode(&mmap2(b"x")[..40]), None);
        assert_eq!(decode(&[]), None);
        let mut overflow = mmap2(b"x");
        overflow[16..24].copy_from_slice(&u64::MAX.to_ne_bytes());
        assert_eq!(decode(&overflow), None);
    }
}
