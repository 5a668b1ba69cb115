//! Owns names for kernel addresses: one pass over `/proc/kallsyms`, modules included.
//! Refuses to keep the table: 250,000 lines go by, only what was asked for stays.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};

use crate::{Host, HostError};

/// Some 250,000 symbols at 60 bytes each fit four times.
const LIMIT: u64 = 64 << 20;
const CHUNK: usize = 64 << 10;
/// No function is this long: an address further above its nearest symbol is in none (a module that went, user space).
const LONGEST_FUNCTION: u64 = 1 << 20;

/// One line of `/proc/kallsyms` that names code.
struct Symbol<'a> {
    address: u64,
    name: &'a [u8],
}

impl Host {
    /// The function behind each return address, in the order given; `None` where no function is near.
    ///
    /// A return address points behind its call, which may be the last instruction of the caller, so the byte before it
    /// is looked up. Compiler suffixes (`.isra.0`, `.constprop.0`, `.cold`) are not part of a name.
    pub fn symbolize(&self, addresses: &[u64]) -> Result<Vec<Option<String>>, HostError> {
        let mut wanted: Vec<u64> = addresses.iter().map(|address| address.saturating_sub(1)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        // By gap: the highest symbol at or below each wanted address and above the one before it.
        let mut nearest: Vec<Option<(u64, Vec<u8>)>> = vec![None; wanted.len()];
        self.each_function(|symbol| {
            let at = wanted.partition_point(|address| *address < symbol.address);
            let Some(slot) = nearest.get_mut(at) else { return };
            match slot {
                Some((best, _)) if *best >= symbol.address => {}
                Some((best, name)) => {
                    *best = symbol.address;
                    name.clear();
                    name.extend_from_slice(symbol.name);
                }
                None => *slot = Some((symbol.address, symbol.name.to_vec())),
            }
        })?;
        let name = |address: &u64| {
            let wanted_address = address.saturating_sub(1);
            let at = wanted.binary_search(&wanted_address).ok()?;
            // A gap without a symbol belongs to the function below it.
            let (start, name) = nearest[..=at].iter().rev().find_map(Option::as_ref)?;
            (wanted_address - start < LONGEST_FUNCTION).then(|| plain(name))
        };
        Ok(addresses.iter().map(name).collect())
    }

    /// Where each of `names` begins and where the next function does, in their order; `None` for what this kernel has
    /// not. Of several functions with one name the first counts, and the kernel proper comes before modules.
    ///
    /// Two passes, since a module's symbols are in no order: the next one up may have gone by already.
    pub fn text_range(&self, names: &[&str]) -> Result<Vec<Option<(u64, u64)>>, HostError> {
        let mut starts: Vec<Option<u64>> = vec![None; names.len()];
        self.each_function(|symbol| {
            for (start, name) in starts.iter_mut().zip(names) {
                if start.is_none() && name.as_bytes() == symbol.name {
                    *start = Some(symbol.address);
                }
            }
        })?;
        let mut ends: Vec<Option<u64>> = vec![None; names.len()];
        self.each_function(|symbol| {
            for (end, start) in ends.iter_mut().zip(&starts) {
                let above = start.is_some_and(|start| symbol.address > start);
                if above && end.is_none_or(|end| symbol.address < end) {
                    *end = Some(symbol.address);
                }
            }
        })?;
        let range = |(start, end): (Option<u64>, Option<u64>)| Some((start?, end?));
        Ok(starts.into_iter().zip(ends).map(range).collect())
    }

    /// Shows every function to `see`, or says that this reader may not know addresses.
    fn each_function(&self, mut see: impl FnMut(&Symbol<'_>)) -> Result<(), HostError> {
        let path = self.path("proc/kallsyms");
        let failed = |source| HostError::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(failed)?;
        let mut reader = BufReader::with_capacity(CHUNK, file.take(LIMIT));
        let mut line = Vec::with_capacity(256);
        let (mut lines, mut shown) = (0_u64, 0_u64);
        while reader.read_until(b'\n', &mut line).map_err(failed)? > 0 {
            lines += 1;
            if let Some((address, symbol)) = parse(&line) {
                shown += u64::from(address != 0);
                if let Some(symbol) = symbol {
                    see(&symbol);
                }
            }
            line.clear();
        }
        match (lines, shown) {
            (0, _) => Err(HostError::Malformed { path, what: "it has no symbols" }),
            (_, 0) => Err(HostError::AddressesHidden { path }),
            _ => Ok(()),
        }
    }
}

/// `ffffffffc0a01230 t rmapiLockAcquire\t[nvidia]`: the address, and the symbol if it is code. `None` for another format.
fn parse(line: &[u8]) -> Option<(u64, Option<Symbol<'_>>)> {
    let space = line.iter().position(|byte| *byte == b' ')?;
    let address = hex(&line[..space])?;
    let (kind, rest) = line[space + 1..].split_first()?;
    let name = rest.strip_prefix(b" ")?;
    let end = name.iter().position(u8::is_ascii_whitespace).unwrap_or(name.len());
    // Absolute symbols at 0 (per-CPU offsets on older kernels) are no place that a stack can show.
    let code = matches!(kind, b't' | b'T' | b'w' | b'W') && address != 0;
    Some((address, code.then_some(Symbol { address, name: &name[..end] })))
}

fn hex(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > 16 {
        return None;
    }
    digits
        .iter()
        .try_fold(0_u64, |value, digit| Some(value << 4 | u64::from(char::from(*digit).to_digit(16)?)))
}

/// A name as the source has it. A dot is in no C identifier: what follows one was added by the compiler.
fn plain(name: &[u8]) -> String {
    let end = name.iter().skip(1).position(|byte| *byte == b'.').map_or(name.len(), |at| at + 1);
    String::from_utf8_lossy(&name[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDED: &str = "\
0000000000000000 A fixed_percpu_data
ffffffff81000000 T _stext
ffffffff81000d40 T asm_common_interrupt
ffffffff81000f70 T __irqentry_text_end
ffffffff81100000 t down_write
ffffffff81100080 t __down_common.cold
ffffffff81200000 D jiffies
ffffffff82400000 W do_futex
ffffffffc0a05000 t os_acquire_rwlock_write\t[nvidia]
ffffffffc0a02000 t _rmGpuLocksAcquire.isra.0\t[nvidia]
ffffffffc0a01000 t rmapiLockAcquire\t[nvidia]
ffffffffc0a03000 r _note_6\t[nvidia]
";

    fn host(kallsyms: &str) -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("proc")).unwrap();
        std::fs::write(root.path().join("proc/kallsyms"), kallsyms).unwrap();
        let host = Host::at(root.path());
        (root, host)
    }

    fn names(found: &[Option<String>]) -> Vec<&str> {
        found.iter().map(|name| name.as_deref().unwrap_or("-")).collect()
    }

    #[test]
    fn a_return_address_belongs_to_the_call_before_it() {
        let (_root, host) = host(RECORDED);
        let asked = [
            0xffff_ffff_c0a0_1fff, // inside
            0xffff_ffff_c0a0_2000, // the call was the last instruction of rmapiLockAcquire
            0xffff_ffff_c0a0_2001, // the first instruction's end; a suffix to lose
            0xffff_ffff_c0a0_5010,
            0xffff_ffff_8110_0010,
            0xffff_ffff_8110_0090,
            0xffff_ffff_c0a0_1fff, // asked twice
        ];
        assert_eq!(
            names(&host.symbolize(&asked).unwrap()),
            [
                "rmapiLockAcquire",
                "rmapiLockAcquire",
                "_rmGpuLocksAcquire",
                "os_acquire_rwlock_write",
                "down_write",
                "__down_common",
                "rmapiLockAcquire"
            ]
        );
    }

    #[test]
    fn a_modules_symbols_may_come_in_any_order() {
        let (_root, host) = host(RECORDED);
        let asked = [0xffff_ffff_c0a0_5010];
        assert_eq!(
            names(&host.symbolize(&asked).unwrap()),
            ["os_acquire_rwlock_write"],
            "two lower ones come after it"
        );
    }

    #[test]
    fn an_address_in_no_function_has_no_name() {
        let (_root, host) = host(RECORDED);
        let asked = [0, 1, 0x7f00_1234_5678, u64::MAX, 0xffff_ffff_8260_0000, 0xffff_ffff_8100_0000];
        assert_eq!(names(&host.symbolize(&asked).unwrap()), ["-"; 6]);
        assert_eq!(host.symbolize(&[]).unwrap(), []);
    }

    #[test]
    fn ranges_end_at_the_next_function_in_whatever_order() {
        let (_root, host) = host(RECORDED);
        let asked =
            ["asm_common_interrupt", "handle_softirqs", "rmapiLockAcquire", "os_acquire_rwlock_write"];
        let ranges = host.text_range(&asked).unwrap();
        assert_eq!(ranges[0], Some((0xffff_ffff_8100_0d40, 0xffff_ffff_8100_0f70)));
        assert_eq!(ranges[1], None);
        assert_eq!(
            ranges[2],
            Some((0xffff_ffff_c0a0_1000, 0xffff_ffff_c0a0_2000)),
            "its next went by before it"
        );
        assert_eq!(ranges[3], None, "nothing is above it");
    }

    #[test]
    fn hidden_addresses_are_an_error_of_their_own() {
        let (_root, hidden) = host("0000000000000000 T _stext\n0000000000000000 t down_write\n");
        let error = hidden.symbolize(&[0xffff_ffff_8110_0010]).unwrap_err();
        assert!(matches!(error, HostError::AddressesHidden { .. }), "{error}");
        assert!(error.to_string().contains("kernel.kptr_restrict"), "{error}");
        assert!(matches!(hidden.text_range(&["_stext"]), Err(HostError::AddressesHidden { .. })));
        let (_root, empty) = host("");
        assert!(matches!(empty.symbolize(&[1]), Err(HostError::Malformed { .. })));
    }

    #[test]
    fn lines_of_another_format_are_passed_over() {
        let (_root, host) = host("junk\n\nzz T a\nffffffff81000000 T\nffffffff81000000 T real\n");
        assert_eq!(names(&host.symbolize(&[0xffff_ffff_8100_0004]).unwrap()), ["real"]);
    }

    #[test]
    fn live_stack_of_this_kernel_is_named() {
        let host = Host::live();
        let ranges = match host.text_range(&["schedule", "no_such_symbol_here"]) {
            Err(HostError::AddressesHidden { .. }) => {
                eprintln!("skipped: kernel.kptr_restrict hides addresses");
                return;
            }
            other => other.unwrap(),
        };
        let (start, end) = ranges[0].unwrap();
        assert!(start < end && ranges[1].is_none());
        let began = std::time::Instant::now();
        let names = host.symbolize(&[start + 4, end]).unwrap();
        eprintln!("one pass: {:?}", began.elapsed());
        assert_eq!(names, [Some("schedule".to_owned()), Some("schedule".to_owned())]);
    }
}
