//! Owns library probes: which programs a symbol gets, attaching by offset, letting go.
//! Refuses to open or parse libraries: it is given an open file's path and offsets.

use std::{
    collections::{BTreeMap, HashSet},
    path::Path,
    sync::mpsc,
};

use aya::programs::{
    UProbe,
    uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeLink, UProbeScope},
};
use cotenant_abi::{Action, Cookie, SYMBOLS};

use crate::{KernelError, load::program};

/// Every uprobe program of the object.
pub(crate) static PROGRAMS: &[&str] = &[
    "call_enter",
    "free_enter",
    "release_enter",
    "count_return",
    "allocate_return",
    "free_return",
    "handle_return",
    "map_return",
    "unmap_return",
    "context_return",
];

/// The programs at entry and return of a symbol.
fn pair(action: u8) -> (&'static str, &'static str) {
    const ALLOCATE: u8 = Action::Allocate as u8;
    const FREE: u8 = Action::Free as u8;
    const CREATE: u8 = Action::HandleCreate as u8;
    const RELEASE: u8 = Action::HandleRelease as u8;
    const RETAIN: u8 = Action::HandleRetain as u8;
    const IMPORT: u8 = Action::HandleImport as u8;
    const MAP: u8 = Action::Map as u8;
    const UNMAP: u8 = Action::Unmap as u8;
    const COUNT: u8 = Action::Count as u8;
    match action {
        COUNT => ("call_enter", "count_return"),
        ALLOCATE => ("call_enter", "allocate_return"),
        FREE => ("free_enter", "free_return"),
        RELEASE => ("release_enter", "handle_return"),
        CREATE | RETAIN | IMPORT => ("call_enter", "handle_return"),
        MAP => ("call_enter", "map_return"),
        UNMAP => ("call_enter", "unmap_return"),
        _ => ("call_enter", "context_return"),
    }
}

/// A library file under observation. Reused only after all 2^24 ids have been given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LibraryId(pub u32);

/// What attaching one library came to.
#[derive(Debug, Default)]
pub struct Attached {
    /// Symbols probed at entry and return.
    pub symbols: u32,
    /// Twins at an address that is probed already.
    pub twins: u32,
    pub failed: Vec<(&'static str, KernelError)>,
}

/// The object's uprobe programs and every live attachment.
pub struct Probes {
    ebpf: aya::Ebpf,
    links: BTreeMap<LibraryId, Vec<UProbeLink>>,
    /// Detaching takes about 100 ms a link: a thread of its own does it.
    drops: Option<mpsc::Sender<Vec<UProbeLink>>>,
    dropper: Option<std::thread::JoinHandle<()>>,
}

impl Probes {
    pub(crate) fn new(ebpf: aya::Ebpf) -> Self {
        let (drops, dropped) = mpsc::channel::<Vec<UProbeLink>>();
        let dropper = std::thread::Builder::new()
            .name("detach".to_owned())
            .spawn(move || dropped.into_iter().for_each(drop))
            .ok();
        Self { ebpf, links: BTreeMap::new(), drops: Some(drops), dropper }
    }

    /// Attaches the table's symbols found in a library, return before entry, so that no entry lacks its return.
    ///
    /// `offsets` are (row of `SYMBOLS`, file offset), in the table's order.
    pub fn attach(&mut self, library: LibraryId, path: &Path, offsets: &[(usize, u64)]) -> Attached {
        let mut attached = Attached::default();
        let mut seen = HashSet::new();
        for &(row, offset) in offsets {
            let Some(symbol) = SYMBOLS.get(row) else {
                continue;
            };
            if !seen.insert(offset) {
                attached.twins += 1;
                continue;
            }
            let cookie = symbol.cookie.in_library(library.0 & Cookie::LIBRARY_MAX);
            let (entry, exit) = pair(cookie.action());
            let both = self
                .attach_one(exit, path, offset, cookie)
                .and_then(|exit| Ok([exit, self.attach_one(entry, path, offset, cookie)?]));
            match both {
                Ok(links) => {
                    self.links.entry(library).or_default().extend(links);
                    attached.symbols += 1;
                }
                Err(error) => attached.failed.push((symbol.name, error)),
            }
        }
        attached
    }

    fn attach_one(
        &mut self,
        name: &'static str,
        path: &Path,
        offset: u64,
        cookie: Cookie,
    ) -> Result<UProbeLink, KernelError> {
        let program: &mut UProbe = program(&mut self.ebpf, name)?;
        let point =
            UProbeAttachPoint { location: UProbeAttachLocation::AbsoluteOffset(offset), cookie: Some(cookie.0) };
        program
            .attach(point, path, UProbeScope::AllProcesses)
            .and_then(|id| program.take_link(id))
            .map_err(|source| KernelError::Attach {
                name,
                target: format!("{}+{offset:#x}", path.display()),
                source,
            })
    }

    /// Lets a library go. The links close on their own thread.
    pub fn detach(&mut self, library: LibraryId) {
        if let (Some(links), Some(drops)) = (self.links.remove(&library), &self.drops) {
            // The dropper lives as long as the sender; if it does not, dropping here is as right, only slower.
            let _ = drops.send(links);
        }
    }

    pub fn libraries(&self) -> usize {
        self.links.len()
    }
}

impl Drop for Probes {
    /// The process is about to end: the kernel closes what is left faster than link after link.
    fn drop(&mut self) {
        self.drops.take();
        self.dropper.take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_of_the_table_has_its_pair_and_a_size_where_bytes_are_read() {
        for symbol in SYMBOLS {
            let (entry, exit) = pair(symbol.cookie.action());
            assert!(PROGRAMS.contains(&entry) && PROGRAMS.contains(&exit), "{}", symbol.name);
            let allocates = symbol.cookie.action() == Action::Allocate as u8;
            let sized = matches!(symbol.cookie.rule(), 1 | 2 | 4 | 5 | 6);
            if allocates && sized {
                assert_eq!(symbol.cookie.size(), 1, "{}: programs read sizes from argument 1", symbol.name);
            }
            assert_eq!(symbol.cookie.out(), 0, "{}: programs read results through argument 0", symbol.name);
        }
    }

    #[test]
    fn no_symbol_is_listed_twice() {
        let names: HashSet<_> = SYMBOLS.iter().map(|symbol| symbol.name).collect();
        assert_eq!(names.len(), SYMBOLS.len());
    }

    #[test]
    fn library_ids_do_not_touch_the_symbol() {
        for symbol in SYMBOLS {
            let cookie = symbol.cookie.in_library(Cookie::LIBRARY_MAX);
            assert_eq!(cookie.symbol(), symbol.cookie.0);
            assert_eq!(cookie.library(), Cookie::LIBRARY_MAX);
        }
    }
}
