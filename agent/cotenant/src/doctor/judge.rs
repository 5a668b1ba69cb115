//! Owns what the facts come to: every check with its state, as a pure function.
//! Refuses to ask anything, and words of its own where the agent has them.

use cotenant_kernel::Trials;
use cotenant_model::view::{Feature, FeatureState};
use serde_json::Value;

use super::{
    ask::{Agent, Unasked},
    facts::{Answered, Copies, Copy, Facts},
};
use crate::{
    features::{self, bad, feature, remedied},
    rights,
};

pub(super) fn judge(facts: &Facts) -> Vec<Feature> {
    let Facts { surroundings, planned, plan, .. } = facts;
    let trials = facts.trials.unwrap_or_default();
    let mut checks = features::judge(surroundings, &trials);
    for (name, answered) in [("kubelet", &facts.kubelet), ("pod_names", &facts.runtime)] {
        if let Some(check) = checks.iter_mut().find(|check| check.name == name) {
            door(check, answered.as_ref());
        }
    }
    checks.push(features::unprivileged(surroundings));
    let tracepoint = planned.ioctl_tracepoint;
    checks.extend(features::report(surroundings, &trials, planned.kprobes, tracepoint));
    checks.extend(facts.attempted.clone().unwrap_or_else(|| {
        let missing = features::diagnose(surroundings, &Trials::default());
        features::recorded(plan, missing.map_or(Ok(()), Err))
    }));
    checks.extend(surroundings.rights.as_ref().into_iter().flat_map(rights::features));
    checks.push(features::driver(&facts.hardware));
    if let Some((sample, condition)) = &facts.nvml {
        checks.push(features::nvml(&sample.library, condition.as_ref()));
        checks.push(features::visibility(facts.visible, sample, condition.as_ref()).0);
    }
    checks.extend(facts.kernel_log.clone());
    checks.extend(facts.api_watch.clone());
    checks.push(facts.job_grants.clone());
    let gpus = facts.hardware.expected() > 0
        || facts.nvml.as_ref().is_some_and(|(sample, _)| !sample.gpus.is_empty());
    checks.push(libcuda(&facts.copies, gpus, facts.agent.as_ref()));
    checks.push(configuration(&facts.configuration));
    checks.extend(facts.agent.as_ref().map(agent));
    checks
}

/// A door that is there counts when it is answered.
fn door(check: &mut Feature, answered: Option<&Answered>) {
    match answered {
        // Names by files need no runtime.
        Some(Err(reason)) if check.name == "kubelet" && !bad(check.state) => {
            *check = feature(check.name, FeatureState::Degraded, reason.clone());
        }
        Some(Ok(said)) if !bad(check.state) => check.reason = format!("{}: {said}", check.reason),
        _ => {}
    }
}

fn libcuda(copies: &Copies, gpus: bool, agent: Option<&Agent>) -> Feature {
    let name = "libcuda";
    let Copies { used, installed, hidden } = copies;
    let hidden = match hidden {
        0 => String::new(),
        count => format!("; {count} processes may not be looked at"),
    };
    if used.is_empty() {
        let seen = format!("no process has mapped one, {installed} where drivers put it{hidden}");
        if *installed > 0 || !gpus {
            return feature(name, FeatureState::Active, seen);
        }
        return Feature {
            lost: "nothing yet: the agent waits until a process maps one, and probes it then".to_owned(),
            ..remedied(
                feature(name, FeatureState::Degraded, seen),
                "find / -xdev -name 'libcuda.so.*'; install the driver's user-space libraries (libcuda1)",
            )
        };
    }
    let status = agent.and_then(|agent| agent.status.as_ref().ok());
    let Some(status) = status else {
        let seen = format!("{} in use, by no agent that could be asked{hidden}", list(used));
        return feature(name, FeatureState::Active, seen);
    };
    let (probed, bare): (Vec<&Copy>, Vec<&Copy>) = used.iter().partition(|copy| is_probed(copy, status));
    if bare.is_empty() {
        return feature(name, FeatureState::Active, format!("{} in use, all probed{hidden}", probed.len()));
    }
    let paths: Vec<String> =
        bare.iter().map(|copy| format!("{} (inode {})", copy.path, copy.inode)).collect();
    Feature {
        lost: "what is allocated through these files".to_owned(),
        ..remedied(
            feature(
                name,
                FeatureState::Degraded,
                format!(
                    "{} of {} in use are not probed: {}{hidden}",
                    bare.len(),
                    used.len(),
                    paths.join(", ")
                ),
            ),
            "give the agent SYS_PTRACE and DAC_READ_SEARCH; /status says under libraries what it refused",
        )
    }
}

fn list(copies: &[Copy]) -> String {
    let users: u32 = copies.iter().map(|copy| copy.processes).sum();
    format!("{} (processes: {users})", copies.len())
}

fn is_probed(copy: &Copy, status: &Value) -> bool {
    let libraries = status["libraries"].as_array();
    libraries.is_some_and(|libraries| {
        libraries.iter().any(|library| {
            library["inode"].as_u64() == Some(copy.inode)
                && library["device"].as_u64() == Some(copy.device)
                && library["attached"].as_u64() > Some(0)
        })
    })
}

fn configuration(read: &Result<Option<String>, String>) -> Feature {
    let name = "configuration";
    match read {
        Ok(Some(file)) => feature(name, FeatureState::Active, file.clone()),
        Ok(None) => feature(name, FeatureState::Active, "no file: the defaults".to_owned()),
        Err(reason) => feature(name, FeatureState::Broken, reason.clone()),
    }
}

/// What the running agent says of itself. Its rights may be others than those of this process.
fn agent(agent: &Agent) -> Feature {
    let name = "agent";
    let Agent { address, status, readiness } = agent;
    let status = match status {
        Ok(status) => status,
        Err(Unasked::Absent(reason)) => {
            return feature(name, FeatureState::Active, format!("none answers on {address}: {reason}"));
        }
        Err(Unasked::Unadmitted { reason, remedy }) => {
            let seen = format!("the agent on {address} does not let doctor in: {reason}");
            let closed = remedied(feature(name, FeatureState::Degraded, seen), remedy.clone());
            return Feature {
                lost: "what the agent says of itself: it is not in this answer".to_owned(),
                ..closed
            };
        }
    };
    let version = status["version"].as_str().unwrap_or("of a version it does not say");
    let words = |key: &str, of: &Value| of[key].as_str().unwrap_or_default().to_owned();
    let wrong: Vec<&Value> = status["features"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|feature| !matches!(feature["state"].as_str(), Some("active" | "disabled")))
        .collect();
    let ready = readiness.as_ref().is_some_and(|(code, _)| *code == 200);
    if ready && wrong.is_empty() {
        return feature(name, FeatureState::Active, format!("{version} on {address}, ready"));
    }
    let each = |key: &str| {
        let mut texts: Vec<String> =
            wrong.iter().map(|of| words(key, of)).filter(|text| !text.is_empty()).collect();
        texts.dedup();
        texts.join("; ")
    };
    let names: Vec<String> =
        wrong.iter().map(|of| format!("{} {}", words("name", of), words("state", of))).collect();
    let state = if ready { FeatureState::Degraded } else { FeatureState::Broken };
    let readiness = if ready { "ready" } else { "not ready" };
    let seen = format!("{version} on {address}, {readiness}: {}", names.join(", "));
    Feature { lost: each("lost"), ..remedied(feature(name, state, seen), each("remedy")) }
}
