//! Owns the tick: read, resolve, advance, publish, in that order.
//! Refuses everything slow: NVML has its own thread, encoding happens at the scrape.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use arc_swap::{ArcSwap, ArcSwapOption};
use cotenant_device::Device;
use cotenant_export::{Guard, Limits};
use cotenant_host::Host;
use cotenant_kernel::Reader;
use cotenant_model::{
    Absence, DeviceSample, GpuId, Names, Node, Tenant,
    risk::{Forecaster, Moment},
    sample::{KernelSample, LibraryState},
    view::{AgentView, Feature, HolderCandidate, View},
};
use tracing::warn;

use crate::{
    config::Config,
    discovery::chain,
    events::{Events, Tick},
    features::{self, Visible},
    paging::Account,
    record::Tap,
    registry::{Registry, Resolved},
    reports::Reports,
    restraint::Restraint,
    stacks::Stacks,
};

const HOLDERS_INTERVAL: Duration = Duration::from_secs(30);
const BUS_INTERVAL: Duration = Duration::from_secs(10);

pub(crate) struct Ticker {
    pub(crate) host: Host,
    pub(crate) reader: Option<Reader>,
    pub(crate) device: Option<Device>,
    pub(crate) registry: Arc<Mutex<Registry>>,
    pub(crate) reports: Arc<Mutex<Reports>>,
    pub(crate) stacks: Stacks,
    pub(crate) events: Events,
    pub(crate) pushes: Account,
    pub(crate) libraries: Arc<ArcSwap<Vec<LibraryState>>>,
    pub(crate) features: Vec<Feature>,
    pub(crate) published: Arc<ArcSwapOption<View>>,
    pub(crate) tap: Arc<Tap>,
    pub(crate) started: Instant,
    pub(crate) started_unix: f64,
}

/// What one tick leaves for the next.
struct State {
    node: Node,
    forecaster: Forecaster,
    guard: Guard,
    known: Vec<GpuId>,
    cost: Duration,
    /// The tenants of NVML's PIDs, and the poll they belong to.
    listed: (Option<Duration>, BTreeMap<u32, Tenant>),
    restraint: Restraint,
    /// Who had the driver open, and when that was asked.
    holders: (Duration, Vec<HolderCandidate>),
    /// What the host shows of GPUs, and when that was looked at.
    bus: (Option<Duration>, Visible),
}

impl Ticker {
    pub(crate) fn run(mut self, config: &Config, stop: &AtomicBool) {
        let mut state = State {
            node: Node::default(),
            forecaster: Forecaster::default(),
            guard: Guard::new(Limits { max_tenants: config.tenants.max }),
            known: Vec::new(),
            cost: Duration::ZERO,
            listed: (None, BTreeMap::new()),
            restraint: Restraint::default(),
            holders: (Duration::ZERO, Vec::new()),
            bus: (None, Visible { expected: None }),
        };
        while !stop.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let view = self.tick(&mut state, config.tenants.retention);
            self.published.store(Some(Arc::new(view)));
            state.cost = begun.elapsed();
            std::thread::park_timeout(config.agent.interval.saturating_sub(state.cost));
        }
        self.events.farewell();
    }

    fn tick(&mut self, state: &mut State, retention: Duration) -> View {
        let device = self.device.as_ref().map_or_else(
            || Arc::new(DeviceSample::absent(Duration::ZERO, Absence::Released)),
            Device::latest,
        );
        let mut kernel = self.read(state, &device);
        if let Ok(registry) = self.registry.lock() {
            kernel.processes.iter_mut().for_each(|process| registry.judge(process));
        }
        self.stacks.learn(std::mem::take(&mut kernel.stacks));
        let now = self.started.elapsed();
        let pids: BTreeSet<u32> = device
            .gpus
            .iter()
            .flat_map(|gpu| {
                let listed = gpu.processes.iter().flatten().map(|process| process.pid);
                listed.chain(gpu.process_utilization.iter().flatten().map(|process| process.pid))
            })
            .collect();
        let resolved =
            self.registry.lock().map(|mut registry| registry.resolve(&kernel.processes, &pids)).ok();
        let Resolved { by_process, by_pid } = resolved.unwrap_or_default();
        // NVML's PIDs are whose they were at its poll: one that is reused since is somebody else's.
        if state.listed.0 != Some(device.taken) {
            state.listed = (Some(device.taken), by_pid);
        }
        let (by_process, by_pid) = (&by_process, &state.listed.1);
        let names = Names { by_process, by_pid, classes: self.stacks.classes() };
        let step = state.node.advance(&kernel, &device, names, now, retention);
        if let Some(device) = &self.device {
            device.hold_back(state.restraint.weigh(&Tenant::agent(), &step.fresh_blame, now));
        }
        let (reports, unfetched) =
            self.reports.lock().map(|mut reports| (reports.fetch(), reports.dropped())).unwrap_or_default();
        let only = match state.known.as_slice() {
            [only] => Some(only),
            _ => None,
        };
        let mut events = self.events.observe(&Tick {
            kernel: &kernel,
            device: &device,
            tenants: by_process,
            blame: &step.fresh_blame,
            reports,
            stacks: &self.stacks,
            reader: self.reader.as_ref(),
            only,
        });
        events.lost += unfetched;
        if let Some(reader) = &mut self.reader
            && let Err(error) = reader.retire(&step.retired)
        {
            warn!(error = %chain(&error), "ended processes could not be cleared from the maps");
        }
        if let Ok(mut registry) = self.registry.lock() {
            registry.forget(&step.retired);
        }
        let moment = Moment::of(&step, now, device.taken);
        self.tap.pass(&state.forecaster, &moment);
        let risk = state.forecaster.advance(&moment);
        let expected = self.expected(state, now);
        let mut view = View {
            taken_unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            started_unix: self.started_unix,
            gpus: step.gpus,
            tenants: step.tenants,
            blame: step.blame,
            events,
            risk,
            agent: self.agent(kernel, &device, now, state.cost, expected),
        };
        view.agent.blame_folded = step.blame_folded;
        view.agent.holder_candidates = self.holders(state, &view, now);
        state.guard.fold(&mut view);
        view
    }

    /// Asked only while a GPU has memory in use and NVML lists nobody, and seldom: it walks the host's descriptors.
    fn holders(&self, state: &mut State, view: &View, now: Duration) -> Vec<HolderCandidate> {
        if !view.gpus.iter().any(|gpu| gpu.unattributed_reason == Some("no_process_visible")) {
            return Vec::new();
        }
        let (asked, known) = &mut state.holders;
        if *asked == Duration::ZERO || now.saturating_sub(*asked) >= HOLDERS_INTERVAL {
            *asked = now;
            let own = std::process::id();
            let pids = self.host.device_holders().unwrap_or_default();
            *known = pids
                .into_iter()
                .filter(|pid| *pid != own)
                .filter_map(|pid| {
                    let tenant = self.registry.lock().ok()?.tenant(pid);
                    Some(HolderCandidate { pid, comm: self.host.comm(pid).ok()?, tenant })
                })
                .collect();
        }
        known.clone()
    }

    /// GPUs that the host shows, looked at seldom: a GPU falls off the bus rarely, and needs no second to be missed.
    fn expected(&self, state: &mut State, now: Duration) -> Visible {
        let (asked, known) = &mut state.bus;
        if asked.is_none_or(|asked| now.saturating_sub(asked) >= BUS_INTERVAL) {
            *asked = Some(now);
            *known = Visible::on(&self.host);
        }
        *known
    }

    fn read(&mut self, state: &mut State, device: &DeviceSample) -> KernelSample {
        let Some(reader) = &mut self.reader else { return KernelSample::default() };
        let gpus: Vec<GpuId> = device.gpus.iter().map(|gpu| gpu.id.clone()).collect();
        if gpus != state.known && !gpus.is_empty() {
            match reader.know_gpus(&gpus) {
                Ok(()) => state.known = gpus,
                Err(error) => warn!(error = %chain(&error), "the GPUs could not be made known to the probes"),
            }
        }
        let only = match state.known.as_slice() {
            [only] => Some(only.clone()),
            _ => None,
        };
        reader.read(only.as_ref()).unwrap_or_else(|error| {
            warn!(error = %chain(&error), "the maps could not be read");
            KernelSample::default()
        })
    }

    fn agent(
        &self,
        kernel: KernelSample,
        device: &DeviceSample,
        now: Duration,
        cost: Duration,
        expected: Visible,
    ) -> AgentView {
        let own = self.host.self_cost().ok();
        let mut absences = BTreeMap::new();
        for gpu in &device.gpus {
            for (reading, reason) in [
                ("memory", gpu.memory.as_ref().err()),
                ("processes", gpu.processes.as_ref().err()),
                ("utilization", gpu.utilization.as_ref().err()),
            ] {
                if let Some(reason) = reason {
                    *absences.entry((reading, *reason)).or_default() += 1;
                }
            }
        }
        let health = self.device.as_ref().map(Device::health);
        let condition = health.as_ref().map(|health| &health.condition);
        let libraries = self.libraries.load().as_ref().clone();
        let (visibility, missing_gpus) = features::visibility(expected, device, condition);
        let mut features = self.features.clone();
        features.extend([
            features::nvml(&device.library, condition),
            visibility,
            features::libraries(&libraries),
        ]);
        AgentView {
            version: env!("CARGO_PKG_VERSION"),
            losses: kernel.losses,
            notes: kernel.notes,
            maps: kernel.maps,
            libraries,
            features,
            missing_gpus,
            nvml: device.library.clone(),
            nvml_age_seconds: device.library.is_ok().then(|| now.saturating_sub(device.taken).as_secs_f64()),
            nvml_calls: device.calls.clone(),
            nvml_absences: absences,
            cpu_seconds: own.map_or(0.0, |own| own.cpu_seconds),
            resident_bytes: own.map_or(0, |own| own.resident_bytes),
            tick_seconds: cost.as_secs_f64(),
            tenants_folded: 0,
            blame_folded: 0,
            holder_candidates: Vec::new(),
            probe_cost_seconds: None,
            otlp: self.events.voice.view(),
            alert_pushes: self.pushes.view(),
        }
    }
}
