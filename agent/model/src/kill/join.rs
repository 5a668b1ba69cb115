//! Owns how the three witnesses of a kill become one record, and the kills of one shortage one incident.
//! Refuses to wait for ever: what has not been joined when it is old is told as it is, and what comes later is not told twice.

use std::collections::VecDeque;

use super::log::{LogFold, LogVictim};
use super::{Agreement, CgroupKills, Kill, Marked, OomIncident, OomLine};
use crate::Tenant;

const SECOND: u64 = 1_000_000_000;

/// Kills that wait for their other witnesses.
#[derive(Clone, Debug, Default)]
pub struct Kills {
    fold: LogFold,
    marks: Vec<Marked>,
    victims: Vec<LogVictim>,
    counters: Vec<CgroupKills>,
    /// Kills that were told, by (time, tgid, tid): a witness that comes late says nothing new.
    told: VecDeque<(u64, u32, u32)>,
    /// When kills were told whose cgroup nobody knows: a counter that has one more may mean them.
    placeless: Vec<u64>,
    dropped: u64,
}

/// What is known for good now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settled {
    pub incidents: Vec<OomIncident>,
    /// See [`Agreement::Contradicted`].
    pub contradicted: Vec<Kill>,
    /// Kills that a cgroup's counter has and nobody saw; of a cgroup and its parents, the innermost.
    pub unseen: Vec<CgroupKills>,
}

/// A kill before it is told, with what it is made of.
struct Draft {
    kill: Kill,
    episode: Option<u64>,
    member: bool,
    mark: Option<usize>,
    victim: Option<usize>,
}

impl Kills {
    /// Waiting witnesses of each sort. One OOM of the largest group takes a few hundred.
    pub const MOST: usize = 1024;
    /// How long a kill waits for the log and the counters: two ticks.
    pub const SETTLE_NS: u64 = 2 * SECOND;
    /// How long an incident that grows is held.
    const HOLD_NS: u64 = 10 * SECOND;
    /// How far apart the witnesses of one kill may be. The log's clock is not quite the probe's.
    const JOIN_NS: u64 = 5 * SECOND;
    /// Victims of one trigger that die within this of each other are one incident.
    const FOLD_NS: u64 = SECOND;

    pub fn mark(&mut self, marked: Marked) {
        // Each thread of a victim that meets the allocator again may be marked: one process is one kill.
        let known = self
            .marks
            .iter()
            .any(|mark| mark.tgid == marked.tgid && mark.time_ns.abs_diff(marked.time_ns) <= Self::JOIN_NS);
        if known || self.is_told(marked.time_ns, |tgid, tid| tgid == marked.tgid || tid == marked.tid) {
            return;
        }
        keep(&mut self.marks, marked, &mut self.dropped);
    }

    /// Lines in their order. `time_ns` is monotonic, `sequence` the log's own.
    pub fn log(&mut self, time_ns: u64, sequence: u64, line: OomLine) {
        let Some(victim) = self.fold.take(time_ns, sequence, line) else { return };
        // Of a group the chosen one is killed first and then once more with all members, and both times the kernel says so
        // (`oom_kill_process`, then `oom_kill_memcg_member`): one process is one kill.
        let again = |known: &&mut LogVictim| {
            known.pid == victim.pid && known.time_ns.abs_diff(time_ns) <= Self::JOIN_NS
        };
        if let Some(known) = self.victims.iter_mut().find(again) {
            known.member_of = known.member_of.take().or(victim.member_of);
            return;
        }
        let process = victim.leader.unwrap_or(victim.pid);
        if !self.is_told(time_ns, |tgid, tid| tgid == process || tid == victim.pid) {
            keep(&mut self.victims, victim, &mut self.dropped);
        }
    }

    pub fn count(&mut self, counter: CgroupKills) {
        keep(&mut self.counters, counter, &mut self.dropped);
    }

    /// Witnesses that found no room.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// What needs no more waiting at `now_ns`. `tenant_of` names who a victim was that only the log saw, by PID and cgroup.
    pub fn settle(
        &mut self,
        now_ns: u64,
        tenant_of: impl Fn(u32, Option<&str>) -> Option<Tenant>,
    ) -> Settled {
        let settled_by = now_ns.saturating_sub(Self::SETTLE_NS);
        let held_by = now_ns.saturating_sub(Self::HOLD_NS);
        let mut settled = Settled::default();
        let (mut marks, mut victims) = (vec![false; self.marks.len()], vec![false; self.victims.len()]);
        for drafts in fold(self.drafts(tenant_of)) {
            let (first, last) = (drafts[0].kill.time_ns, drafts[drafts.len() - 1].kill.time_ns);
            if last > settled_by && first > held_by {
                continue;
            }
            for draft in &drafts {
                if let Some(at) = draft.mark {
                    marks[at] = true;
                }
                if let Some(at) = draft.victim {
                    victims[at] = true;
                }
            }
            self.tell(drafts, &mut settled);
        }
        drop_where(&mut self.marks, &marks);
        drop_where(&mut self.victims, &victims);
        settled.unseen = self.close_counters(settled_by.saturating_sub(Self::SETTLE_NS));
        settled
    }

    fn is_told(&self, time_ns: u64, same: impl Fn(u32, u32) -> bool) -> bool {
        self.told.iter().any(|(at, tgid, tid)| at.abs_diff(time_ns) <= Self::JOIN_NS && same(*tgid, *tid))
    }

    /// Every kill that anything waiting speaks of, by time.
    fn drafts(&self, tenant_of: impl Fn(u32, Option<&str>) -> Option<Tenant>) -> Vec<Draft> {
        let mut free = vec![true; self.marks.len()];
        let mut drafts = Vec::new();
        for (at, victim) in self.victims.iter().enumerate() {
            let same = |mark: &Marked| {
                (mark.tid == victim.pid || mark.tgid == victim.pid || Some(mark.tgid) == victim.leader)
                    && mark.time_ns.abs_diff(victim.time_ns) <= Self::JOIN_NS
            };
            let candidates = self.marks.iter().enumerate().filter(|(at, mark)| free[*at] && same(mark));
            let mark =
                candidates.min_by_key(|(_, mark)| mark.time_ns.abs_diff(victim.time_ns)).map(|(at, _)| at);
            if let Some(at) = mark {
                free[at] = false;
            }
            drafts.push(draft(mark.map(|at| (at, &self.marks[at])), Some((at, victim)), &tenant_of));
        }
        let alone = self.marks.iter().enumerate().filter(|(at, _)| free[*at]);
        drafts.extend(alone.map(|mark| draft(Some(mark), None, &tenant_of)));
        drafts.sort_by_key(|draft| draft.kill.time_ns);
        drafts
    }

    /// Adds an incident, after asking the counters about each of its kills.
    fn tell(&mut self, drafts: Vec<Draft>, settled: &mut Settled) {
        let mut incident: Option<OomIncident> = None;
        for Draft { mut kill, member, .. } in drafts {
            kill.agreement = self.agreement(&kill);
            if self.told.len() >= Self::MOST {
                self.told.pop_front();
            }
            self.told.push_back((kill.time_ns, kill.tgid, kill.tid));
            if kill.task_cgroup.is_none() && self.placeless.len() < Self::MOST {
                self.placeless.push(kill.time_ns);
            }
            if kill.agreement == Agreement::Contradicted {
                settled.contradicted.push(kill);
                continue;
            }
            let incident = incident.get_or_insert_with(|| OomIncident {
                first_ns: kill.time_ns,
                last_ns: kill.time_ns,
                scope: None,
                limit_owner: None,
                trigger: None,
                group: false,
                kills: Vec::new(),
            });
            incident.last_ns = kill.time_ns;
            incident.scope = incident.scope.or(kill.scope);
            incident.limit_owner = incident.limit_owner.take().or_else(|| kill.limit_owner.clone());
            incident.trigger = incident.trigger.take().or_else(|| kill.trigger.clone());
            incident.group |= member;
            incident.kills.push(kill);
        }
        settled.incidents.extend(incident);
    }

    /// Takes the kill off the counters of its cgroup and of those above it, which count it as well (cgroup v2).
    fn agreement(&mut self, kill: &Kill) -> Agreement {
        let (mut read, mut counted) = (false, false);
        if let Some(cgroup) = kill.task_cgroup.as_deref() {
            let mut above: Vec<&str> = Vec::new();
            for counter in &mut self.counters {
                let near = counter.time_ns.saturating_add(SECOND) >= kill.time_ns;
                if !near || !is_inside(cgroup, &counter.cgroup) || above.contains(&counter.cgroup.as_str()) {
                    continue;
                }
                let own = counter.cgroup == cgroup;
                // Only a difference over the moment of the kill can speak against it.
                read |= own && (counter.since_ns..=counter.time_ns).contains(&kill.time_ns);
                if counter.kills > 0 {
                    counter.kills -= 1;
                    counted |= own;
                    above.push(&counter.cgroup);
                }
            }
        }
        match (kill.agreement, counted) {
            (Agreement::ProbeOnly, true) => Agreement::Confirmed,
            (Agreement::ProbeOnly, false) if read => Agreement::Contradicted,
            (agreement, _) => agreement,
        }
    }

    /// Drops the readings whose kills are all told, and says what nobody saw, innermost cgroup first.
    fn close_counters(&mut self, before_ns: u64) -> Vec<CgroupKills> {
        let (mut closed, open): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.counters).into_iter().partition(|counter| counter.time_ns <= before_ns);
        self.counters = open;
        closed.retain(|counter| counter.kills > 0);
        closed.sort_by_key(|counter| std::cmp::Reverse(counter.cgroup.len()));
        // What is left at each cgroup by itself, without those below it.
        let mut left: Vec<CgroupKills> = Vec::new();
        for mut counter in closed {
            let within = |inner: &&CgroupKills| {
                inner.cgroup != counter.cgroup && is_inside(&inner.cgroup, &counter.cgroup)
            };
            let below = left.iter().filter(within).map(|inner| inner.kills).sum();
            counter.kills = counter.kills.saturating_sub(below);
            left.push(counter);
        }
        for counter in &mut left {
            let near = |told: &u64| *told <= counter.time_ns.saturating_add(SECOND);
            while counter.kills > 0
                && let Some(at) = self.placeless.iter().position(near)
            {
                self.placeless.swap_remove(at);
                counter.kills -= 1;
            }
        }
        self.placeless.retain(|told| *told > before_ns);
        left.retain(|counter| counter.kills > 0);
        left
    }
}

fn draft(
    mark: Option<(usize, &Marked)>,
    victim: Option<(usize, &LogVictim)>,
    tenant_of: impl Fn(u32, Option<&str>) -> Option<Tenant>,
) -> Draft {
    let (mark_at, mark) = mark.unzip();
    let (victim_at, victim) = victim.unzip();
    let known_cgroup = mark.and_then(|mark| mark.cgroup.as_deref());
    // In a storm the log leaves summaries out, and a kill elsewhere can look like one of a group's.
    let strays = victim.and_then(|victim| victim.member_of.as_deref()).zip(known_cgroup);
    let strays = strays.is_some_and(|(group, cgroup)| !is_inside(cgroup, group));
    let told = victim.filter(|_| !strays);
    let task_cgroup = told.and_then(|victim| victim.task_cgroup.as_deref()).or(known_cgroup);
    let pid = victim.map_or(0, |victim| victim.pid);
    let tgid = mark.map_or_else(|| victim.and_then(|victim| victim.leader).unwrap_or(pid), |mark| mark.tgid);
    let kill = Kill {
        time_ns: mark.map(|mark| mark.time_ns).or(victim.map(|victim| victim.time_ns)).unwrap_or_default(),
        tgid,
        tid: mark.map_or(pid, |mark| mark.tid),
        process: mark.and_then(|mark| mark.process),
        comm: mark.map(|mark| mark.comm.clone()).or_else(|| victim.map(|victim| victim.comm.clone())),
        tenant: mark.and_then(|mark| mark.tenant.clone()).or_else(|| tenant_of(tgid, task_cgroup)),
        scope: victim.and_then(|victim| victim.scope),
        limit_owner: told.and_then(|victim| victim.limit_owner.clone()),
        task_cgroup: task_cgroup.map(str::to_owned),
        trigger: mark.map(|mark| mark.trigger.clone()),
        agreement: match (mark, victim) {
            (Some(_), Some(_)) => Agreement::Confirmed,
            (Some(_), None) => Agreement::ProbeOnly,
            (None, _) => Agreement::LogOnly,
        },
        held: None,
    };
    let member = told.is_some_and(|victim| victim.member_of.is_some());
    Draft { kill, episode: told.map(|victim| victim.episode), member, mark: mark_at, victim: victim_at }
}

/// Kills of one shortage together: one episode of the log, or one trigger within a second on one limit.
fn fold(drafts: Vec<Draft>) -> Vec<Vec<Draft>> {
    let mut incidents: Vec<Vec<Draft>> = Vec::new();
    for draft in drafts {
        let belongs = |incident: &&mut Vec<Draft>| incident.iter().any(|other| are_one(other, &draft));
        match incidents.iter_mut().rev().find(belongs) {
            Some(incident) => incident.push(draft),
            None => incidents.push(vec![draft]),
        }
    }
    incidents
}

fn are_one(one: &Draft, other: &Draft) -> bool {
    if one.episode.is_some() && one.episode == other.episode {
        return true;
    }
    let trigger = |draft: &Draft| draft.kill.trigger.as_ref().map(|trigger| trigger.tgid);
    trigger(one).is_some()
        && trigger(one) == trigger(other)
        && one.kill.time_ns.abs_diff(other.kill.time_ns) <= Kills::FOLD_NS
        && agree(one.kill.scope, other.kill.scope)
        && agree(one.kill.limit_owner.as_deref(), other.kill.limit_owner.as_deref())
}

/// Two facts that are the same, as far as both are known.
fn agree<T: PartialEq>(one: Option<T>, other: Option<T>) -> bool {
    one.zip(other).is_none_or(|(one, other)| one == other)
}

/// Whether a cgroup is `outer` or below it.
pub(super) fn is_inside(cgroup: &str, outer: &str) -> bool {
    let rest = cgroup.strip_prefix(outer.trim_end_matches('/'));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn keep<T>(waiting: &mut Vec<T>, witness: T, dropped: &mut u64) {
    if waiting.len() < Kills::MOST {
        waiting.push(witness);
    } else {
        *dropped += 1;
    }
}

fn drop_where<T>(waiting: &mut Vec<T>, gone: &[bool]) {
    let mut gone = gone.iter();
    waiting.retain(|_| !gone.next().copied().unwrap_or_default());
}
