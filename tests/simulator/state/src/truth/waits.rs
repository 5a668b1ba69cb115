//! Owns the record of waits: who waited in which call for what, and who held it meanwhile.
//! Refuses what the driver did not know: a wait without a turn is nobody's.

use std::{collections::HashMap, io, path::Path};

use cotenant_abi::Operation;

use super::{Entry, NO_GPU, entries, files};
use crate::{Sleep, Turn, Waited};

/// What was waited for, spelled as the agent's labels are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Class {
    RmApiLock = 1,
    GpuLock = 2,
    Reclaim = 3,
    UvmEviction = 4,
    UserspaceLock = 5,
    Device = 6,
}

impl Class {
    pub const ALL: [Self; 6] =
        [Self::RmApiLock, Self::GpuLock, Self::Reclaim, Self::UvmEviction, Self::UserspaceLock, Self::Device];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RmApiLock => "rm_api_lock",
            Self::GpuLock => "gpu_lock",
            Self::Reclaim => "reclaim",
            Self::UvmEviction => "uvm_eviction",
            Self::UserspaceLock => "userspace_lock",
            Self::Device => "device",
        }
    }

    /// True where a timer ends the wait and no process does.
    pub const fn is_device(self) -> bool {
        matches!(self, Self::Reclaim | Self::UvmEviction | Self::Device)
    }

    fn from_tag(tag: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|class| *class as u8 == tag)
    }
}

impl From<Sleep> for Class {
    fn from(sleep: Sleep) -> Self {
        match sleep {
            Sleep::Reclaim => Self::Reclaim,
            Sleep::UvmEviction => Self::UvmEviction,
            Sleep::Device => Self::Device,
        }
    }
}

/// One turn of a wait; a wait without a turn is one record too.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Record {
    /// 1 and up; 0 marks a record that was never finished. Written last.
    pub sequence: u64,
    pub start: u64,
    /// The sequence of the wait's first record.
    pub wait: u64,
    pub wanted: u64,
    pub spun: u64,
    pub blocked: u64,
    pub acquired: u64,
    pub from: u64,
    pub to: u64,
    pub pid: u32,
    pub thread: u32,
    /// 0: the device's turn, or no turn.
    pub holder: u32,
    pub holder_thread: u32,
    pub operation: u8,
    pub class: u8,
    pub gpu: u8,
    /// 1 if `from`, `to` and the holder say something.
    pub turn: u8,
    pub pad: u32,
}

const _: () = assert!(size_of::<Record>() == 96);

impl Entry for Record {
    const PREFIX: &'static str = "waits-";

    fn sequence(&mut self) -> &mut u64 {
        &mut self.sequence
    }
}

/// One wait, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    pub pid: u32,
    pub thread: u32,
    /// Field 22 of the process's stat.
    pub start: u64,
    /// `None`: outside any traced call.
    pub operation: Option<Operation>,
    pub class: Class,
    pub gpu: Option<u8>,
    pub wanted: u64,
    /// Nanoseconds of spinning.
    pub spun: u64,
    /// When it fell asleep. Equal to `acquired`: it never blocked.
    pub blocked: u64,
    pub acquired: u64,
    pub turns: Vec<Turn>,
}

impl Wait {
    /// From falling asleep to the release that ended it: what follows is waiting for a processor.
    pub fn blocked_ns(&self) -> u64 {
        self.turns.iter().map(|turn| turn.to - turn.from).sum()
    }
}

/// Writes whole waits for one process.
pub struct Writer {
    records: super::Writer<Record>,
    start: u64,
}

impl Writer {
    pub fn create(node: &Path, start: u64) -> io::Result<Self> {
        Ok(Self { records: super::Writer::create(node)?, start })
    }

    pub fn lock(&self, class: Class, operation: Option<Operation>, gpu: Option<usize>, waited: &Waited) {
        let whole = Record {
            start: self.start,
            wanted: waited.wanted,
            spun: waited.spun,
            blocked: waited.blocked,
            acquired: waited.acquired,
            pid: crate::own_pid(),
            thread: crate::own_thread(),
            operation: operation.map_or(0, |operation| operation as u8),
            class: class as u8,
            gpu: gpu.and_then(|gpu| u8::try_from(gpu).ok()).unwrap_or(NO_GPU),
            ..Record::default()
        };
        let turn = |turn: &Turn| Record {
            holder: turn.pid,
            holder_thread: turn.thread,
            from: turn.from,
            to: turn.to,
            turn: 1,
            ..whole
        };
        let mut records: Vec<Record> = waited.turns.iter().map(turn).collect();
        if records.is_empty() {
            records.push(whole);
        }
        self.records.append_all(&mut records, |record, first| record.wait = first);
    }

    pub fn sleep(&self, class: Class, operation: Option<Operation>, gpu: Option<usize>, from: u64, to: u64) {
        let device = Turn { pid: 0, thread: 0, from, to };
        let waited = Waited { wanted: from, spun: 0, blocked: from, acquired: to, turns: vec![device] };
        self.lock(class, operation, gpu, &waited);
    }
}

/// Every wait of every process of the node, in no order. Of one that was being written when its process was killed, what
/// was there is here.
pub fn waits(node: &Path) -> io::Result<Vec<Wait>> {
    let mut all = Vec::new();
    for (_, _, bytes) in files::<Record>(node)? {
        let mut places: HashMap<u64, usize> = HashMap::new();
        for record in entries::<Record>(&bytes) {
            let Some(class) = Class::from_tag(record.class) else { continue };
            let place = *places.entry(record.wait).or_insert(all.len());
            if place == all.len() {
                all.push(Wait {
                    pid: record.pid,
                    thread: record.thread,
                    start: record.start,
                    operation: Operation::from_tag(record.operation),
                    class,
                    gpu: (record.gpu != NO_GPU).then_some(record.gpu),
                    wanted: record.wanted,
                    spun: record.spun,
                    blocked: record.blocked,
                    acquired: record.acquired,
                    turns: Vec::new(),
                });
            }
            if record.turn == 1 {
                let Record { holder, holder_thread, from, to, .. } = record;
                all[place].turns.push(Turn { pid: holder, thread: holder_thread, from, to });
            }
        }
    }
    Ok(all)
}
