//! Owns the claims about grants: what a scheduler gave beside what is used, with a kubelet and a runtime that answer.
//! Refuses a grant for a use, in either direction.

mod kubernetes;

use std::{collections::BTreeSet, thread::sleep, time::Duration};

use anyhow::{Context, Result, ensure};
use cotenant_node::scrape::Scrape;
use kubernetes::{Cluster, Notes, faults};
use serde_json::json;

const PROCESS_BYTES: &str = "cotenant_gpu_memory_process_bytes";
const STATE: &str = "cotenant_gpu_grant_state";
const SHARES: &str = "cotenant_gpu_grant_shares";
const ABSENT: &str = "cotenant_gpu_reading_absent";
const IDLE: &str = "cotenant_gpu_grant_idle_seconds_total";
const MIB: f64 = 1_048_576.0;

/// The GPUs for which there is a series of a pod, with its value.
fn of_pod(scrape: &Scrape, name: &str, pod: &str) -> Vec<(String, f64)> {
    let samples = scrape.of(name).filter(|sample| sample.label("k8s_pod_name") == pod);
    samples.map(|sample| (sample.label("hw_id").to_owned(), sample.value)).collect()
}

/// The one word for a pod on a GPU.
fn grant(scrape: &Scrape, pod: &str, gpu: &str) -> Option<String> {
    let mut on = scrape.of(STATE).filter(|sample| {
        sample.label("k8s_pod_name") == pod && sample.label("hw_id") == gpu && sample.value != 0.0
    });
    let word = on.next()?.label("grant").to_owned();
    on.next().is_none().then_some(word)
}

fn is(scrape: &Scrape, pod: &str, gpu: &str, word: &str) -> bool {
    grant(scrape, pod, gpu).as_deref() == Some(word)
}

#[test]
fn c02_c06_c28_use_is_where_the_process_is_whatever_was_granted() -> Result<()> {
    let mut cluster = Cluster::create(2, "")?;
    let (x, y) = (cluster.gpu(0), cluster.gpu(1));
    let slots = [format!("{x}::5"), format!("{x}::19")];
    let slotted = cluster.pod("team-a", "slotted", &Notes::granted(&slots))?;
    let nobody = cluster.pod("team-a", "ungranted", &Notes::default())?;
    let group = [("runai-gpu-group", "g1")];
    let reserved = Notes { labels: &group, ..Notes::granted(std::slice::from_ref(&x)) };
    let _reservation = cluster.pod("kai-resource-reservation", "gpu-reservation-1", &reserved)?;
    let annotations = [("gpu-fraction", "0.5")];
    let fractional = Notes { labels: &group, annotations: &annotations, ..Notes::default() };
    let shared = cluster.pod("team-b", "fractional", &fractional)?;
    let _running =
        [slotted.hold(&cluster, 1, 64)?, nobody.hold(&cluster, 0, 64)?, shared.hold(&cluster, 0, 64)?];

    let scrape = cluster.world.agent.until(|scrape| {
        is(scrape, "slotted", &y, "allocation_mismatch")
            && is(scrape, "ungranted", &x, "none")
            && is(scrape, "fractional", &x, "used")
            // The probes know of it first; NVML's lists come with the next poll.
            && ["slotted", "ungranted"].iter().all(|pod| !of_pod(scrape, PROCESS_BYTES, pod).is_empty())
    })?;
    let used = of_pod(&scrape, PROCESS_BYTES, "slotted");
    ensure!(used.len() == 1 && used[0].0 == y && used[0].1 > 64.0 * MIB, "{used:?}");
    ensure!(of_pod(&scrape, SHARES, "slotted") == [(x.clone(), 2.0)], "two shares of one GPU");
    ensure!(is(&scrape, "slotted", &x, "idle"), "{:?}", grant(&scrape, "slotted", &x));
    ensure!(of_pod(&scrape, PROCESS_BYTES, "ungranted").len() == 1, "a use without a grant is a use");
    ensure!(of_pod(&scrape, SHARES, "ungranted").is_empty());

    let system = [("tenant", "system:gpu-reservation"), ("tenant_kind", "system"), ("hw_id", x.as_str())];
    ensure!(scrape.get(SHARES, &system) == Some(1.0));
    let state = [("tenant", "system:gpu-reservation"), ("grant", "reservation")];
    ensure!(scrape.get(STATE, &state) == Some(1.0));
    let named = scrape.samples.iter().any(|of| of.label("k8s_namespace_name") == "kai-resource-reservation");
    ensure!(!named, "a reservation is nobody's use");
    ensure!(
        of_pod(&scrape, SHARES, "fractional") == [(x.clone(), 1.0)],
        "its reservation's GPU is its grant"
    );
    let half = scrape.get("hw_gpu_memory_limit_bytes", &[("hw_id", &x)]).context("a size")? / 2.0;
    let request = [("k8s_pod_name", "fractional"), ("source", "kai_fraction"), ("hw_id", &x)];
    ensure!(scrape.get("cotenant_gpu_memory_request_bytes", &request) == Some(half.floor()));
    ensure!(scrape.get("cotenant_gpu_memory_over_request_bytes", &request) == Some(0.0));
    let feature = [("feature", "grants"), ("state", "active")];
    ensure!(scrape.get("cotenant_agent_feature_state", &feature) == Some(1.0));
    Ok(())
}

#[test]
fn c09_c14_c24_a_grant_without_a_process_is_zero_only_when_the_lists_were_read() -> Result<()> {
    let mut cluster = Cluster::create(2, "")?;
    let (x, y) = (cluster.gpu(0), cluster.gpu(1));
    let _quiet = cluster.pod("team-a", "quiet", &Notes::granted(std::slice::from_ref(&x)))?;
    let finished = cluster.pod("team-a", "finished", &Notes::granted(std::slice::from_ref(&y)))?;
    let both = |scrape: &Scrape| {
        of_pod(scrape, PROCESS_BYTES, "quiet") == [(x.clone(), 0.0)]
            && of_pod(scrape, PROCESS_BYTES, "finished") == [(y.clone(), 0.0)]
    };
    let scrape = cluster.world.agent.until(both)?;
    ensure!(of_pod(&scrape, SHARES, "quiet") == [(x.clone(), 1.0)] && is(&scrape, "quiet", &x, "idle"));
    ensure!(scrape.get("cotenant_gpu_stale_grants", &[]) == Some(0.0));
    let idle = |scrape: &Scrape| scrape.get(IDLE, &[("k8s_pod_name", "quiet")]).unwrap_or(-1.0);
    let before = idle(&scrape);
    sleep(Duration::from_secs(2));
    let grown = idle(&cluster.world.agent.scrape()?) - before;
    ensure!((1.5..20.0).contains(&grown), "{grown} s idle in 2 s");

    cluster.finish(finished);
    let stale = |scrape: &Scrape| scrape.get("cotenant_gpu_stale_grants", &[]) == Some(1.0);
    let scrape = cluster.world.agent.until(stale)?;
    ensure!(is(&scrape, "finished", &y, "stale"), "{:?}", grant(&scrape, "finished", &y));
    ensure!(of_pod(&scrape, PROCESS_BYTES, "finished").is_empty(), "a stale grant is no use, and no zero");
    ensure!(of_pod(&scrape, "cotenant_gpu_memory_request_bytes", "finished").is_empty());

    let broken =
        json!({ "calls": { "nvmlDeviceGetComputeRunningProcesses_v3": { "return": 999, "gpu": 0 } } });
    faults(&cluster.world.node.directory, &broken)?;
    let why = [("k8s_pod_name", "quiet"), ("reading", "process_bytes"), ("reason", "failed"), ("hw_id", &x)];
    let scrape = cluster.world.agent.until(|scrape| scrape.get(ABSENT, &why) == Some(1.0))?;
    ensure!(of_pod(&scrape, PROCESS_BYTES, "quiet").is_empty(), "unknown is not zero");
    ensure!(of_pod(&scrape, SHARES, "quiet") == [(x.clone(), 1.0)], "the grant does not depend on NVML");
    ensure!(grant(&scrape, "quiet", &x).is_none(), "neither idle nor used");
    let errors = |scrape: &Scrape| {
        scrape.get(
            "cotenant_agent_nvml_call_errors_total",
            &[("function", "nvmlDeviceGetComputeRunningProcesses_v3")],
        )
    };
    ensure!(errors(&scrape) >= Some(1.0), "{:?}", errors(&scrape));
    let stopped = idle(&scrape);
    sleep(Duration::from_secs(1));
    let still = idle(&cluster.world.agent.scrape()?);
    ensure!((still - stopped).abs() < 1e-9, "{stopped} then {still}: what is not known is not idle");
    faults(&cluster.world.node.directory, &json!({}))?;
    cluster.world.agent.until(|scrape| of_pod(scrape, PROCESS_BYTES, "quiet") == [(x.clone(), 0.0)])?;
    Ok(())
}

#[test]
fn c08_a_kubelet_that_fails_changes_no_label_set() -> Result<()> {
    const ERRORS: &str = "cotenant_agent_kubelet_podresources_errors_total";
    const AGE: &str = "cotenant_agent_kubelet_podresources_age_seconds";
    let mut cluster = Cluster::create(1, "")?;
    let x = cluster.gpu(0);
    let pod = cluster.pod("team-a", "steady", &Notes::granted(std::slice::from_ref(&x)))?;
    let _running = pod.hold(&cluster, 0, 64)?;
    let label_sets = |scrape: &Scrape| -> BTreeSet<String> {
        let of = scrape.samples.iter().filter(|sample| sample.label("k8s_pod_name") == "steady");
        let steady = [PROCESS_BYTES, STATE, SHARES, "cotenant_gpu_memory_live_bytes"];
        of.filter(|sample| steady.contains(&sample.name.as_str()))
            .map(|sample| format!("{} {:?}", sample.name, sample.labels))
            .collect()
    };
    let there = |scrape: &Scrape| {
        let fresh = scrape.get(ERRORS, &[]) == Some(0.0) && scrape.get(AGE, &[]) < Some(0.5);
        fresh && is(scrape, "steady", &x, "used") && of_pod(scrape, PROCESS_BYTES, "steady").len() == 1
    };
    let before = cluster.world.agent.until(there)?;
    let known = label_sets(&before);
    ensure!(known.len() >= 4, "{known:?}");

    cluster.fail(true);
    let failed = |scrape: &Scrape| scrape.get(ERRORS, &[]) >= Some(1.0) && scrape.get(AGE, &[]) > Some(1.0);
    let during = cluster.world.agent.until(failed)?;
    ensure!(label_sets(&during) == known, "{:?}", label_sets(&during));
    ensure!(during.get("cotenant_agent_kubelet_runtime_errors_total", &[]) >= Some(1.0));
    let broken = [("feature", "grants"), ("state", "broken")];
    ensure!(during.get("cotenant_agent_feature_state", &broken) == Some(1.0));

    cluster.fail(false);
    let after = cluster.world.agent.until(|scrape| scrape.get(AGE, &[]) < Some(0.5))?;
    ensure!(label_sets(&after) == known);
    ensure!(after.get(ERRORS, &[]) >= during.get(ERRORS, &[]), "errors are not forgotten");
    Ok(())
}

#[test]
fn c19_use_beyond_the_declared_request_is_told_with_its_source() -> Result<()> {
    let mut cluster = Cluster::create(2, "")?;
    let (x, y) = (cluster.gpu(0), cluster.gpu(1));
    let allocated = format!("{y},NVIDIA,3000,30:;");
    let kai = cluster.pod(
        "team-a",
        "kai",
        &Notes { annotations: &[("gpu-memory", "2000")], ..Notes::default() },
    )?;
    let annotations = [("hami.io/vgpu-devices-allocated", allocated.as_str())];
    // Kubelet picked a slot of the other GPU for it.
    let hami = cluster.pod(
        "team-a",
        "hami",
        &Notes { annotations: &annotations, ..Notes::granted(&[format!("{x}-3")]) },
    )?;
    // One whose annotation is nonsense has asked for nothing.
    let junk = [("gpu-memory", "-1"), ("gpu-fraction", "NaN")];
    let nonsense = cluster.pod("team-a", "nonsense", &Notes { annotations: &junk, ..Notes::default() })?;
    let _running =
        [kai.hold(&cluster, 0, 6144)?, hami.hold(&cluster, 1, 1024)?, nonsense.hold(&cluster, 0, 64)?];
    let over = |scrape: &Scrape, pod: &str, source: &str| {
        let labels = [("k8s_pod_name", pod), ("source", source)];
        scrape.get("cotenant_gpu_memory_over_request_bytes", &labels)
    };
    let scrape = cluster.world.agent.until(|scrape| {
        over(scrape, "kai", "kai_memory") > Some(0.0)
            && over(scrape, "hami", "hami") == Some(0.0)
            && of_pod(scrape, PROCESS_BYTES, "nonsense").len() == 1
    })?;
    let used = scrape.get(PROCESS_BYTES, &[("k8s_pod_name", "kai")]).context("kai is listed")?;
    ensure!(used >= 6144.0 * MIB, "{used}");
    ensure!(over(&scrape, "kai", "kai_memory") == Some(used - 2000.0 * MIB), "{used}");
    let request = [("k8s_pod_name", "hami"), ("hw_id", y.as_str())];
    ensure!(scrape.get("cotenant_gpu_memory_request_bytes", &request) == Some(3000.0 * MIB));
    ensure!(
        is(&scrape, "hami", &y, "used"),
        "its scheduler chose this one: {:?}",
        grant(&scrape, "hami", &y)
    );
    ensure!(of_pod(&scrape, "cotenant_gpu_memory_request_bytes", "nonsense").is_empty());
    Ok(())
}

#[test]
fn c23_idle_holders_are_found_process_by_process() -> Result<()> {
    let mut cluster = Cluster::create(1, "[tenants]\nidle_after = \"3s\"\n")?;
    let x = cluster.gpu(0);
    let pod = cluster.pod("team-a", "models", &Notes::granted(std::slice::from_ref(&x)))?;
    let mut orphans = Vec::new();
    for (index, mebibytes) in [256_u64, 1024, 512].into_iter().enumerate() {
        let script = format!("alloc a {mebibytes}MiB\nprint held\nwait\n");
        orphans.push((pod.run(&cluster, &format!("orphan{index}"), 0, &script)?, mebibytes));
    }
    let worker = pod.run(&cluster, "worker", 0, "alloc a 2048MiB\nprint held\nwait\n")?;
    let busy = json!({ "busy": { worker.pid().to_string(): { "sm": 60, "memory": 10 } } });
    faults(&cluster.world.node.directory, &busy)?;
    let labels = [("k8s_pod_name", "models")];
    let scrape =
        cluster.world.agent.until(|scrape| scrape.get("cotenant_gpu_idle_holders", &labels) == Some(3.0))?;
    ensure!(scrape.get("cotenant_gpu_idle_holder_age_seconds", &labels) >= Some(3.0));
    let bytes = scrape.get("cotenant_gpu_idle_holder_bytes", &labels).context("bytes")?;
    let all = scrape.get(PROCESS_BYTES, &labels).context("the pod is listed")?;
    ensure!(bytes >= 1792.0 * MIB && bytes < all - 2048.0 * MIB, "{bytes} of {all}");

    let answer = cluster.world.agent.json("/api/v1/holders")?;
    let pids: Vec<u64> = answer["holders"]
        .as_array()
        .context("a list")?
        .iter()
        .filter(|holder| holder["tenant"] == "pod:team-a/models")
        .filter_map(|holder| holder["pid"].as_u64())
        .collect();
    orphans.sort_by_key(|(_, mebibytes)| std::cmp::Reverse(*mebibytes));
    let wanted: Vec<u64> = orphans.iter().map(|(tenant, _)| u64::from(tenant.pid())).collect();
    ensure!(pids == wanted, "{pids:?}, the most bytes first are {wanted:?}");

    // What NVML cannot say about processes is not idleness.
    let broken = json!({ "calls": { "nvmlDeviceGetProcessUtilization": { "return": 999 } } });
    faults(&cluster.world.node.directory, &broken)?;
    cluster.world.agent.until(|scrape| scrape.get("cotenant_gpu_idle_holders", &labels).is_none())?;
    Ok(())
}
