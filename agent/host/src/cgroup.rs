//! Owns what a cgroup path says by itself: pod, container, job, unit, session.
//! Refuses names and users: those need the host's files, and a path does not.

/// What runs a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Runtime {
    Docker,
    Containerd,
    Crio,
    Podman,
    Ecs,
    Lxc,
}

impl Runtime {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Containerd => "containerd",
            Self::Crio => "cri-o",
            Self::Podman => "podman",
            Self::Ecs => "ecs",
            Self::Lxc => "lxc",
        }
    }
}

/// What one path names. Later variants say less.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Pod {
        uid: String,
        container: Option<(Option<Runtime>, String)>,
    },
    Job {
        job: String,
    },
    Helper {
        what: &'static str,
    },
    Container {
        runtime: Runtime,
        id: String,
        task: Option<String>,
    },
    /// A container of a runtime that this agent does not know.
    Strange,
    Unit {
        unit: String,
    },
    Session {
        uid: u32,
        unit: Option<String>,
    },
    /// A path that somebody made by hand.
    Plain,
    Root,
    /// Outside the reader's cgroup namespace, and nothing in the path says what.
    Outside,
}

impl Place {
    /// Whether a user without root can run such a container.
    fn is_rootless(&self) -> bool {
        use Runtime::{Containerd, Docker, Podman};
        matches!(self, Self::Container { runtime: Podman | Docker | Containerd, task: None, .. })
    }

    /// How much a path says; the line of `/proc/PID/cgroup` that says most is believed.
    pub(crate) const fn weight(&self) -> u32 {
        match self {
            Self::Pod { container: Some(_), .. } => 9,
            Self::Pod { .. } => 8,
            Self::Job { .. } => 7,
            Self::Helper { .. } => 6,
            Self::Container { .. } => 5,
            Self::Strange => 4,
            Self::Unit { .. } => 3,
            Self::Session { .. } => 2,
            Self::Plain => 1,
            Self::Root | Self::Outside => 0,
        }
    }
}

/// The most telling of the lines of `/proc/PID/cgroup`.
pub(crate) fn place(text: &str) -> Option<Place> {
    // `hierarchy:controllers:path`; the path may hold colons.
    let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.map(walk).reduce(|best, next| match next.weight().cmp(&best.weight()) {
        std::cmp::Ordering::Greater => next,
        // Of two that say nothing, the one that is outside is the warning.
        std::cmp::Ordering::Equal if next == Place::Outside => next,
        _ => best,
    })
}

/// One path, from the leaf to the root.
fn walk(path: &str) -> Place {
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    let outside = path.split('/').any(|segment| segment == "..");
    let segments: Vec<&str> =
        path.split('/').filter(|segment| !matches!(*segment, "" | "." | "..")).collect();
    let parents = |at: usize| &segments[..at];
    let leaf_first = || segments.iter().enumerate().rev();

    // Below a user's own manager the user makes the cgroups, and could call them anything.
    let delegated = segments.iter().any(|segment| user_slice(segment).is_some());
    if !delegated {
        for (at, segment) in leaf_first() {
            let (slice, colon_container) = colon_form(segment);
            if let Some(uid) = pod_uid(slice, parents(at), outside) {
                // The container that the kubelet knows is the one right below the pod.
                let below = segments[at + 1..].iter().find_map(|below| pod_container(below));
                return Place::Pod { uid, container: colon_container.or(below) };
            }
        }
        if let Some(job) = leaf_first().find_map(|(at, segment)| job(segment, parents(at))) {
            return Place::Job { job };
        }
    }
    if let Some(what) = leaf_first().find_map(|(_, segment)| helper(segment)) {
        return Place::Helper { what };
    }
    // Of nested containers the outermost is the one that this host's runtime can name.
    let mut outermost = None;
    let mut strange = false;
    for (at, segment) in leaf_first() {
        let found = container(segment, parents(at));
        let forged = |place: &Place| delegated && !place.is_rootless();
        outermost = found.filter(|place| !forged(place)).or(outermost);
        strange |= is_hex(segment, 64);
    }
    if let Some(container) = outermost {
        return container;
    }
    if strange {
        return Place::Strange;
    }
    match segments.as_slice() {
        [] if outside => Place::Outside,
        [] | ["init.scope"] => Place::Root,
        segments => unit_or_session(segments).unwrap_or(if outside { Place::Outside } else { Place::Plain }),
    }
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// `slice:cri-containerd:id`, which appears when kubelet and runtime disagree on the cgroup driver.
fn colon_form(segment: &str) -> (&str, Option<(Option<Runtime>, String)>) {
    let mut parts = segment.splitn(3, ':');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(slice), Some(prefix), Some(id)) if is_hex(id, 64) => {
            (slice, Some((runtime(prefix), id.to_owned())))
        }
        _ => (segment, None),
    }
}

/// A pod's UID with dashes, or a static pod's 32 digits of configuration hash.
fn pod_uid(segment: &str, parents: &[&str], outside: bool) -> Option<String> {
    let uid = match segment.strip_suffix(SLICE) {
        Some(slice) if slice.contains("kubepods") => slice.rsplit_once("-pod")?.1.replace('_', "-"),
        None if outside || parents.iter().any(|parent| parent.contains("kubepods")) => {
            segment.strip_prefix("pod")?.to_owned()
        }
        _ => return None,
    };
    let groups: Vec<usize> = uid.split('-').map(str::len).collect();
    let shaped = groups == [8, 4, 4, 4, 12] || groups == [32];
    (shaped && uid.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit())).then_some(uid)
}

fn pod_container(segment: &str) -> Option<(Option<Runtime>, String)> {
    if is_hex(segment, 64) {
        return Some((None, segment.to_owned()));
    }
    let (prefix, id) = segment.strip_suffix(".scope").unwrap_or(segment).rsplit_once('-')?;
    is_hex(id, 64).then(|| (runtime(prefix), id.to_owned()))
}

fn runtime(prefix: &str) -> Option<Runtime> {
    match prefix {
        "docker" | "cri-dockerd" => Some(Runtime::Docker),
        "cri-containerd" | "containerd" | "nerdctl" => Some(Runtime::Containerd),
        "crio" => Some(Runtime::Crio),
        "libpod" | "libpod-payload" => Some(Runtime::Podman),
        _ => None,
    }
}

/// `slurm…/uid_0/job_1/step_0` and `…slurmstepd.scope/job_1/step_0`.
fn job(segment: &str, parents: &[&str]) -> Option<String> {
    let job = segment.strip_prefix("job_")?;
    let slurm = |parent: &&str| parent.starts_with("slurm") || parent.ends_with("slurmstepd.scope");
    let number = !job.is_empty() && job.len() <= 20 && job.bytes().all(|byte| byte.is_ascii_digit());
    (number && parents.iter().any(slurm)).then(|| job.to_owned())
}

/// What a runtime runs beside a container. It is nobody's workload.
fn helper(segment: &str) -> Option<&'static str> {
    if segment.starts_with("libpod-conmon-") || segment.starts_with("crio-conmon-") {
        return Some("conmon");
    }
    segment.starts_with("lxc.monitor").then_some("lxc-monitor")
}

fn container(segment: &str, parents: &[&str]) -> Option<Place> {
    let parent = parents.last().copied().unwrap_or_default();
    let ecs = parents.iter().any(|parent| *parent == "ecs" || parent.starts_with("ecstasks"));
    let known = |runtime, id: &str| {
        let task = if ecs { task(parents) } else { None };
        let runtime = if task.is_some() { Runtime::Ecs } else { runtime };
        Some(Place::Container { runtime, id: id.to_owned(), task })
    };
    if let Some(name) = lxc(segment, parent) {
        return Some(Place::Container { runtime: Runtime::Lxc, id: name.to_owned(), task: None });
    }
    if let (_, Some((Some(runtime), id))) = colon_form(segment) {
        return known(runtime, &id);
    }
    if is_hex(segment, 64) {
        return match parent {
            // containerd's own namespaces, as `ctr` and Moby leave them.
            "default" | "k8s.io" => known(Runtime::Containerd, segment),
            "docker" | "moby" => known(Runtime::Docker, segment),
            "libpod_parent" => known(Runtime::Podman, segment),
            _ if ecs => known(Runtime::Ecs, segment),
            _ => None,
        };
    }
    let name = segment.strip_suffix(".scope").unwrap_or(segment);
    if let Some((prefix, id)) = name.rsplit_once('-')
        && is_hex(id, 64)
        && let Some(runtime) = runtime(prefix)
    {
        return known(runtime, id);
    }
    // Fargate: 32 digits of task, then a number.
    if ecs
        && let Some((task, number)) = segment.split_once('-')
        && is_hex(task, 32)
        && number.bytes().all(|byte| byte.is_ascii_digit())
    {
        return Some(Place::Container {
            runtime: Runtime::Ecs,
            id: segment.to_owned(),
            task: Some(task.to_owned()),
        });
    }
    None
}

/// The ECS task above a container: `ecs/<task>/<id>`, `ecs/<cluster>/<task>/<id>`, `ecstasks-<task>.slice`.
fn task(parents: &[&str]) -> Option<String> {
    let last = parents.last()?;
    let id = last.strip_suffix(SLICE).unwrap_or(last);
    let id = id.strip_prefix("ecstasks-").unwrap_or(id);
    let shaped =
        !id.is_empty() && id.len() <= 64 && id.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
    shaped.then(|| id.to_owned())
}

/// `lxc/<name>`, `lxc.payload/<name>`, `lxc.payload.<name>`.
fn lxc<'a>(segment: &'a str, parent: &str) -> Option<&'a str> {
    if let Some(name) = segment.strip_prefix("lxc.payload.") {
        return Some(name);
    }
    matches!(parent, "lxc" | "lxc.payload").then_some(segment)
}

/// The unit that the system's service manager started, or the user whose session it is.
fn unit_or_session(segments: &[&str]) -> Option<Place> {
    let is_unit =
        |segment: &&&str| segment.rsplit_once('.').is_some_and(|(_, kind)| UNIT_KINDS.contains(&kind));
    let user = segments.iter().position(|segment| user_slice(segment).is_some());
    if let Some(at) = user
        && segments[..at].iter().all(|segment| segment.ends_with(SLICE))
    {
        // Below the user's own manager the last unit is the user's own; the session scope is nobody's name.
        let unit = segments[at + 1..].iter().rfind(is_unit);
        let unit = unit.filter(|unit| !unit.starts_with("session-") && !unit.starts_with("user@"));
        let uid = user_slice(segments[at])?;
        return Some(Place::Session { uid, unit: unit.map(|unit| (*unit).to_owned()) });
    }
    let unit = segments.iter().find(is_unit)?;
    Some(Place::Unit { unit: (*unit).to_owned() })
}

const SLICE: &str = ".slice";
const UNIT_KINDS: [&str; 5] = ["service", "scope", "socket", "mount", "swap"];

fn user_slice(segment: &str) -> Option<u32> {
    segment.strip_prefix("user-")?.strip_suffix(SLICE)?.parse().ok()
}
