//! Owns what pools of stream-ordered memory have taken from their GPU, used or not.
//! Refuses to guess it from calls: a pool gives back when its stream is synchronised, which is no traced call.
//!
//! Relies on how driver 580 works (H200): a pool has one address range for ever and maps memory into it, inside the
//! allocating call, in chunks of 32 MiB (0x21 without a range of the same base made in that call); it unmaps each chunk
//! by 0x42 with the same base and length, whoever's call that is in. A reset of the device's context announces nothing.

use cotenant_abi::{Chunk, Loss, PointerKey, Pool, PoolKey, Table};

use crate::{
    atomic, ledger,
    maps::{ANY, CHUNKS, NOEXIST, POOLS, lose},
    quota,
};

#[inline(always)]
fn pool_of(process: u64, gpu: u8) -> Option<*mut Pool> {
    POOLS.get_ptr_mut(&PoolKey { process, gpu, pad: [0; 7] })
}

/// A pool maps memory of a GPU.
#[inline(never)]
pub fn grow(process: u64, gpu: u8, base: u64, bytes: u64) {
    if pool_of(process, gpu).is_none() {
        let key = PoolKey { process, gpu, pad: [0; 7] };
        let _ = POOLS.insert(&key, &Pool { bytes: 0, epoch: 0, unsure: 0 }, NOEXIST);
    }
    let Some(pool) = pool_of(process, gpu) else {
        lose(Loss::LedgerMapFull);
        ledger::mark_lost(process);
        return;
    };
    // One that is there already went without a word.
    drop_chunk(process, base, u64::MAX);
    // SAFETY: a live map value.
    let epoch = unsafe { (*pool).epoch };
    let chunk = Chunk { bytes, epoch, gpu, pad: [0; 7] };
    // SAFETY: as above.
    unsafe {
        if quota::claim(process, Table::Chunks) {
            if CHUNKS.insert(&PointerKey { process, address: base }, &chunk, ANY).is_ok() {
                atomic::fetch_add(&raw mut (*pool).bytes, bytes as i64);
                return;
            }
            quota::count(process, Table::Chunks, -1);
        }
        (*pool).unsure = 1;
    }
}

/// Removes a chunk, if there is one of the GPU (`u64::MAX`: of any). Gives its bytes.
#[inline(never)]
fn drop_chunk(process: u64, base: u64, gpu: u64) -> u64 {
    let key = PointerKey { process, address: base };
    let Some(chunk) = CHUNKS.get_ptr(&key) else {
        return 0;
    };
    // SAFETY: a live map value.
    let Chunk { bytes, epoch, gpu: of, .. } = unsafe { *chunk };
    // A peer's mapping of it is not the memory.
    if gpu != u64::MAX && gpu != u64::from(of) {
        return 0;
    }
    if CHUNKS.remove(&key).is_err() {
        return 0;
    }
    quota::count(process, Table::Chunks, -1);
    if let Some(pool) = pool_of(process, of) {
        // SAFETY: a live map value.
        unsafe {
            if (*pool).epoch == epoch {
                atomic::fetch_add(&raw mut (*pool).bytes, (bytes as i64).wrapping_neg());
            }
        }
    }
    bytes
}

/// Something is unmapped; it is no pool's as a rule.
#[inline(never)]
pub fn shrink(process: u64, gpu: u8, base: u64, bytes: u64) {
    let dropped = drop_chunk(process, base, gpu.into());
    if dropped != 0 && dropped != bytes {
        doubt(process, gpu);
    }
}

/// The device's context has gone, and what its pools held with it.
#[inline(never)]
pub fn forget(process: u64, gpu: u8) {
    if let Some(pool) = pool_of(process, gpu) {
        // SAFETY: a live map value; the process is not allocating on that device at the same time.
        unsafe {
            (*pool).epoch = (*pool).epoch.wrapping_add(1);
            (*pool).bytes = 0;
        }
    }
}

#[inline(never)]
pub fn doubt(process: u64, gpu: u8) {
    if let Some(pool) = pool_of(process, gpu) {
        // SAFETY: a live map value.
        unsafe { (*pool).unsure = 1 };
    }
}
