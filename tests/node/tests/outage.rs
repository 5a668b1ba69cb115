//! Owns the measurement of a long outage: a busy node whose OTLP receiver is away for ten minutes, first refusing, then
//! taking connections and saying nothing. What it cost, what was dropped, and what the receiver has afterwards.
//! Refuses to be part of `make test`, which has the same in small: `COTENANT_OUTAGE_TEMPORALITY=delta cargo test -p
//! cotenant-node --test outage -- --ignored --nocapture` (cumulative unless said; `COTENANT_OUTAGE_SECONDS`, 600 unless said).

use std::{
    collections::BTreeMap,
    fmt, fs,
    net::{SocketAddr, TcpListener},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use axum::{Router, body::Bytes, extract::State, routing::post};
use cotenant_node::{Agent, Cgroup, Tenant, World, scrape::Scrape};
use opentelemetry_proto::tonic::{
    collector::metrics::v1::ExportMetricsServiceRequest,
    common::v1::{KeyValue, any_value::Value},
    metrics::v1::{AggregationTemporality, Metric, metric, number_data_point},
};
use prost::Message;
use tokio::{net::TcpSocket, runtime::Runtime};

const TENANTS: usize = 8;
const QUEUE_BYTES: f64 = 8_388_608.0;
/// As Linux counts processors' time for user space, on every architecture.
const TICKS: f64 = 100.0;
const LOOK: Duration = Duration::from_millis(250);

/// By metric, tenant, GPU, and memory kind or operation.
type Totals = BTreeMap<[String; 4], f64>;

#[derive(Clone, Default)]
struct Received {
    totals: Arc<Mutex<Totals>>,
    points: Arc<AtomicU64>,
}

/// A receiver at one address that can be there, be silent, or not be there.
struct Receiver {
    address: SocketAddr,
    received: Received,
    there: Option<Runtime>,
}

impl Receiver {
    fn create() -> Result<Self> {
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        Ok(Self { address, received: Received::default(), there: None })
    }

    fn refuse(&mut self) {
        if let Some(runtime) = self.there.take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }

    /// Connections are made, by the kernel, and nobody reads.
    fn hush(&mut self) -> Result<()> {
        self.listen(false)
    }

    fn answer(&mut self) -> Result<()> {
        self.listen(true)
    }

    fn listen(&mut self, answering: bool) -> Result<()> {
        self.refuse();
        let runtime = Runtime::new()?;
        let listener = runtime.block_on(async {
            let socket = TcpSocket::new_v4()?;
            socket.set_reuseaddr(true)?;
            socket.bind(self.address)?;
            socket.listen(64)
        })?;
        let app = Router::new().route("/v1/metrics", post(metrics)).with_state(self.received.clone());
        runtime.spawn(async move {
            if answering {
                axum::serve(listener, app.layer(axum::extract::DefaultBodyLimit::disable())).await
            } else {
                std::future::pending::<()>().await;
                drop(listener);
                Ok(())
            }
        });
        self.there = Some(runtime);
        Ok(())
    }
}

async fn metrics(State(received): State<Received>, body: Bytes) {
    let request = ExportMetricsServiceRequest::decode(body).expect("OTLP metrics");
    let scopes = request.resource_metrics.into_iter().flat_map(|resource| resource.scope_metrics);
    for metric in scopes.flat_map(|scope| scope.metrics) {
        received.points.fetch_add(count(&metric), Relaxed);
        book(&mut received.totals.lock().expect("no test panics here"), &metric);
    }
}

fn count(metric: &Metric) -> u64 {
    let points = match &metric.data {
        Some(metric::Data::Sum(sum)) => sum.data_points.len(),
        Some(metric::Data::Gauge(gauge)) => gauge.data_points.len(),
        Some(metric::Data::Histogram(histogram)) => histogram.data_points.len(),
        _ => 0,
    };
    points as u64
}

/// Counters of tenants, with what a receiver makes of them: the last of cumulative points, the sum of deltas.
fn book(totals: &mut Totals, metric: &Metric) {
    let (name, by) = match metric.name.as_str() {
        "cotenant.gpu.memory.allocated" => {
            ("cotenant_gpu_memory_allocated_bytes_total", "cotenant.gpu.memory.kind")
        }
        "cotenant.gpu.memory.operations" => {
            ("cotenant_gpu_memory_operations_total", "cotenant.gpu.operation")
        }
        _ => return,
    };
    let Some(metric::Data::Sum(sum)) = &metric.data else { return };
    let delta = sum.aggregation_temporality() == AggregationTemporality::Delta;
    for point in &sum.data_points {
        let of = |key: &str| attribute(&point.attributes, key).unwrap_or_default();
        let value = match point.value {
            Some(number_data_point::Value::AsInt(value)) => value as f64,
            Some(number_data_point::Value::AsDouble(value)) => value,
            None => continue,
        };
        let total = totals.entry([name.to_owned(), of("cotenant.tenant"), of("hw.id"), of(by)]).or_default();
        *total = if delta { *total + value } else { value };
    }
}

fn attribute(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|pair| pair.key == key)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        _ => None,
    }
}

/// The same counters as they stand on `/metrics`.
fn scraped(page: &Scrape) -> Totals {
    let families = [
        ("cotenant_gpu_memory_allocated_bytes_total", "memory_kind"),
        ("cotenant_gpu_memory_operations_total", "operation"),
    ];
    let samples = families.iter().flat_map(|(name, by)| page.of(name).map(move |sample| (sample, *by)));
    samples
        .map(|(sample, by)| {
            let label = |name: &str| sample.label(name).to_owned();
            ([sample.name.clone(), label("tenant"), label("hw_id"), label(by)], sample.value)
        })
        .collect()
}

/// What a stretch of time cost.
struct Stretch {
    name: &'static str,
    cpu: f64,
    quickest_half: Duration,
    slowest_hundredth: Duration,
    slowest: Duration,
    scrapes: usize,
    queued: f64,
}

impl fmt::Display for Stretch {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{:<10} {:>6.2} % of a CPU; {:>4} scrapes: p50 {:.1?}, p99 {:.1?}, at most {:.1?}; queue at most {:.0} bytes",
            self.name,
            self.cpu * 100.0,
            self.scrapes,
            self.quickest_half,
            self.slowest_hundredth,
            self.slowest,
            self.queued
        )
    }
}

fn cpu_seconds(pid: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, after) = text.rsplit_once(')').context("a name in brackets")?;
    let fields: Vec<&str> = after.split_whitespace().collect();
    Ok((fields[11].parse::<f64>()? + fields[12].parse::<f64>()?) / TICKS)
}

/// Scrapes for so long, as a Prometheus in a great hurry.
fn watch(name: &'static str, agent: &Agent, lasts: Duration) -> Result<Stretch> {
    let (begun, before) = (Instant::now(), cpu_seconds(agent.pid())?);
    let (mut took, mut queued) = (Vec::new(), 0.0_f64);
    while begun.elapsed() < lasts {
        let asked = Instant::now();
        let text = agent.get("/metrics", "text/plain")?;
        took.push(asked.elapsed());
        queued = queued
            .max(Scrape::parse(&text)?.sum("cotenant_agent_otlp_queue_bytes", &[("signal", "metrics")]));
        sleep(LOOK);
    }
    let cpu = (cpu_seconds(agent.pid())? - before) / begun.elapsed().as_secs_f64();
    took.sort();
    let at = |share: usize| took[(took.len() - 1) * share / 100];
    let (quickest_half, slowest_hundredth, slowest) = (at(50), at(99), at(100));
    let stretch =
        Stretch { name, cpu, quickest_half, slowest_hundredth, slowest, scrapes: took.len(), queued };
    eprintln!("{stretch}");
    Ok(stretch)
}

fn busy(world: &World, number: usize) -> Result<(Tenant, Cgroup)> {
    let cgroup = Cgroup::create(&format!("system.slice/outage-{number}-{}.service", std::process::id()))?;
    let gpu = number % 2;
    let script = format!(
        "init\nuuid {gpu}\nretain {gpu}\nprint ready\nwait\nfor 36000000 {{\nalloc a 2MiB\nalloc b 1MiB\nfree a\nfree b\npause 2000\n}}\n"
    );
    let mut tenant = world.node.tenant(&format!("outage-{number}"), &cgroup, &script, &[])?;
    tenant.expect("ready")?;
    tenant.go()?;
    Ok((tenant, cgroup))
}

fn halt(tenant: &Tenant) -> Result<()> {
    let told = std::process::Command::new("kill").args(["-STOP", &tenant.pid().to_string()]).status()?;
    ensure!(told.success(), "kill says {told}");
    Ok(())
}

#[test]
#[ignore = "takes ten minutes and more; its figures are this machine's"]
fn c112_ten_minutes_without_a_receiver() -> Result<()> {
    let variable = |name: &str| std::env::var(name).ok();
    let temporality = variable("COTENANT_OUTAGE_TEMPORALITY").unwrap_or_else(|| "cumulative".to_owned());
    let away = variable("COTENANT_OUTAGE_SECONDS").and_then(|text| text.parse().ok()).unwrap_or(600);
    let mut receiver = Receiver::create()?;
    receiver.answer()?;
    let mut world = World::create(
        2,
        &format!(
            "[otlp]\nenabled = true\ntraces = false\nlogs = false\nendpoint = \"http://{}\"\ninterval = \"2s\"\n\
             temporality = \"{temporality}\"\n",
            receiver.address
        ),
    )?;
    let tenants: Vec<_> = (0..TENANTS).map(|number| busy(&world, number)).collect::<Result<_>>()?;
    let exported = |page: &Scrape| page.sum("cotenant_agent_otlp_exported_total", &[("signal", "metrics")]);
    world.agent.until(|page| exported(page) > 0.0)?;
    eprintln!("{temporality}, {TENANTS} busy tenants, a collection every 2 s, away for {away} s:");

    let before = watch("before", &world.agent, Duration::from_mins(1))?;
    receiver.refuse();
    let refused = watch("refusing", &world.agent, Duration::from_secs(away / 2))?;
    receiver.hush()?;
    let silent = watch("silent", &world.agent, Duration::from_secs(away - away / 2))?;
    let last = world.agent.scrape()?;
    let failures: Vec<String> = last
        .of("cotenant_agent_otlp_failures_total")
        .filter(|sample| sample.value > 0.0)
        .map(|sample| format!("{} {}", sample.value, sample.label("reason")))
        .collect();
    eprintln!("attempts that failed: {}", failures.join(", "));

    let returned = Instant::now();
    receiver.answer()?;
    let age = ("signal", "metrics");
    world.agent.until(|page| {
        page.sum("cotenant_agent_otlp_queue_length", &[age]) == 0.0
            && page.sum("cotenant_agent_otlp_last_success_age_seconds", &[age]) < 3.0
    })?;
    let recovery = returned.elapsed();
    let after = watch("after", &world.agent, Duration::from_mins(1))?;

    tenants.iter().try_for_each(|(tenant, _)| halt(tenant))?;
    sleep(Duration::from_secs(8));
    let page = world.agent.scrape()?;
    let drops: Vec<(String, f64)> = page
        .of("cotenant_agent_otlp_dropped_total")
        .filter(|sample| sample.value > 0.0)
        .map(|sample| (sample.label("reason").to_owned(), sample.value))
        .collect();
    let there = scraped(&page);
    let here = receiver.received.totals.lock().expect("no test panics here").clone();
    eprintln!("queue empty {recovery:.1?} after the return; dropped data points: {drops:?}");
    let bytes: f64 = there
        .iter()
        .filter(|(key, _)| key[0].ends_with("allocated_bytes_total"))
        .map(|(_, value)| value)
        .sum();
    eprintln!(
        "{} counters of tenants, {bytes:.0} bytes allocated: the same on /metrics and at the receiver",
        there.len()
    );

    ensure!(there.len() > 2 * TENANTS && bytes > 1e9, "the node was not busy: {there:?}");
    assert_eq!(there, here, "what the receiver has is what /metrics says");
    // What is called exported came. One collection may be under way.
    let came = receiver.received.points.load(Relaxed) as f64;
    let said = exported(&page);
    ensure!(said <= came && came - said < 5_000.0, "{said} exported, {came} came");
    for stretch in [&refused, &silent] {
        ensure!(stretch.cpu < before.cpu * 1.25 + 0.01, "{stretch} against {before}");
        ensure!(
            stretch.slowest_hundredth < before.slowest_hundredth * 3 + Duration::from_millis(50),
            "{stretch}"
        );
        ensure!(stretch.slowest < Duration::from_secs(1), "{stretch}");
        ensure!(stretch.queued <= QUEUE_BYTES, "{stretch}");
    }
    ensure!(after.cpu < before.cpu * 1.5 + 0.01, "{after}");
    ensure!(recovery < Duration::from_mins(2), "{recovery:?}");
    let full = drops.iter().any(|(reason, _)| reason == "queue_full");
    let replaced = drops.iter().any(|(reason, _)| reason == "superseded");
    ensure!(if temporality == "delta" { replaced && !full } else { full || away < 200 }, "{drops:?}");
    eprintln!(
        "CPU while it was away: {:.2} and {:.2} times that before",
        refused.cpu / before.cpu,
        silent.cpu / before.cpu
    );
    world.agent.stop()?;
    Ok(())
}
