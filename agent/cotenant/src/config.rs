//! Owns the configuration: one TOML file, flags over it, every key checked.
//! Refuses unknown keys and values out of range, with their place and what is allowed.

use std::{
    collections::BTreeMap,
    io::ErrorKind,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use cotenant_model::{Classes, WaitClass};
use serde::Deserialize;

use crate::{
    kubernetes::Kubernetes, paging::config::Alertmanager, redact, slurm::Slurm, telemetry::config::Otlp,
};

/// Every key with its comment, as shipped.
pub(crate) const COMMENTED: &str = include_str!("../../../deploy/cotenant.toml");
const DEFAULT_FILE: &str = "/etc/cotenant/cotenant.toml";
/// Set for tenants of a simulated node; an agent that has it set may ask the simulated NVML more often.
const SIMULATED: &str = "COTENANT_SIM_NODE";
/// The kernel's log; `syslog(2)` stands in for it, and for no other file.
pub(crate) const KMSG: &str = "/dev/kmsg";

/// Flags that override the file.
#[derive(Args, Debug, Default)]
pub(crate) struct Overrides {
    /// Configuration file [default: /etc/cotenant/cotenant.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Address to serve on [default: 127.0.0.1:9468]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,
    /// TLS and users, in the format of Prometheus's exporter-toolkit [default: plain HTTP]
    #[arg(long, value_name = "FILE")]
    pub(crate) web_config: Option<PathBuf>,
    /// NVML library to load
    #[arg(long, value_name = "FILE")]
    pub(crate) nvml_library: Option<PathBuf>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    pub(crate) server: Server,
    pub(crate) agent: Agent,
    pub(crate) kernel: Kernel,
    pub(crate) nvml: Nvml,
    pub(crate) tenants: Tenants,
    pub(crate) kubernetes: Kubernetes,
    pub(crate) slurm: Slurm,
    pub(crate) waits: Waits,
    pub(crate) events: Events,
    pub(crate) otlp: Otlp,
    pub(crate) alertmanager: Alertmanager,
    pub(crate) log: Log,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Server {
    pub(crate) listen: SocketAddr,
    /// TLS, users and headers, in the format of Prometheus's exporter-toolkit; none when empty.
    pub(crate) web_config: PathBuf,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Agent {
    #[serde(with = "humantime_serde")]
    pub(crate) interval: Duration,
    pub(crate) root: PathBuf,
    pub(crate) drop_privileges: bool,
    /// Where `cotenant release` and `resume` are heard; none when empty.
    pub(crate) control: PathBuf,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Kernel {
    pub(crate) processes: u32,
    pub(crate) threads: u32,
    pub(crate) pointers: u32,
    pub(crate) handles: u32,
    pub(crate) process_share: f64,
    pub(crate) syscall_tracepoint: bool,
    pub(crate) probe_share: f64,
    #[serde(with = "humantime_serde")]
    pub(crate) shed_for: Duration,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Nvml {
    pub(crate) enabled: bool,
    pub(crate) library: Option<PathBuf>,
    #[serde(with = "humantime_serde")]
    pub(crate) interval: Duration,
    #[serde(with = "humantime_serde")]
    pub(crate) deadline: Duration,
    pub(crate) pcie: bool,
    /// While it says `true`, NVML is released; none when empty.
    pub(crate) release_file: PathBuf,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Tenants {
    pub(crate) max: usize,
    #[serde(with = "humantime_serde")]
    pub(crate) retention: Duration,
    #[serde(with = "humantime_serde")]
    pub(crate) idle_after: Duration,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Waits {
    pub(crate) enabled: bool,
    #[serde(with = "humantime_serde")]
    pub(crate) slow_call: Duration,
    pub(crate) symbols: BTreeMap<String, String>,
}

impl Waits {
    /// The table of symbols with the ones of the configuration before it.
    pub(crate) fn classes(&self) -> Result<Classes> {
        let mut extra = Vec::new();
        for (symbol, class) in &self.symbols {
            let names: Vec<&str> = WaitClass::ALL.iter().map(|class| class.as_str()).collect();
            let class = WaitClass::parse(class).with_context(|| {
                format!("waits.symbols: {class:?} is no wait class; they are {}", names.join(", "))
            })?;
            extra.push((symbol.as_str(), class));
        }
        Classes::new(extra).context("waits.symbols")
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Events {
    /// Below `agent.root`.
    pub(crate) kernel_log: PathBuf,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Log {
    pub(crate) level: String,
    pub(crate) format: LogFormat,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    Text,
    Json,
}

impl Default for Server {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 9468)), web_config: PathBuf::new() }
    }
}

impl Default for Agent {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(1),
            root: PathBuf::from("/"),
            drop_privileges: true,
            control: PathBuf::from(crate::control::SOCKET),
        }
    }
}

impl Default for Kernel {
    fn default() -> Self {
        let cotenant_kernel::MapSizes { processes, threads, pointers, handles, .. } =
            cotenant_kernel::MapSizes::default();
        Self {
            processes,
            threads,
            pointers,
            handles,
            process_share: 0.5,
            syscall_tracepoint: true,
            probe_share: 0.5,
            shed_for: Duration::from_secs(30),
        }
    }
}

impl Default for Nvml {
    fn default() -> Self {
        Self {
            enabled: true,
            library: None,
            interval: Duration::from_secs(10),
            deadline: Duration::from_secs(2),
            pcie: false,
            release_file: PathBuf::new(),
        }
    }
}

impl Default for Tenants {
    fn default() -> Self {
        Self { max: 512, retention: Duration::from_mins(15), idle_after: Duration::from_mins(10) }
    }
}

impl Default for Waits {
    fn default() -> Self {
        Self { enabled: true, slow_call: Duration::from_millis(100), symbols: BTreeMap::new() }
    }
}

impl Default for Events {
    fn default() -> Self {
        Self { kernel_log: PathBuf::from(KMSG) }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Text }
    }
}

/// Whether this agent watches a simulated node.
pub(crate) fn simulated() -> bool {
    std::env::var_os(SIMULATED).is_some()
}

/// The file that counts, if there is one.
pub(crate) fn source(overrides: &Overrides) -> Option<PathBuf> {
    let default = Path::new(DEFAULT_FILE);
    overrides.config.clone().or_else(|| default.exists().then(|| default.to_owned()))
}

pub(crate) fn load(overrides: &Overrides) -> Result<Config> {
    let mut config = source(overrides).map_or_else(|| Ok(Config::default()), |file| read(&file))?;
    if let Some(listen) = overrides.listen {
        config.server.listen = listen;
    }
    if let Some(file) = &overrides.web_config {
        config.server.web_config.clone_from(file);
    }
    if let Some(library) = &overrides.nvml_library {
        config.nvml.library = Some(library.clone());
    }
    Ok(config)
}

pub(crate) fn read(file: &Path) -> Result<Config> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        let remedy = unreadable(error.kind());
        anyhow::Error::new(error).context(format!("cannot read {}{remedy}", file.display()))
    })?;
    parse(&text).with_context(|| format!("{} is not a valid configuration", file.display()))
}

const fn unreadable(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound => {
            " (without --config the defaults are in force; `cotenant config default` prints them)"
        }
        ErrorKind::PermissionDenied => {
            ", which has to be readable by the user that this runs as (chgrp cotenant FILE; chmod 640 FILE)"
        }
        ErrorKind::IsADirectory => ", where a file is wanted, such as cotenant.toml in it",
        _ => "",
    }
}

/// What the parser's words for a value leave open.
const MEANT: [(&str, &str); 2] = [
    ("expected a duration", "a number and a unit in quotes, such as \"500ms\", \"10s\" or \"5m\""),
    (
        "invalid socket address syntax",
        "an address and a port in quotes, such as \"127.0.0.1:9468\" or \"[::]:9468\"",
    ),
];

/// Where, and what is wrong with it. The line itself, which the parser would show, may have a password in it.
fn misread(text: &str, error: &toml::de::Error) -> anyhow::Error {
    let at = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = at.matches('\n').count() + 1;
    let column = at.chars().rev().take_while(|letter| *letter != '\n').count() + 1;
    let told = redact::complaint(error.message());
    match MEANT.iter().find(|(part, _)| told.contains(part)) {
        Some((_, meant)) => anyhow!("line {line}, column {column}: {told}: {meant}"),
        None => anyhow!("line {line}, column {column}: {told}"),
    }
}

fn parse(text: &str) -> Result<Config> {
    let config: Config = toml::from_str(text).map_err(|error| misread(text, &error))?;
    check(&config)?;
    Ok(config)
}

fn check(config: &Config) -> Result<()> {
    let Config {
        server, agent, kernel, nvml, tenants, kubernetes, slurm, events, otlp, alertmanager, ..
    } = config;
    otlp.check()?;
    kubernetes.check()?;
    slurm.check()?;
    alertmanager.check()?;
    let floor = cotenant_device::MIN_INTERVAL;
    if agent.interval < Duration::from_millis(100) {
        bail!(
            "agent.interval is {:?}: reading the maps more often than every 100ms only costs CPU",
            agent.interval
        );
    }
    if nvml.interval < floor && !simulated() {
        bail!(
            "nvml.interval is {:?}: not below {floor:?}, because NVML's process queries take the driver's locks",
            nvml.interval
        );
    }
    if nvml.deadline.is_zero() {
        bail!("nvml.deadline is 0: no call can meet it; the default is 2s");
    }
    for (key, value, most) in [
        ("processes", kernel.processes, 1 << 18),
        ("threads", kernel.threads, 1 << 20),
        ("pointers", kernel.pointers, 1 << 26),
        ("handles", kernel.handles, 1 << 24),
    ] {
        if !(64..=most).contains(&value) {
            bail!("kernel.{key} is {value}: allowed are 64 to {most}");
        }
    }
    if !(0.01..=1.0).contains(&kernel.process_share) {
        bail!(
            "kernel.process_share is {}: allowed are 0.01 to 1; with 1 one process may fill a map",
            kernel.process_share
        );
    }
    if !(0.0..=64.0).contains(&kernel.probe_share) {
        bail!("kernel.probe_share is {}: allowed are 0 (never) to 64, in CPUs", kernel.probe_share);
    }
    if kernel.shed_for < Duration::from_secs(1) {
        bail!("kernel.shed_for is {:?}: not below 1s, or probes come and go all the time", kernel.shed_for);
    }
    if !events.kernel_log.is_absolute() {
        bail!(
            "events.kernel_log is {}: a path from the root is wanted, such as /dev/kmsg",
            events.kernel_log.display()
        );
    }
    for (key, path) in [
        ("server.web_config", &server.web_config),
        ("agent.control", &agent.control),
        ("nvml.release_file", &nvml.release_file),
    ] {
        if !path.as_os_str().is_empty() && !path.is_absolute() {
            bail!("{key} is {}: a path from the root is wanted, or \"\" for none", path.display());
        }
    }
    if tenants.max == 0 {
        bail!("tenants.max is 0: every tenant would be \"other\"; allowed is 1 and more");
    }
    if tenants.idle_after.is_zero() {
        bail!("tenants.idle_after is 0: every holder would be idle; the default is 10m");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commented_file_names_every_key_with_its_default() {
        let uncommented: String = COMMENTED
            .lines()
            .map(|line| match line.strip_prefix("# ") {
                Some(key) if key.contains(" = ") && !key.starts_with("library") => format!("{key}\n"),
                _ => format!("{line}\n"),
            })
            .collect();
        let config = parse(&uncommented).expect("the shipped file is valid");
        assert_eq!(format!("{config:?}"), format!("{:?}", Config::default()));
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line() {
        let error = format!("{:#}", parse("[server]\nlisten = \"127.0.0.1:1\"\nport = 3\n").unwrap_err());
        assert!(error.contains("line 3") && error.contains("port"), "{error}");
    }

    #[test]
    fn a_value_of_a_wrong_kind_is_told_what_is_wanted() {
        for (text, word) in [
            ("[agent]\ninterval = 5\n", "\"500ms\""),
            ("[agent]\ninterval = \"5x\"\n", "\"10s\""),
            ("[server]\nlisten = \"9468\"\n", "127.0.0.1:9468"),
            ("[nvml]\nenabled = \"yes\"\n", "expected a boolean"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(word) && error.contains("line 2"), "{error}");
        }
    }

    #[test]
    fn no_line_of_the_file_is_in_what_is_said_of_it() {
        for (text, at) in [
            ("[otlp]\nheaders = { authorization = 5, token = \"hunter2\" }\n", "line 2, column 29"),
            ("[otlp]\nheaders = \"hunter2\"\n", "line 2, column 11"),
            ("[otlp]\nheaders = { token = \"hunter2\n", "line 2"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(at) && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_is_told_what_helps() {
        let directory = tempfile::tempdir().unwrap();
        for (file, word) in [
            (directory.path().to_owned(), "a file is wanted"),
            (directory.path().join("none"), "config default"),
        ] {
            let error = format!("{:#}", read(&file).unwrap_err());
            assert!(error.contains(word) && error.contains("os error"), "{error}");
        }
        // Root may read everything.
        assert!(unreadable(ErrorKind::PermissionDenied).contains("chmod 640"));
    }

    #[test]
    fn c47_a_poll_faster_than_the_floor_is_refused_with_the_reason() {
        let error = format!("{:#}", parse("[nvml]\ninterval = \"1s\"\n").unwrap_err());
        assert!(error.contains("locks"), "{error}");
    }

    #[test]
    fn values_out_of_range_say_what_is_allowed() {
        for (text, word) in [
            ("[kernel]\npointers = 1\n", "64 to"),
            ("[tenants]\nmax = 0\n", "1 and more"),
            ("[kernel]\nprocess_share = 0.0\n", "0.01 to 1"),
            ("[kernel]\nprobe_share = -1.0\n", "0 (never)"),
            ("[kernel]\nshed_for = \"10ms\"\n", "1s"),
            ("[nvml]\ndeadline = \"0s\"\n", "2s"),
            ("[tenants]\nidle_after = \"0s\"\n", "10m"),
            ("[kubernetes]\ninterval = \"1ms\"\n", "100ms"),
            ("[kubernetes]\ndeadline = \"0s\"\n", "2s"),
            ("[kubernetes]\npodresources = \"kubelet.sock\"\n", "/var/lib/kubelet"),
            ("[kubernetes]\nenabled = \"yes\"\n", "auto"),
            ("[kubernetes]\napi_watch = true\napi_server = \"http://a\"\n", "https"),
            ("[kubernetes]\nlabels = [\"team\"]\n", "api_watch = true"),
            ("[kubernetes]\napi_watch = true\ntenant_label = \"a b\"\n", "no key"),
            ("[kubernetes]\napi_watch = true\nannotations = [\"\"]\n", "no key"),
            ("[kubernetes]\napi_credentials = \"token\"\n", "from the root"),
            ("[slurm]\njob_mapping = \"jobs\"\n", "from the root"),
            ("[slurm]\ninterval = \"1ms\"\n", "100ms"),
            ("[events]\nkernel_log = \"kmsg\"\n", "/dev/kmsg"),
            ("[nvml]\nrelease_file = \"released\"\n", "from the root"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(word), "{error}");
        }
    }
}
