//! Owns the claim that a host without Prometheus gets its alerts: the agent's incidents reach a real Alertmanager, which
//! tells a webhook of their beginning and end.
//! Refuses a stand-in for Alertmanager.

use std::{
    fs,
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use axum::{Json, Router, extract::State, routing::post};
use cotenant_node::{Cgroup, World};
use serde_json::Value;
use tokio::runtime::Runtime;

/// As Debian calls it, and as everybody else does.
const PROGRAMS: [&str; 2] = ["prometheus-alertmanager", "alertmanager"];

type Told = Arc<Mutex<Vec<Value>>>;

struct Alertmanager {
    child: Child,
    url: String,
    told: Told,
    _webhook: Runtime,
    _directory: tempfile::TempDir,
}

impl Drop for Alertmanager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn tell(State(told): State<Told>, Json(message): Json<Value>) {
    told.lock().expect("no test panics here").push(message);
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

impl Alertmanager {
    fn start() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let told = Told::default();
        let webhook = Runtime::new()?;
        let app = Router::new().route("/", post(tell)).with_state(Arc::clone(&told));
        let listener = webhook.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
        let address = listener.local_addr()?;
        webhook.spawn(async move { axum::serve(listener, app).await });
        let file = directory.path().join("alertmanager.yml");
        fs::write(
            &file,
            format!(
                "global: {{resolve_timeout: 10m}}\n\
                 route: {{receiver: here, group_by: ['...'], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}\n\
                 receivers: [{{name: here, webhook_configs: [{{url: 'http://{address}/'}}]}}]\n"
            ),
        )?;
        let at = format!("127.0.0.1:{}", free_port()?);
        let start = |program: &&str| {
            Command::new(program)
                .arg(format!("--config.file={}", file.display()))
                .arg(format!("--storage.path={}", directory.path().display()))
                .arg(format!("--web.listen-address={at}"))
                .arg("--cluster.listen-address=")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .ok()
        };
        let child =
            PROGRAMS.iter().find_map(start).context("no Alertmanager here: `make setup` brings it")?;
        Ok(Self { child, url: format!("http://{at}"), told, _webhook: webhook, _directory: directory })
    }

    /// The first alert of this tenant that was told of with this status.
    fn alert(&self, tenant: &str, status: &str) -> Result<Value> {
        let deadline = Instant::now() + Duration::from_mins(2);
        while Instant::now() < deadline {
            let told = self.told.lock().map_err(|_| anyhow::anyhow!("the webhook died"))?.clone();
            let alerts = told.iter().filter_map(|message| message["alerts"].as_array()).flatten();
            let wanted = |alert: &&Value| alert["labels"]["tenant"] == tenant && alert["status"] == status;
            if let Some(alert) = alerts.into_iter().find(wanted) {
                return Ok(alert.clone());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        anyhow::bail!("no {status} alert of {tenant}: {:?}", self.told)
    }
}

#[test]
fn an_incident_is_told_to_alertmanager_and_resolved() -> Result<()> {
    let alertmanager = Alertmanager::start()?;
    let mut world = World::create(
        1,
        &format!(
            "[alertmanager]\nenabled = true\nurls = [\"{}\", \"http://127.0.0.1:9\"]\ninterval = \"5s\"\n\
             labels = {{ cluster = \"one\", instance = \"node-7\" }}\n",
            alertmanager.url
        ),
    )?;
    let unit = format!("paged-{}.service", std::process::id());
    let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
    let script = "init\nuuid 0\nretain 0\nalloc a 400GiB\nexpect 2\nprint refused\nwait\n";
    let mut tenant = world.node.tenant("paged", &cgroup, script, &[])?;
    tenant.expect("refused")?;
    let label = format!("systemd:{unit}");

    let firing = alertmanager.alert(&label, "firing")?;
    let labels = &firing["labels"];
    ensure!(labels["alertname"] == "CotenantAllocationFailureStorm", "{firing}");
    ensure!(
        labels["cluster"] == "one" && labels["instance"] == "node-7" && labels["job"] == "cotenant",
        "{firing}"
    );
    ensure!(labels["hw_id"].as_str().is_some_and(|gpu| gpu.starts_with("GPU-")), "{firing}");
    let answer = world.agent.json("/api/v1/incidents")?;
    ensure!(
        firing["annotations"]["summary"] == answer["incidents"][0]["explanation"]["headline"],
        "{firing}"
    );
    ensure!(
        firing["annotations"]["runbook_url"].as_str().is_some_and(|url| url.ends_with("Storm.md")),
        "{firing}"
    );

    // Nothing more happens: the incident closes, and so does the alert, though one Alertmanager was never there.
    let resolved = alertmanager.alert(&label, "resolved")?;
    ensure!(
        resolved["labels"] == firing["labels"] && resolved["startsAt"] == firing["startsAt"],
        "{resolved}"
    );
    let page = world.agent.scrape()?;
    let requests = |outcome| page.sum("cotenant_agent_alertmanager_requests_total", &[("outcome", outcome)]);
    ensure!(requests("accepted") >= 2.0 && requests("unreachable") >= 2.0, "{page:?}");
    ensure!(requests("refused").abs() < f64::EPSILON, "Alertmanager took what it was sent");
    tenant.go()?;
    tenant.end()?;
    world.agent.stop()?;
    Ok(())
}
