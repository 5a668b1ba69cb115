//! Owns the way from what was gathered to an [`Incident`]: sums, shares, order, cuts.
//! Refuses to drop silently: what is cut is counted in `unlisted`, and sums are of everything.

use std::collections::{BTreeMap, BTreeSet};

use super::case::Case;
use super::place::{Place, Source};
use super::{
    Blame, Evidence, FailureEvidence, GpuBytes, Incident, KillEvidence, Kind, MemoryShares, Rules,
    StallEvidence, State, Unlisted, Victim, WaitEvidence, WaitShares, XidEvidence, action, warned,
};
use crate::Tenant;
use crate::verdict::VerdictKind;

/// Lines of evidence of each sort.
const LINES: usize = 32;

impl Case {
    pub(super) fn view(&self, rules: &Rules, state: State) -> Incident {
        let mut unlisted =
            Unlisted { rows: self.rows_folded, timeline: self.steps_dropped, ..Unlisted::default() };
        let (wait_shares, blocked) = self.wait_shares();
        let (memory_shares, memory) = self.memory_shares();
        let kind = self.kind();
        let mut victims: Vec<Victim> = self.victims(state).into_values().collect();
        victims.sort_by(|a, b| {
            severity(b).cmp(&severity(a)).then(b.neighbour_seconds.total_cmp(&a.neighbour_seconds)).then_with(
                || b.blocked_seconds.total_cmp(&a.blocked_seconds).then_with(|| a.tenant.cmp(&b.tenant)),
            )
        });
        let mut culprits = self.culprits(blocked, &memory);
        culprits.sort_by(|a, b| {
            let key = |blame: &Blame| {
                let (wait, memory) = (blame.wait_share.unwrap_or(0.0), blame.memory_share.unwrap_or(0.0));
                match kind {
                    Kind::AllocationFailure | Kind::NearMiss => [memory, wait],
                    Kind::Stall => [blame.holds_stalled as f64, wait],
                    _ => [wait, memory],
                }
            };
            let ([first_a, second_a], [first_b, second_b]) = (key(a), key(b));
            first_b
                .total_cmp(&first_a)
                .then(second_b.total_cmp(&second_a))
                .then(b.holds_stalled.cmp(&a.holds_stalled))
                .then_with(|| a.tenant.cmp(&b.tenant))
        });
        unlisted.victims = victims.len().saturating_sub(rules.listed) as u64;
        unlisted.culprits = culprits.len().saturating_sub(rules.listed) as u64;
        victims.truncate(rules.listed);
        culprits.truncate(rules.listed);
        let evidence = self.evidence(state, &mut unlisted);
        let mut incident = Incident {
            id: self.id,
            kind,
            state,
            start_unix: self.start_unix,
            last_unix: self.last_unix,
            end_unix: (state == State::Closed).then_some(self.last_unix),
            host_lock: self.places.contains(&Place::HostLock),
            gpus: self.gpus.iter().cloned().collect(),
            memory_limits: self
                .places
                .iter()
                .filter_map(|place| if let Place::Memory(name) = place { Some(name.clone()) } else { None })
                .collect(),
            victims,
            culprits,
            wait_shares,
            memory_shares,
            evidence,
            timeline: self.timeline.clone(),
            chains: self.chains.clone(),
            actions: Vec::new(),
            warnings: warned::judge(&self.warnings, &self.failures, &self.kills),
            merged: self.merged.clone(),
            unlisted,
        };
        incident.actions = action::recommend(&incident);
        incident
    }

    fn victims(&self, state: State) -> BTreeMap<Tenant, Victim> {
        let mut victims: BTreeMap<Tenant, Victim> = BTreeMap::new();
        let mut stalls: BTreeMap<Tenant, Victim> = BTreeMap::new();
        for ((tenant, source, _), sum) in &self.waits {
            let victim = victims.entry(tenant.clone()).or_insert_with(|| unhurt(tenant));
            victim.blocked_seconds += sum.seconds;
            if source.neighbour().is_some() {
                victim.neighbour_seconds += sum.seconds;
            }
            victim.waits = victim.waits.saturating_add(sum.waits);
            victim.longest_seconds = most(victim.longest_seconds, sum.longest);
        }
        for (tenant, span) in &self.spans {
            let victim = victims.entry(tenant.clone()).or_insert_with(|| unhurt(tenant));
            let seconds = span.end - span.start;
            victim.observed_seconds = Some(seconds);
            victim.blocked_share = (seconds > 0.0).then(|| victim.neighbour_seconds / seconds);
            victim.peak_share = Some(span.peak_share);
        }
        for ((tenant, _), stall) in &self.stalls {
            let victim = stalls.entry(tenant.clone()).or_insert_with(|| unhurt(tenant));
            victim.stalled_seconds = most(victim.stalled_seconds, Some(stall.seconds));
            victim.stalled_now |= stall.ongoing && state == State::Open;
        }
        for (tenant, stall) in stalls {
            let victim = victims.entry(tenant.clone()).or_insert_with(|| unhurt(&tenant));
            (victim.stalled_seconds, victim.stalled_now) = (stall.stalled_seconds, stall.stalled_now);
        }
        for record in self.failures.values() {
            let victim = victims.entry(record.tenant.clone()).or_insert_with(|| unhurt(&record.tenant));
            let failed = record.count.saturating_sub(record.made_good);
            victim.failures = victim.failures.saturating_add(failed);
            victim.near_misses = victim.near_misses.saturating_add(record.near_misses);
            victim.largest_refused_bytes =
                victim.largest_refused_bytes.max(record.sizes.map(|sizes| sizes.largest));
        }
        for kill in &self.kills {
            let victim = victims.entry(kill.victim.clone()).or_insert_with(|| unhurt(&kill.victim));
            victim.killed_processes = victim.killed_processes.saturating_add(kill.processes.max(1));
            if !kill.gpu_live.is_empty() {
                let bytes = kill.gpu_live.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
                victim.gpu_bytes_at_death =
                    Some(victim.gpu_bytes_at_death.unwrap_or(0).saturating_add(bytes));
            }
        }
        for ((_, _, tenant), xid) in &self.xids {
            if let Some(tenant) = tenant {
                let victim = victims.entry(tenant.clone()).or_insert_with(|| unhurt(tenant));
                victim.xids = victim.xids.saturating_add(xid.count);
            }
        }
        victims
    }

    /// Parts of the blocked time, and its sum.
    fn wait_shares(&self) -> (Option<WaitShares>, f64) {
        let total: f64 = self.waits.values().map(|sum| sum.seconds).sum();
        if total <= 0.0 {
            return (None, 0.0);
        }
        let part = |is: fn(&Source) -> bool| {
            let seconds: f64 =
                self.waits.iter().filter(|((_, source, _), _)| is(source)).map(|(_, sum)| sum.seconds).sum();
            seconds / total
        };
        let shares = WaitShares {
            neighbours: part(|source| matches!(source, Source::Neighbour(_))),
            own: part(|source| matches!(source, Source::Own)),
            device: part(|source| matches!(source, Source::Device)),
            kernel: part(|source| matches!(source, Source::Kernel)),
            unknown: part(|source| matches!(source, Source::Unknown)),
        };
        (Some(shares), total)
    }

    /// Parts of the refusals by whose fault they were, and each neighbour's part.
    fn memory_shares(&self) -> (Option<MemoryShares>, BTreeMap<Tenant, f64>) {
        let mut shares = MemoryShares { neighbours: 0.0, own: 0.0, other_causes: 0.0, unknown: 0.0 };
        let mut by_tenant = BTreeMap::new();
        let total: f64 = self.failures.values().map(|record| record.count as f64).sum();
        if total <= 0.0 {
            return (None, by_tenant);
        }
        for record in self.failures.values() {
            let part = record.count as f64 / total;
            match record.verdict.kind {
                VerdictKind::Neighbour => {
                    shares.neighbours += part;
                    for (tenant, share) in record.verdict.culprits() {
                        *by_tenant.entry(tenant.clone()).or_default() += share * part;
                    }
                }
                VerdictKind::Own => shares.own += part,
                VerdictKind::Unknown => shares.unknown += part,
                VerdictKind::Fragmentation | VerdictKind::Limit | VerdictKind::Impossible => {
                    shares.other_causes += part;
                }
            }
        }
        (Some(shares), by_tenant)
    }

    fn culprits(&self, blocked: f64, memory: &BTreeMap<Tenant, f64>) -> Vec<Blame> {
        let mut waits: BTreeMap<&Tenant, f64> = BTreeMap::new();
        for ((_, source, _), sum) in &self.waits {
            if let Some(tenant) = source.neighbour() {
                *waits.entry(tenant).or_default() += sum.seconds;
            }
        }
        let mut stalled: BTreeMap<&Tenant, u64> = BTreeMap::new();
        for stall in self.stalls.values() {
            if let Some(tenant) = stall.holder.as_ref().and_then(Source::neighbour) {
                *stalled.entry(tenant).or_default() += u64::from(stall.ongoing);
            }
        }
        let names: BTreeSet<&Tenant> =
            waits.keys().copied().chain(memory.keys()).chain(stalled.keys().copied()).collect();
        let last = self.failures.values().max_by(|a, b| a.last_unix.total_cmp(&b.last_unix));
        names
            .into_iter()
            .map(|tenant| {
                let seconds = waits.get(tenant).copied().unwrap_or(0.0);
                let holder = last
                    .and_then(|record| record.verdict.holders.iter().find(|holder| holder.tenant == *tenant));
                Blame {
                    tenant: tenant.clone(),
                    blocked_seconds: seconds,
                    wait_share: (blocked > 0.0).then(|| seconds / blocked),
                    memory_share: last.map(|_| memory.get(tenant).copied().unwrap_or(0.0)),
                    held_bytes: holder.and_then(|holder| holder.bytes),
                    grew_bytes: holder.and_then(|holder| holder.grew),
                    holds_stalled: stalled.get(tenant).copied().unwrap_or(0),
                }
            })
            .collect()
    }

    fn evidence(&self, state: State, unlisted: &mut Unlisted) -> Vec<Evidence> {
        let mut blocked: BTreeMap<&Tenant, f64> = BTreeMap::new();
        for ((victim, _, _), sum) in &self.waits {
            *blocked.entry(victim).or_default() += sum.seconds;
        }
        let mut waits: Vec<_> = self.waits.iter().collect();
        waits.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds).then_with(|| a.0.cmp(b.0)));
        let waits = waits.into_iter().map(|((victim, source, class), sum)| {
            let wall = self.spans.get(victim).map(|span| span.end - span.start);
            Evidence::Wait(WaitEvidence {
                victim: victim.clone(),
                culprit: source.as_str().to_owned(),
                class: *class,
                seconds: sum.seconds,
                waits: sum.waits,
                longest_seconds: sum.longest,
                share: sum.seconds / blocked[victim],
                wall_share: wall.filter(|wall| *wall > 0.0).map(|wall| sum.seconds / wall),
                stack: sum.stack.clone(),
            })
        });
        let stalls = self.stalls.iter().map(|((victim, class), stall)| {
            Evidence::Stall(StallEvidence {
                victim: victim.clone(),
                class: *class,
                since_unix: stall.since_unix,
                seconds: stall.seconds,
                holder: stall.holder.as_ref().map_or("unknown", Source::as_str).to_owned(),
                ongoing: stall.ongoing && state == State::Open,
            })
        });
        let failures = self.failures.values().map(|record| Evidence::Failure(FailureEvidence::of(record)));
        let kills = self.kills.iter().map(|kill| {
            Evidence::Kill(KillEvidence {
                victim: kill.victim.clone(),
                at_unix: kill.at_unix,
                scope: kill.scope,
                limit_owner: kill.limit_owner.clone(),
                trigger: kill.trigger.clone(),
                processes: kill.processes,
                gpu_live: kill
                    .gpu_live
                    .iter()
                    .map(|(gpu, bytes)| GpuBytes { gpu: gpu.clone(), bytes: *bytes })
                    .collect(),
                host_pinned: kill.host_pinned,
                last_calls: kill.last_calls.clone(),
            })
        });
        let xids = self.xids.iter().map(|((gpu, code, tenant), xid)| {
            Evidence::Xid(XidEvidence {
                gpu: gpu.clone(),
                code: *code,
                tenant: tenant.clone(),
                echo: xid.echo,
                count: xid.count,
                first_unix: xid.first_unix,
                last_unix: xid.last_unix,
            })
        });
        let mut lines = Vec::new();
        let sorts: [Vec<Evidence>; 5] =
            [xids.collect(), kills.collect(), failures.collect(), stalls.collect(), waits.collect()];
        for mut sort in sorts {
            unlisted.evidence += sort.len().saturating_sub(LINES) as u64;
            sort.truncate(LINES);
            lines.append(&mut sort);
        }
        unlisted.evidence += self.records_dropped;
        lines
    }
}

/// Dead before faulted before refused before stuck before slow.
fn severity(victim: &Victim) -> (bool, bool, bool, bool) {
    (victim.killed_processes > 0, victim.xids > 0, victim.failures > 0, victim.stalled_seconds.is_some())
}

fn most(mine: Option<f64>, theirs: Option<f64>) -> Option<f64> {
    match (mine, theirs) {
        (Some(mine), Some(theirs)) => Some(mine.max(theirs)),
        (mine, theirs) => mine.or(theirs),
    }
}

fn unhurt(tenant: &Tenant) -> Victim {
    Victim {
        tenant: tenant.clone(),
        blocked_seconds: 0.0,
        neighbour_seconds: 0.0,
        observed_seconds: None,
        blocked_share: None,
        peak_share: None,
        waits: 0,
        longest_seconds: None,
        failures: 0,
        near_misses: 0,
        largest_refused_bytes: None,
        killed_processes: 0,
        gpu_bytes_at_death: None,
        xids: 0,
        stalled_seconds: None,
        stalled_now: false,
    }
}
