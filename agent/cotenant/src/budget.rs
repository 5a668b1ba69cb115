//! Owns what probes may cost the processes that hit them, and what goes first when it is too much: the timing of their
//! calls, then the probes on stream-ordered calls of their library.
//! Refuses to lose bytes in silence: whose calls were not seen is `events_lost`, and its pool is written off.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use cotenant_model::{
    Loss, Operation, ProcessId,
    sample::{Confidence, KernelSample, LibraryState, ProcessSample},
    view::{Feature, FeatureState},
};

use crate::features::feature;

/// A library is its device and inode.
pub(crate) type Key = (u64, u64);

/// Calls are counted over at least this long.
const WINDOW: Duration = Duration::from_secs(1);
/// Windows over the budget before anything goes, and under half of it before timing comes back.
const HOT: u32 = 2;
const COOL: u32 = 10;
/// Until probes that come or go have done so.
const SETTLED: Duration = Duration::from_secs(5);
/// A library that is shed again so soon after it came back stays away twice as long.
const RELAPSE: u32 = 10;
const MOST: u32 = 16;
/// Where the cost was not measured: between a bare machine's 2 us and a nested one's 9.
const ASSUMED: f64 = 5e-6;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// CPUs; 0 is never.
    pub(crate) share: f64,
    pub(crate) shed_for: Duration,
    /// Seconds that the probes of one call cost it, if that was measured.
    pub(crate) pair: Option<f64>,
}

#[derive(Debug, Default)]
struct Spender {
    counted: Duration,
    calls: u64,
    streams: u64,
    hot: u32,
    cool: u32,
    untimed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Shed {
    /// While it is shed; then when it came back.
    since: Duration,
    pause: Duration,
    away: bool,
}

/// What is to be done.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Orders {
    /// Whose calls are not to be timed; `None`: as before.
    pub(crate) untimed: Option<BTreeSet<ProcessId>>,
    /// Libraries whose stream-ordered calls are not to be probed.
    pub(crate) shed: BTreeSet<Key>,
    /// What these hold in pools is not known.
    pub(crate) write_off: BTreeSet<ProcessId>,
    /// Whether probes may be about to come or go; `None`: as before.
    pub(crate) shedding: Option<bool>,
}

#[derive(Debug)]
pub(crate) struct Budget {
    rules: Rules,
    spenders: BTreeMap<ProcessId, Spender>,
    libraries: BTreeMap<Key, Shed>,
    /// Whose stream-ordered calls were not seen for a time. For life.
    blind: BTreeSet<ProcessId>,
    marked: u64,
    /// Published as shed at the last look.
    away: BTreeSet<Key>,
    /// When something was shed, last.
    unsettled: Option<Duration>,
}

impl Budget {
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            rules,
            spenders: BTreeMap::new(),
            libraries: BTreeMap::new(),
            blind: BTreeSet::new(),
            marked: 0,
            away: BTreeSet::new(),
            unsettled: None,
        }
    }

    /// After a reading: marks whose figures are not exact, and says what to do.
    pub(crate) fn weigh(
        &mut self,
        kernel: &mut KernelSample,
        libraries: &[LibraryState],
        now: Duration,
    ) -> Orders {
        let mut orders = Orders::default();
        if self.rules.share > 0.0 {
            let before: BTreeSet<ProcessId> = self.untimed().collect();
            self.count(&kernel.processes, libraries, now);
            let after: BTreeSet<ProcessId> = self.untimed().collect();
            orders.untimed = (after != before).then_some(after);
            self.come_back(kernel, libraries, now, &mut orders);
            orders.shed = self.shed().collect();
        }
        self.mark(kernel, libraries, &mut orders);
        if !self.away.is_empty() || !orders.shed.is_empty() {
            orders.shedding = self.unsettled.is_none().then_some(true);
            self.unsettled = Some(now);
        } else if self.unsettled.is_some_and(|last| now.saturating_sub(last) >= SETTLED) {
            orders.shedding = Some(false);
            self.unsettled = None;
        }
        orders
    }

    fn count(&mut self, processes: &[ProcessSample], libraries: &[LibraryState], now: Duration) {
        let there: BTreeSet<ProcessId> = processes.iter().map(|process| process.id).collect();
        self.spenders.retain(|id, _| there.contains(id));
        self.libraries.retain(|key, _| libraries.iter().any(|library| key_of(library) == *key));
        let pair = self.rules.pair.unwrap_or(ASSUMED);
        for process in processes.iter().filter(|process| process.ended.is_none()) {
            let calls = |wanted: fn(Operation) -> bool| -> u64 {
                process.calls.iter().filter(|row| wanted(row.operation)).map(|row| row.calls).sum()
            };
            let (all, streams) = (calls(|_| true), calls(is_streamed));
            let spender = self.spenders.entry(process.id).or_insert(Spender {
                counted: now,
                calls: all,
                streams,
                ..Spender::default()
            });
            let elapsed = now.saturating_sub(spender.counted);
            if elapsed < WINDOW {
                continue;
            }
            let (more, streamed) = (all - spender.calls.min(all), streams - spender.streams.min(streams));
            let cost = more as f64 * pair / elapsed.as_secs_f64();
            (spender.counted, spender.calls, spender.streams) = (now, all, streams);
            spender.hot = if cost > self.rules.share { spender.hot + 1 } else { 0 };
            spender.cool = if cost < self.rules.share / 2.0 { spender.cool + 1 } else { 0 };
            if spender.hot >= HOT {
                spender.hot = 0;
                if !spender.untimed {
                    spender.untimed = true;
                } else if streamed * 2 >= more {
                    let own = libraries.iter().filter(|library| library.pids.contains(&process.tgid));
                    for library in own {
                        shed(&mut self.libraries, key_of(library), self.rules.shed_for, now);
                    }
                }
            } else if spender.untimed && spender.cool >= COOL {
                let away = |library: &LibraryState| {
                    library.shed || self.libraries.get(&key_of(library)).is_some_and(|shed| shed.away)
                };
                spender.untimed =
                    libraries.iter().any(|library| library.pids.contains(&process.tgid) && away(library));
            }
        }
    }

    /// Libraries whose time is over.
    fn come_back(
        &mut self,
        kernel: &KernelSample,
        libraries: &[LibraryState],
        now: Duration,
        orders: &mut Orders,
    ) {
        for library in libraries {
            let Some(shed) = self.libraries.get_mut(&key_of(library)) else { continue };
            if shed.away && now.saturating_sub(shed.since) >= shed.pause {
                (shed.away, shed.since) = (false, now);
                // What was booked while the probes went was never seen to be freed.
                orders.write_off.extend(mappers(kernel, library).map(|process| process.id));
            }
        }
    }

    fn mark(&mut self, kernel: &mut KernelSample, libraries: &[LibraryState], orders: &mut Orders) {
        let away: BTreeSet<Key> = libraries.iter().filter(|library| library.shed).map(key_of).collect();
        for library in libraries {
            let key = key_of(library);
            let fresh = library.shed && !self.away.contains(&key);
            if !library.shed && !orders.shed.contains(&key) {
                continue;
            }
            for process in mappers(kernel, library) {
                self.marked += u64::from(self.blind.insert(process.id));
                if fresh {
                    orders.write_off.insert(process.id);
                }
            }
        }
        self.away = away;
        let there: BTreeSet<ProcessId> = kernel.processes.iter().map(|process| process.id).collect();
        self.blind.retain(|id| there.contains(id));
        for process in kernel.processes.iter_mut().filter(|process| self.blind.contains(&process.id)) {
            process.confidence = Confidence::EventsLost;
        }
        for (loss, count) in &mut kernel.losses {
            if *loss == Loss::ProbesShed {
                *count += self.marked;
            }
        }
    }

    fn untimed(&self) -> impl Iterator<Item = ProcessId> {
        self.spenders.iter().filter(|(_, spender)| spender.untimed).map(|(id, _)| *id)
    }

    fn shed(&self) -> impl Iterator<Item = Key> {
        self.libraries.iter().filter(|(_, shed)| shed.away).map(|(key, _)| *key)
    }

    /// Processes whose calls are not timed.
    pub(crate) fn untimed_count(&self) -> u64 {
        self.untimed().count() as u64
    }

    pub(crate) fn feature(&self, libraries: &[LibraryState]) -> Feature {
        let name = "probe_budget";
        if self.rules.share <= 0.0 {
            return feature(name, FeatureState::Disabled, "kernel.probe_share = 0".into());
        }
        let untimed = self.untimed_count();
        let shed: Vec<&str> =
            libraries.iter().filter(|library| library.shed).map(|library| library.path.as_str()).collect();
        if untimed == 0 && shed.is_empty() {
            return feature(name, FeatureState::Active, String::new());
        }
        let mut reason = format!(
            "probes cost more than kernel.probe_share = {} CPUs: the calls of {untimed} processes are not timed",
            self.rules.share
        );
        if !shed.is_empty() {
            reason = format!(
                "{reason}; cuMemAllocAsync and cuMemFreeAsync are not seen in {}, and whoever maps that is events_lost",
                shed.join(", ")
            );
        }
        feature(name, FeatureState::Degraded, reason)
    }
}

fn shed(libraries: &mut BTreeMap<Key, Shed>, key: Key, base: Duration, now: Duration) {
    let pause = match libraries.get(&key) {
        Some(shed) if shed.away => return,
        Some(shed) if now.saturating_sub(shed.since) < shed.pause * RELAPSE => {
            (shed.pause * 2).min(base * MOST)
        }
        _ => base,
    };
    libraries.insert(key, Shed { since: now, pause, away: true });
}

fn key_of(library: &LibraryState) -> Key {
    (library.device, library.inode)
}

fn mappers<'a>(
    kernel: &'a KernelSample,
    library: &'a LibraryState,
) -> impl Iterator<Item = &'a ProcessSample> {
    kernel.processes.iter().filter(|process| library.pids.contains(&process.tgid))
}

/// Calls whose probes go: see [`cotenant_kernel::Group`].
fn is_streamed(operation: Operation) -> bool {
    cotenant_kernel::Group::of(operation) == cotenant_kernel::Group::Streams
}

#[cfg(test)]
mod tests;
