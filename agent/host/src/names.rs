//! Owns how ids become names, from the files that kubelet and runtimes leave on the host.
//! Refuses to trust them: reads are bounded, and what a tenant chose is cleaned before it becomes a label.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::cgroup::Runtime;
use crate::{Host, read};

const MAX_NAME: usize = 128;
const MAX_PASSWD: u64 = 4 << 20;
const MAX_CONFIG: u64 = 4 << 20;
const MAX_ENTRIES: usize = 8192;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodName {
    pub namespace: String,
    pub pod: String,
}

/// Names for what a cgroup path holds. Every answer is clean ([`clean`]).
pub trait Names {
    fn user(&self, uid: u32) -> Option<String>;
    fn pod(&self, uid: &str) -> Option<PodName>;
    /// The container's name within its pod.
    fn pod_container(&self, pod_uid: &str, container_id: &str) -> Option<String>;
    /// The name of a container outside Kubernetes; `uid` is whose it is, for rootless runtimes.
    fn container(&self, runtime: Runtime, id: &str, uid: u32) -> Option<String>;
}

/// [`Names`] from the host's files, read anew each time.
#[derive(Clone, Debug)]
pub struct HostNames {
    host: Host,
}

impl HostNames {
    pub fn new(host: Host) -> Self {
        Self { host }
    }

    fn json<T: for<'de> Deserialize<'de>>(&self, path: &str) -> Option<T> {
        serde_json::from_slice(&read::bytes(&self.host.path(path), MAX_CONFIG).ok()?).ok()
    }

    fn passwd<T>(&self, uid: u32, pick: impl Fn(&[&str]) -> Option<T>) -> Option<T> {
        let passwd = read::text(&self.host.path("etc/passwd"), MAX_PASSWD).ok()?;
        let fields = |line: &str| -> Option<T> {
            let fields: Vec<&str> = line.split(':').collect();
            if fields.get(2)?.parse() == Ok(uid) { pick(&fields) } else { None }
        };
        passwd.lines().find_map(fields)
    }

    /// The directory `<namespace>_<pod>_<uid>` that kubelet makes for a pod's logs.
    fn pod_logs(&self, uid: &str) -> Option<String> {
        read::names_in(&self.host.path("var/log/pods"), MAX_ENTRIES)
            .into_iter()
            .find(|name| name.rsplit_once('_').is_some_and(|(_, of)| of == uid))
    }

    fn podman(&self, id: &str, uid: u32) -> Option<String> {
        let rootful = "var/lib/containers/storage".to_owned();
        let home = self.passwd(uid, |fields| fields.get(5).map(|home| (*home).to_owned()));
        let rootless =
            home.filter(|_| uid != 0).map(|home| format!("{home}/.local/share/containers/storage"));
        [Some(rootful), rootless].into_iter().flatten().find_map(|storage| {
            let listed: Vec<Stored> = self.json(&format!("{storage}/overlay-containers/containers.json"))?;
            listed.into_iter().find(|stored| stored.id == id)?.names?.into_iter().next()
        })
    }

    /// What the runtime was told about the container, by containerd's namespaces.
    fn annotation(&self, id: &str, keys: &[&str]) -> Option<String> {
        const TASKS: &str = "run/containerd/io.containerd.runtime.v2.task";
        let namespaces = read::names_in(&self.host.path(TASKS), 64);
        namespaces.iter().find_map(|namespace| {
            let bundle: Bundle = self.json(&format!("{TASKS}/{namespace}/{id}/config.json"))?;
            let annotations = bundle.annotations?;
            keys.iter().find_map(|key| annotations.get(*key).cloned())
        })
    }
}

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(rename = "Name")]
    name: String,
}

#[derive(Deserialize)]
struct Stored {
    id: String,
    names: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Bundle {
    annotations: Option<BTreeMap<String, String>>,
}

impl Names for HostNames {
    fn user(&self, uid: u32) -> Option<String> {
        let name = self.passwd(uid, |fields| fields.first().map(|name| (*name).to_owned()))?;
        Some(clean(&name)).filter(|name| !name.is_empty())
    }

    fn pod(&self, uid: &str) -> Option<PodName> {
        let directory = self.pod_logs(uid)?;
        // Kubernetes names hold no underscore.
        let mut parts = directory.split('_');
        let (namespace, pod) = (parts.next()?, parts.next()?);
        let whole = parts.next().is_some() && parts.next().is_none();
        (whole && !namespace.is_empty() && !pod.is_empty())
            .then(|| PodName { namespace: clean(namespace), pod: clean(pod) })
    }

    fn pod_container(&self, pod_uid: &str, container_id: &str) -> Option<String> {
        // `<pod>_<namespace>_<container>-<id>.log`
        let suffix = format!("-{container_id}.log");
        let links = read::names_in(&self.host.path("var/log/containers"), MAX_ENTRIES);
        let linked = links.iter().find_map(|link| {
            let name = link.strip_suffix(&suffix)?.rsplit_once('_')?.1;
            Some(name.to_owned())
        });
        let alone = || {
            let directory = self.pod_logs(pod_uid)?;
            let mut containers = read::names_in(&self.host.path(&format!("var/log/pods/{directory}")), 64);
            // With several of them the directory does not say which.
            if containers.len() == 1 { containers.pop() } else { None }
        };
        let annotated = || self.annotation(container_id, &["io.kubernetes.cri.container-name"]);
        linked.or_else(annotated).or_else(alone).map(|name| clean(&name))
    }

    fn container(&self, runtime: Runtime, id: &str, uid: u32) -> Option<String> {
        let name = match runtime {
            Runtime::Docker => {
                let config: DockerConfig =
                    self.json(&format!("var/lib/docker/containers/{id}/config.v2.json"))?;
                config.name.trim_start_matches('/').to_owned()
            }
            Runtime::Podman | Runtime::Crio => self.podman(id, uid)?,
            Runtime::Containerd => {
                self.annotation(id, &["nerdctl/name", "io.kubernetes.cri.container-name"])?
            }
            Runtime::Ecs | Runtime::Lxc => return None,
        };
        Some(clean(&name)).filter(|name| !name.is_empty())
    }
}

/// A name fit for a label and a terminal: no control, invisible or direction-changing characters, and short.
pub(crate) fn clean(name: &str) -> String {
    let mut cleaned = String::new();
    for character in name.chars() {
        let plain = character.is_alphanumeric() || character.is_ascii_graphic() || character == ' ';
        let piece = if plain { character.to_string() } else { character.escape_unicode().to_string() };
        if cleaned.len() + piece.len() > MAX_NAME {
            break;
        }
        cleaned.push_str(&piece);
    }
    cleaned
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn fixture(files: &[(&str, &str)]) -> (tempfile::TempDir, HostNames) {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let names = HostNames::new(Host::at(root.path()));
        (root, names)
    }

    #[test]
    fn pods_are_named_by_their_log_directories() {
        let uid = "6a1b2c3d-0000-4444-8888-123456789abc";
        let logs = format!("var/log/pods/team-a_trainer-0_{uid}/main/0.log");
        let (_root, names) = fixture(&[(&logs, "")]);
        let pod = names.pod(uid).unwrap();
        assert_eq!((pod.namespace.as_str(), pod.pod.as_str()), ("team-a", "trainer-0"));
        assert_eq!(names.pod_container(uid, "ab").as_deref(), Some("main"));
        assert_eq!(names.pod("6a1b2c3d-0000-4444-8888-000000000000"), None);
    }

    #[test]
    fn c92_static_pods_are_named_by_their_hash() {
        let hash = "0123456789abcdef0123456789abcdef";
        let (_root, names) = fixture(&[(&format!("var/log/pods/kube-system_etcd-n1_{hash}/etcd/0.log"), "")]);
        assert_eq!(names.pod(hash).map(|pod| pod.pod).as_deref(), Some("etcd-n1"));
    }

    #[test]
    fn of_several_containers_the_link_says_which() {
        let uid = "6a1b2c3d-0000-4444-8888-123456789abc";
        let (_root, names) = fixture(&[
            (&format!("var/log/pods/a_b_{uid}/one/0.log"), ""),
            (&format!("var/log/pods/a_b_{uid}/two/0.log"), ""),
            ("var/log/containers/b_a_two-cafe.log", ""),
        ]);
        assert_eq!(names.pod_container(uid, "cafe").as_deref(), Some("two"));
        assert_eq!(names.pod_container(uid, "beef"), None);
    }

    #[test]
    fn containers_are_named_by_their_runtime() {
        let (_root, names) = fixture(&[
            ("var/lib/docker/containers/aa/config.v2.json", r#"{"ID":"aa","Name":"/web"}"#),
            ("var/lib/docker/containers/bb/config.v2.json", r#"{"Name":"#),
            (
                "var/lib/containers/storage/overlay-containers/containers.json",
                r#"[{"id":"cc","names":["db"]},{"id":"dd"}]"#,
            ),
            ("etc/passwd", "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n"),
            (
                "home/ann/.local/share/containers/storage/overlay-containers/containers.json",
                r#"[{"id":"ee","names":["mine"]}]"#,
            ),
            (
                "run/containerd/io.containerd.runtime.v2.task/default/ff/config.json",
                r#"{"annotations":{"nerdctl/name":"job"}}"#,
            ),
        ]);
        let name = |runtime, id, uid| names.container(runtime, id, uid);
        assert_eq!(name(Runtime::Docker, "aa", 0).as_deref(), Some("web"));
        assert_eq!(name(Runtime::Docker, "bb", 0), None);
        assert_eq!(name(Runtime::Podman, "cc", 0).as_deref(), Some("db"));
        assert_eq!(name(Runtime::Podman, "dd", 0), None);
        assert_eq!(name(Runtime::Podman, "ee", 1000).as_deref(), Some("mine"));
        assert_eq!(name(Runtime::Containerd, "ff", 0).as_deref(), Some("job"));
        assert_eq!(names.user(1000).as_deref(), Some("ann"));
        assert_eq!(names.user(1001), None);
    }

    #[test]
    fn hostile_names_are_cleaned_and_cut() {
        assert_eq!(clean("a\nb\u{1b}[31m\u{202e}"), "a\\u{a}b\\u{1b}[31m\\u{202e}");
        assert_eq!(clean("größe"), "größe");
        assert!(clean(&"é".repeat(500)).len() <= MAX_NAME);
        assert!(clean(&"\n".repeat(500)).len() <= MAX_NAME);
    }
}
