//! Owns giving rights up: what each thread keeps once the agent runs, and that no program it might start has more.
//! Refuses to ask for any: a capability that was not given is missed by its feature, not here.
//!
//! Capabilities belong to threads. Those that read from outside (HTTP, OTLP, kubelet's and runtimes' answers, NVML) keep
//! none; the two that attach and read keep what they do that with.

use std::thread;

use anyhow::{Context, Result, anyhow};
use cotenant_host::{Capability, Rights};
use cotenant_model::view::{Feature, FeatureState};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};
use tracing::warn;

use crate::features::feature;

const NAME: &str = "privilege_drop";
/// A thread that attaches: programs and links, the mapped files of any tenant.
const ATTACH: CapabilitySet = CapabilitySet::BPF
    .union(CapabilitySet::PERFMON)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::CHECKPOINT_RESTORE);
/// A thread that reads: maps, `/proc`, the kernel's symbols.
const READ: CapabilitySet = CapabilitySet::BPF
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::SYSLOG);

/// What a thread does, and so what it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Reads what others wrote, or asks NVML.
    Outside,
    Attach,
    Read,
}

/// How far rights are given up in this run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Confinement {
    on: bool,
    /// `CAP_SYS_ADMIN` stands for capabilities that were not given by themselves, or is wanted beside them.
    admin: bool,
}

impl Confinement {
    /// On the main thread, before there is another: what this sets is inherited.
    pub(crate) fn begin(on: bool, rights: &Rights) -> (Self, Feature) {
        let confinement = Self { on, admin: rights.rests_on_admin() };
        if !on {
            let reason = "agent.drop_privileges = false: every thread keeps every capability";
            return (confinement, feature(NAME, FeatureState::Disabled, reason.into()));
        }
        let state = match seal() {
            Ok(Sealed::Empty) => feature(NAME, FeatureState::Active, String::new()),
            Ok(Sealed::AsGiven) => feature(
                NAME,
                FeatureState::Active,
                "the bounding set stays as it was given (no CAP_SETPCAP); no_new_privs keeps programs from using it".into(),
            ),
            Err(error) => feature(NAME, FeatureState::Broken, format!("{error:#}")),
        };
        (confinement, state)
    }

    /// For commands that end soon.
    pub(crate) const fn none() -> Self {
        Self { on: false, admin: false }
    }

    /// The calling thread, and those it starts from here on, keep what this work takes.
    pub(crate) fn confine(self, work: Work) {
        if self.on
            && let Err(error) = keep(self.kept(work))
        {
            warn!(error = format!("{error:#}"), "a thread keeps more capabilities than it needs");
        }
    }

    /// Runs `start` where no capability is, so that the threads it starts have none.
    pub(crate) fn outside<T: Send>(self, start: impl FnOnce() -> T + Send) -> Result<T> {
        if !self.on {
            return Ok(start());
        }
        thread::scope(|scope| {
            let run = move || {
                self.confine(Work::Outside);
                start()
            };
            scope.spawn(run).join().map_err(|_| anyhow!("a thread that starts others ended in panic"))
        })
    }

    fn kept(self, work: Work) -> CapabilitySet {
        let kept = match work {
            Work::Outside => return CapabilitySet::empty(),
            Work::Attach => ATTACH,
            Work::Read => READ,
        };
        if self.admin { kept.union(CapabilitySet::SYS_ADMIN) } else { kept }
    }
}

enum Sealed {
    Empty,
    AsGiven,
}

/// No program that is started from here on gets a capability, set-user-id programs included.
fn seal() -> Result<Sealed> {
    set_no_new_privs(true).context("cannot set no_new_privs")?;
    let have = capabilities(None).context("cannot ask for this thread's capabilities")?;
    if !have.effective.contains(CapabilitySet::SETPCAP) {
        return Ok(Sealed::AsGiven);
    }
    for bit in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        // Bits that this kernel does not know are not in it.
        if capability_is_in_bounding_set(capability).unwrap_or(false) {
            remove_capability_from_bounding_set(capability).context("cannot empty the bounding set")?;
        }
    }
    Ok(Sealed::Empty)
}

fn keep(wanted: CapabilitySet) -> Result<()> {
    let have = capabilities(None).context("cannot ask for this thread's capabilities")?;
    let kept = have.permitted & wanted;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).context("cannot give capabilities up")
}

/// What opening tenants' files rests on.
pub(crate) fn features(rights: &Rights) -> [Feature; 2] {
    let access = if let Some(capability) = rights.lacks(&[Capability::SysPtrace]) {
        feature(
            "library_access",
            FeatureState::Broken,
            format!(
                "needs {capability}: the libcuda that a tenant has mapped cannot be opened, so its calls are not seen"
            ),
        )
    } else if let Some(capability) = rights.lacks(&[Capability::CheckpointRestore]) {
        feature(
            "library_access",
            FeatureState::Active,
            format!("a libcuda that was deleted while it is mapped cannot be opened without {capability}"),
        )
    } else {
        feature("library_access", FeatureState::Active, String::new())
    };
    let private = match rights.lacks(&[Capability::DacReadSearch]) {
        Some(capability) => feature(
            "private_files",
            FeatureState::Degraded,
            format!(
                "needs {capability}: a libcuda below a directory that is private to its user is not probed; other \
                 users' environments and open devices are not read"
            ),
        ),
        None => feature("private_files", FeatureState::Active, String::new()),
    };
    [access, private]
}

#[cfg(test)]
mod tests {
    use super::*;

    const ON: Confinement = Confinement { on: true, admin: false };

    #[test]
    fn whoever_reads_from_outside_keeps_nothing() {
        assert_eq!(ON.kept(Work::Outside), CapabilitySet::empty());
        assert_eq!(Confinement { admin: true, ..ON }.kept(Work::Outside), CapabilitySet::empty());
        assert!(!ON.kept(Work::Read).contains(CapabilitySet::PERFMON));
        assert!(!ON.kept(Work::Attach).intersects(CapabilitySet::SYS_ADMIN | CapabilitySet::SYSLOG));
    }

    #[test]
    fn a_thread_started_outside_has_no_capability_and_this_one_keeps_its_own() {
        let before = capabilities(None).expect("asked").effective;
        let inside = ON
            .outside(|| thread::spawn(|| capabilities(None).expect("asked")).join().expect("no panic"))
            .expect("no panic");
        assert_eq!((inside.effective, inside.permitted), (CapabilitySet::empty(), CapabilitySet::empty()));
        assert_eq!(capabilities(None).expect("asked").effective, before);
    }
}
