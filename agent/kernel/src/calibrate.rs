//! Owns what a probed call costs on this host: a function of the agent's own, timed without probes and with them.
//! Refuses tenants: nobody but the agent runs that function, and its own calls are not booked. So the figure is the
//! trap at entry and return with the programs' first instructions; what they do for a tenant's call comes on top.

use std::{
    hint::black_box,
    path::Path,
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};

use cotenant_abi::{Action, ByteRule, Cookie, Operation};

use crate::{KernelError, Probes};

/// Calls timed at once; the cheapest round counts, for what disturbs only adds.
const ROUND: u32 = 200;
/// As long as rounds are begun, without probes and with them.
const BUDGET: Duration = Duration::from_millis(30);

/// What one call costs more for its two probes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Calibration {
    pub pair: Duration,
    /// Timed with probes.
    pub calls: u32,
}

/// Where the function is in the agent's own program.
#[derive(Clone, Copy, Debug)]
pub struct Site<'a> {
    pub path: &'a Path,
    /// Of its first instruction in that file.
    pub offset: u64,
}

/// Not inlined, so that it has one first instruction; not empty, so that it is not left out.
#[inline(never)]
extern "C" fn probed(value: u64) -> u64 {
    black_box(value).wrapping_add(1)
}

/// The address in this process of the function that is timed.
pub fn site() -> u64 {
    probed as extern "C" fn(u64) -> u64 as usize as u64
}

/// Of this thread alone: a busy host is not a dear probe.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn round() -> Duration {
    let begun = cpu();
    for call in 0..ROUND {
        black_box(probed(black_box(call.into())));
    }
    cpu().saturating_sub(begun) / ROUND
}

/// The cheapest of the rounds that fit, and how many calls they were.
fn timed() -> (Duration, u32) {
    let begun = Instant::now();
    let (mut best, mut calls) = (round(), ROUND);
    while begun.elapsed() < BUDGET {
        best = best.min(round());
        calls += ROUND;
    }
    (best, calls)
}

/// `None`: with probes the function was no slower, so they were not hit.
pub fn calibrate(probes: &mut Probes, site: Site<'_>) -> Result<Option<Calibration>, KernelError> {
    let cookie = Cookie::pack(Operation::Init, Action::Count, None, ByteRule::None, 0, 0, false);
    let (without, _) = timed();
    let hold = probes.attach_own(site.path, site.offset, cookie)?;
    let (with, calls) = timed();
    probes.release(hold);
    let pair = with.saturating_sub(without);
    // The cheapest trap is some hundred nanoseconds.
    Ok((pair >= Duration::from_nanos(50)).then_some(Calibration { pair, calls }))
}
