//! Owns allocations by pointer: device, pool, managed, array, host, imported.
//! Refuses handles (see `physical`).

use cotenant_abi::MemoryKind;
use cotenant_sim_state::{PAGE, pages};

use crate::{
    INVALID_VALUE, OUT_OF_MEMORY, Outcome, boundary,
    call::{Effects, Process},
    driver::{Block, Driver},
};

/// Below this, allocations share a page and need no mapping of their own.
const SMALL: u64 = 1 << 20;

impl Driver {
    /// Device memory for the current context.
    pub(crate) fn allocate(
        &mut self,
        process: &Process,
        bytes: u64,
        kind: MemoryKind,
        effects: &mut Effects,
    ) -> Outcome<u64> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let (context, at) = self.current()?;
        let gpu = at.gpu;
        let known = self.free.get_mut(&(gpu, bytes)).and_then(Vec::pop);
        let (address, taken) = match kind {
            MemoryKind::Managed => (known.unwrap_or_else(|| self.address(bytes)), 0),
            MemoryKind::Pool => self.take_pooled(process, gpu, bytes, known)?,
            _ if bytes < SMALL => self.small(process, gpu, bytes, known)?,
            _ => {
                let address = known.unwrap_or_else(|| self.address(bytes));
                self.take(process, gpu, address, pages(bytes))?;
                (address, pages(bytes))
            }
        };
        self.pointers.insert(address, Block { bytes, kind, gpu: Some(gpu), context, taken });
        effects.credit(kind, Some(gpu), bytes, address);
        Ok(address)
    }

    fn take_pooled(
        &mut self,
        process: &Process,
        gpu: usize,
        bytes: u64,
        known: Option<u64>,
    ) -> Outcome<(u64, u64)> {
        let taken = pages(bytes);
        let address = known.unwrap_or_else(|| self.address(bytes));
        if self.pooled.get(&gpu).is_some_and(|pooled| *pooled >= taken) {
            *self.pooled.entry(gpu).or_default() -= taken;
        } else {
            if !self.allowed(gpu, taken) || !process.node.take(process.slot, gpu, taken) {
                return Err(OUT_OF_MEMORY);
            }
            let chunk = self.address(taken);
            boundary::grow(&process.node, chunk, taken, gpu);
            self.chunks.entry(gpu).or_default().push((chunk, taken));
        }
        Ok((address, taken))
    }

    /// The page stays with the process; only its parts come and go.
    fn small(
        &mut self,
        process: &Process,
        gpu: usize,
        bytes: u64,
        known: Option<u64>,
    ) -> Outcome<(u64, u64)> {
        if let Some(address) = known {
            return Ok((address, 0));
        }
        let size = bytes.next_multiple_of(512);
        let (next, end) = self.small.get(&gpu).copied().unwrap_or((0, 0));
        if next + size <= end {
            self.small.insert(gpu, (next + size, end));
            return Ok((next, 0));
        }
        let page = self.address(PAGE);
        self.take(process, gpu, page, PAGE)?;
        self.small.insert(gpu, (page + size, page + PAGE));
        Ok((page, 0))
    }

    /// Version 1: a pointer of 32 bits.
    pub(crate) fn allocate_low(
        &mut self,
        process: &Process,
        bytes: u64,
        effects: &mut Effects,
    ) -> Outcome<u64> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let (context, at) = self.current()?;
        let address = self.low_address(bytes);
        self.take(process, at.gpu, address, pages(bytes))?;
        let block =
            Block { bytes, kind: MemoryKind::Device, gpu: Some(at.gpu), context, taken: pages(bytes) };
        self.pointers.insert(address, block);
        effects.credit(MemoryKind::Device, Some(at.gpu), bytes, address);
        Ok(address)
    }

    pub(crate) fn allocate_host(&mut self, bytes: u64, effects: &mut Effects) -> Outcome<u64> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let (context, _) = self.current()?;
        let address = self.address(bytes);
        let kind = MemoryKind::HostPinned;
        self.pointers.insert(address, Block { bytes, kind, gpu: None, context, taken: 0 });
        effects.credit(kind, None, bytes, address);
        Ok(address)
    }

    pub(crate) fn register(&mut self, address: u64, bytes: u64, effects: &mut Effects) -> Outcome<()> {
        const ALREADY_REGISTERED: i32 = 712;
        if address == 0 || bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let (context, _) = self.current()?;
        if self.pointers.contains_key(&address) {
            return Err(ALREADY_REGISTERED);
        }
        let kind = MemoryKind::HostRegistered;
        self.pointers.insert(address, Block { bytes, kind, gpu: None, context, taken: 0 });
        effects.credit(kind, None, bytes, address);
        Ok(())
    }

    pub(crate) fn unregister(&mut self, address: u64, effects: &mut Effects) -> Outcome<()> {
        const NOT_REGISTERED: i32 = 713;
        let block = self.pointers.get(&address).filter(|block| block.kind == MemoryKind::HostRegistered);
        let bytes = block.ok_or(NOT_REGISTERED)?.bytes;
        self.pointers.remove(&address);
        effects.debit(MemoryKind::HostRegistered, None, bytes, address, 1);
        Ok(())
    }

    /// Memory of another process: mapped here, owned there.
    pub(crate) fn import(&mut self, process: &Process, bytes: u64, effects: &mut Effects) -> Outcome<u64> {
        let (context, at) = self.current()?;
        let bytes = pages(bytes);
        let address = self.address(bytes);
        boundary::map(&process.node, address, bytes, at.gpu);
        let block = Block { bytes, kind: MemoryKind::Imported, gpu: Some(at.gpu), context, taken: 0 };
        self.pointers.insert(address, block);
        effects.credit(MemoryKind::Imported, Some(at.gpu), bytes, address);
        Ok(address)
    }

    pub(crate) fn close_import(&mut self, address: u64, effects: &mut Effects) -> Outcome<()> {
        let block =
            *self.pointers.get(&address).filter(|b| b.kind == MemoryKind::Imported).ok_or(INVALID_VALUE)?;
        self.pointers.remove(&address);
        effects.debit(block.kind, block.gpu, block.bytes, address, 1);
        Ok(())
    }

    pub(crate) fn array(&mut self, process: &Process, bytes: u64, effects: &mut Effects) -> Outcome<u64> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let (context, at) = self.current()?;
        let address = self.address(bytes);
        self.take(process, at.gpu, address, pages(bytes))?;
        let block = Block { bytes, kind: MemoryKind::Array, gpu: Some(at.gpu), context, taken: pages(bytes) };
        self.pointers.insert(address, block);
        effects.credit(MemoryKind::Array, Some(at.gpu), bytes, address);
        Ok(address)
    }

    /// Pools give back what they keep, in the pieces in which they took it.
    pub(crate) fn trim(&mut self, process: &Process) -> Outcome<()> {
        let (_, at) = self.current()?;
        let kept = self.pooled.entry(at.gpu).or_default();
        self.chunks.entry(at.gpu).or_default().retain(|(base, length)| {
            let stays = *length > *kept;
            if !stays {
                *kept -= length;
                process.node.give(process.slot, at.gpu, *length);
                boundary::shrink(&process.node, *base, *length, at.gpu);
            }
            stays
        });
        Ok(())
    }

    /// The device's context is gone: nothing is announced of what its pools had.
    pub(crate) fn drop_pools(&mut self, process: &Process, gpu: usize) {
        if self.pointers.values().any(|block| block.kind == MemoryKind::Pool && block.gpu == Some(gpu)) {
            // Another context's.
            return;
        }
        let taken = self.chunks.remove(&gpu).into_iter().flatten().map(|(_, length)| length).sum();
        self.pooled.remove(&gpu);
        process.node.give(process.slot, gpu, taken);
    }

    /// Memory from the GPU, mapped at `address`.
    fn take(&self, process: &Process, gpu: usize, address: u64, bytes: u64) -> Outcome<()> {
        if !self.allowed(gpu, bytes) || !process.node.take(process.slot, gpu, bytes) {
            return Err(OUT_OF_MEMORY);
        }
        boundary::map(&process.node, address, bytes, gpu);
        Ok(())
    }
}
