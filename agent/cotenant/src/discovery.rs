//! Owns which libcuda files are probed: found by their mapping, released after their last mapper.
//! Refuses paths as identity: a library is its device and inode.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::AsRawFd,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use cotenant_abi::SYMBOLS;
use cotenant_host::{Host, Library, Mapping, exports, is_libcuda};
use cotenant_kernel::{Group, Happening, LibraryId, Probes, Report, Watcher};
use cotenant_model::sample::LibraryState;
use tracing::{debug, info, warn};

use crate::{
    budget::Key,
    registry::{Eyes, Registry, Sight},
    reports::{Reported, Reports},
};

/// Wait for events this long; also how fast a stop is seen.
const WAIT: Duration = Duration::from_millis(200);
/// A file without mappers stays attached this long: programs restart, and detaching is slow.
const LINGER: Duration = Duration::from_mins(1);
/// Between looks at every process where mappings cannot be watched.
const BLIND_SCAN: Duration = Duration::from_secs(2);
/// Files under observation at once; each holds ten descriptors. A tenant that makes more is not followed.
const MAX_LIBRARIES: usize = 512;
/// Mappings of libcuda that are looked at in one process; an honest one has one or two.
const MAX_MAPPED: usize = 64;
const REAP: Duration = Duration::from_secs(5);
/// While the driver is released: its files must be free within seconds.
const RELEASED_REAP: Duration = Duration::from_secs(1);
/// Cgroups whose paths are kept.
const MAX_CGROUPS: usize = 1024;

struct Watched {
    id: LibraryId,
    state: LibraryState,
    /// PID and start time of each process that maps it.
    mappers: BTreeSet<(u32, u64)>,
    /// The host's own: probed before anybody maps it, and kept.
    host: bool,
    empty_since: Option<Instant>,
}

impl Watched {
    fn count(&mut self) {
        self.state.processes = u32::try_from(self.mappers.len()).unwrap_or(u32::MAX);
        self.state.pids = self.mappers.iter().map(|(pid, _)| *pid).collect();
    }
}

/// What others want of it.
pub(crate) struct Wanted {
    /// Libraries whose stream-ordered calls are not to be probed.
    pub(crate) orders: Arc<ArcSwap<BTreeSet<Key>>>,
    /// The driver is to be let go: also files that nobody maps.
    pub(crate) released: Arc<AtomicBool>,
}

pub(crate) struct Discovery {
    host: Host,
    watcher: Watcher,
    probes: Probes,
    orders: Arc<ArcSwap<BTreeSet<Key>>>,
    registry: Arc<Mutex<Registry>>,
    /// Processes are looked at with these while the registry is free for the tick.
    eyes: Option<Eyes>,
    published: Arc<ArcSwap<Vec<LibraryState>>>,
    reports: Arc<Mutex<Reports>>,
    /// The driver is to be let go: also files that nobody maps.
    released: Arc<AtomicBool>,
    libraries: BTreeMap<Key, Watched>,
    /// Paths of cgroups in which something was killed.
    cgroups: BTreeMap<u64, String>,
    next: u32,
    own_pid: u32,
}

impl Discovery {
    pub(crate) fn new(
        host: Host,
        watcher: Watcher,
        probes: Probes,
        wanted: Wanted,
        registry: Arc<Mutex<Registry>>,
        published: Arc<ArcSwap<Vec<LibraryState>>>,
        reports: Arc<Mutex<Reports>>,
    ) -> Self {
        let Wanted { orders, released } = wanted;
        let own_pid = std::process::id();
        let eyes = registry.lock().ok().map(|registry| registry.eyes());
        Self {
            host,
            watcher,
            probes,
            orders,
            registry,
            eyes,
            published,
            reports,
            released,
            libraries: BTreeMap::new(),
            cgroups: BTreeMap::new(),
            next: 0,
            own_pid,
        }
    }

    /// Until `stop`. Everything is detached when this returns.
    pub(crate) fn run(mut self, stop: &AtomicBool) {
        let blind = self.watcher.blind.is_some();
        self.observe_own();
        // Watching began when the watcher was opened: nothing that maps a library from here on is missed.
        self.scan();
        let (mut scanned, mut reaped) = (Instant::now(), Instant::now());
        let (mut lost, mut released) = (false, false);
        while !stop.load(Ordering::Relaxed) {
            let happenings = match self.watcher.wait(WAIT) {
                Ok(happenings) => happenings,
                Err(error) => {
                    warn!(error = %chain(&error), "cannot wait for kernel events; looking at every process instead");
                    std::thread::sleep(WAIT);
                    Vec::new()
                }
            };
            // A process is looked at once, however often it has mapped something by now.
            let mut mapped = BTreeSet::new();
            for happening in happenings {
                match happening {
                    Happening::Mapped { pid, path, .. } if is_libcuda(&path) => {
                        mapped.insert(pid);
                    }
                    Happening::MappingsLost(_) => lost = true,
                    Happening::Reported(report) => self.pass_on(report),
                    other => self.react(&other),
                }
            }
            for pid in mapped {
                self.examine(pid, true);
            }
            self.obey();
            // A tenant can make announcements overflow at will: not more often than where there are none.
            if (lost || blind) && scanned.elapsed() >= BLIND_SCAN {
                self.scan();
                (lost, scanned) = (false, Instant::now());
            }
            let asked = self.released.load(Ordering::Relaxed);
            if released != asked {
                released = asked;
                if !released {
                    self.observe_own();
                }
            }
            if reaped.elapsed() >= if released { RELEASED_REAP } else { REAP } {
                self.reap(released);
                reaped = Instant::now();
            }
        }
    }

    fn react(&mut self, happening: &Happening) {
        match *happening {
            Happening::ProcessSeen { id, tgid, cgroup_id } => {
                let sight = self.look(tgid);
                if let Ok(mut registry) = self.registry.lock() {
                    registry.meet(id, tgid, cgroup_id, sight);
                }
            }
            // Nothing is let go on a tenant's word: both stay attached, and a call counts once all the same.
            Happening::DuplicateLibrary { goes, stays } => {
                info!(first = stays.0, second = goes.0, "two libraries seem to share their code");
            }
            Happening::Mapped { .. }
            | Happening::MappingsLost(_)
            | Happening::ProcessEnded { .. }
            | Happening::Reported(_) => {}
        }
    }

    fn pass_on(&mut self, report: Report) {
        let (mut cgroup, mut trigger) = (None, None);
        if let Report::Killed(thread) = &report {
            cgroup = self.cgroup(thread.cgroup_id);
            // A victim that asked for itself is dying, and is named as the victim is.
            if thread.trigger != thread.tgid
                && let Ok(mut registry) = self.registry.lock()
            {
                trigger = registry.look(thread.trigger);
            }
        }
        if let Ok(mut reports) = self.reports.lock() {
            reports.push(Reported { report, cgroup, trigger });
        }
    }

    fn look(&self, pid: u32) -> Option<Sight> {
        let seen = self.registry.lock().ok().and_then(|registry| registry.seen(pid));
        self.eyes.as_ref()?.look_again(pid, seen)
    }

    /// Ids are not used again, so what was found once need not be looked for in a storm of kills.
    fn cgroup(&mut self, id: u64) -> Option<String> {
        if let Some(path) = self.cgroups.get(&id) {
            return Some(path.clone());
        }
        let path = self.host.cgroup_by_id(id)?;
        if self.cgroups.len() >= MAX_CGROUPS {
            self.cgroups.clear();
        }
        self.cgroups.insert(id, path.clone());
        Some(path)
    }

    fn scan(&mut self) {
        let Ok(pids) = self.host.processes() else { return };
        for pid in pids {
            self.examine(pid, false);
        }
    }

    /// Looks at one process's mappings and takes every libcuda among them under observation.
    /// `witnessed`: it has just mapped one of them.
    fn examine(&mut self, pid: u32, witnessed: bool) {
        if pid == self.own_pid {
            return;
        }
        let Ok(mappings) = self.host.mappings(pid) else { return };
        let libraries: Vec<Mapping> = mappings
            .rows
            .into_iter()
            .filter(|row| row.executable && is_libcuda(&row.path))
            .take(MAX_MAPPED)
            .collect();
        if libraries.is_empty() {
            return;
        }
        let Ok(start) = self.host.start(pid) else { return };
        for mapping in libraries {
            match self.host.open_mapped(pid, &mapping) {
                Ok(library) => self.observe(Some((pid, start)), &library),
                Err(error) => warn!(pid, error = %chain(&error), "a libcuda cannot be probed"),
            }
        }
        let sight = self.look(pid);
        if let Ok(mut registry) = self.registry.lock() {
            registry.foresee(pid, sight, witnessed.then_some(start));
        }
    }

    /// A library, and the process that maps it; the host's own are probed before there is one.
    fn observe(&mut self, mapper: Option<(u32, u64)>, library: &Library) {
        let key = (library.device, library.inode);
        if !self.libraries.contains_key(&key) {
            if self.libraries.len() >= MAX_LIBRARIES {
                warn!(path = library.path, "not probed: {MAX_LIBRARIES} libraries are already");
                return;
            }
            let watched = self.attach(library);
            self.libraries.insert(key, watched);
        }
        if let Some(watched) = self.libraries.get_mut(&key) {
            watched.mappers.extend(mapper);
            watched.host |= mapper.is_none();
            watched.empty_since = None;
            watched.count();
        }
        self.publish();
    }

    fn attach(&mut self, library: &Library) -> Watched {
        let begun = Instant::now();
        let id = LibraryId(self.next);
        self.next = self.next.wrapping_add(1);
        let mut state = LibraryState {
            path: library.path.clone(),
            device: library.device,
            inode: library.inode,
            attached: 0,
            missing: 0,
            failed: 0,
            processes: 0,
            pids: Vec::new(),
            shed: false,
            refused: None,
        };
        let names: Vec<&str> = SYMBOLS.iter().map(|symbol| symbol.name).collect();
        match exports(&library.file, &names) {
            Ok(exports) => {
                let path = PathBuf::from(format!("/proc/self/fd/{}", library.file.as_raw_fd()));
                let attached = self.probes.attach(id, &path, &exports.found, Group::ALL);
                state.attached = attached.symbols + attached.twins;
                state.missing = u32::try_from(exports.missing.len()).unwrap_or(u32::MAX);
                state.failed =
                    u32::try_from(attached.failed.len() + exports.refused.len()).unwrap_or(u32::MAX);
                for (symbol, error) in &attached.failed {
                    warn!(symbol, error = %chain(error), "a symbol cannot be probed");
                }
                if exports.found.is_empty() {
                    state.refused = Some("it exports none of the driver's memory calls".to_owned());
                }
                info!(
                    path = state.path,
                    device = state.device,
                    inode = state.inode,
                    symbols = state.attached,
                    missing = state.missing,
                    failed = state.failed,
                    milliseconds = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
                    "library probed"
                );
            }
            Err(error) => {
                warn!(path = state.path, error = %chain(&error), "library refused");
                state.refused = Some(error.to_string());
            }
        }
        Watched { id, state, mappers: BTreeSet::new(), host: false, empty_since: None }
    }

    /// The host's own libraries, before anybody maps them.
    fn observe_own(&mut self) {
        for library in self.host.configured_libraries().into_iter().flatten() {
            self.observe(None, &library);
        }
    }

    /// Sheds and restores what the tick has ordered.
    fn obey(&mut self) {
        let orders = self.orders.load_full();
        let changed: Vec<Key> = self
            .libraries
            .iter()
            .filter(|(key, watched)| watched.state.shed != orders.contains(*key))
            .map(|(key, _)| *key)
            .collect();
        for key in &changed {
            if orders.contains(key) {
                if let Some(watched) = self.libraries.get_mut(key) {
                    warn!(
                        path = watched.state.path,
                        "stream-ordered calls are not probed for a while: too many"
                    );
                    self.probes.shed(watched.id, Group::Streams);
                    watched.state.shed = true;
                }
            } else {
                self.restore(*key);
            }
        }
        if !changed.is_empty() {
            self.publish();
        }
    }

    /// Probes a library's stream-ordered calls again. If that fails it is tried again.
    fn restore(&mut self, key: Key) {
        let Some(library) = self.reopen(key) else { return };
        let names: Vec<&str> = SYMBOLS.iter().map(|symbol| symbol.name).collect();
        let (Some(watched), Ok(exports)) = (self.libraries.get_mut(&key), exports(&library.file, &names))
        else {
            return;
        };
        let path = PathBuf::from(format!("/proc/self/fd/{}", library.file.as_raw_fd()));
        let attached = self.probes.attach(watched.id, &path, &exports.found, &[Group::Streams]);
        if let Some((symbol, error)) = attached.failed.first() {
            warn!(symbol, error = %chain(error), "stream-ordered calls cannot be probed again yet");
            self.probes.shed(watched.id, Group::Streams);
            return;
        }
        info!(path = watched.state.path, "stream-ordered calls are probed again");
        watched.state.shed = false;
    }

    /// The file of a library, from one who maps it or from this host.
    fn reopen(&self, key: Key) -> Option<Library> {
        let same = |library: &Library| (library.device, library.inode) == key;
        let mapped = self.libraries.get(&key)?.mappers.iter().find_map(|(pid, _)| {
            let mappings = self.host.mappings(*pid).ok()?.rows;
            let rows = mappings.iter().filter(|row| row.executable && row.inode == key.1);
            rows.filter_map(|row| self.host.open_mapped(*pid, row).ok()).find(same)
        });
        mapped.or_else(|| self.host.configured_libraries().into_iter().flatten().find(same))
    }

    /// Lets go of files that nobody maps any more; while the driver is released, at once and of the host's own too.
    fn reap(&mut self, released: bool) {
        let host = &self.host;
        for watched in self.libraries.values_mut() {
            watched.mappers.retain(|(pid, start)| host.alive(*pid, *start));
            watched.count();
            if watched.mappers.is_empty() && (released || !watched.host) {
                watched.empty_since.get_or_insert_with(Instant::now);
            }
        }
        let probes = &mut self.probes;
        self.libraries.retain(|_, watched| {
            let linger = if released { Duration::ZERO } else { LINGER };
            let idle = watched.empty_since.is_some_and(|since| since.elapsed() >= linger);
            if idle {
                debug!(path = watched.state.path, "library released");
                probes.detach(watched.id);
            }
            !idle
        });
        let running = self.registry.lock().map(|registry| registry.running()).unwrap_or_default();
        let dead: Vec<(u32, u64)> =
            running.into_iter().filter(|(pid, start)| !self.host.alive(*pid, *start)).collect();
        if let Ok(mut registry) = self.registry.lock() {
            registry.bury(&dead);
        }
        self.publish();
    }

    fn publish(&self) {
        let states = self.libraries.values().map(|watched| watched.state.clone()).collect();
        self.published.store(Arc::new(states));
    }
}

/// An error with its causes, once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
