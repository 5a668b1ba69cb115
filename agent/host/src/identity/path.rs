//! Owns what a cgroup path says by itself: pod, container, job, unit, session.
//! Refuses names and users, which need the host's files, and whatever stands below a tenant's own cgroup.
//!
//! The walk goes from the root down and ends at the first tenant. Above it only root makes cgroups; below
//! it the tenant may (a delegated unit, a user's manager, a container in a container), under any name.

use super::{Runtime, shape};

/// Who may have made the cgroup of a container, and so whose store may name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    Root,
    /// Below `user-N.slice`.
    User(u32),
    /// Below this unit, which may have its cgroups delegated.
    Unit(String),
}

/// What one path names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Pod {
        uid: String,
        container: Option<(Option<Runtime>, String)>,
    },
    Job {
        job: String,
        step: Option<String>,
        uid: Option<u32>,
    },
    Helper {
        what: &'static str,
        container: Option<String>,
        pod: Option<String>,
    },
    Container {
        runtime: Runtime,
        id: String,
        task: Option<String>,
        owner: Owner,
    },
    /// A task of ECS, outside its containers.
    Task(String),
    /// A container beside the reader's own, seen from inside: `/../<container>`.
    Sibling {
        runtime: Option<Runtime>,
        id: String,
    },
    /// An id below a cgroup that no runtime uses by default.
    Strange {
        parent: String,
        id: String,
    },
    Unit {
        unit: String,
    },
    Session {
        uid: u32,
        unit: Option<String>,
        /// The user's own conmon.
        helper: bool,
    },
    /// A path that somebody made by hand, or one that ends above every tenant.
    Plain(&'static str),
    Root,
    /// Outside the reader's cgroup namespace, and nothing in the path says what.
    Outside,
}

impl Place {
    /// How much a path says; the line of `/proc/PID/cgroup` that says most is believed.
    pub(crate) const fn weight(&self) -> u32 {
        match self {
            Self::Pod { container: Some(_), .. } => 9,
            Self::Pod { .. } => 8,
            Self::Job { .. } => 7,
            Self::Helper { .. } => 6,
            Self::Container { .. } | Self::Task(_) | Self::Sibling { .. } => 5,
            Self::Strange { .. } => 4,
            Self::Unit { .. } => 3,
            Self::Session { .. } => 2,
            Self::Plain(_) => 1,
            Self::Root | Self::Outside => 0,
        }
    }
}

/// A place, the path that said so, and the tenant that seems to be nested in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found<'a> {
    pub(crate) place: Place,
    pub(crate) path: &'a str,
    /// Of the unified hierarchy, whose ids the kernel's programs see.
    pub(crate) unified: bool,
    /// What the hierarchy is called: its controllers, or nothing.
    pub(crate) hierarchy: &'a str,
    /// Segments above the tenant's own.
    pub(crate) depth: usize,
    pub(crate) nested: Option<Place>,
}

/// The most telling of the lines of `/proc/PID/cgroup`.
pub(crate) fn place(text: &str) -> Option<Found<'_>> {
    // `hierarchy:controllers:path`; the path may hold colons.
    let lines = text.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, hierarchy, path) = (fields.next()?, fields.next()?, fields.next()?);
        path.starts_with('/').then(|| find(path, hierarchy, number == "0"))
    });
    lines.reduce(|best, next| match next.place.weight().cmp(&best.place.weight()) {
        std::cmp::Ordering::Greater => next,
        // Of two that say nothing, the one that is outside is the warning.
        std::cmp::Ordering::Equal if next.place == Place::Outside => next,
        std::cmp::Ordering::Equal if next.unified && next.place == best.place => next,
        _ => best,
    })
}

fn find<'a>(path: &'a str, hierarchy: &'a str, unified: bool) -> Found<'a> {
    let bare = path.strip_suffix(" (deleted)").unwrap_or(path);
    let segments: Vec<&str> =
        bare.split('/').filter(|segment| !matches!(*segment, "" | "." | "..")).collect();
    // A namespace's root is left at the beginning of a path and nowhere else: the kernel writes no other `..`.
    let above = bare.split('/').skip(1).take_while(|segment| *segment == "..").count();
    let (place, depth) = if bare.split('/').filter(|segment| *segment == "..").count() > above {
        (Place::Plain("cgroup_not_recognised"), segments.len())
    } else {
        first(&segments, above)
    };
    let below = segments.get(depth + 1..).unwrap_or_default();
    // A user's own container is the user's, not a tenant nested in another.
    let apart = matches!(
        &place,
        Place::Pod { .. } | Place::Container { owner: Owner::Root, .. } | Place::Unit { .. }
    );
    let nested = Some(first(below, 0).0).filter(|nested| {
        apart && matches!(nested, Place::Pod { .. } | Place::Job { .. } | Place::Container { .. })
    });
    Found { place, path, unified, hierarchy, depth, nested }
}

/// The outermost tenant, and how many segments are above its own.
/// `above`: how far the path leaves the reader's own cgroup before it goes down.
fn first(segments: &[&str], above: usize) -> (Place, usize) {
    for (at, segment) in segments.iter().enumerate() {
        let (parents, below) = (&segments[..at], &segments[at + 1..]);
        if let Some(place) = tenant(segment, parents, below, above) {
            return (place, at);
        }
    }
    let place = match segments {
        _ if above > 0 => Place::Outside,
        [] => Place::Root,
        [first, ..] if first.contains("kubepods") => Place::Plain("kubepods_without_pod"),
        segments if segments.iter().all(|segment| shape::is_slice(segment)) => {
            Place::Plain("slice_without_unit")
        }
        _ => Place::Plain("cgroup_not_recognised"),
    };
    (place, segments.len())
}

/// The tenant that begins at `segment`, if one does. No tenant begins above it.
fn tenant(segment: &str, parents: &[&str], below: &[&str], above: usize) -> Option<Place> {
    if let Some(uid) = shape::user_slice(segment) {
        return parents.iter().all(|parent| shape::is_slice(parent)).then(|| session(uid, below));
    }
    pod(segment, parents, below, above > 0)
        .or_else(|| job(segment, parents, below))
        .or_else(|| helper(segment, parents))
        .or_else(|| container(segment, parents, below, above))
        .or_else(|| unit(segment, parents, below))
}

fn pod(segment: &str, parents: &[&str], below: &[&str], outside: bool) -> Option<Place> {
    let (name, colon) = match shape::colon_form(segment) {
        Some((slice, prefix, id)) => (slice, Some((shape::runtime(prefix), id.to_owned()))),
        None => (segment, None),
    };
    let uid = match name.strip_suffix(shape::SLICE) {
        Some(slice) if slice.contains("kubepods") => shape::pod_uid(slice.rsplit_once("-pod")?.1)?,
        None if parents.iter().any(|parent| parent.contains("kubepods"))
            || (outside && parents.is_empty()) =>
        {
            shape::pod_uid(segment.strip_prefix("pod")?)?
        }
        _ => return None,
    };
    // The container that the kubelet knows is the one right below the pod; what it makes itself is lower.
    let next = below.first().copied().unwrap_or_default();
    if let Some((what, container)) = shape::helper(next) {
        return Some(Place::Helper { what, container: container.map(str::to_owned), pod: Some(uid) });
    }
    Some(Place::Pod { uid, container: colon.or_else(|| shape::pod_container(next)) })
}

/// `slurm…/uid_0/job_1/step_0` (v1) and `…slurmstepd.scope/job_1/step_0` (v2).
fn job(segment: &str, parents: &[&str], below: &[&str]) -> Option<Place> {
    let v1 = parents.is_empty() && shape::is_slurm_root(segment);
    let v2 = shape::is_stepd_scope(segment) && parents.iter().all(|parent| shape::is_slice(parent));
    let mut below = below.iter().copied().peekable();
    let uid = match below.peek()?.strip_prefix("uid_") {
        Some(uid) if v1 => {
            below.next();
            Some(shape::number(uid)?.parse().ok()?)
        }
        None if v2 => None,
        _ => return None,
    };
    let job = shape::number(below.next()?.strip_prefix("job_")?)?.to_owned();
    let step = below.next().and_then(shape::step).map(str::to_owned);
    Some(Place::Job { job, step, uid })
}

fn helper(segment: &str, parents: &[&str]) -> Option<Place> {
    let parent = parents.last().copied().unwrap_or_default();
    let (what, container) = match segment {
        "conmon" if parents.first() == Some(&"libpod_parent") => ("conmon", None),
        _ if parent == "buildkit" && shape::is_build_id(segment) => ("buildkit", Some(segment)),
        _ => match (shape::helper(segment), shape::colon_form(segment)) {
            (Some(helper), _) => helper,
            (None, Some((_, "docker", id))) if shape::is_build_id(id) => ("buildkit", Some(id)),
            _ => return None,
        },
    };
    Some(Place::Helper { what, container: container.map(str::to_owned), pod: None })
}

fn container(segment: &str, parents: &[&str], below: &[&str], above: usize) -> Option<Place> {
    let parent = parents.last().copied().unwrap_or_default();
    let ecs = parents.iter().any(|parent| *parent == "ecs" || *parent == "ecstasks.slice");
    let of = |runtime, id: &str, task: Option<&str>| Place::Container {
        runtime,
        id: id.to_owned(),
        task: task.map(|task| task.replace('_', "-")),
        owner: Owner::Root,
    };
    if let Some(name) = lxc(segment, parent, parents) {
        return Some(of(Runtime::Lxc, name, None));
    }
    let whole = segment;
    // Kata's shim writes this before the name that the container's runtime chose.
    let segment = segment.strip_prefix("kata_").unwrap_or(segment);
    let named = shape::colon_form(segment)
        .map(|(_, prefix, id)| (prefix, id))
        .or_else(|| shape::prefixed(segment))
        .filter(|(_, id)| shape::is_id(id))
        .and_then(|(prefix, id)| Some((shape::runtime(prefix)?, id)));
    if ecs {
        let task = shape::task(parent);
        return match named {
            Some((_, id)) => Some(of(Runtime::Ecs, id, task)),
            None if shape::is_id(segment) => Some(of(Runtime::Ecs, segment, task)),
            None => shape::fargate(segment).map(|task| of(Runtime::Ecs, segment, Some(task))).or_else(|| {
                let task = shape::task(segment).filter(|_| below.is_empty())?.replace('_', "-");
                shape::is_task_id(&task).then_some(Place::Task(task))
            }),
        };
    }
    if above == 1
        && parents.is_empty()
        && let Some((runtime, id)) = shape::pod_container(segment)
    {
        return Some(Place::Sibling { runtime, id });
    }
    if let Some((runtime, id)) = named {
        return Some(of(runtime, id, None));
    }
    if parents == ["default"] {
        // `ctr run` takes any name.
        return Some(of(Runtime::Containerd, if shape::is_id(segment) { segment } else { whole }, None));
    }
    if !shape::is_id(segment) {
        return None;
    }
    match parent {
        "k8s.io" => Some(of(Runtime::Containerd, segment, None)),
        "docker" | "moby" => Some(of(Runtime::Docker, segment, None)),
        // A pod's own directory, with its containers in it.
        "libpod_parent" if !below.is_empty() => None,
        "libpod_parent" => Some(of(Runtime::Podman, segment, None)),
        _ if above > 0 => None,
        _ => Some(Place::Strange { parent: format!("/{}", parents.join("/")), id: segment.to_owned() }),
    }
}

/// `lxc/<name>`, `lxc.payload/<name>`, `lxc.payload.<name>`.
fn lxc<'a>(segment: &'a str, parent: &str, parents: &[&str]) -> Option<&'a str> {
    let payload = segment.strip_prefix("lxc.payload.").filter(|name| !name.is_empty());
    let in_directory = parents.len() == 1 && matches!(parent, "lxc" | "lxc.payload");
    payload.or(in_directory.then_some(segment))
}

/// A unit of the system's service manager. What is below it is the unit's own, with two exceptions.
fn unit(segment: &str, parents: &[&str], below: &[&str]) -> Option<Place> {
    let unit = shape::unit(segment)?;
    if unit == "init.scope" && parents.is_empty() {
        return Some(Place::Root);
    }
    // Under the wrong cgroup driver, pods end up below the unit of the runtime that root runs.
    if is_runtime(unit) && below.iter().any(|next| next.contains("kubepods")) {
        for (at, next) in below.iter().enumerate() {
            if let Some(pod) = pod(next, &below[..at], &below[at + 1..], false) {
                return Some(pod);
            }
        }
    }
    // A Quadlet's container shares its unit's cgroup.
    if let Some(id) = below.first().and_then(|next| payload(next)) {
        let owner = Owner::Unit(unit.to_owned());
        return Some(Place::Container { runtime: Runtime::Podman, id: id.to_owned(), task: None, owner });
    }
    Some(Place::Unit { unit: unit.to_owned() })
}

/// Units below which the wrong cgroup driver leaves pods.
pub(super) fn is_runtime(unit: &str) -> bool {
    const UNITS: [&str; 13] = [
        "containerd.service",
        "cri-docker.service",
        "crio.service",
        "docker.service",
        "k0scontroller.service",
        "k0sworker.service",
        "k3s.service",
        "kubelet.service",
        "rke2-agent.service",
        "rke2-server.service",
        "snap.docker.dockerd.service",
        "snap.microk8s.daemon-containerd.service",
        "snap.microk8s.daemon-kubelite.service",
    ];
    // k3s has a name of its own for each installation: `k3s-agent`, `k3s-<name>`.
    UNITS.contains(&unit) || (unit.starts_with("k3s-") && unit.ends_with(".service"))
}

fn payload(segment: &str) -> Option<&str> {
    segment.strip_prefix("libpod-payload-").filter(|id| shape::is_id(id))
}

/// Below a user's slice the user makes the cgroups: only what such a user can run is believed, as the user's.
fn session(uid: u32, below: &[&str]) -> Place {
    for segment in below {
        if let Some(("conmon", Some(_))) = shape::helper(segment) {
            return Place::Session { uid, unit: Some((*segment).to_owned()), helper: true };
        }
        let rootless =
            shape::prefixed(segment).filter(|(_, id)| shape::is_id(id)).and_then(|(prefix, id)| {
                match shape::runtime(prefix)? {
                    Runtime::Crio => None,
                    _ if prefix.starts_with("cri-") => None,
                    runtime => Some((runtime, id)),
                }
            });
        if let Some((runtime, id)) = rootless {
            return Place::Container { runtime, id: id.to_owned(), task: None, owner: Owner::User(uid) };
        }
    }
    // The unit right below the user's manager; the manager's own is the last resort.
    let units: Vec<&str> = below.iter().filter_map(|segment| shape::unit(segment)).collect();
    let unit = units.iter().find(|unit| !unit.starts_with("user@")).or(units.first());
    Place::Session { uid, unit: unit.map(|unit| (*unit).to_owned()), helper: false }
}
