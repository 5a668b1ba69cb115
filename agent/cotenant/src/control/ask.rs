//! Owns `cotenant release`, `resume` and `health`: what is asked of the agent on this node.
//! Refuses to touch the driver itself.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail};
use clap::Args;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Method, Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde::Deserialize;

use super::{WITHIN, door::knock};
use crate::config::{self, Overrides};

const LONGEST: usize = 64 << 10;

#[derive(Args, Debug)]
struct Where {
    /// The agent's socket [default: agent.control of the configuration]
    #[arg(long, value_name = "FILE")]
    socket: Option<PathBuf>,
    /// Configuration file [default: /etc/cotenant/cotenant.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct ReleaseOptions {
    /// Come back by itself after this long, such as 10m [default: when asked by `cotenant resume`]
    #[arg(long = "for", value_name = "DURATION", value_parser = humantime::parse_duration)]
    length: Option<Duration>,
    #[command(flatten)]
    at: Where,
}

#[derive(Args, Debug)]
pub(crate) struct ResumeOptions {
    #[command(flatten)]
    at: Where,
}

#[derive(Args, Debug)]
pub(crate) struct HealthOptions {
    /// Whether attribution works, as /readyz, and not only whether the agent ticks, as /healthz
    #[arg(long)]
    ready: bool,
    #[command(flatten)]
    at: Where,
}

#[derive(Debug)]
pub(crate) enum Ask<'a> {
    Release(&'a ReleaseOptions),
    Resume(&'a ResumeOptions),
    /// For probes that have no client certificate.
    Health(&'a HealthOptions),
}

#[derive(Deserialize)]
struct Answer {
    state: String,
    until_unix: Option<u64>,
}

pub(crate) fn run(ask: &Ask<'_>) -> Result<()> {
    let (at, target) = match ask {
        Ask::Release(ReleaseOptions { length: Some(length), at }) => {
            (at, format!("/release?for={}ms", length.as_millis()))
        }
        Ask::Release(ReleaseOptions { length: None, at }) => (at, "/release".to_owned()),
        Ask::Resume(ResumeOptions { at }) => (at, "/resume".to_owned()),
        Ask::Health(HealthOptions { ready: true, at }) => (at, "/readyz".to_owned()),
        Ask::Health(HealthOptions { ready: false, at }) => (at, "/healthz".to_owned()),
    };
    let method = if matches!(ask, Ask::Health(_)) { Method::GET } else { Method::POST };
    let socket = if let Some(socket) = &at.socket {
        socket.clone()
    } else {
        let overrides = Overrides { config: at.config.clone(), ..Overrides::default() };
        config::load(&overrides)?.agent.control
    };
    if socket.as_os_str().is_empty() {
        bail!(
            "agent.control is \"\", so the agent hears no commands: send it SIGUSR1 (release) or SIGUSR2 (resume), and ask \
             its pages for its health"
        );
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    let said = runtime
        .block_on(async { tokio::time::timeout(WITHIN * 2, say(&socket, &method, &target)).await })
        .with_context(|| format!("the agent on {} does not answer", socket.display()))??;
    match ask {
        Ask::Health(_) => println!("{}", said.trim_end()),
        Ask::Release(_) | Ask::Resume(_) => println!("{}", told(&said)?),
    }
    Ok(())
}

async fn say(socket: &std::path::Path, method: &Method, target: &str) -> Result<String> {
    let stream = knock(socket).await?;
    let (mut sender, driver) = http1::handshake(TokioIo::new(stream)).await.context("the agent hung up")?;
    tokio::spawn(driver);
    let request = Request::builder()
        .method(method)
        .uri(target)
        .header(hyper::header::HOST, "agent")
        .body(Empty::<Bytes>::new())
        .context("a request")?;
    let answer = sender
        .send_request(request)
        .await
        .context("the agent hung up: only root and the agent's own user are heard")?;
    let status = answer.status();
    let body =
        Limited::new(answer.into_body(), LONGEST).collect().await.map_err(|error| anyhow::anyhow!(error))?;
    let text = String::from_utf8_lossy(&body.to_bytes()).into_owned();
    if !status.is_success() {
        bail!("{}", text.trim_end());
    }
    Ok(text)
}

/// What a release or a resume came to.
fn told(text: &str) -> Result<String> {
    let Answer { state, until_unix } = serde_json::from_str(text).context("is that a cotenant agent?")?;
    Ok(match (state.as_str(), until_unix) {
        ("released", Some(until)) => {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            format!(
                "released: nothing of the driver is held; back in {} s",
                until.saturating_sub(now.as_secs())
            )
        }
        ("released", None) => "released: nothing of the driver is held, until `cotenant resume`".to_owned(),
        ("held", _) => "resumed: NVML is asked again".to_owned(),
        (other, _) => other.to_owned(),
    })
}
