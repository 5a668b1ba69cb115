//! Owns slow driver calls as spans: where their time went and who had what they waited for, at a bounded rate.
//! Refuses to hide what it leaves out: each span says how many calls were not told since the one before it.

use cotenant_model::{CudaError, Culprit, GpuId, Operation, Tenant, WaitClass};
use opentelemetry_proto::tonic::trace::v1::Span;

use super::context::{Attributes, Context, Links, failed};
use crate::catalogue::attributes::{CUDA_ERROR, CULPRIT, HW_ID, OPERATION, RELATION, WAIT_CLASS};

/// A driver call over the threshold, with names in place of numbers.
#[derive(Clone, Debug)]
pub struct Call {
    pub victim: Tenant,
    pub pid: u32,
    pub tid: u32,
    pub operation: Operation,
    pub error: CudaError,
    /// `None`: the call does not say.
    pub gpu: Option<GpuId>,
    pub start_unix: f64,
    pub seconds: f64,
    pub blocked_seconds: f64,
    /// Ready to run, and no CPU.
    pub runnable_seconds: f64,
    pub bytes: Option<u64>,
    /// The longest wait in it: its class where the stack was told, and who ended it where somebody was seen.
    pub longest_seconds: f64,
    pub class: Option<WaitClass>,
    pub culprit: Option<Culprit>,
    pub stack: Vec<String>,
    /// A call of another process overlapped.
    pub shared: bool,
}

impl Call {
    pub(super) fn context(&self, seed: &str) -> Context {
        let name = format!("{}\0{}\0{}", self.pid, self.tid, super::sender::nanoseconds(self.start_unix));
        Context::of(seed, "call", &name)
    }

    pub(super) fn span(&self, seed: &str, sampled_out: u64, links: &Links) -> Span {
        let on_cpu = (self.seconds - self.blocked_seconds - self.runnable_seconds).max(0.0);
        let mut attributes = Attributes::default()
            .tenant(&self.victim)
            .named(OPERATION, self.operation.as_str())
            .count("process.pid", Some(self.pid.into()))
            .count("thread.id", Some(self.tid.into()))
            .number("cotenant.call.blocked_seconds", Some(self.blocked_seconds))
            .number("cotenant.call.runnable_seconds", Some(self.runnable_seconds))
            .number("cotenant.call.on_cpu_seconds", Some(on_cpu))
            .count("cotenant.call.bytes", self.bytes)
            .truth("cotenant.call.shared", self.shared)
            .count("cotenant.sampled_out", Some(sampled_out));
        if let Some(gpu) = &self.gpu {
            attributes = attributes.named(HW_ID, gpu.as_str());
        }
        // A call that never left the CPU waited for nobody.
        if self.longest_seconds > 0.0 {
            attributes = attributes.number("cotenant.wait.longest_seconds", Some(self.longest_seconds));
            if let Some(class) = self.class {
                attributes = attributes.named(WAIT_CLASS, class.as_str());
            }
            if let Some(culprit) = &self.culprit {
                attributes = attributes
                    .named(CULPRIT, culprit.as_str())
                    .named(RELATION, culprit.relation(&self.victim));
            }
            attributes = attributes.list("cotenant.kernel_stack", self.stack.iter().map(String::as_str));
        }
        let mut span = self.context(seed).span(
            None,
            self.operation.as_str(),
            self.start_unix,
            self.start_unix + self.seconds,
        );
        if self.error != CudaError(0) {
            attributes = attributes.named(CUDA_ERROR, self.error.name());
            span.status = Some(failed(self.error.name()));
        }
        span.attributes = attributes.0;
        links.hang_on(&mut span);
        span
    }
}

/// So many calls a second; what was saved up is one second's worth.
#[derive(Clone, Debug)]
pub(super) struct Sampler {
    per_second: f64,
    left: f64,
    out: u64,
}

impl Sampler {
    pub(super) fn new(per_second: u32) -> Self {
        Self { per_second: per_second.into(), left: per_second.into(), out: 0 }
    }

    pub(super) fn pass(&mut self, seconds: f64) {
        self.left = (self.left + self.per_second * seconds.clamp(0.0, 1.0)).min(self.per_second);
    }

    /// How many were left out before this one; `None`: it is one of them.
    pub(super) fn take(&mut self) -> Option<u64> {
        if self.left < 1.0 {
            self.out += 1;
            return None;
        }
        self.left -= 1.0;
        Some(std::mem::take(&mut self.out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sampler_says_how_many_it_left_out() {
        let mut sampler = Sampler::new(2);
        let taken: Vec<_> = (0..5).map(|_| sampler.take()).collect();
        assert_eq!(taken, [Some(0), Some(0), None, None, None]);
        sampler.pass(0.6);
        assert_eq!(sampler.take(), Some(3));
        assert_eq!(sampler.take(), None);
        sampler.pass(3600.0);
        assert_eq!((sampler.take(), sampler.take(), sampler.take()), (Some(1), Some(0), None));
    }

    #[test]
    fn none_a_second_is_none_at_all() {
        let mut sampler = Sampler::new(0);
        sampler.pass(10.0);
        assert_eq!(sampler.take(), None);
    }
}
