//! Owns a Kubernetes node as far as the agent sees one: kubelet's and the runtime's sockets, pods' cgroups, log directories.
//! Refuses to stand in for the agent's clients: they speak gRPC over these sockets as they would to the real ones.

use std::{
    collections::HashMap,
    fs,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result};
use cotenant_model::GpuId;
use cotenant_node::{Cgroup, Tenant, World};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

mod podresources {
    #![allow(clippy::pedantic, missing_debug_implementations, unreachable_pub, reason = "generated")]
    tonic::include_proto!("v1");
}

mod cri {
    #![allow(clippy::pedantic, missing_debug_implementations, unreachable_pub, reason = "generated")]
    tonic::include_proto!("runtime.v1");
}

/// What both sockets answer.
#[derive(Default)]
struct Answers {
    failing: bool,
    granted: Vec<podresources::PodResources>,
    containers: Vec<cri::Container>,
    sandboxes: Vec<cri::PodSandbox>,
}

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Answers>>);

impl Fake {
    fn with<T>(&self, change: impl FnOnce(&mut Answers) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn answer<T>(&self, pick: impl FnOnce(&Answers) -> T) -> Result<Response<T>, Status> {
        self.with(|answers| {
            let ill = answers.failing.then(|| Status::internal("kubelet is ill"));
            ill.map_or_else(|| Ok(Response::new(pick(answers))), Err)
        })
    }
}

#[tonic::async_trait]
impl podresources::pod_resources_lister_server::PodResourcesLister for Fake {
    async fn list(
        &self,
        _: Request<podresources::ListPodResourcesRequest>,
    ) -> Result<Response<podresources::ListPodResourcesResponse>, Status> {
        self.answer(|answers| podresources::ListPodResourcesResponse {
            pod_resources: answers.granted.clone(),
        })
    }
}

#[tonic::async_trait]
impl cri::runtime_service_server::RuntimeService for Fake {
    async fn list_pod_sandbox(
        &self,
        _: Request<cri::ListPodSandboxRequest>,
    ) -> Result<Response<cri::ListPodSandboxResponse>, Status> {
        self.answer(|answers| cri::ListPodSandboxResponse { items: answers.sandboxes.clone() })
    }

    async fn list_containers(
        &self,
        _: Request<cri::ListContainersRequest>,
    ) -> Result<Response<cri::ListContainersResponse>, Status> {
        self.answer(|answers| cri::ListContainersResponse { containers: answers.containers.clone() })
    }
}

/// A simulated node with the agent on it, which takes it for a node of Kubernetes.
pub(crate) struct Cluster {
    pub(crate) world: World,
    fake: Fake,
    pods: usize,
    _runtime: tokio::runtime::Runtime,
    directory: tempfile::TempDir,
}

impl Cluster {
    /// `extra`: settings after the section `[kubernetes]`.
    pub(crate) fn create(gpus: usize, extra: &str) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let fake = Fake::default();
        let place = |name: &str| directory.path().join(name);
        fs::create_dir(place("logs"))?;
        for socket in ["kubelet.sock", "cri.sock"] {
            let _guard = runtime.enter();
            let listener = UnixListenerStream::new(UnixListener::bind(place(socket))?);
            let server = Server::builder()
                .add_service(podresources::pod_resources_lister_server::PodResourcesListerServer::new(
                    fake.clone(),
                ))
                .add_service(cri::runtime_service_server::RuntimeServiceServer::new(fake.clone()));
            runtime.spawn(async move { server.serve_with_incoming(listener).await });
        }
        let settings = format!(
            "[kubernetes]\npodresources = \"{}\"\nruntimes = [\"{}\"]\npod_logs = \"{}\"\ninterval = \"200ms\"\n{extra}",
            place("kubelet.sock").display(),
            place("cri.sock").display(),
            place("logs").display()
        );
        let world = World::create(gpus, &settings)?;
        Ok(Self { world, fake, pods: 0, _runtime: runtime, directory })
    }

    pub(crate) fn gpu(&self, index: usize) -> String {
        GpuId::from_uuid(self.world.node.state.uuid(index)).as_str().to_owned()
    }

    /// Both sockets answer with errors, or again as they should.
    pub(crate) fn fail(&self, failing: bool) {
        self.fake.with(|answers| answers.failing = failing);
    }

    /// A pod of one container, with its cgroup and what kubelet and the runtime leave of it.
    pub(crate) fn pod(&mut self, namespace: &str, name: &str, notes: &Notes<'_>) -> Result<Pod> {
        self.pods += 1;
        let uid = format!("6a1b2c3d-{:04x}-4444-8888-{:012x}", self.pods, std::process::id());
        let id = format!("{:064x}", u128::from(std::process::id()) << 32 | self.pods as u128);
        let logs = self.directory.path().join(format!("logs/{namespace}_{name}_{uid}/main"));
        fs::create_dir_all(logs)?;
        let own = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let mut labels = own(&[
            ("io.kubernetes.pod.uid", &uid),
            ("io.kubernetes.pod.namespace", namespace),
            ("io.kubernetes.pod.name", name),
        ]);
        labels.extend(own(notes.labels));
        let metadata = cri::PodSandboxMetadata {
            name: name.to_owned(),
            uid: uid.clone(),
            namespace: namespace.to_owned(),
        };
        let sandbox = cri::PodSandbox {
            id: format!("{id}-sandbox"),
            metadata: Some(metadata),
            state: cri::PodSandboxState::SandboxReady.into(),
            labels: labels.clone(),
            annotations: own(notes.annotations),
        };
        labels.insert("io.kubernetes.container.name".to_owned(), "main".to_owned());
        let granted = podresources::PodResources {
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            containers: vec![podresources::ContainerResources {
                name: "main".to_owned(),
                devices: notes
                    .granted
                    .iter()
                    .map(|(resource, ids)| podresources::ContainerDevices {
                        resource_name: (*resource).to_owned(),
                        device_ids: ids.clone(),
                    })
                    .collect(),
                dynamic_resources: Vec::new(),
            }],
        };
        self.fake.with(|answers| {
            answers.containers.push(cri::Container { id: id.clone(), labels });
            answers.sandboxes.push(sandbox);
            answers.granted.push(granted);
        });
        let cgroup = Cgroup::create(&format!("kubepods/burstable/pod{uid}/{id}"))?;
        Ok(Pod { name: name.to_owned(), uid, cgroup })
    }

    /// The pod is over and gone, and kubelet goes on listing it.
    pub(crate) fn finish(&self, pod: Pod) {
        self.fake.with(|answers| {
            answers.containers.retain(|of| of.labels.get("io.kubernetes.pod.uid") != Some(&pod.uid));
            let sandboxes = answers.sandboxes.iter_mut();
            for sandbox in sandboxes.filter(|of| of.metadata.as_ref().is_some_and(|of| of.uid == pod.uid)) {
                sandbox.state = cri::PodSandboxState::SandboxNotready.into();
            }
        });
        drop(pod);
    }
}

/// What a pod has beside its name.
#[derive(Clone, Default)]
pub(crate) struct Notes<'a> {
    pub(crate) granted: Vec<(&'a str, Vec<String>)>,
    pub(crate) annotations: &'a [(&'a str, &'a str)],
    pub(crate) labels: &'a [(&'a str, &'a str)],
}

impl Notes<'_> {
    pub(crate) fn granted(ids: &[String]) -> Self {
        Self { granted: vec![("nvidia.com/gpu", ids.to_vec())], ..Self::default() }
    }
}

pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) uid: String,
    cgroup: Cgroup,
}

impl Pod {
    /// A process of it that holds so much of a GPU.
    pub(crate) fn hold(&self, cluster: &Cluster, gpu: usize, mebibytes: u64) -> Result<Tenant> {
        self.run(cluster, &self.name, gpu, &format!("alloc a {mebibytes}MiB\nprint held\nwait\n"))
    }

    /// A process of it that says `held` and goes on.
    pub(crate) fn run(&self, cluster: &Cluster, name: &str, gpu: usize, script: &str) -> Result<Tenant> {
        let script = format!("init\nuuid {gpu}\nretain {gpu}\n{script}");
        let mut tenant = cluster.world.node.tenant(name, &self.cgroup, &script, &[])?;
        tenant.expect("held").with_context(|| format!("{name} on GPU {gpu}"))?;
        Ok(tenant)
    }
}

/// What NVML does wrong from here on.
pub(crate) fn faults(node: &Path, wanted: &serde_json::Value) -> Result<()> {
    fs::write(node.join("nvml.json.new"), wanted.to_string())?;
    Ok(fs::rename(node.join("nvml.json.new"), node.join("nvml.json"))?)
}
