//! Owns what is known of this node's pods from the API server: the last good answer, and what of it becomes whose tenant.
//! Refuses to forget on an error, to keep what was not asked for, and a pod's claim to be another one.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::decode::{Event, Metadata};
use crate::{
    kubelet::Source,
    names::{MAX_ENTRIES, PodName, clean},
};

const FROM_API: &str = "the API server";
/// A pod that is gone is still named this long: its processes may outlive it.
const AFTERLIFE: Duration = Duration::from_mins(10);
/// Of a pod whose kubelet read it from a file: the hash that its cgroups are named by.
const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// Only kubelet's own image of such a pod in the API has it.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// What of a pod is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    pub labels: Vec<String>,
    pub annotations: Vec<String>,
    /// The label, or else the annotation, whose value is the tenant; none when empty.
    pub tenant_label: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoteKind {
    Label,
    Annotation,
}

impl NoteKind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Label => "label",
            Self::Annotation => "annotation",
        }
    }
}

/// One label or annotation of the allow-list. Clean and short.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodNote {
    pub kind: NoteKind,
    pub key: String,
    pub value: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Pod {
    namespace: String,
    name: String,
    /// As it was when the pod was first heard of: a label that is edited later moves no account.
    team: Option<String>,
    notes: Vec<PodNote>,
    /// Of a static pod.
    hash: Option<String>,
    gone: Option<Instant>,
}

/// What the API says about whose a pod is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Team {
    /// No label makes a tenant here.
    NotAsked,
    Known(String),
    /// The pod has no such label.
    None,
    /// The API has not told of this pod.
    NotYet,
}

#[derive(Clone, Debug, Default)]
pub struct Roster {
    pub source: Source,
    /// What helps against `source.error`.
    pub remedy: String,
    /// The watch is open: what is known is what is.
    pub watching: bool,
    /// Tries to list or to watch, good and bad.
    pub tries: u64,
    /// Grows with every change of what is known.
    pub version: u64,
    /// Pods that were not kept because there are too many.
    pub left_out: u64,
    pods: BTreeMap<String, Arc<Pod>>,
    wishes: Arc<Wishes>,
}

impl Roster {
    pub(super) fn new(wishes: Wishes) -> Self {
        Self { wishes: Arc::new(wishes), ..Self::default() }
    }

    /// Pods that are there now.
    pub fn count(&self) -> usize {
        self.pods.values().filter(|pod| pod.gone.is_none()).count()
    }

    /// How old what is known is; `None` before the first answer.
    pub fn age(&self) -> Option<Duration> {
        if self.watching && self.source.answered.is_some() { Some(Duration::ZERO) } else { self.source.age() }
    }

    /// The whole list. Whoever is not on it any more is gone.
    pub(super) fn hear_list(&mut self, listed: Vec<Metadata>) {
        let now = Instant::now();
        let mut past = std::mem::take(&mut self.pods);
        self.left_out = 0;
        for metadata in listed {
            let known = past.remove(&metadata.uid);
            self.put(metadata, known);
        }
        for (uid, pod) in past {
            let gone = pod.gone.unwrap_or(now);
            if now.duration_since(gone) < AFTERLIFE && self.pods.len() < MAX_ENTRIES {
                self.pods.insert(uid, Arc::new(Pod { gone: Some(gone), ..Pod::clone(&pod) }));
            }
        }
        self.version += 1;
    }

    pub(super) fn hear_event(&mut self, event: Event) {
        let now = Instant::now();
        match event {
            Event::Is(metadata) => {
                let known = self.pods.remove(&metadata.uid);
                self.put(metadata, known);
            }
            Event::Gone(metadata) => {
                if let Some(pod) = self.pods.get_mut(&metadata.uid) {
                    Arc::make_mut(pod).gone.get_or_insert(now);
                }
                self.pods.retain(|_, pod| pod.gone.is_none_or(|gone| now.duration_since(gone) < AFTERLIFE));
            }
            Event::Bookmark(_) | Event::Error(..) | Event::Other => return,
        }
        self.version += 1;
    }

    fn put(&mut self, metadata: Metadata, known: Option<Arc<Pod>>) {
        let Metadata { uid, namespace, name, labels, annotations, .. } = metadata;
        if !is_uid(&uid) || namespace.is_empty() || name.is_empty() {
            return;
        }
        if self.pods.len() >= MAX_ENTRIES {
            self.left_out += 1;
            return;
        }
        let (labels, mut annotations) = (labels.unwrap_or_default(), annotations.unwrap_or_default());
        let label = |key: &String| Some(clean(labels.get(key)?)).filter(|value| !value.is_empty());
        let kept = |kind, keys: &[String], of: &BTreeMap<String, String>| -> Vec<PodNote> {
            let note = |key: &String| Some(PodNote { kind, key: clean(key), value: clean(of.get(key)?) });
            keys.iter().filter_map(note).filter(|note| !note.value.is_empty()).collect()
        };
        let mut notes = kept(NoteKind::Label, &self.wishes.labels, &labels);
        notes.extend(kept(NoteKind::Annotation, &self.wishes.annotations, &annotations));
        let team = if let Some(known) = known {
            known.team.clone()
        } else {
            let key = &self.wishes.tenant_label;
            let annotation = || Some(clean(annotations.get(key)?)).filter(|value| !value.is_empty());
            label(key).or_else(annotation)
        };
        let mirrored = annotations.contains_key(MIRROR);
        let hash = annotations.remove(CONFIG_HASH).filter(|hash| mirrored && is_hash(hash));
        let pod = Pod { namespace: clean(&namespace), name: clean(&name), team, notes, hash, gone: None };
        self.pods.insert(uid, Arc::new(pod));
    }

    /// The pod with this UID. Of a static pod, whose cgroups have its file's hash in place of one, the only pod that
    /// claims to be its image: with two claims, one lies.
    fn find(&self, uid: &str) -> Option<&Pod> {
        if let Some(pod) = self.pods.get(uid) {
            return Some(pod);
        }
        if !is_hash(uid) {
            return None;
        }
        let mut claims =
            self.pods.values().filter(|pod| pod.gone.is_none() && pod.hash.as_deref() == Some(uid));
        claims.next().filter(|_| claims.next().is_none()).map(Arc::as_ref)
    }

    pub(crate) fn pod(&self, uid: &str) -> Option<PodName> {
        let Pod { namespace, name, .. } = self.find(uid)?;
        Some(PodName { namespace: namespace.clone(), pod: name.clone(), from: FROM_API })
    }

    /// `name`: what the host's own files call the pod with this UID, if they do. A claim that they contradict is none.
    pub(crate) fn team(&self, uid: &str, name: Option<&PodName>) -> Team {
        match self.find(uid) {
            // A pod that nothing else names is waited for all the same.
            None if name.is_none() => Team::NotYet,
            _ if self.wishes.tenant_label.is_empty() => Team::NotAsked,
            Some(pod) if name.is_none_or(|name| name.namespace == pod.namespace && name.pod == pod.name) => {
                pod.team.clone().map_or(Team::None, Team::Known)
            }
            Some(_) => Team::None,
            None => Team::NotYet,
        }
    }

    /// Of the pod that has this name now, or had it last.
    fn named(&self, namespace: &str, name: &str) -> Option<&Pod> {
        let same = self.pods.values().filter(|pod| pod.namespace == namespace && pod.name == name);
        same.max_by_key(|pod| (pod.gone.is_none(), pod.gone)).map(Arc::as_ref)
    }

    /// The labels and annotations of the allow-list.
    pub fn notes(&self, namespace: &str, name: &str) -> &[PodNote] {
        self.named(namespace, name).map(|pod| pod.notes.as_slice()).unwrap_or_default()
    }

    /// Whether it was told what this pod is labelled, or nobody wants to know.
    pub fn has_judged(&self, namespace: &str, name: &str) -> bool {
        self.wishes.tenant_label.is_empty() || self.named(namespace, name).is_some()
    }

    /// Of a pod that has no process yet, by its name.
    pub fn team_of(&self, namespace: &str, name: &str) -> Option<&str> {
        self.named(namespace, name)?.team.as_deref()
    }
}

/// As the API server makes them. It becomes a key, and is compared with parts of paths.
fn is_uid(uid: &str) -> bool {
    (32..=36).contains(&uid.len()) && uid.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
}

fn is_hash(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "0123456789abcdef0123456789abcdef";

    fn uid(number: u32) -> String {
        format!("6a1b2c3d-0000-4444-8888-{number:012x}")
    }

    fn pod(number: u32, name: &str, labels: &[(&str, &str)], annotations: &[(&str, &str)]) -> Metadata {
        let map = |pairs: &[(&str, &str)]| {
            Some(pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
        };
        Metadata {
            uid: uid(number),
            namespace: "n".into(),
            name: name.into(),
            resource_version: "1".into(),
            labels: map(labels),
            annotations: map(annotations),
        }
    }

    fn roster() -> Roster {
        Roster::new(Wishes {
            labels: vec!["team".into(), "app".into()],
            annotations: vec!["cost".into()],
            tenant_label: "team".into(),
        })
    }

    fn name(roster: &Roster, uid: &str) -> Option<String> {
        roster.pod(uid).map(|name| format!("{}/{}", name.namespace, name.pod))
    }

    #[test]
    fn only_what_was_asked_for_is_kept() {
        let mut roster = roster();
        let labels = [("team", "a"), ("secret", "s")];
        roster.hear_list(vec![pod(1, "p", &labels, &[("cost", "7"), ("kubectl", "{}")])]);
        let notes: Vec<_> = roster
            .notes("n", "p")
            .iter()
            .map(|note| (note.kind.as_str(), note.key.as_str(), note.value.as_str()))
            .collect();
        assert_eq!(notes, [("label", "team", "a"), ("annotation", "cost", "7")]);
        assert_eq!(roster.team(&uid(1), None), Team::Known("a".into()));
        assert_eq!(roster.team_of("n", "p"), Some("a"));
        assert!(!format!("{roster:?}").contains("secret"));
    }

    #[test]
    fn an_annotation_makes_a_team_where_no_label_does() {
        let mut roster = roster();
        let annotated = [("team", "b")];
        let both = pod(2, "q", &[("team", "a")], &annotated);
        roster.hear_list(vec![pod(1, "p", &[("team", "")], &annotated), both]);
        assert_eq!(roster.team(&uid(1), None), Team::Known("b".into()));
        assert_eq!(roster.team(&uid(2), None), Team::Known("a".into()));
        assert!(roster.has_judged("n", "p") && !roster.has_judged("n", "other"));
    }

    #[test]
    fn c82_a_pod_is_named_and_stays_so_when_it_is_gone() {
        let mut roster = roster();
        roster.hear_list(vec![pod(1, "p", &[], &[]), pod(2, "q", &[], &[])]);
        assert_eq!((name(&roster, &uid(1)).as_deref(), roster.count()), (Some("n/p"), 2));
        assert_eq!(roster.team(&uid(1), None), Team::None);
        assert_eq!(roster.team(&uid(3), None), Team::NotYet);
        roster.hear_event(Event::Gone(pod(1, "p", &[], &[])));
        roster.hear_list(vec![]);
        assert_eq!(
            (name(&roster, &uid(1)).as_deref(), name(&roster, &uid(2)).as_deref()),
            (Some("n/p"), Some("n/q"))
        );
        assert_eq!(roster.count(), 0);
    }

    #[test]
    fn of_two_pods_with_one_name_the_living_counts() {
        let mut roster = roster();
        roster.hear_list(vec![pod(9, "p", &[("team", "old")], &[])]);
        roster.hear_event(Event::Gone(pod(9, "p", &[], &[])));
        roster.hear_event(Event::Is(pod(1, "p", &[("team", "new")], &[])));
        assert_eq!(roster.team_of("n", "p"), Some("new"));
        assert_eq!(roster.team(&uid(9), None), Team::Known("old".into()));
    }

    #[test]
    fn an_edited_label_moves_no_account_and_is_told_all_the_same() {
        let mut roster = roster();
        roster.hear_list(vec![pod(1, "p", &[("team", "a")], &[]), pod(2, "q", &[], &[])]);
        let before = roster.version;
        roster.hear_event(Event::Is(pod(1, "p", &[("team", "b")], &[])));
        roster.hear_event(Event::Is(pod(2, "q", &[("team", "b")], &[])));
        assert!(roster.version > before);
        assert_eq!(roster.team(&uid(1), None), Team::Known("a".into()));
        assert_eq!(roster.team(&uid(2), None), Team::None);
        assert_eq!(roster.notes("n", "p")[0].value, "b");
    }

    #[test]
    fn c92_a_static_pod_is_found_by_the_hash_of_its_image() {
        let mut roster = roster();
        let mirror = [(CONFIG_HASH, HASH), (MIRROR, HASH)];
        roster.hear_list(vec![pod(1, "etcd-gpu-1", &[("team", "infra")], &mirror)]);
        assert_eq!(name(&roster, HASH).as_deref(), Some("n/etcd-gpu-1"));
        assert_eq!(roster.team(HASH, None), Team::Known("infra".into()));
        // Somebody claims to be it: by the hash alone, and then as a second image.
        roster.hear_event(Event::Is(pod(2, "evil", &[("team", "evil")], &[(CONFIG_HASH, HASH)])));
        assert_eq!(roster.team(HASH, None), Team::Known("infra".into()));
        roster.hear_event(Event::Is(pod(3, "evil2", &[("team", "evil")], &mirror)));
        assert_eq!((name(&roster, HASH), roster.team(HASH, None)), (None, Team::NotYet));
        // The only claim, and the host's own files name another pod.
        let mut other = self::roster();
        other.hear_list(vec![pod(3, "evil2", &[("team", "evil")], &mirror)]);
        let logged = PodName { namespace: "n".into(), pod: "etcd-gpu-1".into(), from: "/var/log/pods" };
        assert_eq!(other.team(HASH, Some(&logged)), Team::None);
    }

    #[test]
    fn hostile_names_are_bounded_and_printable() {
        let mut roster = roster();
        let long = "x".repeat(300_000);
        let labels = [("team", "a\n\u{202e}b"), ("app", "")];
        let mut wrong = pod(2, "q", &[], &[]);
        wrong.uid = "../../etc/passwd".into();
        roster.hear_list(vec![pod(1, "p\u{1b}[2J", &labels, &[("cost", &long)]), wrong]);
        assert_eq!(roster.count(), 1);
        assert_eq!(roster.team(&uid(1), None), Team::Known("a\\u{a}\\u{202e}b".into()));
        let notes = roster.notes("n", "p\\u{1b}[2J");
        assert_eq!(notes.len(), 2, "an empty label is none");
        assert!(notes.iter().all(|note| note.value.len() <= 128));
    }

    #[test]
    fn c111_a_list_without_an_end_fills_no_memory() {
        let mut roster = roster();
        let count = u32::try_from(MAX_ENTRIES).unwrap() + 5;
        roster.hear_list((0..count).map(|number| pod(number, "p", &[], &[])).collect());
        assert_eq!((roster.count(), roster.left_out), (MAX_ENTRIES, 5));
    }
}
