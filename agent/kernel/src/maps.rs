//! Owns typed access to one hash map of the object: read all, remove some.
//! Refuses meaning: what rows say is `read`'s business.

use aya::{
    Pod,
    maps::{HashMap, Map, MapData, MapError},
};

use crate::{KernelError, raw::Raw};

/// One hash map, taken out of the object so that it can be read while probes are attached.
pub(crate) struct Table<K, V> {
    name: &'static str,
    capacity: u64,
    map: HashMap<MapData, Raw<K>, Raw<V>>,
}

pub(crate) fn take(ebpf: &mut aya::Ebpf, name: &'static str) -> Result<Map, KernelError> {
    ebpf.take_map(name).ok_or(KernelError::NoMap { name })
}

impl<K, V> Table<K, V>
where
    Raw<K>: Pod,
    Raw<V>: Pod,
    K: Copy,
    V: Copy,
{
    pub(crate) fn take(ebpf: &mut aya::Ebpf, name: &'static str, capacity: u32) -> Result<Self, KernelError> {
        let map = HashMap::try_from(take(ebpf, name)?).map_err(|source| KernelError::Map { name, source })?;
        Ok(Self { name, capacity: capacity.into(), map })
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Every row. A row removed under way by the kernel is skipped.
    pub(crate) fn rows(&self) -> Result<Vec<(K, V)>, KernelError> {
        let mut rows = Vec::new();
        for row in &self.map {
            match row {
                Ok((Raw(key), Raw(value))) => rows.push((key, value)),
                Err(MapError::KeyNotFound) => {}
                Err(source) => return Err(KernelError::Map { name: self.name, source }),
            }
            // A key removed under way makes the walk start again; that cannot go on for ever.
            if rows.len() as u64 > self.capacity * 2 {
                break;
            }
        }
        Ok(rows)
    }

    /// One row, if it is there.
    pub(crate) fn get(&self, key: K) -> Result<Option<V>, KernelError> {
        match self.map.get(&Raw(key), 0) {
            Ok(Raw(value)) => Ok(Some(value)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(source) => Err(KernelError::Map { name: self.name, source }),
        }
    }

    pub(crate) fn put(&mut self, key: K, value: V) -> Result<(), KernelError> {
        self.map
            .insert(Raw(key), Raw(value), 0)
            .map_err(|source| KernelError::Map { name: self.name, source })
    }

    /// Removes what a predicate does not keep; gives how many rows stay.
    pub(crate) fn retain(&mut self, keep: impl Fn(&K, &V) -> bool) -> Result<u64, KernelError> {
        let rows = self.rows()?;
        self.retain_of(rows, keep)
    }

    /// As [`Table::retain`], of rows that were read before.
    pub(crate) fn retain_of(
        &mut self,
        rows: Vec<(K, V)>,
        keep: impl Fn(&K, &V) -> bool,
    ) -> Result<u64, KernelError> {
        let mut kept = 0;
        for (key, value) in rows {
            if keep(&key, &value) {
                kept += 1;
            } else {
                self.remove(key)?;
            }
        }
        Ok(kept)
    }

    /// Whether there was such a row: the programs may have been faster.
    pub(crate) fn remove(&mut self, key: K) -> Result<bool, KernelError> {
        match self.map.remove(&Raw(key)) {
            Ok(()) => Ok(true),
            Err(MapError::KeyNotFound) => Ok(false),
            Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => {
                Ok(false)
            }
            Err(source) => Err(KernelError::Map { name: self.name, source }),
        }
    }
}
