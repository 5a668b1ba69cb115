//! Owns where tracefs is, and the layout of an event's record on this kernel.
//! Refuses to enable or read events.

use std::path::PathBuf;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};

use crate::{Host, HostError, read};

const PLACES: [&str; 2] = ["sys/kernel/tracing", "sys/kernel/debug/tracing"];
const FORMAT_LIMIT: u64 = 256 << 10;
const MOUNTS_LIMIT: u64 = 4 << 20;

/// The `format` file of one trace event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventFormat {
    pub name: String,
    pub id: u32,
    pub fields: Vec<Field>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: String,
    pub offset: u32,
    pub size: u32,
    pub signed: bool,
    /// `__data_loc`: the record holds where the bytes are, not the bytes.
    pub dynamic: bool,
}

impl EventFormat {
    /// Pure over the file's text; `None` if it has no name, no id, or a field that cannot be read.
    pub fn parse(text: &str) -> Option<Self> {
        let value = |key| text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        let fields = text.lines().filter(|line| line.trim_start().starts_with("field:"));
        Some(Self {
            name: value("name:")?.to_owned(),
            id: value("ID:")?.parse().ok()?,
            fields: fields.map(field).collect::<Option<_>>()?,
        })
    }

    pub fn field(&self, name: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.name == name)
    }
}

/// `field:__data_loc char[] comm; offset:12; size:4; signed:0;`, with tabs between.
fn field(line: &str) -> Option<Field> {
    let mut parts = line.trim().split(';').map(str::trim);
    let declaration = parts.next()?.strip_prefix("field:")?;
    let mut number = |key: &str| parts.next()?.strip_prefix(key)?.parse::<u32>().ok();
    let (offset, size) = (number("offset:")?, number("size:")?);
    let signed = number("signed:")? != 0;
    // The name is the last word, before an array's length.
    let words = declaration.split_once('[').filter(|(_, rest)| rest.ends_with(']') && !rest.contains(' '));
    let name = words.map_or(declaration, |(before, _)| before).split_whitespace().next_back()?;
    let name = name.trim_start_matches('*').to_owned();
    Some(Field { name, offset, size, signed, dynamic: declaration.starts_with("__data_loc") })
}

impl Host {
    /// Where tracefs is mounted, if it is.
    pub fn tracefs(&self) -> Option<PathBuf> {
        PLACES.iter().map(|place| self.path(place)).find(|place| place.join("events").is_dir())
    }

    /// The layout of `category/event` on this kernel.
    pub fn event_format(&self, category: &str, event: &str) -> Result<EventFormat, HostError> {
        let mount = self.tracefs().unwrap_or_else(|| self.path(PLACES[0]));
        let path = mount.join("events").join(category).join(event).join("format");
        let text = read::text(&path, FORMAT_LIMIT)?;
        EventFormat::parse(&text).ok_or(HostError::Malformed { path, what: "not an event format" })
    }

    /// Where tracefs is, mounted at `/sys/kernel/tracing` if it was not.
    pub fn ensure_mounted(&self) -> Result<PathBuf, HostError> {
        if let Some(mounted) = self.tracefs() {
            return Ok(mounted);
        }
        let path = self.path(PLACES[0]);
        if self.has_tracefs_mounted() {
            return Err(HostError::TracefsHidden { path });
        }
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount("tracefs", &path, "tracefs", flags, None::<&std::ffi::CStr>)
            .map_err(|error| HostError::MountTracefs { path: path.clone(), source: error.into() })?;
        Ok(path)
    }

    /// Its root is for root alone: mounted, it can still be hidden from this process.
    fn has_tracefs_mounted(&self) -> bool {
        let mounts = read::text(&self.path("proc/self/mounts"), MOUNTS_LIMIT).unwrap_or_default();
        mounts.lines().any(|line| line.split(' ').nth(2) == Some("tracefs"))
    }

    /// As [`Host::ensure_mounted`], seen by this thread and those it starts from here on, and by nobody else.
    pub fn ensure_mounted_privately(&self) -> Result<PathBuf, HostError> {
        if let Some(mounted) = self.tracefs() {
            return Ok(mounted);
        }
        if self.has_tracefs_mounted() {
            return Err(HostError::TracefsHidden { path: self.path(PLACES[0]) });
        }
        #[allow(deprecated, reason = "its dangers are in sharing descriptors, and only mounts are unshared")]
        let unshared = rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNS);
        unshared
            .and_then(|()| mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC))
            .map_err(|error| HostError::MountTracefs { path: self.path(PLACES[0]), source: error.into() })?;
        self.ensure_mounted()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMON: &str = "name: mark_victim\nID: 512\nformat:\n\
        \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
        \tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;\n\
        \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
        \tfield:int pid;\toffset:8;\tsize:4;\tsigned:1;\n";

    #[test]
    fn old_kernels_name_only_the_victims_pid() {
        let format = EventFormat::parse(COMMON).unwrap();
        assert_eq!((format.name.as_str(), format.id), ("mark_victim", 512));
        assert_eq!(format.field("pid").map(|field| (field.offset, field.size)), Some((8, 4)));
        assert_eq!(format.field("comm"), None);
    }

    #[test]
    fn new_kernels_add_fields_behind_it() {
        let text = format!(
            "{COMMON}\tfield:__data_loc char[] comm;\toffset:12;\tsize:4;\tsigned:0;\n\
             \tfield:unsigned long total_vm;\toffset:16;\tsize:8;\tsigned:0;\n\
             \tfield:const char * why;\toffset:24;\tsize:8;\tsigned:0;\n\
             \tfield:char task[16];\toffset:32;\tsize:16;\tsigned:0;\n\
             print fmt: \"pid=%d\", REC->pid\n"
        );
        let format = EventFormat::parse(&text).unwrap();
        assert!(format.field("comm").is_some_and(|field| field.dynamic && field.offset == 12));
        assert_eq!(format.field("total_vm").map(|field| field.offset), Some(16));
        assert_eq!(format.field("why").map(|field| field.offset), Some(24));
        assert_eq!(format.field("task").map(|field| field.size), Some(16));
    }

    #[test]
    fn c75_a_spoilt_format_is_refused() {
        assert_eq!(EventFormat::parse(""), None);
        assert_eq!(
            EventFormat::parse("name: x\nID: 1\n\tfield:int pid;\toffset:?;\tsize:4;\tsigned:1;"),
            None
        );
    }

    #[test]
    fn the_mount_is_found_in_either_place() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        assert_eq!(host.tracefs(), None);
        let old = root.path().join("sys/kernel/debug/tracing");
        std::fs::create_dir_all(old.join("events")).unwrap();
        assert_eq!(host.tracefs(), Some(old));
    }

    #[test]
    fn live_sched_switch_has_its_fields() {
        let host = Host::live();
        if host.tracefs().is_none() {
            eprintln!("skipped: tracefs is not mounted");
            return;
        }
        let format = host.event_format("sched", "sched_switch").unwrap();
        assert!(format.field("prev_pid").is_some() && format.field("next_comm").is_some());
    }
}
