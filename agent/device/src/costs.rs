//! Owns what the agent's own NVML calls cost, by function.
//! Refuses names from outside: functions are `&'static str`, so the set is bounded by the source.

use std::time::Duration;

use cotenant_model::device::CallCost;

const BOUNDS: [Duration; 6] = [
    Duration::from_micros(10),
    Duration::from_micros(100),
    Duration::from_millis(1),
    Duration::from_millis(10),
    Duration::from_millis(100),
    Duration::from_secs(1),
];

#[derive(Debug, Default)]
pub(crate) struct Costs(Vec<CallCost>);

impl Costs {
    pub(crate) fn returned(&mut self, function: &'static str, took: Duration, error: bool) {
        let cost = self.of(function);
        cost.calls += 1;
        cost.errors += u64::from(error);
        cost.total += took;
        for (count, bound) in cost.buckets.iter_mut().zip(BOUNDS) {
            *count += u64::from(took <= bound);
        }
        cost.buckets[BOUNDS.len()] += 1;
    }

    pub(crate) fn timed_out(&mut self, function: &'static str) {
        self.of(function).timeouts += 1;
    }

    pub(crate) fn all(&self) -> Vec<CallCost> {
        self.0.clone()
    }

    fn of(&mut self, function: &'static str) -> &mut CallCost {
        let at = self.0.iter().position(|cost| cost.function == function).unwrap_or_else(|| {
            self.0.push(CallCost {
                function,
                calls: 0,
                errors: 0,
                timeouts: 0,
                total: Duration::ZERO,
                buckets: [0; 7],
            });
            self.0.len() - 1
        });
        &mut self.0[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c47_buckets_are_cumulative_and_timeouts_are_their_own() {
        let mut costs = Costs::default();
        costs.returned("f", Duration::from_micros(50), false);
        costs.returned("f", Duration::from_secs(2), true);
        costs.timed_out("f");
        let [cost] = costs.all().try_into().expect("one function");
        assert_eq!((cost.calls, cost.errors, cost.timeouts), (2, 1, 1));
        assert_eq!(cost.buckets, [0, 1, 1, 1, 1, 1, 2]);
    }
}
