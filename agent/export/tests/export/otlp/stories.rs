//! Owns what arrives of incidents, slow calls and events: traces with real times, and records that lead to them.

use std::collections::BTreeSet;
use std::time::Duration;

use cotenant_export::otlp::{Call, Rates, Sender, Teller, Wishes};
use cotenant_model::incident::{
    Changes, Incidents, KillNote, KillScope, Observation, Rules, Stall, WaitDelta, XidNote,
};
use cotenant_model::verdict::{Ask, Failures, Fold};
use cotenant_model::{CudaError, Culprit, Operation, Tenant, TenantKind, WaitClass};
use opentelemetry_proto::tonic::logs::v1::SeverityNumber;
use opentelemetry_proto::tonic::metrics::v1::{exemplar, metric};
use opentelemetry_proto::tonic::trace::v1::Span;

use super::sink::{Sink, attribute};
use super::{Node, dropped, exported, resource, settings, stop, until};
use crate::fixture;

const T: f64 = 1_795_999_990.0;

fn victim() -> Tenant {
    fixture::pod("serve-0")
}

fn culprit() -> Tenant {
    fixture::pod("train-0")
}

/// A receiver, a sender, and the incidents of a node.
struct Stage {
    sink: Sink,
    sender: Sender,
    teller: Teller,
    incidents: Incidents,
    now: f64,
}

impl Stage {
    async fn new(protocol: &str, rates: Rates) -> Self {
        let sink = Sink::default();
        let address = if protocol == "grpc" { sink.grpc().await } else { sink.http().await };
        let sender = Node::new().start(&settings(protocol, address, Wishes::default()));
        let teller = Teller::new(&sender, &resource(), rates);
        Self { sink, sender, teller, incidents: Incidents::new(Rules::default()), now: T }
    }

    fn tick(&mut self, observation: Observation, calls: Vec<Call>) -> Changes {
        self.now += 1.0;
        let observation = Observation { at_unix: self.now, elapsed: 1.0, ..observation };
        let changes = self.incidents.observe(&observation);
        self.teller.tell(&self.incidents, &changes, &observation, calls);
        changes
    }

    /// Nothing happens until nothing is open.
    fn quiet(&mut self) {
        for _ in 0..40 {
            self.tick(Observation::default(), Vec::new());
        }
        assert_eq!(self.incidents.open(), 0);
    }
}

pub(super) fn waits(seconds: f64) -> Vec<WaitDelta> {
    vec![WaitDelta {
        victim: victim(),
        culprit: Culprit::Tenant(culprit()),
        class: WaitClass::GpuLock,
        gpus: vec![fixture::gpu_id(0)],
        seconds,
        waits: 3,
        longest: Some(0.4),
        stack: vec!["down_write".to_owned(), "rmGpuLocksAcquire".to_owned()],
    }]
}

pub(super) fn call(start: f64, seconds: f64) -> Call {
    Call {
        victim: victim(),
        pid: 4242,
        tid: 4243,
        operation: Operation::MemAlloc,
        error: CudaError(0),
        gpu: Some(fixture::gpu_id(0)),
        start_unix: start,
        seconds,
        blocked_seconds: seconds * 0.75,
        runnable_seconds: seconds * 0.125,
        bytes: Some(1 << 30),
        longest_seconds: seconds * 0.5,
        class: Some(WaitClass::GpuLock),
        culprit: Some(Culprit::Tenant(culprit())),
        stack: vec!["rmGpuLocksAcquire".to_owned()],
        shared: true,
    }
}

fn find<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no {name} in {names:?}"))
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// The call is linked, with the reason, and with the culprit under `key`.
fn is_linked(spans: &[Span], root: &Span, call: &str, why: &str, key: &str) {
    let call = find(spans, call);
    let link = root.links.iter().find(|link| link.span_id == call.span_id).unwrap();
    assert_eq!(link.trace_id, call.trace_id);
    assert_eq!(attribute(&link.attributes, "cotenant.link").as_deref(), Some(why));
    assert_eq!(attribute(&link.attributes, key).as_deref(), Some("pod:ml/train-0"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_incident_is_a_trace_with_a_child_for_each_thing_that_happened() {
    for protocol in ["grpc", "http/protobuf"] {
        let mut stage = Stage::new(protocol, Rates::default()).await;
        let mut failures = Failures::new(Fold::default());
        let ask = Ask {
            gpu: Some(fixture::gpu_id(0)),
            requested: Some(1 << 30),
            ..Ask::new(victim(), Operation::MemAlloc, CudaError::OUT_OF_MEMORY)
        };
        assert!(failures.failed(T + 1.5, 1, &ask));
        let of_the_culprit = Call {
            victim: culprit(),
            pid: 7,
            operation: Operation::MemFree,
            culprit: None,
            ..call(T + 0.2, 0.6)
        };
        let calls = vec![call(T + 0.25, 0.5), of_the_culprit];
        stage.tick(Observation { waits: waits(0.9), ..Observation::default() }, calls);
        stage.tick(
            Observation { failures: failures.drain(T + 2.0), waits: waits(0.5), ..Observation::default() },
            Vec::new(),
        );
        let stall = Stall {
            victim: victim(),
            class: WaitClass::GpuLock,
            gpus: vec![fixture::gpu_id(0)],
            since_unix: T - 5.0,
            holder: Some(Culprit::Tenant(culprit())),
        };
        stage.tick(Observation { stalls: vec![stall], ..Observation::default() }, Vec::new());
        let xid = XidNote {
            at_unix: T + 3.25,
            gpu: fixture::gpu_id(0),
            code: 31,
            tenant: Some(victim()),
            echo: false,
        };
        stage.tick(Observation { xids: vec![xid], ..Observation::default() }, Vec::new());
        stage.quiet();
        until("the trace", || stage.sink.spans().iter().any(|span| span.name.starts_with("incident"))).await;
        stop(stage.sender).await;
        let spans = stage.sink.spans();
        let root = find(&spans, "incident xid");
        assert!(root.parent_span_id.is_empty());
        assert_eq!((root.trace_id.len(), root.span_id.len()), (16, 8));
        assert!(
            (seconds(root.start_time_unix_nano) - (T - 5.0)).abs() < 1e-3,
            "{}",
            seconds(root.start_time_unix_nano)
        );
        assert!(root.end_time_unix_nano > root.start_time_unix_nano);
        for (key, value) in [
            ("cotenant.incident.kind", "xid"),
            ("cotenant.incident.state", "closed"),
            ("cotenant.incident.victims", "pod:ml/serve-0"),
            ("cotenant.incident.culprits", "pod:ml/train-0"),
            ("cotenant.culprit", "pod:ml/train-0"),
            ("hw.id", fixture::gpu_id(0).as_str()),
            ("cotenant.wait.share.neighbours", "1"),
            ("cotenant.wait.share.self", "0"),
        ] {
            assert_eq!(attribute(&root.attributes, key).as_deref(), Some(value), "{protocol} {key}");
        }
        let blame = root.events.iter().find(|event| event.name == "culprit").unwrap();
        assert_eq!(attribute(&blame.attributes, "cotenant.wait_share").as_deref(), Some("1"));
        let waits = root.events.iter().find(|event| event.name == "waits").unwrap();
        assert_eq!(
            attribute(&waits.attributes, "cotenant.kernel_stack").as_deref(),
            Some("down_write,rmGpuLocksAcquire")
        );
        for (name, from, to) in [
            ("allocation failure", T + 1.5, T + 1.5),
            ("stall", T - 5.0, T + 3.0),
            ("xid", T + 3.25, T + 3.25),
        ] {
            let child = find(&spans, name);
            assert_eq!(child.trace_id, root.trace_id, "{name}");
            assert_eq!(child.parent_span_id, root.span_id, "{name}");
            let (start, end) = (seconds(child.start_time_unix_nano), seconds(child.end_time_unix_nano));
            assert!((start - from).abs() < 1e-3 && (end - to).abs() < 1e-3, "{name}: {start} to {end}");
        }
        let ids: BTreeSet<_> = spans.iter().map(|span| &span.span_id).collect();
        assert_eq!(ids.len(), spans.len(), "a span is told once");
        is_linked(&spans, root, "cuMemFree", "culprit_call", "cotenant.tenant");
        is_linked(&spans, root, "cuMemAlloc", "slow_call", "cotenant.culprit");
        // The records lead here.
        let records = stage.sink.records();
        for (event, severity) in [
            ("cotenant.incident.opened", SeverityNumber::Warn),
            ("cotenant.allocation_failure", SeverityNumber::Error),
            ("cotenant.xid", SeverityNumber::Error),
            ("cotenant.incident.closed", SeverityNumber::Info),
        ] {
            let found: Vec<_> = records.iter().filter(|record| record.event_name == event).collect();
            assert_eq!(found.len(), 1, "{event}");
            assert_eq!(found[0].severity_number(), severity, "{event}");
            assert_eq!((&found[0].trace_id, &found[0].span_id), (&root.trace_id, &root.span_id), "{event}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_is_a_record_and_a_child_at_its_moment() {
    let mut stage = Stage::new("grpc", Rates::default()).await;
    let kill = KillNote {
        at_unix: T + 0.5,
        victim: victim(),
        scope: KillScope::Cgroup,
        limit_owner: Some("/kubepods/burstable".to_owned()),
        trigger: Some(culprit()),
        processes: 2,
        gpu_live: vec![(fixture::gpu_id(0), 3 << 30)],
        host_pinned: None,
        last_calls: Vec::new(),
    };
    stage.tick(Observation { kills: vec![kill], ..Observation::default() }, Vec::new());
    stage.quiet();
    until("the trace", || !stage.sink.spans().is_empty() && stage.sink.records().len() >= 3).await;
    stop(stage.sender).await;
    let spans = stage.sink.spans();
    let (root, child) = (find(&spans, "incident oom_kill"), find(&spans, "oom kill"));
    assert_eq!(child.parent_span_id, root.span_id);
    assert!((seconds(child.start_time_unix_nano) - (T + 0.5)).abs() < 1e-3);
    assert_eq!(attribute(&child.attributes, "cotenant.oom.trigger").as_deref(), Some("pod:ml/train-0"));
    assert_eq!(attribute(&child.attributes, "cotenant.host_pinned_bytes"), None, "not known is not there");
    let records = stage.sink.records();
    let record = records.iter().find(|record| record.event_name == "cotenant.oom_kill").unwrap();
    assert_eq!(record.severity_number(), SeverityNumber::Error);
    assert_eq!(record.trace_id, root.trace_id);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_incident_that_lasts_is_told_as_it_stands_under_the_same_trace() {
    let mut stage = Stage::new("grpc", Rates { standing_seconds: 10.0, ..Rates::default() }).await;
    for _ in 0..25 {
        stage.tick(Observation { waits: waits(0.9), ..Observation::default() }, Vec::new());
    }
    let now = stage.now;
    stage.teller.farewell(&stage.incidents, now);
    stage.quiet();
    until("the trace", || stage.sink.spans().iter().any(|span| span.parent_span_id.is_empty())).await;
    stop(stage.sender).await;
    let spans = stage.sink.spans();
    let root = find(&spans, "incident noisy_neighbour");
    let standing: Vec<_> =
        spans.iter().filter(|span| span.name == "incident noisy_neighbour so far").collect();
    assert!(standing.len() >= 3, "{}", standing.len());
    for span in standing {
        assert_eq!((&span.trace_id, &span.parent_span_id), (&root.trace_id, &root.span_id));
        assert_eq!(attribute(&span.attributes, "cotenant.incident.state").as_deref(), Some("open"));
        assert_eq!(span.start_time_unix_nano, root.start_time_unix_nano);
    }
    let ids: BTreeSet<_> = spans.iter().map(|span| &span.span_id).collect();
    assert_eq!(ids.len(), spans.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_call_says_where_its_time_went_and_how_many_were_left_out() {
    let mut stage = Stage::new("http/protobuf", Rates { slow_calls_per_second: 2, ..Rates::default() }).await;
    let account = stage.sender.account();
    stage.tick(Observation { waits: waits(0.9), ..Observation::default() }, Vec::new());
    // Six calls of one tick: the two longest are told.
    let calls = (1..=6).map(|n| call(T + f64::from(n) / 100.0, f64::from(n) / 4.0)).collect();
    stage.tick(Observation::default(), calls);
    stage.tick(Observation::default(), vec![call(T + 2.5, 0.2)]);
    let slow = || stage.sink.spans().into_iter().filter(|span| span.name == "cuMemAlloc").collect::<Vec<_>>();
    until("the calls", || slow().len() == 3).await;
    let spans = slow();
    let took = |span: &Span| seconds(span.end_time_unix_nano - span.start_time_unix_nano);
    assert!((took(&spans[0]) - 1.5).abs() < 1e-6 && (took(&spans[1]) - 1.25).abs() < 1e-6);
    assert_eq!(attribute(&spans[1].attributes, "cotenant.sampled_out").as_deref(), Some("0"));
    assert_eq!(attribute(&spans[2].attributes, "cotenant.sampled_out").as_deref(), Some("4"));
    assert_eq!(dropped(&account, "traces", "sampled_out"), 4);
    for (key, value) in [
        ("cotenant.tenant", "pod:ml/serve-0"),
        ("k8s.pod.name", "serve-0"),
        ("cotenant.gpu.operation", "cuMemAlloc"),
        ("cotenant.call.blocked_seconds", "1.125"),
        ("cotenant.call.runnable_seconds", "0.1875"),
        ("cotenant.call.on_cpu_seconds", "0.1875"),
        ("cotenant.wait.class", "gpu_lock"),
        ("cotenant.culprit", "pod:ml/train-0"),
        ("cotenant.culprit.relation", "neighbour"),
        ("cotenant.call.bytes", "1073741824"),
    ] {
        assert_eq!(attribute(&spans[0].attributes, key).as_deref(), Some(value), "{key}");
    }
    assert!(spans[0].status.is_none(), "it succeeded");
    // The victim is in an open incident, which the call links to. Log records travel apart from spans.
    let opened = || {
        let records = stage.sink.records();
        records.into_iter().find(|record| record.event_name == "cotenant.incident.opened")
    };
    until("the opening", || opened().is_some()).await;
    assert_eq!(spans[0].links[0].trace_id, opened().unwrap().trace_id);
    stop(stage.sender).await;
}

/// A span has 16 links of each kind, and says how many it has no room for.
#[tokio::test(flavor = "multi_thread")]
async fn links_that_find_no_room_are_counted() {
    let mut stage = Stage::new("grpc", Rates { slow_calls_per_second: 100, ..Rates::default() }).await;
    let calls = (0..20).map(|n| Call { tid: n, ..call(T + 0.25, 0.5) }).collect();
    stage.tick(Observation { waits: waits(0.9), ..Observation::default() }, calls);
    stage.tick(Observation { waits: waits(0.9), ..Observation::default() }, Vec::new());
    stage.quiet();
    until("the trace", || stage.sink.spans().iter().any(|span| span.name.starts_with("incident"))).await;
    stop(stage.sender).await;
    let spans = stage.sink.spans();
    let root = find(&spans, "incident noisy_neighbour");
    assert_eq!((root.links.len(), root.dropped_links_count), (16, 4));
}

#[tokio::test(flavor = "multi_thread")]
async fn histograms_of_calls_and_waits_lead_to_the_last_slow_call() {
    let node = Node::new();
    let sink = Sink::default();
    let address = sink.grpc().await;
    let hour = Wishes { interval: Some(Duration::from_hours(1)), ..Wishes::default() };
    let sender = node.start(&settings("grpc", address, hour));
    let account = sender.account();
    until("the first collection", || exported(&account, "metrics") > 0).await;
    let mut teller = Teller::new(&sender, &resource(), Rates::default());
    let incidents = Incidents::new(Rules::default());
    let told = Call { victim: culprit(), class: Some(WaitClass::Reclaim), ..call(T, 0.5) };
    let observation = Observation { at_unix: T, elapsed: 1.0, ..Observation::default() };
    teller.tell(&incidents, &Changes::default(), &observation, vec![told]);
    node.pass();
    stop(sender).await;
    let spans = sink.spans();
    let exemplars: Vec<_> = sink
        .metrics()
        .into_iter()
        .filter_map(|metric| match metric.data {
            Some(metric::Data::Histogram(histogram)) => Some((metric.name, histogram.data_points)),
            _ => None,
        })
        .flat_map(|(name, points)| points.into_iter().map(move |point| (name.clone(), point)))
        .flat_map(|(name, point)| point.exemplars.into_iter().map(move |exemplar| (name.clone(), exemplar)))
        .collect();
    let values: Vec<_> = exemplars.iter().map(|(name, exemplar)| (name.as_str(), exemplar.value)).collect();
    let seconds = |seconds| Some(exemplar::Value::AsDouble(seconds));
    let wanted = [
        ("cotenant.gpu.driver.wait.duration", seconds(0.25)),
        ("cotenant.gpu.memory.operation.duration", seconds(0.5)),
    ];
    assert_eq!(values, wanted);
    for (_, exemplar) in &exemplars {
        assert_eq!((&exemplar.trace_id, &exemplar.span_id), (&spans[0].trace_id, &spans[0].span_id));
    }
}

/// What a tenant calls itself is never more than a bounded, printable value.
#[tokio::test(flavor = "multi_thread")]
async fn hostile_names_are_cleaned_in_spans_as_in_labels() {
    let mut stage = Stage::new("grpc", Rates::default()).await;
    let hostile = Tenant::plain(TenantKind::Docker, &format!("a\u{202e}\n{}", "x".repeat(5000)));
    stage.tick(Observation::default(), vec![Call { victim: hostile, ..call(T, 0.5) }]);
    until("the call", || !stage.sink.spans().is_empty()).await;
    stop(stage.sender).await;
    let name = attribute(&stage.sink.spans()[0].attributes, "cotenant.tenant").unwrap();
    assert!(name.chars().count() <= 128 && !name.contains(['\u{202e}', '\n']), "{name}");
}
