//! Owns the step from a view to samples: one row per series, in the order in which they are published.
//! Refuses zeros for unknowns: a reading that is not there gives no row but its absence.

mod agent;
mod blame;
mod device;
mod events;
mod grant;
mod memory;
mod risk;
mod tenant;

use std::time::Duration;

use cotenant_model::Absence;
use cotenant_model::sample::Histogram;
use cotenant_model::view::View;

use crate::catalogue::attributes::{ABSENCE_REASON, READING};
use crate::label::clean;
use crate::{Attribute, Id, Kind, METRICS, Metric};

/// One sample of one series.
#[derive(Clone, Debug)]
pub struct Row {
    pub metric: &'static Metric,
    /// In the order of the metric's attributes, Prometheus spelling.
    pub labels: Vec<(&'static str, String)>,
    pub value: Value,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Distribution(Distribution),
}

/// A histogram with explicit bounds in seconds.
///
/// The kernel's bounds are powers of two in nanoseconds, which no native (exponential) histogram in seconds has.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    pub sum_seconds: f64,
    /// Upper bound and the count in this bucket alone; the last bound is infinite.
    pub buckets: Vec<(f64, u64)>,
}

impl Distribution {
    /// Always the sum of the buckets, whatever the kernel's own count: the two are not read at one instant.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }

    /// The bucket that a value falls into.
    pub(crate) fn bucket_of(&self, seconds: f64) -> usize {
        self.buckets.partition_point(|(bound, _)| *bound < seconds)
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Self::Unsigned(value)
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Self {
        Self::Signed(value)
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Unsigned(u64::from(value))
    }
}

impl From<&Histogram> for Value {
    fn from(histogram: &Histogram) -> Self {
        let bucket = |(index, count): (usize, &u64)| (Histogram::upper_seconds(index), *count);
        Self::Distribution(Distribution {
            sum_seconds: Duration::from_nanos(histogram.sum_ns).as_secs_f64(),
            buckets: histogram.buckets.iter().enumerate().map(bucket).collect(),
        })
    }
}

/// Every series of the view, sorted by family and labels, no label set twice.
///
/// Tenants past the cap are the [`crate::Guard`]'s business and must be folded before.
pub fn rows(view: &View) -> Vec<Row> {
    let mut sheet = Sheet::new();
    agent::write(&mut sheet, view);
    blame::write(&mut sheet, view);
    device::write(&mut sheet, view);
    events::write(&mut sheet, view);
    grant::write(&mut sheet, view);
    risk::write(&mut sheet, view);
    memory::write(&mut sheet, view);
    tenant::write(&mut sheet, view);
    sheet.finish()
}

/// The labels of one row: a list that skips what is empty, as an empty label is no label.
#[derive(Clone, Default)]
struct Labels(Vec<(&'static str, String)>);

impl Labels {
    fn with(mut self, attribute: Attribute, value: &str) -> Self {
        if !value.is_empty() {
            self.0.push((attribute.prometheus, clean(value).into_owned()));
        }
        self
    }

    fn with_some(self, attribute: Attribute, value: Option<&str>) -> Self {
        self.with(attribute, value.unwrap_or_default())
    }
}

/// Collects rows by family. Writers come in nearly sorted order, so sorting each family alone is cheap.
struct Sheet(Vec<Vec<Row>>);

impl Sheet {
    fn new() -> Self {
        Self(METRICS.iter().map(|_| Vec::new()).collect())
    }

    /// A number that is not finite says nothing and gives no row.
    fn put(&mut self, id: Id, labels: Labels, value: impl Into<Value>) {
        let value = value.into();
        if !matches!(value, Value::Float(number) if !number.is_finite()) {
            self.0[id as usize].push(Row { metric: id.metric(), labels: labels.0, value });
        }
    }

    fn put_absence(&mut self, labels: Labels, reading: &str, reason: Absence) {
        let labels = labels.with(READING, reading).with(ABSENCE_REASON, reason.as_str());
        self.put(Id::ReadingAbsent, labels, true);
    }

    /// Sorts, and merges rows with one label set: two things that the labels cannot tell apart are one series.
    fn finish(mut self) -> Vec<Row> {
        for family in &mut self.0 {
            family.sort_by(|one, two| one.labels.cmp(&two.labels));
            family.dedup_by(|next, kept| {
                let same = next.labels == kept.labels;
                if same {
                    kept.value.merge(&next.value, kept.metric.kind);
                }
                same
            });
        }
        self.0.into_iter().flatten().collect()
    }
}

impl Value {
    pub(crate) const fn distribution(&self) -> Option<&Distribution> {
        match self {
            Self::Distribution(distribution) => Some(distribution),
            _ => None,
        }
    }

    pub(crate) fn as_f64(&self) -> f64 {
        match self {
            Self::Unsigned(value) => *value as f64,
            Self::Signed(value) => *value as f64,
            Self::Float(value) => *value,
            Self::Distribution(distribution) => distribution.count() as f64,
        }
    }

    /// What adds up is added; of a reading the greater one is kept.
    pub(crate) fn merge(&mut self, other: &Self, kind: Kind) {
        let adds = matches!(kind, Kind::Counter | Kind::UpDownCounter | Kind::Histogram);
        match (&mut *self, other) {
            (Self::Distribution(mine), Self::Distribution(theirs)) => {
                mine.sum_seconds += theirs.sum_seconds;
                for ((_, mine), (_, theirs)) in mine.buckets.iter_mut().zip(&theirs.buckets) {
                    *mine += theirs;
                }
            }
            (Self::Unsigned(mine), Self::Unsigned(theirs)) if adds => *mine += theirs,
            (Self::Signed(mine), Self::Signed(theirs)) if adds => *mine += theirs,
            (mine, theirs) if adds => *mine = Self::Float(mine.as_f64() + theirs.as_f64()),
            (mine, theirs) if theirs.as_f64() > mine.as_f64() => *mine = theirs.clone(),
            _ => {}
        }
    }
}
