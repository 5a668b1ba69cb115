//! Owns the claim that the agent's figures and events reach an OTLP receiver as they are, and that a receiver that is away
//! changes nothing for anybody who scrapes.
//! Refuses a stand-in for the agent: the real one runs, probes and sends.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use axum::{Router, body::Bytes, extract::State, routing::post};
use cotenant_node::{Cgroup, SimulatedNode, World};
use cotenant_sim_state::NodeConfig;
use opentelemetry_proto::tonic::{
    collector::{
        logs::v1::ExportLogsServiceRequest, metrics::v1::ExportMetricsServiceRequest,
        trace::v1::ExportTraceServiceRequest,
    },
    common::v1::{KeyValue, any_value::Value},
    logs::v1::LogRecord,
    metrics::v1::{Metric, metric, number_data_point},
    trace::v1::Span,
};
use prost::Message;
use tokio::{net::TcpSocket, runtime::Runtime};

#[derive(Clone, Default)]
struct Received {
    metrics: Arc<Mutex<Vec<Metric>>>,
    spans: Arc<Mutex<Vec<Span>>>,
    records: Arc<Mutex<Vec<LogRecord>>>,
}

/// A receiver whose address is taken from the start, and which answers once it is asked to.
struct Receiver {
    runtime: Runtime,
    socket: Option<TcpSocket>,
    address: SocketAddr,
    received: Received,
}

impl Receiver {
    fn away() -> Result<Self> {
        let runtime = Runtime::new()?;
        let socket = runtime.block_on(async { TcpSocket::new_v4() })?;
        socket.bind("127.0.0.1:0".parse()?)?;
        let address = socket.local_addr()?;
        Ok(Self { runtime, socket: Some(socket), address, received: Received::default() })
    }

    fn answer(&mut self) -> Result<()> {
        let socket = self.socket.take().context("it answers already")?;
        let app = Router::new()
            .route("/v1/metrics", post(metrics))
            .route("/v1/traces", post(traces))
            .route("/v1/logs", post(logs))
            .with_state(self.received.clone());
        self.runtime.block_on(async {
            let listener = socket.listen(64)?;
            tokio::spawn(async move { axum::serve(listener, app).await });
            Ok(())
        })
    }
}

fn plain(body: &Bytes) -> Vec<u8> {
    zstd::decode_all(body.as_ref()).expect("the agent was told to use zstd")
}

async fn metrics(State(received): State<Received>, body: Bytes) {
    let request = ExportMetricsServiceRequest::decode(plain(&body).as_slice()).expect("OTLP metrics");
    let scopes = request.resource_metrics.into_iter().flat_map(|resource| resource.scope_metrics);
    received.metrics.lock().expect("no test panics here").extend(scopes.flat_map(|scope| scope.metrics));
}

async fn traces(State(received): State<Received>, body: Bytes) {
    let request = ExportTraceServiceRequest::decode(plain(&body).as_slice()).expect("OTLP traces");
    let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
    received.spans.lock().expect("no test panics here").extend(scopes.flat_map(|scope| scope.spans));
}

async fn logs(State(received): State<Received>, body: Bytes) {
    let request = ExportLogsServiceRequest::decode(plain(&body).as_slice()).expect("OTLP logs");
    let scopes = request.resource_logs.into_iter().flat_map(|resource| resource.scope_logs);
    received.records.lock().expect("no test panics here").extend(scopes.flat_map(|scope| scope.log_records));
}

fn attribute<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a str> {
    let found = attributes.iter().find(|pair| pair.key == key)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text),
        _ => None,
    }
}

/// Live device bytes of a tenant in the last figures that arrived.
fn live(received: &Received, tenant: &str) -> Option<i64> {
    let metrics = received.metrics.lock().ok()?;
    let family = metrics.iter().rev().find(|metric| metric.name == "cotenant.gpu.memory.live")?;
    let Some(metric::Data::Sum(sum)) = &family.data else { return None };
    let point = sum.data_points.iter().find(|point| {
        attribute(&point.attributes, "cotenant.tenant") == Some(tenant)
            && attribute(&point.attributes, "cotenant.gpu.memory.kind") == Some("device")
    })?;
    match point.value? {
        number_data_point::Value::AsInt(bytes) => Some(bytes),
        number_data_point::Value::AsDouble(_) => None,
    }
}

fn until(what: &str, come: impl Fn() -> bool) -> Result<()> {
    let deadline = Instant::now() + Duration::from_mins(1);
    while !come() {
        ensure!(Instant::now() < deadline, "{what} did not come");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

#[test]
fn c112_figures_and_events_reach_a_receiver_that_was_away() -> Result<()> {
    let mut receiver = Receiver::away()?;
    let mut world = World::create(
        1,
        &format!(
            "[otlp]\nenabled = true\nendpoint = \"http://{}\"\ncompression = \"zstd\"\ninterval = \"1s\"\n\
             incident_interval = \"2s\"\n",
            receiver.address
        ),
    )?;
    let unit = format!("otlp-{}.service", std::process::id());
    let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
    let script = "init\nuuid 0\nretain 0\nalloc a 5MiB\nalloc b 400GiB\nexpect 2\nprint held\nwait\n";
    let mut tenant = world.node.tenant("otlp", &cgroup, script, &[])?;
    tenant.expect("held")?;
    let label = format!("systemd:{unit}");

    // Away: a scrape is as quick as ever, and says that nothing arrives.
    let failed = |scrape: &cotenant_node::scrape::Scrape| {
        scrape.of("cotenant_agent_otlp_failures_total").map(|sample| sample.value).sum::<f64>() > 1.0
    };
    world.agent.until(failed)?;
    let mut slowest = Duration::ZERO;
    for _ in 0..20 {
        let begun = Instant::now();
        world.agent.scrape()?;
        slowest = slowest.max(begun.elapsed());
    }
    eprintln!("slowest of 20 scrapes while the receiver is away: {slowest:?}");
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");

    receiver.answer()?;
    let got = receiver.received.clone();
    until("the tenant's memory", || live(&got, &label) == Some(5 << 20))?;
    let records = || got.records.lock().map(|records| records.clone()).unwrap_or_default();
    let event = |name: &str| records().into_iter().find(|record| record.event_name == name);
    until("the refusal", || event("cotenant.allocation_failure").is_some())?;
    until("the incident", || event("cotenant.incident.opened").is_some())?;
    let opened = event("cotenant.incident.opened").context("seen above")?;
    let spans = || got.spans.lock().map(|spans| spans.clone()).unwrap_or_default();
    until("the incident as it stands", || spans().iter().any(|span| span.trace_id == opened.trace_id))?;
    let refusal = event("cotenant.allocation_failure").context("seen above")?;
    assert_eq!(attribute(&refusal.attributes, "cotenant.tenant"), Some(label.as_str()));
    assert_eq!(refusal.trace_id, opened.trace_id, "the refusal leads to its incident");
    let page = world.agent.until(|scrape| {
        scrape.of("cotenant_agent_otlp_exported_total").filter(|sample| sample.value > 0.0).count() == 3
    })?;
    let dropped: f64 = page.of("cotenant_agent_otlp_dropped_total").map(|sample| sample.value).sum();
    assert!(dropped.abs() < f64::EPSILON, "nothing was dropped: {dropped}");

    tenant.go()?;
    tenant.end()?;
    let took = world.agent.stop()?;
    eprintln!("the agent stopped in {took:?}");
    Ok(())
}

const HISTOGRAMS: [&str; 2] = [
    "cotenant_gpu_driver_wait_duration_seconds_bucket",
    "cotenant_gpu_memory_operation_duration_seconds_bucket",
];

/// The hexadecimal trace ids that the buckets of a histogram lead to, with the tenant of each.
fn exemplars(page: &str, histogram: &str) -> Vec<(String, String)> {
    let value = |text: &str, key: &str| {
        let (_, rest) = text.split_once(&format!("{key}=\""))?;
        Some(rest.split_once('"')?.0.to_owned())
    };
    let marked = page.lines().filter(|line| line.starts_with(histogram));
    marked
        .filter_map(|line| line.split_once(" # "))
        .filter_map(|(series, mark)| Some((value(series, "tenant")?, value(mark, "trace_id")?)))
        .collect()
}

#[test]
fn histograms_of_calls_and_waits_lead_to_traces_that_were_sent() -> Result<()> {
    let mut receiver = Receiver::away()?;
    receiver.answer()?;
    // Calls take their time here: 30 GiB hold the lock for tens of milliseconds.
    let directory = tempfile::tempdir()?;
    let node = SimulatedNode::create(directory.path(), &NodeConfig::h200(1, 1.0))?;
    let mut agent = node.agent(&format!(
        "[otlp]\nenabled = true\nendpoint = \"http://{}\"\ncompression = \"zstd\"\ninterval = \"1s\"\n\
         [waits]\nslow_call = \"5ms\"\n",
        receiver.address
    ))?;
    let tenant = |name: &str, body: &str| -> Result<(String, cotenant_node::Tenant, Cgroup)> {
        let unit = format!("marked-{name}-{}.service", std::process::id());
        let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
        let script = format!("init\nuuid 0\nretain 0\nprint ready\nwait\n{body}\nprint done\nwait\n");
        let mut tenant = node.tenant(name, &cgroup, &script, &[])?;
        tenant.expect("ready")?;
        Ok((format!("systemd:{unit}"), tenant, cgroup))
    };
    let (victim, mut waits, _one) = tenant("victim", "for 4000 {\nalloc a 2MiB\nfree a\n}")?;
    let (_, mut hogs, _two) = tenant("hog", "for 4000 {\nalloc b 30GiB\nfree b\npause 300\n}")?;
    waits.go()?;
    hogs.go()?;
    let got = receiver.received.clone();
    let sent = || -> Vec<String> {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat();
        got.spans
            .lock()
            .map(|spans| spans.iter().map(|span| hex(&span.trace_id)).collect())
            .unwrap_or_default()
    };
    let leads = || -> Result<bool> {
        let page = agent.get("/metrics", "application/openmetrics-text;version=1.0.0")?;
        let sent = sent();
        Ok(HISTOGRAMS.iter().all(|histogram| {
            exemplars(&page, histogram)
                .iter()
                .any(|(tenant, trace)| *tenant == victim && sent.contains(trace))
        }))
    };
    until("an exemplar of a trace that arrived", || leads().unwrap_or(false))?;
    let text = agent.get("/metrics", "text/plain")?;
    assert!(!text.contains(" # {"), "text 0.0.4 has no exemplars");
    waits.kill()?;
    hogs.kill()?;
    agent.stop()?;
    Ok(())
}
