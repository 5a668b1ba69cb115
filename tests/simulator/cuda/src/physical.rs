//! Owns physical memory by handle: create, release, retain, map, unmap, export, import.
//! Refuses pointers (see `memory`).

use cotenant_abi::MemoryKind;
use cotenant_sim_state::pages;

use crate::{
    INVALID_VALUE, OUT_OF_MEMORY, Outcome, boundary,
    call::{Effects, Process},
    driver::{Driver, Physical},
};

impl Driver {
    pub(crate) fn create_physical(
        &mut self,
        process: &Process,
        bytes: u64,
        ordinal: Option<u32>,
        effects: &mut Effects,
    ) -> Outcome<u64> {
        if bytes == 0 || bytes != pages(bytes) {
            return Err(INVALID_VALUE);
        }
        let gpu = ordinal.map(|ordinal| self.gpu(ordinal)).transpose()?;
        let kind = if gpu.is_some() { MemoryKind::Vmm } else { MemoryKind::HostPinned };
        let taken = if gpu.is_some() { bytes } else { 0 };
        if let Some(gpu) = gpu
            && !(self.allowed(gpu, bytes) && process.node.take(process.slot, gpu, bytes))
        {
            return Err(OUT_OF_MEMORY);
        }
        let handle = self.new_handle(Physical { bytes, kind, gpu, references: 1, taken });
        effects.credit(kind, gpu, bytes, handle);
        Ok(handle)
    }

    /// The value of the last released handle comes back first, as a real allocator's would.
    fn new_handle(&mut self, physical: Physical) -> u64 {
        let handle =
            self.free.get_mut(&(usize::MAX, 0)).and_then(Vec::pop).unwrap_or_else(|| self.address(1));
        let id = self.address(1);
        self.physicals.insert(id, physical);
        self.handles.insert(handle, (id, 1));
        handle
    }

    fn drop_reference(&mut self, process: &Process, id: u64, effects: &mut Effects) {
        let Some(physical) = self.physicals.get_mut(&id) else { return };
        physical.references -= 1;
        if physical.references > 0 {
            return;
        }
        let physical = *physical;
        self.physicals.remove(&id);
        if let Some(gpu) = physical.gpu
            && physical.taken > 0
        {
            process.node.give(process.slot, gpu, physical.taken);
        }
        if physical.bytes > 0 {
            effects.debit(physical.kind, physical.gpu, physical.bytes, id, 1);
        }
    }

    pub(crate) fn release_physical(
        &mut self,
        process: &Process,
        handle: u64,
        effects: &mut Effects,
    ) -> Outcome<()> {
        let (id, count) = *self.handles.get(&handle).ok_or(INVALID_VALUE)?;
        if count == 1 {
            self.handles.remove(&handle);
            self.free.entry((usize::MAX, 0)).or_default().push(handle);
        } else {
            self.handles.insert(handle, (id, count - 1));
        }
        self.drop_reference(process, id, effects);
        Ok(())
    }

    pub(crate) fn retain_physical(&mut self, address: u64) -> Outcome<u64> {
        let (_, id) = *self.mappings.get(&address).ok_or(INVALID_VALUE)?;
        if let Some(physical) = self.physicals.get_mut(&id) {
            physical.references += 1;
        }
        if let Some((handle, (_, count))) = self.handles.iter_mut().find(|(_, (of, _))| *of == id) {
            *count += 1;
            return Ok(*handle);
        }
        let handle = self.address(1);
        self.handles.insert(handle, (id, 1));
        Ok(handle)
    }

    pub(crate) fn map(
        &mut self,
        address: u64,
        bytes: u64,
        handle: u64,
        effects: &mut Effects,
    ) -> Outcome<()> {
        let (id, _) = *self.handles.get(&handle).ok_or(INVALID_VALUE)?;
        let current = self.current().map(|(_, context)| context.gpu).ok();
        let physical = self.physicals.get_mut(&id).ok_or(INVALID_VALUE)?;
        physical.references += 1;
        if physical.kind == MemoryKind::Imported && physical.bytes == 0 {
            physical.bytes = bytes;
            physical.gpu = current;
            effects.credit(MemoryKind::Imported, current, bytes, id);
        }
        self.mappings.insert(address, (bytes, id));
        Ok(())
    }

    /// A span may hold several mappings; each must lie in it as a whole.
    pub(crate) fn unmap(
        &mut self,
        process: &Process,
        address: u64,
        bytes: u64,
        effects: &mut Effects,
    ) -> Outcome<()> {
        let spanned: Vec<(u64, u64)> =
            self.mappings.range(address..address + bytes).map(|(at, (_, id))| (*at, *id)).collect();
        if spanned.is_empty() {
            return Err(INVALID_VALUE);
        }
        for (at, id) in spanned {
            self.mappings.remove(&at);
            boundary::unmap(&process.node, at);
            self.drop_reference(process, id, effects);
        }
        Ok(())
    }

    /// The mapping reaches the GPU here: this is where the kernel hears of it.
    pub(crate) fn set_access(&self, process: &Process, address: u64, bytes: u64) {
        for (at, (length, id)) in self.mappings.range(address..address + bytes) {
            if let Some(Physical { gpu: Some(gpu), .. }) = self.physicals.get(id) {
                boundary::map(&process.node, *at, *length, *gpu);
            }
        }
    }

    pub(crate) fn import_physical(&mut self) -> u64 {
        self.new_handle(Physical { bytes: 0, kind: MemoryKind::Imported, gpu: None, references: 1, taken: 0 })
    }
}
