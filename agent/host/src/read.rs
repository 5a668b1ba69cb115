//! Owns bounded reading: nothing a tenant can make long is read whole.
//! Refuses parsing.

use std::fmt::Write;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::HostError;

/// The whole file, or an error if it is longer than `limit`.
pub(crate) fn bytes(path: &Path, limit: u64) -> Result<Vec<u8>, HostError> {
    owned(path, limit, None)
}

/// As [`bytes`], of a file that is this user's own, whatever links led to it.
pub(crate) fn bytes_of(path: &Path, limit: u64, uid: u32) -> Result<Vec<u8>, HostError> {
    owned(path, limit, Some(uid))
}

fn owned(path: &Path, limit: u64, uid: Option<u32>) -> Result<Vec<u8>, HostError> {
    let failed = |source| HostError::Read { path: path.to_owned(), source };
    let mut content = Vec::new();
    // A FIFO that a user put in the way must not hold the agent up.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(HostError::Malformed { path: path.to_owned(), what: "not a regular file" });
    }
    if uid.is_some_and(|uid| metadata.uid() != uid) {
        return Err(HostError::Malformed { path: path.to_owned(), what: "not the user's own file" });
    }
    file.take(limit + 1).read_to_end(&mut content).map_err(failed)?;
    if content.len() as u64 > limit {
        return Err(HostError::TooLong { path: path.to_owned(), limit });
    }
    Ok(content)
}

/// As [`bytes`], with what is not UTF-8 replaced.
pub(crate) fn text(path: &Path, limit: u64) -> Result<String, HostError> {
    Ok(String::from_utf8_lossy(&bytes(path, limit)?).into_owned())
}

/// Bytes as text, with what is not UTF-8 as `\xff`: two names that differ in it stay two.
pub fn exact(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

/// A cgroup's path below its hierarchy, without slashes around it.
pub(crate) fn below<'a>(hierarchy: &Path, cgroup: &'a str) -> Result<&'a str, HostError> {
    let below = cgroup.trim_matches('/');
    if below.split('/').any(|segment| segment == "..") {
        let what = "a cgroup path that leaves its root";
        return Err(HostError::Malformed { path: hierarchy.join(below), what });
    }
    Ok(below)
}

/// Names in a directory, at most `limit`; none if it cannot be read.
pub(crate) fn names_in(path: &Path, limit: usize) -> Vec<String> {
    let Ok(entries) = fs::read_dir(path) else { return Vec::new() };
    entries.take(limit).flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}
