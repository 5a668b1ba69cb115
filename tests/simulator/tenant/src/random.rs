//! Owns a seeded mix of calls over all families, failures and wrong frees among them; ends holding memory.
//! Refuses to check anything: what happened is the driver's record.

use crate::cuda::Cuda;

/// xorshift64*: the same calls for the same seed, on every machine.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % sides
    }
}

/// How a live thing is freed again.
#[derive(Clone, Copy)]
enum Held {
    Pointer(u64),
    Pool(u64),
    Host(u64),
    Array(u64),
    Handle { handle: u64, address: u64, bytes: u64 },
    Registered(u64),
}

const MOST: usize = 64;

#[allow(clippy::too_many_lines, reason = "one arm a family: the mix is read in one place")]
pub(crate) fn run(cuda: &Cuda, seed: u64, calls: u64) -> Result<(), String> {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut held: Vec<Held> = Vec::new();
    let alloc = cuda.fast(c"cuMemAlloc_v2")?;
    let alloc_async = cuda.fast(c"cuMemAllocAsync")?;
    let alloc_stream = cuda.fast(c"cuMemAllocAsync_ptsz")?;
    let managed = cuda.fast(c"cuMemAllocManaged")?;
    let host = cuda.fast(c"cuMemHostAlloc")?;
    let pitch = cuda.fast(c"cuMemAllocPitch_v2")?;
    let array = cuda.fast(c"cuArrayCreate_v2")?;
    let create = cuda.fast(c"cuMemCreate")?;
    let register = cuda.fast(c"cuMemHostRegister_v2")?;
    let free = cuda.fast(c"cuMemFree_v2")?;
    let mut registered = 0u64;
    for _ in 0..calls {
        let mut out = 0u64;
        let at = &raw mut out as u64;
        let bytes = (dice.roll(64) + 1) << (9 + dice.roll(13));
        if held.len() >= MOST || (!held.is_empty() && dice.roll(100) < 45) {
            let index = usize::try_from(dice.roll(held.len() as u64)).unwrap_or(0);
            let one = held.swap_remove(index);
            release(cuda, one, dice.roll(2) == 0)?;
            continue;
        }
        match dice.roll(100) {
            0..=29 => {
                if alloc(at, bytes, 0, 0) == 0 {
                    held.push(Held::Pointer(out));
                }
            }
            30..=44 => {
                if alloc_async(at, bytes, 0, 0) == 0 {
                    held.push(Held::Pool(out));
                }
            }
            45..=49 => {
                if alloc_stream(at, bytes, 0, 0) == 0 {
                    held.push(Held::Pool(out));
                }
            }
            50..=54 => {
                if managed(at, bytes, 1, 0) == 0 {
                    held.push(Held::Pointer(out));
                }
            }
            55..=62 => {
                if host(at, bytes, 0, 0) == 0 {
                    held.push(Held::Host(out));
                }
            }
            63..=67 => {
                let mut row = 0u64;
                if pitch(at, &raw mut row as u64, dice.roll(4096) + 1, dice.roll(64) + 1) == 0 {
                    held.push(Held::Pointer(out));
                }
            }
            68..=72 => {
                let descriptor = [dice.roll(512) + 1, dice.roll(512), 0x20 | (dice.roll(4) + 1) << 32];
                if array(at, descriptor.as_ptr() as u64, 0, 0) == 0 {
                    held.push(Held::Array(out));
                }
            }
            73..=82 => {
                let properties = [1u64, 1];
                let bytes = (dice.roll(8) + 1) << 21;
                if create(at, bytes, properties.as_ptr() as u64, 0) == 0 {
                    let handle = out;
                    let mut address = 0u64;
                    cuda.call("cuMemAddressReserve", [&raw mut address as u64, bytes, 0, 0, 0])?;
                    cuda.call("cuMemMap", [address, bytes, 0, handle, 0])?;
                    cuda.call("cuMemSetAccess", [address, bytes, 0, 0, 0])?;
                    held.push(Held::Handle { handle, address, bytes });
                }
            }
            83..=86 => {
                registered += 1;
                let address = 0x4000_0000_0000 + registered * 0x10_0000;
                if register(address, bytes, 0, 0) == 0 {
                    held.push(Held::Registered(address));
                }
            }
            // Larger than any GPU: out of memory.
            87..=90 => {
                alloc(at, 1 << 40, 0, 0);
            }
            // An invalid size.
            91..=93 => {
                alloc(at, 0, 0, 0);
            }
            // A pointer that never was, and null.
            94..=96 => {
                free(0xdead_0000, 0, 0, 0);
            }
            _ => {
                free(0, 0, 0, 0);
            }
        }
    }
    Ok(())
}

fn release(cuda: &Cuda, held: Held, first: bool) -> Result<(), String> {
    match held {
        Held::Pointer(address) => cuda.call("cuMemFree_v2", [address, 0, 0, 0, 0])?,
        Held::Pool(address) if first => cuda.call("cuMemFreeAsync", [address, 0, 0, 0, 0])?,
        Held::Pool(address) => cuda.call("cuMemFreeAsync_ptsz", [address, 0, 0, 0, 0])?,
        Held::Host(address) => {
            // The wrong door first: refused, and the entry stays.
            if first {
                cuda.call("cuMemFree_v2", [address, 0, 0, 0, 0])?;
            }
            cuda.call("cuMemFreeHost", [address, 0, 0, 0, 0])?
        }
        Held::Array(handle) => cuda.call("cuArrayDestroy", [handle, 0, 0, 0, 0])?,
        Held::Registered(address) => cuda.call("cuMemHostUnregister", [address, 0, 0, 0, 0])?,
        Held::Handle { handle, address, bytes } => {
            // Either order: the memory lives until both are done.
            if first {
                cuda.call("cuMemRelease", [handle, 0, 0, 0, 0])?;
                cuda.call("cuMemUnmap", [address, bytes, 0, 0, 0])?
            } else {
                cuda.call("cuMemUnmap", [address, bytes, 0, 0, 0])?;
                cuda.call("cuMemRelease", [handle, 0, 0, 0, 0])?
            }
        }
    };
    Ok(())
}
