//! Owns what one OOM looks like in the kernel log: a summary, perhaps a group, one line a victim.
//! Refuses text: lines come in parsed.

use super::Scope;

/// One line that the OOM killer wrote. All of one OOM are written under one lock, so they are neighbours in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OomLine {
    /// `oom-kill:constraint=…`. Rate-limited: in a storm, kills have none.
    Summary(OomSummary),
    /// `Tasks in <cgroup> are going to be killed due to memory.oom.group set`.
    Group { cgroup: String },
    /// `… Killed process N (comm) …`, one a victim.
    Killed(KillLine),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomSummary {
    pub scope: Scope,
    /// `None` for a shortage that is no cgroup's, and where hostile names leave more than one reading.
    pub limit_owner: Option<String>,
    pub task_cgroup: Option<String>,
    pub comm: Option<String>,
    /// The process chosen.
    pub pid: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KillLine {
    /// The line says that a memory cgroup was full.
    pub memcg: bool,
    /// A thread of the victim that still had its memory: mostly its leader.
    pub pid: u32,
    pub comm: String,
}

/// One victim as the log tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LogVictim {
    pub time_ns: u64,
    pub pid: u32,
    /// The process chosen, where the line names another of its threads.
    pub leader: Option<u32>,
    pub comm: String,
    pub scope: Option<Scope>,
    pub limit_owner: Option<String>,
    pub task_cgroup: Option<String>,
    /// Victims with the same number died of one OOM.
    pub episode: u64,
    /// The cgroup that was killed as a whole, with it in it. The process that was chosen for it has none.
    pub member_of: Option<String>,
}

/// Puts victims together from lines in order.
#[derive(Clone, Debug, Default)]
pub(super) struct LogFold {
    episode: u64,
    /// The last summary, with its line's sequence number, until its victim's line comes.
    summary: Option<(u64, OomSummary)>,
    /// Whose limit the last victim died of, and when.
    last: Option<(u64, Option<String>)>,
    group: Option<Group>,
}

/// A cgroup that is being killed as a whole.
#[derive(Clone, Debug)]
struct Group {
    cgroup: String,
    began_ns: u64,
    limit_owner: Option<String>,
}

/// The lines of one OOM come within this.
const EPISODE_NS: u64 = 2_000_000_000;

impl LogFold {
    pub(super) fn take(&mut self, time_ns: u64, sequence: u64, line: OomLine) -> Option<LogVictim> {
        match line {
            OomLine::Summary(summary) => {
                self.summary = Some((sequence, summary));
                self.group = None;
                None
            }
            // The chosen process has died already; the rest of its cgroup follows.
            OomLine::Group { cgroup } => {
                let last = self.last.take().filter(|(at, _)| time_ns.saturating_sub(*at) <= EPISODE_NS);
                if last.is_none() {
                    self.episode += 1;
                }
                let limit_owner = last.and_then(|(_, owner)| owner);
                self.group = Some(Group { cgroup, began_ns: time_ns, limit_owner });
                None
            }
            OomLine::Killed(line) => Some(self.victim(time_ns, sequence, line)),
        }
    }

    fn victim(&mut self, time_ns: u64, sequence: u64, line: KillLine) -> LogVictim {
        let mut victim = LogVictim {
            time_ns,
            pid: line.pid,
            leader: None,
            comm: line.comm,
            // Without a summary, a shortage that is no cgroup's is the host's or a cpuset's.
            scope: line.memcg.then_some(Scope::Memcg),
            limit_owner: None,
            task_cgroup: None,
            episode: self.episode,
            member_of: None,
        };
        // A victim is its summary's if the process is the same, or if nothing came between: then the line names the
        // thread that still had the memory (`find_lock_task_mm`).
        let summary = self.summary.take_if(|(at, summary)| {
            (summary.scope == Scope::Memcg) == line.memcg
                && (summary.pid == line.pid || at.checked_add(1) == Some(sequence))
        });
        if let Some((_, summary)) = summary {
            victim.leader = (summary.pid != line.pid).then_some(summary.pid);
            victim.scope = Some(summary.scope);
            victim.limit_owner = summary.limit_owner;
            victim.task_cgroup = summary.task_cgroup;
        } else if let Some(group) = &self.group
            && line.memcg
            && time_ns.saturating_sub(group.began_ns) <= EPISODE_NS
        {
            victim.limit_owner.clone_from(&group.limit_owner);
            victim.member_of = Some(group.cgroup.clone());
            return victim;
        }
        self.episode += 1;
        self.group = None;
        self.last = Some((time_ns, victim.limit_owner.clone()));
        victim.episode = self.episode;
        victim
    }
}
