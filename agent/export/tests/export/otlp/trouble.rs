//! Owns receivers that fail: refusals, patience asked for, half an acceptance, silence, strangers, and their return.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use cotenant_export::otlp::{Bounds, Settings, Signal, Temporality, Wishes};
use opentelemetry_proto::tonic::metrics::v1::{Metric, metric, number_data_point};
use tokio::net::{TcpListener, TcpSocket};
use tonic::Code;

use super::sink::{Answer, Sink, attribute};
use super::{Node, dropped, exported, failures, settings, stop, until};

/// A receiver that is away: the address is taken, and refuses until it listens.
struct Away {
    socket: TcpSocket,
    address: SocketAddr,
}

impl Away {
    fn new() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        Self { address: socket.local_addr().unwrap(), socket }
    }

    fn back(self) -> TcpListener {
        self.socket.listen(64).unwrap()
    }
}

fn metrics_only(wishes: Wishes) -> Wishes {
    Wishes { without: vec![Signal::Traces, Signal::Logs], ..wishes }
}

#[tokio::test(flavor = "multi_thread")]
async fn c112_an_outage_costs_little_is_counted_and_ends_by_itself() {
    let away = Away::new();
    let node = Node::new();
    // Ten minutes at 60 s are ten collections; here they are ten in two seconds, with pauses scaled alike.
    let settings = settings(
        "http/protobuf",
        away.address,
        metrics_only(Wishes {
            interval: Some(Duration::from_millis(200)),
            compression: Some("gzip".into()),
            ..Wishes::default()
        }),
    );
    let sender = node.start(&settings);
    let account = sender.account();
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        node.pass();
    }
    assert!(failures(&account, "metrics", "unreachable") >= 5);
    assert_eq!(exported(&account, "metrics"), 0);
    let queued = account.view()[0].queued;
    assert!(queued > 0, "collections of an outage wait");
    let sink = Sink::default();
    sink.http_on(away.back());
    until("the queue", || account.view()[0].queued == 0 && exported(&account, "metrics") >= queued).await;
    assert!(sink.metric_requests() >= 9, "{} requests", sink.metric_requests());
    stop(sender).await;
    assert_eq!(dropped(&account, "metrics", "queue_full"), 0);
    assert_eq!(dropped(&account, "metrics", "stopped"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn c112_a_full_queue_drops_the_oldest_and_says_how_much() {
    let away = Away::new();
    let node = Node::new();
    let settings = settings(
        "http/protobuf",
        away.address,
        metrics_only(Wishes { interval: Some(Duration::from_millis(20)), ..Wishes::default() }),
    );
    let settings = Settings { bounds: Bounds { items: 3, bytes: 1 << 20 }, ..settings };
    let sender = node.start(&settings);
    let account = sender.account();
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        node.pass();
        assert!(account.view()[0].queued_bytes <= 1 << 20);
    }
    let lost = dropped(&account, "metrics", "queue_full");
    assert!(lost > 0);
    let sink = Sink::default();
    sink.http_on(away.back());
    until("what was left", || account.view()[0].queued == 0 && exported(&account, "metrics") > 0).await;
    stop(sender).await;
    let points: u64 = sink.metrics().iter().map(|metric| points(metric).len() as u64).sum();
    assert_eq!(points, exported(&account, "metrics"), "what is called exported arrived");
    assert!(dropped(&account, "metrics", "queue_full") >= lost);
}

/// Tenant, start, end and value of the points of a counter.
fn points(metric: &Metric) -> Vec<(String, u64, u64, f64)> {
    let numbers = match metric.data.as_ref().unwrap() {
        metric::Data::Sum(sum) => &sum.data_points,
        metric::Data::Gauge(gauge) => &gauge.data_points,
        metric::Data::Histogram(histogram) => {
            let points = histogram.data_points.iter();
            let of = |point: &opentelemetry_proto::tonic::metrics::v1::HistogramDataPoint| {
                (String::new(), point.start_time_unix_nano, point.time_unix_nano, point.count as f64)
            };
            return points.map(of).collect();
        }
        other => panic!("{other:?}"),
    };
    let of = |point: &opentelemetry_proto::tonic::metrics::v1::NumberDataPoint| {
        let value = match point.value.unwrap() {
            number_data_point::Value::AsInt(value) => value as f64,
            number_data_point::Value::AsDouble(value) => value,
        };
        let tenant = attribute(&point.attributes, "cotenant.tenant").unwrap_or_default();
        (tenant, point.start_time_unix_nano, point.time_unix_nano, value)
    };
    numbers.iter().map(of).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn c112_delta_loses_nothing_across_an_outage() {
    let away = Away::new();
    let node = Node::new();
    let settings = settings(
        "grpc",
        away.address,
        metrics_only(Wishes {
            temporality: Some("delta".into()),
            interval: Some(Duration::from_millis(30)),
            ..Wishes::default()
        }),
    );
    assert_eq!(settings.temporality, Temporality::Delta);
    let sender = node.start(&settings);
    let account = sender.account();
    let grow = |view: &mut cotenant_model::view::View| {
        for tenant in &mut view.tenants {
            tenant.operations.values_mut().for_each(|calls| *calls += 7);
        }
    };
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        node.change(grow);
    }
    assert!(failures(&account, "metrics", "unreachable") > 1);
    // One tenant is gone before the receiver is back: what it had counted must arrive all the same.
    let ada: u64 = {
        let view = node.0.lock().unwrap().clone();
        view.tenants.iter().find(|tenant| tenant.tenant.name == "user:ada").unwrap().operations.values().sum()
    };
    tokio::time::sleep(Duration::from_millis(100)).await;
    node.change(|view| view.tenants.retain(|tenant| tenant.tenant.name != "user:ada"));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let sink = Sink::default();
    let incoming = tonic::transport::server::TcpIncoming::from(away.back());
    let router = sink.grpc_router(tonic::transport::Server::builder());
    tokio::spawn(async move { router.serve_with_incoming(incoming).await.unwrap() });
    until("the first delivery", || exported(&account, "metrics") > 0).await;
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        node.change(grow);
    }
    let wanted: u64 = {
        let view = node.0.lock().unwrap().clone();
        view.tenants.iter().map(|tenant| tenant.operations.values().sum::<u64>()).sum()
    };
    stop(sender).await;
    let operations: Vec<(String, u64, u64, f64)> = sink
        .metrics()
        .iter()
        .filter(|metric| metric.name == "cotenant.gpu.memory.operations")
        .flat_map(points)
        .collect();
    let sum = |of: &dyn Fn(&str) -> bool| -> f64 {
        operations.iter().filter(|(tenant, ..)| of(tenant)).map(|(.., value)| value).sum()
    };
    assert_eq!(sum(&|tenant| tenant == "user:ada"), ada as f64);
    assert_eq!(sum(&|tenant| tenant != "user:ada"), wanted as f64);
    assert!(operations.iter().all(|(_, start, end, value)| start < end && *value >= 0.0));
    assert_eq!(dropped(&account, "metrics", "stopped"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_asks_for_patience_gets_it_over_http() {
    let sink = Sink::planned([Answer::Status(429, Some("1")), Answer::Status(503, None)]);
    let address = sink.http().await;
    let node = Node::new();
    let sender = node.start(&settings("http/protobuf", address, metrics_only(Wishes::default())));
    let account = sender.account();
    until("the delivery", || exported(&account, "metrics") > 0).await;
    let arrivals = sink.arrivals();
    assert!(arrivals[1] - arrivals[0] >= Duration::from_secs(1), "{:?}", arrivals[1] - arrivals[0]);
    assert!(arrivals[2] - arrivals[1] < Duration::from_secs(1), "{:?}", arrivals[2] - arrivals[1]);
    assert_eq!(failures(&account, "metrics", "throttled"), 1);
    assert_eq!(failures(&account, "metrics", "unavailable"), 1);
    stop(sender).await;
    assert_eq!(dropped(&account, "metrics", "refused"), 0);
}

/// The pause is the receiver's, not one request's: nothing that waits may come sooner.
#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_asks_for_an_hour_is_left_alone() {
    let sink = Sink::planned([Answer::Status(503, Some("3600"))]);
    let address = sink.http().await;
    let node = Node::new();
    let wishes = Wishes { interval: Some(Duration::from_millis(20)), ..Wishes::default() };
    let sender = node.start(&settings("http/protobuf", address, metrics_only(wishes)));
    let account = sender.account();
    until("the refusal", || failures(&account, "metrics", "throttled") > 0).await;
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        node.pass();
    }
    assert_eq!(sink.arrivals().len(), 1, "{:?}", account.view());
    assert_eq!(dropped(&account, "metrics", "too_old"), 0);
    stop(sender).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_asks_for_patience_gets_it_over_grpc() {
    let sink = Sink::planned([
        Answer::Code(Code::ResourceExhausted, Some(Duration::from_millis(900))),
        Answer::Code(Code::Unavailable, None),
        // Without a delay this one means that it would not help to try again.
        Answer::Code(Code::ResourceExhausted, None),
    ]);
    let address = sink.grpc().await;
    let node = Node::new();
    let sender = node.start(&settings("grpc", address, metrics_only(Wishes::default())));
    let account = sender.account();
    until("the refusal", || dropped(&account, "metrics", "refused") > 0).await;
    node.pass();
    until("the delivery", || exported(&account, "metrics") > 0).await;
    let arrivals = sink.arrivals();
    assert!(arrivals[1] - arrivals[0] >= Duration::from_millis(900), "{:?}", arrivals[1] - arrivals[0]);
    assert_eq!(failures(&account, "metrics", "throttled"), 1);
    assert_eq!(failures(&account, "metrics", "unavailable"), 1);
    assert_eq!(failures(&account, "metrics", "refused"), 1);
    stop(sender).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_receiver_leaves_out_is_counted_and_not_sent_again() {
    for protocol in ["http/protobuf", "grpc"] {
        let sink = Sink::planned([Answer::Partial(5)]);
        let address = if protocol == "grpc" { sink.grpc().await } else { sink.http().await };
        let node = Node::new();
        let sender = node.start(&settings(protocol, address, metrics_only(Wishes::default())));
        let account = sender.account();
        until("the answer", || exported(&account, "metrics") > 0).await;
        stop(sender).await;
        assert_eq!(dropped(&account, "metrics", "rejected"), 5, "{protocol}");
        let arrived: u64 = sink.metrics().iter().map(|metric| points(metric).len() as u64).sum();
        assert_eq!(arrived, exported(&account, "metrics") + 5, "{protocol}");
        assert_eq!(sink.metric_requests(), 1, "{protocol}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_counted_and_the_next_is_tried() {
    let sink = Sink::planned([Answer::Status(400, None)]);
    let address = sink.http().await;
    let node = Node::new();
    let sender = node.start(&settings("http/protobuf", address, metrics_only(Wishes::default())));
    let account = sender.account();
    until("the refusal", || dropped(&account, "metrics", "refused") > 0).await;
    node.pass();
    until("the next one", || exported(&account, "metrics") > 0).await;
    stop(sender).await;
    assert_eq!(failures(&account, "metrics", "refused"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_receiver_is_given_up_in_time_and_tried_again() {
    for protocol in ["http/protobuf", "grpc"] {
        let sink = Sink::planned([Answer::Slow(Duration::from_secs(30))]);
        let address = if protocol == "grpc" { sink.grpc().await } else { sink.http().await };
        let node = Node::new();
        let wishes = Wishes { timeout: Some(Duration::from_millis(300)), ..Wishes::default() };
        let sender = node.start(&settings(protocol, address, metrics_only(wishes)));
        let account = sender.account();
        until("the delivery", || exported(&account, "metrics") > 0).await;
        assert_eq!(failures(&account, "metrics", "timeout"), 1, "{protocol}");
        stop(sender).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_sends_what_is_left_and_takes_two_seconds_at_most() {
    let sink = Sink::default();
    let address = sink.http().await;
    let node = Node::new();
    let hour = Wishes { interval: Some(Duration::from_hours(1)), ..Wishes::default() };
    let sender = node.start(&settings("http/protobuf", address, metrics_only(hour.clone())));
    until("the first collection", || sink.metric_requests() == 1).await;
    node.pass();
    stop(sender).await;
    assert_eq!(sink.metric_requests(), 2, "the last figures were sent");

    let sink = Sink::planned(std::iter::repeat_n(Answer::Slow(Duration::from_secs(30)), 9));
    let address = sink.grpc().await;
    let sender = node.start(&settings("grpc", address, metrics_only(hour)));
    let account = sender.account();
    until("the first attempt", || !sink.arrivals().is_empty()).await;
    let begun = Instant::now();
    stop(sender).await;
    assert!(begun.elapsed() < Duration::from_millis(2500), "{:?}", begun.elapsed());
    assert!(dropped(&account, "metrics", "stopped") > 0);
}
