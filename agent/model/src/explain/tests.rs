//! Owns the proofs of the words: whole texts, compared.

use super::*;
use crate::incident::{
    Incidents, KillNote, KillScope, Movement, Observation, Rules, Scarce, Stall, WaitDelta, WarningNote,
    XidNote,
};
use crate::risk::warning::Severity;
use crate::verdict::{Ask, Failures, Fold, Success};
use crate::{CudaError, Culprit, Operation, ProcessId, Tenant, TenantKind};

const GIB: u64 = 1 << 30;
/// 08:46:40 UTC.
const T0: f64 = 1_796_028_400.0;

fn tenant(name: &str) -> Tenant {
    Tenant::plain(TenantKind::Docker, name)
}

fn pod(name: &str, container: &str) -> Tenant {
    Tenant {
        namespace: Some("ml".into()),
        pod: Some(name.into()),
        container: Some(container.into()),
        ..Tenant::plain(TenantKind::Pod, &format!("ml/{name}"))
    }
}

fn gpu(n: u8) -> GpuId {
    GpuId::from_uuid([n; 16])
}

fn observed(at: f64) -> Observation {
    Observation { at_unix: at, elapsed: 1.0, ..Observation::default() }
}

fn one(incidents: &Incidents) -> Explained {
    let mut all = incidents.list(None, None);
    assert_eq!(all.len(), 1, "{all:#?}");
    all.remove(0).into()
}

fn text(incidents: &Incidents) -> String {
    one(incidents).explanation.to_string()
}

fn refused(failures: &mut Failures, at: f64, ask: &Ask, observation: &mut Observation) {
    assert!(failures.failed(at, 1, ask));
    observation.failures = failures.drain(at);
}

fn ask(requested: u64) -> Ask {
    Ask {
        requested: Some(requested),
        gpu: Some(gpu(1)),
        capacity: Some(80 * GIB),
        reserved: Some(GIB),
        free: Some(GIB),
        free_age_seconds: Some(0.4),
        own_live: Some(GIB),
        ..Ask::new(tenant("infer"), Operation::MemAlloc, CudaError::OUT_OF_MEMORY)
    }
}

#[test]
fn a_neighbour_in_the_hosts_lock() {
    let mut incidents = Incidents::new(Rules::default());
    for n in 1..=2 {
        let mut observation = observed(T0 + f64::from(n));
        let row = |culprit, seconds, class, stack: &[&str]| WaitDelta {
            victim: tenant("infer"),
            culprit,
            class,
            gpus: vec![gpu(1)],
            seconds,
            waits: 300,
            longest: Some(0.0763),
            stack: stack.iter().map(|frame| (*frame).to_owned()).collect(),
        };
        observation.waits = vec![
            row(
                Culprit::Tenant(tenant("burst")),
                0.62,
                WaitClass::RmApiLock,
                &["rwsem_down_write_slowpath", "os_acquire_rwlock_write", "rmapiLockAcquire"],
            ),
            row(Culprit::Device, 0.005, WaitClass::RmApiLock, &[]),
        ];
        incidents.observe(&observation);
    }
    assert_eq!(
        text(&incidents),
        "\
docker:burst made docker:infer wait 1.24 s of 2.00 s (62 %) for the driver's API lock (one for all GPUs of the host) on GPU-01010101-0101-0101-0101-010101010101 (since 08:46:40 UTC, still open).

Measured:
  - docker:infer: blocked 1.25 s in driver calls over 2.00 s watched, 1.24 s of it by neighbours; 1200 waits, longest 76 ms.
  - Blocked time by cause: docker:burst 99.2 %, device 0.8 %.

Why we say so:
  - docker:burst ended 99.2 % of docker:infer's blocked time (1.24 s in 600 waits, class rm_api_lock): blocked in rwsem_down_write_slowpath <- os_acquire_rwlock_write <- rmapiLockAcquire.

What to do:
  - Let docker:burst keep its memory instead of returning it to the driver each time (caching allocator, pool release threshold); the same helps docker:infer.
  - If that cannot be, put docker:infer on another host: the lock is one for all GPUs of this one.
"
    );
    assert_eq!(
        one(&incidents).line,
        "08:46:40     2.00 s  open  noisy_neighbour  docker:burst -> docker:infer  on the host's driver lock"
    );
}

#[test]
fn a_neighbour_that_grew_and_a_refusal() {
    let mut incidents = Incidents::new(Rules::default());
    let mut failures = Failures::new(Fold::default());
    let grown = (25 * GIB).cast_signed();
    let mut observation = observed(T0);
    observation.movements = vec![Movement { tenant: tenant("burst"), gpu: gpu(1), bytes: grown }];
    incidents.observe(&observation);
    let mut observation = observed(T0 + 1.0);
    let facts = Ask {
        holders: Some(vec![(tenant("burst"), 70 * GIB), (tenant("old"), 7 * GIB)]),
        growth: Some(vec![(tenant("burst"), grown)]),
        ..ask(2 * GIB)
    };
    refused(&mut failures, T0 + 1.0, &facts, &mut observation);
    incidents.observe(&observation);
    assert_eq!(
        text(&incidents),
        "\
docker:infer was refused 2.0 GiB on GPU-01010101-0101-0101-0101-010101010101: its neighbour docker:burst holds 70.0 GiB and had just grown by 25.0 GiB (since 08:46:41 UTC, still open).

Measured:
  - docker:infer: cuMemAlloc returned CUDA_ERROR_OUT_OF_MEMORY once at 08:46:41 UTC, 2.0 GiB (2,147,483,648 bytes).
  - 08:46:39 to 08:46:40 UTC: docker:burst took 25.0 GiB (26,843,545,600 bytes) on GPU-01010101-0101-0101-0101-010101010101.

Why we say so:
  - Verdict for docker:infer: neighbour (certainty high). 2.0 GiB (2,147,483,648 bytes) were asked, 1.0 GiB (1,073,741,824 bytes) were free, 1.0 GiB (1,073,741,824 bytes) were missing. Without its neighbours 78.0 GiB (83,751,862,272 bytes) would have been free. It held 1.0 GiB (1,073,741,824 bytes) itself. Its neighbours held 77.0 GiB (82,678,120,448 bytes). Its neighbours had just grown by 25.0 GiB (26,843,545,600 bytes). Largest other holders: docker:burst 70.0 GiB (75,161,927,680 bytes), docker:old 7.0 GiB (7,516,192,768 bytes).
  - docker:burst grew by 25.0 GiB (26,843,545,600 bytes) on GPU-01010101-0101-0101-0101-010101010101, up to 1.00 s before docker:infer was refused.

What to do:
  - Cap docker:burst's memory (MPS limit, framework fraction) or move it or docker:infer to another GPU.
"
    );
}

#[test]
fn a_refusal_that_was_warned_of() {
    let mut incidents = Incidents::new(Rules::default());
    let mut failures = Failures::new(Fold::default());
    let mut observation = observed(T0 + 1.0);
    let facts = Ask { holders: Some(vec![(tenant("burst"), 70 * GIB)]), ..ask(2 * GIB) };
    refused(&mut failures, T0 + 1.0, &facts, &mut observation);
    observation.warnings = vec![WarningNote {
        of: Scarce::Gpu { gpu: gpu(1) },
        raised_unix: T0 - 44.0,
        severity: Severity::Warning,
        risk: 0.62,
        driver: Some(tenant("burst")),
        victims: vec![tenant("old"), tenant("infer")],
        true_unix: None,
    }];
    incidents.observe(&observation);
    let words = text(&incidents);
    let said = "It was warned of 45.0 s before, at 08:45:56 UTC, with a risk of 62 % within a minute. It named docker:burst as \
                the driver, rightly, and docker:old or docker:infer as who would be refused first, rightly.";
    assert!(words.contains(said), "{words}");
}

#[test]
fn nothing_known_is_said_to_be_unknown() {
    let mut incidents = Incidents::new(Rules::default());
    let mut failures = Failures::new(Fold::default());
    let mut observation = observed(T0);
    let facts = Ask::new(tenant("infer"), Operation::MemAlloc, CudaError::OUT_OF_MEMORY);
    refused(&mut failures, T0, &facts, &mut observation);
    incidents.observe(&observation);
    assert_eq!(
        text(&incidents),
        "\
docker:infer was refused memory of unknown size on a GPU that is unknown: the cause is unknown (since 08:46:40 UTC, still open).

Measured:
  - docker:infer: cuMemAlloc returned CUDA_ERROR_OUT_OF_MEMORY once at 08:46:40 UTC, size unknown.

Why we say so:
  - Verdict for docker:infer: unknown (certainty low). Unknown: how much was free.

What to do:
  - Find out on /status why the agent did not have the fact that is missing.
"
    );
    let words = text(&incidents);
    assert!(!words.contains("0 bytes") && !words.contains("0.0 GiB"), "unknown is never zero");
}

#[test]
fn the_end_of_a_run_of_pieces() {
    let mut incidents = Incidents::new(Rules::default());
    let mut failures = Failures::new(Fold::default());
    let mut observation = observed(T0);
    let facts = Ask {
        operation: Operation::MemCreate,
        own_growth: Some(78 * GIB.cast_signed()),
        own_live: Some(79 * GIB - (10 << 20)),
        process: Some(ProcessId(1)),
        ..ask(20 << 20)
    };
    refused(&mut failures, T0, &facts, &mut observation);
    incidents.observe(&observation);
    let explained = one(&incidents);
    assert_eq!(
        explained.explanation.headline,
        "docker:infer was refused 20 MiB on GPU-01010101-0101-0101-0101-010101010101: its own memory is in the way (since 08:46:40 UTC, still open)."
    );
    assert_eq!(
        explained.explanation.because,
        [
            "Verdict for docker:infer: self (certainty high). Even without its neighbours only 10 MiB (10,485,760 bytes) would have been free. It held 79.0 GiB (84,815,118,336 bytes) itself. It had just grown by 78.0 GiB (83,751,862,272 bytes)."
        ]
    );
    assert!(!explained.explanation.advice[0].contains("neighbour docker"));
}

#[test]
fn the_culprit_of_a_row_is_the_one_of_its_kind() {
    let mut incidents = Incidents::new(Rules::default());
    let mut failures = Failures::new(Fold::default());
    let mut observation = observed(T0);
    observation.waits = vec![WaitDelta {
        victim: tenant("infer"),
        culprit: Culprit::Tenant(tenant("burst")),
        class: WaitClass::GpuLock,
        gpus: vec![gpu(1)],
        seconds: 0.9,
        waits: 1,
        longest: None,
        stack: Vec::new(),
    }];
    // Refused for its own memory while a neighbour made it wait.
    let facts = Ask { own_live: Some(79 * GIB), ..ask(2 * GIB) };
    refused(&mut failures, T0, &facts, &mut observation);
    incidents.observe(&observation);
    let explained = one(&incidents);
    assert!(explained.line.contains("allocation_failure  itself -> docker:infer"), "{}", explained.line);
    assert!(explained.explanation.headline.contains("its own memory is in the way"));
    assert!(explained.explanation.measured.iter().any(|line| line.contains("docker:burst 100 %")));
}

#[test]
fn a_near_miss() {
    let mut incidents = Incidents::new(Rules::default());
    let mut failures = Failures::new(Fold::default());
    let mut observation = observed(T0);
    let facts = Ask { holders: Some(vec![(tenant("burst"), 77 * GIB)]), ..ask(2 * GIB) };
    refused(&mut failures, T0, &facts, &mut observation);
    assert!(failures.succeeded(&Success {
        at_unix: T0 + 0.12,
        tenant: tenant("infer"),
        process: ProcessId(1),
        gpu: Some(gpu(1)),
        operation: Operation::MemAlloc,
        bytes: 2 * GIB,
        freed: None,
    }));
    observation.failures = failures.drain(T0 + 1.0);
    incidents.observe(&observation);
    let explained = one(&incidents);
    assert_eq!(
        explained.explanation.headline,
        "docker:infer was refused 2.0 GiB on GPU-01010101-0101-0101-0101-010101010101 and got it on a retry: its neighbour docker:burst holds 77.0 GiB (since 08:46:40 UTC, still open)."
    );
    assert!(
        explained.explanation.because[0]
            .ends_with("The same size was granted 120 ms later; what it freed in between is unknown."),
        "{:?}",
        explained.explanation.because
    );
}

#[test]
fn a_kill_over_and_done() {
    let mut incidents = Incidents::new(Rules::default());
    let mut observation = observed(T0);
    observation.kills = vec![KillNote {
        at_unix: T0,
        victim: pod("train", "main"),
        scope: KillScope::Cgroup,
        limit_owner: Some("/kubepods/burstable/pod1".into()),
        trigger: Some(pod("train", "sidecar")),
        processes: 1,
        gpu_live: vec![(gpu(1), 12 * GIB)],
        host_pinned: Some(3 * GIB),
        last_calls: Vec::new(),
    }];
    incidents.observe(&observation);
    incidents.observe(&Observation { at_unix: T0 + 60.0, elapsed: 60.0, ..Observation::default() });
    assert_eq!(
        text(&incidents),
        "\
The kernel killed a process of pod:ml/train (main): the memory limit of /kubepods/burstable/pod1 was full; 12.0 GiB of GPU memory went with it (at 08:46:40 UTC).

Measured:
  - pod:ml/train (main): killed at 08:46:40 UTC, held 12.0 GiB (12,884,901,888 bytes) on GPU-01010101-0101-0101-0101-010101010101, pinned 3.0 GiB (3,221,225,472 bytes) of host memory; pod:ml/train (sidecar) asked for the memory.

What to do:
  - Raise memory.max of /kubepods/burstable/pod1 or make pod:ml/train (main) use less host memory (3.0 GiB of it was pinned for the GPU).
"
    );
}

#[test]
fn a_kill_of_which_little_is_known() {
    let mut incidents = Incidents::new(Rules::default());
    let mut observation = observed(T0);
    observation.kills = vec![KillNote {
        at_unix: T0,
        victim: tenant("a"),
        scope: KillScope::Unknown,
        limit_owner: None,
        trigger: None,
        processes: 1,
        gpu_live: Vec::new(),
        host_pinned: None,
        last_calls: Vec::new(),
    }];
    incidents.observe(&observation);
    let words = text(&incidents);
    assert!(words.contains("whose memory limit was full is unknown"), "{words}");
    assert!(words.contains("pinned host memory unknown; who asked for the memory is unknown"), "{words}");
}

#[test]
fn faults() {
    let mut incidents = Incidents::new(Rules::default());
    let mut observation = observed(T0);
    let xid = |code, tenant, echo| XidNote { at_unix: T0, gpu: gpu(1), code, tenant, echo };
    observation.xids =
        vec![xid(45, Some(tenant("b")), true), xid(31, Some(tenant("a")), false), xid(79, None, false)];
    incidents.observe(&observation);
    let explained = one(&incidents);
    assert_eq!(
        explained.explanation.headline,
        "GPU-01010101-0101-0101-0101-010101010101 reported Xid 79, whose process is unknown (since 08:46:40 UTC, still open)."
    );
    assert_eq!(
        explained.explanation.advice,
        [
            "Take GPU-01010101-0101-0101-0101-010101010101 out of service and read the kernel log: Xid 79 is the device's, not a tenant's.",
            "Look into docker:a's own program: Xid 31 is a fault of code that it ran.",
        ]
    );
}

#[test]
fn c108_stuck() {
    for (holder, words) in [
        (None, "who holds it is unknown"),
        (Some(Culprit::Tenant(tenant("b"))), "docker:b is the only other one in the driver that can hold it"),
        (Some(Culprit::Tenant(tenant("a"))), "its own threads hold it"),
        (Some(Culprit::Device), "the device has not answered"),
    ] {
        let mut incidents = Incidents::new(Rules::default());
        let mut observation = observed(T0 + 12.0);
        observation.stalls = vec![Stall {
            victim: tenant("a"),
            class: WaitClass::RmApiLock,
            gpus: Vec::new(),
            since_unix: T0,
            holder,
        }];
        incidents.observe(&observation);
        let explained = one(&incidents);
        assert_eq!(
            explained.explanation.headline,
            format!(
                "docker:a has been stuck for 12.0 s in one wait for the driver's API lock (one for all GPUs of the host); {words} (since 08:46:40 UTC, still open)."
            )
        );
        assert!(!explained.explanation.advice.is_empty());
    }
}

#[test]
fn many_victims_in_the_headline() {
    let mut incidents = Incidents::new(Rules::default());
    let mut observation = observed(T0);
    observation.waits = (0..20)
        .map(|n| WaitDelta {
            victim: tenant(&format!("v{n:02}")),
            culprit: Culprit::Tenant(tenant("burst")),
            class: WaitClass::GpuLock,
            gpus: vec![gpu(1)],
            seconds: 0.6 + f64::from(n) / 100.0,
            waits: 1,
            longest: None,
            stack: Vec::new(),
        })
        .collect();
    incidents.observe(&observation);
    let explained = one(&incidents);
    assert_eq!(
        explained.explanation.headline,
        "docker:burst made 20 tenants, most of all docker:v19, wait 790 ms of 1.00 s (79 %) for the lock of the GPU on GPU-01010101-0101-0101-0101-010101010101 (since 08:46:39 UTC, still open)."
    );
    assert!(explained.line.contains("docker:burst -> docker:v19 (+19)"), "{}", explained.line);
    assert!(explained.explanation.measured[0].ends_with("longest single wait unknown."));
    assert_eq!(explained.explanation.measured.len(), 8 + 1 + 1, "eight victims, the causes, the rest");
    assert_eq!(explained.explanation.measured[9], "12 more lines are not shown.");
    assert!(explained.explanation.because[0].ends_with("kernel stack unknown."));
}

#[test]
fn json_has_the_words_beside_the_facts() {
    let mut incidents = Incidents::new(Rules::default());
    let mut observation = observed(T0);
    observation.xids = vec![XidNote { at_unix: T0, gpu: gpu(1), code: 13, tenant: None, echo: false }];
    incidents.observe(&observation);
    let value = serde_json::to_value(one(&incidents)).unwrap();
    assert_eq!(value["kind"], "xid");
    assert!(value["line"].as_str().unwrap().contains("xid"));
    assert!(value["explanation"]["headline"].as_str().unwrap().contains("Xid 13"));
}

#[test]
fn hostile_names_stay_on_their_line() {
    let mut incidents = Incidents::new(Rules::default());
    let mut observation = observed(T0);
    let evil = tenant("x\n\u{1b}[31mWhat to do:\n  - rm -rf");
    observation.waits = vec![WaitDelta {
        victim: evil.clone(),
        culprit: Culprit::Tenant(tenant("y\r\u{202e}")),
        class: WaitClass::GpuLock,
        gpus: vec![gpu(1)],
        seconds: 0.9,
        waits: 1,
        longest: None,
        stack: vec!["frame\u{1b}".into()],
    }];
    observation.kills = vec![KillNote {
        at_unix: T0,
        victim: evil,
        scope: KillScope::Cgroup,
        limit_owner: Some("/a\nb".into()),
        trigger: None,
        processes: 1,
        gpu_live: vec![(gpu(1), 1)],
        host_pinned: None,
        last_calls: Vec::new(),
    }];
    incidents.observe(&observation);
    let explained = one(&incidents);
    let lines =
        [&explained.explanation.measured, &explained.explanation.because, &explained.explanation.advice];
    let all = lines.into_iter().flatten().chain([&explained.line, &explained.explanation.headline]);
    for line in all {
        assert!(!line.chars().any(|c| c.is_control() || c == '\u{202e}'), "{line:?}");
    }
}
