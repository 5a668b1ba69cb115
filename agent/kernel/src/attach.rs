//! Owns library probes: which programs a symbol gets, attaching by offset, letting go.
//! Refuses to open or parse libraries: it is given an open file's path and offsets.

use std::{
    collections::{BTreeMap, HashSet},
    os::fd::OwnedFd,
    path::Path,
    sync::mpsc,
};

use aya::programs::{
    UProbe,
    uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeLink, UProbeScope},
};
use cotenant_abi::{Action, Cookie, Operation, SYMBOLS};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::{
    KernelError,
    load::program,
    multi::{Multi, Places},
};

const NONE: CapabilitySets = CapabilitySets {
    effective: CapabilitySet::empty(),
    permitted: CapabilitySet::empty(),
    inheritable: CapabilitySet::empty(),
};

/// Every uprobe program of the object. Returns first: attached in this order, no entry lacks its return.
pub(crate) static PROGRAMS: &[&str] = &[
    "count_return",
    "allocate_return",
    "free_return",
    "handle_return",
    "map_return",
    "unmap_return",
    "context_return",
    "call_enter",
    "free_enter",
    "release_enter",
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

/// What is attached and let go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Group {
    /// Allocations and frees in stream order: so cheap without probes that a program may make them all the time.
    Streams,
    Rest,
}

impl Group {
    pub const ALL: &'static [Self] = &[Self::Rest, Self::Streams];

    pub const fn of(operation: Operation) -> Self {
        match operation {
            Operation::MemAllocAsync | Operation::MemAllocFromPoolAsync | Operation::MemFreeAsync => {
                Self::Streams
            }
            _ => Self::Rest,
        }
    }
}

/// What attaching one library came to.
#[derive(Debug, Default)]
pub struct Attached {
    /// Symbols probed at entry and return.
    pub symbols: u32,
    /// Twins at an address that is probed already.
    pub twins: u32,
    pub failed: Vec<(&'static str, KernelError)>,
}

/// What holds probes in place; closing it removes them.
#[allow(dead_code, reason = "held to be dropped")]
pub(crate) enum Hold {
    /// Every symbol of one program.
    Many(OwnedFd),
    One(UProbeLink),
}

/// The object's uprobe programs and every live attachment.
pub struct Probes {
    ebpf: aya::Ebpf,
    multi: Option<Multi>,
    /// The programs for single links are loaded.
    single: bool,
    /// This kernel does not take the programs; asking it again for each library would take it seconds.
    refused: bool,
    holds: BTreeMap<(LibraryId, Group), Vec<Hold>>,
    /// Closing waits for the kernel: a thread of its own does it.
    drops: Option<mpsc::Sender<Vec<Hold>>>,
    dropper: Option<std::thread::JoinHandle<()>>,
}

/// One symbol to be probed.
struct Target {
    name: &'static str,
    offset: u64,
    cookie: Cookie,
    group: Group,
}

impl Probes {
    pub(crate) fn new(ebpf: aya::Ebpf, multi: Option<Multi>) -> Self {
        let (drops, queue) = mpsc::channel::<Vec<Hold>>();
        let dropper = std::thread::Builder::new()
            .name("detach".to_owned())
            .spawn(move || {
                // Closing takes no capability. One that cannot be given up does no harm here.
                let _ = rustix::thread::set_capabilities(None, NONE);
                queue.into_iter().for_each(drop);
            })
            .ok();
        Self {
            ebpf,
            multi,
            single: false,
            refused: false,
            holds: BTreeMap::new(),
            drops: Some(drops),
            dropper,
        }
    }

    /// Nothing will be attached: why is in [`crate::Kernel::missing`], or in the plan.
    pub(crate) fn refuse(&mut self) {
        self.refused = true;
    }

    /// Whether one link holds many symbols here: then letting go takes milliseconds, not seconds.
    pub fn links_many(&self) -> bool {
        self.multi.is_some()
    }

    /// Attaches the table's symbols found in a library, of these groups.
    ///
    /// `offsets` are (row of `SYMBOLS`, file offset), in the table's order.
    pub fn attach(
        &mut self,
        library: LibraryId,
        path: &Path,
        offsets: &[(usize, u64)],
        groups: &[Group],
    ) -> Attached {
        let mut outcome = Attached::default();
        if self.refused {
            outcome.failed.push(("every symbol", KernelError::NoProbes));
            return outcome;
        }
        let mut seen = HashSet::new();
        let mut targets = Vec::new();
        for &(row, offset) in offsets {
            let Some(symbol) = SYMBOLS.get(row) else { continue };
            if seen.insert(offset) {
                let cookie = symbol.cookie.in_library(library.0 & Cookie::LIBRARY_MAX);
                let group = Group::of(symbol.operation);
                targets.push(Target { name: symbol.name, offset, cookie, group });
            } else {
                outcome.twins += 1;
            }
        }
        targets.retain(|target| groups.contains(&target.group));
        if let Some(multi) = &self.multi {
            let many: Result<Vec<_>, KernelError> = groups
                .iter()
                .map(|group| Ok((*group, attach_many(multi, path, &targets, *group)?)))
                .collect();
            match many {
                Ok(many) => {
                    outcome.symbols = u32::try_from(targets.len()).unwrap_or(u32::MAX);
                    self.holds.extend(many.into_iter().map(|(group, holds)| ((library, group), holds)));
                    return outcome;
                }
                // One place that the kernel refuses spoils the whole link: find it one by one.
                Err(error) => tracing::warn!(%error, "probing symbol by symbol instead"),
            }
        }
        if let Err(error) = self.load_single(true, &mut outcome.failed) {
            outcome.failed.push(("every symbol", error));
            return outcome;
        }
        for Target { name, offset, cookie, group } in targets {
            let (entry, exit) = pair(cookie.action());
            let both = self
                .attach_one(exit, path, offset, cookie)
                .and_then(|exit| Ok([exit, self.attach_one(entry, path, offset, cookie)?]));
            match both {
                Ok(links) => {
                    self.holds.entry((library, group)).or_default().extend(links.map(Hold::One));
                    outcome.symbols += 1;
                }
                Err(error) => outcome.failed.push((name, error)),
            }
        }
        outcome
    }

    /// Loads the programs for links of one symbol. `unmap_return` is missed alone where the kernel refuses it.
    pub(crate) fn load_single(
        &mut self,
        unmap: bool,
        missing: &mut Vec<(&'static str, KernelError)>,
    ) -> Result<(), KernelError> {
        if self.single {
            return Ok(());
        }
        for name in PROGRAMS {
            let optional = *name == "unmap_return";
            if optional && !unmap {
                continue;
            }
            let program: &mut UProbe = program(&mut self.ebpf, name)?;
            match program.load().map_err(|error| KernelError::refusal(name, error)) {
                Ok(()) => {}
                Err(error) if optional => missing.push((name, error)),
                Err(error) => return Err(error),
            }
        }
        self.single = true;
        Ok(())
    }

    fn attach_one(
        &mut self,
        name: &'static str,
        path: &Path,
        offset: u64,
        cookie: Cookie,
    ) -> Result<UProbeLink, KernelError> {
        let program: &mut UProbe = program(&mut self.ebpf, name)?;
        let point = UProbeAttachPoint {
            location: UProbeAttachLocation::AbsoluteOffset(offset),
            cookie: Some(cookie.0),
        };
        program.attach(point, path, UProbeScope::AllProcesses).and_then(|id| program.take_link(id)).map_err(
            |source| KernelError::Attach { name, target: format!("{}+{offset:#x}", path.display()), source },
        )
    }

    /// Lets a library go. What holds it closes on a thread of its own.
    pub fn detach(&mut self, library: LibraryId) {
        for group in Group::ALL {
            self.shed(library, *group);
        }
    }

    /// Lets a group of a library's symbols go, entries first: a call that has begun still sees its return.
    pub fn shed(&mut self, library: LibraryId, group: Group) {
        if let Some(mut holds) = self.holds.remove(&(library, group)) {
            holds.reverse();
            self.release(holds);
        }
    }

    pub(crate) fn release(&self, holds: Vec<Hold>) {
        if let Some(drops) = &self.drops {
            // The dropper lives as long as the sender; if it does not, dropping here is as right, only slower.
            let _ = drops.send(holds);
        }
    }

    /// Probes a function of the agent's own as a symbol that is counted.
    pub(crate) fn attach_own(
        &mut self,
        path: &Path,
        offset: u64,
        cookie: Cookie,
    ) -> Result<Vec<Hold>, KernelError> {
        let (entry, exit) = pair(cookie.action());
        if let Some(multi) = &self.multi {
            let places = Places { offsets: vec![offset], cookies: vec![cookie.0] };
            return [exit, entry]
                .into_iter()
                .map(|program| multi.attach(program, path, &places).map(Hold::Many))
                .collect();
        }
        self.load_single(true, &mut Vec::new())?;
        [exit, entry]
            .into_iter()
            .map(|program| self.attach_one(program, path, offset, cookie).map(Hold::One))
            .collect()
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.drops.take();
        self.holds.clear();
        if let Some(dropper) = self.dropper.take() {
            // A panic there has been reported by the thread itself, and there is nothing left to close.
            let _ = dropper.join();
        }
    }
}

fn attach_many(
    multi: &Multi,
    path: &Path,
    targets: &[Target],
    group: Group,
) -> Result<Vec<Hold>, KernelError> {
    let mut by_program: BTreeMap<&str, Places> = BTreeMap::new();
    for Target { offset, cookie, .. } in targets.iter().filter(|target| target.group == group) {
        let (entry, exit) = pair(cookie.action());
        for program in [entry, exit] {
            let places = by_program.entry(program).or_default();
            places.offsets.push(*offset);
            places.cookies.push(cookie.0);
        }
    }
    PROGRAMS
        .iter()
        .filter_map(|program| Some((*program, by_program.get(program)?)))
        .map(|(program, places)| multi.attach(program, path, places).map(Hold::Many))
        .collect()
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
