//! Owns `/proc/PID/maps`: which files a process has mapped, where.
//! Refuses more than a bound, and says when there was more: a tenant decides how long this file is.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};

use crate::{Host, HostError};

const MAX_BYTES: u64 = 16 << 20;
const MAX_LINES: usize = 1 << 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub start: u64,
    pub end: u64,
    /// Of its first byte in the file.
    pub offset: u64,
    /// As the process sees it, without ` (deleted)`.
    pub path: String,
    /// As in maps, `makedev` form. Overlay and btrfs files show another device to `stat`.
    pub device: u64,
    pub inode: u64,
    pub deleted: bool,
    pub executable: bool,
}

/// The file mappings of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mappings {
    pub rows: Vec<Mapping>,
    /// There were more lines than are read.
    pub truncated: bool,
}

impl Host {
    /// The files that `pid` has mapped. Reading takes the process's mmap lock for a moment.
    pub fn mappings(&self, pid: u32) -> Result<Mappings, HostError> {
        let path = self.process_file(pid, "maps");
        let failed = |source| HostError::Read { path: path.clone(), source };
        let mut reader = BufReader::new(File::open(&path).map_err(failed)?.take(MAX_BYTES));
        let mut mappings = Mappings::default();
        let mut line = Vec::new();
        for _ in 0..MAX_LINES {
            line.clear();
            if reader.read_until(b'\n', &mut line).map_err(failed)? == 0 {
                mappings.truncated = reader.get_ref().limit() == 0;
                return Ok(mappings);
            }
            mappings.rows.extend(parse(&String::from_utf8_lossy(&line)));
        }
        mappings.truncated = true;
        Ok(mappings)
    }
}

/// One line; `None` if it maps no file.
fn parse(line: &str) -> Option<Mapping> {
    let line = line.strip_suffix('\n').unwrap_or(line);
    // The path is the sixth field and may hold spaces.
    let (head, path) = line.split_at(line.find('/')?);
    let mut fields = head.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?;
    let offset = fields.next()?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let inode = fields.next()?.parse().ok().filter(|inode| *inode != 0)?;
    if fields.next().is_some() {
        return None;
    }
    let (path, deleted) = match path.strip_suffix(" (deleted)") {
        Some(path) => (path, true),
        None => (path, false),
    };
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let number = |text| u32::from_str_radix(text, 16).ok();
    Some(Mapping {
        start: hex(start)?,
        end: hex(end)?,
        offset: hex(offset)?,
        // The kernel escapes a newline, and nothing else, as octal.
        path: path.replace("\\012", "\n"),
        device: rustix::fs::makedev(number(major)?, number(minor)?),
        inode,
        deleted,
        executable: permissions.as_bytes().get(2) == Some(&b'x'),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_the_kernel_writes_them() {
        let mapped = parse(
            "7f2b4c000000-7f2b4c200000 r-xp 00028000 fe:01 1234567                    /usr/lib/my dir/libcuda.so.1 (deleted)\n",
        )
        .unwrap();
        assert_eq!((mapped.start, mapped.end), (0x7f2b_4c00_0000, 0x7f2b_4c20_0000));
        assert_eq!(mapped.offset, 0x28000);
        assert_eq!(mapped.path, "/usr/lib/my dir/libcuda.so.1");
        assert!(mapped.deleted && mapped.executable);
        assert_eq!((mapped.inode, mapped.device), (1_234_567, rustix::fs::makedev(0xfe, 1)));
        for other in [
            "7ffd0000-7ffd1000 rw-p 00000000 00:00 0                          [stack]\n",
            "7ffd0000-7ffd1000 rw-p 00000000 00:00 0 \n",
            "7ffd0000-7ffd1000 rw-s 00000000 00:05 0    /dev/zero (deleted)\n",
            "",
            "/",
            "x-y r-xp 0 0:0 1 /a",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn live_self_maps_its_own_program() {
        let host = Host::live();
        let pid = std::process::id();
        let mappings = host.mappings(pid).unwrap();
        let exe = host.exe(pid).unwrap();
        assert!(!mappings.truncated);
        assert!(mappings.rows.iter().any(|row| row.executable && row.path == exe.to_str().unwrap()));
    }
}
