//! Owns a kubelet and a runtime that answer over real sockets, fail, hang and come back.

use std::{collections::HashMap, fs, path::Path, sync::Mutex};

use cotenant_model::grant::GrantState;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

use super::{
    ask::{
        cri::{self, runtime_service_server},
        podresources::{self, pod_resources_lister_server},
    },
    *,
};
use crate::{HostNames, names::Names};

const UID: &str = "6a1b2c3d-0000-4444-8888-123456789abc";
const GPU: &str = "GPU-6a1b2c3d-1111-4444-8888-123456789abc";
const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mood {
    Answers,
    Fails,
    Hangs,
}

#[derive(Clone)]
struct Fake {
    mood: Arc<Mutex<Mood>>,
    questions: Arc<std::sync::atomic::AtomicU64>,
}

impl Fake {
    fn set(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    async fn mood(&self) -> Result<(), Status> {
        self.questions.fetch_add(1, Ordering::Relaxed);
        let mood = *self.mood.lock().unwrap();
        match mood {
            Mood::Answers => Ok(()),
            Mood::Fails => Err(Status::resource_exhausted("too many requests")),
            Mood::Hangs => {
                tokio::time::sleep(Duration::from_hours(1)).await;
                Ok(())
            }
        }
    }
}

#[tonic::async_trait]
impl pod_resources_lister_server::PodResourcesLister for Fake {
    async fn list(
        &self,
        _: Request<podresources::ListPodResourcesRequest>,
    ) -> Result<Response<podresources::ListPodResourcesResponse>, Status> {
        self.mood().await?;
        let devices = |resource: &str, ids: &[&str]| podresources::ContainerDevices {
            resource_name: resource.into(),
            device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        };
        let pod = |namespace: &str, name: &str, devices, dynamic_resources| podresources::PodResources {
            name: name.into(),
            namespace: namespace.into(),
            containers: vec![podresources::ContainerResources {
                name: "main".into(),
                devices,
                dynamic_resources,
            }],
        };
        let claim = podresources::DynamicResource {
            claim_name: "c".into(),
            claim_namespace: "team-b".into(),
            claim_resources: vec![podresources::ClaimResource {
                driver_name: "gpu.nvidia.com".into(),
                pool_name: "node1".into(),
                device_name: "gpu-0".into(),
            }],
        };
        Ok(Response::new(podresources::ListPodResourcesResponse {
            pod_resources: vec![
                pod(
                    "team-a",
                    "trainer-0",
                    vec![
                        devices("nvidia.com/gpu.shared", &[&format!("{GPU}::1"), "junk"]),
                        // The same resource on a second NUMA node.
                        devices("nvidia.com/gpu.shared", &[&format!("{GPU}::2")]),
                        devices("example.com/foo", &["x"]),
                    ],
                    vec![],
                ),
                pod("team-a", "finished", vec![devices("nvidia.com/gpu", &[GPU])], vec![]),
                pod("team-b", "claims", vec![], vec![claim]),
                pod(
                    "kai-resource-reservation",
                    "gpu-reservation-1",
                    vec![devices("nvidia.com/gpu", &[GPU])],
                    vec![],
                ),
            ],
        }))
    }
}

#[tonic::async_trait]
impl runtime_service_server::RuntimeService for Fake {
    async fn list_pod_sandbox(
        &self,
        _: Request<cri::ListPodSandboxRequest>,
    ) -> Result<Response<cri::ListPodSandboxResponse>, Status> {
        use cri::PodSandboxState::{SandboxNotready, SandboxReady};
        self.mood().await?;
        let sandbox = |name: &str, state: cri::PodSandboxState, mebibytes: &str| cri::PodSandbox {
            id: name.into(),
            metadata: Some(cri::PodSandboxMetadata {
                name: name.into(),
                uid: format!("uid-of-{name}"),
                namespace: "team-a".into(),
            }),
            state: state.into(),
            labels: HashMap::from([("runai-gpu-group".to_owned(), "g".to_owned())]),
            annotations: HashMap::from([("gpu-memory".to_owned(), mebibytes.to_owned())]),
        };
        Ok(Response::new(cri::ListPodSandboxResponse {
            items: vec![
                sandbox("trainer-0", SandboxReady, "2000"),
                sandbox("finished", SandboxNotready, "3000"),
                sandbox("", SandboxReady, "1"),
            ],
        }))
    }

    async fn list_containers(
        &self,
        _: Request<cri::ListContainersRequest>,
    ) -> Result<Response<cri::ListContainersResponse>, Status> {
        self.mood().await?;
        let labels = |uid: &str, pod: &str| -> HashMap<String, String> {
            [("pod.uid", uid), ("pod.namespace", "team-a"), ("pod.name", pod), ("container.name", "main")]
                .into_iter()
                .map(|(key, value)| (format!("io.kubernetes.{key}"), value.to_owned()))
                .collect()
        };
        let gone = "ffffffff-0000-4444-8888-123456789abc";
        Ok(Response::new(cri::ListContainersResponse {
            containers: vec![
                cri::Container { id: ID.into(), labels: labels(UID, "trainer-0") },
                cri::Container { id: "f".into(), labels: labels(gone, "finished") },
                cri::Container { id: "e".into(), labels: HashMap::new() },
                cri::Container { id: "d".into(), labels: labels("u\n", "\u{202e}") },
            ],
        }))
    }
}

/// Both services on one socket each, for as long as the runtime lives.
fn serve(directory: &Path) -> (tokio::runtime::Runtime, Fake) {
    let fake = Fake { mood: Arc::new(Mutex::new(Mood::Answers)), questions: Arc::default() };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for socket in ["kubelet.sock", "cri.sock"] {
        let path = directory.join(socket);
        let _ = fs::remove_file(&path);
        let _guard = runtime.enter();
        let listener = UnixListenerStream::new(UnixListener::bind(path).unwrap());
        let server = Server::builder()
            .add_service(pod_resources_lister_server::PodResourcesListerServer::new(fake.clone()))
            .add_service(runtime_service_server::RuntimeServiceServer::new(fake.clone()));
        runtime.spawn(async move { server.serve_with_incoming(listener).await });
    }
    (runtime, fake)
}

fn config(directory: &Path) -> KubeletConfig {
    KubeletConfig {
        podresources: directory.join("kubelet.sock"),
        runtimes: vec![directory.join("absent.sock"), directory.join("cri.sock")],
        interval: Duration::from_millis(50),
        deadline: Duration::from_millis(200),
        resources: Vec::new(),
    }
}

/// Until `ready`, or the test fails.
fn until(kubelet: &Kubelet, what: &str, ready: impl Fn(&Listing) -> bool) -> Arc<Listing> {
    let begun = Instant::now();
    loop {
        let listing = kubelet.heard.latest();
        if ready(&listing) {
            return listing;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}: {listing:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn host() -> (tempfile::TempDir, Host) {
    let root = tempfile::tempdir().unwrap();
    let pod = root.path().join(format!("sys/fs/cgroup/kubepods/burstable/pod{UID}"));
    fs::create_dir_all(&pod).unwrap();
    fs::write(root.path().join("sys/fs/cgroup/cgroup.procs"), "").unwrap();
    let host = Host::at(root.path());
    (root, host)
}

#[test]
fn c05_c09_c28_grants_are_facts_with_their_pods() {
    let (root, host) = host();
    let (_runtime, _fake) = serve(root.path());
    let kubelet = Kubelet::spawn(host, config(root.path())).unwrap();
    let listing = until(&kubelet, "grants", |listing| listing.grants.len() == 4);
    let of = |pod: &str| listing.grants.iter().find(|grant| grant.pod == pod).unwrap();
    let trainer = of("trainer-0");
    assert_eq!((trainer.pod_uid.as_deref(), trainer.devices.len()), (Some(UID), 2));
    assert_eq!(trainer.gpus(|_| None).len(), 1);
    assert_eq!(listing.unread_ids, 1);
    let state = |pod: &str| of(pod).state(listing.live.as_ref(), listing.all_named);
    assert_eq!(state("trainer-0"), GrantState::Held);
    assert_eq!(state("finished"), GrantState::Stale);
    assert_eq!(state("gpu-reservation-1"), GrantState::Reservation);
    assert!(matches!(
        of("claims").devices.as_slice(),
        [cotenant_model::grant::GrantedDevice::Claimed { .. }]
    ));
}

#[test]
fn c19_c28_sandboxes_say_what_running_pods_asked_for() {
    let (root, host) = host();
    let (_runtime, _fake) = serve(root.path());
    let kubelet = Kubelet::spawn(host, config(root.path())).unwrap();
    let listing = until(&kubelet, "sandboxes", |listing| !listing.declared.is_empty());
    let [declared] = listing.declared.as_slice() else { panic!("{:?}", listing.declared) };
    assert_eq!((declared.namespace.as_str(), declared.pod.as_str()), ("team-a", "trainer-0"));
    assert_eq!((declared.requests.len(), declared.groups.len()), (1, 1));
    assert_eq!(listing.pod("uid-of-trainer-0").unwrap().pod, "trainer-0");
    assert!(listing.pod("uid-of-finished").is_none());
}

#[test]
fn c08_names_and_grants_outlive_errors_hangs_and_restarts() {
    let (root, host) = host();
    let (runtime, fake) = serve(root.path());
    let kubelet = Kubelet::spawn(host.clone(), config(root.path())).unwrap();
    let names = HostNames::new(host).with(&kubelet);
    let same = || {
        let pod = names.pod(UID, None).unwrap();
        assert_eq!((pod.namespace.as_str(), pod.pod.as_str()), ("team-a", "trainer-0"));
        assert_eq!(names.pod_container(UID, ID).as_deref(), Some("main"));
        assert_eq!(names.pod_of(ID).as_deref(), Some(UID));
        assert_eq!(kubelet.heard.latest().grants.len(), 4);
    };
    until(&kubelet, "a first answer", |listing| {
        listing.podresources.answered.is_some() && listing.runtime.answered.is_some()
    });
    same();

    for mood in [Mood::Fails, Mood::Hangs] {
        let before = kubelet.heard.latest();
        fake.set(mood);
        let failed = until(&kubelet, "failures", |listing| {
            listing.podresources.failures > before.podresources.failures
                && listing.runtime.failures > before.runtime.failures
        });
        assert!(failed.podresources.error.is_some());
        same();
        fake.set(Mood::Answers);
        let begun = Instant::now();
        until(&kubelet, "an answer again", |listing| {
            listing.podresources.answered.is_some_and(|at| at > begun) && listing.podresources.error.is_none()
        });
        same();
    }

    // kubelet restarts: the socket is a new file.
    drop(runtime);
    let failures = kubelet.heard.latest().podresources.failures;
    until(&kubelet, "an outage", |listing| listing.podresources.failures > failures);
    same();
    let (_runtime, _fake) = serve(root.path());
    let begun = Instant::now();
    until(&kubelet, "the new socket", |listing| listing.podresources.answered.is_some_and(|at| at > begun));
    same();
}

#[test]
fn a_source_that_fails_is_asked_less_and_one_that_is_absent_is_no_failure() {
    let (root, host) = host();
    let (_runtime, fake) = serve(root.path());
    fake.set(Mood::Fails);
    let kubelet = Kubelet::spawn(host.clone(), config(root.path())).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    // At 50 ms it would be forty questions of two kinds.
    let questions = fake.questions.load(Ordering::Relaxed);
    assert!((2..=16).contains(&questions), "{questions}");
    drop(kubelet);

    let empty = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::spawn(host, config(empty.path())).unwrap();
    let listing = kubelet.heard.first();
    assert!(listing.runtime.error.is_some());
    assert_eq!((listing.runtime.failures, listing.podresources.failures), (0, 0));
    assert_eq!(listing.podresources.age(), None);
}

#[test]
fn hostile_labels_are_cleaned() {
    let (root, host) = host();
    let (_runtime, _fake) = serve(root.path());
    let kubelet = Kubelet::spawn(host, config(root.path())).unwrap();
    let listing = until(&kubelet, "names", |listing| listing.runtime.answered.is_some());
    let pod = listing.pod("u\\u{a}").unwrap();
    assert_eq!(pod.pod, "\\u{202e}");
}
