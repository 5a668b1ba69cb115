//! Owns how ids become names, from the files that kubelet and runtimes leave on the host.
//! Refuses to trust them: reads are bounded, and what a tenant chose is cleaned before it becomes a label.

mod containers;
mod dockerd;
mod pods;
mod units;

use std::fmt::Write;
use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::identity::{Owner, Runtime};
use crate::{Host, Kubelet, Listing, PodWatch, Roster, Team, read};

/// Bytes of one name in a label.
const MAX_NAME: usize = 128;
const MAX_PASSWD: u64 = 4 << 20;
/// Containers and pods of one host; what is past it stays without a name.
pub(crate) const MAX_ENTRIES: usize = 8192;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodName {
    pub namespace: String,
    pub pod: String,
    /// Which of the host's files said so.
    pub from: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub name: String,
    pub from: &'static str,
}

/// Names for what a cgroup path holds. Every answer is [`clean`].
pub trait Names {
    fn user(&self, uid: u32) -> Option<String>;
    /// `container`: one of the pod's, where the path says one.
    fn pod(&self, uid: &str, container: Option<&str>) -> Option<PodName>;
    /// The container's name within its pod.
    fn pod_container(&self, pod_uid: &str, container_id: &str) -> Option<String>;
    /// The UID of the pod that a container of Kubernetes' own runtimes was made for.
    fn pod_of(&self, container_id: &str) -> Option<String>;
    /// The name of a container outside Kubernetes, from its owner's store and no other.
    fn container(&self, runtime: Runtime, id: &str, owner: &Owner) -> Option<Named>;
    /// Whose the pod is by its label; `name`: what [`Self::pod`] said.
    fn team(&self, _uid: &str, _name: Option<&PodName>) -> Team {
        Team::NotAsked
    }
    /// Which runtime put a container below a cgroup that is not its default.
    fn adopted(&self, id: &str, parent: &str) -> Option<(Runtime, Named)>;
}

/// [`Names`] from the host's files, read anew each time, and from what the threads of kubelet and the API server last
/// heard.
#[derive(Clone, Debug)]
pub struct HostNames {
    host: Host,
    listing: Option<Arc<ArcSwap<Listing>>>,
    roster: Option<Arc<ArcSwap<Roster>>>,
    /// A pod that no label gives to a team is its namespace's.
    by_namespace: bool,
}

impl HostNames {
    pub fn new(host: Host) -> Self {
        Self { host, listing: None, roster: None, by_namespace: false }
    }

    /// Also from what kubelet and the runtime answer.
    #[must_use]
    pub fn with(self, kubelet: &Kubelet) -> Self {
        Self { listing: Some(kubelet.heard.share()), ..self }
    }

    /// Also from what the API server says of this node's pods.
    #[must_use]
    pub fn with_pods(self, watch: &PodWatch) -> Self {
        Self { roster: Some(watch.heard.share()), ..self }
    }

    /// Whether a pod that no label gives to a team is its namespace's.
    #[must_use]
    pub fn with_namespaces(self, by_namespace: bool) -> Self {
        Self { by_namespace, ..self }
    }

    /// Grows with what the API server tells: an identity that was unsettled may be settled since.
    pub fn heard(&self) -> u64 {
        self.roster.as_ref().map_or(0, |roster| roster.load().version)
    }

    fn listed<T>(&self, pick: impl Fn(&Listing) -> Option<T>) -> Option<T> {
        pick(&self.listing.as_ref()?.load())
    }

    fn passwd<T>(&self, uid: u32, pick: impl Fn(&[&str]) -> Option<T>) -> Option<T> {
        let passwd = read::text(&self.host.path("etc/passwd"), MAX_PASSWD).ok()?;
        let fields = |line: &str| -> Option<T> {
            let fields: Vec<&str> = line.split(':').collect();
            if fields.get(2)?.parse() == Ok(uid) { pick(&fields) } else { None }
        };
        passwd.lines().find_map(fields)
    }

    fn home(&self, uid: u32) -> Option<String> {
        self.passwd(uid, |fields| fields.get(5).map(|home| (*home).to_owned()))
    }
}

impl Names for HostNames {
    fn user(&self, uid: u32) -> Option<String> {
        let name = self.passwd(uid, |fields| fields.first().map(|name| (*name).to_owned()))?;
        known(&name)
    }

    fn pod(&self, uid: &str, container: Option<&str>) -> Option<PodName> {
        self.logged_pod(uid)
            .or_else(|| self.listed(|listing| listing.pod(uid)))
            .or_else(|| self.noted_pod(uid, container?))
            .or_else(|| self.roster.as_ref()?.load().pod(uid))
    }

    fn team(&self, uid: &str, name: Option<&PodName>) -> Team {
        let told = self.roster.as_ref().map_or(Team::NotAsked, |roster| roster.load().team(uid, name));
        match (told, name) {
            (Team::NotAsked | Team::None, Some(name)) if self.by_namespace => {
                Team::Known(name.namespace.clone())
            }
            (told, _) => told,
        }
    }

    fn pod_container(&self, pod_uid: &str, container_id: &str) -> Option<String> {
        self.listed(|listing| listing.container(pod_uid, container_id))
            .or_else(|| self.name_in_pod(pod_uid, container_id))
    }

    fn pod_of(&self, container_id: &str) -> Option<String> {
        self.listed(|listing| listing.pod_of(container_id)).or_else(|| self.noted_uid(container_id))
    }

    fn container(&self, runtime: Runtime, id: &str, owner: &Owner) -> Option<Named> {
        self.stored(runtime, id, owner)
    }

    fn adopted(&self, id: &str, parent: &str) -> Option<(Runtime, Named)> {
        let docker = self.docker_below(id, parent).map(|named| (Runtime::Docker, named));
        docker.or_else(|| Some((Runtime::Containerd, self.containerd_below(id, parent)?)))
    }
}

/// A clean name, if anything is left of it.
fn known(name: &str) -> Option<String> {
    Some(clean(name)).filter(|name| !name.is_empty())
}

/// A name fit for a label and a terminal: no control, invisible or direction-changing characters, and short.
/// What is cut ends in a digest, so that two long names stay two.
pub(crate) fn clean(name: &str) -> String {
    let mut cleaned = escape(name);
    if cleaned.len() > MAX_NAME {
        let digest = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        cleaned.truncate(cleaned.floor_char_boundary(MAX_NAME - 17));
        let _ = write!(cleaned, "~{digest:016x}");
    }
    cleaned
}

/// Any text as printable text, however long.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_alphanumeric() || character.is_ascii_graphic() || character == ' ' {
            escaped.push(character);
        } else {
            escaped.extend(character.escape_unicode());
        }
    }
    escaped
}

#[cfg(test)]
mod tests;
