use cotenant_model::sample::{CallRow, GpuRef};

use super::*;

const LIBRARY: Key = (1, 2);
const RULES: Rules = Rules { share: 0.5, shed_for: Duration::from_secs(30), pair: Some(10e-6) };

fn library(pids: &[u32], shed: bool) -> LibraryState {
    LibraryState {
        path: "/usr/lib/libcuda.so.1".into(),
        device: LIBRARY.0,
        inode: LIBRARY.1,
        attached: 50,
        missing: 0,
        failed: 0,
        processes: u32::try_from(pids.len()).unwrap(),
        pids: pids.to_vec(),
        shed,
        refused: None,
    }
}

/// A process that has made so many calls of each kind.
fn process(id: u64, streams: u64, others: u64) -> ProcessSample {
    let row = |operation, calls| CallRow { gpu: GpuRef::Unknown, operation, calls };
    ProcessSample {
        id: ProcessId(id),
        tgid: u32::try_from(id).unwrap(),
        uid: 0,
        cgroup_id: 1,
        comm: "tenant".into(),
        first_seen: 1,
        ended: None,
        ended_at: 0,
        confidence: Confidence::Complete,
        before_memory: true,
        last_calls: Vec::new(),
        pools: Vec::new(),
        ledger: Vec::new(),
        calls: vec![row(Operation::MemFreeAsync, streams), row(Operation::MemAlloc, others)],
        failures: Vec::new(),
        latency: Vec::new(),
        waits: Vec::new(),
        blame: Vec::new(),
        effort: Vec::new(),
    }
}

/// Seconds at so many calls a second, with the library as it was ordered a second before.
struct Run {
    budget: Budget,
    second: u32,
    streams: u64,
    others: u64,
    shed: bool,
    /// What was ordered, second by second.
    log: Vec<(u32, bool, u64)>,
    written_off: u64,
    confidence: Confidence,
}

impl Run {
    fn new(rules: Rules) -> Self {
        Self {
            budget: Budget::new(rules),
            second: 0,
            streams: 0,
            others: 0,
            shed: false,
            log: Vec::new(),
            written_off: 0,
            confidence: Confidence::Complete,
        }
    }

    fn go(&mut self, seconds: u32, streams: u64, others: u64) {
        for _ in 0..seconds {
            self.second += 1;
            // What is not probed is not counted.
            self.streams += if self.shed { 0 } else { streams };
            self.others += others;
            let mut kernel = KernelSample {
                processes: vec![process(7, self.streams, self.others), process(8, 1, 1)],
                losses: vec![(Loss::ProbesShed, 0)],
                ..KernelSample::default()
            };
            let libraries = [library(&[7], self.shed)];
            let orders = self.budget.weigh(&mut kernel, &libraries, Duration::from_secs(self.second.into()));
            self.written_off += orders.write_off.len() as u64;
            self.shed = orders.shed.contains(&LIBRARY);
            self.log.push((self.second, self.shed, self.budget.untimed_count()));
            self.confidence = kernel.processes[0].confidence;
            assert_eq!(
                kernel.processes[1].confidence,
                Confidence::Complete,
                "who maps another library is exact"
            );
            assert_eq!(kernel.losses[0].1, u64::from(self.confidence == Confidence::EventsLost));
        }
    }
}

#[test]
fn c67_a_storm_loses_its_timing_first_and_its_exactness_last() {
    let mut run = Run::new(RULES);
    run.go(10, 1_000_000, 0);
    let untimed = run.log.iter().position(|(_, shed, untimed)| !shed && *untimed == 1).expect("untimed");
    let shed = run.log.iter().position(|(_, shed, _)| *shed).expect("shed");
    assert!(untimed < shed, "{:?}", run.log);
    assert_eq!(run.confidence, Confidence::EventsLost);
    assert!(run.written_off > 0);
}

#[test]
fn c67_what_was_shed_comes_back_and_stays_away_longer_when_the_storm_goes_on() {
    let mut run = Run::new(RULES);
    run.go(240, 1_000_000, 0);
    let mut spans = Vec::new();
    let mut since = None;
    for (second, shed, _) in &run.log {
        match (since, shed) {
            (None, true) => since = Some(*second),
            (Some(begun), false) => {
                spans.push(second - begun);
                since = None;
            }
            _ => {}
        }
    }
    assert!(spans.len() >= 2, "{spans:?}");
    assert!(spans.windows(2).all(|pair| pair[1] >= pair[0] * 2 - 2), "{spans:?}");
}

#[test]
fn c67_after_the_storm_everything_is_back_and_the_process_stays_marked() {
    let mut run = Run::new(RULES);
    run.go(10, 1_000_000, 0);
    run.go(60, 100, 10);
    assert_eq!(run.log.last().map(|(_, shed, untimed)| (*shed, *untimed)), Some((false, 0)));
    assert_eq!(run.confidence, Confidence::EventsLost, "what it holds is not known to the byte any more");
}

#[test]
fn c67_a_storm_of_other_calls_keeps_its_probes() {
    let mut run = Run::new(RULES);
    run.go(30, 0, 1_000_000);
    assert!(run.log.iter().all(|(_, shed, _)| !shed));
    assert_eq!((run.budget.untimed_count(), run.confidence), (1, Confidence::Complete));
}

#[test]
fn c67_within_the_budget_and_without_one_nothing_goes() {
    let mut run = Run::new(RULES);
    run.go(30, 30_000, 10_000);
    assert_eq!(run.log.iter().filter(|(_, shed, untimed)| *shed || *untimed > 0).count(), 0);
    let mut run = Run::new(Rules { share: 0.0, ..RULES });
    run.go(30, 1_000_000, 0);
    assert_eq!(run.log.iter().filter(|(_, shed, untimed)| *shed || *untimed > 0).count(), 0);
    assert_eq!(run.budget.feature(&[]).state, FeatureState::Disabled);
}
