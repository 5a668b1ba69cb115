//! Owns `cotenant identify`: whose process or cgroup path it is, and how that is known.
//! Refuses to guess: a process that is gone and a path that is none are errors, not `unknown`.

use std::{ffi::OsString, fmt::Write, os::unix::ffi::OsStrExt, path::PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use cotenant_host::{
    CgroupView, Host, HostNames, Identity, Kind, Kubelet, Names, PodWatch, identify as identify_path,
};
use serde::Serialize;

use crate::config::{self, Config, Overrides};

/// The longest path that the kernel shows.
const MAX_PATH: usize = 4096;

/// What a job's processes say of themselves, which helps people and proves nothing.
const OWN_WORDS: [&str; 3] = ["SLURM_JOB_ID", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT"];

#[derive(Args)]
pub(crate) struct Asked {
    /// The process to identify
    #[arg(required_unless_present = "cgroup")]
    pid: Option<u32>,
    /// A cgroup path instead, as in /proc/PID/cgroup or below /sys/fs/cgroup
    #[arg(long, value_name = "PATH", conflicts_with = "pid")]
    cgroup: Option<OsString>,
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// The host as a directory [default: agent.root of the configuration]
    #[arg(long, value_name = "DIRECTORY")]
    root: Option<PathBuf>,
    /// Configuration file, for its sockets and paths [default: /etc/cotenant/cotenant.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Asked {
    /// As the agent on this host is configured. A file that nobody named must not keep people from an answer.
    fn settings(&self) -> Result<Config> {
        let read = config::load(&Overrides { config: self.config.clone(), ..Overrides::default() });
        match read {
            Err(error) if self.config.is_none() => {
                eprintln!("cotenant: {error:#}; taking the defaults");
                Ok(Config::default())
            }
            read => read,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

/// The stable form. A key that does not apply is absent.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
struct Record<'a> {
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod_uid: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    container_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    runtime: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unit: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slurm_job: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slurm_step: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

impl<'a> Record<'a> {
    fn of(identity: &'a Identity) -> Self {
        Self {
            kind: identity.kind.as_str(),
            id: identity.id.as_deref(),
            name: identity.name.as_deref(),
            pod_uid: identity.pod_uid.as_deref(),
            namespace: identity.tenant.namespace.as_deref(),
            pod: identity.tenant.pod.as_deref(),
            container: identity.tenant.container.as_deref(),
            container_id: identity.container_id.as_deref(),
            runtime: identity.runtime.map(cotenant_host::Runtime::as_str),
            unit: identity.unit.as_deref(),
            slurm_job: identity.slurm_job.as_deref(),
            slurm_step: identity.slurm_step.as_deref(),
            uid: identity.uid,
            reason: identity.reason,
        }
    }
}

pub(crate) fn identify(asked: &Asked) -> Result<()> {
    let Config { agent, kubernetes, .. } = asked.settings()?;
    let host = kubernetes.host(Host::at(asked.root.as_ref().unwrap_or(&agent.root)));
    let mut names = HostNames::new(host.clone()).with_namespaces(kubernetes.tenant_namespace);
    let view = host.enter_cgroups();
    let mut identity = look(asked, &host, &view, &names)?;
    if identity.reason == Some("pod_without_name")
        && let Some(config) = kubernetes.asked(&host)
        && let Ok(kubelet) = Kubelet::spawn(host.clone(), config)
    {
        // The runtime's socket knows what no file does, and is asked only then.
        kubelet.heard.first();
        names = names.with(&kubelet);
        identity = look(asked, &host, &view, &names)?;
    }
    if identity.kind == Kind::KubernetesContainer
        && let Some(config) = kubernetes.api()
    {
        // Whose team it is, or what it is called, nobody else may know.
        match PodWatch::spawn(config) {
            Ok(watch) => {
                let roster = watch.heard.first();
                if let Some(error) = &roster.source.error {
                    eprintln!("cotenant: {error}; no label is known");
                }
                names = names.with_pods(&watch);
                identity = look(asked, &host, &view, &names)?;
            }
            Err(error) => eprintln!("cotenant: {error}; no label is known"),
        }
    }
    match asked.output {
        Output::Json => println!("{}", serde_json::to_string(&Record::of(&identity))?),
        Output::Text => {
            print!("{}", told(&identity, asked.pid, &names));
            for (name, value) in asked.pid.map(|pid| host.says(pid, &OWN_WORDS)).unwrap_or_default() {
                println!("  its environment says {name}={value}; not believed");
            }
        }
    }
    Ok(())
}

fn look(asked: &Asked, host: &Host, view: &CgroupView, names: &HostNames) -> Result<Identity> {
    Ok(match (&asked.cgroup, asked.pid) {
        (Some(path), _) => identify_path(&line(&cotenant_host::as_text(path.as_bytes()))?, None, view, names),
        (None, Some(pid)) => match host.identity(pid, view, names) {
            Ok(observed) => observed.identity,
            Err(error) if error.is_gone() => bail!("no process {pid} on this host"),
            Err(error) => return Err(error).with_context(|| format!("cannot identify process {pid}")),
        },
        (None, None) => bail!("nothing to identify: give a PID or --cgroup PATH"),
    })
}

/// The path as a line of `/proc/PID/cgroup`.
fn line(path: &str) -> Result<String> {
    let bare = match path.splitn(3, ':').collect::<Vec<_>>().as_slice() {
        [hierarchy, _, path] if hierarchy.bytes().all(|byte| byte.is_ascii_digit()) => *path,
        _ => path,
    };
    let shown = path.chars().take(80).collect::<String>();
    if !bare.starts_with('/') || bare.contains(['\n', '\0']) {
        bail!(
            "{shown:?} is not a cgroup path: it starts with /, as the third field of a line in /proc/PID/cgroup does"
        );
    }
    if bare.len() > MAX_PATH {
        bail!("not a cgroup path: it has {} bytes, and the kernel shows {MAX_PATH} at most", bare.len());
    }
    Ok(format!("0::{}\n", below_mount(bare)))
}

/// A path in the file system as a path in its hierarchy.
fn below_mount(path: &str) -> &str {
    let Some(below) = path.strip_prefix("/sys/fs/cgroup") else { return path };
    if below.is_empty() {
        return "/";
    }
    let Some(inner) = below.strip_prefix('/') else { return path };
    let (first, _) = inner.split_once('/').unwrap_or((inner, ""));
    let v1 = "unified systemd blkio cpu cpuacct cpu,cpuacct cpuset devices freezer hugetlb memory misc \
              net_cls net_prio net_cls,net_prio perf_event pids rdma";
    if v1.split_whitespace().any(|controller| controller == first) {
        let rest = &inner[first.len()..];
        return if rest.is_empty() { "/" } else { rest };
    }
    below
}

/// For people: the label first, then what is known, then how.
fn told(identity: &Identity, pid: Option<u32>, names: &HostNames) -> String {
    let record = Record::of(identity);
    let user = identity.uid.map(|uid| match names.user(uid) {
        Some(name) => format!("{uid} ({name})"),
        None => uid.to_string(),
    });
    let unit = record.unit.map(|unit| match names.unit_description(unit) {
        Some(description) => format!("{unit} ({description})"),
        None => unit.to_owned(),
    });
    let mut text = String::new();
    let mut row = |key: &str, value: Option<&str>| {
        if let Some(value) = value {
            let _ = writeln!(text, "{key:<13}{value}");
        }
    };
    row("tenant", Some(&identity.tenant.name));
    row("kind", Some(record.kind));
    row("id", record.id);
    row("name", record.name);
    row("namespace", record.namespace);
    row("pod", record.pod);
    row("pod uid", record.pod_uid);
    row("container", record.container);
    row("container id", record.container_id.filter(|id| record.id != Some(*id)));
    row("runtime", record.runtime);
    row("unit", unit.as_deref());
    row("slurm job", record.slurm_job);
    row("slurm step", record.slurm_step);
    row("uid", user.as_deref());
    row("reason", identity.reason);
    text.push_str("reached by\n");
    if let Some(path) = &identity.path {
        let from = pid.map_or_else(|| "--cgroup".to_owned(), |pid| format!("/proc/{pid}/cgroup"));
        let _ = writeln!(text, "  {from}: {path}");
    }
    if let Some(source) = identity.named_by {
        let _ = writeln!(text, "  {source}: its name");
    }
    if let Some(nested) = &identity.nested {
        let _ = writeln!(text, "  {nested} runs inside it; the outer one is the tenant");
    }
    if let Some(remedy) = identity.reason.and_then(remedy) {
        let _ = writeln!(text, "  {remedy}");
    }
    if identity.kind == Kind::Unknown && identity.reason.and_then(remedy).is_none() {
        text.push_str("  no runtime that is known here makes such a path\n");
    }
    text
}

fn remedy(reason: &str) -> Option<&'static str> {
    match reason {
        "pod_without_name" => Some("no name: mount /var/log/pods from the host"),
        "cgroupns" | "cgroup_outside_namespace" => {
            Some("seen from a cgroup namespace of its own: run with the host's PIDs (hostPID: true)")
        }
        "container_of_unknown_runtime" => Some("an id below a cgroup that no runtime's store claims"),
        "container_not_confirmed" => Some("Podman's store does not say that this unit has this container"),
        "cgroup_delegated" => {
            Some("a cgroup above it belongs to this user, who may call what is below it anything")
        }
        "kubepods_without_pod" => Some("above every pod"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_as_the_kernel_and_the_file_system_show_them() {
        for (given, taken) in [
            ("/docker/x", "0::/docker/x\n"),
            ("0::/a/b", "0::/a/b\n"),
            ("4:memory:/a:b", "0::/a:b\n"),
            ("/sys/fs/cgroup/system.slice/a.service", "0::/system.slice/a.service\n"),
            ("/sys/fs/cgroup/unified/a", "0::/a\n"),
            ("/sys/fs/cgroup/memory/a", "0::/a\n"),
            ("/sys/fs/cgroup", "0::/\n"),
            ("/sys/fs/cgroupx", "0::/sys/fs/cgroupx\n"),
            ("/a:b:c", "0::/a:b:c\n"),
        ] {
            assert_eq!(line(given).unwrap(), taken);
        }
        for wrong in ["", "docker/x", "0::docker", "/a\n0::/b", "/a\0"] {
            assert!(line(wrong).unwrap_err().to_string().contains("not a cgroup path"), "{wrong:?}");
        }
        assert!(line(&"/a".repeat(4096)).is_err());
    }
}
