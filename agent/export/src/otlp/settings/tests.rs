use super::*;

fn resolve(wishes: &Wishes, environment: &[(&str, &str)]) -> Result<Settings, SettingsError> {
    let environment: BTreeMap<String, String> =
        environment.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    Settings::resolve(wishes, &|name| environment.get(name).cloned())
}

fn address(settings: &Settings, signal: Signal) -> String {
    settings.targets[&signal].endpoint.to_string()
}

#[test]
fn nothing_said_is_http_to_this_host_without_compression() {
    let settings = resolve(&Wishes::default(), &[]).unwrap();
    assert_eq!(address(&settings, Signal::Metrics), "http://localhost:4318/v1/metrics");
    assert_eq!(address(&settings, Signal::Logs), "http://localhost:4318/v1/logs");
    let traces = &settings.targets[&Signal::Traces];
    assert_eq!((traces.compression, traces.timeout), (Compression::None, Duration::from_secs(10)));
    assert_eq!(settings.temporality, Temporality::Cumulative);
}

#[test]
fn a_signals_own_variable_is_the_whole_address() {
    let settings = resolve(
        &Wishes::default(),
        &[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:4318/base/"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://traces:9/api"),
            ("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "grpc"),
        ],
    )
    .unwrap();
    assert_eq!(address(&settings, Signal::Metrics), "http://all:4318/base/v1/metrics");
    assert_eq!(address(&settings, Signal::Traces), "https://traces:9/api");
    assert_eq!(settings.targets[&Signal::Logs].protocol, Protocol::Grpc);
}

#[test]
fn the_file_goes_over_every_variable() {
    let wishes = Wishes {
        endpoint: Some("http://file:1".to_owned()),
        compression: Some("zstd".to_owned()),
        headers: [("x-tenant".to_owned(), "file".to_owned())].into(),
        timeout: Some(Duration::from_secs(3)),
        ..Wishes::default()
    };
    let settings = resolve(
        &wishes,
        &[
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://variable:2/x"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "500"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "X-Tenant=variable,authorization=Bearer%20abc"),
        ],
    )
    .unwrap();
    let metrics = &settings.targets[&Signal::Metrics];
    assert_eq!(metrics.endpoint.to_string(), "http://file:1/v1/metrics");
    assert_eq!((metrics.compression, metrics.timeout), (Compression::Zstd, Duration::from_secs(3)));
    assert_eq!(metrics.headers["x-tenant"], "file");
    assert_eq!(metrics.headers["authorization"], "Bearer abc");
    assert!(!format!("{metrics:?}").contains("abc"), "a header's value is a secret");
}

#[test]
fn a_grpc_address_without_a_scheme_is_tls_unless_the_environment_says_otherwise() {
    let grpc = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
    let bare = ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317");
    let settings = resolve(&Wishes::default(), &[grpc, bare]).unwrap();
    assert_eq!(address(&settings, Signal::Metrics), "https://collector:4317/");
    let plain = ("OTEL_EXPORTER_OTLP_INSECURE", "true");
    let settings = resolve(&Wishes::default(), &[grpc, bare, plain]).unwrap();
    assert_eq!(address(&settings, Signal::Metrics), "http://collector:4317/");
}

#[test]
fn a_variable_that_makes_no_sense_is_said_and_left_out() {
    let settings = resolve(
        &Wishes::default(),
        &[
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
            ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "Delta"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", ""),
        ],
    )
    .unwrap();
    assert_eq!(settings.targets[&Signal::Metrics].protocol, Protocol::Http);
    assert_eq!(settings.temporality, Temporality::Delta);
    let remarks = settings.remarks.join("\n");
    assert!(remarks.contains("http/json") && remarks.contains("10s"), "{remarks}");
}

#[test]
fn a_value_of_the_file_that_cannot_be_is_an_error_that_says_what_can() {
    for (wishes, word) in [
        (Wishes { protocol: Some("http/json".into()), ..Wishes::default() }, "http/protobuf"),
        (Wishes { compression: Some("lz4".into()), ..Wishes::default() }, "zstd"),
        (Wishes { endpoint: Some("collector".into()), ..Wishes::default() }, "http://"),
        (Wishes { headers: [("a b".into(), "c".into())].into(), ..Wishes::default() }, "a b"),
        (Wishes { client_key: Some("k".into()), ..Wishes::default() }, "client_certificate"),
        (Wishes { temporality: Some("both".into()), ..Wishes::default() }, "delta"),
    ] {
        let error = resolve(&wishes, &[]).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn signals_can_be_switched_off_one_by_one_and_all_together() {
    let wishes = Wishes { without: vec![Signal::Logs], ..Wishes::default() };
    let settings = resolve(&wishes, &[("OTEL_TRACES_EXPORTER", "none")]).unwrap();
    assert_eq!(settings.targets.keys().copied().collect::<Vec<_>>(), [Signal::Metrics]);
    let settings = resolve(&Wishes::default(), &[("OTEL_SDK_DISABLED", "true")]).unwrap();
    assert!(settings.targets.is_empty());
}

#[test]
fn resource_attributes_are_percent_decoded() {
    let (attributes, remark) = resource_attributes(&|name| match name {
        "OTEL_RESOURCE_ATTRIBUTES" => Some("k8s.cluster.name=eu%2Cwest, team=ml,a%3Db=c%20d".to_owned()),
        "OTEL_SERVICE_NAME" => Some("watch".to_owned()),
        _ => None,
    });
    assert_eq!(remark, None);
    assert_eq!(attributes["a=b"], "c d");
    assert_eq!(attributes["k8s.cluster.name"], "eu,west");
    assert_eq!(attributes["team"], "ml");
    assert_eq!(attributes["service.name"], "watch");
}

#[test]
fn resource_attributes_that_cannot_be_read_are_left_out_whole_and_said() {
    for broken in ["team=ml,oops", "team=ml,a=%zz", "team=ml,a=%e"] {
        let (attributes, remark) =
            resource_attributes(&|name| (name == "OTEL_RESOURCE_ATTRIBUTES").then(|| broken.to_owned()));
        assert!(attributes.is_empty(), "{attributes:?}");
        assert!(remark.is_some_and(|remark| remark.contains("OTEL_RESOURCE_ATTRIBUTES")), "{broken}");
    }
}

#[test]
fn every_variable_is_honoured_and_a_wrong_one_is_said_once() {
    let settings = resolve(
        &Wishes::default(),
        &[
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://all:4317"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "x-scope=a%2Cb,x-scope-2=c"),
            ("OTEL_EXPORTER_OTLP_LOGS_HEADERS", "x-scope=logs"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "2500"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "700"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
            ("OTEL_EXPORTER_OTLP_LOGS_COMPRESSION", "none"),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca"),
            ("OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE", "/metrics-ca"),
            ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "/crt"),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/key"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "5000"),
            ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "lowmemory"),
            (
                "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
                "BASE2_EXPONENTIAL_BUCKET_HISTOGRAM",
            ),
        ],
    )
    .unwrap();
    assert_eq!(settings.remarks, [""; 0]);
    let [metrics, traces, logs] = Signal::ALL.map(|signal| &settings.targets[&signal]);
    assert_eq!((metrics.protocol, traces.protocol), (Protocol::Http, Protocol::Grpc));
    assert_eq!(metrics.endpoint.to_string(), "https://all:4317/v1/metrics");
    assert_eq!(logs.endpoint.to_string(), "https://all:4317/");
    assert_eq!(
        (&metrics.headers["x-scope"], &logs.headers["x-scope"]),
        (&"a,b".parse().unwrap(), &"logs".parse().unwrap())
    );
    assert_eq!(logs.headers["x-scope-2"], "c");
    assert_eq!((logs.timeout, traces.timeout), (Duration::from_millis(2500), Duration::from_millis(700)));
    assert_eq!((traces.compression, logs.compression), (Compression::Gzip, Compression::None));
    assert_eq!(metrics.tls.certificate, Some("/metrics-ca".into()));
    assert_eq!(
        (&logs.tls.certificate, &logs.tls.client_certificate, &logs.tls.client_key),
        (&Some("/ca".into()), &Some("/crt".into()), &Some("/key".into()))
    );
    assert_eq!(settings.interval, Duration::from_secs(5));
    assert_eq!(settings.temporality, Temporality::Cumulative);
    assert_eq!(settings.histograms, Histograms::Exponential);

    let wrong = [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "udp"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "lz4"),
        ("OTEL_EXPORTER_OTLP_INSECURE", "maybe"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "5"),
        ("OTEL_SDK_DISABLED", "perhaps"),
        ("OTEL_LOGS_EXPORTER", "console"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "both"),
        ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "none"),
    ];
    let settings = resolve(&Wishes::default(), &wrong).unwrap();
    for (name, _) in wrong {
        let said = settings.remarks.iter().filter(|remark| remark.starts_with(&format!("{name} is")));
        assert_eq!(said.count(), 1, "{name}: {:?}", settings.remarks);
    }
    assert_eq!(settings.targets.len(), 3, "what makes no sense switches nothing off");
    assert_eq!(settings.interval, Duration::from_mins(1));
}

#[test]
fn a_password_in_an_address_is_not_shown() {
    let wishes = Wishes { endpoint: Some("https://user:secret@host:4318".into()), ..Wishes::default() };
    let settings = resolve(&wishes, &[]).unwrap();
    assert_eq!(settings.targets[&Signal::Logs].place(), "https://host:4318/v1/logs");
}
