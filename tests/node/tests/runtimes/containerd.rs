//! Owns containerd with its CRI part, asked as kubelet asks it: a pod's sandbox and a container in it; and a container of
//! `ctr`, which knows of no pod.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tonic::transport::{Channel, Endpoint};

use crate::{
    Expected, HOST_PROC, Stage,
    enclosure::{Daemon, Leavings},
    image::{IMAGE, archive},
    merged,
};

mod cri {
    #![allow(clippy::pedantic, missing_debug_implementations, unreachable_pub, reason = "generated")]
    include!(concat!(env!("OUT_DIR"), "/kubelet/runtime.v1.rs"));
}

use cri::runtime_service_client::RuntimeServiceClient;

const UID: &str = "6a1b2c3d-0000-4444-8888-00c0ffee0001";

/// `socket`: not in the enclosure's `/run`, where this process is not. `bundles`: the state directory, which has them.
fn configuration(socket: &Path, bundles: &str) -> String {
    format!(
        "version = 2\nstate = \"{bundles}\"\n\
         disabled_plugins = [\"io.containerd.snapshotter.v1.btrfs\", \"io.containerd.snapshotter.v1.zfs\", \
         \"io.containerd.snapshotter.v1.devmapper\"]\n\
         [grpc]\naddress = \"{}\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"{IMAGE}\"\nrestrict_oom_score_adj = true\n\
         [plugins.\"io.containerd.grpc.v1.cri\".containerd]\nsnapshotter = \"native\"\n",
        socket.display()
    )
}

struct Containerd {
    _daemon: Daemon,
    socket: PathBuf,
}

impl Containerd {
    fn start(stage: &Stage, socket: &Path, bundles: &str) -> Result<Self> {
        let file = stage.directory().join("containerd.toml");
        fs::write(&file, configuration(socket, bundles))?;
        let config = file.display().to_string();
        let mut daemon = stage.enclosure.daemon("containerd", &["containerd", "--config", &config], &[])?;
        let ctr = |words: &[&str]| ctr(stage, socket, words);
        daemon.until(|| ctr(&["version"]).is_ok())?;
        let archive = archive(&stage.directory())?.display().to_string();
        for namespace in ["k8s.io", "default"] {
            let import = ["--namespace", namespace, "images", "import", "--snapshotter", "native", &archive];
            ctr(&import).with_context(|| daemon.log())?;
        }
        Ok(Self { _daemon: daemon, socket: socket.to_owned() })
    }
}

fn ctr(stage: &Stage, socket: &Path, words: &[&str]) -> Result<String> {
    let socket = socket.display().to_string();
    stage.enclosure.run(&[&["ctr", "--address", &socket], words].concat())
}

/// A pod as kubelet makes it.
struct Pod {
    client: RuntimeServiceClient<Channel>,
    runtime: tokio::runtime::Runtime,
    sandbox: String,
    container: String,
}

fn labels(container: Option<&str>) -> HashMap<String, String> {
    let pod = [("pod.name", "trainer-0"), ("pod.namespace", "team-a"), ("pod.uid", UID)];
    let all = pod.into_iter().chain(container.map(|name| ("container.name", name)));
    all.map(|(key, value)| (format!("io.kubernetes.{key}"), value.to_owned())).collect()
}

impl Pod {
    fn run(stage: &Stage, containerd: &Containerd) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let endpoint = Endpoint::from_shared(format!("unix:{}", containerd.socket.display()))?;
        let mut client = RuntimeServiceClient::new(runtime.block_on(endpoint.connect())?);
        let node = || cri::NamespaceOption { network: cri::NamespaceMode::Node.into(), pid: 0 };
        let config = cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: "trainer-0".to_owned(),
                uid: UID.to_owned(),
                namespace: "team-a".to_owned(),
            }),
            log_directory: String::new(),
            labels: labels(None),
            linux: Some(cri::LinuxPodSandboxConfig {
                cgroup_parent: format!("/kubepods/besteffort/pod{UID}"),
                security_context: Some(cri::LinuxSandboxSecurityContext { namespace_options: Some(node()) }),
            }),
        };
        let wanted = cri::RunPodSandboxRequest { config: Some(config.clone()) };
        let sandbox = runtime.block_on(client.run_pod_sandbox(wanted))?.into_inner().pod_sandbox_id;
        let mount =
            |of: &str, at: &str| cri::Mount { container_path: at.to_owned(), host_path: of.to_owned() };
        let directory = stage.directory().display().to_string();
        let container = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: "main".to_owned() }),
            image: Some(cri::ImageSpec { image: IMAGE.to_owned() }),
            command: vec!["/tenant".to_owned(), stage.script()?],
            envs: stage
                .environment(true)
                .into_iter()
                .map(|(key, value)| cri::KeyValue { key: key.to_owned(), value })
                .collect(),
            mounts: vec![mount(&directory, &directory), mount("/proc", HOST_PROC)],
            labels: labels(Some("main")),
            log_path: String::new(),
            linux: Some(cri::LinuxContainerConfig {
                security_context: Some(cri::LinuxContainerSecurityContext {
                    namespace_options: Some(node()),
                }),
            }),
        };
        let wanted = cri::CreateContainerRequest {
            pod_sandbox_id: sandbox.clone(),
            config: Some(container),
            sandbox_config: Some(config),
        };
        let made = runtime.block_on(client.create_container(wanted))?.into_inner();
        let container = made.container_id.clone();
        runtime.block_on(client.start_container(made))?;
        Ok(Self { client, runtime, sandbox, container })
    }

    fn end(mut self) -> Result<()> {
        let name = cri::PodSandboxName { pod_sandbox_id: self.sandbox.clone() };
        self.runtime.block_on(self.client.stop_pod_sandbox(name.clone()))?;
        self.runtime.block_on(self.client.remove_pod_sandbox(name))?;
        Ok(())
    }
}

/// What `identify` says of the container, but for what depends on how much the agent may ask.
fn identity(container: &str) -> Value {
    json!({
        "kind": "kubernetes_container", "id": container, "container_id": container, "pod_uid": UID, "uid": 0,
    })
}

const PROGRAMS: [&str; 3] = ["containerd", "ctr", "runc"];

fn holds(stage: &Stage, containerd: &Containerd) -> Result<()> {
    let pod = Pod::run(stage, containerd)?;
    let named =
        json!({ "name": "team-a/trainer-0", "namespace": "team-a", "pod": "trainer-0", "container": "main" });
    let expected = Expected {
        tenant: "pod:team-a/trainer-0",
        labels: &[
            ("tenant_kind", "pod"),
            ("k8s_namespace_name", "team-a"),
            ("k8s_pod_name", "trainer-0"),
            ("k8s_container_name", "main"),
        ],
        identity: merged(&identity(&pod.container), &named),
    };
    let held = stage.expect(&expected).map(|_| ());
    pod.end()?;
    held
}

/// The usual place of what containerd runs.
const BUNDLES: &str = "/run/containerd";

#[test]
#[ignore = "needs containerd: make test-runtimes"]
fn c83_a_pod_of_containerd_is_named_by_what_its_bundle_says() -> Result<()> {
    let _leavings = Leavings::of(&["kubepods"])?;
    let stage = Stage::set(&PROGRAMS, "[kubernetes]\nenabled = \"off\"\n")?;
    let containerd = Containerd::start(&stage, &stage.directory().join("containerd.sock"), BUNDLES)?;
    holds(&stage, &containerd)
}

#[test]
#[ignore = "needs containerd: make test-runtimes"]
fn c83_a_pod_of_containerd_is_named_by_its_socket() -> Result<()> {
    let _leavings = Leavings::of(&["kubepods"])?;
    let place = tempfile::tempdir()?;
    let socket = place.path().join("containerd.sock");
    let settings = format!("[kubernetes]\nruntimes = [\"{}\"]\ninterval = \"200ms\"\n", socket.display());
    let stage = Stage::set(&PROGRAMS, &settings)?;
    // Its bundles are where nobody looks: what names the pod is the answer of the configured socket.
    let containerd = Containerd::start(&stage, &socket, &place.path().join("bundles").display().to_string())?;
    holds(&stage, &containerd)
}

#[test]
#[ignore = "needs containerd: make test-runtimes"]
fn a_container_of_ctr_is_containerds() -> Result<()> {
    let _leavings = Leavings::of(&["default"])?;
    let stage = Stage::set(&PROGRAMS, "")?;
    let socket = stage.directory().join("containerd.sock");
    let _containerd = Containerd::start(&stage, &socket, BUNDLES)?;
    let directory = stage.directory().display().to_string();
    let bind = |of: &str, at: &str| format!("type=bind,src={of},dst={at},options=rbind:rw");
    let (own, proc) = (bind(&directory, &directory), bind("/proc", HOST_PROC));
    let environment: Vec<String> =
        stage.environment(true).iter().map(|(key, value)| format!("{key}={value}")).collect();
    let script = stage.script()?;
    let mut words = vec!["run", "--detach", "--snapshotter", "native", "--mount", &own, "--mount", &proc];
    words.extend(environment.iter().flat_map(|row| ["--env", row]));
    words.extend([IMAGE, "bench-7", "/tenant", &script]);
    ctr(&stage, &socket, &words)?;
    let expected = Expected {
        tenant: "containerd:bench-7",
        labels: &[("tenant_kind", "containerd")],
        identity: json!({
            "kind": "containerd_container", "id": "bench-7", "container_id": "bench-7", "runtime": "containerd", "uid": 0,
        }),
    };
    let held = stage.expect(&expected);
    ctr(&stage, &socket, &["tasks", "kill", "--signal", "KILL", "bench-7"])?;
    ensure!(held.is_ok(), "{held:?}");
    Ok(())
}
