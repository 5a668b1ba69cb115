//! Owns the way from a histogram to a trace: the last told call for each tenant and wait class.
//! Refuses growth: a fixed number of them, the oldest goes.

use std::collections::BTreeMap;

use cotenant_model::WaitClass;
use opentelemetry_proto::tonic::metrics::v1::{Exemplar, exemplar};

use super::context::Context;
use super::sender::nanoseconds;
use super::streams::Point;
use crate::Id;
use crate::catalogue::attributes::{TENANT, WAIT_CLASS};
use crate::label::clean;

const MAX: usize = 1024;

/// One wait, and the span that tells of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mark {
    pub(super) context: Context,
    pub(super) seconds: f64,
    pub(super) at_unix: f64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Exemplars(BTreeMap<(String, &'static str), Mark>);

impl Exemplars {
    pub(super) fn put(&mut self, tenant: &str, class: WaitClass, mark: Mark) {
        if self.0.len() >= MAX {
            let oldest = self.0.iter().min_by(|one, two| one.1.at_unix.total_cmp(&two.1.at_unix));
            if let Some(key) = oldest.map(|(key, _)| key.clone()) {
                self.0.remove(&key);
            }
        }
        self.0.insert((clean(tenant).into_owned(), class.as_str()), mark);
    }

    /// For a point of the histogram of waits, when the wait is in the time that the point is about.
    pub(super) fn of(&self, point: &Point) -> Vec<Exemplar> {
        if point.row.metric.id != Id::DriverWaitDuration {
            return Vec::new();
        }
        let label =
            |wanted: &str| point.row.labels.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value);
        let (Some(tenant), Some(class)) = (label(TENANT.prometheus), label(WAIT_CLASS.prometheus)) else {
            return Vec::new();
        };
        let Some(class) = WaitClass::parse(class) else { return Vec::new() };
        let Some(mark) = self.0.get(&(tenant.clone(), class.as_str())) else { return Vec::new() };
        let at = nanoseconds(mark.at_unix);
        if !(point.start_ns..=point.at_ns).contains(&at) {
            return Vec::new();
        }
        vec![Exemplar {
            time_unix_nano: at,
            trace_id: mark.context.trace.to_vec(),
            span_id: mark.context.span.to_vec(),
            value: Some(exemplar::Value::AsDouble(mark.seconds)),
            ..Exemplar::default()
        }]
    }
}
