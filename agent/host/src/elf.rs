//! Owns where exported functions lie in a shared library's file.
//! Refuses to trust the file: it is a tenant's, so it is read with bounds, never mapped, and refused with a reason.

use std::collections::HashMap;
use std::fs::File;

use object::elf::{self, FileHeader64, ProgramHeader64, Sym64};
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym};
use object::{LittleEndian, ReadRef};

/// libcuda is 30 to 100 MiB.
pub(crate) const MAX_FILE: u64 = 512 << 20;
const MAX_PROGRAM_HEADERS: u16 = 128;
const MAX_SECTIONS: u16 = 1024;
/// 24 bytes each: some 700,000 symbols. libcuda has a thousand.
const MAX_SYMBOL_BYTES: u64 = 16 << 20;
const MAX_STRING_BYTES: u64 = 16 << 20;

const MACHINE: u16 = if cfg!(target_arch = "aarch64") { elf::EM_AARCH64 } else { elf::EM_X86_64 };
const ENDIAN: LittleEndian = LittleEndian;

#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    #[error("could not read the library's size")]
    Size { source: std::io::Error },
    #[error("{bytes} bytes are more than any libcuda has")]
    TooLarge { bytes: u64 },
    #[error("not a 64-bit little-endian ELF file")]
    NotElf,
    #[error("built for machine {machine}, and this host is {MACHINE}")]
    ForeignMachine { machine: u16 },
    #[error("not a shared library (ELF type {kind})")]
    NotShared { kind: u16 },
    #[error("{what} is absurd: {count}")]
    Absurd { what: &'static str, count: u64 },
    #[error("{what} is cut off or broken")]
    Broken { what: &'static str },
    #[error("it exports nothing: no dynamic symbols")]
    NoSymbols,
}

/// Where the wanted symbols are. Indexes are into the list that was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exports {
    /// Symbol and its offset in the file, in the order asked for. Twins share an offset.
    pub found: Vec<(usize, u64)>,
    pub missing: Vec<usize>,
    /// Exported, but not a place to put a probe.
    pub refused: Vec<(usize, &'static str)>,
}

/// Finds `wanted` among the functions that `file` exports.
pub fn exports(file: &File, wanted: &[&str]) -> Result<Exports, ElfError> {
    let bytes = file.metadata().map_err(|source| ElfError::Size { source })?.len();
    if bytes > MAX_FILE {
        return Err(ElfError::TooLarge { bytes });
    }
    let cache = ReadCache::new(file);
    let data = &cache;
    let header = header(data)?;
    let segments = header
        .program_headers(ENDIAN, data)
        .map_err(|_| ElfError::Broken { what: "the program header table" })?;
    let (symbols, strings) = dynamic_symbols(header, data)?;
    Ok(collect(symbols, strings, segments, bytes, wanted))
}

fn header<'data, R: ReadRef<'data>>(data: R) -> Result<&'data FileHeader64<LittleEndian>, ElfError> {
    let header = data.read_at::<FileHeader64<LittleEndian>>(0).map_err(|()| ElfError::NotElf)?;
    if !header.is_supported() || !header.is_type_64() || !header.is_little_endian() {
        return Err(ElfError::NotElf);
    }
    let machine = header.e_machine(ENDIAN);
    if machine != MACHINE {
        return Err(ElfError::ForeignMachine { machine });
    }
    let kind = header.e_type(ENDIAN);
    if kind != elf::ET_DYN {
        return Err(ElfError::NotShared { kind });
    }
    for (what, count, most) in [
        ("the number of program headers", header.e_phnum(ENDIAN), MAX_PROGRAM_HEADERS),
        ("the number of sections", header.e_shnum(ENDIAN), MAX_SECTIONS),
    ] {
        if count == 0 || count > most {
            return Err(ElfError::Absurd { what, count: count.into() });
        }
    }
    Ok(header)
}

fn dynamic_symbols<'data, R: ReadRef<'data>>(
    header: &'data FileHeader64<LittleEndian>,
    data: R,
) -> Result<(&'data [Sym64<LittleEndian>], &'data [u8]), ElfError> {
    let sections = header
        .section_headers(ENDIAN, data)
        .map_err(|_| ElfError::Broken { what: "the section header table" })?;
    let symbols = sections
        .iter()
        .find(|section| section.sh_type(ENDIAN) == elf::SHT_DYNSYM)
        .ok_or(ElfError::NoSymbols)?;
    let strings = sections
        .get(symbols.sh_link(ENDIAN) as usize)
        .filter(|section| section.sh_type(ENDIAN) == elf::SHT_STRTAB)
        .ok_or(ElfError::Broken { what: "the link from symbols to names" })?;
    for (what, count, most) in [
        ("the size of the symbol table", symbols.sh_size(ENDIAN), MAX_SYMBOL_BYTES),
        ("the size of the name table", strings.sh_size(ENDIAN), MAX_STRING_BYTES),
    ] {
        if count > most {
            return Err(ElfError::Absurd { what, count });
        }
    }
    let table =
        symbols.data_as_array(ENDIAN, data).map_err(|_| ElfError::Broken { what: "the symbol table" })?;
    let names = strings.data(ENDIAN, data).map_err(|_| ElfError::Broken { what: "the name table" })?;
    Ok((table, names))
}

fn collect(
    symbols: &[Sym64<LittleEndian>],
    strings: &[u8],
    segments: &[ProgramHeader64<LittleEndian>],
    file_bytes: u64,
    wanted: &[&str],
) -> Exports {
    let places: HashMap<&[u8], usize> =
        wanted.iter().enumerate().map(|(index, name)| (name.as_bytes(), index)).collect();
    let mut answers: Vec<Option<Result<u64, &'static str>>> = vec![None; wanted.len()];
    // No name is looked at beyond the longest wanted: a table without an end must cost nothing.
    let longest = wanted.iter().map(|name| name.len()).max().unwrap_or(0);
    for symbol in symbols.iter().filter(|symbol| symbol.st_shndx(ENDIAN) != elf::SHN_UNDEF) {
        let rest = strings.get(symbol.st_name(ENDIAN) as usize..).unwrap_or_default();
        let head = &rest[..rest.len().min(longest + 1)];
        let name = head.iter().position(|byte| *byte == 0).map(|end| &head[..end]);
        let Some(index) = name.and_then(|name| places.get(name)) else { continue };
        let answer = if symbol.st_type() == elf::STT_FUNC {
            file_offset(symbol.st_value(ENDIAN), segments, file_bytes)
        } else {
            Err("not a plain function")
        };
        // Several versions of one name: the first usable one.
        if !matches!(answers[*index], Some(Ok(_))) {
            answers[*index] = Some(answer);
        }
    }
    let mut exports = Exports::default();
    for (index, answer) in answers.into_iter().enumerate() {
        match answer {
            Some(Ok(offset)) => exports.found.push((index, offset)),
            Some(Err(reason)) => exports.refused.push((index, reason)),
            None => exports.missing.push(index),
        }
    }
    exports
}

/// A probe goes to a file offset; the symbol has an address. The segment that loads it links the two.
fn file_offset(
    address: u64,
    segments: &[ProgramHeader64<LittleEndian>],
    file_bytes: u64,
) -> Result<u64, &'static str> {
    let holds = |segment: &&ProgramHeader64<LittleEndian>| {
        segment.p_type(ENDIAN) == elf::PT_LOAD
            && address
                .checked_sub(segment.p_vaddr(ENDIAN))
                .is_some_and(|into| into < segment.p_filesz(ENDIAN))
    };
    let segment = segments.iter().find(holds).ok_or("outside every loaded segment")?;
    if segment.p_flags(ENDIAN) & elf::PF_X == 0 {
        return Err("outside every executable segment");
    }
    (address - segment.p_vaddr(ENDIAN))
        .checked_add(segment.p_offset(ENDIAN))
        .filter(|offset| *offset < file_bytes)
        .ok_or("behind the end of the file")
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write};

    use super::*;

    const WANTED: [&str; 4] = ["cuMemAlloc_v2", "cuMemFree_v2", "cuData", "cuNever"];
    const CODE_ADDRESS: u64 = 0x40_1000;
    const CODE_OFFSET: u64 = 0x1000;

    struct Fixture {
        machine: u16,
        class: u8,
        kind: u16,
        symbol_bytes: Option<u64>,
        phnum: u16,
        length: u64,
    }

    impl Default for Fixture {
        fn default() -> Self {
            let kind = elf::ET_DYN;
            Self { machine: MACHINE, class: 2, kind, symbol_bytes: None, phnum: 2, length: 0x3000 }
        }
    }

    /// Header, two segments (code, data), names, symbols, three section headers.
    fn write(fixture: &Fixture) -> File {
        let names = b"\0cuMemAlloc_v2\0cuMemFree_v2\0cuData\0";
        let mut symbols = vec![0u8; 24];
        for (name, kind, address) in
            [(1u32, 2u8, CODE_ADDRESS + 0x20), (15, 2, CODE_ADDRESS + 0x80), (28, 2, 0x80_0000)]
        {
            symbols.extend(name.to_le_bytes());
            symbols.extend([1 << 4 | kind, 0, 1, 0]);
            symbols.extend(address.to_le_bytes());
            symbols.extend(8u64.to_le_bytes());
        }
        let mut file = vec![0u8; 0x3000];
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &[0x7f, b'E', b'L', b'F', fixture.class, 1, 1]);
        put(16, &fixture.kind.to_le_bytes());
        put(18, &fixture.machine.to_le_bytes());
        put(20, &1u32.to_le_bytes());
        put(32, &64u64.to_le_bytes());
        put(40, &0x2000u64.to_le_bytes());
        for (at, value) in [(52, 64), (54, 56), (56, fixture.phnum), (58, 64), (60, 3)] {
            put(at, &u16::to_le_bytes(value));
        }
        for (index, flags, offset, address) in
            [(0, 5u32, CODE_OFFSET, CODE_ADDRESS), (1, 6, 0x1800, 0x80_0000)]
        {
            let at = 64 + index * 56;
            put(at, &1u32.to_le_bytes());
            put(at + 4, &flags.to_le_bytes());
            for (step, value) in [(8, offset), (16, address), (24, address), (32, 0x400), (40, 0x400)] {
                put(at + step, &value.to_le_bytes());
            }
        }
        put(0x400, names);
        put(0x500, &symbols);
        let symbol_bytes = fixture.symbol_bytes.unwrap_or(symbols.len() as u64);
        for (index, kind, offset, size, link) in [
            (1, elf::SHT_DYNSYM, 0x500u64, symbol_bytes, 2u32),
            (2, elf::SHT_STRTAB, 0x400, names.len() as u64, 0),
        ] {
            let at = 0x2000 + index * 64;
            put(at + 4, &kind.to_le_bytes());
            put(at + 24, &offset.to_le_bytes());
            put(at + 32, &size.to_le_bytes());
            put(at + 40, &link.to_le_bytes());
            put(at + 56, &24u64.to_le_bytes());
        }
        let mut out = tempfile::tempfile().unwrap();
        out.write_all(&file).unwrap();
        out.set_len(fixture.length).unwrap();
        out.seek(SeekFrom::Start(0)).unwrap();
        out
    }

    #[test]
    fn functions_are_found_by_file_offset_and_data_is_refused() {
        let exports = exports(&write(&Fixture::default()), &WANTED).unwrap();
        assert_eq!(exports.found, [(0, CODE_OFFSET + 0x20), (1, CODE_OFFSET + 0x80)]);
        assert_eq!(exports.refused, [(2, "outside every executable segment")]);
        assert_eq!(exports.missing, [3]);
    }

    #[test]
    fn c54_a_file_that_cannot_be_this_hosts_libcuda_is_refused() {
        let refused = |fixture: Fixture| exports(&write(&fixture), &WANTED).unwrap_err();
        let base = Fixture::default;
        assert!(matches!(refused(Fixture { class: 1, ..base() }), ElfError::NotElf));
        assert!(matches!(
            refused(Fixture { machine: 40, ..base() }),
            ElfError::ForeignMachine { machine: 40 }
        ));
        assert!(matches!(refused(Fixture { kind: elf::ET_EXEC, ..base() }), ElfError::NotShared { .. }));
        assert!(matches!(refused(Fixture { phnum: 60000, ..base() }), ElfError::Absurd { .. }));
        assert!(matches!(
            refused(Fixture { symbol_bytes: Some(1 << 40), ..base() }),
            ElfError::Absurd { .. }
        ));
        assert!(matches!(
            refused(Fixture { symbol_bytes: Some(1 << 20), ..base() }),
            ElfError::Broken { .. }
        ));
        assert!(matches!(refused(Fixture { length: MAX_FILE + 1, ..base() }), ElfError::TooLarge { .. }));
        assert!(matches!(refused(Fixture { length: 0, ..base() }), ElfError::NotElf));
    }

    #[test]
    fn every_truncation_ends_in_an_error_or_an_answer() {
        for length in (0..0x3000).step_by(37) {
            let _ = exports(&write(&Fixture { length, ..Fixture::default() }), &WANTED);
        }
    }

    #[test]
    fn live_libc_exports_malloc() {
        let host = crate::Host::live();
        let mappings = host.mappings(std::process::id()).unwrap();
        let Some(libc) = mappings.rows.iter().find(|row| row.path.contains("/libc.so")) else {
            eprintln!("skipped: no shared libc here");
            return;
        };
        let exports = exports(&File::open(&libc.path).unwrap(), &["malloc", "no_such_function"]).unwrap();
        assert_eq!((exports.found.len(), exports.missing.as_slice()), (1, &[1][..]));
    }
}
