//! Owns what a wait inside a driver call is: its class by the kernel stack at blocking, and who ended it.
//! Refuses addresses: frames come in as symbol names, innermost first.

use std::collections::BTreeMap;
use std::fmt;

use crate::{Tenant, sample::StackId};

/// What a thread in a driver call was blocked on. Ordered as published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WaitClass {
    /// The driver's API lock, one for all GPUs of the host.
    RmApiLock,
    GpuLock,
    /// The GPU's memory manager scrubs pages before it hands them out.
    Reclaim,
    UvmEviction,
    /// A lock of the driver's user-space part (futex).
    UserspaceLock,
    /// Blocked in the driver's kernel modules on none of the above.
    Device,
    Other,
}

impl WaitClass {
    pub const ALL: &'static [Self] = &[
        Self::RmApiLock,
        Self::GpuLock,
        Self::Reclaim,
        Self::UvmEviction,
        Self::UserspaceLock,
        Self::Device,
        Self::Other,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RmApiLock => "rm_api_lock",
            Self::GpuLock => "gpu_lock",
            Self::Reclaim => "reclaim",
            Self::UvmEviction => "uvm_eviction",
            Self::UserspaceLock => "userspace_lock",
            Self::Device => "device",
            Self::Other => "other",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|class| class.as_str() == name)
    }
}

/// What a wait on this stack is, by the stacks that were classified. One that could not be taken is `other`.
pub fn class_of(classes: &BTreeMap<StackId, WaitClass>, stack: Option<StackId>) -> WaitClass {
    stack.and_then(|stack| classes.get(&stack).copied()).unwrap_or(WaitClass::Other)
}

impl fmt::Display for WaitClass {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// Who ended a wait, or held what was waited for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Culprit {
    Tenant(Tenant),
    /// An interrupt or a timer: the hardware was done.
    Device,
    /// A kernel thread.
    Kernel,
    /// Nobody was seen.
    Unknown,
}

impl Culprit {
    /// The `culprit` label.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Tenant(tenant) => &tenant.name,
            Self::Device => "device",
            Self::Kernel => "kernel",
            Self::Unknown => "unknown",
        }
    }

    /// How the culprit stands to a victim: only a neighbour is somebody else's fault.
    pub fn relation(&self, victim: &Tenant) -> &'static str {
        match self {
            Self::Tenant(tenant) if tenant == victim => "self",
            Self::Tenant(_) => "neighbour",
            Self::Device => "device",
            Self::Kernel => "kernel",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Culprit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// A pattern of [`Classes`] that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{pattern}` is no symbol pattern; write a symbol name, or one `*` beside at least 3 characters of it"
)]
pub struct PatternError {
    pub pattern: String,
}

/// Which symbols on a blocked thread's kernel stack mean which class, most telling first.
#[derive(Clone, Debug)]
pub struct Classes {
    rules: Vec<(Pattern, WaitClass)>,
}

/// A symbol, or what comes before and after the one `*`.
#[derive(Clone, Debug)]
struct Pattern {
    before: String,
    after: Option<String>,
}

impl Pattern {
    fn parse(pattern: &str) -> Option<Self> {
        const LONGEST: usize = 511; // KSYM_NAME_LEN - 1
        let symbol = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'*');
        let (before, after) =
            pattern.split_once('*').map_or((pattern, None), |(before, after)| (before, Some(after)));
        let length = before.len() + after.map_or(0, str::len);
        let enough = if after.is_some() { 3 } else { 1 };
        let usable =
            (enough..=LONGEST).contains(&length) && symbol(before) && symbol(after.unwrap_or_default());
        usable.then(|| Self { before: before.to_owned(), after: after.map(str::to_owned) })
    }

    fn matches(&self, symbol: &str) -> bool {
        match &self.after {
            None => symbol == self.before,
            Some(after) => {
                symbol.strip_prefix(self.before.as_str()).is_some_and(|rest| rest.ends_with(after.as_str()))
            }
        }
    }
}

/// The table, most telling first: the first row that any frame matches decides.
///
/// Names as in the open kernel modules 515.43.04 to 595.45.04 (each checked in 515.43, 525.60, 535.104, 550.54, 570.86,
/// 580.65 and 595.45; `os_acquire_rwlock_*` since 525). In the closed modules they are obfuscated (`_nv012345rm`): what
/// waits there is `device`.
const TABLE: &[(&str, WaitClass)] = &[
    // The scrubber: mem_scrub.c. `_scrubWaitAndSave` sleeps until the copy engine has zeroed pages.
    ("_scrub*", WaitClass::Reclaim),
    ("scrubCheck*", WaitClass::Reclaim),
    ("scrubWaitPages", WaitClass::Reclaim),
    ("scrubSubmitPages", WaitClass::Reclaim),
    // Eviction of managed memory. RM's side of it (`_pmaEvict*`) is called from `pmaAllocatePages`, so it stands before that:
    // else every eviction would read as scrubbing.
    ("_pmaEvict*", WaitClass::UvmEviction),
    ("uvm_pmm_gpu_pma_evict_*", WaitClass::UvmEviction),
    ("uvm_va_block_evict_chunks*", WaitClass::UvmEviction),
    ("uvm_hmm_va_block_evict_*", WaitClass::UvmEviction),
    ("hmm_va_block_evict_chunks", WaitClass::UvmEviction),
    ("pick_and_evict_root_chunk*", WaitClass::UvmEviction),
    ("evict_root_chunk*", WaitClass::UvmEviction),
    // The physical allocator's own mutex, which another thread holds while it scrubs: phys_mem_allocator.c.
    ("pmaAllocatePages*", WaitClass::Reclaim),
    ("pmaFreePages", WaitClass::Reclaim),
    // Per-GPU locks: locks.c. They end in `os_acquire_semaphore` or `os_acquire_mutex`, which also serve locks of no GPU:
    // only the caller tells.
    ("_rmGpuLocksAcquire*", WaitClass::GpuLock),
    ("rmGpuLocksAcquire*", WaitClass::GpuLock),
    ("rmGpuGroupLockAcquire*", WaitClass::GpuLock),
    ("rmDeviceGpuLocksAcquire*", WaitClass::GpuLock),
    // rmapi.c. `os_acquire_rwlock_*` below it is `down_read` or `down_write`; alone it is any of twenty other locks.
    ("rmapiLockAcquire*", WaitClass::RmApiLock),
    // A futex: the user-space driver's mutexes. futex/waitwake.c, 5.15 to 6.18.
    ("futex_*", WaitClass::UserspaceLock),
    ("__futex_*", WaitClass::UserspaceLock),
    ("do_futex", WaitClass::UserspaceLock),
    // A file lock or a semaphore: interposers that hand a GPU out take one around the driver's start. fs/locks.c, ipc/sem.c.
    ("locks_lock_inode_wait", WaitClass::UserspaceLock),
    ("fcntl_setlk*", WaitClass::UserspaceLock),
    ("do_lock_file_wait", WaitClass::UserspaceLock),
    ("*do_semtimedop", WaitClass::UserspaceLock),
    // Anything else of nvidia.ko, nvidia-uvm.ko and nvidia-modeset.ko.
    ("nvidia_*", WaitClass::Device),
    ("nvUvmInterface*", WaitClass::Device),
    ("nvGpuOps*", WaitClass::Device),
    ("uvm_*", WaitClass::Device),
    ("rm_*", WaitClass::Device),
    ("_nv*rm", WaitClass::Device),
    ("rmapi*", WaitClass::Device),
    ("nv_*", WaitClass::Device),
    ("os_*", WaitClass::Device),
];

impl Default for Classes {
    /// The table alone.
    fn default() -> Self {
        Self {
            rules: TABLE
                .iter()
                .filter_map(|(pattern, class)| Some((Pattern::parse(pattern)?, *class)))
                .collect(),
        }
    }
}

impl Classes {
    /// `extra` comes before the table, in its order: a symbol, or a pattern with one `*`, and its class.
    pub fn new<'a>(extra: impl IntoIterator<Item = (&'a str, WaitClass)>) -> Result<Self, PatternError> {
        let mut rules = Vec::new();
        for (pattern, class) in extra {
            let parsed =
                Pattern::parse(pattern).ok_or_else(|| PatternError { pattern: pattern.to_owned() })?;
            rules.push((parsed, class));
        }
        rules.extend(Self::default().rules);
        Ok(Self { rules })
    }

    /// The class of a wait by the names on its kernel stack. The whole stack is read: what a thread does is further out
    /// than what it sleeps in.
    pub fn class(&self, frames: &[&str]) -> WaitClass {
        let decides =
            |(pattern, _): &&(Pattern, WaitClass)| frames.iter().any(|frame| pattern.matches(frame));
        self.rules.iter().find(decides).map_or(WaitClass::Other, |(_, class)| *class)
    }
}

#[cfg(test)]
mod tests;
