//! Owns one question to a kernel's BTF: at which byte of a struct a member is.
//! Refuses to guess: a member that is not there, is a bit-field or lies in broken BTF has no offset.

use std::path::PathBuf;

use crate::{Host, HostError, read};

/// Kernels' BTF is 4 to 10 MiB.
const LIMIT: u64 = 64 << 20;
const MAGIC: u16 = 0xEB9F;
const HEADER: usize = 24;
/// Anonymous structs and unions are entered this deep.
const DEPTH: u32 = 8;

const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    #[error("not BTF of this machine's byte order")]
    NotBtf,
    #[error("BTF ends in the middle of a record; is the file whole?")]
    Truncated,
    #[error("BTF holds kind {kind}, which this agent does not know; a newer agent may")]
    UnknownKind { kind: u32 },
    #[error("this kernel has no struct of that name")]
    NoStruct,
    #[error("the struct has no member of that name")]
    NoMember,
    #[error("the member is a bit-field")]
    BitField,
}

/// Parsed BTF, whole.
#[derive(Clone, Debug)]
pub struct Btf {
    types: Vec<u8>,
    strings: Vec<u8>,
    /// Where in `types` the record with this id (less one) begins.
    records: Vec<usize>,
}

impl Btf {
    /// Pure over the bytes of `/sys/kernel/btf/vmlinux`.
    pub fn parse(bytes: &[u8]) -> Result<Self, BtfError> {
        let magic = bytes.get(..2).ok_or(BtfError::Truncated)?;
        if magic != MAGIC.to_ne_bytes() {
            return Err(BtfError::NotBtf);
        }
        let field = |at| word(bytes, at).map(|value| value as usize);
        let body = field(4)?.max(HEADER);
        let section = |offset: usize, length: usize| {
            let from = body.checked_add(offset)?;
            bytes.get(from..from.checked_add(length)?)
        };
        let types = section(field(8)?, field(12)?).ok_or(BtfError::Truncated)?.to_vec();
        let strings = section(field(16)?, field(20)?).ok_or(BtfError::Truncated)?.to_vec();
        let mut records = Vec::new();
        let mut at = 0;
        while at < types.len() {
            records.push(at);
            at += record_length(word(&types, at + 4)?)?;
        }
        if at == types.len() { Ok(Self { types, strings, records }) } else { Err(BtfError::Truncated) }
    }

    /// Bytes from the start of `structure` to `member`, through anonymous members.
    pub fn member_offset(&self, structure: &str, member: &str) -> Result<u32, BtfError> {
        let mut answer = Err(BtfError::NoStruct);
        for at in &self.records {
            let info = word(&self.types, at + 4)?;
            if kind(info) != KIND_STRUCT || self.name(word(&self.types, *at)?) != Some(structure.as_bytes()) {
                continue;
            }
            // A forward-named twin without members comes first on some kernels.
            answer = self.find(*at, member, 0).and_then(|bits| bits.ok_or(BtfError::NoMember));
            if answer != Err(BtfError::NoMember) {
                break;
            }
        }
        let bits = answer?;
        if bits.is_multiple_of(8) { Ok(bits / 8) } else { Err(BtfError::BitField) }
    }

    fn find(&self, at: usize, member: &str, depth: u32) -> Result<Option<u32>, BtfError> {
        let info = word(&self.types, at + 4)?;
        let bit_fields = info >> 31 == 1;
        for index in 0..members(info) {
            let entry = at + 12 + index * 12;
            let (name, of) = (word(&self.types, entry)?, word(&self.types, entry + 4)?);
            let offset = word(&self.types, entry + 8)?;
            let (offset, width) = if bit_fields { (offset & 0x00FF_FFFF, offset >> 24) } else { (offset, 0) };
            if self.name(name) == Some(member.as_bytes()) {
                return if width == 0 { Ok(Some(offset)) } else { Err(BtfError::BitField) };
            }
            if name == 0
                && depth < DEPTH
                && let Some(inner) = self.composite(of)?
                && let Some(within) = self.find(inner, member, depth + 1)?
            {
                return Ok(Some(offset.saturating_add(within)));
            }
        }
        Ok(None)
    }

    /// The record of type `id` if it is a struct or union. Anonymous members are never behind qualifiers.
    fn composite(&self, id: u32) -> Result<Option<usize>, BtfError> {
        let Some(at) = (id as usize).checked_sub(1).and_then(|index| self.records.get(index)) else {
            return Ok(None);
        };
        let info = word(&self.types, at + 4)?;
        Ok(matches!(kind(info), KIND_STRUCT | KIND_UNION).then_some(*at))
    }

    fn name(&self, offset: u32) -> Option<&[u8]> {
        self.strings.get(offset as usize..)?.split(|byte| *byte == 0).next()
    }
}

impl Host {
    /// The running kernel's BTF.
    pub fn btf(&self) -> Result<Btf, HostError> {
        let path: PathBuf = self.path("sys/kernel/btf/vmlinux");
        let bytes = read::bytes(&path, LIMIT)?;
        Btf::parse(&bytes)
            .map_err(|_| HostError::Malformed { path, what: "not whole BTF of a known version" })
    }
}

fn word(bytes: &[u8], at: usize) -> Result<u32, BtfError> {
    let four = at.checked_add(4).and_then(|end| bytes.get(at..end)).ok_or(BtfError::Truncated)?;
    four.try_into().map(u32::from_ne_bytes).map_err(|_| BtfError::Truncated)
}

const fn kind(info: u32) -> u32 {
    info >> 24 & 0x1F
}

const fn members(info: u32) -> usize {
    (info & 0xFFFF) as usize
}

/// `include/uapi/linux/btf.h`: 12 bytes, then what the kind asks for.
fn record_length(info: u32) -> Result<usize, BtfError> {
    let count = members(info);
    let tail = match kind(info) {
        // INT, VAR, DECL_TAG: one word.
        1 | 14 | 17 => 4,
        // PTR, FWD, TYPEDEF, VOLATILE, CONST, RESTRICT, FUNC, FLOAT, TYPE_TAG: nothing.
        2 | 7..=12 | 16 | 18 => 0,
        KIND_ARRAY => 12,
        // STRUCT, UNION, DATASEC, ENUM64: three words each.
        KIND_STRUCT | KIND_UNION | 15 | 19 => 12 * count,
        // ENUM, FUNC_PROTO: two words each.
        6 | 13 => 8 * count,
        kind => return Err(BtfError::UnknownKind { kind }),
    };
    Ok(12 + tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `struct task_struct { int pad[n]; union { struct { void *signal; }; } ; int flag : 1 }`.
    fn fixture(shift_bits: u32) -> Vec<u8> {
        let strings = b"\0task_struct\0signal\0flag\0".to_vec();
        let (task, signal, flag) = (1u32, 13u32, 20u32);
        let record = |name: u32, kind: u32, count: u32, flagged: u32, size: u32| {
            [name, flagged << 31 | kind << 24 | count, size]
        };
        let mut words: Vec<u32> = vec![];
        words.extend(record(0, 2, 0, 0, 0)); // 1: PTR to void
        words.extend(record(0, 4, 1, 0, 8)); // 2: anonymous struct
        words.extend([signal, 1, 64]);
        words.extend(record(0, 5, 1, 0, 16)); // 3: anonymous union
        words.extend([0, 2, 0]);
        words.extend(record(task, 4, 2, 1, 128)); // 4: task_struct, with bit-fields
        words.extend([0, 3, shift_bits]);
        words.extend([flag, 1, 1 << 24 | (shift_bits + 128)]);
        let types: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut bytes = MAGIC.to_ne_bytes().to_vec();
        bytes.extend([1, 0]);
        let lengths = [24, 0, types.len(), types.len(), strings.len()];
        bytes.extend(lengths.iter().flat_map(|value| u32::try_from(*value).unwrap().to_ne_bytes()));
        bytes.extend(types);
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn c75_shifted_fields_are_found_where_they_are() {
        for (bits, bytes) in [(64, 16), (1024, 136), (8 * 4000, 4008)] {
            let btf = Btf::parse(&fixture(bits)).unwrap();
            assert_eq!(btf.member_offset("task_struct", "signal"), Ok(bytes));
        }
    }

    #[test]
    fn c75_what_is_not_there_has_no_offset() {
        let btf = Btf::parse(&fixture(64)).unwrap();
        assert_eq!(btf.member_offset("task_struct", "gone"), Err(BtfError::NoMember));
        assert_eq!(btf.member_offset("signal_struct", "live"), Err(BtfError::NoStruct));
        assert_eq!(btf.member_offset("task_struct", "flag"), Err(BtfError::BitField));
    }

    #[test]
    fn every_truncation_is_refused_without_a_panic() {
        let whole = fixture(64);
        for length in 0..whole.len() {
            assert!(Btf::parse(&whole[..length]).is_err(), "{length}");
        }
        let mut swapped = whole;
        swapped.swap(0, 1);
        assert_eq!(Btf::parse(&swapped).unwrap_err(), BtfError::NotBtf);
    }

    #[test]
    fn live_kernel_says_where_the_thread_count_is() {
        let host = Host::live();
        let Ok(btf) = host.btf() else {
            eprintln!("skipped: this kernel has no BTF");
            return;
        };
        assert!(btf.member_offset("task_struct", "signal").unwrap() > 0);
        assert!(btf.member_offset("signal_struct", "live").is_ok());
        assert!(btf.member_offset("task_struct", "tgid").is_ok());
    }
}
