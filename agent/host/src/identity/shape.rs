//! Owns the small spellings inside a cgroup path: ids, units, pods, steps.
//! Refuses context: whether a segment may be believed where it stands is `path`'s question.

use super::Runtime;

pub(super) const SLICE: &str = ".slice";
const UNIT_KINDS: [&str; 5] = ["service", "scope", "socket", "mount", "swap"];

pub(super) fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

pub(super) fn is_id(text: &str) -> bool {
    is_hex(text, 64)
}

/// 25 digits of base 36, as `BuildKit` names the steps of a build.
pub(super) fn is_build_id(text: &str) -> bool {
    text.len() == 25 && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
}

/// A decimal number in its only spelling: what has two spellings would be two tenants.
pub(crate) fn number(text: &str) -> Option<&str> {
    let plain = !text.is_empty() && text.len() <= 20 && text.bytes().all(|byte| byte.is_ascii_digit());
    (plain && (text == "0" || !text.starts_with('0'))).then_some(text)
}

pub(crate) fn is_slice(segment: &str) -> bool {
    segment.ends_with(SLICE)
}

/// The unit of a segment, with the underscore taken away that systemd puts before names the kernel keeps.
pub(super) fn unit(segment: &str) -> Option<&str> {
    let unit = segment.strip_prefix('_').unwrap_or(segment);
    let (name, kind) = unit.rsplit_once('.')?;
    (!name.is_empty() && UNIT_KINDS.contains(&kind)).then_some(unit)
}

pub(super) fn user_slice(segment: &str) -> Option<u32> {
    number(segment.strip_prefix("user-")?.strip_suffix(SLICE)?)?.parse().ok()
}

/// `slice:cri-containerd:id`, which appears when runtime and runc disagree on the cgroup driver.
pub(super) fn colon_form(segment: &str) -> Option<(&str, &str, &str)> {
    let (rest, id) = segment.rsplit_once(':')?;
    let (slice, prefix) = rest.rsplit_once(':')?;
    (is_id(id) || is_build_id(id)).then_some((slice, prefix, id))
}

/// A pod's UID with dashes, or a static pod's 32 digits of configuration hash.
pub(super) fn pod_uid(uid: &str) -> Option<String> {
    let uid = uid.replace('_', "-");
    let groups: Vec<usize> = uid.split('-').map(str::len).collect();
    let shaped = groups == [8, 4, 4, 4, 12] || groups == [32];
    (shaped && uid.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit())).then_some(uid)
}

/// What a runtime calls the scope or directory of a container: `<prefix>-<id>[.scope]`.
pub(super) fn prefixed(segment: &str) -> Option<(&str, &str)> {
    let (prefix, id) = segment.strip_suffix(".scope").unwrap_or(segment).rsplit_once('-')?;
    (is_id(id) || is_build_id(id)).then_some((prefix, id))
}

pub(super) fn runtime(prefix: &str) -> Option<Runtime> {
    match prefix {
        "docker" | "cri-dockerd" => Some(Runtime::Docker),
        "cri-containerd" | "containerd" | "nerdctl" => Some(Runtime::Containerd),
        "crio" => Some(Runtime::Crio),
        "libpod" | "libpod-payload" => Some(Runtime::Podman),
        _ => None,
    }
}

/// The container right below a pod: `<id>`, `<runtime>-<id>[.scope]`, `kata_<id>`.
pub(super) fn pod_container(segment: &str) -> Option<(Option<Runtime>, String)> {
    let bare = segment.strip_prefix("kata_").unwrap_or(segment);
    if is_id(bare) {
        return Some((None, bare.to_owned()));
    }
    let (prefix, id) = prefixed(segment)?;
    is_id(id).then(|| (runtime(prefix), id.to_owned()))
}

/// What a runtime runs beside a container, and the container it runs it for. It is nobody's workload.
pub(super) fn helper(segment: &str) -> Option<(&'static str, Option<&str>)> {
    match prefixed(segment) {
        Some(("libpod-conmon" | "crio-conmon", id)) => return Some(("conmon", Some(id))),
        Some(("docker" | "nerdctl", id)) if is_build_id(id) => return Some(("buildkit", Some(id))),
        _ => {}
    }
    match segment {
        "kata_overhead" => return Some(("kata", None)),
        "lxc.monitor" | "lxc.pivot" => return Some(("lxc-monitor", None)),
        _ => {}
    }
    segment.starts_with("lxc.monitor.").then_some(("lxc-monitor", None))
}

/// Where version 1 has Slurm's jobs: `slurm`, or `slurm_<node>` with several slurmds on a host.
pub(crate) fn is_slurm_root(segment: &str) -> bool {
    segment == "slurm" || segment.starts_with("slurm_")
}

/// Where version 2 has them, likewise.
pub(crate) fn is_stepd_scope(segment: &str) -> bool {
    segment == "slurmstepd.scope" || segment.ends_with("_slurmstepd.scope")
}

/// `step_0`, `step_batch`, `step_extern`, `step_3.1`.
pub(super) fn step(segment: &str) -> Option<&str> {
    let step = segment.strip_prefix("step_")?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'.' || byte == b'+';
    (!step.is_empty() && step.len() <= 32 && step.bytes().all(plain)).then_some(step)
}

/// An ECS task: `<task>`, `<cluster>-<task>`'s last part is not told apart, `ecstasks-<task>.slice`.
pub(super) fn task(segment: &str) -> Option<&str> {
    let id = segment.strip_suffix(SLICE).unwrap_or(segment);
    let id = id.strip_prefix("ecstasks-").unwrap_or(id);
    let shaped = (12..=64).contains(&id.len())
        && id.bytes().all(|byte| matches!(byte, b'-' | b'_') || byte.is_ascii_hexdigit());
    shaped.then_some(id)
}

/// A task's own id, in either of the forms that ECS has had.
pub(super) fn is_task_id(id: &str) -> bool {
    is_hex(id, 32) || pod_uid(id).is_some()
}

/// Fargate: 32 digits of task, then a number.
pub(super) fn fargate(segment: &str) -> Option<&str> {
    let (task, container) = segment.split_once('-')?;
    (is_hex(task, 32) && number(container).is_some()).then_some(task)
}
