//! Owns who grew and who shrank on each GPU, and when: the way from a cause to a refusal.
//! Refuses small change: see `Rules::movement_bytes`.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use super::Movement;
use crate::{GpuId, Tenant};

/// Steps kept a GPU.
const STEPS: usize = 128;

/// GPUs with a timeline.
const GPUS: usize = 64;

/// Moves in one direction with no longer pause than this are one step.
const PAUSE_SECONDS: f64 = 5.0;

/// Moves of one tenant in one direction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Step {
    pub tenant: Tenant,
    pub gpu: GpuId,
    /// Negative: it gave memory back.
    pub bytes: i64,
    pub from_unix: f64,
    pub to_unix: f64,
}

/// A refusal that came after somebody grew on the same GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Chain {
    pub cause: Step,
    pub victim: Tenant,
    /// Which failure record.
    pub record: u64,
    /// From the end of the growth to the first refusal; 0 when it was still going on.
    pub seconds_before: f64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Timeline {
    gpus: BTreeMap<GpuId, VecDeque<Step>>,
    pub(super) dropped: u64,
}

impl Timeline {
    pub(super) fn add(&mut self, movement: &Movement, from_unix: f64, to_unix: f64) {
        if movement.bytes == 0 {
            return;
        }
        if !self.gpus.contains_key(&movement.gpu) && self.gpus.len() >= GPUS {
            self.dropped += 1;
            return;
        }
        let steps = self.gpus.entry(movement.gpu.clone()).or_default();
        let last = steps.iter_mut().rev().find(|step| step.tenant == movement.tenant);
        if let Some(step) = last
            && step.bytes.signum() == movement.bytes.signum()
            && from_unix - step.to_unix <= PAUSE_SECONDS
        {
            step.bytes = step.bytes.saturating_add(movement.bytes);
            step.to_unix = to_unix;
            return;
        }
        if steps.len() >= STEPS {
            // The smallest goes: a slow drip by many must not push out the step that mattered.
            let smallest =
                steps.iter().enumerate().min_by_key(|(_, step)| step.bytes.unsigned_abs()).map(|(at, _)| at);
            if let Some(at) = smallest {
                steps.remove(at);
            }
            self.dropped += 1;
        }
        steps.push_back(Step {
            tenant: movement.tenant.clone(),
            gpu: movement.gpu.clone(),
            bytes: movement.bytes,
            from_unix,
            to_unix,
        });
    }

    /// Steps of at least `bytes` that touch the time between, by their start.
    pub(super) fn between(&self, gpu: &GpuId, from_unix: f64, to_unix: f64, bytes: u64) -> Vec<Step> {
        let mut steps: Vec<_> = self
            .gpus
            .get(gpu)
            .into_iter()
            .flatten()
            .filter(|step| step.to_unix >= from_unix && step.from_unix <= to_unix)
            .filter(|step| step.bytes.unsigned_abs() >= bytes)
            .cloned()
            .collect();
        steps.sort_by(|a, b| a.from_unix.total_cmp(&b.from_unix).then_with(|| a.tenant.cmp(&b.tenant)));
        steps
    }

    /// Lets go of what ended before.
    pub(super) fn expire(&mut self, before_unix: f64) {
        self.gpus.retain(|_, steps| {
            steps.retain(|step| step.to_unix >= before_unix);
            !steps.is_empty()
        });
    }
}
