//! Owns what lies between two snapshots: who churned, who waited, for whom, per second of that time.
//! Refuses a time that an agent's restart cut in two: there is nothing to compare then.

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;

use crate::snapshot::{Blamed, Name, Row, Snapshot};

/// A tenant as the table shows it. Figures of a time are absent in the first frame, and for who was not there before.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Line {
    pub(super) tenant: String,
    /// Indexes of its GPUs, `?` for an unknown one.
    pub(super) gpus: Vec<String>,
    /// By the probes, where they saw anything of it.
    pub(super) live: Option<u64>,
    /// By NVML, where it lists its processes.
    pub(super) nvml: Option<u64>,
    /// Some of its calls were not seen: figures are lower bounds.
    pub(super) partial: bool,
    /// Bytes allocated per second.
    pub(super) churn: Option<f64>,
    pub(super) calls: Option<f64>,
    pub(super) failures: u64,
    /// Seconds of waiting per second; several threads can wait at once.
    pub(super) waited: Option<f64>,
    /// Seconds that others waited for it, per second.
    pub(super) caused: Option<f64>,
    /// The culprit it waited for most, and its part of the wait.
    pub(super) mostly: Option<(String, f64)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Order {
    /// How long others waited for it.
    #[default]
    Caused,
    /// How long it waited.
    Waited,
    /// Device memory that it holds.
    Live,
    /// Bytes allocated per second.
    Churn,
    Name,
}

impl Order {
    const ALL: &'static [Self] = &[Self::Caused, Self::Waited, Self::Live, Self::Churn, Self::Name];

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Caused => "caused",
            Self::Waited => "waited",
            Self::Live => "live",
            Self::Churn => "churn",
            Self::Name => "name",
        }
    }

    pub(super) fn next(self) -> Self {
        let at = Self::ALL.iter().position(|order| *order == self).unwrap_or(0);
        Self::ALL[(at + 1) % Self::ALL.len()]
    }
}

/// The snapshot before, where counters of both can be compared, and the seconds between.
fn comparable<'a>(before: Option<&'a Snapshot>, now: &Snapshot) -> Option<(&'a Snapshot, f64)> {
    let before = before?;
    let seconds = now.taken - before.taken;
    (before.started.to_bits() == now.started.to_bits() && seconds > 0.0).then_some((before, seconds))
}

/// The table between two snapshots, the most telling line first.
pub(super) fn lines(before: Option<&Snapshot>, now: &Snapshot, order: Order) -> Vec<Line> {
    let before = comparable(before, now);
    let waits = before.map(|(before, seconds)| Waits::between(before, now, seconds));
    let earlier: BTreeMap<&Name, &Row> =
        before.iter().flat_map(|(before, _)| &before.tenants).map(|row| (&row.name, row)).collect();
    let indexes: BTreeMap<&str, u32> = now.gpus.iter().map(|gpu| (gpu.id.as_str(), gpu.index)).collect();
    let mut rows: BTreeMap<&Name, Option<&Row>> =
        now.tenants.iter().map(|row| (&row.name, Some(row))).collect();
    // A culprit need hold no memory: a process that only asks NVML is one.
    for culprit in waits.iter().flat_map(|waits| waits.caused.keys()) {
        rows.entry(culprit).or_default();
    }
    let line = |(name, row): (&Name, Option<&Row>)| {
        let per_second = |of: fn(&Row) -> f64| {
            let (earlier, row, (_, seconds)) = (earlier.get(name)?, row?, before?);
            Some((of(row) - of(earlier)).max(0.0) / seconds)
        };
        let places: BTreeSet<&String> =
            row.into_iter().flat_map(|row| row.live.keys().chain(row.nvml.keys())).collect();
        Line {
            gpus: places
                .iter()
                .map(|id| indexes.get(id.as_str()).map_or("?".to_owned(), u32::to_string))
                .collect(),
            live: row.map(|row| row.live.values().sum()),
            nvml: row.filter(|row| !row.nvml.is_empty()).map(|row| row.nvml.values().sum()),
            partial: row.is_some_and(|row| row.confidence != "complete"),
            churn: per_second(|row| row.allocated as f64),
            calls: per_second(|row| row.calls as f64),
            failures: row.map_or(0, |row| row.failures),
            waited: per_second(|row| row.blocked_seconds),
            caused: waits.as_ref().map(|waits| waits.caused.get(name).copied().unwrap_or(0.0)),
            mostly: waits.as_ref().and_then(|waits| waits.mostly(name)),
            tenant: name.to_string(),
        }
    };
    let mut lines: Vec<Line> = rows.into_iter().map(line).collect();
    let least = |one: Option<f64>| one.unwrap_or(-1.0);
    // Stable: names order what is equal.
    lines.sort_by(|one, two| match order {
        Order::Caused => least(two.caused)
            .total_cmp(&least(one.caused))
            .then(least(two.waited).total_cmp(&least(one.waited))),
        Order::Waited => least(two.waited).total_cmp(&least(one.waited)),
        Order::Live => two.live.cmp(&one.live),
        Order::Churn => least(two.churn).total_cmp(&least(one.churn)),
        Order::Name => std::cmp::Ordering::Equal,
    });
    lines
}

/// Blocked time between two snapshots.
struct Waits<'a> {
    /// Seconds per second that others waited for each culprit.
    caused: BTreeMap<&'a Name, f64>,
    /// By victim: each culprit's seconds.
    of: BTreeMap<&'a Name, BTreeMap<&'a Name, f64>>,
}

impl<'a> Waits<'a> {
    fn between(before: &'a Snapshot, now: &'a Snapshot, seconds: f64) -> Self {
        fn key(edge: &Blamed) -> (&Name, &Name, &str) {
            (&edge.victim, &edge.culprit, &edge.wait_class)
        }
        let earlier: BTreeMap<_, f64> = before.blame.iter().map(|edge| (key(edge), edge.seconds)).collect();
        let (mut caused, mut of) = (BTreeMap::new(), BTreeMap::<&Name, BTreeMap<&Name, f64>>::new());
        for edge in &now.blame {
            let fresh = edge.seconds - earlier.get(&key(edge)).copied().unwrap_or(0.0);
            if fresh <= 0.0 {
                continue;
            }
            if edge.relation == "neighbour" {
                *caused.entry(&edge.culprit).or_insert(0.0) += fresh / seconds;
            }
            *of.entry(&edge.victim).or_default().entry(&edge.culprit).or_insert(0.0) += fresh;
        }
        Self { caused, of }
    }

    fn mostly(&self, victim: &Name) -> Option<(String, f64)> {
        let culprits = self.of.get(victim)?;
        let all: f64 = culprits.values().sum();
        let (culprit, most) = culprits.iter().max_by(|one, two| one.1.total_cmp(two.1))?;
        Some((culprit.to_string(), most / all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::Gpu;

    fn name(tenant: &str) -> Name {
        Name { tenant: tenant.to_owned(), container: None }
    }

    fn row(tenant: &str, live: u64, allocated: u64, blocked: f64) -> Row {
        Row {
            name: name(tenant),
            processes: 1,
            confidence: "complete".to_owned(),
            live: BTreeMap::from([("GPU-a".to_owned(), live)]),
            nvml: BTreeMap::new(),
            host: 0,
            allocated,
            calls: allocated / 100,
            failures: 0,
            blocked_seconds: blocked,
        }
    }

    fn edge(victim: &str, culprit: &str, relation: &str, seconds: f64) -> Blamed {
        Blamed {
            victim: name(victim),
            culprit: name(culprit),
            relation: relation.to_owned(),
            wait_class: "rm_api_lock".to_owned(),
            seconds,
        }
    }

    fn snapshot(taken: f64, tenants: Vec<Row>, blame: Vec<Blamed>) -> Snapshot {
        let gpu = Gpu {
            id: "GPU-a".to_owned(),
            index: 3,
            name: "H200".to_owned(),
            limit: None,
            used: None,
            free: None,
            utilization: None,
            sharing: "time_sliced".to_owned(),
            reclaim_risk: BTreeMap::new(),
            exhaustion_seconds: None,
            driver: None,
            age_seconds: 1.0,
        };
        Snapshot { taken, started: 5.0, gpus: vec![gpu], tenants, blame, degraded: Vec::new() }
    }

    #[test]
    fn rates_are_of_the_time_between_two_snapshots() {
        let before = snapshot(
            10.0,
            vec![row("hog", 7, 1000, 0.0), row("chat", 9, 0, 1.0)],
            vec![edge("chat", "hog", "neighbour", 1.0)],
        );
        let now = snapshot(
            12.0,
            vec![row("hog", 8, 5000, 0.0), row("chat", 9, 0, 2.0), row("fresh", 1, 400, 0.5)],
            vec![
                edge("chat", "hog", "neighbour", 1.75),
                edge("chat", "device", "device", 0.25),
                edge("chat", "poller", "neighbour", 0.01),
            ],
        );
        let lines = lines(Some(&before), &now, Order::Caused);
        let names: Vec<&str> = lines.iter().map(|line| line.tenant.as_str()).collect();
        assert_eq!(names, ["hog", "poller", "chat", "fresh"]);
        assert_eq!(
            (lines[0].churn, lines[0].calls, lines[0].caused),
            (Some(2000.0), Some(20.0), Some(0.375))
        );
        assert_eq!((lines[0].live, &lines[0].gpus), (Some(8), &vec!["3".to_owned()]));
        let (culprit, part) = lines[2].mostly.clone().expect("a culprit");
        assert_eq!((culprit.as_str(), lines[2].waited), ("hog", Some(0.5)));
        assert!((part - 0.75 / 1.01).abs() < 1e-9);
        // Who was not there before has no rate; who holds nothing that is seen has no level.
        assert_eq!((lines[3].churn, lines[3].waited), (None, None));
        assert_eq!((lines[1].live, lines[1].caused), (None, Some(0.005)));
    }

    #[test]
    fn nothing_is_compared_over_a_restart_or_without_a_first_answer() {
        let now = snapshot(12.0, vec![row("chat", 9, 10, 2.0)], vec![edge("chat", "hog", "neighbour", 1.0)]);
        let mut before = snapshot(10.0, vec![row("chat", 9, 0, 1.0)], Vec::new());
        before.started = 4.0;
        for before in [None, Some(&before), Some(&now)] {
            let lines = lines(before, &now, Order::Live);
            assert_eq!(lines.len(), 1);
            assert_eq!((lines[0].churn, lines[0].waited, lines[0].caused), (None, None, None));
            assert_eq!((lines[0].live, lines[0].mostly.clone()), (Some(9), None));
        }
    }
}
