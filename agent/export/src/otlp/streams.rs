//! Owns the time that a number counts from, and with delta temporality what has not arrived yet.
//! Refuses to lose an interval: what a failed export took is given back, and so is what a tenant that is gone had counted.
//!
//! Rows come sorted by family and labels with no label set twice, so that two collections are joined by one walk.

use std::borrow::Cow;
use std::cmp::Ordering;

use crate::{Distribution, Id, Kind, Row, Value};

/// Series that wait for delivery at most, those of tenants that are gone included.
const MAX_PENDING: usize = 262_144;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Temporality {
    #[default]
    Cumulative,
    Delta,
}

/// A row and the time since which it counts.
#[derive(Clone, Debug)]
pub(super) struct Point {
    pub(super) row: Row,
    pub(super) start_ns: u64,
    pub(super) at_ns: u64,
}

impl Point {
    pub(super) fn accumulates(&self) -> bool {
        accumulates(&self.row)
    }
}

/// What grows only, and is cut into intervals with delta temporality. Levels are sent as they are in both.
fn accumulates(row: &Row) -> bool {
    matches!(row.metric.kind, Kind::Counter | Kind::Histogram)
}

/// Counters of the hardware, which had counted before the agent came: their start is not known.
fn counted_before(row: &Row) -> bool {
    matches!(row.metric.id, Id::Energy | Id::Errors)
}

fn order(one: &Row, two: &Row) -> Ordering {
    one.metric.id.cmp(&two.metric.id).then_with(|| one.labels.cmp(&two.labels))
}

#[derive(Debug)]
pub(super) struct Streams {
    temporality: Temporality,
    /// The last collection.
    last: Vec<Point>,
    last_ns: Option<u64>,
    /// Growth that no receiver has acknowledged. Delta only.
    pending: Vec<Point>,
    /// Series given up because too many were waiting.
    given_up: u64,
}

impl Streams {
    pub(super) const fn new(temporality: Temporality) -> Self {
        Self { temporality, last: Vec::new(), last_ns: None, pending: Vec::new(), given_up: 0 }
    }

    /// Takes one view's rows in. False when it is the view of last time: there is nothing to say then.
    pub(super) fn collect(&mut self, rows: Vec<Row>, started_ns: u64, at_ns: u64) -> bool {
        if self.last_ns == Some(at_ns) {
            return false;
        }
        // A series that was not there last time has counted since then: also one that had been there before.
        let appeared_ns = self.last_ns.unwrap_or(started_ns).min(at_ns);
        let mut before = std::mem::take(&mut self.last).into_iter().peekable();
        let mut grown = Vec::new();
        for row in rows {
            while before.next_if(|old| order(&old.row, &row).is_lt()).is_some() {}
            let old = before.next_if(|old| order(&old.row, &row).is_eq());
            let growth = if accumulates(&row) {
                old.as_ref().and_then(|old| since(&row.value, &old.row.value))
            } else {
                old.as_ref().map(|_| row.value.clone())
            };
            // The clock of the host may have been set back.
            let start_ns = match (&old, &growth) {
                (Some(old), Some(_)) => old.start_ns.min(at_ns),
                // What OTLP writes for an unknown start: a first point without a length.
                (None, _) if counted_before(&row) => at_ns,
                _ => appeared_ns,
            };
            let unknown = old.is_none() && counted_before(&row);
            if self.temporality == Temporality::Delta && accumulates(&row) && !unknown {
                let value = growth.unwrap_or_else(|| row.value.clone());
                let row = Row { metric: row.metric, labels: row.labels.clone(), value };
                grown.push(Point { row, start_ns: appeared_ns, at_ns });
            }
            self.last.push(Point { row, start_ns, at_ns });
        }
        self.last_ns = Some(at_ns);
        self.await_delivery(grown);
        true
    }

    /// Everything as it stands.
    pub(super) fn standing(&self) -> &[Point] {
        &self.last
    }

    /// What is to be sent now and comes back if it does not arrive.
    pub(super) fn take(&mut self) -> Cow<'_, [Point]> {
        match self.temporality {
            Temporality::Cumulative => Cow::Borrowed(&self.last),
            Temporality::Delta => {
                let mut points = std::mem::take(&mut self.pending);
                points.extend(self.last.iter().filter(|point| !point.accumulates()).cloned());
                points.sort_by(|one, two| order(&one.row, &two.row));
                Cow::Owned(points)
            }
        }
    }

    /// Takes back what did not arrive. Says how many points are lost by it: levels, of which there will be newer ones.
    pub(super) fn give_back(&mut self, points: Vec<Point>) -> u64 {
        let before = points.len();
        let growth: Vec<Point> = points.into_iter().filter(Point::accumulates).collect();
        let levels = before - growth.len();
        self.await_delivery(growth);
        levels as u64
    }

    /// Series given up since the last call.
    pub(super) fn given_up(&mut self) -> u64 {
        std::mem::take(&mut self.given_up)
    }

    /// Adds sorted growth to what waits already.
    fn await_delivery(&mut self, growth: Vec<Point>) {
        if self.pending.is_empty() {
            self.pending = growth;
            return;
        }
        let mut merged = Vec::with_capacity(self.pending.len().max(growth.len()));
        let mut waiting = std::mem::take(&mut self.pending).into_iter().peekable();
        for mut point in growth {
            while let Some(other) = waiting.next_if(|other| order(&other.row, &point.row).is_lt()) {
                merged.push(other);
            }
            if let Some(other) = waiting.next_if(|other| order(&other.row, &point.row).is_eq()) {
                point.row.value.merge(&other.row.value, point.row.metric.kind);
                point.start_ns = point.start_ns.min(other.start_ns);
                point.at_ns = point.at_ns.max(other.at_ns);
            }
            merged.push(point);
        }
        merged.extend(waiting);
        if merged.len() > MAX_PENDING {
            self.given_up += keep_living(&mut merged, &self.last);
        }
        self.pending = merged;
    }
}

/// Lets go of series that are not published any more. Says of how many.
fn keep_living(pending: &mut Vec<Point>, last: &[Point]) -> u64 {
    let before = pending.len();
    pending.retain(|point| last.binary_search_by(|known| order(&known.row, &point.row)).is_ok());
    (before - pending.len()) as u64
}

/// What a counter grew by. `None` when it fell: it has started again.
fn since(now: &Value, before: &Value) -> Option<Value> {
    match (now, before) {
        (Value::Unsigned(now), Value::Unsigned(before)) => now.checked_sub(*before).map(Value::Unsigned),
        (Value::Distribution(now), Value::Distribution(before)) => later(now, before),
        _ => {
            let grown = now.as_f64() - before.as_f64();
            (grown >= 0.0).then_some(Value::Float(grown))
        }
    }
}

fn later(now: &Distribution, before: &Distribution) -> Option<Value> {
    if now.buckets.len() != before.buckets.len() || now.sum_seconds < before.sum_seconds {
        return None;
    }
    let buckets = now.buckets.iter().zip(&before.buckets);
    let buckets = buckets
        .map(|((bound, now), (_, before))| Some((*bound, now.checked_sub(*before)?)))
        .collect::<Option<Vec<_>>>()?;
    Some(Value::Distribution(Distribution { sum_seconds: now.sum_seconds - before.sum_seconds, buckets }))
}

#[cfg(test)]
mod tests;
