//! Owns one process's driver state: devices, contexts, pointers, handles.
//! Refuses the node's memory directly: it is taken and given through the shared table.

use std::collections::{BTreeMap, HashMap};

use cotenant_abi::{MemoryKind, Operation};
use cotenant_sim_state::Node;

use crate::{
    Code, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, OUT_OF_MEMORY, Outcome,
    call::{CURRENT, Effects, Process},
    turn::Delay,
};

#[derive(Clone, Copy)]
pub(crate) struct Context {
    pub(crate) gpu: usize,
    pub(crate) primary: bool,
    pub(crate) references: u32,
}

/// A live pointer.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) bytes: u64,
    pub(crate) kind: MemoryKind,
    pub(crate) gpu: Option<usize>,
    pub(crate) context: u64,
    /// Device memory behind it, given back with it.
    pub(crate) taken: u64,
}

#[derive(Clone, Copy)]
pub(crate) struct Physical {
    pub(crate) bytes: u64,
    pub(crate) kind: MemoryKind,
    pub(crate) gpu: Option<usize>,
    pub(crate) references: u32,
    pub(crate) taken: u64,
}

pub(crate) struct Driver {
    /// GPU index by ordinal, as `CUDA_VISIBLE_DEVICES` orders them.
    pub(crate) visible: Vec<usize>,
    pub(crate) contexts: HashMap<u64, Context>,
    pub(crate) primaries: HashMap<u32, u64>,
    pub(crate) pointers: BTreeMap<u64, Block>,
    pub(crate) handles: HashMap<u64, (u64, u32)>,
    pub(crate) physicals: HashMap<u64, Physical>,
    pub(crate) mappings: BTreeMap<u64, (u64, u64)>,
    /// Addresses to hand out again, last freed first, like the real driver.
    pub(crate) free: HashMap<(usize, u64), Vec<u64>>,
    /// Memory that pools keep, by GPU.
    pub(crate) pooled: HashMap<usize, u64>,
    /// What pools have taken, in which pieces: where each is mapped, and its length.
    pub(crate) chunks: HashMap<usize, Vec<(u64, u64)>>,
    /// The page that small allocations share, by GPU: address of the next, end.
    pub(crate) small: HashMap<usize, (u64, u64)>,
    injected: HashMap<Operation, (Code, u32)>,
    delays: HashMap<Operation, (Delay, u32)>,
    /// What an MPS server would let this process take, by GPU.
    limits: HashMap<usize, u64>,
    next: u64,
    next_low: u64,
}

impl Driver {
    pub(crate) fn new(node: &Node) -> Self {
        let visible = visible(node, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
        let limits = limits(&visible, std::env::var("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").ok().as_deref());
        Self {
            visible,
            limits,
            contexts: HashMap::new(),
            primaries: HashMap::new(),
            pointers: BTreeMap::new(),
            handles: HashMap::new(),
            physicals: HashMap::new(),
            mappings: BTreeMap::new(),
            free: HashMap::new(),
            pooled: HashMap::new(),
            chunks: HashMap::new(),
            small: HashMap::new(),
            injected: HashMap::new(),
            delays: HashMap::new(),
            next: 0x7f00_0000_0000,
            next_low: 0x1000_0000,
        }
    }

    pub(crate) fn inject(&mut self, operation: Operation, code: Code, times: u32) {
        self.injected.insert(operation, (code, times));
    }

    pub(crate) fn injected(&mut self, operation: Operation) -> Outcome<()> {
        match self.injected.get_mut(&operation) {
            Some((code, left)) if *left > 0 => {
                *left -= 1;
                Err(*code)
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn delay(&mut self, operation: Operation, delay: Delay, times: u32) {
        self.delays.insert(operation, (delay, times));
    }

    pub(crate) fn delayed(&mut self, operation: Operation) -> Option<Delay> {
        let (delay, left) = self.delays.get_mut(&operation).filter(|(_, left)| *left > 0)?;
        *left -= 1;
        Some(*delay)
    }

    /// Whether the current context's pool must take memory from its GPU for this.
    pub(crate) fn pool_grows(&self, bytes: u64) -> bool {
        self.current().is_ok_and(|(_, context)| {
            self.pooled.get(&context.gpu).copied().unwrap_or(0) < cotenant_sim_state::pages(bytes)
        })
    }

    /// Whether so much more stays below this process's MPS limit. As a client's: what its allocations take, contexts apart.
    pub(crate) fn allowed(&self, gpu: usize, bytes: u64) -> bool {
        let Some(limit) = self.limits.get(&gpu) else { return true };
        let pointers = self.pointers.values().filter(|block| block.gpu == Some(gpu)).map(|block| block.taken);
        let handles = self.physicals.values().filter(|held| held.gpu == Some(gpu)).map(|held| held.taken);
        let pooled = self.pooled.get(&gpu).copied().unwrap_or(0);
        pointers.chain(handles).sum::<u64>() + pooled + bytes <= *limit
    }

    /// Fresh addresses, aligned to pages.
    pub(crate) fn address(&mut self, bytes: u64) -> u64 {
        let at = self.next;
        self.next += cotenant_sim_state::pages(bytes.max(1));
        at
    }

    /// Version 1 of the API has 32-bit pointers.
    pub(crate) fn low_address(&mut self, bytes: u64) -> u64 {
        let at = self.next_low;
        self.next_low += bytes.next_multiple_of(512);
        at
    }

    pub(crate) fn gpu(&self, ordinal: u32) -> Outcome<usize> {
        self.visible.get(ordinal as usize).copied().ok_or(INVALID_DEVICE)
    }

    pub(crate) fn current(&self) -> Outcome<(u64, Context)> {
        let handle = CURRENT.with_borrow(|stack| stack.last().copied()).ok_or(INVALID_CONTEXT)?;
        self.contexts.get(&handle).map(|context| (handle, *context)).ok_or(INVALID_CONTEXT)
    }

    pub(crate) fn create(&mut self, process: &Process, ordinal: u32) -> Outcome<u64> {
        let gpu = self.gpu(ordinal)?;
        if !process.node.open_context(process.slot, gpu) {
            return Err(OUT_OF_MEMORY);
        }
        let handle = self.address(1);
        self.contexts.insert(handle, Context { gpu, primary: false, references: 1 });
        Ok(handle)
    }

    pub(crate) fn retain(&mut self, process: &Process, ordinal: u32) -> Outcome<u64> {
        if let Some(handle) = self.primaries.get(&ordinal)
            && let Some(context) = self.contexts.get_mut(handle)
        {
            context.references += 1;
            return Ok(*handle);
        }
        let handle = self.create(process, ordinal)?;
        if let Some(context) = self.contexts.get_mut(&handle) {
            context.primary = true;
        }
        self.primaries.insert(ordinal, handle);
        Ok(handle)
    }

    pub(crate) fn release(&mut self, process: &Process, ordinal: u32, effects: &mut Effects) -> Outcome<()> {
        let handle = *self.primaries.get(&ordinal).ok_or(INVALID_CONTEXT)?;
        let context = self.contexts.get_mut(&handle).ok_or(INVALID_CONTEXT)?;
        context.references -= 1;
        if context.references == 0 {
            self.primaries.remove(&ordinal);
            self.destroy(process, handle, effects);
            self.drop_pools(process, self.gpu(ordinal)?);
        }
        Ok(())
    }

    pub(crate) fn reset(&mut self, process: &Process, ordinal: u32, effects: &mut Effects) -> Outcome<()> {
        let handle = *self.primaries.get(&ordinal).ok_or(INVALID_CONTEXT)?;
        self.empty(process, handle, effects);
        self.drop_pools(process, self.gpu(ordinal)?);
        Ok(())
    }

    pub(crate) fn destroy_context(
        &mut self,
        process: &Process,
        handle: u64,
        effects: &mut Effects,
    ) -> Outcome<()> {
        match self.contexts.get(&handle) {
            Some(context) if !context.primary => {
                self.destroy(process, handle, effects);
                Ok(())
            }
            _ => Err(INVALID_CONTEXT),
        }
    }

    fn destroy(&mut self, process: &Process, handle: u64, effects: &mut Effects) {
        self.empty(process, handle, effects);
        if let Some(context) = self.contexts.remove(&handle) {
            process.node.close_context(process.slot, context.gpu);
        }
        CURRENT.with_borrow_mut(|stack| {
            if stack.last() == Some(&handle) {
                stack.pop();
            }
        });
    }

    /// What a context holds dies with it: by kind and GPU, one record each.
    fn empty(&mut self, process: &Process, handle: u64, effects: &mut Effects) {
        let dying: Vec<u64> = self
            .pointers
            .iter()
            .filter(|(_, block)| block.context == handle)
            .map(|(address, _)| *address)
            .collect();
        let mut sums: BTreeMap<(MemoryKind, Option<usize>), (u64, u32)> = BTreeMap::new();
        for address in dying {
            if let Some(block) = self.pointers.remove(&address) {
                let sum = sums.entry((block.kind, block.gpu)).or_default();
                sum.0 += block.bytes;
                sum.1 += 1;
                self.give_back(process, address, &block);
            }
        }
        for ((kind, gpu), (bytes, entries)) in sums {
            effects.debit(kind, gpu, bytes, 0, entries);
        }
    }

    /// The memory behind a pointer goes back: to its pool, or to the GPU.
    pub(crate) fn give_back(&mut self, process: &Process, address: u64, block: &Block) {
        let Some(gpu) = block.gpu else { return };
        if block.kind == MemoryKind::Pool {
            *self.pooled.entry(gpu).or_default() += block.taken;
        } else if block.taken > 0 {
            process.node.give(process.slot, gpu, block.taken);
            crate::boundary::unmap(&process.node, address);
        }
        if block.kind != MemoryKind::Array && block.kind != MemoryKind::Imported {
            self.free.entry((gpu, block.bytes)).or_default().push(address);
        }
    }

    pub(crate) fn free(
        &mut self,
        process: &Process,
        address: u64,
        effects: &mut Effects,
        host: bool,
    ) -> Outcome<()> {
        if address == 0 && !host {
            return Ok(());
        }
        let block = *self.pointers.get(&address).ok_or(INVALID_VALUE)?;
        if host != (block.kind == MemoryKind::HostPinned) {
            return Err(INVALID_VALUE);
        }
        self.pointers.remove(&address);
        effects.debit(block.kind, block.gpu, block.bytes, address, 1);
        self.give_back(process, address, &block);
        Ok(())
    }
}

/// `0=1G,1=512M`, by ordinal.
fn limits(visible: &[usize], variable: Option<&str>) -> HashMap<usize, u64> {
    let entry = |entry: &str| {
        let (ordinal, size) = entry.split_once('=')?;
        let gpu = *visible.get(ordinal.trim().parse::<usize>().ok()?)?;
        let size = size.trim();
        let (digits, unit) = size.split_at_checked(size.len().checked_sub(1)?)?;
        let unit = match unit {
            "G" => 1 << 30,
            "M" => 1 << 20,
            _ => return None,
        };
        Some((gpu, digits.parse::<u64>().ok()?.checked_mul(unit)?))
    };
    variable.unwrap_or_default().split(',').filter_map(entry).collect()
}

/// Indexes and `GPU-` UUIDs; an entry that names nothing ends the list, as in the real driver.
fn visible(node: &Node, variable: Option<&str>) -> Vec<usize> {
    let count = node.gpu_count();
    let Some(list) = variable else { return (0..count).collect() };
    let mut visible = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let index = entry.parse::<usize>().ok().filter(|index| *index < count).or_else(|| {
            let hex: String = entry.strip_prefix("GPU-")?.chars().filter(|c| *c != '-').collect();
            (0..count).find(|gpu| {
                node.uuid(*gpu).iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}")) == hex
            })
        });
        match index {
            Some(index) if !visible.contains(&index) => visible.push(index),
            _ => break,
        }
    }
    visible
}
