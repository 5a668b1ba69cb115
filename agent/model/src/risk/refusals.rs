//! Owns what became of one tenant's refused asks: which stayed refused, and which a framework met from its own cache.
//! Refuses to decide before a tick has passed: a cache is given back after its refusal, maybe across a tick.

use serde::{Deserialize, Serialize};

use super::Holding;

/// A cache that is given back to meet a refusal is at least so large.
const GIVEN_BACK: u64 = 128 << 20;

/// One tenant's refusals on one GPU.
///
/// A framework with a cache of its own meets a refusal itself: it gives the cache back and asks again. Seen from here
/// that is one refusal, memory given back and an ask granted; it costs a stall and no error. Where the second ask is
/// refused as well, there are two. Whoever else is refused once, gives so much back and is granted an ask by the next tick
/// is taken for one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Refusals {
    last: Option<Counts>,
    /// One refusal of the last tick of which nobody knows what becomes: what had been freed before it, in bytes.
    undecided: Option<u64>,
    /// A refusal of the last tick was met, or so it seemed.
    met: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Counts {
    refused: u64,
    granted: u64,
    freed: u64,
}

impl Refusals {
    /// Asks that, as of this moment, stayed refused. What was refused before the first moment is none.
    pub fn advance(&mut self, holding: &Holding) -> u64 {
        let now = Counts { refused: holding.failures, granted: holding.allocations, freed: holding.freed };
        let Some(last) = self.last.replace(now) else { return 0 };
        let before = self.undecided.take();
        let met = std::mem::take(&mut self.met);
        let fresh = now.refused.saturating_sub(last.refused);
        let refused = fresh + u64::from(before.is_some());
        if refused != 1 || holding.live == 0 {
            return refused;
        }
        let gave = now.freed.saturating_sub(before.unwrap_or(last.freed)) >= GIVEN_BACK;
        if gave && now.granted > last.granted {
            self.met = fresh == 1;
            return 0;
        }
        if met {
            // The ask that was granted came before, and this is the second refusal.
            return refused + 1;
        }
        if fresh == 0 {
            return refused;
        }
        self.undecided = Some(last.freed);
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GpuId;

    const MIB: u64 = 1 << 20;

    /// Failures, grants, MiB freed and MiB live, a tick each; what stayed refused at each.
    fn refused(ticks: &[(u64, u64, u64, u64)]) -> Vec<u64> {
        let mut refusals = Refusals::default();
        let holding = |&(failures, allocations, freed, live): &(u64, u64, u64, u64)| Holding {
            failures,
            allocations,
            freed: freed * MIB,
            live: live * MIB,
            ..Holding::on(GpuId::from_nvml("GPU-0"))
        };
        ticks.iter().map(|tick| refusals.advance(&holding(tick))).collect()
    }

    #[test]
    fn what_a_cache_meets_is_no_refusal_within_a_tick_or_across_one() {
        assert_eq!(refused(&[(0, 9, 0, 900), (1, 10, 400, 800), (1, 10, 400, 800)]), [0, 0, 0]);
        assert_eq!(refused(&[(0, 9, 0, 900), (1, 9, 0, 900), (1, 10, 400, 800)]), [0, 0, 0]);
        assert_eq!(refused(&[(0, 9, 0, 900), (1, 9, 400, 500), (1, 10, 400, 800)]), [0, 0, 0]);
    }

    #[test]
    fn what_is_not_met_within_a_tick_stays_refused() {
        // It goes on without; it gives back and asks no more; it gives too little back.
        assert_eq!(refused(&[(0, 9, 0, 900), (1, 9, 0, 900), (1, 9, 0, 900)]), [0, 0, 1]);
        assert_eq!(refused(&[(0, 9, 0, 900), (1, 9, 400, 500), (1, 9, 400, 500)]), [0, 0, 1]);
        assert_eq!(refused(&[(0, 9, 0, 900), (1, 9, 8, 892), (1, 10, 8, 900)]), [0, 0, 1]);
    }

    #[test]
    fn what_is_refused_twice_or_dies_is_refused_at_once() {
        assert_eq!(refused(&[(0, 9, 0, 900), (2, 9, 400, 500), (2, 10, 400, 800)]), [0, 2, 0]);
        assert_eq!(refused(&[(0, 9, 0, 900), (1, 9, 900, 0)]), [0, 1]);
        assert_eq!(refused(&[(0, 9, 0, 900), (1, 9, 0, 900), (2, 9, 0, 900), (2, 9, 0, 900)]), [0, 0, 2, 0]);
    }

    #[test]
    fn a_second_refusal_in_the_next_tick_undoes_what_seemed_met() {
        // Granted, refused, the cache given back; refused again and no more.
        assert_eq!(
            refused(&[(0, 9, 0, 900), (1, 10, 400, 500), (2, 10, 400, 500), (2, 12, 700, 300)]),
            [0, 0, 2, 0]
        );
        // A cache that meets one refusal after the other.
        assert_eq!(refused(&[(0, 9, 0, 900), (1, 10, 400, 800), (2, 11, 800, 700)]), [0, 0, 0]);
    }

    #[test]
    fn what_was_refused_before_it_was_seen_is_not_counted() {
        assert_eq!(refused(&[(7, 9, 0, 900), (7, 9, 0, 900)]), [0, 0]);
    }
}
