//! Owns the claims about the watch at the API server: names, teams and labels by a server that answers, fails and refuses.
//! Refuses a server without TLS and a token: the agent gets in as it does in a pod.

mod apiserver;
#[allow(dead_code, reason = "shared with the claims about grants, of which some parts are only theirs")]
mod kubernetes;

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use apiserver::{Fake, Pod};
use cotenant_node::{Cgroup, scrape::Scrape};
use kubernetes::{Cluster, Notes};

const PROCESS_BYTES: &str = "cotenant_gpu_memory_process_bytes";
const LIVE: &str = "cotenant_gpu_memory_live_bytes";
const STATE: &str = "cotenant_agent_feature_state";
const LABEL: &str = "cotenant_tenant_label_info";
const AGE: &str = "cotenant_agent_apiserver_age_seconds";
const ERRORS: &str = "cotenant_agent_apiserver_errors_total";

fn server() -> Result<Fake> {
    Fake::start(Vec::new()).map_err(|error| anyhow!("{error}"))
}

/// A node whose agent asks the server.
fn cluster(fake: &Fake) -> Result<Cluster> {
    let settings = format!(
        "api_watch = true\napi_server = \"{}\"\napi_credentials = \"{}\"\nnode = \"gpu-1\"\n\
         labels = [\"app.kubernetes.io/name\", \"absent\"]\ntenant_label = \"team\"\n",
        fake.url(),
        fake.credentials().display()
    );
    Cluster::create(1, &settings)
}

/// The tenant's name and kind in the one series of a pod.
fn tenant(scrape: &Scrape, name: &str, pod: &str) -> Option<(String, String)> {
    let mut of = scrape.of(name).filter(|sample| sample.label("k8s_pod_name") == pod);
    let first = of.next()?;
    let found = (first.label("tenant").to_owned(), first.label("tenant_kind").to_owned());
    of.next().is_none().then_some(found)
}

fn is(scrape: &Scrape, pod: &str, wanted: &str) -> bool {
    [PROCESS_BYTES, LIVE].iter().all(|name| tenant(scrape, name, pod).is_some_and(|(name, _)| name == wanted))
}

fn watch_is(scrape: &Scrape, state: &str) -> bool {
    scrape.get(STATE, &[("feature", "api_watch"), ("state", state)]) == Some(1.0)
}

/// Every label set of a pod's figures.
fn label_sets(scrape: &Scrape, pod: &str) -> BTreeSet<String> {
    let named = [PROCESS_BYTES, LIVE, LABEL, "cotenant_gpu_grant_state", "cotenant_gpu_grant_shares"];
    let of = scrape.samples.iter().filter(|sample| sample.label("k8s_pod_name") == pod);
    of.filter(|sample| named.contains(&sample.name.as_str()))
        .map(|sample| format!("{} {:?}", sample.name, sample.labels))
        .collect()
}

fn feature(cluster: &Cluster) -> Result<(String, String)> {
    let status = cluster.world.agent.json("/status")?;
    let all = status["features"].as_array().context("features")?;
    let watch = all.iter().find(|of| of["name"] == "api_watch").context("api_watch is told")?;
    let text = |key: &str| watch[key].as_str().unwrap_or_default().to_owned();
    Ok((text("reason"), text("remedy")))
}

#[test]
fn c05_c82_a_label_makes_a_team_and_an_outage_changes_no_label_set() -> Result<()> {
    let mut fake = server()?;
    let mut cluster = cluster(&fake)?;
    let gpu = cluster.gpu(0);
    let trainer = cluster.pod("team-a", "trainer", &Notes::granted(std::slice::from_ref(&gpu)))?;
    let claimer = cluster.pod("team-b", "claimer", &Notes::default())?;
    let plain = cluster.pod("team-a", "plain", &Notes::default())?;
    let hostile = [("team", "blue"), ("app.kubernetes.io/name", "llm\u{202e}"), ("secret", "s3cret")];
    let known = vec![
        Pod::new(&trainer.uid, "team-a", "trainer", &hostile),
        Pod::new(&claimer.uid, "team-b", "claimer", &[("team", "blue")]),
        Pod::new(&plain.uid, "team-a", "plain", &[("team", "")]),
    ];
    cluster.world.agent.until(|scrape| watch_is(scrape, "active"))?;
    let _running =
        [trainer.hold(&cluster, 0, 64)?, claimer.hold(&cluster, 0, 64)?, plain.hold(&cluster, 0, 64)?];
    // The API tells later than the cgroup, as it may in a cluster.
    cluster.world.agent.until(|scrape| is(scrape, "trainer", "pod:team-a/trainer"))?;
    for (version, pod) in (11..).zip(&known) {
        ensure!(fake.send("ADDED", &pod.object(version)) == 1, "one watch is open");
    }
    let scrape = cluster.world.agent.until(|scrape| {
        is(scrape, "trainer", "team:blue")
            && is(scrape, "claimer", "team:blue")
            && is(scrape, "plain", "pod:team-a/plain")
            && scrape.of(LABEL).any(|sample| sample.label("k8s_pod_name") == "trainer")
            && tenant(scrape, "cotenant_gpu_grant_shares", "trainer")
                .is_some_and(|(name, _)| name == "team:blue")
    })?;
    ensure!(tenant(&scrape, LIVE, "trainer").is_some_and(|(_, kind)| kind == "team"));
    // One team by name; whose namespace it is stays to be seen.
    let both = scrape.sum(LIVE, &[("tenant", "team:blue")]);
    ensure!((both - 2.0 * 64.0 * 1_048_576.0).abs() < 1.0, "{both}");
    ensure!(scrape.get(LIVE, &[("tenant", "team:blue"), ("k8s_namespace_name", "team-b")]).is_some());
    let name =
        [("k8s_pod_name", "trainer"), ("label_source", "label"), ("label_key", "app.kubernetes.io/name")];
    ensure!(scrape.get(LABEL, &name) == Some(1.0));
    ensure!(
        scrape.get(LABEL, &[("label_value", "llm\\u{202e}")]) == Some(1.0),
        "{:?}",
        scrape.of(LABEL).collect::<Vec<_>>()
    );
    ensure!(!scrape.text.contains("s3cret") && scrape.of(LABEL).count() == 1, "only what was asked for");
    ensure!(
        watch_is(&scrape, "active")
            && scrape.get(AGE, &[]) == Some(0.0)
            && scrape.get(ERRORS, &[]) == Some(0.0)
    );
    let asked = fake.asked();
    ensure!(asked.iter().all(|query| query.contains("fieldSelector=spec.nodeName%3Dgpu-1&")), "{asked:?}");

    let before = label_sets(&scrape, "trainer");
    ensure!(before.len() >= 5, "{before:?}");
    fake.stop();
    let scrape = cluster
        .world
        .agent
        .until(|scrape| watch_is(scrape, "degraded") && scrape.get(AGE, &[]) > Some(0.5))?;
    ensure!(label_sets(&scrape, "trainer") == before, "{:?}", label_sets(&scrape, "trainer"));
    // First the watch that broke is told, then that there is nobody.
    cluster
        .world
        .agent
        .until(|_| feature(&cluster).is_ok_and(|(reason, _)| reason.contains("cannot be reached")))?;
    let (reason, remedy) = feature(&cluster)?;
    ensure!(reason.contains("keep their tenants"), "{reason}");
    ensure!(remedy.contains("NetworkPolicy"), "{remedy}");
    let late = cluster.pod("team-a", "late", &Notes::default())?;
    let _late = late.hold(&cluster, 0, 64)?;
    cluster.world.agent.until(|scrape| is(scrape, "late", "pod:team-a/late"))?;

    // Another server, with versions of its own. It does not know a pod that is gone meanwhile.
    fake.with(|state| {
        state.version = 3;
        state.pods = known[..1].to_vec();
        state.pods.push(Pod::new(&late.uid, "team-a", "late", &[("team", "red")]));
        state.refusals = vec![(504, "Timeout: Too large resource version", None)];
    });
    fake.serve().map_err(|error| anyhow!("{error}"))?;
    let scrape =
        cluster.world.agent.until(|scrape| is(scrape, "late", "team:red") && watch_is(scrape, "active"))?;
    ensure!(label_sets(&scrape, "trainer") == before, "{:?}", label_sets(&scrape, "trainer"));
    ensure!(is(&scrape, "claimer", "team:blue") && scrape.get(ERRORS, &[]) >= Some(1.0));
    Ok(())
}

#[test]
fn c05_a_namespace_makes_a_team_without_any_right() -> Result<()> {
    let mut cluster = Cluster::create(1, "tenant_namespace = true\n")?;
    let gpu = cluster.gpu(0);
    let trainer = cluster.pod("team-a", "trainer", &Notes::granted(std::slice::from_ref(&gpu)))?;
    let idle = cluster.pod("team-a", "idle", &Notes::granted(std::slice::from_ref(&gpu)))?;
    let other = cluster.pod("team-b", "other", &Notes::default())?;
    let _running = [trainer.hold(&cluster, 0, 64)?, other.hold(&cluster, 0, 64)?];
    let scrape = cluster.world.agent.until(|scrape| {
        is(scrape, "trainer", "team:team-a")
            && is(scrape, "other", "team:team-b")
            && [&trainer.name, &idle.name].iter().all(|pod| {
                tenant(scrape, "cotenant_gpu_grant_shares", pod)
                    .is_some_and(|(name, _)| name == "team:team-a")
            })
    })?;
    ensure!(tenant(&scrape, LIVE, "trainer").is_some_and(|(_, kind)| kind == "team"));
    ensure!(scrape.get(STATE, &[("feature", "api_watch"), ("state", "disabled")]) == Some(1.0));
    Ok(())
}

#[test]
fn c04_c82_a_refusal_names_the_role_and_a_pod_without_other_traces_is_named_once_let_in() -> Result<()> {
    let fake = server()?;
    fake.with(|state| {
        state.refusing = Some((403, "pods is forbidden: User cannot list resource pods", None));
    });
    let cluster = cluster(&fake)?;
    let uid = format!("7a1b2c3d-0001-4444-8888-{:012x}", std::process::id());
    let group = Cgroup::create(&format!("kubepods/burstable/pod{uid}/{:064x}", std::process::id()))?;
    let script = "init\nuuid 0\nretain 0\nalloc a 64MiB\nprint held\nwait\n";
    let mut bare = cluster.world.node.tenant("bare", &group, script, &[])?;
    bare.expect("held")?;
    let nameless = format!("pod:{uid}");
    let live = |scrape: &Scrape, name: &str| scrape.get(LIVE, &[("tenant", name)]).is_some();
    cluster.world.agent.until(|scrape| watch_is(scrape, "broken") && live(scrape, &nameless))?;
    let (reason, remedy) = feature(&cluster)?;
    ensure!(reason.contains("403") && reason.contains("forbidden"), "{reason}");
    ensure!(remedy.contains("deploy/kubernetes/api-watch.yaml"), "{remedy}");

    // The role is bound.
    fake.with(|state| {
        state.pods = vec![Pod::new(&uid, "team-c", "bare", &[("team", "green")])];
        state.refusing = None;
    });
    let scrape =
        cluster.world.agent.until(|scrape| watch_is(scrape, "active") && is(scrape, "bare", "team:green"))?;
    ensure!(tenant(&scrape, LIVE, "bare") == Some(("team:green".to_owned(), "team".to_owned())));
    ensure!(scrape.get(LIVE, &[("k8s_namespace_name", "team-c")]).is_some());
    let before = label_sets(&scrape, "bare");

    // Kubelet replaced the token, and the agent shows the new one.
    fake.with(|state| state.token = "two".to_owned());
    fake.cut();
    cluster.world.agent.until(|_| feature(&cluster).is_ok_and(|(reason, _)| reason.contains("401")))?;
    fake.write_token("two\n")?;
    cluster.world.agent.until(|scrape| watch_is(scrape, "active"))?;

    // A server that asks for patience gets it, and a doctor meanwhile says what the agent said.
    std::thread::sleep(Duration::from_secs(1));
    fake.with(|state| state.refusing = Some((429, "too many requests", Some(1))));
    fake.cut();
    cluster.world.agent.until(|_| feature(&cluster).is_ok_and(|(reason, _)| reason.contains("429")))?;
    fake.asked();
    std::thread::sleep(Duration::from_secs(3));
    let asked = fake.asked().len();
    ensure!((1..=3).contains(&asked), "asked {asked} times in 3 s for one second's patience each");
    fake.with(|state| state.refusing = Some((403, "pods is forbidden", None)));
    let doctor = cluster.world.node.doctor(&[], &[])?;
    let check = doctor.check("api_watch")?;
    ensure!(check["remedy"].as_str().is_some_and(|remedy| remedy.contains("api-watch.yaml")), "{check}");
    let after = label_sets(&cluster.world.agent.scrape()?, "bare");
    ensure!(after == before, "{after:?}, before {before:?}");
    Ok(())
}
