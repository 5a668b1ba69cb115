//! Owns one question to a socket: connect, call, deadline, bounded answer.
//! Refuses to read it: `listing` does.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tonic::transport::{Channel, Endpoint};

pub(crate) mod podresources {
    #![allow(clippy::pedantic, unreachable_pub, missing_debug_implementations, reason = "generated")]
    tonic::include_proto!("v1");
}

pub(crate) mod cri {
    #![allow(clippy::pedantic, unreachable_pub, missing_debug_implementations, reason = "generated")]
    tonic::include_proto!("runtime.v1");
}

/// What kubelet's own clients accept.
const MAX_ANSWER: usize = 16 << 20;

#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    #[error("nothing listens at {}; mount it from the host if this is a Kubernetes node", path.display())]
    Absent { path: PathBuf },
    #[error("could not connect to {}; is the process that owns it running?", path.display())]
    Connect { path: PathBuf, source: tonic::transport::Error },
    #[error("{} answered with an error", path.display())]
    Call { path: PathBuf, source: Box<tonic::Status> },
    #[error("{} did not answer within {deadline:?}", path.display())]
    Deadline { path: PathBuf, deadline: Duration },
}

impl AskError {
    /// No Kubernetes here: no socket, or a containerd that Docker brought, without its CRI part.
    pub(crate) fn is_absence(&self) -> bool {
        match self {
            Self::Absent { .. } => true,
            Self::Call { source, .. } => source.code() == tonic::Code::Unimplemented,
            Self::Connect { .. } | Self::Deadline { .. } => false,
        }
    }
}

pub(crate) async fn pod_resources(
    socket: &Path,
    deadline: Duration,
) -> Result<Vec<podresources::PodResources>, AskError> {
    let path = socket.to_owned();
    let call = async {
        let channel = connect(socket).await?;
        let mut client = podresources::pod_resources_lister_client::PodResourcesListerClient::new(channel)
            .max_decoding_message_size(MAX_ANSWER);
        let answer = client.list(podresources::ListPodResourcesRequest {}).await;
        answer.map(|answer| answer.into_inner().pod_resources).map_err(|status| refused(socket, status))
    };
    tokio::time::timeout(deadline, call).await.unwrap_or(Err(AskError::Deadline { path, deadline }))
}

/// What a runtime has of Kubernetes.
#[derive(Debug, Default)]
pub(crate) struct Pods {
    pub(crate) containers: Vec<cri::Container>,
    pub(crate) sandboxes: Vec<cri::PodSandbox>,
}

/// Of the first runtime that is there.
pub(crate) async fn pods(sockets: &[PathBuf], deadline: Duration) -> Result<Pods, AskError> {
    let first = sockets.iter().find(|socket| socket.exists());
    let Some(socket) = first.or(sockets.first()) else {
        return Err(AskError::Absent { path: PathBuf::new() });
    };
    let call = async {
        let channel = connect(socket).await?;
        let mut client = cri::runtime_service_client::RuntimeServiceClient::new(channel)
            .max_decoding_message_size(MAX_ANSWER);
        let refused = |status| refused(socket, status);
        let containers = client.list_containers(cri::ListContainersRequest {}).await.map_err(refused)?;
        let sandboxes = match client.list_pod_sandbox(cri::ListPodSandboxRequest {}).await {
            Ok(sandboxes) => sandboxes.into_inner().items,
            // Names do not depend on it.
            Err(status) if status.code() == tonic::Code::Unimplemented => Vec::new(),
            Err(status) => return Err(refused(status)),
        };
        Ok(Pods { containers: containers.into_inner().containers, sandboxes })
    };
    let late = AskError::Deadline { path: socket.clone(), deadline };
    tokio::time::timeout(deadline, call).await.unwrap_or(Err(late))
}

async fn connect(socket: &Path) -> Result<Channel, AskError> {
    if !socket.exists() {
        return Err(AskError::Absent { path: socket.to_owned() });
    }
    let failed = |source| AskError::Connect { path: socket.to_owned(), source };
    let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).map_err(failed)?;
    endpoint.connect().await.map_err(failed)
}

fn refused(socket: &Path, status: tonic::Status) -> AskError {
    AskError::Call { path: socket.to_owned(), source: Box::new(status) }
}
