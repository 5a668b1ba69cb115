//! Owns what kubelet and the container runtime answer over their sockets, asked on a thread of their own.
//! Refuses to wait for them, and to forget what they said once they fail.

mod ask;
mod listing;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
pub(crate) use listing::chain;
pub use listing::{Listing, Source};

use crate::{
    Host, HostError,
    heard::{Asked, Heard},
};

/// No pod that starts makes the agent ask more often.
const LEAST_PAUSE: Duration = Duration::from_secs(1);
/// After failures the pause doubles this often.
const MAX_DOUBLINGS: u32 = 5;

#[derive(Clone, Debug)]
pub struct KubeletConfig {
    /// Kubelet's pod-resources socket.
    pub podresources: PathBuf,
    /// Sockets of container runtimes; the first that is there is asked.
    pub runtimes: Vec<PathBuf>,
    pub interval: Duration,
    /// Of one question.
    pub deadline: Duration,
    /// Resources that count as GPUs beside `nvidia.com/*`.
    pub resources: Vec<String>,
}

impl KubeletConfig {
    pub const PODRESOURCES: &'static str = "/var/lib/kubelet/pod-resources/kubelet.sock";
    pub const RUNTIMES: [&'static str; 6] = [
        "/run/containerd/containerd.sock",
        "/run/k3s/containerd/containerd.sock",
        "/run/k0s/containerd.sock",
        "/var/snap/microk8s/common/run/containerd.sock",
        "/run/crio/crio.sock",
        "/run/cri-dockerd.sock",
    ];
    pub const INTERVAL: Duration = Duration::from_secs(10);
    pub const DEADLINE: Duration = Duration::from_secs(2);

    /// Where they are on this host by default.
    pub fn of(host: &Host) -> Self {
        Self {
            podresources: host.path(Self::PODRESOURCES),
            runtimes: Self::RUNTIMES.iter().map(|socket| host.path(socket)).collect(),
            interval: Self::INTERVAL,
            deadline: Self::DEADLINE,
            resources: Vec::new(),
        }
    }
}

/// The thread, and what it last heard.
#[derive(Debug)]
pub struct Kubelet {
    pub heard: Heard<Listing>,
    stop: Arc<AtomicBool>,
    hurry: Arc<AtomicBool>,
}

impl Kubelet {
    pub fn spawn(host: Host, config: KubeletConfig) -> Result<Self, HostError> {
        let latest = Arc::new(ArcSwap::from_pointee(Listing::default()));
        let (stop, hurry) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let asker = Asker {
            host,
            config,
            latest: Arc::clone(&latest),
            stop: Arc::clone(&stop),
            hurry: Arc::clone(&hurry),
        };
        let failed = |source| HostError::Thread { what: "kubelet", source };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let thread = std::thread::Builder::new()
            .name("kubelet".to_owned())
            .spawn(move || asker.run(&runtime))
            .map_err(failed)?;
        Ok(Self { heard: Heard::new(latest, thread), stop, hurry })
    }

    /// A pod is there that the last answer did not name: ask soon.
    pub fn hurry(&self) {
        self.hurry.store(true, Ordering::Relaxed);
        self.heard.wake();
    }
}

impl Asked for Listing {
    fn rounds(&self) -> u64 {
        self.rounds
    }
}

impl Drop for Kubelet {
    /// The thread ends by itself, after its question's deadline at the latest: nobody's exit waits for kubelet.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.heard.wake();
    }
}

struct Asker {
    host: Host,
    config: KubeletConfig,
    latest: Arc<ArcSwap<Listing>>,
    stop: Arc<AtomicBool>,
    hurry: Arc<AtomicBool>,
}

impl Asker {
    fn run(self, runtime: &tokio::runtime::Runtime) {
        let mut failures = 0;
        while !self.stop.load(Ordering::Relaxed) {
            self.hurry.store(false, Ordering::Relaxed);
            let asked = Instant::now();
            let mut next = Listing::clone(&self.latest.load());
            let (pods, devices) = runtime.block_on(async {
                tokio::join!(
                    ask::pods(&self.config.runtimes, self.config.deadline),
                    ask::pod_resources(&self.config.podresources, self.config.deadline)
                )
            });
            let good =
                next.hear_pods(pods, asked) & next.hear_devices(devices, asked, &self.config.resources);
            next.settle(&self.host);
            self.latest.store(Arc::new(next));
            failures = if good { 0 } else { (failures + 1).min(MAX_DOUBLINGS) };
            self.pause(asked, self.config.interval * 2_u32.pow(failures), good);
        }
    }

    fn pause(&self, asked: Instant, interval: Duration, good: bool) {
        while !self.stop.load(Ordering::Relaxed) {
            // What fails is not asked sooner because somebody is in a hurry.
            let hurried = good && self.hurry.load(Ordering::Relaxed);
            let until = if hurried { LEAST_PAUSE.min(interval) } else { interval };
            let left = until.saturating_sub(asked.elapsed());
            if left.is_zero() {
                return;
            }
            std::thread::park_timeout(left);
        }
    }
}

#[cfg(test)]
mod tests;
