//! Owns the last good answers, folded to names and grants.
//! Refuses to shrink on an error: only a good answer replaces a good answer.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use cotenant_model::{
    GpuId,
    grant::{Declared, DeviceId, Facts, Grant, GrantedDevice, JobFacts, Resource},
};

use super::ask::{AskError, Pods, cri, podresources};
use crate::{
    Host,
    names::{MAX_ENTRIES, PodName, clean},
};

/// Containers of one pod and devices of one container, as far as they are read.
const MAX_PARTS: usize = 1024;
const FROM_RUNTIME: &str = "the runtime's CRI socket";

/// How one source is doing.
#[derive(Clone, Debug, Default)]
pub struct Source {
    /// When it last answered.
    pub answered: Option<Instant>,
    /// Failed questions since the start. A socket that is not there is not a failure.
    pub failures: u64,
    /// What went wrong last, until it answers again.
    pub error: Option<String>,
}

impl Source {
    /// How old what is known from it is; `None` if it never answered.
    pub fn age(&self) -> Option<Duration> {
        self.answered.map(|at| at.elapsed())
    }

    /// Whether the answer can be used.
    fn hear<T>(&mut self, answer: Result<T, AskError>, asked: Instant) -> Result<T, bool> {
        match answer {
            Ok(answer) => {
                self.answered = Some(asked);
                self.error = None;
                Ok(answer)
            }
            Err(error) => {
                // Absent from the start is no Kubernetes node; absent after an answer is an outage.
                let absent = error.is_absence() && self.answered.is_none();
                self.failures += u64::from(!absent);
                self.error = Some(chain(&error));
                Err(absent)
            }
        }
    }
}

#[derive(Clone, Debug)]
struct Noted {
    uid: String,
    container: String,
}

/// What kubelet and the runtime said.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    pub grants: Vec<Grant>,
    /// Device ids of the last answer that no plugin's grammar reads.
    pub unread_ids: u64,
    /// UIDs of pods with a cgroup on this node; `None` if no hierarchy could be read.
    pub live: Option<BTreeSet<String>>,
    /// Something names each of them.
    pub all_named: bool,
    /// The GPU behind each `/dev/nvidiaN`.
    pub minors: BTreeMap<u32, GpuId>,
    /// What the sandboxes of running pods say about GPUs.
    pub declared: Vec<Declared>,
    /// How often both were asked.
    pub rounds: u64,
    pub podresources: Source,
    pub runtime: Source,
    pods: BTreeMap<String, PodName>,
    containers: BTreeMap<String, Noted>,
}

impl Listing {
    /// All of it that grants are made of. `resources`: those that count as GPUs beside `nvidia.com/*`.
    pub fn facts<'a>(&'a self, resources: &'a [String]) -> Facts<'a> {
        Facts {
            answered: self.podresources.answered.is_some(),
            grants: &self.grants,
            live: self.live.as_ref(),
            all_named: self.all_named,
            minors: &self.minors,
            declared: &self.declared,
            resources,
            jobs: JobFacts::NONE,
        }
    }

    pub(crate) fn pod(&self, uid: &str) -> Option<PodName> {
        self.pods.get(uid).cloned()
    }

    pub(crate) fn pod_of(&self, container: &str) -> Option<String> {
        self.containers.get(container).map(|noted| noted.uid.clone())
    }

    /// The container's name, if it is of this pod.
    pub(crate) fn container(&self, uid: &str, container: &str) -> Option<String> {
        let noted = self.containers.get(container).filter(|noted| noted.uid == uid)?;
        Some(noted.container.clone())
    }

    /// Whether asking went as well as it can on this node.
    pub(super) fn hear_pods(&mut self, answer: Result<Pods, AskError>, asked: Instant) -> bool {
        let Pods { containers, sandboxes } = match self.runtime.hear(answer, asked) {
            Ok(listed) => listed,
            Err(absent) => return absent,
        };
        self.pods.clear();
        self.containers.clear();
        for container in containers.into_iter().take(MAX_ENTRIES) {
            let label = |key: &str| {
                let value = container.labels.get(&format!("io.kubernetes.{key}"))?;
                Some(clean(value)).filter(|value| !value.is_empty())
            };
            let (Some(uid), Some(namespace), Some(pod)) =
                (label("pod.uid"), label("pod.namespace"), label("pod.name"))
            else {
                continue;
            };
            if let Some(name) = label("container.name") {
                self.containers.insert(clean(&container.id), Noted { uid: uid.clone(), container: name });
            }
            self.pods.insert(uid, PodName { namespace, pod, from: FROM_RUNTIME });
        }
        self.declared.clear();
        for sandbox in sandboxes.into_iter().take(MAX_ENTRIES) {
            self.hear_sandbox(&sandbox);
        }
        true
    }

    fn hear_sandbox(&mut self, sandbox: &cri::PodSandbox) {
        let Some(metadata) = &sandbox.metadata else { return };
        let [namespace, pod, uid] = [&metadata.namespace, &metadata.name, &metadata.uid].map(|of| clean(of));
        if sandbox.state != cri::PodSandboxState::SandboxReady as i32
            || [&namespace, &pod, &uid].iter().any(|name| name.is_empty())
        {
            return;
        }
        let annotation = |key: &str| sandbox.annotations.get(key).map(String::as_str);
        let labels = sandbox.labels.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let declared = Declared::read(annotation, labels);
        if !declared.is_empty() {
            self.declared.push(Declared { namespace: namespace.clone(), pod: pod.clone(), ..declared });
        }
        self.pods.entry(uid).or_insert(PodName { namespace, pod, from: FROM_RUNTIME });
    }

    pub(super) fn hear_devices(
        &mut self,
        answer: Result<Vec<podresources::PodResources>, AskError>,
        asked: Instant,
        also: &[String],
    ) -> bool {
        let listed = match self.podresources.hear(answer, asked) {
            Ok(listed) => listed,
            Err(absent) => return absent,
        };
        self.grants.clear();
        self.unread_ids = 0;
        for pod in listed.into_iter().take(MAX_ENTRIES) {
            for container in pod.containers.into_iter().take(MAX_PARTS) {
                let grant = |resource: &str, devices| Grant {
                    namespace: clean(&pod.namespace),
                    pod: clean(&pod.name),
                    pod_uid: None,
                    container: clean(&container.name),
                    resource: clean(resource),
                    devices,
                };
                let mut by_resource: BTreeMap<String, Vec<GrantedDevice>> = BTreeMap::new();
                for granted in container.devices.iter().take(MAX_PARTS) {
                    if Resource::parse(&granted.resource_name, also).is_none() {
                        continue;
                    }
                    // Kubelet repeats the resource once for each NUMA node.
                    let devices = by_resource.entry(granted.resource_name.clone()).or_default();
                    for id in granted.device_ids.iter().take(MAX_PARTS) {
                        match DeviceId::parse(id) {
                            Ok(id) => devices.push(GrantedDevice::Known(id)),
                            Err(_) => self.unread_ids += 1,
                        }
                    }
                }
                for claim in container.dynamic_resources.iter().take(MAX_PARTS) {
                    for device in claim.claim_resources.iter().take(MAX_PARTS) {
                        if device.driver_name.ends_with(".nvidia.com") {
                            by_resource.entry(device.driver_name.clone()).or_default().push(
                                GrantedDevice::Claimed {
                                    pool: clean(&device.pool_name),
                                    device: clean(&device.device_name),
                                },
                            );
                        }
                    }
                }
                self.grants
                    .extend(by_resource.into_iter().map(|(resource, devices)| grant(&resource, devices)));
            }
        }
        true
    }

    /// Says which pods are there, and by that which pod a grant's name means.
    pub(super) fn settle(&mut self, host: &Host) {
        self.rounds += 1;
        self.live = host.live_pods();
        self.minors = host.gpu_minors();
        let logged = host.logged_pods();
        let noted = self.pods.iter().map(|(uid, name)| (uid.clone(), name.clone()));
        let mut uids: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
        let mut unnamed = self.live.clone().unwrap_or_default();
        for (uid, name) in noted.chain(logged) {
            unnamed.remove(&uid);
            uids.entry((name.namespace, name.pod)).or_default().push(uid);
        }
        self.all_named = unnamed.is_empty();
        for grant in &mut self.grants {
            // A pod that was made anew leaves its old UID behind: the one with cgroups is meant.
            let candidates = uids.get(&(grant.namespace.clone(), grant.pod.clone()));
            let candidates = candidates.map(Vec::as_slice).unwrap_or_default();
            let alive = |uid: &&String| self.live.as_ref().is_some_and(|live| live.contains(*uid));
            grant.pod_uid = candidates.iter().find(alive).or(candidates.first()).cloned();
        }
    }
}

pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    clean(&text)
}
