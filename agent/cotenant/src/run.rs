//! Owns the life of the agent: start what this host allows, serve, stop clean.
//! Refuses to stop for one missing facility, and to leave anything attached.

use std::{
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
use cotenant_model::view::Feature;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

use crate::{
    config::{Config, LogFormat, simulated},
    discovery::{Discovery, chain},
    events::{Events, Story, open_log},
    features::{self, Attempt},
    node::Ticker,
    paging::Paging,
    record::Tap,
    registry::Registry,
    reports::Reports,
    serve::{Shared, router},
    stacks::Stacks,
    telemetry::Telemetry,
};

/// How long answers that are under way may take once a stop is asked for.
const GRACE: Duration = Duration::from_secs(1);

pub(crate) fn run(config: &Config) -> Result<()> {
    log(config)?;
    let classes = config.waits.classes()?;
    let started = Instant::now();
    let host = Host::at(&config.agent.root);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the HTTP threads")?;
    // The port first: two agents on one port are told apart before anything is attached.
    let listener = runtime.block_on(TcpListener::bind(config.server.listen)).with_context(|| {
        format!("cannot listen on {}: is another agent running? set server.listen", config.server.listen)
    })?;
    let tracefs = host.ensure_mounted().map(|_| ()).map_err(|error| chain(&error));
    let asked = features::facts(&host);
    let plan = decide(&asked.facts, choices(config));
    let surroundings = features::look(&host, &asked, tracefs);
    let Attempt { kernel, trials, features: attempted } =
        features::attempt(&plan, sizes(config), &surroundings, None);
    let mut features = features::judge(&surroundings, &trials);
    features.push(features::driver(&host.hardware()));
    features.extend(attempted);
    let device = nvml(config, surroundings.pid_namespace == Some(Ok(true)), started);
    let (kernel_log, log_feature) = open_log(&host, &config.events.kernel_log);
    features.push(log_feature);
    let published = Arc::new(ArcSwapOption::empty());
    let telemetry = Telemetry::start(config, &published);
    features.extend([telemetry.feature.clone(), Paging::feature(config)]);
    tell(&features);

    let stop = Arc::new(AtomicBool::new(false));
    let registry = Arc::new(Mutex::new(Registry::new(host.clone())));
    let reports = Arc::new(Mutex::new(Reports::default()));
    let story = Arc::new(Mutex::new(Story::default()));
    let tap = Arc::new(Tap::default());
    let libraries = Arc::new(ArcSwap::from_pointee(Vec::new()));
    let mut threads = Vec::new();
    let mut reader = None;
    if let Some(Kernel { reader: maps, probes, watcher, .. }) = kernel {
        reader = Some(maps);
        let discovery = Discovery::new(
            host.clone(),
            watcher,
            probes,
            Arc::clone(&registry),
            Arc::clone(&libraries),
            Arc::clone(&reports),
        );
        let stop = Arc::clone(&stop);
        threads.push(spawn("discovery", move || discovery.run(&stop))?);
    }
    let paging = Paging::new(config, &story);
    let ticker = Ticker {
        pushes: paging.as_ref().map(Paging::account).unwrap_or_default(),
        stacks: Stacks::new(host.clone(), classes),
        events: Events::new(
            &host,
            kernel_log,
            Arc::clone(&registry),
            Arc::clone(&story),
            telemetry.voice(config),
        ),
        reports,
        host,
        reader,
        device,
        registry,
        libraries,
        features,
        published: Arc::clone(&published),
        tap: Arc::clone(&tap),
        started,
        started_unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
    };
    {
        let (config, stop) = (config.clone(), Arc::clone(&stop));
        threads.push(spawn("tick", move || ticker.run(&config, &stop))?);
    }
    if let Some(paging) = paging {
        let stop = Arc::clone(&stop);
        threads.push(spawn("alertmanager", move || paging.run(&stop))?);
    }
    info!(address = %config.server.listen, "serving");
    let served =
        runtime.block_on(serve(listener, Shared { published, story, tap, exemplars: telemetry.exemplars() }));
    info!("stopping");
    stop.store(true, Ordering::Relaxed);
    for thread in threads {
        thread.thread().unpark();
        if thread.join().is_err() {
            warn!("a thread ended in panic");
        }
    }
    telemetry.stop();
    // A connection that a client holds open must not hold the stop up.
    runtime.shutdown_background();
    served.context("the HTTP server failed")
}

/// What the configuration allows in the kernel.
pub(crate) fn choices(config: &Config) -> Choices {
    Choices {
        syscall_tracepoint: config.kernel.syscall_tracepoint,
        waits: config.waits.enabled,
        slow: (!config.waits.slow_call.is_zero()).then_some(config.waits.slow_call),
    }
}

fn sizes(config: &Config) -> MapSizes {
    let kernel = &config.kernel;
    MapSizes {
        processes: kernel.processes,
        threads: kernel.threads,
        pointers: kernel.pointers,
        handles: kernel.handles,
    }
}

/// Answers until it is told to stop.
async fn serve(listener: TcpListener, shared: Shared) -> std::io::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (asked, mut stopping) = tokio::sync::watch::channel(());
    let server = axum::serve(listener, router(shared))
        .with_graceful_shutdown(async move {
            tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
            let _ = asked.send(());
        })
        .into_future();
    tokio::select! {
        ended = server => ended,
        // A client that has asked half a question must not hold the stop up.
        () = async { let _ = stopping.changed().await; tokio::time::sleep(GRACE).await } => Ok(()),
    }
}

fn tell(features: &[Feature]) {
    for feature in features {
        let Feature { name, state, reason, lost, remedy } = feature;
        if features::bad(*state) {
            warn!(feature = name, state = state.as_str(), reason, lost, remedy, "feature");
        } else {
            info!(feature = name, state = state.as_str(), reason, "feature");
        }
    }
}

fn log(config: &Config) -> Result<()> {
    let filter = EnvFilter::try_new(&config.log.level)
        .with_context(|| format!("log.level {:?} is not a level or filter", config.log.level))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
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

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .with_context(|| format!("cannot start the {name} thread; raise the process limit"))
}
