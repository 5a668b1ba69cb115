//! Owns the names of pods and of containers in them, without any right in the API.
//! Refuses what a container outside Kubernetes says of itself: only kubelet's own runtimes are asked.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{HostNames, MAX_ENTRIES, PodName, clean, containers::STORAGE_DRIVERS, known};
use crate::{Host, read};

/// Where CRI containers run; other namespaces of containerd take any annotation from anybody.
const BUNDLES: &str = "run/containerd/io.containerd.runtime.v2.task/k8s.io";
const MAX_BUNDLE: u64 = 4 << 20;
/// Containers of one pod, and log files of one container.
const MAX_PARTS: usize = 64;

#[derive(Deserialize)]
struct Bundle {
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// What a runtime noted when kubelet asked for a container.
#[derive(Default)]
struct Note {
    uid: Option<String>,
    namespace: Option<String>,
    pod: Option<String>,
    container: Option<String>,
    sandbox: bool,
    from: &'static str,
}

impl HostNames {
    /// The directory `<namespace>_<pod>_<uid>` that kubelet makes for a pod's logs.
    fn pod_logs(&self, uid: &str) -> Option<String> {
        read::names_in(&self.host.pod_logs(), MAX_ENTRIES)
            .into_iter()
            .find(|name| name.rsplit_once('_').is_some_and(|(_, of)| of == uid))
    }

    pub(super) fn logged_pod(&self, uid: &str) -> Option<PodName> {
        let directory = self.pod_logs(uid)?;
        logged(&directory).map(|(_, name)| name)
    }

    /// As the runtime noted it, if it noted this pod's UID. A static pod's hash is its UID there as well.
    pub(super) fn noted_pod(&self, uid: &str, container: &str) -> Option<PodName> {
        let note = self.note(container)?;
        if note.uid.as_deref() != Some(uid) {
            return None;
        }
        pod_name(&note.namespace?, &note.pod?, note.from)
    }

    pub(super) fn noted_uid(&self, container: &str) -> Option<String> {
        let uid = self.note(container)?.uid?;
        // It becomes part of paths.
        let plain = uid.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
        (plain && (32..=36).contains(&uid.len())).then_some(uid)
    }

    pub(super) fn name_in_pod(&self, pod_uid: &str, container: &str) -> Option<String> {
        // `<pod>_<namespace>_<container>-<id>.log`
        let suffix = format!("-{container}.log");
        let links = read::names_in(&self.host.path("var/log/containers"), MAX_ENTRIES);
        let linked =
            links.iter().find_map(|link| Some(link.strip_suffix(&suffix)?.rsplit_once('_')?.1.to_owned()));
        if let Some(name) = linked {
            return known(&name);
        }
        if let Some(note) = self.note(container)
            && (note.sandbox || note.container.is_some())
        {
            return if note.sandbox { None } else { known(&note.container?) };
        }
        let directory = self.host.pod_logs().join(self.pod_logs(pod_uid)?);
        let mut names = read::names_in(&directory, MAX_PARTS);
        // Docker's log files are links that name the container.
        let links_to = |name: &String| {
            let logs = directory.join(name);
            read::names_in(&logs, MAX_PARTS).iter().any(|log| {
                std::fs::read_link(logs.join(log))
                    .is_ok_and(|to| to.to_str().is_some_and(|to| to.contains(container)))
            })
        };
        if let Some(name) = names.iter().find(|name| links_to(name)) {
            return known(name);
        }
        // With several of them the directory does not say which.
        if names.len() == 1 { known(&names.pop()?) } else { None }
    }

    fn note(&self, container: &str) -> Option<Note> {
        self.containerd_note(container)
            .or_else(|| self.crio_note(container))
            .or_else(|| self.docker_note(container))
    }

    fn annotations(&self, path: &str) -> Option<BTreeMap<String, String>> {
        let bundle = read::bytes(&self.host.path(path), MAX_BUNDLE).ok()?;
        Some(serde_json::from_slice::<Bundle>(&bundle).ok()?.annotations)
    }

    fn containerd_note(&self, container: &str) -> Option<Note> {
        let mut noted = self.annotations(&format!("{BUNDLES}/{container}/config.json"))?;
        let mut take = |key: &str| noted.remove(&format!("io.kubernetes.cri.{key}"));
        Some(Note {
            uid: take("sandbox-uid"),
            namespace: take("sandbox-namespace"),
            pod: take("sandbox-name"),
            container: take("container-name"),
            sandbox: take("container-type").as_deref() == Some("sandbox"),
            from: "containerd's bundle",
        })
    }

    fn crio_note(&self, container: &str) -> Option<Note> {
        let places = ["run/containers/storage", "var/lib/containers/storage"]
            .into_iter()
            .flat_map(|storage| STORAGE_DRIVERS.map(|driver| format!("{storage}/{driver}-containers")));
        let mut noted = places
            .into_iter()
            .find_map(|place| self.annotations(&format!("{place}/{container}/userdata/config.json")))?;
        // Podman keeps its containers in the same place, and takes annotations from whoever runs them.
        noted.get("io.kubernetes.cri-o.ContainerID").filter(|id| *id == container)?;
        let sandbox = noted.get("io.kubernetes.cri-o.ContainerType").is_some_and(|kind| kind == "sandbox");
        let labels = noted.remove("io.kubernetes.cri-o.Labels")?;
        let labels = serde_json::from_str(&labels).ok()?;
        Some(Note { sandbox, from: "CRI-O's bundle", ..Note::labelled(labels) })
    }

    fn docker_note(&self, container: &str) -> Option<Note> {
        let labels = self.docker_labels(container)?;
        let sandbox = labels.get("io.kubernetes.docker.type").is_some_and(|kind| kind == "podsandbox");
        // Only kubelet's shims put a container below a pod's cgroup; a label alone is anybody's.
        let known = labels.contains_key("io.kubernetes.docker.type") && self.docker_is_podded(container);
        known.then(|| Note { sandbox, from: "docker's config.v2.json", ..Note::labelled(labels) })
    }
}

impl Host {
    /// Every pod that kubelet keeps logs of, running or not, by UID.
    pub(crate) fn logged_pods(&self) -> Vec<(String, PodName)> {
        let directories = read::names_in(&self.pod_logs(), MAX_ENTRIES);
        directories.iter().filter_map(|directory| logged(directory)).collect()
    }
}

/// `<namespace>_<pod>_<uid>`; Kubernetes names hold no underscore.
fn logged(directory: &str) -> Option<(String, PodName)> {
    let parts: Vec<&str> = directory.split('_').collect();
    let [namespace, pod, uid] = parts.as_slice() else { return None };
    Some(((*uid).to_owned(), pod_name(namespace, pod, "/var/log/pods")?))
}

impl Note {
    fn labelled(mut labels: BTreeMap<String, String>) -> Self {
        let mut take = |key: &str| labels.remove(&format!("io.kubernetes.{key}"));
        Self {
            uid: take("pod.uid"),
            namespace: take("pod.namespace"),
            pod: take("pod.name"),
            container: take("container.name"),
            ..Self::default()
        }
    }
}

fn pod_name(namespace: &str, pod: &str, from: &'static str) -> Option<PodName> {
    (!namespace.is_empty() && !pod.is_empty()).then(|| PodName {
        namespace: clean(namespace),
        pod: clean(pod),
        from,
    })
}
