//! Owns the life of the agent: start what this host allows, serve, stop clean.
//! Refuses to stop for one missing facility, and to leave anything attached.

use std::{
    collections::BTreeSet,
    io::IsTerminal,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use arc_swap::{ArcSwap, ArcSwapOption};
use cotenant_device::{Device, NvmlConfig};
use cotenant_host::Host;
use cotenant_kernel::{Choices, Kernel, MapSizes, decide};
use cotenant_model::view::{Feature, FeatureState};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
};
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

use crate::{
    budget::{self, Budget},
    config::{Config, LogFormat, simulated},
    control::{Door, Release, Signals},
    discovery::{Discovery, Wanted, chain},
    events::{Events, Story, open_log},
    features::{self, Attempt},
    limits::Limits,
    node::Ticker,
    notify::Notify,
    paging::Paging,
    pressure::Pressure,
    pulse::Pulse,
    record::Tap,
    registry::Registry,
    reports::Reports,
    rights::{self, Confinement, Work},
    serve::{Gate, Shared, health, router, serve},
    stacks::Stacks,
    telemetry::Telemetry,
};

/// How long answers that are under way may take once a stop is asked for.
const GRACE: Duration = Duration::from_secs(1);

pub(crate) fn run(config: &Config) -> Result<()> {
    log(config)?;
    let classes = config.waits.classes()?;
    let started = Instant::now();
    let gate = Arc::new(Gate::new(&config.server.web_config, config.server.listen)?);
    let host = config.kubernetes.host(Host::at(&config.agent.root));
    let held = host.rights();
    let (confinement, dropped) = Confinement::begin(config.agent.drop_privileges, &held);
    let runtime = runtime(confinement)?;
    let signals = runtime.block_on(async { Signals::hear() })?;
    // The port first: two agents on one port are told apart before anything is attached.
    let listener = bind(&runtime, config.server.listen)?;
    let Loaded { kernel, pair, mut features, sees_pids } = load(config, &host);
    let confinement =
        confinement.attaching(kernel.as_ref().is_some_and(|kernel| !kernel.probes.links_many()));
    features.extend(rights::features(&held).into_iter().chain([dropped]));
    let device = confinement.outside(|| nvml(config, sees_pids, started))?.map(Arc::new);
    let release = Arc::new(Release::new(device.clone()));
    let (door, door_state) = runtime.block_on(async { Door::open(&config.agent.control) });
    let (kernel_log, log_feature) = open_log(&host, &config.events.kernel_log);
    features.extend([log_feature, door_state, features::dmem(&host)]);
    let published = Arc::new(ArcSwapOption::empty());
    let telemetry = confinement.outside(|| Telemetry::start(config, &published))?;
    features.extend([telemetry.feature.clone(), Paging::feature(config)]);
    tell(&features);

    let stop = Arc::new(AtomicBool::new(false));
    let registry = Arc::new(Mutex::new(Registry::new(host.clone(), &config.kubernetes, confinement)));
    let reports = Arc::new(Mutex::new(Reports::default()));
    let story = Arc::new(Mutex::new(Story::default()));
    let tap = Arc::new(Tap::default());
    let libraries = Arc::new(ArcSwap::from_pointee(Vec::new()));
    let orders = Arc::new(ArcSwap::from_pointee(BTreeSet::new()));
    let (share, shed_for) = (config.kernel.probe_share, config.kernel.shed_for);
    let mut threads = Vec::new();
    let mut reader = None;
    if let Some(Kernel { reader: maps, probes, watcher, .. }) = kernel {
        reader = Some(maps);
        let discovery = Discovery::new(
            host.clone(),
            watcher,
            probes,
            Wanted { orders: Arc::clone(&orders), released: Arc::clone(&release.asked) },
            Arc::clone(&registry),
            Arc::clone(&libraries),
            Arc::clone(&reports),
        );
        let stop = Arc::clone(&stop);
        threads.push(confined(confinement, Work::Attach, "discovery", move || discovery.run(&stop))?);
    }
    let pressure = Arc::new(Pressure::default());
    threads.push(look_at_memory(confinement, &pressure, &host, started, &stop)?);
    let paging = Paging::new(config, &story);
    let pulse = Arc::new(Pulse::new(started, config.agent.interval));
    let ticker = Ticker {
        pushes: paging.as_ref().map(Paging::account).unwrap_or_default(),
        stacks: Stacks::new(host.clone(), classes),
        limits: Limits::new(host.clone()),
        events: Events::new(
            &host,
            kernel_log,
            Arc::clone(&registry),
            Arc::clone(&story),
            telemetry.voice(config),
        ),
        reports,
        slurm: config.slurm.watch(&host, confinement),
        host,
        reader,
        device,
        release: Arc::clone(&release),
        gate: Arc::clone(&gate),
        registry,
        kubernetes: config.kubernetes.clone(),
        libraries,
        budget: Budget::new(budget::Rules { share, shed_for, pair }),
        orders,
        pair,
        features,
        published: Arc::clone(&published),
        tap: Arc::clone(&tap),
        pressure,
        notify: Notify::from_environment(),
        pulse: Arc::clone(&pulse),
        started,
        started_unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
    };
    let (settings, ending) = (config.clone(), Arc::clone(&stop));
    threads.push(confined(confinement, Work::Read, "tick", move || ticker.run(&settings, &ending))?);
    // What is left to this thread is to wait, and to accept connections.
    confinement.confine(Work::Outside);
    let shared = Shared { published, pulse, story, tap, exemplars: telemetry.exemplars() };
    runtime.spawn(Arc::clone(&release).heed(signals, config.nvml.release_file.clone()));
    door.map(|door| runtime.spawn(door.hear(release, health(shared.clone()))));
    if let Some(paging) = paging {
        let stop = Arc::clone(&stop);
        threads.push(spawn("alertmanager", move || paging.run(&stop))?);
    }
    info!(address = %config.server.listen, "serving");
    let served = answer(&runtime, listener, shared, gate);
    end(&stop, threads, telemetry, runtime);
    served
}

fn end(stop: &AtomicBool, threads: Vec<JoinHandle<()>>, telemetry: Telemetry, runtime: Runtime) {
    info!("stopping");
    Notify::from_environment().stopping();
    stop.store(true, Ordering::Relaxed);
    join(threads);
    telemetry.stop();
    // A connection that a client holds open must not hold the stop up.
    runtime.shutdown_background();
}

/// The memory of tenants' cgroups, read beside the tick: a file of a cgroup can take long.
fn look_at_memory(
    confinement: Confinement,
    pressure: &Arc<Pressure>,
    host: &Host,
    started: Instant,
    stop: &Arc<AtomicBool>,
) -> Result<JoinHandle<()>> {
    let (pressure, host, stop) = (Arc::clone(pressure), host.clone(), Arc::clone(stop));
    confined(confinement, Work::Outside, "host-memory", move || pressure.run(&host, started, &stop))
}

/// Serves until somebody asks for a stop.
fn answer(runtime: &Runtime, listener: TcpListener, shared: Shared, gate: Arc<Gate>) -> Result<()> {
    let pages = router(shared, &gate);
    runtime.spawn(Arc::clone(&gate).keep());
    runtime.block_on(async {
        serve(listener, pages, gate, stopping()?, GRACE).await;
        Ok(())
    })
}

/// The threads that answer, which keep no capability.
fn runtime(confinement: Confinement) -> Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .on_thread_start(move || confinement.confine(Work::Outside))
        .enable_all()
        .build()
        .context("cannot start the HTTP threads")
}

fn bind(runtime: &Runtime, address: SocketAddr) -> Result<TcpListener> {
    runtime
        .block_on(TcpListener::bind(address))
        .with_context(|| format!("cannot listen on {address}: is another agent running? set server.listen"))
}

/// The kernel side, as far as this host allows it, and how each part of it is.
struct Loaded {
    kernel: Option<Kernel>,
    /// Seconds that the probes of one call cost it.
    pair: Option<f64>,
    features: Vec<Feature>,
    /// In the host's PID namespace.
    sees_pids: bool,
}

fn load(config: &Config, host: &Host) -> Loaded {
    let tracefs = host.ensure_mounted().map(|_| ()).map_err(|error| chain(&error));
    let asked = features::facts(host);
    let plan = decide(&asked.facts, choices(config));
    let surroundings = features::look(host, &asked, tracefs);
    let Attempt { mut kernel, trials, features: attempted } =
        features::attempt(&plan, sizes(config), &surroundings, None);
    let mut features = features::judge(&surroundings, &trials);
    features.push(features::driver(&host.hardware()));
    features.extend(attempted);
    let pair = kernel.as_mut().and_then(|kernel| {
        let (pair, feature) = features::probe_cost(host, &mut kernel.probes);
        features.push(feature);
        pair
    });
    Loaded { kernel, pair, features, sees_pids: surroundings.pid_namespace == Some(Ok(true)) }
}

/// What the configuration allows in the kernel.
pub(crate) fn choices(config: &Config) -> Choices {
    Choices {
        syscall_tracepoint: config.kernel.syscall_tracepoint,
        waits: config.waits.enabled,
        slow: (!config.waits.slow_call.is_zero()).then_some(config.waits.slow_call),
    }
}

fn join(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        thread.thread().unpark();
        if thread.join().is_err() {
            warn!("a thread ended in panic");
        }
    }
}

fn sizes(config: &Config) -> MapSizes {
    let kernel = &config.kernel;
    MapSizes {
        processes: kernel.processes,
        threads: kernel.threads,
        pointers: kernel.pointers,
        handles: kernel.handles,
        ..MapSizes::default()
    }
    .with_share(kernel.process_share)
}

/// Until somebody asks for a stop.
fn stopping() -> Result<impl Future<Output = ()>> {
    let of = |kind| signal(kind).context("SIGTERM and SIGINT cannot be heard");
    let (mut terminate, mut interrupt) = (of(SignalKind::terminate())?, of(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
    })
}

fn tell(features: &[Feature]) {
    for feature in features {
        let Feature { name, state, reason, lost, remedy } = feature;
        match state {
            // What a host does not have is no fault of it.
            FeatureState::Degraded | FeatureState::Broken => {
                warn!(feature = name, state = state.as_str(), reason, lost, remedy, "feature");
            }
            FeatureState::Unsupported => {
                info!(feature = name, state = state.as_str(), reason, lost, remedy, "feature");
            }
            FeatureState::Active | FeatureState::Disabled => {
                info!(feature = name, state = state.as_str(), reason, "feature");
            }
        }
    }
}

fn log(config: &Config) -> Result<()> {
    let filter = EnvFilter::try_new(&config.log.level)
        .with_context(|| format!("log.level {:?} is not a level or filter", config.log.level))?;
    // Colours are for people: a journal and a pod's log keep the codes as text.
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let colours = std::io::stderr().is_terminal() && !plain;
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    match config.log.format {
        LogFormat::Json => builder.json().init(),
        LogFormat::Text => builder.init(),
    }
    Ok(())
}

pub(crate) fn nvml(config: &Config, host_pid_namespace: bool, started: Instant) -> Option<Device> {
    if !config.nvml.enabled {
        return None;
    }
    let nvml = NvmlConfig {
        library: config.nvml.library.clone(),
        interval: config.nvml.interval,
        test_interval: simulated().then_some(config.nvml.interval),
        deadline: config.nvml.deadline,
        pcie: config.nvml.pcie,
        host_pid_namespace,
        ..NvmlConfig::default()
    };
    match Device::spawn(nvml, started) {
        Ok(device) => Some(device),
        Err(error) => {
            warn!(error = %chain(&error), "NVML is not asked");
            None
        }
    }
}

/// As [`spawn`], with what `work` keeps.
fn confined(
    confinement: Confinement,
    work: Work,
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    spawn(name, move || {
        confinement.confine(work);
        body();
    })
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .with_context(|| format!("cannot start the {name} thread; raise the process limit"))
}
