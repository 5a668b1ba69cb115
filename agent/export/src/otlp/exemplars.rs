//! Owns the way from a histogram to a trace: the last told call for each tenant and function, and for each tenant and wait class, for
//! OTLP and `/metrics`.
//! Refuses growth: a fixed number of them, the oldest goes; and marks without a trace: there are none while no span is sent.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use cotenant_model::{Operation, WaitClass};
use opentelemetry_proto::tonic::metrics::v1::{Exemplar, exemplar};

use super::context::Context;
use super::sender::nanoseconds;
use super::streams::Point;
use crate::catalogue::attributes::{OPERATION, TENANT, WAIT_CLASS};
use crate::label::clean;
use crate::{Id, Row};

const MAX: usize = 1024;

/// One call or wait, and the span that tells of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mark {
    pub(super) context: Context,
    pub(crate) seconds: f64,
    pub(crate) at_unix: f64,
}

impl Mark {
    /// Trace and span in hexadecimal, as exemplars name them.
    pub(crate) fn ids(&self) -> [(&'static str, String); 2] {
        let hex = |bytes: &[u8]| {
            bytes.iter().fold(String::new(), |mut text, byte| {
                let _ = write!(text, "{byte:02x}");
                text
            })
        };
        [("trace_id", hex(&self.context.trace)), ("span_id", hex(&self.context.span))]
    }
}

/// By the tenant's published name, and the function or the wait class, which are never called the same.
#[derive(Clone, Debug, Default)]
pub struct Exemplars(BTreeMap<(String, String), Mark>);

impl Exemplars {
    pub(crate) fn put_wait(&mut self, tenant: &str, class: WaitClass, mark: Mark) {
        self.put(tenant, class.as_str(), mark);
    }

    pub(crate) fn put_call(&mut self, tenant: &str, operation: Operation, mark: Mark) {
        self.put(tenant, operation.as_str(), mark);
    }

    fn put(&mut self, tenant: &str, of: &str, mark: Mark) {
        let key = (clean(tenant).into_owned(), of.to_owned());
        if self.0.len() >= MAX && !self.0.contains_key(&key) {
            let oldest = self.0.iter().min_by(|one, two| one.1.at_unix.total_cmp(&two.1.at_unix));
            if let Some(key) = oldest.map(|(key, _)| key.clone()) {
                self.0.remove(&key);
            }
        }
        self.0.insert(key, mark);
    }

    /// The mark of a series of the histograms of calls and waits.
    pub(crate) fn mark(&self, row: &Row) -> Option<&Mark> {
        if self.0.is_empty() {
            return None;
        }
        let label =
            |wanted: &str| row.labels.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value);
        let of = match row.metric.id {
            Id::DriverWaitDuration => WAIT_CLASS,
            Id::OperationDuration => OPERATION,
            _ => return None,
        };
        self.0.get(&(label(TENANT.prometheus)?.clone(), label(of.prometheus)?.clone()))
    }

    /// For a point of those, when the call is in the time that the point is about.
    pub(super) fn of(&self, point: &Point) -> Vec<Exemplar> {
        let Some(mark) = self.mark(&point.row) else { return Vec::new() };
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

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model::MetricFamily;
    use prost::Message as _;

    use super::*;
    use crate::{Distribution, Format, Value, encode};

    fn waits(tenant: &str) -> Row {
        let buckets = vec![(0.5, 2), (1.0, 1), (f64::INFINITY, 0)];
        Row {
            metric: Id::DriverWaitDuration.metric(),
            labels: vec![
                (TENANT.prometheus, tenant.to_owned()),
                (WAIT_CLASS.prometheus, WaitClass::GpuLock.as_str().to_owned()),
            ],
            value: Value::Distribution(Distribution { sum_seconds: 1.0, buckets }),
        }
    }

    #[test]
    fn a_page_leads_to_the_trace_of_its_bucket() {
        let context = Context { trace: [0xab; 16], span: [0x01; 8] };
        let mut exemplars = Exemplars::default();
        exemplars.put_wait(
            "user:b",
            WaitClass::GpuLock,
            Mark { context, seconds: 0.75, at_unix: 1_700_000_000.25 },
        );
        let rows = || [waits("user:a"), waits("user:b")].into();
        let page = String::from_utf8(encode(rows(), Format::OpenMetrics, &exemplars).unwrap()).unwrap();
        let marked: Vec<&str> = page.lines().filter(|line| line.contains(" # ")).collect();
        let [line] = marked.as_slice() else { panic!("one exemplar is wanted: {page}") };
        assert!(line.contains("le=\"1.0\"") && line.contains("user:b"), "{line}");
        let ids = format!("{{trace_id=\"{}\",span_id=\"{}\"}}", "ab".repeat(16), "01".repeat(8));
        assert!(line.ends_with(&format!(" 3 # {ids} 0.75 1700000000.250")), "{line}");

        let text = String::from_utf8(encode(rows(), Format::Text, &exemplars).unwrap()).unwrap();
        assert!(!text.contains(" # {"), "{text}");

        let bytes = encode(rows(), Format::Protobuf, &exemplars).unwrap();
        let family = MetricFamily::decode_length_delimited(bytes.as_slice()).unwrap();
        let buckets = |series: usize| &family.metric[series].histogram.as_ref().unwrap().bucket;
        assert!(buckets(0).iter().all(|bucket| bucket.exemplar.is_none()));
        let exemplar = buckets(1)[1].exemplar.as_ref().unwrap();
        assert_eq!((exemplar.value, exemplar.label[0].value.as_str()), (0.75, "ab".repeat(16).as_str()));
        assert_eq!(exemplar.timestamp.as_ref().unwrap().seconds, 1_700_000_000);
    }
}
