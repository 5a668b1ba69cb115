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
use cotenant_device::{Condition, Device, Rung};
use cotenant_export::Guard;
use cotenant_host::{Host, JobListing, Listing};
use cotenant_kernel::Reader;
use cotenant_model::{
    Absence, DeviceSample, GpuId, Names, Node, ProcessId, Step, Tenant,
    grant::{Book, Facts, GrantsView, JobFacts},
    idle::Idle,
    risk::{Forecast, Forecaster, Kills, Moment},
    sample::{KernelSample, LibraryState},
    sharing::Sharers,
    view::{AgentView, EventsView, Feature, FeatureState, HolderCandidate, View},
    xid::{XidDetail, XidGpu, XidReport, XidSource},
};
use tracing::warn;

use crate::{
    budget::{Budget, Key},
    config::{Config, Tenants},
    control::Release,
    discovery::chain,
    events::{Events, Tick},
    features::{self, Visible, feature, hearing},
    kubernetes::{Kubernetes, Told, grants_feature, sources},
    limits::Limits,
    notify::Notify,
    paging::Account,
    pressure::Pressure,
    pulse::Pulse,
    record::Tap,
    registry::{Registry, Resolved},
    reports::Reports,
    restraint::Restraint,
    serve::Gate,
    slurm::Watched,
    stacks::Stacks,
};

const HOLDERS_INTERVAL: Duration = Duration::from_secs(30);
const BUS_INTERVAL: Duration = Duration::from_secs(10);

pub(crate) struct Ticker {
    pub(crate) host: Host,
    pub(crate) reader: Option<Reader>,
    pub(crate) device: Option<Arc<Device>>,
    pub(crate) release: Arc<Release>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) registry: Arc<Mutex<Registry>>,
    pub(crate) kubernetes: Kubernetes,
    pub(crate) slurm: Watched,
    pub(crate) reports: Arc<Mutex<Reports>>,
    pub(crate) stacks: Stacks,
    pub(crate) events: Events,
    pub(crate) limits: Limits,
    pub(crate) pushes: Account,
    pub(crate) libraries: Arc<ArcSwap<Vec<LibraryState>>>,
    pub(crate) budget: Budget,
    /// What the budget wants of the one who attaches probes.
    pub(crate) orders: Arc<ArcSwap<BTreeSet<Key>>>,
    /// Seconds that the probes of one call cost it.
    pub(crate) pair: Option<f64>,
    pub(crate) features: Vec<Feature>,
    pub(crate) published: Arc<ArcSwapOption<View>>,
    pub(crate) tap: Arc<Tap>,
    pub(crate) pressure: Arc<Pressure>,
    pub(crate) notify: Notify,
    pub(crate) pulse: Arc<Pulse>,
    pub(crate) started: Instant,
    pub(crate) started_unix: f64,
}

/// What one tick leaves for the next.
struct State {
    node: Node,
    forecaster: Forecaster,
    /// The last one.
    forecast: Forecast,
    guard: Guard,
    known: Vec<GpuId>,
    cost: Duration,
    /// The tenants of NVML's PIDs, and the poll they belong to.
    listed: (Option<Duration>, BTreeMap<u32, Tenant>),
    restraint: Restraint,
    sharers: Sharers,
    book: Book,
    idle: Idle,
    /// When the last tick was.
    past: Duration,
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
            forecast: Forecast::default(),
            guard: Guard::new(cotenant_export::Limits { max_tenants: config.tenants.max }),
            known: Vec::new(),
            cost: Duration::ZERO,
            listed: (None, BTreeMap::new()),
            restraint: Restraint::default(),
            sharers: Sharers::default(),
            book: Book::default(),
            idle: Idle::default(),
            past: self.started.elapsed(),
            holders: (Duration::ZERO, Vec::new()),
            bus: (None, Visible { expected: None }),
        };
        self.notify.expect_ticks(config.agent.interval);
        while !stop.load(Ordering::Relaxed) {
            let begun = Instant::now();
            if let Some(view) = self.tick(&mut state, &config.tenants).map(Arc::new) {
                self.published.store(Some(Arc::clone(&view)));
                self.pulse.beat();
                self.notify.ticked(view.gpus.len(), view.tenants.len(), &view.agent.features);
            }
            state.cost = begun.elapsed();
            std::thread::park_timeout(config.agent.interval.saturating_sub(state.cost));
        }
        self.events.farewell();
    }

    /// `None`: what was published stays, and grows old.
    fn tick(&mut self, state: &mut State, tenants: &Tenants) -> Option<View> {
        let device = self.device.as_ref().map_or_else(
            || Arc::new(DeviceSample::absent(Duration::ZERO, Absence::Released)),
            |device| device.latest(),
        );
        let mut kernel = self.read(state, &device)?;
        if let Ok(registry) = self.registry.lock() {
            kernel.processes.iter_mut().for_each(|process| registry.judge(process));
        }
        self.economise(&mut kernel);
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
        let listed = device.gpus.iter().flat_map(|gpu| gpu.processes.iter().flatten());
        let servers = listed.filter(|process| process.mps_server).map(|process| process.pid).collect();
        let resolved = self
            .registry
            .lock()
            .map(|mut registry| (registry.resolve(&kernel.processes, &pids, &servers), registry.granted()));
        let (Resolved { by_process, by_pid }, granted) = resolved.unwrap_or_default();
        // NVML's PIDs are whose they were at its poll: one that is reused since is somebody else's.
        if state.listed.0 != Some(device.taken) {
            state.listed = (Some(device.taken), by_pid);
        }
        let (by_process, by_pid) = (&by_process, &state.listed.1);
        let names = Names { by_process, by_pid, classes: self.stacks.classes() };
        let mut step = state.node.advance(&kernel, &device, names, now, tenants.retention);
        if let Some(device) = &self.device {
            device.hold_back(state.restraint.weigh(&Tenant::agent(), &step.fresh_blame, now));
        }
        let (reports, unfetched) =
            self.reports.lock().map(|mut reports| (reports.fetch(), reports.dropped())).unwrap_or_default();
        let only = match state.known.as_slice() {
            [only] => Some(only),
            _ => None,
        };
        let sharing =
            state.sharers.advance(&device, |process| by_pid.get(&process.pid).cloned(), &granted, now);
        for gpu in &mut step.gpus {
            gpu.sharing = sharing.get(&gpu.sample.id).copied().unwrap_or(gpu.sharing);
        }
        self.limits.advance(&kernel, &device, (self.reader.as_ref(), only), now);
        self.limits.publish(by_process, &mut step.tenants);
        let faults = self.device.as_deref().map(faults).unwrap_or_default();
        let mut events = self.events.observe(&Tick {
            kernel: &kernel,
            device: &device,
            tenants: by_process,
            blame: &step.fresh_blame,
            reports,
            stacks: &self.stacks,
            reader: self.reader.as_ref(),
            only,
            limits: &self.limits,
            faults,
            forecast: (&state.forecast, now.saturating_sub(state.forecast.at)),
        });
        events.lost += unfetched + self.device.as_deref().map_or(0, Device::faults_dropped);
        if let Some(reader) = &mut self.reader
            && let Err(error) = reader.retire(&step.retired)
        {
            warn!(error = %chain(&error), "ended processes could not be cleared from the maps");
        }
        if let Ok(mut registry) = self.registry.lock() {
            registry.forget(&step.retired);
        }
        let (listing, jobs, told) = self.heard();
        told.note(&mut step.tenants);
        let heard = (listing.as_deref(), jobs.as_deref(), &told);
        let grants = self.grants(state, heard, &step, &device, now);
        let calls = self.reader.as_ref().map(|_| kernel.processes.as_slice());
        let holders = state.idle.advance(calls, &device, &state.listed.1, now, tenants.idle_after);
        let risk = self.forecast(state, &kernel, by_process, &step, (&device, &events), now);
        let expected = self.expected(state, now);
        let mut view = View {
            taken_unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            started_unix: self.started_unix,
            gpus: step.gpus,
            tenants: step.tenants,
            blame: step.blame,
            events,
            risk,
            grants,
            holders,
            agent: self.agent(kernel, &device, now, state.cost, expected),
        };
        view.agent.features.push(grants_feature(self.kubernetes.enabled, listing.as_deref()));
        view.agent.features.extend([told.feature(), self.slurm.feature(jobs.as_deref())]);
        view.agent.blame_folded = step.blame_folded;
        view.agent.holder_candidates = self.holders(state, &view, now);
        state.guard.fold(&mut view);
        Some(view)
    }

    /// What is to be expected, and to the recorders what it was told from.
    fn forecast(
        &self,
        state: &mut State,
        kernel: &KernelSample,
        by_process: &BTreeMap<ProcessId, Tenant>,
        step: &Step,
        (device, events): (&DeviceSample, &EventsView),
        now: Duration,
    ) -> Forecast {
        let alive = kernel.processes.iter().filter(|process| process.ended.is_none());
        let with_calls =
            alive.filter_map(|process| Some((process.tgid, by_process.get(&process.id)?.clone())));
        self.pressure.watch(with_calls.chain(state.listed.1.clone()).collect());
        let moment = Moment::of(step, now, device.taken).with_host(
            step,
            self.pressure.latest(),
            Kills::of(&events.kills),
        );
        self.tap.pass(&state.forecaster, &moment);
        let risk = state.forecaster.advance(&moment);
        state.forecast.clone_from(&risk);
        risk
    }

    /// What kubelet, Slurm and the API server said last.
    fn heard(&self) -> (Option<Arc<Listing>>, Option<Arc<JobListing>>, Told) {
        let heard = self.registry.lock().map(|registry| (registry.listing(), registry.pods()));
        let (listing, told) = heard.unwrap_or_default();
        (listing, self.slurm.latest(), told)
    }

    fn grants(
        &self,
        state: &mut State,
        (listing, jobs, told): (Option<&Listing>, Option<&JobListing>, &Told),
        step: &Step,
        device: &DeviceSample,
        now: Duration,
    ) -> GrantsView {
        let elapsed = now.saturating_sub(state.past);
        state.past = now;
        let empty = Listing::default();
        let listing = listing.unwrap_or(&empty);
        let facts = Facts {
            jobs: jobs.map_or(JobFacts::NONE, JobListing::facts),
            ..listing.facts(&self.kubernetes.resources)
        };
        let library = device.library.as_ref().map(|_| ()).map_err(|reason| *reason);
        let grants = state.book.advance(facts, &step.tenants, &step.gpus, library, elapsed);
        let sources = sources(listing).into_iter().chain(told.source()).collect();
        let mut grants = GrantsView { unread_ids: listing.unread_ids, sources, ..grants };
        told.name_grants(&mut grants, self.kubernetes.tenant_namespace);
        grants
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

    /// Keeps what probes cost within the budget, and marks whose figures suffer.
    fn economise(&mut self, kernel: &mut KernelSample) {
        let libraries = self.libraries.load_full();
        let orders = self.budget.weigh(kernel, &libraries, self.started.elapsed());
        if let Some(reader) = &mut self.reader {
            let spared = orders.untimed.map_or(Ok(()), |untimed| reader.spare(&untimed));
            let written =
                if orders.write_off.is_empty() { Ok(()) } else { reader.write_off(&orders.write_off) };
            let told = orders.shedding.map_or(Ok(()), |expected| reader.expect_shedding(expected));
            if let Err(error) = spared.and(written).and(told) {
                warn!(error = %chain(&error), "the budget of the probes could not be kept");
            }
        }
        if **self.orders.load() != orders.shed {
            self.orders.store(Arc::new(orders.shed));
        }
    }

    /// `None` when the maps cannot be read: an empty sample would look as if everybody had left.
    fn read(&mut self, state: &mut State, device: &DeviceSample) -> Option<KernelSample> {
        let Some(reader) = &mut self.reader else { return Some(KernelSample::default()) };
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
        reader
            .read(only.as_ref())
            .inspect_err(|error| warn!(error = %chain(error), "the maps could not be read"))
            .ok()
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
        let released = self.release.reason();
        let health = self.device.as_ref().map(|device| device.health());
        let condition = match (&health, &released) {
            (Some(_), Some(_)) => Some(&Condition::Released),
            (health, _) => health.as_ref().map(|health| &health.condition),
        };
        let libraries = self.libraries.load_full();
        let (visibility, missing_gpus) = features::visibility(expected, device, condition);
        let mut features = self.features.clone();
        features.extend([
            match released {
                Some(reason) => feature("nvml", FeatureState::Disabled, reason),
                None => features::nvml(&device.library, condition),
            },
            visibility,
            self.gate.feature(),
            features::libraries(&libraries),
        ]);
        if self.reader.is_some() {
            features.push(self.budget.feature(&libraries));
        }
        features.push(hearing(self.device.as_deref().map(Device::hearing)));
        AgentView {
            version: env!("CARGO_PKG_VERSION"),
            losses: kernel.losses,
            notes: kernel.notes,
            maps: kernel.maps,
            probes_shed: libraries.iter().filter(|library| library.shed).count() as u64,
            processes_untimed: self.budget.untimed_count(),
            libraries: libraries.as_ref().clone(),
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
            probe_cost_seconds: self.pair,
            otlp: self.events.voice.view(),
            alert_pushes: self.pushes.view(),
        }
    }
}

/// What NVML told of faults since the last tick, with how long ago.
fn faults(device: &Device) -> Vec<(Duration, XidReport)> {
    let report = |rung: Rung| {
        let detail = XidDetail { gpu_instance: rung.alarm.gpu_instance, ..XidDetail::default() };
        let gpu = XidGpu::Id(rung.alarm.gpu);
        let report = XidReport { source: XidSource::Nvml, time_ns: 0, gpu, code: rung.alarm.code, detail };
        (rung.at.elapsed(), report)
    };
    device.faults().into_iter().map(report).collect()
}
