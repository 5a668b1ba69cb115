//! Owns the driver's own record: one fixed-size record a call, in shared mappings that survive `kill -9`.
//! Refuses to know the agent: the replay here shares no line with it.

use std::{
    collections::BTreeMap,
    fs,
    fs::{File, OpenOptions},
    io,
    os::fd::AsRawFd,
    path::Path,
    sync::Mutex,
};

use cotenant_abi::{MemoryKind, Operation};

pub mod waits;

pub use waits::{Class, Wait, waits};

/// No GPU: host memory, or a call that has none.
pub const NO_GPU: u8 = 0xff;
const WINDOW: usize = 4096;

/// What a record does to the balance.
pub mod effect {
    pub const NONE: u8 = 0;
    pub const CREDIT: u8 = 1;
    pub const DEBIT: u8 = 2;
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Record {
    /// 1 and up; 0 marks a record that was never finished. Written last.
    pub sequence: u64,
    pub start: u64,
    pub end: u64,
    pub bytes: u64,
    pub address: u64,
    /// Nanoseconds on a processor; 0 where calls take no time.
    pub ran: u64,
    pub thread: u32,
    pub code: u32,
    /// Allocations or frees that this record stands for.
    pub entries: u32,
    pub operation: u8,
    pub kind: u8,
    pub gpu: u8,
    pub effect: u8,
    /// 1 for a call; 0 for what a call did besides (a context's memory dying with it).
    pub call: u8,
    pub pad: [u8; 7],
}

const _: () = assert!(size_of::<Record>() == 72);

/// A record of plain integers, valid when zeroed.
pub trait Entry: Copy {
    /// What the names of its files begin with.
    const PREFIX: &'static str;

    fn sequence(&mut self) -> &mut u64;
}

impl Entry for Record {
    const PREFIX: &'static str = "";

    fn sequence(&mut self) -> &mut u64 {
        &mut self.sequence
    }
}

/// Appends to one process's file.
pub struct Writer<T: Entry = Record>(Mutex<Window<T>>);

struct Window<T> {
    file: File,
    base: *mut T,
    next: usize,
    sequence: u64,
}

// SAFETY: the mapping is only touched under the mutex.
unsafe impl<T> Send for Window<T> {}

impl<T: Entry> Writer<T> {
    /// A new file for each life of a process: exec makes another one.
    pub fn create(node: &Path) -> io::Result<Self> {
        let pid = crate::own_pid();
        for life in 0.. {
            let path = node.join("truth").join(format!("{}{pid}-{life}.bin", T::PREFIX));
            match OpenOptions::new().read(true).write(true).create_new(true).open(path) {
                Ok(file) => {
                    let window = Window { file, base: std::ptr::null_mut(), next: WINDOW, sequence: 0 };
                    return Ok(Self(Mutex::new(window)));
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        unreachable!("the loop ends by returning")
    }

    /// The record is in the file when this returns, whatever happens to the process next.
    pub fn append(&self, record: T) {
        self.append_all(&mut [record], |_, _| {});
    }

    /// As `append`, one after the other; `finish` is told the sequence of the first.
    fn append_all(&self, records: &mut [T], finish: impl Fn(&mut T, u64)) {
        let mut window = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let first = window.sequence + 1;
        for record in records {
            finish(record, first);
            window.append(*record);
        }
    }
}

impl<T: Entry> Window<T> {
    fn append(&mut self, mut record: T) {
        if self.next == WINDOW && self.advance().is_err() {
            // A truth that cannot be written must not look complete.
            std::process::abort();
        }
        self.sequence += 1;
        *record.sequence() = 0;
        // SAFETY: `next` is below WINDOW and the mapping holds WINDOW records.
        unsafe {
            let slot = self.base.add(self.next);
            slot.write_volatile(record);
            std::ptr::from_mut((*slot).sequence()).write_volatile(self.sequence);
        }
        self.next += 1;
    }

    fn advance(&mut self) -> io::Result<()> {
        let bytes = WINDOW * size_of::<T>();
        let at = self.file.metadata()?.len();
        self.file.set_len(at + bytes as u64)?;
        let offset = i64::try_from(at).map_err(io::Error::other)?;
        // SAFETY: unmaps the window of before, if any, and maps the next part of our own file.
        unsafe {
            if !self.base.is_null() {
                libc::munmap(self.base.cast(), bytes);
            }
            let base = libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                self.file.as_raw_fd(),
                offset,
            );
            if base == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            self.base = base.cast();
        }
        self.next = 0;
        Ok(())
    }
}

/// The finished records among `bytes`, in the order of writing.
fn entries<T: Entry>(bytes: &[u8]) -> impl Iterator<Item = T> {
    bytes.chunks_exact(size_of::<T>()).filter_map(|chunk| {
        // SAFETY: an entry is plain integers, and the chunk has exactly its size; alignment is not assumed.
        let mut record = unsafe { chunk.as_ptr().cast::<T>().read_unaligned() };
        (*record.sequence() != 0).then_some(record)
    })
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balance {
    pub live: u64,
    pub peak: u64,
    pub allocated: u64,
    pub freed: u64,
    pub allocations: u64,
    pub frees: u64,
}

/// One life of one process, replayed.
#[derive(Clone, Debug, Default)]
pub struct ProcessTruth {
    pub pid: u32,
    pub life: u32,
    /// By GPU index (`None` for host memory) and kind.
    pub balances: BTreeMap<(Option<u8>, MemoryKind), Balance>,
    pub calls: BTreeMap<Operation, u64>,
    pub failures: BTreeMap<(Operation, u32), u64>,
    pub records: u64,
}

impl ProcessTruth {
    fn apply(&mut self, record: &Record) {
        self.records += 1;
        let Some(operation) = Operation::from_tag(record.operation) else { return };
        if record.call == 1 {
            *self.calls.entry(operation).or_default() += 1;
            if record.code != 0 {
                *self.failures.entry((operation, record.code)).or_default() += 1;
            }
        }
        let Some(kind) = MemoryKind::from_tag(record.kind) else { return };
        let gpu = (record.gpu != NO_GPU).then_some(record.gpu);
        let balance = self.balances.entry((gpu, kind)).or_default();
        match record.effect {
            effect::CREDIT => {
                balance.live += record.bytes;
                balance.peak = balance.peak.max(balance.live);
                balance.allocated += record.bytes;
                balance.allocations += u64::from(record.entries);
            }
            effect::DEBIT => {
                balance.live -= record.bytes;
                balance.freed += record.bytes;
                balance.frees += u64::from(record.entries);
            }
            _ => {}
        }
    }

    /// What the process held when it ended died with it.
    pub fn end(&mut self) {
        for balance in self.balances.values_mut() {
            balance.freed += balance.live;
            balance.live = 0;
        }
    }
}

/// Every process's record, in no order.
pub fn read(node: &Path) -> io::Result<Vec<ProcessTruth>> {
    let mut all = Vec::new();
    for (pid, life, bytes) in files::<Record>(node)? {
        let mut truth = ProcessTruth { pid, life, ..ProcessTruth::default() };
        for record in entries::<Record>(&bytes) {
            truth.apply(&record);
        }
        all.push(truth);
    }
    Ok(all)
}

/// One traced call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub pid: u32,
    pub thread: u32,
    pub operation: Operation,
    pub start: u64,
    pub end: u64,
    /// Nanoseconds on a processor; 0 where calls take no time.
    pub ran: u64,
    pub bytes: u64,
    pub code: u32,
}

/// Every call of every process, by process in the order of ending.
pub fn calls(node: &Path) -> io::Result<Vec<Call>> {
    let mut all = Vec::new();
    for (pid, _, bytes) in files::<Record>(node)? {
        for record in entries::<Record>(&bytes).filter(|record| record.call == 1) {
            let Some(operation) = Operation::from_tag(record.operation) else { continue };
            let Record { thread, start, end, ran, bytes, code, .. } = record;
            all.push(Call { pid, thread, operation, start, end, ran, bytes, code });
        }
    }
    Ok(all)
}

/// The files of one kind of entry: process, life, what is in it.
fn files<T: Entry>(node: &Path) -> io::Result<Vec<(u32, u32, Vec<u8>)>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(node.join("truth"))? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        let Some((pid, life)) = name.strip_prefix(T::PREFIX).and_then(|name| name.split_once('-')) else {
            continue;
        };
        // The names of another kind have no number here.
        let (Ok(pid), Ok(life)) = (pid.parse(), life.parse()) else { continue };
        all.push((pid, life, fs::read(&path)?));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_replays_to_its_balance() {
        let mut truth = ProcessTruth::default();
        let credit = Record {
            bytes: 100,
            entries: 1,
            operation: Operation::MemAlloc as u8,
            kind: MemoryKind::Device as u8,
            effect: effect::CREDIT,
            call: 1,
            ..Record::default()
        };
        truth.apply(&credit);
        truth.apply(&Record {
            effect: effect::DEBIT,
            bytes: 40,
            operation: Operation::MemFree as u8,
            ..credit
        });
        truth.apply(&Record { effect: effect::NONE, code: 2, ..credit });
        let balance = truth.balances[&(Some(0), MemoryKind::Device)];
        assert_eq!((balance.live, balance.peak, balance.allocated, balance.freed), (60, 100, 100, 40));
        assert_eq!(truth.failures[&(Operation::MemAlloc, 2)], 1);
        truth.end();
        assert_eq!(truth.balances[&(Some(0), MemoryKind::Device)].freed, 100);
    }
}
