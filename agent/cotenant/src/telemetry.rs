//! Owns the wiring of OTLP: whether anything is sent, as whom, and what of each tick is told.
//! Refuses to stop the agent: what cannot be sent is a feature that is broken, and its reason is on `/status`.

pub(crate) mod config;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
};

use arc_swap::ArcSwapOption;
use cotenant_export::otlp::{Account, Call, Exemplars, Host, Resource, Sender, Teller, resource_attributes};
use cotenant_model::{
    Culprit, GpuId, ProcessId, Tenant,
    incident::{Changes, Incidents, Observation},
    report::SlowCall,
    view::{Feature, FeatureState, OtlpView, View},
};
use tracing::{info, warn};

use crate::{config::Config, discovery::chain, events::Clock, features::feature, stacks::Stacks};

const NAME: &str = "otlp";

/// The sender as the run holds it.
pub(crate) struct Telemetry {
    pub(crate) feature: Feature,
    running: Option<(Sender, Resource)>,
}

impl Telemetry {
    pub(crate) fn start(config: &Config, published: &Arc<ArcSwapOption<View>>) -> Self {
        let variable = |name: &str| std::env::var(name).ok();
        let off = |state, reason: String| Self { feature: feature(NAME, state, reason), running: None };
        if !config.otlp.enabled {
            return off(FeatureState::Disabled, "otlp.enabled = false".to_owned());
        }
        let settings = match config.otlp.settings(&variable) {
            Ok(settings) => settings,
            Err(error) => return off(FeatureState::Broken, format!("{error:#}")),
        };
        let (attributes, remark) = resource_attributes(&variable);
        for remark in settings.remarks.iter().chain(&remark) {
            warn!("{remark}");
        }
        if settings.targets.is_empty() {
            return off(FeatureState::Disabled, "no signal is left to send".to_owned());
        }
        let resource = Resource::new(host(&config.agent.root), env!("CARGO_PKG_VERSION"), attributes);
        let views = Arc::clone(published);
        match Sender::start(&settings, resource.clone(), Box::new(move || views.load_full())) {
            Ok(sender) => {
                for (signal, target) in &settings.targets {
                    info!(signal = signal.as_str(), endpoint = target.place(), "OTLP is sent");
                }
                let state = feature(NAME, FeatureState::Active, String::new());
                Self { feature: state, running: Some((sender, resource)) }
            }
            Err(error) => off(FeatureState::Broken, chain(&error)),
        }
    }

    /// What the tick tells with; silent when nothing is sent.
    pub(crate) fn voice(&self, config: &Config) -> Voice {
        let Some((sender, resource)) = &self.running else { return Voice::default() };
        Voice { teller: Some(Teller::new(sender, resource, config.otlp.rates())), account: sender.account() }
    }

    /// Where `/metrics` finds the traces that its histograms lead to: nowhere while none are sent.
    pub(crate) fn exemplars(&self) -> Arc<Mutex<Exemplars>> {
        self.running.as_ref().map(|(sender, _)| sender.exemplars()).unwrap_or_default()
    }

    /// Sends what is left, for two seconds at most.
    pub(crate) fn stop(self) {
        let Some((sender, _)) = self.running else { return };
        for view in sender.stop() {
            let stopped = view.dropped.iter().find(|(reason, _)| *reason == "stopped").map_or(0, |(_, n)| *n);
            if stopped > 0 {
                warn!(signal = view.signal, items = stopped, "OTLP: not delivered before the stop");
            }
        }
    }
}

/// Who this machine is. A name that is not known is not made up.
fn host(root: &Path) -> Host {
    let line = |path: &str| {
        let text = std::fs::read_to_string(root.join(path)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let own = || Some(rustix::system::uname().nodename().to_str().ok()?.to_owned());
    let name = if root == Path::new("/") { own() } else { line("etc/hostname").or_else(own) };
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    Host { name, id: line("etc/machine-id"), node: set("K8S_NODE_NAME").or_else(|| set("NODE_NAME")) }
}

/// The tick's side of it.
#[derive(Default)]
pub(crate) struct Voice {
    teller: Option<Teller>,
    account: Account,
}

/// A slow call as reported, with the GPU that it was on if it said so.
pub(crate) struct Slow<'a> {
    pub(crate) call: &'a SlowCall,
    pub(crate) gpu: Option<GpuId>,
    /// Whose process it is, also when that is gone by now.
    pub(crate) victim: Option<&'a Tenant>,
}

impl Voice {
    pub(crate) fn view(&self) -> Vec<OtlpView> {
        self.account.view()
    }

    pub(crate) fn tell(
        &mut self,
        incidents: &Incidents,
        changes: &Changes,
        observation: &Observation,
        calls: Vec<Call>,
    ) {
        if let Some(teller) = &mut self.teller {
            teller.tell(incidents, changes, observation, calls);
        }
    }

    pub(crate) fn farewell(&mut self, incidents: &Incidents, now_unix: f64) {
        if let Some(teller) = &mut self.teller {
            teller.farewell(incidents, now_unix);
        }
    }

    /// Slow calls with names. Empty when nothing is sent: names cost work.
    pub(crate) fn calls<'a>(
        &self,
        slow: impl Iterator<Item = Slow<'a>>,
        tenants: &BTreeMap<ProcessId, Tenant>,
        stacks: &Stacks,
        clock: Clock,
    ) -> Vec<Call> {
        if self.teller.is_none() {
            return Vec::new();
        }
        slow.filter_map(|slow| named(slow, tenants, stacks, clock)).collect()
    }
}

fn named(
    Slow { call, gpu, victim }: Slow<'_>,
    tenants: &BTreeMap<ProcessId, Tenant>,
    stacks: &Stacks,
    clock: Clock,
) -> Option<Call> {
    let seconds = |ns: u64| std::time::Duration::from_nanos(ns).as_secs_f64();
    // A culprit that nobody saw is unknown; one whose process has no name any more is unknown as well.
    let culprit = call.longest_culprit.and_then(|id| tenants.get(&id)).cloned();
    Some(Call {
        victim: tenants.get(&call.process).or(victim)?.clone(),
        pid: call.tgid,
        tid: call.tid,
        operation: call.operation,
        error: call.error,
        gpu,
        start_unix: clock.unix_of(call.start),
        seconds: seconds(call.duration_ns),
        blocked_seconds: seconds(call.blocked_ns),
        runnable_seconds: seconds(call.runnable_ns),
        bytes: call.bytes,
        longest_seconds: seconds(call.longest_ns),
        class: call.longest_stack.and_then(|stack| stacks.classes().get(&stack).copied()),
        culprit: Some(culprit.map_or(Culprit::Unknown, Culprit::Tenant)),
        stack: call.longest_stack.map(|stack| stacks.symbols(stack).to_vec()).unwrap_or_default(),
        shared: call.shared,
    })
}
