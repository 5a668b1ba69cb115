//! Owns decoding the last calls of a process.
//! Refuses to resolve GPUs: that is the reader's.

use cotenant_abi::{Operation, RECENT_CALLS, Recent};
use cotenant_model::{CudaError, report::LastCall, sample::GpuRef};

/// Oldest first. `gpu` says what a code means.
pub(crate) fn calls(recent: &Recent, gpu: impl Fn(u8) -> GpuRef) -> Vec<LastCall> {
    let next = usize::try_from(recent.next).unwrap_or(0);
    let oldest = next.saturating_sub(RECENT_CALLS);
    (oldest..next)
        .filter_map(|at| {
            let call = recent.calls[at % RECENT_CALLS];
            Some(LastCall {
                at: call.at,
                operation: Operation::from_tag(call.operation)?,
                bytes: (call.bytes > 0).then_some(call.bytes),
                error: CudaError(call.code),
                gpu: match gpu(call.gpu) {
                    GpuRef::Known(gpu) => Some(gpu),
                    GpuRef::Host | GpuRef::Unknown => None,
                },
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use cotenant_abi::RecentCall;

    use super::*;

    #[test]
    fn the_last_calls_come_in_their_order_however_often_the_ring_went_round() {
        let call = |at| RecentCall { at, bytes: at, code: 0, operation: 16, gpu: 0xff, pad: [0; 2] };
        for next in [0usize, 3, 8, 21] {
            let mut recent = Recent { next: i64::try_from(next).unwrap(), calls: [call(0); RECENT_CALLS] };
            for at in 0..next {
                recent.calls[at % RECENT_CALLS] = call(at as u64);
            }
            let times: Vec<u64> = calls(&recent, |_| GpuRef::Unknown).iter().map(|call| call.at).collect();
            let expected: Vec<u64> = (next.saturating_sub(RECENT_CALLS)..next).map(|at| at as u64).collect();
            assert_eq!(times, expected);
        }
    }
}
