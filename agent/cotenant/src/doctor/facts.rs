//! Owns everything that `doctor` asks: files, trials, NVML, kubelet, and the running agent.
//! Refuses to decide what any of it means.

use std::{
    collections::BTreeMap,
    thread::sleep,
    time::{Duration, Instant},
};

use cotenant_device::Condition;
use cotenant_host::{Hardware, Host, Kubelet, KubeletConfig, is_libcuda};
use cotenant_kernel::{HostFacts, MapSizes, Plan, Trials, decide, trials};
use cotenant_model::{device::DeviceSample, view::Feature};

use super::ask::{self, Agent};
use crate::{
    client::Access,
    config::Config,
    discovery::chain,
    events::open_log,
    features::{self, Surroundings, Visible},
    kubernetes::Pods,
    rights::Confinement,
    run,
};

/// Enough to load the programs, and little enough for any host.
const SIZES: MapSizes = MapSizes { processes: 64, threads: 64, pointers: 64, handles: 64, share: 512 };
/// Beyond NVML's own deadline.
const MARGIN: Duration = Duration::from_secs(3);

/// A libcuda file that processes have mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) path: String,
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) processes: u32,
}

/// What was found of libcuda.
#[derive(Clone, Debug, Default)]
pub(super) struct Copies {
    pub(super) used: Vec<Copy>,
    /// Where drivers put it.
    pub(super) installed: usize,
    /// Processes whose mappings may not be read.
    pub(super) hidden: usize,
}

/// How a door of the cluster answered.
pub(super) type Answered = Result<String, String>;

pub(super) struct Facts {
    /// The file, or `None` for the defaults.
    pub(super) configuration: Result<Option<String>, String>,
    pub(super) release: String,
    pub(super) surroundings: Surroundings,
    pub(super) planned: HostFacts,
    pub(super) plan: Plan,
    /// `None` for a recorded host, as everything that cannot be recorded.
    pub(super) trials: Option<Trials>,
    pub(super) attempted: Option<Vec<Feature>>,
    pub(super) hardware: Hardware,
    pub(super) visible: Visible,
    pub(super) nvml: Option<(DeviceSample, Option<Condition>)>,
    pub(super) kernel_log: Option<Feature>,
    pub(super) copies: Copies,
    pub(super) kubelet: Option<Answered>,
    pub(super) runtime: Option<Answered>,
    /// The API server, asked once; `None` for a recorded host.
    pub(super) api_watch: Option<Feature>,
    /// What Slurm granted, looked for once.
    pub(super) job_grants: Feature,
    pub(super) agent: Option<Agent>,
}

pub(super) fn gather(
    config: &Config,
    configuration: Result<Option<String>, String>,
    access: &Access,
) -> Facts {
    let host = Host::at(&config.agent.root);
    let live = host.is_running();
    // Before any thread is started: they see the mount as this one does.
    let tracefs = if live {
        host.ensure_mounted_privately().map(|_| ()).map_err(|error| chain(&error))
    } else {
        host.tracefs().map(|_| ()).ok_or_else(|| "not mounted".to_owned())
    };
    let asked = features::facts(&host);
    let plan = decide(&asked.facts, run::choices(config));
    let surroundings = features::look(&host, &asked, tracefs);
    let trials = live.then(trials);
    let attempted = live.then(|| {
        let attempt = features::attempt(&plan, SIZES, &surroundings, trials);
        attempt.features
    });
    let in_host_pids = surroundings.pid_namespace == Some(Ok(true));
    let (kubelet, runtime) = if live && surroundings.cluster.is_node { knock(&host) } else { (None, None) };
    Facts {
        configuration,
        release: std::fs::read_to_string(host.path("proc/sys/kernel/osrelease"))
            .map(|text| text.trim().to_owned())
            .unwrap_or_default(),
        planned: asked.facts,
        plan,
        trials,
        attempted,
        hardware: host.hardware(),
        visible: Visible::on(&host),
        nvml: live.then(|| nvml(config, in_host_pids)),
        kernel_log: live.then(|| open_log(&host, &config.events.kernel_log).1),
        copies: copies(&host),
        kubelet,
        runtime,
        api_watch: live.then(|| Pods::watch(&config.kubernetes, Confinement::none()).asked_once()),
        job_grants: config.slurm.asked_once(&host),
        agent: live.then(|| ask::agent(config.server.listen, access)),
        surroundings,
    }
}

/// One poll. What does not come back in time is a finding.
fn nvml(config: &Config, host_pid_namespace: bool) -> (DeviceSample, Option<Condition>) {
    let started = Instant::now();
    let Some(device) = run::nvml(config, host_pid_namespace, started) else {
        return (DeviceSample::absent(Duration::ZERO, cotenant_model::Absence::Disabled), None);
    };
    let patience = config.nvml.deadline + MARGIN;
    while device.health().condition == Condition::Starting && started.elapsed() < patience {
        sleep(Duration::from_millis(10));
    }
    (DeviceSample::clone(&device.latest()), Some(device.health().condition))
}

fn copies(host: &Host) -> Copies {
    let mut found: BTreeMap<(u64, u64), Copy> = BTreeMap::new();
    let mut hidden = 0;
    for pid in host.processes().unwrap_or_default() {
        let mappings = match host.mappings(pid) {
            Ok(mappings) => mappings,
            Err(error) => {
                hidden += usize::from(!error.is_gone());
                continue;
            }
        };
        let mut own: Vec<(u64, u64, String)> = mappings
            .rows
            .iter()
            .filter(|row| row.executable && is_libcuda(&row.path))
            .map(|row| match host.open_mapped(pid, row) {
                Ok(library) => (library.device, library.inode, library.path),
                Err(_) => (row.device, row.inode, row.path.clone()),
            })
            .collect();
        own.sort();
        own.dedup();
        for (device, inode, path) in own {
            let copy = Copy { path, device, inode, processes: 0 };
            found.entry((device, inode)).or_insert(copy).processes += 1;
        }
    }
    let installed = host.configured_libraries().into_iter().flatten().count();
    Copies { used: found.into_values().collect(), installed, hidden }
}

/// Asks kubelet and the container runtime once.
fn knock(host: &Host) -> (Option<Answered>, Option<Answered>) {
    let kubelet = match Kubelet::spawn(host.clone(), KubeletConfig::of(host)) {
        Ok(kubelet) => kubelet,
        Err(error) => {
            let reason = chain(&error);
            return (Some(Err(reason.clone())), Some(Err(reason)));
        }
    };
    let listing = kubelet.heard.first();
    let of = |source: &cotenant_host::Source, what: String| match (&source.error, source.answered) {
        (None, Some(_)) => Some(Ok(what)),
        (Some(reason), _) => Some(Err(reason.clone())),
        (None, None) => None,
    };
    (
        of(&listing.podresources, format!("answers, {} grants", listing.grants.len())),
        of(&listing.runtime, "answers".to_owned()),
    )
}
