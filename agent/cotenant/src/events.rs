//! Owns the step from witnesses to incidents: blame, failed allocations, kills, Xids, once a tick.
//! Refuses rules: what belongs together, and what a failure means, the model says.

mod failures;
mod history;
mod kills;
mod roll;
mod whereabouts;

use std::{
    collections::{BTreeMap, VecDeque},
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use cotenant_export::otlp::Call;
use cotenant_host::{Followed, Host, KernelLog, KernelLogError, Notice, Start};
use cotenant_kernel::{Reader, Report, log_size, log_tail};
use cotenant_model::{
    Culprit, DeviceSample, GpuId, ProcessId, Tenant,
    blame::{Edge, Share},
    incident::{Incidents, Observation, Rules, Scarce, Stall, WaitDelta, WarningNote, XidNote},
    kill::{Kill, KillCount},
    report::{FailedCall, RetriedCall, SlowCall},
    risk::{Forecast, warning::Warning},
    sample::{GpuRef, KernelSample},
    stall,
    view::{EventsView, Feature, FeatureState},
    wait::class_of,
    xid::{PciAddress, XidReport, Xids},
};
use rustix::time::{ClockId, clock_gettime};
use tracing::{info, warn};

use crate::{
    config::KMSG,
    discovery::chain,
    features::feature,
    limits::Limits,
    registry::Registry,
    reports::Reported,
    stacks::Stacks,
    telemetry::{Slow, Voice},
};
use failures::Asks;
use history::History;
use kills::Witnesses;
pub(crate) use kills::told;
use roll::Roll;
use whereabouts::Whereabouts;

/// Records of the kernel's log that one tick reads.
const LOG_RECORDS: usize = 2000;
/// A wait that is worth its stack in an incident.
const TOLD: Duration = Duration::from_millis(20);

/// What one tick brings.
pub(crate) struct Tick<'a> {
    pub(crate) kernel: &'a KernelSample,
    pub(crate) device: &'a DeviceSample,
    pub(crate) tenants: &'a BTreeMap<ProcessId, Tenant>,
    pub(crate) blame: &'a BTreeMap<Edge, Share>,
    pub(crate) reports: Vec<Reported>,
    pub(crate) stacks: &'a Stacks,
    pub(crate) reader: Option<&'a Reader>,
    /// The node's only GPU, if it has one.
    pub(crate) only: Option<&'a GpuId>,
    pub(crate) limits: &'a Limits,
    /// Faults that others than the kernel's log told since the last tick, with how long ago.
    pub(crate) faults: Vec<(Duration, XidReport)>,
    /// Of the tick before, and how long ago that was said.
    pub(crate) forecast: (&'a Forecast, Duration),
}

/// Both clocks at one moment.
#[derive(Clone, Copy)]
pub(crate) struct Clock {
    pub(crate) monotonic_ns: u64,
    pub(crate) unix: f64,
}

impl Clock {
    fn now() -> Self {
        let time = clock_gettime(ClockId::Monotonic);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        Self {
            monotonic_ns: seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0),
            unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
        }
    }

    pub(crate) fn unix_of(self, monotonic_ns: u64) -> f64 {
        self.unix - (self.monotonic_ns as f64 - monotonic_ns as f64) / 1e9
    }
}

/// What people may ask for.
pub(crate) struct Story {
    pub(crate) incidents: Incidents,
    /// Newest first, with the time of day.
    pub(crate) kills: VecDeque<(f64, Kill)>,
}

impl Default for Story {
    fn default() -> Self {
        Self { incidents: Incidents::new(Rules::default()), kills: VecDeque::new() }
    }
}

/// The kernel's log where the host has it, and what it is to the agent.
pub(crate) fn open_log(host: &Host, path: &Path) -> (Option<Followed>, Feature) {
    let name = "kernel_log";
    let refused = match KernelLog::open(&host.path(&path.to_string_lossy()), Start::End) {
        Ok(log) => return (Some(log.followed()), feature(name, FeatureState::Active, String::new())),
        Err(error) => chain(&error),
    };
    // A pod may not open the device, whatever is mounted. Another file was chosen by somebody; another host's log is not here.
    let by_call = (path == Path::new(KMSG) && host.is_running())
        .then(|| log_size().map_err(|source| KernelLogError::Syslog { source }))
        .map(|size| size.and_then(|size| Followed::by_syslog(log_tail, size)));
    let reason = match by_call {
        Some(Ok(log)) => {
            return (Some(log), feature(name, FeatureState::Active, format!("by syslog(2): {refused}")));
        }
        Some(Err(error)) => format!("{refused}; {}", chain(&error)),
        None => refused,
    };
    let reason = format!("kills have no limit owner, and Xids are not seen: {reason}");
    (None, feature(name, FeatureState::Broken, reason))
}

pub(crate) struct Events {
    log: Option<Followed>,
    /// Records that were overwritten before they were read.
    log_lost: u64,
    witnesses: Witnesses,
    asks: Asks,
    history: History,
    roll: Roll,
    /// Reports of processes that no sample has shown yet; they wait for one more.
    unnamed: Vec<Report>,
    xids: Xids,
    /// Faults that were told already.
    told_xid: Option<u64>,
    places: BTreeMap<PciAddress, GpuId>,
    story: Arc<Mutex<Story>>,
    before: Clock,
    pub(crate) voice: Voice,
}

impl Events {
    pub(crate) fn new(
        host: &Host,
        log: Option<Followed>,
        registry: Arc<Mutex<Registry>>,
        story: Arc<Mutex<Story>>,
        voice: Voice,
    ) -> Self {
        Self {
            log,
            log_lost: 0,
            witnesses: Witnesses::new(host.clone(), registry),
            asks: Asks::new(host.clone()),
            history: History::default(),
            roll: Roll::default(),
            unnamed: Vec::new(),
            xids: Xids::default(),
            told_xid: None,
            // Later NVML says so too, of those that it lists.
            places: host.gpu_addresses(),
            story,
            before: Clock::now(),
            voice,
        }
    }

    /// One tick.
    pub(crate) fn observe(&mut self, tick: &Tick<'_>) -> EventsView {
        let clock = Clock::now();
        let elapsed = clock.monotonic_ns.saturating_sub(self.before.monotonic_ns) as f64 / 1e9;
        // This tick's sample was taken after that: what had happened by then is in it.
        let sampled_after = std::mem::replace(&mut self.before, clock).monotonic_ns;
        for gpu in &tick.device.gpus {
            if let Some(pci) = PciAddress::parse(&gpu.pci) {
                self.places.insert(pci, gpu.id.clone());
            }
        }
        self.roll.advance(tick.tenants, clock);
        let movements = self.history.advance(tick.kernel, tick.tenants, clock);
        self.asks.calibrate(tick.device, tick.kernel);
        self.witnesses.follow(tick.kernel, tick.tenants, clock);
        let (mut slow, mut words) = (Vec::new(), Vec::new());
        let unnamed = std::mem::take(&mut self.unnamed);
        let again = unnamed.iter().map(|report| (report, None));
        for (report, fresh) in again.chain(tick.reports.iter().map(|of| (&of.report, Some(of)))) {
            if let (
                Report::Failed { call: FailedCall { process, .. }, .. }
                | Report::Retried { call: RetriedCall { process, .. }, .. },
                Some(_),
            ) = (report, fresh)
                && self.roll.of(*process).is_none()
            {
                // It is younger than the sample.
                self.unnamed.push(report.clone());
                continue;
            }
            match report {
                Report::Failed { gpu, call } => {
                    let gpu = resolve(tick, call.process, *gpu);
                    words.extend(self.asks.failed(call, gpu, tick, (&self.history, &self.roll), clock));
                }
                Report::Retried { gpu, call } => {
                    let gpu = resolve(tick, call.process, *gpu);
                    words.extend(Asks::retried(call, gpu, &self.roll, clock));
                }
                Report::Killed(thread) => {
                    if let Some(reported) = fresh {
                        self.witnesses.mark(thread, reported, &self.roll);
                    }
                }
                Report::Slow { gpu, call } => slow.push((*gpu, call)),
                Report::Fault(fault) => {
                    let witnesses = &self.witnesses;
                    self.xids.observe(fault.clone(), &self.places, |pid| witnesses.tenant_of_pid(pid));
                }
            }
        }
        self.asks.tell(words, tick, &self.roll, clock);
        self.read_log(clock);
        self.hear(&tick.faults, clock);
        let kills = self.witnesses.settle(tick, sampled_after, clock);
        let whereabouts = Whereabouts::of(tick);
        let observation = Observation {
            at_unix: clock.unix,
            elapsed,
            waits: waits(tick, &whereabouts, slow.iter().map(|(_, call)| *call)),
            stalls: stalls(tick, &whereabouts, clock),
            failures: self.asks.records.drain(clock.unix),
            kills,
            xids: self.fresh_xids(clock),
            movements,
            warnings: warnings(tick.forecast, clock),
        };
        let roll = &self.roll;
        let told = slow.into_iter().map(|(gpu, call)| Slow {
            call,
            gpu: resolve(tick, call.process, gpu),
            victim: roll.of(call.process),
        });
        let calls = self.voice.calls(told, tick.tenants, tick.stacks, clock);
        self.judge(&observation, calls)
    }

    fn judge(&mut self, observation: &Observation, calls: Vec<Call>) -> EventsView {
        let Ok(mut story) = self.story.lock() else { return EventsView::default() };
        story.kills.clone_from(&self.witnesses.recent);
        let incidents = &mut story.incidents;
        let changes = incidents.observe(observation);
        self.voice.tell(incidents, &changes, observation, calls);
        for id in &changes.opened {
            if let Some(incident) = incidents.find(*id) {
                info!(incident = %id, "{}", cotenant_model::explain::line(&incident));
            }
        }
        EventsView {
            incidents: incidents.totals().clone(),
            open_incidents: incidents.open() as u64,
            kills: self
                .witnesses
                .counters
                .rows()
                .map(|(tenant, scope, KillCount { kills, .. })| ((tenant.cloned(), scope), kills))
                .collect(),
            xids: self
                .xids
                .counts()
                .map(|(gpu, code, count)| {
                    ((gpu.cloned(), code), (count.count, self.before.unix_of(count.last_ns)))
                })
                .collect(),
            xid_reports: self
                .xids
                .reports()
                .map(|(gpu, code, source, count)| ((gpu.cloned(), code, source), count))
                .collect(),
            lost: [
                incidents.losses().incidents,
                incidents.losses().waits,
                self.asks.records.unfolded(),
                self.witnesses.dropped(),
                self.xids.uncounted(),
                self.log_lost,
            ]
            .iter()
            .sum(),
        }
    }

    /// Before the agent stops.
    pub(crate) fn farewell(&mut self) {
        if let Ok(story) = self.story.lock() {
            self.voice.farewell(&story.incidents, Clock::now().unix);
        }
    }

    fn read_log(&mut self, clock: Clock) {
        let Some(log) = &mut self.log else { return };
        let records = match log.read(LOG_RECORDS) {
            Ok(records) => records,
            Err(error) => {
                warn!(error = %chain(&error), "the kernel's log is not read any more");
                self.log = None;
                return;
            }
        };
        self.log_lost = log.lost();
        for record in records {
            match record.notice(clock.monotonic_ns) {
                Some(Notice::Oom(line)) => self.witnesses.log(clock, record.sequence, line),
                Some(Notice::Xid(report)) => {
                    let witnesses = &self.witnesses;
                    self.xids.observe(report, &self.places, |pid| witnesses.tenant_of_pid(pid));
                }
                Some(Notice::Gpu { pci, gpu }) => {
                    self.places.insert(pci, gpu);
                }
                None => {}
            }
        }
    }

    /// What NVML (or a tracepoint) told of the faults that the kernel's log has too, or has not.
    fn hear(&mut self, faults: &[(Duration, XidReport)], clock: Clock) {
        for (ago, report) in faults {
            let ago = u64::try_from(ago.as_nanos()).unwrap_or(u64::MAX);
            let report = XidReport { time_ns: clock.monotonic_ns.saturating_sub(ago), ..report.clone() };
            let witnesses = &self.witnesses;
            self.xids.observe(report, &self.places, |pid| witnesses.tenant_of_pid(pid));
        }
    }

    fn fresh_xids(&mut self, clock: Clock) -> Vec<XidNote> {
        let told = self.told_xid;
        let fresh: Vec<_> =
            self.xids.recent().filter(|xid| told.is_none_or(|told| xid.number > told)).collect();
        self.told_xid = fresh.iter().map(|xid| xid.number).max().max(told);
        fresh
            .into_iter()
            .filter_map(|xid| {
                Some(XidNote {
                    at_unix: clock.unix_of(xid.time_ns),
                    gpu: xid.gpu.clone()?,
                    code: xid.code,
                    tenant: xid.tenant.clone(),
                    echo: xid.echo_of.is_some(),
                })
            })
            .collect()
    }
}

fn resolve(tick: &Tick<'_>, process: ProcessId, code: u8) -> Option<GpuId> {
    match tick.reader?.gpu(process, code, tick.only) {
        Ok(GpuRef::Known(gpu)) => Some(gpu),
        _ => None,
    }
}

fn warnings((forecast, ago): (&Forecast, Duration), clock: Clock) -> Vec<WarningNote> {
    let said = clock.unix - ago.as_secs_f64();
    let note = |of: Scarce, warning: &Warning| WarningNote::new(of, warning, forecast.at.as_secs_f64(), said);
    let gpus = forecast.gpus.iter().filter_map(|of| {
        let gpu = of.gpu.clone();
        of.warning.as_ref().map(|warning| note(Scarce::Gpu { gpu }, warning))
    });
    let memory = forecast.host.iter().flat_map(|host| &host.warnings).map(|of| {
        let scarce = of.tenant.clone().map_or(Scarce::Host, |tenant| Scarce::Limit { tenant });
        note(scarce, &of.warning)
    });
    gpus.chain(memory).collect()
}

fn waits<'a>(
    tick: &'a Tick<'_>,
    whereabouts: &Whereabouts<'_>,
    slow: impl Iterator<Item = &'a SlowCall>,
) -> Vec<WaitDelta> {
    let mut longest: BTreeMap<(&Tenant, Option<&Tenant>), u64> = BTreeMap::new();
    for call in slow {
        let Some(victim) = tick.tenants.get(&call.process) else { continue };
        let culprit = call.longest_culprit.and_then(|id| tick.tenants.get(&id));
        let known = longest.entry((victim, culprit)).or_default();
        *known = (*known).max(call.longest_ns);
    }
    tick.blame
        .iter()
        .map(|((victim, culprit, class), share)| {
            let named = match culprit {
                Culprit::Tenant(tenant) => Some(tenant),
                _ => None,
            };
            let long = Duration::from_nanos(share.time_ns) >= TOLD;
            WaitDelta {
                victim: victim.clone(),
                culprit: culprit.clone(),
                class: *class,
                gpus: whereabouts.places(victim, named, *class),
                seconds: Duration::from_nanos(share.time_ns).as_secs_f64(),
                waits: share.waits,
                longest: longest.get(&(victim, named)).map(|ns| Duration::from_nanos(*ns).as_secs_f64()),
                stack: if long { whereabouts.stack(tick.stacks, victim, *class) } else { Vec::new() },
            }
        })
        .collect()
}

fn stalls(tick: &Tick<'_>, whereabouts: &Whereabouts<'_>, clock: Clock) -> Vec<Stall> {
    let stalls = tick.kernel.stalls.iter();
    stalls
        .filter_map(|row| {
            let victim = tick.tenants.get(&row.process)?.clone();
            let class = class_of(tick.stacks.classes(), row.stack);
            let holder = stall::holder(row, tick.kernel, |stack| class_of(tick.stacks.classes(), stack));
            let holder = holder.and_then(|id| tick.tenants.get(&id));
            Some(Stall {
                gpus: whereabouts.places(&victim, holder, class),
                victim,
                class,
                since_unix: clock.unix - row.blocked_ns as f64 / 1e9,
                holder: holder.map(|tenant| Culprit::Tenant(tenant.clone())),
            })
        })
        .collect()
}
