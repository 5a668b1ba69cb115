//! Owns which file is a libcuda, and how to open exactly that file, in whatever container it is.
//! Refuses names that only look like it, links that lead out of the container, and anything but a regular file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};

use crate::elf::MAX_FILE;
use crate::mappings::Mapping;
use crate::{Host, read};

/// Where distributions and the GPU operator put the driver, when nothing runs that could be asked.
pub(crate) const CONFIGURED: [&str; 17] = [
    "run/nvidia/driver/usr/lib64",
    "run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "run/nvidia/driver/usr/lib/aarch64-linux-gnu",
    "run/nvidia/driver/usr/lib",
    "usr/local/glibc/usr/lib",
    "usr/local/glibc/lib",
    "home/kubernetes/bin/nvidia/lib64",
    "var/lib/nvidia/lib64",
    "usr/lib/nvidia/tesla",
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/wsl/lib",
    "usr/lib",
    "lib64",
    "run/opengl-driver/lib",
    "var/lib/snapd/lib/gl",
];
const MAX_ENTRIES: usize = 8192;

#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    #[error(
        "could not open {path} of process {pid}; the agent needs CAP_SYS_PTRACE, and CAP_DAC_READ_SEARCH where the path is \
         private (a deleted file: CAP_CHECKPOINT_RESTORE)"
    )]
    Open { pid: u32, path: String, source: io::Error },
    #[error("could not open {}", path.display())]
    OpenConfigured { path: PathBuf, source: io::Error },
    #[error("could not ask what {path} is")]
    Describe { path: String, source: io::Error },
    #[error("{path} is not a regular file")]
    NotRegular { path: String },
    #[error("{path} has {bytes} bytes, more than any libcuda")]
    TooLarge { path: String, bytes: u64 },
    #[error("{path} of process {pid} is no longer the file that was mapped")]
    Replaced { pid: u32, path: String },
}

/// An open libcuda. Device and inode are those of the open file.
#[derive(Debug)]
pub struct Library {
    pub file: File,
    /// As its process or this host names it.
    pub path: String,
    pub device: u64,
    pub inode: u64,
}

/// `libcuda.so`, then numbers. Not libcudart, not libcudadebugger, not the linker's stub.
pub fn is_libcuda(path: &str) -> bool {
    let mut parts = path.rsplit('/');
    let Some(rest) = parts.next().and_then(|name| name.strip_prefix("libcuda.so")) else { return false };
    let numbered =
        rest.split('.').skip(1).all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
    (rest.is_empty() || rest.starts_with('.')) && numbered && !parts.any(|part| part == "stubs")
}

impl Host {
    /// Opens the file behind a mapping: by its address, which cannot be anything else, or by its path within
    /// the process's root.
    pub fn open_mapped(&self, pid: u32, mapping: &Mapping) -> Result<Library, LibraryError> {
        let path = || mapping.path.clone();
        let exact = self.process_file(pid, &format!("map_files/{:x}-{:x}", mapping.start, mapping.end));
        let by_address = openat(CWD, &exact, READ, Mode::empty());
        let file = by_address.or_else(|first| {
            // The path of a deleted file names something else or nothing.
            if mapping.deleted { Err(first) } else { self.open_in_root(pid, &mapping.path) }
        });
        let file = file.map_err(|error| LibraryError::Open { pid, path: path(), source: error.into() })?;
        let library = describe(File::from(file), path())?;
        if library.inode != mapping.inode {
            return Err(LibraryError::Replaced { pid, path: path() });
        }
        Ok(library)
    }

    /// Driver libraries where distributions put them, each file once, in order of preference. None is not an error.
    pub fn configured_libraries(&self) -> Vec<Result<Library, LibraryError>> {
        let mut found = BTreeMap::new();
        let mut failed = Vec::new();
        for (rank, directory) in CONFIGURED.iter().enumerate() {
            let mut names = read::names_in(&self.path(directory), MAX_ENTRIES);
            names.retain(|name| is_libcuda(name));
            // The longest name has the version in it.
            names.sort_by_key(|name| std::cmp::Reverse(name.len()));
            for name in names {
                match self.open_configured(&format!("{directory}/{name}")) {
                    Ok(library) => {
                        found.entry((library.device, library.inode)).or_insert((rank, library));
                    }
                    Err(error) => failed.push(Err(error)),
                }
            }
        }
        let mut found: Vec<_> = found.into_values().collect();
        found.sort_by_key(|(rank, _)| *rank);
        found.into_iter().map(|(_, library)| Ok(library)).chain(failed).collect()
    }

    fn open_configured(&self, path: &str) -> Result<Library, LibraryError> {
        let failed = |error: rustix::io::Errno| LibraryError::OpenConfigured {
            path: self.path(path),
            source: error.into(),
        };
        let root = openat(CWD, self.root(), DIRECTORY, Mode::empty()).map_err(failed)?;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let file = openat2(root, path, READ, Mode::empty(), resolve).map_err(failed)?;
        describe(File::from(file), format!("/{path}"))
    }

    /// The kernel names a mapped file without links, so a link on the way is an attempt to lead elsewhere.
    fn open_in_root(&self, pid: u32, path: &str) -> rustix::io::Result<std::os::fd::OwnedFd> {
        let root = openat(CWD, self.process_file(pid, "root"), DIRECTORY, Mode::empty())?;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
        openat2(root.as_fd(), path, READ, Mode::empty(), resolve)
    }
}

/// `NONBLOCK`: a FIFO put in the way must not hold the agent up.
const READ: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK).union(OFlags::NOCTTY);
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

fn describe(file: File, path: String) -> Result<Library, LibraryError> {
    let metadata = match file.metadata() {
        Ok(metadata) => metadata,
        Err(source) => return Err(LibraryError::Describe { path, source }),
    };
    if !metadata.is_file() {
        return Err(LibraryError::NotRegular { path });
    }
    if metadata.len() > MAX_FILE {
        return Err(LibraryError::TooLarge { path, bytes: metadata.len() });
    }
    Ok(Library { file, path, device: metadata.dev(), inode: metadata.ino() })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn c54_only_libcuda_is_libcuda() {
        for yes in [
            "libcuda.so",
            "libcuda.so.1",
            "/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06",
            "/usr/local/cuda/compat/libcuda.so.1",
        ] {
            assert!(is_libcuda(yes), "{yes}");
        }
        for no in [
            "/usr/lib/libcudart.so.12",
            "libcudadebugger.so.1",
            "/usr/local/cuda/lib64/stubs/libcuda.so",
            "libcuda.so.1.bak",
            "libcuda.so.",
            "libcuda.so1",
            "libcuda.so..1",
            "xlibcuda.so",
            "",
        ] {
            assert!(!is_libcuda(no), "{no}");
        }
    }

    fn mapping(path: &str, inode: u64) -> Mapping {
        Mapping {
            start: 1,
            end: 2,
            offset: 0,
            path: path.into(),
            device: 0,
            inode,
            deleted: false,
            executable: true,
        }
    }

    /// A process 7 whose root is a directory of the fixture, without `map_files`.
    fn container() -> (tempfile::TempDir, Host, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let inside = root.path().join("proc/7/root");
        fs::create_dir_all(inside.join("usr/lib")).unwrap();
        let host = Host::at(root.path());
        (root, host, inside)
    }

    #[test]
    fn c69_a_link_out_of_the_container_is_refused() {
        let (_root, host, inside) = container();
        symlink("../../../../../../../../etc/passwd", inside.join("usr/lib/libcuda.so.1")).unwrap();
        let inode = fs::metadata("/etc/passwd").unwrap().ino();
        let error = host.open_mapped(7, &mapping("/usr/lib/libcuda.so.1", inode)).unwrap_err();
        assert!(matches!(error, LibraryError::Open { .. }), "{error}");
        // The same through a directory.
        symlink("/etc", inside.join("usr/lib/etc")).unwrap();
        assert!(host.open_mapped(7, &mapping("/usr/lib/etc/passwd", inode)).is_err());
        assert!(host.open_mapped(7, &mapping("/../../../../../../etc/passwd", inode)).is_err());
    }

    #[test]
    fn c69_what_is_not_the_mapped_regular_file_is_refused() {
        let (_root, host, inside) = container();
        let path = inside.join("usr/lib/libcuda.so.1");
        fs::create_dir(&path).unwrap();
        let open = |inode| host.open_mapped(7, &mapping("/usr/lib/libcuda.so.1", inode));
        assert!(matches!(open(1).unwrap_err(), LibraryError::NotRegular { .. }));
        fs::remove_dir(&path).unwrap();
        let file = File::create(&path).unwrap();
        let inode = file.metadata().unwrap().ino();
        assert!(matches!(open(inode + 1).unwrap_err(), LibraryError::Replaced { .. }));
        assert_eq!(open(inode).unwrap().inode, inode);
        file.set_len(MAX_FILE + 1).unwrap();
        assert!(matches!(open(inode).unwrap_err(), LibraryError::TooLarge { .. }));
        let deleted = Mapping { deleted: true, ..mapping("/usr/lib/libcuda.so.1", inode) };
        assert!(host.open_mapped(7, &deleted).is_err());
    }

    #[test]
    fn c69_a_fifo_does_not_hold_the_agent_up() {
        let (_root, host, inside) = container();
        let path = inside.join("usr/lib/libcuda.so.1");
        rustix::fs::mknodat(CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        let error = host.open_mapped(7, &mapping("/usr/lib/libcuda.so.1", inode)).unwrap_err();
        assert!(matches!(error, LibraryError::NotRegular { .. }), "{error}");
    }

    #[test]
    fn live_mapped_file_is_opened_by_inode() {
        let host = Host::live();
        let pid = std::process::id();
        let mappings = host.mappings(pid).unwrap();
        let program = mappings.rows.iter().find(|row| row.executable).unwrap();
        assert_eq!(host.open_mapped(pid, program).unwrap().inode, program.inode);
    }

    #[test]
    fn c53_the_driver_is_found_without_a_linker_cache() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        assert!(host.configured_libraries().is_empty());
        for (directory, name) in [
            ("usr/lib/x86_64-linux-gnu", "libcudart.so.12"),
            ("usr/lib/x86_64-linux-gnu", "libcuda.so.570.1"),
            ("run/nvidia/driver/usr/lib64", "libcuda.so.580.65.06"),
        ] {
            fs::create_dir_all(root.path().join(directory)).unwrap();
            fs::write(root.path().join(directory).join(name), name).unwrap();
        }
        let linked = root.path().join("run/nvidia/driver/usr/lib64/libcuda.so.1");
        symlink("/run/nvidia/driver/usr/lib64/libcuda.so.580.65.06", linked).unwrap();
        let paths: Vec<String> =
            host.configured_libraries().into_iter().map(|library| library.unwrap().path).collect();
        assert_eq!(
            paths,
            [
                "/run/nvidia/driver/usr/lib64/libcuda.so.580.65.06",
                "/usr/lib/x86_64-linux-gnu/libcuda.so.570.1"
            ]
        );
    }

    /// As deploy/README.md names them, platform by platform.
    #[test]
    fn each_platforms_own_directory_of_the_drivers_libraries_is_looked_at() {
        let page = include_str!("../../../deploy/README.md");
        let table = page.split("| platform | driver's libraries").nth(1).expect("the table of platforms");
        let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        let places: Vec<&str> = rows
            .filter_map(|row| row.split('|').nth(2)?.split('`').nth(1)?.strip_prefix('/'))
            .filter(|place| !place.is_empty())
            .collect();
        assert!(places.len() >= 3, "{places:?}");
        for place in places {
            let below = CONFIGURED.iter().filter(|directory| {
                directory.strip_prefix(place).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            });
            let mut looked = 0;
            for directory in below {
                let root = tempfile::tempdir().unwrap();
                fs::create_dir_all(root.path().join(directory)).unwrap();
                for name in ["libcuda.so.580.95.05", "libnvidia-ml.so.580.95.05"] {
                    fs::write(root.path().join(directory).join(name), name).unwrap();
                }
                let host = Host::at(root.path());
                let found = host.configured_libraries();
                let path = &found[0].as_ref().unwrap().path;
                assert_eq!(
                    (found.len(), path.as_str()),
                    (1, format!("/{directory}/libcuda.so.580.95.05").as_str())
                );
                assert_eq!(host.hardware().library_versions, ["580.95.05"], "{directory}");
                looked += 1;
            }
            assert!(looked > 0, "{place} is not looked at");
        }
    }

    #[test]
    fn c71_two_driver_files_are_two_libraries() {
        let (_root, host, inside) = container();
        let open = |name: &str| {
            let path = inside.join("usr/lib").join(name);
            fs::write(&path, name).unwrap();
            let inode = fs::metadata(&path).unwrap().ino();
            host.open_mapped(7, &mapping(&format!("/usr/lib/{name}"), inode)).unwrap()
        };
        assert_ne!(open("libcuda.so.1").inode, open("libcuda.so.580.65.06").inode);
    }
}
